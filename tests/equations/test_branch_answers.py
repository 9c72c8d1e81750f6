"""What branches and equations say of themselves is what the reference reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

from varifocal import (
    Branch,
    Causal,
    Dot,
    FixedBranch,
    HeadScale,
    Prefix,
    RandomBlocks,
    Segments,
    SoftWindow,
    Strided,
    TopK,
    Window,
    attend,
)
from varifocal.attention.attend import lay_out
from varifocal.equations.branches import members
from varifocal.equations.branches.own_block import OwnBlock
from varifocal.equations.equation import Equation
from varifocal.equations.problem import Problem
from varifocal.equations.reference import make_scene, read

HEADS = 3
LENGTH = 23
PLACES = torch.arange(LENGTH)
BEYOND = (0, 1, 4, LENGTH + 2)

FIXED: Mapping[str, FixedBranch] = {
    "causal": Causal(),
    "window of 1": Window(1),
    "window": Window(5),
    "window beyond the text": Window(100),
    "windows by head": Window((1, 6, None)),
    "prefix": Prefix(4),
    "prefix beyond the text": Prefix(100),
    "prefixes by head": Prefix((0, 4, None)),
    "strided": Strided(4),
    "stride of 1": Strided(1),
    "own block": OwnBlock(6),
}
"""Branches whose answers are exact."""

UNIONS: dict[str, Branch] = {
    "window and prefix": Window(5) | Prefix(3),
    "window and strided": Window(4) | Strided(4),
    "window and wide prefix": Window(5) | Prefix(LENGTH - 8),
    "two windows": Window(3) | Window(7),
    "windows and prefix by head": Window((1, 6, None)) | Prefix((4, 0, 2)),
    "windows by head and prefix": Window((1, 6, 9)) | Prefix(3),
    "window and prefixes by head": Window(5) | Prefix((4, 0, None)),
    "windows by head and strided": Window((1, 6, 9)) | Strided(4),
}
"""Unions whose answers are exact: what a member reads beyond the window, no other member reads."""

BOUNDS: dict[str, Branch] = {
    "random blocks": RandomBlocks(2, block=3, seed=5),
    "window and random blocks": Window(4) | RandomBlocks(2, block=3, seed=5),
    "prefix and strided": Prefix(6) | Strided(3),
    "bigbird": Window(4) | Prefix(2) | RandomBlocks(2, block=3, seed=1),
}
"""What they count is an upper bound, and what they promise is true."""

EXACT: dict[str, Branch] = {**FIXED, **UNIONS}
EVERY: dict[str, Branch] = {**EXACT, **BOUNDS}
every_exact = pytest.mark.parametrize("name", EXACT)
every_bound = pytest.mark.parametrize("name", BOUNDS)


def pairs(branch: Branch) -> Tensor:
    """bool [H, T, S]: what every head of a fixed branch, or of a union of them, reads, pair by pair."""
    query, key = PLACES[:, None], PLACES[None, :]
    allowed = torch.zeros(HEADS, LENGTH, LENGTH, dtype=torch.bool)
    for member in members(branch):
        assert isinstance(member, FixedBranch)
        allowed = allowed | member.allows(query, key)
    return allowed & (key <= query)


def counted(read: Tensor, beyond: int = 0) -> Tensor:
    """int64 [..., T]: the keys of pairs bool [..., T, S] at a distance of `beyond` or more."""
    far = PLACES[:, None] - PLACES >= beyond
    return (read & far).sum(dim=-1)


def nearest(read: Tensor) -> Tensor:
    """int64 [..., T]: how many of the nearest keys are read without a gap."""
    runs = [
        row[: place + 1].flip(0).long().cumprod(0).sum() for one in read.flatten(0, -3) for place, row in enumerate(one)
    ]
    return torch.stack(runs).view(read.shape[:-1])


def earliest(read: Tensor) -> Tensor:
    """int64 [..., T]: how many of the first keys are read without a gap."""
    runs = [row[: place + 1].long().cumprod(0).sum() for one in read.flatten(0, -3) for place, row in enumerate(one)]
    return torch.stack(runs).view(read.shape[:-1])


def everything(read: Tensor) -> Tensor:
    """bool [..., T]: where all keys up to the query's own are read."""
    return counted(read) == PLACES + 1


