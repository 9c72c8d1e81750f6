"""The analysis of a model on data: how good selections are, patterns, widths and distances."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

from varifocal.analysis.contrasts import (
    RESAMPLES,
    Interval,
    Resampling,
    adjusted,
    contrast,
    mean_with_interval,
    resample,
)
from varifocal.analysis.observation import Observed, observe
from varifocal.analysis.patterns import CLEAR, FAR_KINDS, groups, kind_row, kinds_with_gains, pattern
from varifocal.analysis.token_kinds import KINDS
from varifocal.analysis.token_table import TokenTable, bin_edges
from varifocal.attention.mechanisms import Mechanism
from varifocal.attention.mechanisms.base import typical_equation
from varifocal.data import PreparedData
from varifocal.environment import environment
from varifocal.equations.branches import SoftWindow, TopK, Window, members
from varifocal.model.modeling import VarifocalForCausalLM
from varifocal.results.analysis import Analysis

QUANTITIES = {
    "gate": "weight of the near branch, where it has an effect",
    "width": "window in keys",
    "distance": "mean distance to the keys that top-k selected",
    "window_mass": "share of dense attention inside the window, beyond it",
}
"""The quantities that are broken down by kind of token and by position."""
RECOVERED = ("window", "top_k", "window_or_top_k", "chosen", "first", "distance")
WIDTH_BINS = 16
LOCAL, GLOBAL, RESTING = 0.9, 0.5, 0.5
"""A head is local above LOCAL of its mass in the window, global below GLOBAL, and at rest above RESTING on the first
token."""


@dataclass(frozen=True, kw_only=True)
class AnalysisPlan:
    """What to read, and what counts as near."""

    split: str = "validation"
    length: int | None = None
    """Tokens per row; None for the model's context."""
    tokens: int = 32_768
    """How many tokens to read, in rows spread evenly over the split."""
    window: int | None = None
    """Keys of the window; None for the mechanism's own, or an eighth of the length."""
    k_scale: float | None = None
    """The factor c in k = ceil(c sqrt(i + 1)); None for the mechanism's own, or 1."""
    resamples: int = RESAMPLES
    seed: int = 0
    """The seed of the resampling."""

    def __post_init__(self) -> None:
        for name, value, least in (("tokens", self.tokens, 1), ("resamples", self.resamples, 2)):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


