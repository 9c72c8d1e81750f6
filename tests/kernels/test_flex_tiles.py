"""Which tiles a kernel looks at: all that hold a pair, none that hold none, and no more memory than lists of tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.cases import Case, Sizes
from tests.kernels.flex_calls import problem_of
from varifocal import Branch, Causal, FixedBranch, Prefix, Strided, TopK, Window
from varifocal.attention.attend import lay_out
from varifocal.equations.branches.own_block import OwnBlock
from varifocal.kernels.flex.backend import make_scene
from varifocal.kernels.flex.dense import score_pairs
from varifocal.kernels.flex.key_sets import Pattern, by_head
from varifocal.kernels.flex.reading import Reading
from varifocal.kernels.flex.selection import select
from varifocal.kernels.flex.tiles import KEPT, TILE, Tiles, kept_tiles, make_tiles

SIZES = Sizes(B=2, H=2, G=1, T=300, S=700, D=4)


def reading_of(branch: FixedBranch | TopK, *, documents: bool = False, sizes: Sizes = SIZES) -> Reading:
    ids = tuple((0,) * 90 + (1,) * 310 + (2,) * (sizes.S - 400) for _ in range(sizes.B)) if documents else None
    inputs = Case("tiles", lambda source: branch, sizes, documents=ids).make(torch.float32)
    scene = make_scene(problem_of(inputs), torch.float32)
    if isinstance(branch, TopK):
        return scene.reading((select(branch, scene.q, scene.k, scene.score, scene.layout, None),))
    return scene.reading((Pattern((branch,)),))


def cells(count: torch.Tensor, listed: torch.Tensor) -> torch.Tensor:
    """bool [B, H, R, C] from lists of tiles."""
    first = torch.arange(listed.shape[-1]) < count[..., None]
    return torch.zeros_like(listed, dtype=torch.bool).scatter(-1, listed.long(), first)


def touched(tiles: Tiles) -> torch.Tensor:
    return cells(tiles.partial_count, tiles.partial) | cells(tiles.full_count, tiles.full)


def tiles_of_pairs(reading: Reading) -> torch.Tensor:
    """bool [B, H, R, C]: the tiles with a pair that is read, from all pairs."""
    read = score_pairs(reading, 0, reading.q.shape[2]) > float("-inf")
    missing = (-read.shape[3] % TILE, -read.shape[2] % TILE)
    read = torch.nn.functional.pad(read, (0, missing[0], 0, missing[1]))
    batch, heads, queries, keys = read.shape
    return read.view(batch, heads, queries // TILE, TILE, keys // TILE, TILE).any(dim=5).any(dim=3)


def whole_tiles(reading: Reading) -> torch.Tensor:
    """bool [B, H, R, C]: the tiles of which every pair is read."""
    unread = score_pairs(reading, 0, reading.q.shape[2]) == float("-inf")
    missing = (-unread.shape[3] % TILE, -unread.shape[2] % TILE)
    unread = torch.nn.functional.pad(unread, (0, missing[0], 0, missing[1]), value=True)
    batch, heads, queries, keys = unread.shape
    return ~unread.view(batch, heads, queries // TILE, TILE, keys // TILE, TILE).any(dim=5).any(dim=3)


@pytest.mark.parametrize("documents", [False, True], ids=["text", "documents"])
@pytest.mark.parametrize("branch", [Causal(), Window(100), Prefix(3), Strided(200)], ids=repr)
def test_tiles_of_a_pattern_are_those_with_a_pair(branch: FixedBranch, documents: bool) -> None:
    reading = reading_of(branch, documents=documents)
    found = touched(make_tiles(reading, at_end=not documents, backward=False))
    assert torch.equal(found.expand(2, 2, -1, -1), tiles_of_pairs(reading))


@pytest.mark.parametrize("documents", [False, True], ids=["text", "documents"])
@pytest.mark.parametrize("sizes", [((100, 0), (None, 0)), ((100, 3), (200, 130)), ((1, 0), (1, 0))], ids=str)
def test_tiles_of_heads_that_differ_are_those_with_a_pair(
    sizes: tuple[tuple[int | None, int], ...], documents: bool
) -> None:
    reading = reading_of(Causal(), documents=documents)
    windows, prefixes = (tuple(one) for one in zip(*sizes, strict=True))
    heads = by_head((Window(windows), Prefix(prefixes)), 2, torch.device("cpu"))
    reading = replace(reading, sets=(heads,))
    tiles = make_tiles(reading, at_end=not documents, backward=False)
    assert torch.equal(touched(tiles).expand(2, 2, -1, -1), tiles_of_pairs(reading))
    full = cells(tiles.full_count, tiles.full).expand(2, 2, -1, -1)
    assert not bool((full & ~whole_tiles(reading)).any())
    assert bool(full.any()) == (windows != (1, 1) and not documents)


@pytest.mark.parametrize("branch", [Causal(), Window(100), Window(400)], ids=repr)
def test_partial_and_full_tiles_are_those_of_torch(branch: FixedBranch) -> None:
    offset = SIZES.S - SIZES.T

    def mask(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (key <= query + offset) & branch.allows(query + offset, key)

    theirs = create_block_mask(mask, None, None, SIZES.T, SIZES.S, device="cpu")
    ours = make_tiles(reading_of(branch), at_end=True, backward=True)
    assert theirs.full_kv_num_blocks is not None
    assert theirs.full_kv_indices is not None
    assert theirs.q_num_blocks is not None
    assert ours.columns is not None
    assert torch.equal(cells(ours.partial_count, ours.partial), cells(theirs.kv_num_blocks, theirs.kv_indices))
    assert torch.equal(cells(ours.full_count, ours.full), cells(theirs.full_kv_num_blocks, theirs.full_kv_indices))
    assert torch.equal(ours.columns[0], theirs.q_num_blocks)


@pytest.mark.parametrize("documents", [False, True], ids=["text", "documents"])
@pytest.mark.parametrize(
    "branch",
    [
        TopK(scale=0.0, minimum=2),
        TopK(scale=0.0, select="blocks", block=16),
        TopK(scale=0.0, select="blocks", block=130),
    ],
    ids=repr,
)
def test_every_selected_key_lies_in_a_tile_that_is_read(branch: TopK, documents: bool) -> None:
    reading = reading_of(branch, documents=documents)
    found = touched(make_tiles(reading, at_end=not documents, backward=False))
    assert not bool((tiles_of_pairs(reading) & ~found).any())


def test_selection_leaves_out_tiles_without_a_selected_key() -> None:
    reading = reading_of(TopK(scale=0.0), sizes=Sizes(B=1, H=1, G=1, T=1, S=5000, D=4))
    tiles = make_tiles(reading, at_end=True, backward=False)
    assert int(tiles.partial_count.sum()) == 1
    assert int(tiles.full_count.sum()) == 0


def test_equal_patterns_share_their_tiles() -> None:
    def tiles(branch: FixedBranch, sizes: Sizes = SIZES) -> Tiles:
        return make_tiles(reading_of(branch, sizes=sizes), at_end=True, backward=False)

    assert tiles(Window(70)) is tiles(Window(70))
    assert tiles(Window(70)) is not tiles(Window(71))
    assert tiles(Window(70)) is not tiles(Window(70), Sizes(B=2, H=2, G=1, T=300, S=701, D=4))


def test_branches_that_differ_only_in_what_equality_overlooks_do_not_share_tiles() -> None:
    class Band(FixedBranch):
        def __init__(self, size: int) -> None:
            object.__setattr__(self, "size", size)

        def allows(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            return query - key < self.size  # type: ignore[attr-defined, no-any-return]

    narrow, wide = Band(5), Band(500)
    assert narrow == wide
    counts = [int(touched(make_tiles(reading_of(band), at_end=True, backward=False)).sum()) for band in (narrow, wide)]
    assert counts[0] < counts[1]


def test_number_of_kept_patterns_is_bounded() -> None:
    for size in range(1, KEPT + 9):
        make_tiles(reading_of(Window(size), sizes=Sizes(T=3, S=3)), at_end=True, backward=False)
    assert kept_tiles.cache_info().currsize == KEPT


def test_soft_windows_read_no_tile_beyond_their_limit() -> None:
    from varifocal import SoftWindow

    def soft(source: object) -> Branch:
        return SoftWindow(torch.full((1, 1, 1000), 20.0), edge=4.0, limit=30)

    inputs = Case("soft", soft, Sizes(B=1, H=1, G=1, T=1000, S=1000, D=4)).make(torch.float32)
    scene = make_scene(problem_of(inputs), torch.float32)
    from varifocal.kernels.flex.key_sets import Soft

    (branch,) = inputs.branches
    assert isinstance(branch, SoftWindow)
    reading = scene.reading((Soft(branch, branch.width, branch.width),))
    found = touched(make_tiles(reading, at_end=True, backward=False))
    # Each row of tiles reads its own tile and the one before it; the first has none before it.
    assert int(found.sum()) == 2 * 8 - 1


@pytest.mark.parametrize(
    "pattern",
    [
        Pattern((Causal(),), (Window(100),)),
        Pattern((Causal(),), (Window(140), Prefix(130))),
        Pattern((Window(260), Prefix(300)), (Window(100),)),
        Pattern((Prefix(290),), (Prefix(150),)),
        Pattern((OwnBlock(150),)),
        Pattern((Window(1), Prefix(1))),
    ],
    ids=str,
)
def test_runs_touch_the_tiles_with_a_pair_and_cover_none_that_lacks_one(pattern: Pattern) -> None:
    """Documents of 1 to 310 keys, padding before and after, and queries that stand in any order."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([-1] * 60 + [0] * 90 + [1] * 310 + [2] * 1 + [3] * 200 + [-1] * 39).expand(2, -1)
    orders = [torch.arange(400, 700), torch.randperm(700, generator=generator)[:300]]
    for positions in orders:
        inputs = Case("runs", lambda source: Causal(), SIZES).make(torch.float32)
        layout = lay_out(inputs.q, inputs.k, inputs.v, documents=ids, positions=positions.expand(2, -1))
        scene = make_scene(replace(problem_of(inputs), layout=layout), torch.float32)
        reading = scene.reading((pattern,))
        tiles = make_tiles(reading, at_end=False, backward=False)
        assert torch.equal(touched(tiles).expand(2, 2, -1, -1), tiles_of_pairs(reading))
        full = cells(tiles.full_count, tiles.full).expand(2, 2, -1, -1)
        assert not bool((full & ~whole_tiles(reading)).any())


