"""The one table of cases: every branch, score and layout that a backend must get right. Knows nothing of pytest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from varifocal import (
    Attended,
    Branch,
    Causal,
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
from varifocal.equations.scores.pair_gate import PairForm


@dataclass(frozen=True)
class Sizes:
    """B batch, H query heads, G key heads, T queries, S keys, D head width."""

    B: int = 2
    H: int = 4
    G: int = 2
    T: int = 12
    S: int = 12
    D: int = 8


@dataclass(eq=False)
class Source:
    """Hands out the tensors of a case by name: drawn from a seed, or taken from `given`."""

    sizes: Sizes
    dtype: torch.dtype
    generator: torch.Generator
    given: Mapping[str, Tensor] | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    constants: set[str] = field(default_factory=set)
    """Names of the tensors that no gradient may reach."""

    def normal(self, name: str, *shape: int, spread: float = 1.0, learns: bool = True) -> Tensor:
        """Normal numbers of the given deviation."""
        drawn = torch.randn(shape, dtype=torch.float64, generator=self.generator) * spread
        return self.keep(name, drawn, learns=learns)

    def uniform(self, name: str, *shape: int, low: float, high: float) -> Tensor:
        """Numbers spread evenly over low..high."""
        drawn = torch.rand(shape, dtype=torch.float64, generator=self.generator) * (high - low) + low
        return self.keep(name, drawn)

    def whole(self, name: str, *shape: int) -> Tensor:
        """-1, 0 or 1: exact in every dtype, so that many scores are exactly equal."""
        return self.keep(name, torch.randint(-1, 2, shape, generator=self.generator).double())

    def keep(self, name: str, drawn: Tensor, *, learns: bool = True) -> Tensor:
        """File a tensor under its name, in the dtype of the case; a given one replaces it."""
        tensor = drawn.to(self.dtype).requires_grad_(learns) if self.given is None else self.given[name]
        self.tensors[name] = tensor
        if not learns:
            self.constants.add(name)
        return tensor


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of one call of attend."""

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    branches: tuple[Branch, ...]
    weights: Tensor | None
    score: Score
    documents: Tensor | None
    positions: Tensor | None
    tensors: dict[str, Tensor]
    """Every floating-point tensor of the call by name: q, k, v and what weights, branches and score carry."""
    leaves: tuple[str, ...]
    """The names of those that learn: leaf tensors that require a gradient."""

    def attend(self, backend: str = "auto") -> Attended:
        """Run the call."""
        return attend(
            self.q,
            self.k,
            self.v,
            branches=self.branches,
            weights=self.weights,
            score=self.score,
            documents=self.documents,
            positions=self.positions,
            backend=backend,
        )

    def leaf_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that learn, in the order of `leaves`."""
        return tuple(self.tensors[name] for name in self.leaves)

    def rebuild(self, replacement: Mapping[str, Tensor]) -> Inputs:
        """The same call with some tensors replaced by name."""
        return self.case.build(self.q.dtype, given=self.tensors | dict(replacement))

    def converted(self, dtype: torch.dtype) -> Inputs:
        """The same numbers, as this call's dtype rounded them, in another dtype; again leaves."""
        given = {
            name: tensor.detach().to(dtype).requires_grad_(name in self.leaves) for name, tensor in self.tensors.items()
        }
        return self.case.build(dtype, given=given)


BranchFactory = Callable[[Source], Branch | tuple[Branch, ...]]
ScoreFactory = Callable[[Source], Score]
WeightFactory = Callable[[Source, int], Tensor | None]


def default_weights(source: Source, branches: int) -> Tensor | None:
    """None for one branch; for several, positive weights that sum to one."""
    if branches == 1:
        return None
    sizes = source.sizes
    logits = torch.randn(sizes.B, sizes.H, sizes.T, branches, dtype=torch.float64, generator=source.generator)
    return source.keep("weights", logits.softmax(dim=-1))


