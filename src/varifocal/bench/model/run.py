"""Runs the benchmark: contenders take turns at training and decoding, and memory is measured in separate processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from varifocal.bench.model.contenders import (
    BASELINE,
    LEAN_BASELINE,
    Contender,
    build,
    contender_names,
    share_weights,
)
from varifocal.bench.rows import is_worth_timing, row_mechanism
from varifocal.bench.step import Step
from varifocal.bench.timing import Times, take_turns
from varifocal.device import find_device
from varifocal.environment import environment
from varifocal.memory import in_own_process
from varifocal.plan.hardware import Precision, find_precision
from varifocal.results.model_bench import ModelBench, ModelRow

LARGEST_LOGITS = 3 * 2**30
"""Bytes of logits beyond which Hugging Face's own loss, which holds several copies of them, is not run."""
LONG_ROUND = 200.0
"""If a round takes more seconds than this, there is only one."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure."""

    preset: str = "qwen-134m"
    lengths: tuple[int, ...] = (2048, 8192)
    batch: int = 1
    names: tuple[str, ...] | None = None
    """Contenders beside the baselines; None for all that have a kernel."""
    layers: int | None = None
    """Fewer layers than the preset's, to try things out."""
    rounds: int = 3
    """Rounds in which all take turns, after a first round to warm up. If a round takes longer than 200 seconds, the
    first one is the only one."""
    memory: bool = True
    decode: int = 16
    """Tokens decoded after a text of each length; 0 for none."""
    device: str = "cpu"
    precision: Precision = "float32"

    def contenders(self, vocabulary: int, length: int) -> list[str]:
        """The contenders at a length. The others are measured against the first one."""
        baselines = (BASELINE, LEAN_BASELINE)
        if self.names is None:
            kind = find_device(self.device).place.type
            asked = [
                name for name in contender_names() if name in baselines or is_worth_timing(row_mechanism(name), kind)
            ]
        else:
            asked = [name for name in contender_names() if name in baselines or name in self.names]
        too_large = 4 * self.batch * length * vocabulary > LARGEST_LOGITS
        return [name for name in asked if name != BASELINE or not too_large]


def with_memory(bench: ModelBench, plan: Plan, *, on_step: Callable[[str], None] | None = None) -> ModelBench:
    """The result with the peak memory of every training row; where it is missing, it is measured in its own process."""
    base: dict[int, int] = {}
    rows = []
    for row in bench.rows:
        if row.kind == "training":
            taken = row.peak_bytes
            if taken is None:
                if on_step is not None:
                    on_step(f"memory of {row.name} at {row.length} tokens")
                taken = peak_bytes(row.name, plan, row.length)
            if row.name == row.against:
                base[row.length] = taken
            row = replace(row, peak_bytes=taken, memory_ratio=taken / base[row.length])
        rows.append(row)
    return replace(bench, rows=tuple(rows))


def measure_memory_of(
    file: Path, *, layers: int | None = None, device: str = "cpu", on_step: Callable[[str], None] | None = None
) -> ModelBench:
    """Add the peak memory to the training rows of a result file that have none."""
    bench = ModelBench.read(file)
    plan = Plan(
        preset=bench.preset,
        lengths=tuple(sorted({row.length for row in bench.rows})),
        batch=bench.batch,
        layers=layers,
        device=device,
        precision=find_precision(bench.precision),
    )
    found = with_memory(bench, plan, on_step=on_step)
    found.write(file)
    return found


def bench_model(plan: Plan, *, on_step: Callable[[Step], None] | None = None) -> ModelBench:
    """The result: environment, sizes, and a row for each contender, pass and length."""
    for name in plan.names or ():
        if name not in contender_names():
            raise ValueError(f"unknown contender {name!r}; known are {', '.join(contender_names())}")
    device = find_device(plan.device)
    kinds = 1 + bool(plan.decode)
    total = len(plan.lengths) * (kinds + plan.memory * len(contender_names() if plan.names is None else plan.names))
    done = 0

    def step(doing: str) -> None:
        nonlocal done
        done += 1
        if on_step is not None:
            on_step(Step(done - 1, total, doing))

    rows: list[ModelRow] = []
    notes: list[str] = []
    parameters: dict[str, int] = {}
    for length in plan.lengths:
        names = plan.contenders(vocabulary_of(plan), length)
        if BASELINE not in names:
            notes.append(
                f"at {length} tokens {BASELINE} is not run: its loss holds several copies of "
                f"{4 * plan.batch * length * vocabulary_of(plan) / 2**30:.1f} GB of logits; {LEAN_BASELINE} takes its "
                "place"
            )
        contenders = [
            build(
                name,
                plan.preset,
                context=max(plan.lengths),
                layers=plan.layers,
                device=device.place,
                precision=plan.precision,
            )
            for name in names
        ]
        parameters |= {one.name: sum(p.numel() for p in one.model.parameters()) for one in contenders}
        shared = share_weights(contenders)
        check_losses(contenders)
        step(f"training steps of {length} tokens")
        found = time_training(contenders, shared, plan, length)
        if plan.decode:
            step(f"decoding after {length} tokens")
            found += time_decoding(contenders, plan, length)
        del contenders, shared
        rows += found
    bench = ModelBench(
        environment=replace(environment(), device=device.description),
        preset=plan.preset,
        precision=plan.precision,
        batch=plan.batch,
        baseline=BASELINE,
        parameters=parameters,
        notes=tuple(notes),
        rows=tuple(rows),
    )
    return with_memory(bench, plan, on_step=step) if plan.memory else bench


