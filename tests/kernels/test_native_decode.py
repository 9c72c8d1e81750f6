"""One query against a cache: its kernel cuts the cache into chunks, and must lose nothing where they are joined."""

from __future__ import annotations

import pytest
import torch

from varifocal import Causal, Prefix, Window, attend


@pytest.mark.parametrize("keys", [5, 300, 1000])
@pytest.mark.parametrize("far", [1.0, 60.0, 400.0])
def test_window_counts_beside_far_keys_of_any_score(keys: int, far: float) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 1, 16), torch.randn(1, 2, keys, 16), torch.randn(1, 2, keys, 16)
    # A key outside the window that every query of its group likes: its score exceeds the window's best by far.
    k[0, :, 0] = far * q[0, ::2, 0]
    weights = torch.tensor([0.7, 0.3]).expand(1, 4, 1, 2)
    for branches in ((Window(3), Causal()), (Window(3) | Prefix(1), Causal()), (Causal(), Window(2))):
        found = attend(q, k, v, branches=branches, weights=weights, backend="native")
        truth = attend(
            q.double(), k.double(), v.double(), branches=branches, weights=weights.double(), backend="reference"
        )
        torch.testing.assert_close(found.output.double(), truth.output, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found.logsumexp.double(), truth.logsumexp.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 7])
def test_heads_of_a_group_read_their_keys_together(group: int) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 2 * group, 1, 24), torch.randn(2, 2, 700, 24), torch.randn(2, 2, 700, 24)
    found = attend(q, k, v, branches=Window(300) | Prefix(4), backend="native")
    truth = attend(q.double(), k.double(), v.double(), branches=Window(300) | Prefix(4), backend="reference")
    torch.testing.assert_close(found.output.double(), truth.output, rtol=1e-4, atol=1e-6)