@dataclass(frozen=True, eq=False)
class Case:
    """One row of the table."""

    name: str
    branches: BranchFactory
    sizes: Sizes = Sizes()
    score: ScoreFactory = lambda source: Dot()
    weights: WeightFactory = default_weights
    documents: tuple[tuple[int, ...], ...] | None = None
    """B rows of S ids."""
    positions: tuple[int, ...] | tuple[tuple[int, ...], ...] | None = None
    """T numbers, or B rows of them."""
    ties: bool = False
    """Queries and keys of -1, 0 and 1: many equal scores. A selection among equals has no gradient to check."""

    def make(self, dtype: torch.dtype, seed: int = 0) -> Inputs:
        """Draw the case's tensors: the same numbers for every dtype, rounded to it."""
        return self.build(dtype, seed=seed)

    def build(self, dtype: torch.dtype, *, seed: int = 0, given: Mapping[str, Tensor] | None = None) -> Inputs:
        """The call with tensors drawn from a seed, or with the given ones."""
        sizes = self.sizes
        source = Source(sizes, dtype, torch.Generator().manual_seed(seed), given)
        draw = source.whole if self.ties else source.normal
        q = draw("q", sizes.B, sizes.H, sizes.T, sizes.D)
        k = draw("k", sizes.B, sizes.G, sizes.S, sizes.D)
        v = source.normal("v", sizes.B, sizes.G, sizes.S, sizes.D)
        branches = self.branches(source)
        branches = (branches,) if isinstance(branches, Branch) else branches
        weights = self.weights(source, len(branches))
        score = self.score(source)
        return Inputs(
            case=self,
            q=q,
            k=k,
            v=v,
            branches=branches,
            weights=weights,
            score=score,
            documents=None if self.documents is None else torch.tensor(self.documents),
            positions=None if self.positions is None else torch.tensor(self.positions, dtype=torch.int64),
            tensors=source.tensors,
            leaves=tuple(name for name in source.tensors if name not in source.constants),
        )


def soft_window(low: float, high: float, *, edge: float, limit: int) -> Callable[[Source], SoftWindow]:
    """A soft window whose widths are spread over low..high, one for every query and head."""

    def make(source: Source) -> SoftWindow:
        width = source.uniform("width", source.sizes.B, source.sizes.H, source.sizes.T, low=low, high=high)
        return SoftWindow(width, edge=edge, limit=limit)

    return make


def indexer(source: Source, *, heads: int, key_heads: int, rank: int = 3) -> Indexer:
    """A random indexer; it gets no gradient from the output."""
    sizes = source.sizes
    return Indexer(
        source.normal("index_queries", sizes.B, heads, sizes.T, rank, learns=False),
        source.normal("index_keys", sizes.B, key_heads, sizes.S, rank, learns=False),
    )


def cached_segments(length: int) -> Callable[[Source], Segments]:
    """Segments with the queries of every key, as a cache holds them."""

    def make(source: Source) -> Segments:
        sizes = source.sizes
        return Segments(length, queries=source.normal("segment_queries", sizes.B, sizes.H, sizes.S, sizes.D))

    return make


def head_scale(source: Source) -> HeadScale:
    """A positive scale for every head."""
    return HeadScale(source.uniform("head_scale", source.sizes.H, low=0.3, high=2.0))


def pair_gate(
    form: PairForm, *, hidden: int = 3, bias: bool = True, scale: bool = True, threshold: float = 0.4
) -> ScoreFactory:
    """A pair gate with gates on both sides of the threshold."""

    def make(source: Source) -> PairGate:
        sizes = source.sizes
        return PairGate(
            queries=source.normal("pair_queries", sizes.B, sizes.H, sizes.T, hidden),
            keys=source.normal("pair_keys", sizes.B, sizes.H, sizes.S, hidden),
            output=source.normal("pair_output", sizes.H, hidden),
            bias=source.normal("pair_bias", sizes.H, spread=0.5) if bias else None,
            scale=source.uniform("pair_scale", sizes.H, low=0.5, high=2.0) if scale else None,
            form=form,
            threshold=threshold,
        )

    return make


