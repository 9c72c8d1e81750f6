"""Makes the README's tables and pictures: `make docs`. What is measured comes from results/, never from here."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot
from torch import Tensor

from varifocal import MECHANISMS, HeadShape, Scale, make_mechanism
from varifocal.attention.weights import attention_weights
from varifocal.bench.field import CONTEXT, field_table
from varifocal.experiments.comparison_plan import load_plan
from varifocal.plan.hardware import find_gpu
from varifocal.plan.paper_plan import WAYS, paper_checks
from varifocal.plan.predictions import predict_all
from varifocal.report.attention_bench import growth_of_time, speedup_table
from varifocal.report.attention_bench_plot import plot_attention_bench
from varifocal.report.comparison_tables import (
    cost_legend,
    cost_table,
    loss_table,
    millions,
    our_setting,
    recall_table,
    scaled_down,
    signed,
    time_legend,
    time_table,
    verdicts,
    with_interval,
)
from varifocal.report.data_bench import reading_table
from varifocal.report.decode_bench import loss_sentence, speculation_sentence, speed_table
from varifocal.report.decode_bench_plot import plot_decode_bench
from varifocal.report.focus import fact_table, summary_table
from varifocal.report.focus import loss_table as loss_table_of_focus
from varifocal.report.focus_plot import plot_focus
from varifocal.report.gpu_check import compiled_table, interpreted_table, state_table
from varifocal.report.model_bench import model_table
from varifocal.report.papers import papers_page
from varifocal.report.plan_check import error_table, plan_table
from varifocal.report.retrofit import retrofit_table
from varifocal.report.serving_bench import capacity_table, settings_sentence
from varifocal.report.serving_bench import speed_table as serving_table
from varifocal.report.serving_bench_plot import plot_serving_bench
from varifocal.report.table import markdown, p_text
from varifocal.results.attention_bench import AttentionBench
from varifocal.results.conformance import read_conformance
from varifocal.results.data_bench import DataBench
from varifocal.results.decode_bench import DecodeBench
from varifocal.results.focus import FocusMeasure
from varifocal.results.gpu_check import GpuCheck
from varifocal.results.model_bench import ModelBench
from varifocal.results.plan_check import PlanCheck
from varifocal.results.retrofit import RetrofitResult
from varifocal.results.serving_bench import ServingBench
from varifocal.statistics.comparison import Comparison, read_comparison

TOP = Path(__file__).parent.parent
TOKENS = 96
BENCHES = ("attention_bench.json", "family_growth.json", "family_bench.json", "family_bias.json", "family_entmax.json")
"""Where speeds of mechanisms are looked for, in this order."""
COMPARISONS = ("fineweb/comparison.json", "family/comparison.json")
"""Where losses are looked for."""


def attention_pattern(name: str) -> Tensor:
    """What each query [T] reads of each key [S], for random inputs."""
    torch.manual_seed(4)
    shape = HeadShape(model_width=32, heads=1, kv_heads=1, head_width=TOKENS)
    scale = Scale(context=TOKENS, window=16, head_width=TOKENS)
    mechanism = make_mechanism(name, shape, **MECHANISMS[name].scaled_options(scale))
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.15)
        x, q, k = torch.randn(1, TOKENS, 32), torch.randn(1, 1, TOKENS, TOKENS), torch.randn(1, 1, TOKENS, TOKENS)
    return attention_weights(mechanism, x, q, k).mixed[0]


def draw_mechanisms(path: Path) -> None:
    """A panel for each mechanism: queries downwards, keys to the right, darker where more is read."""
    columns = 3
    rows = -(-len(MECHANISMS.ours) // columns)
    figure, panels = pyplot.subplots(rows, columns, figsize=(9, 3.1 * rows + 0.1), layout="constrained", squeeze=False)
    for panel in panels.flat[len(MECHANISMS.ours) :]:
        panel.set_axis_off()
    for panel, name in zip(panels.flat, MECHANISMS.ours, strict=False):
        panel.imshow(
            attention_pattern(name).clamp(min=0).pow(0.4), cmap="magma_r", vmin=0, vmax=0.8, interpolation="nearest"
        )
        panel.set_title(name, fontsize=11, family="monospace")
        panel.set_xticks([])
        panel.set_yticks([])
    panels[-1, 0].set_xlabel("key")
    panels[-1, 0].set_ylabel("query")
    figure.savefig(path, dpi=110)


def conformance_table(path: Path) -> str:
    """The findings of `varifocal check --json` as a Markdown table."""
    findings = read_conformance(path)
    marks = {"kept": "✓", "broken": "✗", "not offered": "·"}
    rows = [finding.row for finding in findings[0].findings]
    lines = [f"| | {' | '.join(rows)} |", "| --- |" + " :-: |" * len(rows)]
    lines += [
        f"| {result.name} | {' | '.join(marks[finding.verdict] for finding in result.findings)} |"
        for result in findings
    ]
    return "\n".join(lines)


def kernels(bench: AttentionBench) -> str:
    """A short table for the README: a training pass of the mechanisms, with the reason for each empty cell."""
    shared, lengths = bench.environment, (2048, 8192, 32768)
    table = [["", *(f"n = {length}" for length in lengths), "memory at 8192"]]
    for name in ("torch sdpa causal", "dense", "head_gated", "context_adaptive blocks", "local", "sparse_geometric"):
        cells = []
        for length in lengths:
            row = bench.row(name, "training", length)
            cells.append(f"{row.speedup:.2f}x" if row else "quadratic, left out")
        row = bench.row(name, "training", 8192)
        memory = f"{row.memory_ratio:.2f}x" if row and row.memory_ratio else "not measured"
        table.append([name, *cells, memory])
    told = (
        f"Attention forward and backward, {bench.workload.words}, {shared.threads} threads of {shared.processor}. The "
        "baseline, 1.00x, is torch's own `scaled_dot_product_attention(is_causal=True)` in the same run; above 1 is "
        "faster, and below 1 takes less memory. `sparse_geometric` evaluates a network for every pair and is slower "
        "than dense attention at every length."
    )
    return f"{markdown(table)}\n\n{told}"


def focus(file: Path) -> str:
    """What a focused model costs and saves."""
    result = FocusMeasure.read(file)
    dense = [row for row in result.losses if row.name == "dense"]
    losses = ", ".join(
        f"{sum(sum(one) / len(one) for one in row.documents) / len(row.documents):.3f} on {row.texts}" for row in dense
    )
    told = (
        f"{Path(result.source).stem}, weights as they are; the other heads read {result.window} keys and the first "
        f"{result.sinks} tokens. Rise of the loss, nats a token, over dense ({losses}) on the same tokens of "
        "documents that were not fitted on, with 95 % intervals over so many documents; facts found of those that the "
        "dense model finds; an empty cell was not measured."
    )
    return f"{markdown(summary_table(result))}\n\n{told}"


def performance(bench: AttentionBench) -> str:
    """Speed of a training pass, its memory at 8192 tokens, and decoding."""
    shared = bench.environment
    table = speedup_table(bench, "training")
    table[0].append("memory, n = 8192")
    for line in table[1:]:
        row = bench.row(line[0], "training", 8192)
        line.append(f"{row.memory_ratio:.2f}x" if row and row.memory_ratio else "")
    where = (
        f"Forward and backward, {bench.workload.words}, {shared.threads} threads of {shared.processor}, torch "
        f"{shared.torch}; speed and memory are ratios to `{bench.baseline}` in the same run. `{shared.command}`, "
        f"commit {shared.commit}."
    )
    parts = [where, markdown(table)]
    if "decode" in bench.passes():
        parts += ["One token against a cache of n keys:", markdown(speedup_table(bench, "decode"))]
    return "\n\n".join(parts)


def bars(bench: AttentionBench) -> str:
    """What was aimed at and what was measured, forward and backward; peak memory and decoding below."""
    aims = {
        "dense": {1024: 1.0, 2048: 1.0, 4096: 1.0, 8192: 1.0},
        "head_gated": {1024: 0.95, 2048: 0.95, 4096: 0.97, 8192: 0.97},
        "local": {1024: 1.3, 2048: 2.2, 4096: 4.3, 8192: 8.0, 32768: 30.0},
        "context_adaptive exact": {2048: 1.2, 4096: 1.8, 8192: 2.5},
        "context_adaptive blocks": {2048: 1.5, 4096: 3.0, 8192: 5.0, 32768: 15.0},
        "sparse_geometric": {2048: 0.4, 4096: 0.4, 8192: 0.4},
    }
    lengths = (1024, 2048, 4096, 8192, 32768)
    table = [["measured (aim)", *(f"n = {length}" for length in lengths), "memory at 8192 (aim)"]]
    for name, wanted in aims.items():
        cells = []
        for length in lengths:
            row = bench.row(name, "training", length)
            aim = f" ({wanted[length]:g})" if length in wanted else ""
            cells.append(f"{row.speedup:.2f}{aim}" if row else aim.strip())
        row = bench.row(name, "training", 8192)
        known = row is not None and row.memory_ratio is not None
        aim = f"({1.2 if name == 'sparse_geometric' else 1.0:g})"
        cells.append(f"{row.memory_ratio:.2f} {aim}" if row and known else f"not measured {aim}")
        table.append([name, *cells])
    growth = {name: growth_of_time(bench, name, "training") for name in ("local", "context_adaptive blocks")}
    dense = bench.row("dense", "training", 4096)
    sizes = bench.workload
    products = 7 * sizes.heads * sizes.head_width * 4096**2 / dense.seconds / 1e9 if dense else 0.0
    blocks, plain = (bench.row(name, "decode", 32768) for name in ("context_adaptive blocks", "dense"))
    reached = max(bench.lengths("training"))
    lines = [
        f"Growth of time between 4096 and {reached}: local n^{growth['local'] or 0:.2f} (aim 1.1), context_adaptive by "
        f"blocks n^{growth['context_adaptive blocks'] or 0:.2f} (aim 1.6). Dense at 4096 runs at {products:.0f} "
        f"GFLOP/s, {products / bench.matmul_gflops:.0%} of torch's matrix product in the same run.",
    ]
    if blocks and plain:
        lines.append(
            f"Decoding a token at 32768 keys, context_adaptive by blocks: {blocks.speedup:.1f} times "
            f"torch's dense attention, {plain.seconds / blocks.seconds:.1f} times our own (aim 5)."
        )
    return "\n\n".join([markdown(table), *lines])


def model_bench(files: list[Path]) -> str:
    """Tables of `varifocal bench model`, one after the other, with their commands and notes."""
    parts = []
    for bench in map(ModelBench.read, files):
        shared = bench.environment
        parts.append(f"`{shared.command}`, commit {shared.commit}, {shared.threads} threads.")
        parts += bench.notes
        for kind, title in (("training", "A training step:"), ("decode", "Decoding, one token at a time:")):
            parts += [title, markdown(model_table(bench, kind))]
    return "\n\n".join(parts)


def decoding(bench: DecodeBench) -> str:
    """The tables of `varifocal bench decode`, with its command, what int8 weights cost and what speculation gains."""
    shared = bench.environment
    parts = [
        f"`{shared.command}`, commit {shared.commit}, {shared.threads} threads of {shared.processor}, torch "
        f"{shared.torch}; memory {bench.memory_gigabytes_per_second:.1f} GB/s. In brackets: the speed against "
        f"`{bench.rows[0].against}` in the same run, and the share of the bandwidth.",
    ]
    for texts in dict.fromkeys(row.texts for row in bench.rows):
        parts.append("" if texts == 1 else f"{texts} texts at once, tokens of all together:")
        parts.append(markdown(speed_table(bench, texts)))
    parts += bench.notes
    parts += [*map(loss_sentence, bench.losses), *map(speculation_sentence, bench.speculation)]
    return "\n\n".join(part for part in parts if part)


def serving(bench: ServingBench, whole: ServingBench | None) -> str:
    """What fits, of a whole model too, and how fast requests are answered, each with its command."""
    shared = bench.environment
    parts = [f"`{shared.command}`, commit {shared.commit}, {shared.threads} threads of {shared.processor}:"]
    parts += [markdown(capacity_table(bench))]
    parts += [markdown(serving_table(bench, one)) for one in dict.fromkeys(row.setting for row in bench.rows)]
    parts += [f"{settings_sentence(bench)}.", "![What fits, requests a second and memory](pictures/serving.png)"]
    if whole is not None:
        parts += [f"What fits of the whole model, `{whole.environment.command}`:", markdown(capacity_table(whole))]
    return "\n\n".join(parts)


def narrow_loss(bench: DecodeBench) -> str:
    """What int8 weights cost on a text, with the command; its speeds are not told, which took few tokens."""
    shared = bench.environment
    told = f"`{shared.command}`, commit {shared.commit}, on {shared.processor}:"
    return "\n".join([told, "", *(f"- {loss_sentence(one)}" for one in bench.losses)])


def summary(bench: ModelBench, comparison: Comparison) -> str:
    """One line for each mechanism: what a training step costs against Hugging Face's, and the loss against dense."""
    rows = {row.name: row for row in bench.of("training")}
    (length,) = {row.length for row in rows.values()}
    losses = {result.name: result for result in comparison.results}
    table = [["", "speed", "memory", "validation loss", f"against {comparison.baseline}"]]
    for name, row in rows.items():
        result = losses.get(name.removesuffix(" exact"))
        memory = "" if row.memory_ratio is None else f"{row.memory_ratio:.2f}x"
        if result is None:
            loss = ["not trained", "baseline of speed alone" if name.startswith("qwen3") else "not trained"]
        else:
            loss = [with_interval(result.validation_loss), signed(result.difference) or "baseline of losses"]
        table.append([name, f"{row.speedup:.2f}x", memory, *loss])
    seeds = max(len(result.seeds) for result in comparison.results)
    step, compared = bench.environment, comparison.command
    told = (
        f"Speed and memory: a training step of {bench.preset} at {length} tokens against Hugging Face's Qwen3 with "
        f"SDPA on the same weights, on {step.processor}: `{step.command}`, "
        f"memory by `--memory-of` that file. Losses: a small model on FineWeb, "
        f"same data and budget, {seeds} seeds, ± half of the 95 % interval, differences paired by seed; an interval "
        f"that holds 0 shows no difference: `{compared}`. `our loss` is Qwen3's layers with our cross entropy: it "
        "tells the gain of the loss from that of the attention."
    )
    return f"{markdown(table)}\n\n{told}"


