"""The divergence that trains an indexer, from attention over the selected keys: no selected key is ever gathered.

With the attention p over the keys that a query selected, and the indexer's scores r_j = a . b_j over the same keys:

    KL(p || softmax(r)) = lse(r) - a . sum_j p_j b_j + (sum_j p_j s_j - lse(s))

Three attentions over the selection: one gives lse(r), one mixes b by p, one mixes k by p for sum_j p_j s_j.
"""

import torch
from torch import Tensor
from torch.nn import functional

from .arguments import scale_per_head
from .selected import attend_selected


def selection_divergence(
    q: Tensor,
    k: Tensor,
    index_q: Tensor,
    index_k: Tensor,
    selected: Tensor,
    *,
    position: Tensor,
    start: Tensor,
    block: int | None,
) -> Tensor:
    """KL(attention || indexer) [B, H, T] of each query and head, 0 where nothing was selected.

    Differentiable in index_q [B, H, T, R] and index_k [B, G, S, R], R <= D; q [B, H, T, D] and k [B, G, S, D] are the
    target and get no gradient. All float32. selected, position, start and block as in attend_selected; without `block`
    the query's own key counts as selected.
    """
    q, k = q.detach(), k.detach()
    reading = {"position": position, "start": start, "block": block, "include_self": block is None}
    guess = attend_selected(index_q, index_k, index_k.detach(), selected, scale=1.0, **reading)  # type: ignore[arg-type]
    values = functional.pad(index_k, (0, k.shape[-1] - index_k.shape[-1]))
    target = attend_selected(q, k, values, selected, **reading)  # type: ignore[arg-type]
    with torch.no_grad():
        own = attend_selected(q, k, k, selected, **reading)  # type: ignore[arg-type]
        certainty = (q * own.output).sum(-1) * scale_per_head(None, q)[:, None] - own.logsumexp
    expected = (index_q * target.output[..., : index_q.shape[-1]]).sum(-1)
    # A query that sees nothing has lse minus infinity; the mask keeps its gradient 0 as well.
    blind = (start > position)[:, None]
    return guess.logsumexp.masked_fill(blind, 0.0) - expected + certainty.masked_fill(blind, 0.0)
