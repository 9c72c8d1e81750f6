"""Clusters of keys: who belongs to one, how centroids move, and the kernel that reads them."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from varifocal import Branch, Cluster, HeadScale, HeadShape, Window, attend
from varifocal.attention.backends import UnavailableError
from varifocal.attention.mechanisms.routing import Routing, RoutingConfig

DOCUMENTS = torch.tensor([[-1] * 5 + [0] * 20 + [1] * 12, [0] * 37])
ROUNDING = 5e-7
"""Four roundings: a learned scale goes into the queries, which are rounded once more."""
SHAPE = HeadShape(model_width=8, heads=4, kv_heads=2, head_width=6)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def clusters() -> Tensor:
    return torch.randint(0, 3, (2, 2, 37), generator=torch.Generator().manual_seed(9))


def results(branch: Branch, dtype: torch.dtype, backend: str) -> list[Tensor]:
    drawn = [normal(2, heads, 37, 8, seed=seed) for seed, heads in enumerate((4, 2, 2))]
    leaves = [one.to(dtype).requires_grad_() for one in (*drawn, torch.tensor((0.5, 1.0, 1.5, 2.0)).double())]
    q, k, v, scale = leaves
    attended = attend(q, k, v, branches=branch, score=HeadScale(scale), documents=DOCUMENTS, backend=backend)
    gradients = torch.autograd.grad(attended.output, leaves, normal(2, 4, 37, 8, seed=5).to(dtype))
    return [
        one.detach().double()
        for one in (
            attended.output,
            attended.logsumexp.masked_fill(attended.logsumexp == float("-inf"), 0.0),
            *gradients,
        )
    ]


@pytest.mark.parametrize(
    "branch",
    [Cluster(clusters(), 4), Cluster(clusters(), 99), Window((5, 3, 1, 1)) | Cluster(clusters(), (0, 0, 4, 6))],
    ids=["few", "all", "heads"],
)
def test_kernel_is_as_accurate_as_the_reference(branch: Branch) -> None:
    truth = results(branch, torch.float64, "reference")
    plain, fast = (results(branch, torch.float32, backend) for backend in ("reference", "native"))
    for true, known, found in zip(truth, plain, fast, strict=True):
        allowed = 2 * max(float((known - true).abs().max()), ROUNDING * float(true.abs().max()))
        assert float((found - true).abs().max()) <= allowed


def test_query_reads_the_last_members_of_its_own_cluster() -> None:
    numbers = torch.tensor([[[0, 1, 0, 0, 1, 0]]])
    v = torch.eye(6, dtype=torch.float64)[None, None]
    q = k = torch.zeros(1, 1, 6, 6, dtype=torch.float64)
    output = attend(q, k, v, branches=Cluster(numbers, 2)).output[0, 0]
    read = [row.nonzero().flatten().tolist() for row in output]
    assert read == [[0], [1], [0, 2], [2, 3], [1, 4], [3, 5]]


def test_backends_read_clusters_or_say_why_not() -> None:
    q = k = v = torch.zeros(1, 2, 4, 8)
    cluster = Cluster(torch.zeros(1, 1, 4, dtype=torch.int64), 2)
    with pytest.raises(UnavailableError, match="backend 'flex' has no kernel for the branch Cluster"):
        attend(q, k, v, branches=cluster, backend="flex")
    with pytest.raises(UnavailableError, match=r"backend 'native' has no kernel for the branch Window \| Cluster"):
        attend(q, k, v, branches=Window(3) | cluster, backend="native")
    with pytest.raises(ValueError, match=r"Cluster\.clusters must be \[B, G, S\]"):
        attend(q, k, v, branches=Cluster(torch.zeros(1, 4, dtype=torch.int64), 2))


def drawn(length: int = 20) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        normal(2, length, 8, seed=0), normal(2, 4, length, 6, seed=1).requires_grad_(),
        normal(2, 2, length, 6, seed=2), normal(2, 2, length, 6, seed=3),
    )  # fmt: skip


def test_centroids_move_in_training_and_stand_still_in_evaluation() -> None:
    torch.manual_seed(0)
    routing = Routing(RoutingConfig(clusters=3, members=4), SHAPE).double()
    before = routing.centroids.clone()
    routing.eval()(*drawn())
    assert torch.equal(routing.centroids, before)
    with torch.no_grad():
        routing.train()(*drawn())
    assert torch.equal(routing.centroids, before)
    routing(*drawn())
    assert not torch.equal(routing.centroids, before)
    torch.testing.assert_close(routing.centroids.norm(dim=-1), torch.ones(2, 3, dtype=torch.float64))


def test_padding_moves_no_centroid() -> None:
    torch.manual_seed(0)
    alone = Routing(RoutingConfig(clusters=3, members=4), SHAPE).double()
    padded = copy.deepcopy(alone)
    x, q, k, v = drawn()
    alone(x[:, 6:], q[:, :, 6:], k[:, :, 6:], v[:, :, 6:])
    k = k.clone()
    k[:, :, :6] = float("nan")
    padded(x, q, k, v, documents=torch.tensor([-1] * 6 + [0] * 14).expand(2, -1))
    torch.testing.assert_close(padded.centroids, alone.centroids)


def outputs(routing: Routing, *given: Tensor) -> Tensor:
    found: Tensor = routing(*given).output
    return found


def at_once(function: Any, *given: Tensor) -> Any:
    return function(*given)


def test_recomputed_forward_pass_reads_the_same_clusters_and_moves_nothing() -> None:
    torch.manual_seed(0)
    plain = Routing(RoutingConfig(clusters=3, members=4, decay=0.0), SHAPE).double()
    again = copy.deepcopy(plain)
    gradients = []
    for routing, run in ((plain, at_once), (again, functools.partial(checkpoint, use_reentrant=False))):
        x, q, k, v = drawn()
        output = run(functools.partial(outputs, routing), x, q, k, v)
        gradients.append(torch.autograd.grad(output.square().sum(), q)[0])
    torch.testing.assert_close(*gradients)
    assert torch.equal(plain.centroids, again.centroids)
