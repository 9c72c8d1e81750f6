"""Random calls of attend: everything about a trial follows from its seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from tests.fuzz.layouts import MEMORY_LAYOUTS, Shape
from varifocal import (
    Attended,
    Branch,
    Causal,
    DistanceBias,
    Dot,
    HeadScale,
    Indexer,
    PairGate,
    Prefix,
    RandomBlocks,
    Score,
    Segments,
    SoftWindow,
    Strided,
    TopK,
    Window,
    attend,
)
from varifocal.attention.attend import evaluate, lay_out
from varifocal.equations.equation import Equation
from varifocal.equations.scores.pair_gate import PairForm

Ask = Literal["gradients", "gradients_twice", "forward_mode", "autocast"]
"""What is asked of a call: its results and first derivatives; the derivatives of these; those along a tangent; the
results under autocast."""

WIDTH_STEPS = 4
"""Widths are multiples of 1/4: as a window closes on a key, the gradient of its width grows beyond measure."""
ABSURD = 10**8
"""A size far beyond any text: it must not cost memory."""


@dataclass(frozen=True, eq=False)
class Trial:
    """The arguments of one call, and what is asked of it."""

    seed: int
    words: tuple[str, ...]
    """What was drawn, for messages."""
    ask: Ask
    dtype: torch.dtype
    q: Tensor
    k: Tensor
    v: Tensor
    branches: tuple[Branch, ...]
    weights: Tensor | None
    score: Score
    documents: Tensor | None
    positions: Tensor | None
    wants_logsumexp: bool
    """Whether it is looked at; if not, as in a mechanism, closed branches may be left out."""
    upstream: Tensor
    """[B, H, T, D]: the gradient of the output."""
    bases: dict[str, Tensor]
    """Every floating-point tensor of the call by name, as it lies in memory."""
    learning: tuple[str, ...]
    """The names of those that require a gradient."""

    def attend(self, backend: str = "auto") -> Attended:
        """Run the call."""
        if not self.wants_logsumexp:
            layout = lay_out(self.q, self.k, self.v, documents=self.documents, positions=self.positions)
            equation = Equation(self.branches, self.weights, self.score)
            return evaluate(equation, self.q, self.k, self.v, layout=layout, backend=backend, wants_logsumexp=False)
        return attend(
            self.q, self.k, self.v, branches=self.branches, weights=self.weights, score=self.score,
            documents=self.documents, positions=self.positions, backend=backend,
        )  # fmt: skip

    def leaves(self) -> list[Tensor]:
        """The tensors that require a gradient."""
        return [self.bases[name] for name in self.learning]

    def on(self, bases: Mapping[str, Tensor]) -> Trial:
        """The same call on these very tensors."""
        return make_trial(self.seed, given=bases)

    def rebuilt(self, bases: Mapping[str, Tensor]) -> Trial:
        """The same call on other numbers, as leaves of their own."""
        learning = set(self.learning)
        return self.on({name: base.detach().clone().requires_grad_(name in learning) for name, base in bases.items()})

    def exact(self) -> Trial:
        """The same numbers in float64."""
        return self.rebuilt({name: base.detach().double() for name, base in self.bases.items()})

    def perturbed(self, by: float, seed: int) -> Trial:
        """In float64, every number off by up to `by` of itself: what no arithmetic of that precision can tell apart."""
        generator = torch.Generator().manual_seed(seed)
        return self.rebuilt({
            name: base.detach().double() * (1 + by * (2 * torch.rand(base.shape, generator=generator) - 1))
            for name, base in self.bases.items()
        })  # fmt: skip


@dataclass(eq=False)
class Draw:
    """Draws sizes and kinds from one stream, numbers from another: a call can be rebuilt on given numbers."""

    seed: int
    given: Mapping[str, Tensor] | None
    choose: random.Random
    numbers: torch.Generator
    dtype: torch.dtype = torch.float32
    learns: float = 1.0
    """The share of tensors that learn."""
    bases: dict[str, Tensor] = field(default_factory=dict)
    learning: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def chance(self, share: float) -> bool:
        """True so often."""
        return self.choose.random() < share

    def note(self, word: str) -> str:
        """Keep a word for messages."""
        self.words.append(word)
        return word

    def spread(self, *shape: int) -> Tensor:
        """Normal numbers."""
        return torch.randn(shape, dtype=torch.float64, generator=self.numbers)

    def even(self, *shape: int, low: float, high: float) -> Tensor:
        """Numbers spread evenly."""
        return torch.rand(shape, dtype=torch.float64, generator=self.numbers) * (high - low) + low

    def keep(self, name: str, base: Tensor, *, learns: bool | None = None, wide: bool = False) -> Tensor:
        """File a tensor in the trial's type (or in float32, if `wide`); a given one replaces it."""
        drawn = self.chance(self.learns)
        learns = drawn if learns is None else learns and drawn
        dtype = torch.float32 if wide else self.dtype
        kept = base.to(dtype).requires_grad_(learns) if self.given is None else self.given[name]
        self.bases[name] = kept
        if learns:
            self.learning.append(name)
        return kept

    def parameter(self, name: str, base: Tensor, *, learns: bool | None = None) -> Tensor:
        """A tensor beside q, k and v: float32 as gates make them, or of their type; sometimes with odd strides."""
        wide = self.chance(0.5)
        if base.ndim < 2 or not self.chance(0.4):
            return self.keep(name, base, learns=learns, wide=wide)
        turned = self.choose.sample(range(base.ndim), base.ndim)
        back = [turned.index(dimension) for dimension in range(base.ndim)]
        return self.keep(name, base.permute(turned).contiguous(), learns=learns, wide=wide).permute(back)