def field(results: Path) -> str:
    """The whole field: a row for every mechanism, where its numbers are from, and why cells are empty."""
    benches = {name: AttentionBench.read(file) for name in BENCHES if (file := results / name).exists()}
    comparisons = {name: read_comparison(file) for name in COMPARISONS if (file := results / name).exists()}
    table, reasons = field_table(list(benches.values()), list(comparisons.values()))
    told = [
        f"For texts of {CONTEXT:,} tokens, {HeadShape().heads} heads of {HeadShape().head_width}. **Keys a query**: "
        "how many a query of a head reads on average. **Cache**: what a layer keeps of the text, beside dense "
        "attention. "
        "**Speed**: forward and backward beside torch's own causal attention (1.00x) in the same run, from "
        + ", ".join(f"[{name}](results/{name}) ({bench.environment.processor})" for name, bench in benches.items())
        + ". **Loss**: validation loss less that of dense attention at the same budget, ± half of the 95 % "
        "interval over seeds, from "
        + ", ".join(f"[{name}](results/{name}) ({our_setting(one)})" for name, one in comparisons.items())
        + ". Each file names its command; the first that has a mechanism counts.",
        " ".join(reasons),
    ]
    head, _, *body = markdown(table).splitlines()
    lines = [head, "| --- | --- | --- | ---: | ---: | ---: | ---: |", *body]
    return "\n\n".join(["\n".join(lines), *filter(None, told)])