def by_heads(answer: Tensor) -> Tensor:
    """An answer about [T] or [H, T] as [H, T]; any other shape is an error."""
    assert answer.shape in ((LENGTH,), (HEADS, LENGTH))
    return answer.expand(HEADS, LENGTH)


@every_exact
def test_count_is_that_of_the_pairs(name: str) -> None:
    branch = EXACT[name]
    for beyond in BEYOND:
        found = by_heads(branch.count(PLACES, beyond=beyond))
        assert torch.equal(found, counted(pairs(branch), beyond)), beyond


@every_exact
def test_count_beyond_a_distance_of_each_query_is_that_of_the_pairs(name: str) -> None:
    branch = EXACT[name]
    beyond = PLACES * 7 % 5
    far = PLACES[:, None] - PLACES >= beyond[:, None]
    assert torch.equal(by_heads(branch.count(PLACES, beyond=beyond)), (pairs(branch) & far).sum(dim=-1))


@pytest.mark.parametrize("name", [*FIXED, *(name for name in UNIONS if "strided" not in name)])
def test_all_is_read_where_a_branch_says_so_and_nowhere_else(name: str) -> None:
    branch = EXACT[name]
    assert torch.equal(by_heads(branch.reads_everything(PLACES)), everything(pairs(branch)))


@pytest.mark.parametrize("name", FIXED)
def test_counting_pairs_agrees_with_the_shorter_way(name: str) -> None:
    branch = FIXED[name]
    for beyond in BEYOND:
        assert torch.equal(
            by_heads(FixedBranch.count(branch, PLACES, beyond=beyond)), by_heads(branch.count(PLACES, beyond=beyond))
        )
    assert torch.equal(
        by_heads(FixedBranch.reads_everything(branch, PLACES)), by_heads(branch.reads_everything(PLACES))
    )


@pytest.mark.parametrize("name", EVERY)
def test_near_and_first_keys_are_all_read(name: str) -> None:
    branch = EVERY[name]
    read = pairs(branch)
    assert bool((by_heads(branch.near(PLACES)) <= nearest(read)).all())
    assert bool((by_heads(branch.first(PLACES)) <= earliest(read)).all())


@pytest.mark.parametrize("name", ["causal", "window", "windows by head", "own block", "stride of 1", "window of 1"])
def test_near_is_exact_for_what_reads_without_a_gap(name: str) -> None:
    assert torch.equal(by_heads(FIXED[name].near(PLACES)), nearest(pairs(FIXED[name])))


@pytest.mark.parametrize("name", ["prefix", "prefixes by head", "prefix beyond the text"])
def test_first_is_exact_for_prefixes(name: str) -> None:
    assert torch.equal(by_heads(FIXED[name].first(PLACES)), earliest(pairs(FIXED[name])))


@every_bound
def test_count_of_what_may_overlap_is_an_upper_bound(name: str) -> None:
    branch = BOUNDS[name]
    for beyond in BEYOND:
        found = by_heads(branch.count(PLACES, beyond=beyond))
        assert bool((found >= counted(pairs(branch), beyond)).all())
        assert bool((found <= (PLACES + 1 - beyond).clamp(min=0)).all())


@pytest.mark.parametrize("name", UNIONS | BOUNDS)
def test_promise_to_read_everything_is_kept(name: str) -> None:
    branch = (UNIONS | BOUNDS)[name]
    said = by_heads(branch.reads_everything(PLACES))
    assert not bool((said & ~everything(pairs(branch))).any())