def closed_for_half(source: Source, branches: int) -> Tensor:
    """Two branches: the first has weight exactly 0 for the first half of the queries, the second for the others."""
    sizes = source.sizes
    first = (torch.arange(sizes.T) >= sizes.T // 2).double()
    return source.keep("weights", torch.stack((first, 1 - first), dim=-1).expand(sizes.B, sizes.H, -1, -1).clone())


def free_weights(source: Source, branches: int) -> Tensor:
    """Weights of any sign, which sum to nothing in particular, for any number of branches."""
    return source.normal("weights", source.sizes.B, source.sizes.H, source.sizes.T, branches)


SMALL = Sizes(B=1, H=2, G=1, T=5, S=5, D=3)
LONG = Sizes(B=1, H=2, G=1, T=150, S=150, D=16)
"""Longer than one tile of any kernel, and a multiple of none."""
CACHED = Sizes(T=4, S=12)
ONE_CACHED = Sizes(T=1, S=12)

PACKED = ((0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2), (7, 7, 7, 7, 7, 7, 7, 7, 7, 3, 4, 4))
LEFT_PADDED = ((-1, -1, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0), (0,) * 12)
RIGHT_PADDED = ((0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1), (0,) * 12)
PADDED_AND_PACKED = ((-1, -1, 0, 0, 0, 0, 1, 1, 1, -1, -1, -1), (-1,) * 12)
"""Padding on both sides of two documents; and a row of nothing but padding."""
LAYOUTS = {
    "packed": PACKED,
    "left_padded": LEFT_PADDED,
    "right_padded": RIGHT_PADDED,
    "padded_and_packed": PADDED_AND_PACKED,
}

BRANCHES: dict[str, BranchFactory] = {
    "causal": lambda source: Causal(),
    "window": lambda source: Window(3),
    "window_prefix": lambda source: Window(3) | Prefix(2),
    "soft_window": soft_window(2.0, 9.0, edge=2.0, limit=9),
    "strided": lambda source: Strided(3),
    "random_blocks": lambda source: Window(2) | RandomBlocks(2, block=2, seed=5),
    "segments": lambda source: Segments(3),
    "top_k": lambda source: TopK(),
    "top_k_blocks": lambda source: TopK(select="blocks", block=2),
    "top_k_indexer": lambda source: TopK(minimum=2, indexer=indexer(source, heads=4, key_heads=2)) | Window(1),
    "window_causal": lambda source: (Window(3), Causal()),
    "soft_window_top_k": lambda source: (soft_window(2.0, 9.0, edge=2.0, limit=9)(source), TopK()),
}
"""One of each kind, for the table's products with layouts."""

CASES: tuple[Case, ...] = (
    # Heads, widths and lengths.
    Case("mha", lambda source: Causal(), Sizes(G=4)),
    Case("gqa", lambda source: Causal()),
    Case("mqa", lambda source: Causal(), Sizes(G=1)),
    Case("one_head", lambda source: Causal(), Sizes(H=1, G=1)),
    Case("width_1", lambda source: (Window(3), Causal()), Sizes(D=1)),
    Case("width_5", lambda source: (Window(3), Causal()), Sizes(D=5)),
    Case("width_32", lambda source: (Window(3), Causal()), Sizes(D=32)),
    Case("one_token", lambda source: (Window(3), TopK()), Sizes(T=1, S=1)),
    Case("no_queries", lambda source: (Window(3), TopK()), Sizes(T=0)),
    Case("no_queries_blocks", lambda source: TopK(select="blocks", block=2), Sizes(T=0)),
    Case("no_queries_segments", cached_segments(3), Sizes(T=0)),
    Case("nothing_at_all", lambda source: Causal(), Sizes(T=0, S=0)),
    Case("empty_batch", lambda source: (Window(3), TopK(select="blocks", block=2)), Sizes(B=0)),
    Case("small_causal", lambda source: Causal(), SMALL),
    Case("long_causal", lambda source: Causal(), LONG),
    # Fixed branches.
    Case("window_1", lambda source: Window(1)),
    Case("window", lambda source: Window(3), Sizes(G=1)),
    Case("window_of_length", lambda source: Window(12)),
    Case("window_beyond_length", lambda source: Window(100)),
    Case("small_window", lambda source: Window(2), SMALL),
    Case("long_window", lambda source: Window(37), LONG),
    Case("windows_by_head", lambda source: Window((1, 3, None, 7)) | Prefix((0, 2, 0, 1))),
    Case("windows_by_head_and_prefix", lambda source: Window((1, 3, 5, 7)) | Prefix(2)),
    Case("windows_by_head_inside_causal", lambda source: (Window((1, 3, None, 7)) | Prefix((0, 2, 0, 1)), Causal())),
    Case("long_windows_by_head", lambda source: Window((None, 37)) | Prefix((0, 4)), LONG),
    Case(
        "packed_windows_by_head",
        lambda source: Window((1, 3, None, 2)) | Prefix((0, 2, 0, 1)),
        documents=((-1,) * 2 + (0,) * 6 + (1,) * 4, (0,) * 5 + (1,) * 7),
    ),
    Case("cached_windows_by_head", lambda source: Window((1, 3, None, 7)) | Prefix((0, 2, 0, 1)), Sizes(T=2, S=12)),
    Case("prefix_1", lambda source: Prefix(1)),
    Case("prefix_beyond_length", lambda source: Prefix(100)),
    Case("strided", lambda source: Strided(3)),
    Case("stride_1", lambda source: Strided(1)),
    Case("random_blocks", lambda source: RandomBlocks(2, block=2, seed=1)),
    Case("random_blocks_other_seed", lambda source: RandomBlocks(1, block=3, seed=123456789)),
    Case("long_random_blocks", lambda source: RandomBlocks(3, block=8, seed=2) | Window(5), LONG),
    # Soft windows: widths at, inside and beyond their bounds.
    Case("soft_window", soft_window(2.0, 8.0, edge=2.0, limit=8)),
    Case("soft_window_narrow", soft_window(1.0, 2.0, edge=1.0, limit=3)),
    Case("soft_window_wide_edge", soft_window(6.0, 10.0, edge=6.0, limit=10)),
    Case("soft_window_limit_cuts", soft_window(4.0, 10.0, edge=4.0, limit=5)),
    Case("soft_window_beyond_length", soft_window(40.0, 60.0, edge=8.0, limit=60)),
    Case("small_soft_window", soft_window(2.0, 5.0, edge=2.0, limit=5), SMALL),
    Case("long_soft_window", soft_window(16.0, 70.0, edge=16.0, limit=70), LONG),
    # Segments and their summaries.
    Case("segments", lambda source: Segments(3)),
    Case("segments_uneven", lambda source: Segments(5)),
    Case("segments_of_1", lambda source: Segments(1)),
    Case("one_segment", lambda source: Segments(12)),
    Case("segments_cached", cached_segments(3), CACHED),
    Case("segments_with_window", lambda source: Segments(4) | Window(6)),
    Case("segments_head_scale", lambda source: Segments(4), score=head_scale),
    Case("small_segments", lambda source: Segments(2), SMALL),
    Case("long_segments", lambda source: Segments(12), LONG),
    # Top-k: by every key, by blocks, by an indexer.
    Case("top_k", lambda source: TopK()),
    Case("top_k_constant", lambda source: TopK(scale=0.0, minimum=3)),
    Case("top_1", lambda source: TopK(scale=0.0)),
    Case("top_k_beyond_length", lambda source: TopK(minimum=100)),
    Case("top_k_ties", lambda source: TopK(scale=1.7, minimum=2), ties=True),
    Case("top_k_head_scale", lambda source: TopK(), score=head_scale),
    Case("small_top_k", lambda source: TopK(), SMALL),
    Case("long_top_k", lambda source: TopK(scale=1.5, minimum=4), LONG),
    Case("top_k_blocks", lambda source: TopK(select="blocks", block=2)),
    Case("top_k_blocks_uneven", lambda source: TopK(scale=1.5, select="blocks", block=5)),
    Case("top_k_blocks_of_1", lambda source: TopK(scale=1.5, select="blocks", block=1)),
    Case("top_k_blocks_beyond_length", lambda source: TopK(minimum=100, select="blocks", block=3)),
    Case("top_k_blocks_ties", lambda source: TopK(scale=0.0, minimum=3, select="blocks", block=2), ties=True),
    Case("long_top_k_blocks", lambda source: TopK(minimum=24, select="blocks", block=8), LONG),
    Case("indexer", lambda source: TopK(indexer=indexer(source, heads=4, key_heads=2))),
    Case("indexer_one_head", lambda source: TopK(indexer=indexer(source, heads=1, key_heads=1)) | Window(1)),
    Case("indexer_shared", lambda source: TopK(minimum=3, indexer=indexer(source, heads=2, key_heads=1))),
    Case(
        "indexer_blocks",
        lambda source: TopK(minimum=3, select="blocks", block=2, indexer=indexer(source, heads=4, key_heads=1)),
    ),
    # Unions: one softmax over several sets.
    Case("window_prefix", lambda source: Window(3) | Prefix(2)),
    Case("window_strided", lambda source: Window(3) | Strided(3)),
    Case("bigbird", lambda source: Window(2) | Prefix(1) | RandomBlocks(1, block=2)),
    Case("window_top_k", lambda source: Window(2) | TopK()),
    Case("soft_window_prefix", lambda source: soft_window(3.0, 7.0, edge=3.0, limit=7)(source) | Prefix(2)),
    Case("soft_window_or_top_k", lambda source: soft_window(3.0, 7.0, edge=3.0, limit=7)(source) | TopK()),
    Case("small_union", lambda source: Window(2) | Prefix(1), SMALL),
    # Mixtures of two and three branches.
    Case("window_and_causal", lambda source: (Window(3), Causal())),
    Case("window_and_top_k", lambda source: (Window(3), TopK())),
    Case("soft_window_and_top_k", lambda source: (soft_window(2.0, 8.0, edge=2.0, limit=8)(source), TopK())),
    Case(
        "soft_window_and_top_k_blocks",
        lambda source: (soft_window(2.0, 8.0, edge=2.0, limit=8)(source), TopK(select="blocks", block=3)),
    ),
    Case("three_branches", lambda source: (Window(2), Strided(4), Causal())),
    Case("three_kinds", lambda source: (Segments(4), Window(2) | Prefix(1), TopK(minimum=2)), weights=free_weights),
    Case("two_top_ks", lambda source: (TopK(scale=0.0, minimum=2), TopK(select="blocks", block=2))),
    Case("one_weighted_branch", lambda source: Window(3), weights=free_weights),
    Case("closed_weights", lambda source: (Window(3), Causal()), weights=closed_for_half),
    Case("small_mixture", lambda source: (Window(2), Causal()), SMALL),
    Case(
        "small_adaptive_mixture",
        lambda source: (soft_window(2.0, 5.0, edge=2.0, limit=5)(source), TopK()),
        SMALL,
    ),
    Case("long_mixture", lambda source: (Window(37), Causal()), LONG),
    Case(
        "long_adaptive_mixture",
        lambda source: (soft_window(16.0, 70.0, edge=16.0, limit=70)(source), TopK(scale=1.5)),
        LONG,
    ),
    # Cached calls and given positions.
    *(
        Case(f"cached_{name}", branches, CACHED)
        for name, branches in BRANCHES.items()
        if name != "segments"  # has a row of its own above
    ),
    *(Case(f"decode_{name}", branches, ONE_CACHED) for name, branches in BRANCHES.items() if name != "segments"),
    Case("positions", lambda source: (Window(3), TopK()), CACHED, positions=(0, 3, 7, 8)),
    Case("positions_out_of_order", lambda source: (Window(3), Causal()), CACHED, positions=(9, 2, 2, 0)),
    Case(
        "positions_per_row",
        lambda source: (soft_window(2.0, 8.0, edge=2.0, limit=8)(source), TopK(select="blocks", block=2)),
        CACHED,
        positions=((1, 2, 3, 4), (11, 0, 5, 5)),
    ),
    Case("more_queries_than_keys", lambda source: Window(3), Sizes(T=6, S=4), positions=(0, 1, 2, 3, 3, 0)),
    Case(
        "positions_in_documents",
        lambda source: (Window(2), TopK()),
        CACHED,
        documents=PADDED_AND_PACKED,
        positions=((1, 4, 8, 10), (0, 5, 6, 11)),
    ),
    Case("cached_packed", lambda source: (Window(3), Causal()), CACHED, documents=PACKED),
    Case("cached_left_padded", lambda source: (Window(3), TopK()), CACHED, documents=LEFT_PADDED),
    Case("cached_segments_packed", cached_segments(2), CACHED, documents=PACKED),
    # Packed documents, padding, and rows that see nothing.
    *(
        Case(f"{layout}_{name}", branches, documents=documents)
        for layout, documents in LAYOUTS.items()
        for name, branches in BRANCHES.items()
    ),
    Case("documents_of_1", lambda source: (Window(3), TopK()), documents=(tuple(range(12)), tuple(range(12)))),
    # Scores.
    Case("dot_scale", lambda source: (Window(3), Causal()), score=lambda source: Dot(0.7)),
    Case("dot_scale_0", lambda source: (Window(3), Causal()), score=lambda source: Dot(0.0)),
    Case("head_scale", lambda source: (Window(3), Causal()), score=head_scale),
    Case("small_head_scale", lambda source: Causal(), SMALL, score=head_scale),
    *(
        Case(f"pair_{form}{suffix}", branches, sizes, score=pair_gate(form), documents=documents)
        for form in ("product", "log", "threshold")
        for suffix, branches, sizes, documents in (
            ("", BRANCHES["causal"], Sizes(), None),
            ("_cached", BRANCHES["causal"], CACHED, None),
            ("_padded", BRANCHES["causal"], Sizes(), PADDED_AND_PACKED),
            ("_mixture", BRANCHES["window_causal"], Sizes(), None),
            ("_top_k", BRANCHES["top_k"], Sizes(), None),
        )
    ),
    *(Case(f"small_pair_{form}", BRANCHES["causal"], SMALL, score=pair_gate(form)) for form in ("product", "log")),
    Case("pair_bare", lambda source: Causal(), score=pair_gate("product", bias=False, scale=False)),
    # The threshold is so high that some queries read no pair at all.
    Case("pair_threshold_blind", lambda source: Window(2), score=pair_gate("threshold", threshold=0.9)),
    Case("long_pair_product", lambda source: Causal(), LONG, score=pair_gate("product", hidden=16)),
)
"""Names are unique."""

CASES_BY_NAME: dict[str, Case] = {case.name: case for case in CASES}