def plan_check(check: PlanCheck) -> str:
    """Errors of the cost model by preset, and every step behind them."""
    shared = check.environment
    clock = "wall clock" if check.clock == "wall" else "processor time, on a machine that others used too"
    where = f"`{shared.command}`, commit {shared.commit}, {shared.threads} threads of {shared.processor}, {clock}."
    return "\n\n".join([where, markdown(error_table(check)), markdown(plan_table(check))])


def expected_runs(config: Path) -> str:
    """What each cell of the comparison for 8 GPUs is predicted to take, and all of them together."""
    plan, gpus = load_plan(config), {"a100": "8 A100", "h100": "8 H100"}
    optimization = plan.base.optimization
    assert optimization.tokens is not None
    arms = [arm for arm in plan.arms if arm.reference is None]
    found = {
        gpu: predict_all(
            str(plan.base.model.preset),
            find_gpu(gpu),
            names=[str(arm.mechanism) for arm in arms],
            tokens=optimization.tokens,
            context=optimization.length,
            batch=optimization.batch,
            micro_batch=optimization.micro_batch,
        ).predictions
        for gpu in gpus
    }
    table = [["", "memory", *(f"hours a cell, {gpu}" for gpu in gpus), "cells"]]
    hours = dict.fromkeys(gpus, 0.0)
    for arm in arms:
        # An ablation is predicted to take what the mechanism in full takes.
        cells = len(plan.seeds) * sum(one.mechanism == arm.mechanism for one in plan.arms)
        each = [found[gpu][str(arm.mechanism)] for gpu in gpus]
        for gpu, one in zip(gpus, each, strict=True):
            hours[gpu] += cells * one.hours
        memory = f"{each[0].peak / 1e9:.0f} GB"
        table.append([str(arm.mechanism), memory, *(f"{one.hours:.1f}" for one in each), str(cells)])
    days = ", ".join(f"{hours[gpu] / 8 / 24:.1f} days on {name}" for gpu, name in gpus.items())
    told = (
        f"{len(plan.cells())} cells of {optimization.tokens / 1e6:.0f}M tokens, {len(plan.seeds)} seeds each; "
        f"ablations counted with their mechanism: {days}. Predicted by `varifocal plan` from data sheets, none of it "
        "measured."
    )
    return f"{markdown(table)}\n\n{told}"


