"""Native pair-gated attention: a small network rates every pair of query and key and gates its score.

    alpha_ij = scale_h q_i . k_j      l_ij = output_h . GELU(a_i + b_j) + bias_h      s_ij = sigmoid(l_ij)
    score = alpha s ("product"), or alpha + log s ("log", "threshold": the same without pairs of s < threshold)

A score of the mixture kernels (mixture.py). Tile by tile: nothing of the size of all pairs exists, forward or backward.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .mixture import CAUSAL, MixtureBranch, check_mixture, mixture_forward, mixture_inputs, will_differentiate

PairForm = Literal["product", "log", "threshold"]
FORMS: dict[PairForm, int] = {"product": 1, "log": 2, "threshold": 3}
"""The forms by their numbers among the scores: `vf_score`."""


class PairGated(NamedTuple):
    """What `pair_gate` returns."""

    output: Tensor
    """[B, H, T, D] in q's dtype."""
    logsumexp: Tensor
    """[B, H, T, M] float32: log of the sum of exp(score), -inf where nothing is read; carries no gradient."""


def pair_gate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    output: Tensor,
    position: Tensor,
    start: Tensor,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    form: PairForm = "product",
    threshold: float = 0.1,
    branches: Sequence[MixtureBranch] = (MixtureBranch(window=CAUSAL),),
    weights: Tensor | None = None,
    skip_closed: bool = False,
) -> PairGated:
    """Pair-gated attention on the CPU; differentiable in every floating argument.

    q, k, v, branches, position, start and weights as in `mixture`, skip_closed as in `mixture_inputs`.
    a [B, H, T, P] and b [B, H, S, P], the halves of the hidden layer, output [H, P] and bias [H] (None: 0), taken as
    float32. scale [H] is a factor on q . k / sqrt(D) (None: 1).
    """
    _check(q, k, a, b, output=output, bias=bias, scale=scale)
    if form not in FORMS:
        raise ValueError(f"pair gate form must be one of {', '.join(FORMS)}, got {form!r}")
    if not 0 < threshold < 1:
        raise ValueError(f"pair gate threshold must lie between 0 and 1, got {threshold}")
    check_mixture(q, k, v, branches=branches, position=position, start=start, weights=weights)
    root = math.sqrt(q.shape[3])
    inputs = mixture_inputs(
        q, k, v,
        branches=branches, position=position, start=start, weights=weights,
        scale=1 / root if scale is None else scale.float() / root, skip_closed=skip_closed,
    )._replace(
        score=FORMS[form], threshold=threshold,
        pair_a=a.float(), pair_b=b.float(),
        pair_output=output.float(), pair_bias=None if bias is None else bias.float(),
    )  # fmt: skip
    inputs = inputs._replace(save=will_differentiate(inputs))
    if torch.is_autocast_enabled("cpu"):
        # Autocast does not concern pair gates: they take q, k and v as they come, and the network is float32 anyway.
        with torch.autocast("cpu", enabled=False):
            made = mixture_forward(inputs)
    else:
        made = mixture_forward(inputs)
    return PairGated(made.out, made.logsumexp.detach())


def _check(
    q: Tensor, k: Tensor, a: Tensor, b: Tensor, *, output: Tensor, bias: Tensor | None, scale: Tensor | None
) -> None:
    """ValueError for shapes that do not fit."""
    (batch, heads, queries, _), keys, units = q.shape, k.shape[2], a.shape[-1]
    if a.shape != (batch, heads, queries, units) or b.shape != (batch, heads, keys, units):
        raise ValueError(
            f"a must be [B, H, T, P] and b [B, H, S, P] with B, H, T, S = {batch}, {heads}, {queries}, {keys}, "
            f"got {[*a.shape]} and {[*b.shape]}"
        )
    if output.shape != (heads, units):
        raise ValueError(f"output must be [H, P] = [{heads}, {units}], got {[*output.shape]}")
    for name, x in (("bias", bias), ("scale", scale)):
        if x is not None and x.shape != (heads,):
            raise ValueError(f"{name} must be [H] = [{heads}], got {[*x.shape]}")
