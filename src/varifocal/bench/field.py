"""The whole field in one table: what each mechanism reads, from whom it is, and what it was measured to cost."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from varifocal.attention.mechanisms import MECHANISMS, HeadShape, Mechanism, make_mechanism
from varifocal.attention.mechanisms.base import Scale, typical_equation
from varifocal.plan.cost import remembered_bytes
from varifocal.results.attention_bench import AttentionBench
from varifocal.statistics.comparison import Comparison

CONTEXT = 8192
"""Tokens of the texts that costs and speeds are told for."""
WINDOW = 256
"""Keys of near branches, as `varifocal bench attention` has them."""
HEADER = ["mechanism", "reads", "from", "keys a query", "cache", "speed", "loss"]


def field_table(
    benches: Sequence[AttentionBench], comparisons: Sequence[Comparison]
) -> tuple[list[list[str]], list[str]]:
    """A row for each of our mechanisms, and sentences of what was measured otherwise and why cells are empty.

    Args:
        benches: a mechanism's speed is that of the first one that measured it.
        comparisons: its loss likewise, against the baseline of the same comparison.
    """
    table, slow, untrained = [HEADER], [], []
    dense = cache(at_scale("dense"))
    for name in MECHANISMS.ours:
        mechanism = at_scale(name)
        speed, loss = speed_of(name, benches), loss_of(name, comparisons)
        if not speed:
            slow.append(name)
        if not loss:
            untrained.append(name)
        table.append([
            f"[{name}](docs/mechanisms/{name}.md)",
            mechanism.words().removeprefix("no gate: ").removeprefix("no gate on branches: "),
            source_of(mechanism),
            f"{keys_read(mechanism):,.0f}",
            f"{cache(mechanism) / dense:.2f}",
            speed,
            loss,
        ])  # fmt: skip
    reasons = []
    if others := [name for name in MECHANISMS.ours if MECHANISMS[name].bench_options]:
        told = (f"`{name}` with {options_in_words(MECHANISMS[name].bench_options)}" for name in others)
        reasons.append(f"Speeds are those of {', '.join(told)}; of the others with the options of the benchmark.")
    if slow:
        reasons.append(f"No speed: {', '.join(f'`{name}`' for name in slow)}, in none of the runs named above.")
    if untrained:
        reasons.append(
            f"No loss: {', '.join(f'`{name}`' for name in untrained)}, in none of the comparisons named above."
        )
    return table, reasons


def at_scale(name: str) -> Mechanism[Any]:
    """The mechanism with the heads of the papers' model and options for texts of CONTEXT tokens."""
    shape = HeadShape()
    scale = Scale(context=CONTEXT, window=WINDOW, head_width=shape.head_width, kv_heads=shape.kv_heads)
    return make_mechanism(name, shape, **MECHANISMS[name].scaled_options(scale))


def keys_read(mechanism: Mechanism[Any]) -> float:
    """Keys that an average query of a head reads."""
    return typical_equation(mechanism, CONTEXT).keys_read(torch.arange(CONTEXT))


def cache(mechanism: Mechanism[Any]) -> float:
    """Bytes that a layer keeps of a text, at the most."""
    memory = mechanism.memory()
    # With its last token a segment may be complete, and gone.
    return remembered_bytes(mechanism, 4) * max(memory.kept(CONTEXT - 1), memory.kept(CONTEXT))


def options_in_words(options: Mapping[str, Any]) -> str:
    """segment=512."""
    return ", ".join(f"{name}={value}" for name, value in options.items())


def source_of(mechanism: Mechanism[Any]) -> str:
    """From whom it is: what follows the colon in the first line of its file."""
    told = (sys.modules[type(mechanism).__module__].__doc__ or "").splitlines()[0]
    source = told.partition(": ")[2].removesuffix(".")
    return re.sub(r"arXiv:(\d+\.\d+)", r"[arXiv:\1](https://arxiv.org/abs/\1)", source)


def speed_of(name: str, benches: Sequence[AttentionBench]) -> str:
    """A training pass against the baseline of the same run, for each way to run the mechanism."""
    labels = list(MECHANISMS[name].ways) or [""]
    for bench in benches:
        rows = {label: bench.row(f"{name} {label}".strip(), "training", CONTEXT) for label in labels}
        if not any(rows.values()):
            # Measured before its other ways had rows of their own.
            rows = {"": bench.row(name, "training", CONTEXT)}
        found = [f"{row.speedup:.2f}x {label}".strip() for label, row in rows.items() if row is not None]
        if found:
            return ", ".join(found)
    return ""


def loss_of(name: str, comparisons: Sequence[Comparison]) -> str:
    """The validation loss against the baseline's, with the interval."""
    for comparison in comparisons:
        for result in comparison.results:
            if result.name != name:
                continue
            if name == comparison.baseline and result.validation_loss is not None:
                return f"{result.validation_loss.mean:.4f} (baseline)"
            if result.difference is not None:
                half = result.difference.half_width
                return f"{result.difference.mean:+.4f}" + ("" if half is None else f" ± {half:.4f}")
    return ""