def papers_order() -> str:
    """The papers' memory and speed beside the cost model's, and a sentence for each pair in another order."""
    table = [["ratio to the baseline", "paper", *WAYS]]
    sentences: list[str] = []
    for paper, ways in paper_checks(find_gpu("a100")):
        for rows in zip(*(check.rows for check in ways.values()), strict=True):
            ours = [f"{row.predicted:.2f}" for row in rows]
            quantity = ways[WAYS[0]].quantity
            table.append([f"{quantity}: {rows[0].method} (`{rows[0].mechanism}`)", f"{rows[0].paper:.2f}", *ours])
        for way, check in ways.items():
            sentences += [f"- {paper.name}, {way}: {sentence}." for sentence in check.disagreements]
    return "\n\n".join([markdown(table), "Pairs in another order than the paper's:", "\n".join(sentences)])


def gpu_check(found: GpuCheck) -> str:
    """How far the kernels for GPUs have come, with the command."""
    shared = found.environment
    size = f"`{shared.command}`, commit {shared.commit}, torch {shared.torch}. Work is that of {found.size}."
    tables = [state_table(found), interpreted_table(found), compiled_table(found)]
    return "\n\n".join([size, *(markdown(table) for table in tables if len(table) > 1)])


def fill(text: str, block: str, content: str) -> str:
    """The text with the content between the block's two markers."""
    begin, end = f"<!-- {block}:begin -->", f"<!-- {block}:end -->"
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n{content}\n{end}{tail}"