class BytesMoved(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what operators read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "view" not in func._schema.name:
            parts = tree_leaves((args, kwargs, result))
            self.count += sum(part.numel() * part.element_size() for part in parts if isinstance(part, torch.Tensor))
        return result


@pytest.mark.parametrize("pattern", [Pattern((Window(256),)), Pattern((Causal(),), (Window(256),))], ids=str)
def test_listing_tiles_of_documents_looks_at_queries_and_not_at_pairs(pattern: Pattern) -> None:
    sizes = Sizes(B=2, H=2, G=1, T=2048, S=2048, D=4)
    reading = replace(reading_of(Causal(), documents=True, sizes=sizes), sets=(pattern,))
    with BytesMoved() as moved:
        make_tiles(reading, at_end=False, backward=True)
    # Pair by pair it were 126 bytes for each.
    assert moved.count / (sizes.B * sizes.T * sizes.S) < 1


def test_layers_that_share_a_layout_share_their_tiles() -> None:
    one = reading_of(Causal(), documents=True)
    other = replace(one, q=one.q + 1, sets=(Pattern((Causal(),)),))
    first = make_tiles(one, at_end=False, backward=False)
    assert make_tiles(other, at_end=False, backward=False) is first
    assert make_tiles(other, at_end=False, backward=True) is not first
    assert make_tiles(replace(one, sets=(Pattern((Window(9),)),)), at_end=False, backward=False) is not first
    assert make_tiles(replace(one, start=one.start.clone()), at_end=False, backward=False) is not first
    one.position[:, 0] = 0
    assert make_tiles(one, at_end=False, backward=False) is not first