def vocabulary_of(plan: Plan) -> int:
    """The preset's vocabulary size V."""
    from varifocal.model import PRESETS

    if plan.preset not in PRESETS:
        raise ValueError(f"unknown preset {plan.preset!r}; known are {', '.join(PRESETS)}")
    return PRESETS[plan.preset].vocabulary


def tokens(plan: Plan, length: int) -> Tensor:
    """Random tokens [B, T], the same for all."""
    generator = torch.Generator().manual_seed(length)
    return torch.randint(0, vocabulary_of(plan), (plan.batch, length), generator=generator).to(
        find_device(plan.device).place
    )


def check_losses(contenders: list[Contender]) -> None:
    """RuntimeError unless dense attention gives Hugging Face's loss and gradients, and every loss is finite."""
    ids = torch.arange(96, device=contenders[0].model.device).view(1, -1)
    # Two attentions that sum in different orders differ by the rounding of narrow products.
    allowed = 1e-4 if contenders[0].precision == "float32" else 1e-2
    answers: dict[str, tuple[float, float]] = {}
    for contender in contenders:
        contender.model.zero_grad(set_to_none=True)
        loss = contender.loss(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.get_total_norm([p.grad for p in contender.model.model.embed_tokens.parameters()])
        answers[contender.name] = (float(loss.detach()), float(norm))
        contender.model.zero_grad(set_to_none=True)
        if not torch.isfinite(loss):
            raise RuntimeError(f"{contender.name} has the loss {float(loss)}")
    wanted = answers[contenders[0].name]
    for name in (LEAN_BASELINE, "dense"):
        for got, want in zip(answers.get(name, wanted), wanted, strict=True):
            if abs(got - want) > allowed * abs(want):
                raise RuntimeError(f"{name} differs from {contenders[0].name}: {got} against {want}")


def time_training(
    contenders: list[Contender], shared: list[torch.nn.Parameter], plan: Plan, length: int
) -> list[ModelRow]:
    """Time the forward pass, the backward pass and a step of AdamW."""
    # One optimizer serves all: it skips parameters that have no gradient, and its state exists only once.
    optimizer = torch.optim.AdamW(shared, lr=1e-5, fused=True)
    ids = tokens(plan, length)

    def training_step(contender: Contender) -> Callable[[], None]:
        def run() -> None:
            contender.loss(ids).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        return run

    return take_turns_and_report({one.name: training_step(one) for one in contenders}, plan, length, "training")


def time_decoding(contenders: list[Contender], plan: Plan, length: int) -> list[ModelRow]:
    """Time greedy decoding, one token at a time, after a cached text."""
    ids = tokens(plan, length)
    runs: dict[str, Callable[[], None]] = {}
    # Both baselines are one model; only their losses differ.
    first = BASELINE if any(one.name == BASELINE for one in contenders) else LEAN_BASELINE
    for contender in contenders:
        name = BASELINE if contender.name == first else contender.name
        if name == LEAN_BASELINE:
            continue
        contender.model.eval()
        with torch.no_grad(), contender.precisely(ids.device):
            cache = contender.model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        runs[name] = decoding(contender, cache, ids[:, -1:], plan.decode)
    return take_turns_and_report(runs, plan, length, "decode")


def decoding(contender: Contender, cache: Any, token: Tensor, count: int) -> Callable[[], None]:
    """Decode `count` tokens; the cache keeps growing, by the same amount for each contender."""

    @torch.no_grad()
    def run() -> None:
        last = token
        with contender.precisely(token.device):
            for _ in range(count):
                answer = contender.model(input_ids=last, past_key_values=cache, use_cache=True, logits_to_keep=1)
                last = answer.logits[:, -1].argmax(dim=-1, keepdim=True)

    return run


def take_turns_and_report(runs: dict[str, Callable[[], None]], plan: Plan, length: int, kind: str) -> list[ModelRow]:
    """A row for each contender; speeds are relative to the first one, round by round."""
    device = find_device(plan.device)
    single = {name: device.seconds(run) for name, run in runs.items()}
    long = sum(single.values()) > LONG_ROUND
    rounds = 1 if long else plan.rounds
    times = (
        {name: Times((seconds,)) for name, seconds in single.items()}
        if long
        else take_turns(runs, rounds=rounds, device=device, warm_up=False)
    )
    first = next(iter(runs))
    count = plan.batch * (length if kind == "training" else plan.decode)
    return [
        ModelRow(
            name=name,
            kind=kind,
            length=length,
            seconds=times[name].median,
            tokens_per_second=count / times[name].median,
            spread=times[name].spread,
            rounds=rounds,
            against=first,
            speedup=times[first].speedup_of(times[name]),
            peak_bytes=None,
            memory_ratio=None,
        )
        for name in runs
    ]


def peak_bytes(name: str, plan: Plan, length: int) -> int:
    """Peak memory of training in its own process: weights, gradients, optimizer and activations."""
    task: dict[str, object] = {
        "name": name,
        "preset": plan.preset,
        "layers": plan.layers,
        "context": max(plan.lengths),
        "batch": plan.batch,
        "length": length,
        "vocabulary": vocabulary_of(plan),
        "threads": torch.get_num_threads(),
        "device": plan.device,
        "precision": plan.precision,
    }
    answer = in_own_process("varifocal.bench.model.memory_probe", task, timeout=3600)
    return int(str(answer["peak_bytes"]))