def equal_time(results: Path) -> str:
    """For each length of text: what every arm reached in the same processor time, with the command."""
    files = sorted(results.glob("equal_time_*/comparison.json"), key=lambda file: int(file.parent.name.split("_")[-1]))
    table, told = [["texts of", "", "tokens read", "validation loss", "against dense", "p (Holm)"]], []
    for file in files:
        comparison = read_comparison(file)
        for result in comparison.results:
            difference = result.difference_at_time
            assert result.tokens is not None
            table.append([
                f"{comparison.setting.length:,}",
                f"`{result.name}`",
                millions(round(result.tokens.mean)),
                with_interval(result.loss_at_time),
                "baseline" if difference is None else signed(difference),
                "" if difference is None else p_text(result.adjusted_p_at_time),
            ])  # fmt: skip
        told.append(
            f"{our_setting(comparison)}: `{comparison.command}`, commit {comparison.record.environment.commit}."
        )
    shown = (
        "Mean over seeds ± half of the 95 % interval, differences paired by seed. Processor time is that of training "
        "alone, on one thread."
    )
    return "\n\n".join([markdown(table), " ".join([shown, *told])])


def is_same(page: Path, text: str) -> bool:
    """Whether the page holds this text."""
    return page.exists() and text == page.read_text(encoding="utf-8")