def analyze(
    model: VarifocalForCausalLM,
    data: PreparedData,
    plan: AnalysisPlan | None = None,
    *,
    on_row: Callable[[int, int], None] | None = None,
) -> Analysis:
    """What the model's heads read and its gates decide, with intervals over documents.

    Args:
        model: any model of ours, or a pretrained one from `load_pretrained`.
        data: a data set that was prepared with the model's tokenizer.
        plan: what to read; by default 32,768 tokens of the validation split.
        on_row: called with the number of rows done and of all rows.
    """
    plan = plan or AnalysisPlan()
    own = own_options(model)
    length = plan.length or model.config.max_position_embeddings
    window = plan.window or own.get("window") or max(1, length // 8)
    if length <= window:
        raise ValueError(
            f"rows of {length} tokens do not reach beyond the window of {window}; give a longer length or a "
            "smaller window"
        )
    top_k = TopK(scale=own.get("k_scale", 1.0) if plan.k_scale is None else plan.k_scale, minimum=own.get("k_min", 1))
    split = data.split(plan.split)
    rows = spread_rows(len(split.rows(length=length)), max(1, plan.tokens // length))
    training = model.training
    model.eval()
    try:
        seen = observe(model, data, split, rows=rows, length=length, window=window, top_k=top_k, on_row=on_row)
    finally:
        model.train(training)
    if not (seen.positions >= window).any():
        raise ValueError(
            f"no document of the split {plan.split!r} is longer than the window of {window} tokens in these rows; "
            "give a smaller window"
        )
    content = {
        "experiment": "analysis",
        "environment": environment().to_json(),
        "mechanism": model.config.mechanism,
        "mechanism_options": model.config.mechanism_options,
        "layers": model.config.num_hidden_layers,
        "heads": model.config.num_attention_heads,
        "data": str(data.manifest.source.get("source", data.manifest.source).get("name", data.manifest.kind)),
        "data_fingerprint": data.fingerprint,
        "split": plan.split,
        "length": length,
        "window": window,
        "k_scale": top_k.scale,
        "k_min": top_k.minimum,
        "resamples": plan.resamples,
        "seed": plan.seed,
        **summed_up(seen, window=window, resamples=plan.resamples, seed=plan.seed),
    }
    return Analysis.from_json(as_plain(content))


def summed_up(seen: Observed, *, window: int, resamples: int, seed: int) -> dict[str, Any]:
    """All statistics of what was observed."""
    _, documents = numpy.unique(seen.documents, return_inverse=True)
    resampling = resample(int(documents.max()) + 1, resamples=resamples, seed=seed)
    known = numpy.isfinite(seen.gains)
    kinds = kinds_with_gains(seen.kinds, seen.gains)
    shape = next(iter(seen.values.values())).shape[1:]

    def table(values: NDArray[numpy.float32], flags: NDArray[numpy.bool_] = kinds) -> TokenTable:
        return TokenTable(documents, seen.positions, flags, values.reshape(len(values), -1))

    return {
        "tokens": len(documents),
        "documents": resampling.documents,
        "kinds": [
            {
                "kind": kind.name,
                "definition": kind.definition,
                "among": kind.among,
                "tokens": int(kinds[:, place].sum()),
            }
            for place, kind in enumerate((*KINDS, *FAR_KINDS))
        ],
        "selection": selection(seen, table, resampling, window=window, shape=(shape[0], shape[1])),
        "quantities": {
            name: {
                "meaning": meaning,
                **pattern(table(seen.values[name]), known, resampling, heads=(shape[0], shape[1])),
            }
            for name, meaning in QUANTITIES.items()
            if name in seen.values
        },
        "context_gain": context_gain(table(seen.gains[:, None], seen.next_kinds), resampling),
        "width_shares": width_shares(seen.values["width"]) if "width" in seen.values else None,
        "chosen_shares": distance_shares(seen.selected_shares) if seen.selected_shares.size else None,
    }


def selection(
    seen: Observed,
    table: Callable[[NDArray[numpy.float32]], TokenTable],
    resampling: Resampling,
    *,
    window: int,
    shape: tuple[int, int],
) -> dict[str, Any]:
    """The share of dense attention mass that a window and top-k recover, by layer and head."""
    beyond = seen.positions >= window
    found: dict[str, Interval] = {
        name: mean_with_interval(table(seen.values[f"{name}_mass"]), beyond, resampling)
        for name in RECOVERED
        if f"{name}_mass" in seen.values
    }
    places = seen.positions[beyond] + 1
    return {
        "queries": int(beyond.sum()),
        # A head without any preference would have this share inside the window.
        "uniform": float((window / places).mean()),
        **{name: {side: getattr(one, side).reshape(shape) for side in one._fields} for name, one in found.items()},
        "reach": [
            [reach(found["window"], found["first"], head) for head in range(layer * shape[1], (layer + 1) * shape[1])]
            for layer in range(shape[0])
        ],
        "shares": distance_shares(seen.mass_shares),
    }


def reach(window: Interval, first: Interval, head: int) -> str:
    """local, global or first token if the interval says so; otherwise, or without an interval, mixed."""
    if first.low[head] > RESTING:
        return "first token"
    if window.low[head] > LOCAL:
        return "local"
    return "global" if window.high[head] < GLOBAL else "mixed"


def context_gain(table: TokenTable, resampling: Resampling) -> dict[str, Any]:
    """What the text beyond the window is worth in nats, overall and by the kind of the predicted token."""
    known = numpy.isfinite(table.values[:, 0])
    whole = mean_with_interval(table, known, resampling)
    found = [(kind, contrast(table, inside & known, outside & known, resampling))
             for kind, inside, outside in groups(table.kinds, known)]  # fmt: skip
    adjusted_p = adjusted(numpy.array([one.p_value[0] for _, one in found])).tolist()
    gains = table.values[known, 0]
    return {
        "tokens": int(known.sum()),
        "mean": whole.mean[0],
        "low": whole.low[0],
        "high": whole.high[0],
        "clear": CLEAR,
        "helps": float((gains >= CLEAR).mean()),
        "harms": float((gains <= -CLEAR).mean()),
        "by_kind": [kind_row(kind, one, p) for (kind, one), p in zip(found, adjusted_p, strict=True)],
    }


def width_shares(widths: NDArray[numpy.float32]) -> dict[str, Any]:
    """A histogram [L, H, bins] of widths [N, L, H]; NaN for layers that have none."""
    least, most = float(numpy.nanmin(widths)), float(numpy.nanmax(widths))
    edges = numpy.linspace(least, most if most > least else least + 1, WIDTH_BINS + 1)
    counted = numpy.apply_along_axis(lambda one: numpy.histogram(one[numpy.isfinite(one)], edges)[0], 0, widths)
    counts = numpy.moveaxis(counted, 0, -1).astype(numpy.float64)
    with numpy.errstate(invalid="ignore"):
        return {"edges": edges, "shares": counts / counts.sum(axis=-1, keepdims=True)}


def distance_shares(shares: NDArray[numpy.float32]) -> dict[str, Any]:
    """Shares [L, H, D] with the least and the largest distance of each bin."""
    return {"bins": [bin_edges(place) for place in range(shares.shape[2])], "shares": shares}


def spread_rows(rows: int, wanted: int) -> NDArray[numpy.int64]:
    """The numbers of `wanted` rows spread evenly, so that many documents take part."""
    return numpy.unique(numpy.linspace(0, rows - 1, min(rows, wanted)).round().astype(numpy.int64))


def own_options(model: VarifocalForCausalLM) -> dict[str, Any]:
    """Window and k of the first layer whose equation has them."""
    found: dict[str, Any] = {}
    mechanisms = (one for one in model.model.layers.modules() if isinstance(one, Mechanism))
    branches = (branch for one in mechanisms for branch in typical_equation(one, 1).branches)
    for member in (member for branch in branches for member in members(branch)):
        if isinstance(member, Window) and (size := member.farthest()) is not None and size > 1:
            found.setdefault("window", size)
        elif isinstance(member, SoftWindow):
            found.setdefault("window", member.limit)
        elif isinstance(member, TopK):
            found.setdefault("k_scale", member.scale)
            found.setdefault("k_min", member.minimum)
    return found


def as_plain(value: Any) -> Any:
    """The value as JSON can hold it: arrays as lists, numbers with six digits, None for what is not finite."""
    if isinstance(value, dict):
        return {name: as_plain(one) for name, one in value.items()}
    if isinstance(value, numpy.ndarray | list | tuple):
        return [as_plain(one) for one in value]
    if isinstance(value, numpy.floating | float):
        return float(f"{float(value):.6g}") if math.isfinite(value) else None
    return int(value) if isinstance(value, numpy.integer) else value
