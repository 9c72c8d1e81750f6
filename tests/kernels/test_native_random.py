"""Random sizes, layouts and mixtures: the native backend agrees with the reference wherever it runs."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.accuracy import relative_error
from varifocal import Branch, Causal, Prefix, SoftWindow, TopK, Window, attend
from varifocal.kernels.native import library

pytestmark = pytest.mark.skipif(library.why_missing() is not None, reason="the native library was not built")


def branch_of(kind: str, size: int, width: torch.Tensor) -> Branch:
    return {
        "causal": Causal(),
        "window": Window(size),
        "prefix": Window(size) | Prefix(3),
        "soft": SoftWindow(width, edge=4.0, limit=40),
        "top": TopK(scale=1.5),
        # A power of two, so that means are exact too.
        "blocks": TopK(scale=2.0, select="blocks", block=1 << size.bit_length() // 2),
        "self": TopK(scale=1.0) | Window(1),
    }[kind]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    keys=st.integers(1, 210),
    share=st.floats(0.0, 1.0),
    head_width=st.sampled_from([1, 3, 8, 17, 32, 64, 80, 96, 128, 256]),
    size=st.integers(1, 130),
    kinds=st.lists(
        st.sampled_from(["causal", "window", "prefix", "soft", "top", "blocks", "self"]), min_size=1, max_size=3
    ),
    documents=st.integers(0, 4),
    padding=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_native_agrees_with_the_reference(
    batch: int,
    kv_heads: int,
    groups: int,
    keys: int,
    share: float,
    head_width: int,
    size: int,
    kinds: list[str],
    documents: int,
    padding: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads, queries = kv_heads * groups, max(1, round(share * keys))

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    # Multiples of 1/4 have exact dot products: both backends rank alike.
    q, k = (((normal(batch, h, n, head_width) * 4).round() / 4) for h, n in ((heads, queries), (kv_heads, keys)))
    v, upstream = normal(batch, kv_heads, keys, head_width), normal(batch, heads, queries, head_width)
    width, weights = (
        4 + 30 * torch.rand(batch, heads, queries, generator=generator),
        normal(batch, heads, queries, len(kinds)),
    )
    ids = None
    if documents:
        ids = torch.randint(0, documents, (batch, keys), generator=generator).sort(dim=1).values
        ids[:, :padding] = -1
    leaves = [tensor.requires_grad_() for tensor in (q, k, v, width, weights)]

    def run(backend: str) -> list[torch.Tensor]:
        output = attend(
            q,
            k,
            v,
            branches=[branch_of(kind, size, width) for kind in kinds],
            weights=weights,
            documents=ids,
            backend=backend,
        ).output
        gradients = torch.autograd.grad(output, leaves, upstream, allow_unused=True)
        return [output, *(torch.zeros(1) if gradient is None else gradient for gradient in gradients)]

    for found, expected in zip(run("native"), run("reference"), strict=True):
        # Sums of up to 200 products in another order, and gradients that cancel but for roundings of dO . v over D.
        assert relative_error(found.detach(), expected.detach()) < 1e-7 * (100 + 2 * head_width)