def comparison_block(comparison: Comparison) -> str:
    """Losses, what they allow to say, recall and cost of a comparison, with its command."""
    shared = comparison.record.environment
    parts = [
        f"`{shared.command}`, commit {shared.commit}. {scaled_down(comparison)}",
        markdown(loss_table(comparison)),
        "\n".join(f"- {sentence}" for sentence in verdicts(comparison)),
    ]
    if comparison.setting.seconds is not None and (times := time_table(comparison)) is not None:
        parts += [markdown(times), time_legend(comparison)]
    if (recall := recall_table(comparison)) is not None:
        parts.append(markdown(recall))
    return "\n\n".join([*parts, markdown(cost_table(comparison)), cost_legend(comparison)])


def experiments(results: Path) -> dict[str, str]:
    """The blocks of EXPERIMENTS.md that result files fill, by name; those without a result stay as they are."""
    blocks: dict[str, str] = {}
    if (file := results / "attention_bench.json").exists():
        blocks["bars"] = bars(AttentionBench.read(file))
    if files := [file for length in (2048, 8192) if (file := results / f"model_bench_{length}.json").exists()]:
        blocks["model"] = model_bench(files)
    if (file := results / "data_bench.json").exists():
        blocks["data"] = markdown(reading_table(DataBench.read(file)))
    if (file := results / "retrofit_smollm2.json").exists():
        blocks["retrofit"] = markdown(retrofit_table(RetrofitResult.read(file)))
    if (file := results / "equal_time_rates.json").exists():
        blocks["equal_time_rates"] = markdown(loss_table(read_comparison(file)))
    if (file := results / "focus_smollm2.json").exists():
        focused = FocusMeasure.read(file)
        tables = [loss_table_of_focus(focused), fact_table(focused)]
        blocks["focus_losses"] = "\n\n".join(markdown(table) for table in tables if len(table) > 1)
    for file in sorted(results.glob("*/comparison.json")):
        blocks[file.parent.name] = comparison_block(read_comparison(file))
    return blocks