@dataclass(frozen=True)
class Sizes:
    """B batch, H query heads, G key heads, T queries, S keys, D head width."""

    B: int
    H: int
    G: int
    T: int
    S: int
    D: int


def make_trial(seed: int, given: Mapping[str, Tensor] | None = None) -> Trial:
    """The trial of a seed; on given numbers instead of its own, if there are any."""
    draw = Draw(seed, given, random.Random(seed), torch.Generator().manual_seed(seed))
    choose = draw.choose
    draw.dtype = choose.choices((torch.float32, torch.bfloat16), (3, 1))[0]
    draw.note(str(draw.dtype).removeprefix("torch."))
    asks: tuple[Ask, ...] = ("gradients", "gradients_twice", "forward_mode", "autocast")
    ask = choose.choices(asks, (16, 1, 1, 1))[0]
    draw.note(ask)
    sizes, positions = draw_sizes(draw)
    draw.learns = choose.choice((1.0, 1.0, 0.5, 0.0) if sizes.T > 8 else (1.0, 0.5, 0.0, 0.0))
    if ask in ("gradients_twice", "forward_mode"):
        draw.learns = 1.0 if ask == "gradients_twice" else 0.0
    documents = draw_documents(draw, sizes)
    q, k, v = draw_heads(draw, sizes, documents)
    branches = draw_branches(draw, sizes)
    score = draw_score(draw, sizes)
    aligned = sizes.T == sizes.S and positions is None
    branches = tuple(mended(draw, branch, score, sizes, aligned, number) for number, branch in enumerate(branches))
    draw.note(" + ".join(described(branch) for branch in branches))
    weights = draw_weights(draw, sizes, len(branches))
    wants_logsumexp = weights is None or draw.chance(0.5)
    shape = (sizes.B, sizes.H, sizes.T, sizes.D)
    layout = MEMORY_LAYOUTS[choose.choice(tuple(MEMORY_LAYOUTS))]
    upstream = layout.view(draw.keep("upstream", draw.spread(*layout.base(*shape)), learns=False), shape)
    return Trial(
        seed=seed, words=tuple(draw.words), ask=ask, dtype=draw.dtype, q=q, k=k, v=v, branches=branches,
        weights=weights, score=score, documents=documents, positions=positions,
        wants_logsumexp=wants_logsumexp, upstream=upstream,
        bases=draw.bases, learning=tuple(draw.learning),
    )  # fmt: skip


