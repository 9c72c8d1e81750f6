"""Calls of one kind take a lane from the second one on, and nothing about the answer changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from varifocal import Causal, Prefix, SoftWindow, TopK, Window, attend
from varifocal.equations.branches import Branch
from varifocal.equations.problem import Asked, Attended, Shortcuts
from varifocal.equations.scores import Dot
from varifocal.kernels.native import backend, lanes

HEADS, KEY_HEADS, WIDTH = 6, 3, 16
Make = Callable[[int, int], Sequence[Branch]]


def soft(batch: int, queries: int) -> SoftWindow:
    return SoftWindow(5 + 20 * torch.rand(batch, HEADS, queries), edge=3, limit=24)


KINDS: dict[str, Make] = {
    "causal": lambda b, t: [Causal()],
    "window and prefix": lambda b, t: [Window(7) | Prefix(2)],
    "windows of heads": lambda b, t: [Window((1, 2, 3, 40, 5, 6))],
    "window beside causal": lambda b, t: [Window(9), Causal()],
    "soft window": lambda b, t: [soft(b, t) | Prefix(1)],
    "soft window beside exact top-k": lambda b, t: [soft(b, t), TopK(1.5, 3)],
    "top-k with itself before a window": lambda b, t: [TopK(1.5, 3) | Window(1), Window(6)],
    "window beside blocks": lambda b, t: [Window(6), TopK(2.0, 3, select="blocks", block=8)],
}


@pytest.fixture(autouse=True)
def no_lanes() -> None:
    lanes.KEPT.lanes.clear()


def problem(make: Make, keys: int, *, batch: int, queries: int, dtype: torch.dtype) -> dict[str, Any]:
    q = torch.randn(batch, queries, HEADS, WIDTH, dtype=dtype).transpose(1, 2)
    k, v = (torch.randn(batch, KEY_HEADS, keys, WIDTH, dtype=dtype) for _ in range(2))
    branches = make(batch, queries)
    weights = torch.rand(batch, HEADS, queries, len(branches)) if len(branches) > 1 else None
    return {"q": q, "k": k, "v": v, "branches": branches, "weights": weights}


def in_general(given: dict[str, Any]) -> Attended:
    """The same call on the general way."""
    lanes.KEPT.lanes.clear()
    return attend(**given, backend="native")


def assert_same(found: Attended, wanted: Attended) -> None:
    assert torch.equal(found.output, wanted.output)
    assert found.output.stride() == wanted.output.stride()
    assert torch.equal(found.logsumexp, wanted.logsumexp)
    for ours, theirs in zip(found.selected, wanted.selected, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_lane_answers_as_the_general_way(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    batch, queries = shape
    calls = [problem(KINDS[kind], n, batch=batch, queries=queries, dtype=dtype) for n in (37, 38, 300, 5)]
    wanted = [in_general(call) for call in calls]
    assert len(lanes.KEPT.lanes) == 1, "the first call of a kind makes a lane"
    taken = 0

    def counted(run: lanes.Run) -> lanes.Run:
        def answer(asked: Asked) -> Attended:
            nonlocal taken
            taken += 1
            return run(asked)

        return answer

    lanes.KEPT.lanes = {key: counted(run) for key, run in lanes.KEPT.lanes.items()}
    for call, right in zip(calls, wanted, strict=True):
        assert_same(attend(**call), right)
    assert taken == len(calls)


def test_means_of_blocks_are_read_by_a_lane() -> None:
    make = KINDS["window beside blocks"]
    call = problem(make, 40, batch=1, queries=1, dtype=torch.float32)
    means = call["k"].view(1, KEY_HEADS, 5, 8, WIDTH).mean(3)
    wanted = in_general(call)
    for _ in range(2):
        assert_same(attend(**call, shortcuts=Shortcuts(block_means=means)), wanted)
    other = attend(**call, shortcuts=Shortcuts(block_means=-means))
    assert not torch.equal(other.selected[1], wanted.selected[1])  # type: ignore[arg-type]


@pytest.mark.parametrize("what", ["weights", "width"])
def test_a_lane_looks_at_values(what: str) -> None:
    call = problem(KINDS["soft window beside exact top-k"], 40, batch=1, queries=1, dtype=torch.float32)
    attend(**call)
    spoiled: Tensor = call["weights"] if what == "weights" else call["branches"][0].width
    spoiled[0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="must be finite"):
        attend(**call)


def test_nothing_that_is_differentiated_traced_or_of_other_kind_takes_a_lane() -> None:
    call = problem(KINDS["causal"], 40, batch=1, queries=1, dtype=torch.float32)
    q, k, v = call["q"], call["k"], call["v"]

    def key(q: Tensor = q, k: Tensor = k, v: Tensor = v, score: Any = None) -> Any:
        return lanes.key_of(Asked(q, k, v, (Causal(),), None, score or Dot(), None, True))

    assert key() is not None
    assert key(q.clone().requires_grad_()) is None
    assert key(q.double(), k.double(), v.double()) is None
    assert key(q, k.transpose(2, 3).contiguous().transpose(2, 3), v) is None
    assert key(q, k[:, :2], v[:, :2]) is not None, "heads that do not fit are found on the general way"
    assert key() != key(score=Dot(0.5))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert key() is None
    with pytest.raises(ValueError, match="multiple of key heads"):
        attend(q[:, :5], k[:, :2], v[:, :2], branches=Causal())
    assert not lanes.KEPT.lanes


def test_threads_have_lanes_of_their_own() -> None:
    calls = [problem(KINDS["window beside causal"], 64 + n, batch=1, queries=1, dtype=torch.float32) for n in range(8)]
    wanted = [in_general(call) for call in calls]
    wrong = []

    def decode() -> None:
        for _ in range(20):
            for call, right in zip(calls, wanted, strict=True):
                if not torch.equal(attend(**call).output, right.output):
                    wrong.append(call["k"].shape)

    workers = [threading.Thread(target=decode) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_program_of_many_kinds_forgets_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "MOST_LANES", 2)
    for window in range(1, 5):
        call = problem(lambda b, t, size=window: [Window(size)], 9, batch=1, queries=1, dtype=torch.float32)  # type: ignore[misc]
        attend(**call)
        assert len(lanes.KEPT.lanes) <= 2
    assert backend.recall(Asked(call["q"], call["k"], call["v"], (Window(4),), None, Dot(), None, True)) is not None