def main() -> None:
    """Write the README and EXPERIMENTS anew, and their pictures."""
    readme = TOP / "README.md"
    filled = readme.read_text(encoding="utf-8")
    promises, backends = TOP / "docs/conformance.md", TOP / "docs/backends.md"
    kept = fill(
        promises.read_text(encoding="utf-8"), "conformance", conformance_table(TOP / "results/conformance.json")
    )
    measured, evaluated = TOP / "results/attention_bench.json", backends.read_text(encoding="utf-8")
    if measured.exists():
        filled = fill(filled, "kernels", kernels(AttentionBench.read(measured)))
        evaluated = fill(evaluated, "performance", performance(AttentionBench.read(measured)))
    if (checked_gpus := TOP / "results/gpu_check.json").exists():
        evaluated = fill(evaluated, "gpu-check", gpu_check(GpuCheck.read(checked_gpus)))
    if (focused := TOP / "results/focus_smollm2.json").exists():
        filled = fill(filled, "focus", focus(focused))
    filled = fill(filled, "mechanisms", field(TOP / "results"))
    compared_in_time = equal_time(TOP / "results")
    filled = fill(filled, "equal-time", compared_in_time)
    whole, compared = TOP / "results/model_bench_2048.json", TOP / "results/fineweb/comparison.json"
    if whole.exists() and compared.exists():
        filled = fill(filled, "results", summary(ModelBench.read(whole), read_comparison(compared)))
    log = TOP / "EXPERIMENTS.md"
    told = log.read_text(encoding="utf-8")
    for block, content in experiments(TOP / "results").items():
        told = fill(told, block, content)
    scaling = TOP / "docs/scaling.md"
    planned = fill(scaling.read_text(encoding="utf-8"), "papers", papers_order())
    if (checked := TOP / "results/plan_check.json").exists():
        planned = fill(planned, "plan-check", plan_check(PlanCheck.read(checked)))
    decoded = TOP / "docs/decoding.md"
    speeds = decoded.read_text(encoding="utf-8")
    if (timed := TOP / "results/decode.json").exists():
        speeds = fill(speeds, "decode", decoding(DecodeBench.read(timed)))
    for block, write in {"decode-loss": narrow_loss}.items():
        if (file := TOP / f"results/{block.replace('-', '_')}.json").exists():
            speeds = fill(speeds, block, write(DecodeBench.read(file)))
    served = TOP / "docs/serving.md"
    answered = served.read_text(encoding="utf-8")
    if (asked := TOP / "results/serving.json").exists():
        counted = TOP / "results/serving_whole.json"
        whole = ServingBench.read(counted) if counted.exists() else None
        answered = fill(answered, "serving", serving(ServingBench.read(asked), whole))
    pages = {readme: filled, promises: kept, backends: evaluated, log: told, scaling: planned, decoded: speeds}
    guide = TOP / "docs/comparison.md"
    pages[guide] = fill(guide.read_text(encoding="utf-8"), "equal-time", compared_in_time)
    recipes = TOP / "docs/recipes.md"
    pages[recipes] = fill(recipes.read_text(encoding="utf-8"), "claims", expected_runs(TOP / "configs/gpu/papers.toml"))
    found = {file.parent.name: read_comparison(file) for file in sorted((TOP / "results").glob("*/comparison.json"))}
    pages[TOP / "docs/papers.md"] = papers_page(found, command="make docs")
    pages[served] = answered
    if "--check" in sys.argv:
        stale = [page.name for page, text in pages.items() if not is_same(page, text)]
        sys.exit(f"{' and '.join(stale)} not what results/ say; run make docs" if stale else 0)
    for page, text in pages.items():
        page.write_text(text, encoding="utf-8")
    if measured.exists():
        plot_attention_bench(AttentionBench.read(measured), TOP / "docs/pictures/attention_bench.png")
    if timed.exists():
        plot_decode_bench(DecodeBench.read(timed), TOP / "docs/pictures/decode.png")
    if asked.exists():
        plot_serving_bench(ServingBench.read(asked), TOP / "docs/pictures/serving.png")
    if focused.exists():
        plot_focus(FocusMeasure.read(focused), TOP / "docs/pictures/focus.png")
    draw_mechanisms(TOP / "docs/pictures/mechanisms.png")


if __name__ == "__main__":
    main()