def draw_sizes(draw: Draw) -> tuple[Sizes, Tensor | None]:
    """Few tokens, some more than a tile, or a few queries against a long cache; and where the queries stand."""
    choose = draw.choose
    kind = draw.note(choose.choices(("few", "some", "decode", "empty"), (8, 6, 6, 1))[0])
    batch, kv_heads, group = choose.choice((1, 1, 2)), choose.choice((1, 2)), choose.choice((1, 2, 3))
    if kind == "decode":
        queries, keys = choose.choice((1, 1, 2, 5, 8)), choose.randint(20, 700)
    else:
        keys = choose.randint(1, 24) if kind == "few" else choose.randint(25, 150)
        queries = choose.choice((keys, keys, choose.randint(1, keys)))
    if kind == "empty":
        batch, queries, keys = choose.choice(((0, queries, keys), (1, 0, keys), (1, 0, 0), (2, 0, keys)))
    width = choose.choice((1, 3, 5, 8, 16, 17, 32, 64))
    sizes = Sizes(batch, kv_heads * group, kv_heads, queries, keys, width)
    draw.note(f"B={sizes.B} H={sizes.H} G={sizes.G} T={sizes.T} S={sizes.S} D={sizes.D}")
    positions = None
    if keys and draw.chance(0.15):
        rows = choose.choice(((queries,), (batch, queries)))
        positions = torch.randint(0, keys, rows, generator=torch.Generator().manual_seed(draw.seed))
        draw.note("positions")
    return sizes, positions