@pytest.mark.parametrize("name", EVERY)
def test_no_query_reads_farther_than_the_farthest(name: str) -> None:
    branch = EVERY[name]
    distance = (PLACES[:, None] - PLACES + 1).expand(HEADS, -1, -1)[pairs(branch)].max()
    farthest = branch.farthest()
    assert farthest is None or distance == min(farthest, LENGTH)


@pytest.mark.parametrize("name", EVERY)
def test_padding_reads_nothing(name: str) -> None:
    branch = EVERY[name]
    padding = torch.tensor([-1, -7, -LENGTH])
    for answer in (branch.count(padding), branch.near(padding), branch.first(padding)):
        assert bool((answer == 0).all())


@pytest.mark.parametrize("name", EVERY)
def test_answers_about_a_batch_are_those_about_each_row(name: str) -> None:
    branch = EVERY[name]
    batch = torch.stack((PLACES, PLACES.flip(0)))
    for ask in (branch.count, branch.near, branch.first, branch.reads_everything):
        rows = [ask(row) for row in batch]
        assert torch.equal(ask(batch), torch.stack(rows))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def reference_reads(branch: Branch) -> Tensor:
    """bool [B, H, T, K]: the keys, and after them the summaries, to which the reference gives any weight."""
    q, k, v = numbers(2, HEADS, LENGTH, 4), numbers(2, HEADS, LENGTH, 4, seed=1), numbers(2, HEADS, LENGTH, 4, seed=2)
    reading, _ = read(branch, make_scene(Problem(q, k, v, (branch,), None, Dot(), lay_out(q, k, v))))
    return reading.scores > -torch.inf


SOFT = SoftWindow(
    torch.rand(2, HEADS, LENGTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 9 + 3,
    edge=3.0,
    limit=10,
)
WHOLE = SoftWindow(torch.tensor([3.0, 6.0, 30.0]).view(1, 3, 1).expand(2, -1, LENGTH), edge=3.0, limit=8)
"""Widths at which the edge begins and ends at a key."""


@pytest.mark.parametrize("branch", [SOFT, WHOLE], ids=["between keys", "at keys"])
def test_soft_window_answers_with_its_log_weights(branch: SoftWindow) -> None:
    distance = (PLACES[:, None] - PLACES).expand(2, HEADS, -1, -1)
    weight = branch.log_weight(distance, branch.width[..., None]).masked_fill(distance < 0, -torch.inf)
    assert torch.equal(branch.count(PLACES), (weight > -torch.inf).sum(dim=-1))
    assert torch.equal(branch.count(PLACES, beyond=2), ((weight > -torch.inf) & (distance >= 2)).sum(dim=-1))
    assert torch.equal(branch.near(PLACES), nearest(weight == 0))
    assert torch.equal(branch.reads_everything(PLACES), everything(weight == 0))
    assert int(distance[weight > -torch.inf].max()) < branch.farthest()
    assert torch.equal(weight > -torch.inf, reference_reads(branch))


def test_soft_window_beside_a_prefix_counts_no_less_than_is_read() -> None:
    branch = SOFT | Prefix(2)
    found = branch.count(PLACES)
    assert bool((found >= reference_reads(branch).sum(dim=-1)).all())
    assert bool((found <= PLACES + 1).all())


@pytest.mark.parametrize(
    "branch",
    [
        TopK(),
        TopK(scale=2.5, minimum=3),
        TopK(scale=0.0, minimum=4),
        TopK(minimum=100),
        TopK(select="blocks", block=3),
        TopK(scale=0.0, minimum=7, select="blocks", block=4),
        TopK(minimum=100, select="blocks", block=5),
        Segments(4),
        Segments(1),
        Segments(LENGTH),
    ],
    ids=str,
)
def test_ranked_and_summarized_keys_are_counted_as_the_reference_reads_them(branch: Branch) -> None:
    read = reference_reads(branch)
    assert torch.equal(branch.count(PLACES).expand(2, HEADS, -1), read.sum(dim=-1))
    keys = read[..., :LENGTH]
    assert torch.equal(branch.reads_everything(PLACES).expand(2, HEADS, -1), everything(keys))
    assert bool((branch.near(PLACES) <= nearest(keys)).all())
    assert branch.farthest() is None
    assert not branch.follows_positions


def test_segments_in_a_union_are_counted_as_the_reference_reads_them() -> None:
    branch = Segments(4) | Window(6)
    assert torch.equal(
        branch.count(PLACES).expand(2, HEADS, -1), reference_reads(branch).sum(dim=-1).clamp(max=PLACES + 1)
    )


def equation(*branches: Branch, weights: Tensor | None = None, **parts: object) -> Equation:
    return Equation(branches, weights, **parts)  # type: ignore[arg-type]


def gates(near: float) -> Tensor:
    """[1, H, T, 2] with the given weight for the first branch."""
    return torch.tensor([near, 1 - near]).expand(1, HEADS, LENGTH, 2)


def test_keys_read_are_counted_once_for_branches_that_share_a_pass() -> None:
    mean = float((PLACES + 1).double().mean())
    assert equation(Window(5), Causal(), weights=gates(0.5)).keys_read(PLACES) == pytest.approx(mean)
    window, top_k = Window(5), TopK()
    both = float((window.count(PLACES) + top_k.count(PLACES)).double().mean())
    assert equation(window, top_k, weights=gates(0.5)).keys_read(PLACES) == pytest.approx(both)


def test_keys_read_by_heads_that_differ_are_their_mean() -> None:
    single = [equation(Window(size)).keys_read(PLACES) for size in (1, 6, 9)]
    assert equation(Window((1, 6, 9))).keys_read(PLACES) == pytest.approx(sum(single) / 3)


def test_weights_have_no_effect_where_all_branches_read_everything() -> None:
    found = equation(Window(5), Causal(), weights=gates(0.5)).all_read_everything(PLACES)
    assert torch.equal(found, PLACES < 5)
    by_head = equation(Window((1, 6, None)), Causal(), weights=gates(0.5)).all_read_everything(PLACES)
    assert torch.equal(by_head, torch.stack((PLACES < 1, PLACES < 6, PLACES < LENGTH)))
    soft = equation(SOFT, Window(4), weights=gates(0.5)).all_read_everything(PLACES)
    assert torch.equal(soft, SOFT.reads_everything(PLACES) & (PLACES < 4))


def test_farthest_of_an_equation_is_that_of_its_farthest_branch() -> None:
    assert equation(Window(5), Window((2, 9))).farthest() == 9
    assert equation(Window(5), Causal()).farthest() is None


@pytest.mark.parametrize(
    ("made", "share"),
    [
        (equation(Causal()), 0.0),
        (equation(Window(LENGTH)), 0.0),
        (equation(Window(LENGTH - 1)), None),
        (equation(Window((None, LENGTH, None))), 0.0),
        (equation(Window((None, 5, None))), None),
        (equation(Window(5), Causal(), weights=gates(0.25)), 0.25),
        (equation(Causal(), Window(5), weights=gates(0.25)), 0.75),
        (equation(Window(LENGTH), Causal(), weights=gates(0.25)), 0.0),
        (equation(Window((None, 5, None)), Causal(), weights=gates(0.25)), 0.25),
        (equation(Window(5), TopK(minimum=LENGTH), weights=gates(0.25)), 0.25),
        (equation(Window(5), TopK(), weights=gates(0.25)), None),
        (equation(Causal(), score=Dot(scale=2.0)), None),
        (equation(Causal(), score=HeadScale(torch.ones(HEADS))), 0.0),
        (equation(Causal(), score=HeadScale(torch.tensor([1.0, 1.0, 1.1]))), None),
    ],
    ids=lambda part: "" if isinstance(part, Equation) else str(part),
)
def test_share_of_what_is_not_dense_attention(made: Equation, share: float | None) -> None:
    assert made.foreign_share(PLACES) == (None if share is None else pytest.approx(share))


def test_promised_share_bounds_how_far_the_output_is_from_dense_attention() -> None:
    q, k, v = numbers(1, HEADS, LENGTH, 4), numbers(1, HEADS, LENGTH, 4, seed=1), numbers(1, HEADS, LENGTH, 4, seed=2)
    weights = gates(0.25).double()
    share = equation(Window(5), Causal(), weights=weights).foreign_share(PLACES)
    assert share is not None
    found = attend(q, k, v, branches=(Window(5), Causal()), weights=weights, backend="reference").output
    dense = attend(q, k, v, branches=Causal(), backend="reference").output
    assert 0 < float((found - dense).abs().max()) <= 2 * share * float(v.abs().max())


BY_HEAD: dict[str, tuple[Branch, Callable[[int], Branch]]] = {
    "windows": (Window((1, 6, None)), lambda head: (Window(1), Window(6), Causal())[head]),
    "prefixes": (Prefix((2, 5, None)), lambda head: (Prefix(2), Prefix(5), Causal())[head]),
    "both": (
        Window((2, 6, 9)) | Prefix((0, 3, 2)),
        lambda head: (Window(2), Window(6) | Prefix(3), Window(9) | Prefix(2))[head],
    ),
}


@pytest.mark.parametrize("name", BY_HEAD)
@pytest.mark.parametrize("backend", ["reference", "auto"])
@pytest.mark.parametrize("documents", [None, (-1,) * 3 + (0,) * 9 + (1,) * 11], ids=["text", "documents"])
def test_sizes_by_head_read_what_each_head_reads_alone(
    name: str, backend: str, documents: tuple[int, ...] | None
) -> None:
    branch, single = BY_HEAD[name]
    ids = None if documents is None else torch.tensor([documents])
    q, k, v = (numbers(1, HEADS, LENGTH, 4, seed=seed).float() for seed in range(3))
    found = attend(q, k, v, branches=branch, documents=ids, backend=backend)
    for head in range(HEADS):
        one = slice(head, head + 1)
        wanted = attend(q[:, one], k[:, one], v[:, one], branches=single(head), documents=ids, backend="reference")
        torch.testing.assert_close(found.output[:, one], wanted.output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.logsumexp[:, one], wanted.logsumexp, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Window(()), "window size needs a number for each query head, got an empty tuple"),
        (lambda: Window((3, 0)), "window size must be at least 1, got 0"),
        (lambda: Window((3, 1.5)), r"window size must be a whole number, got 1\.5"),  # type: ignore[arg-type]
        (lambda: Window((3, True)), "window size must be a whole number, got True"),
        (lambda: Window([3, 4]), r"window size must be a whole number, got \[3, 4\]"),  # type: ignore[arg-type]
        (lambda: Window(None), "window size must be a whole number, got None"),  # type: ignore[arg-type]
        (lambda: Prefix(()), "prefix size needs a number for each query head, got an empty tuple"),
        (lambda: Prefix((3, -1)), "prefix size must be at least 0, got -1"),
        (lambda: Prefix(0), "prefix size must be at least 1, got 0"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_bad_sizes_are_refused_in_one_sentence(make: Callable[[], Branch], sentence: str) -> None:
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        make()


@pytest.mark.parametrize("branch", [Window((3, 4)), Prefix((3, 4, 5, 6)), Causal() | Window((3, 4))], ids=str)
def test_tuple_of_another_length_than_the_heads_is_refused_in_one_sentence(branch: Branch) -> None:
    q = torch.randn(1, HEADS, 5, 4)
    with pytest.raises(ValueError, match="3 query heads"):
        attend(q, q, q, branches=branch)