def draw_documents(draw: Draw, sizes: Sizes) -> Tensor | None:
    """None, or runs of ids, with padding before, after and between them or without."""
    if not draw.chance(0.4):
        return None
    generator = torch.Generator().manual_seed(draw.seed)
    most = draw.choose.choice((1, 2, 4, 12))
    ids = torch.randint(0, most, (sizes.B, sizes.S), generator=generator).sort(dim=1).values
    padding = draw.note(draw.choose.choice(("packed", "left_padded", "right_padded", "padded_between", "all_padding")))
    count = draw.choose.randint(0, sizes.S // 2)
    if padding == "left_padded":
        ids[:, :count] = -1
    elif padding == "right_padded":
        ids[:, sizes.S - count :] = -1
    elif padding == "padded_between":
        ids[ids == 1] = -1
    elif padding == "all_padding":
        ids[:1] = -1
    return ids


def draw_heads(draw: Draw, sizes: Sizes, documents: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, in memory layouts of their own, with ordinary numbers or extreme ones."""
    kinds = ("normal", "exact", "ties", "scores_of_263", "scores_of_1e4", "far_keys_win")
    values = draw.note(draw.choose.choices(kinds, (3, 2, 2, 3, 3, 3))[0])
    nan = documents is not None and draw.chance(0.3)
    found = []
    for name, heads, length in (("q", sizes.H, sizes.T), ("k", sizes.G, sizes.S), ("v", sizes.G, sizes.S)):
        kind = draw.choose.choices(tuple(MEMORY_LAYOUTS), (20, 8, *(2,) * (len(MEMORY_LAYOUTS) - 2)))[0]
        if kind != "plain":
            draw.note(f"{name}:{kind}")
        layout, shape = MEMORY_LAYOUTS[kind], (sizes.B, heads, length, sizes.D)
        base = draw.spread(*layout.base(*shape))
        if name != "v" and values != "normal":
            # Multiples of 1/4 have exact dot products, so that rankings have one answer.
            base = (base * 4).round() / 4 if values != "ties" else base.round().clamp(-1, 1)
            if name == "q":
                base = base * {"scores_of_263": 256, "scores_of_1e4": 8192}.get(values, 1)
        filled = layout.view(base, shape)
        if values == "far_keys_win" and filled.numel() and not layout.shares:
            if name == "q":
                filled[..., 0] = 4
            elif name == "k":
                filled[:, :, : 1 + length // 4, 0] += draw.choose.choice((64.0, 512.0))
        if nan and documents is not None and name != "q" and filled.numel() and not layout.shares:
            filled.masked_fill_((documents < 0)[:, None, :, None], float("nan"))
            draw.note(f"{name}:nan_in_padding")
        found.append(layout.view(draw.keep(name, base), shape))
    return found[0], found[1], found[2]


def draw_score(draw: Draw, sizes: Sizes) -> Score:
    """One of every kind."""
    choose = draw.choose
    kind = choose.choices(("dot", "scaled", "head_scale", "distance_bias", "pair_gate"), (6, 2, 2, 2, 2))[0]
    if kind == "dot":
        return Dot()
    if kind == "scaled":
        score: Score = Dot(choose.choice((0.0, 0.0, 0.7, -0.5, 1.0)))
        draw.note(repr(score))
        return score
    if kind == "head_scale":
        draw.note(kind)
        return HeadScale(draw.parameter("scale", draw.even(sizes.H, low=0.3, high=2.0) * choose.choice((1, 1, -1))))
    if kind == "distance_bias":
        distances = choose.choice((1, 4, 40, sizes.S + 3))
        rows: Shape = choose.choice(((sizes.H,), (sizes.B, sizes.H, sizes.T)))
        table = draw.spread(*rows, distances)
        if draw.chance(0.5):
            table[draw.even(*table.shape, low=0, high=1) < choose.choice((0.2, 0.9))] = float("-inf")
        draw.note(f"{kind} of {[*table.shape]}")
        return DistanceBias(draw.parameter("table", table))
    units = choose.choice((0, 1, 3, 5))
    forms: tuple[PairForm, ...] = ("product", "log", "threshold")
    form = choose.choice(forms)
    draw.note(f"{kind} {form} of {units} units")
    return PairGate(
        queries=draw.parameter("pair_queries", draw.spread(sizes.B, sizes.H, sizes.T, units)),
        keys=draw.parameter("pair_keys", draw.spread(sizes.B, sizes.H, sizes.S, units)),
        output=draw.parameter("pair_output", draw.spread(sizes.H, units)),
        bias=draw.parameter("pair_bias", draw.spread(sizes.H)) if draw.chance(0.5) else None,
        scale=draw.parameter("pair_scale", draw.even(sizes.H, low=0.5, high=2.0)) if draw.chance(0.5) else None,
        form=form,
        threshold=0.4,
    )


def draw_branches(draw: Draw, sizes: Sizes) -> tuple[Branch, ...]:
    """Up to four of any kind; or a mixture as a mechanism makes it, a near and a far part."""
    choose = draw.choose
    if not draw.chance(0.4):
        count = choose.choices((1, 2, 3, 4), (5, 5, 2, 1))[0]
        return tuple(draw_branch(draw, sizes, number) for number in range(count))
    window = choose.choice((1, 4, 16))
    near: Branch = choose.choice((Window(window), Window(window) | Prefix(1), None, None, None)) or draw_soft_window(
        draw, sizes, 0
    )
    far: Branch = choose.choice((Causal(), Causal(), TopK(), TopK(select="blocks", block=8), Prefix(3)))
    return (near, far) if draw.chance(0.7) else (far, near)


def draw_branch(draw: Draw, sizes: Sizes, number: int) -> Branch:
    """One of every kind, and unions."""
    choose = draw.choose
    size = choose.choice((1, 3, 7, 40, choose.randint(1, sizes.S + 2), ABSURD))
    kinds = (
        *("causal", "window", "head_windows", "prefix", "window_prefix", "soft", "soft", "soft_prefix"),
        *("top", "top", "top_self", "top_blocks", "top_blocks", "top_indexer", "segments", "segments"),
        *("strided", "random_blocks", "top_window"),
    )
    kind = choose.choice(kinds)
    if kind == "causal":
        return Causal()
    if kind == "window":
        return Window(size)
    if kind == "head_windows":
        return Window(tuple(choose.choice((1, 5, 60, None)) for _ in range(sizes.H)))
    if kind == "prefix":
        return Prefix(size)
    if kind == "window_prefix":
        return Window(size) | Prefix(choose.choice((1, 4)))
    if kind in ("soft", "soft_prefix"):
        soft = draw_soft_window(draw, sizes, number)
        return soft if kind == "soft" else soft | Prefix(2)
    if kind == "segments":
        return Segments(size)
    if kind == "strided":
        return Strided(min(size, 9))
    if kind == "random_blocks":
        return RandomBlocks(2, block=min(size, 16), seed=number) | Window(3)
    scale, minimum = choose.choice((0.0, 1.0, 1.7, 1e30)), choose.choice((1, 2, 5, ABSURD))
    if kind == "top":
        return TopK(scale=scale, minimum=minimum)
    if kind == "top_self":
        return TopK(scale=scale, minimum=minimum) | Window(1)
    if kind == "top_window":
        return TopK(scale=scale, minimum=minimum) | Window(size)
    if kind == "top_blocks":
        return TopK(scale=scale, minimum=minimum, select="blocks", block=size)
    heads = choose.choice((1, sizes.G, sizes.H))
    key_heads, rank = choose.choice((1, heads)), choose.choice((0, 1, 4))
    queries, keys = draw.spread(sizes.B, heads, sizes.T, rank), draw.spread(sizes.B, key_heads, sizes.S, rank)
    indexer = Indexer(
        draw.keep(f"index_queries{number}", queries, learns=False),
        draw.keep(f"index_keys{number}", keys, learns=False),
    )
    return TopK(
        scale=scale, minimum=minimum, select=choose.choice(("exact", "blocks")), block=min(size, 16), indexer=indexer
    )


def draw_soft_window(draw: Draw, sizes: Sizes, number: int) -> SoftWindow:
    """Widths inside their bounds, or anything: also below 0, where nothing is read."""
    edge, limit = draw.choose.choice((1.0, 2.0, 8.0)), draw.choose.choice((1, 6, 50, ABSURD, 10**10))
    low, high = draw.choose.choice(((edge, edge + 20), (-3.0, 5.0), (-3.0, -1.0), (0.0, 200.0)))
    width = draw.even(sizes.B, sizes.H, sizes.T, low=low, high=high)
    width = draw.parameter(f"width{number}", (width * WIDTH_STEPS).round() / WIDTH_STEPS)
    return SoftWindow(width, edge=edge, limit=limit)


def mended(draw: Draw, branch: Branch, score: Score, sizes: Sizes, aligned: bool, number: int) -> Branch:
    """The branch, or what comes closest to it that attend takes: segments need queries, and a score for summaries."""
    if not isinstance(branch, Segments):
        return branch
    if not score.rates_summaries:
        return Window(branch.length)
    if aligned and draw.chance(0.7):
        return branch
    queries = draw.spread(sizes.B, sizes.H, sizes.S, sizes.D)
    return Segments(branch.length, queries=draw.parameter(f"segment_queries{number}", queries))


def draw_weights(draw: Draw, sizes: Sizes, branches: int) -> Tensor | None:
    """Convex or any, with zeros in places or a branch that is closed throughout; a learned or a constant tensor."""
    if branches == 1 and draw.chance(0.7):
        return None
    weights = draw.spread(sizes.B, sizes.H, sizes.T, branches)
    kinds = ("convex", "any", "zero_in_places", "closed_branch", "closed_in_a_head")
    kind = draw.note(draw.choose.choices(kinds, (1, 1, 1, 4, 2))[0])
    if kind == "convex":
        weights = weights.softmax(dim=-1)
    elif kind == "zero_in_places":
        weights[draw.even(*weights.shape, low=0, high=1) < 0.5] = 0
    elif kind == "closed_branch":
        weights[..., draw.choose.randrange(branches)] = 0
    elif kind == "closed_in_a_head":
        weights[:, draw.choose.randrange(sizes.H), :, draw.choose.randrange(branches)] = 0
    return draw.parameter("weights", weights, learns=draw.chance(0.3))


def described(branch: Branch) -> str:
    """A branch without the numbers of its tensors."""
    parts = getattr(branch, "branches", None)
    if parts is not None:
        return " | ".join(described(part) for part in parts)
    shown = ((name, value) for name, value in vars(branch).items() if value is not None)
    inside = (f"{name}={type(value).__name__ if hasattr(value, '__dict__') else value}" for name, value in shown)
    return f"{type(branch).__name__}({', '.join(inside)})"
