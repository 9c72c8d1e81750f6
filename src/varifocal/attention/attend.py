"""attend: the one equation, evaluated by whichever backend is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from varifocal.attention.backends import choose_backend
from varifocal.attention.checks import as_branches, check_equation, check_tokens
from varifocal.equations.branches import Branch
from varifocal.equations.layout import Layout, make_layout
from varifocal.equations.problem import Attended, Problem
from varifocal.equations.scores import Dot, Score


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    branches: Branch | Sequence[Branch],
    weights: Tensor | None = None,
    score: Score | None = None,
    documents: Tensor | None = None,
    positions: Tensor | None = None,
    backend: str = "auto",
) -> Attended:
    """o_i = sum_m w_im sum_{j in S_im} softmax_{S_im}(s_ij) v_j: a weighted mixture of softmaxes over sets of keys.

    Args:
        q: queries [B, H, T, D], rotary embedding and norms already applied.
        k: keys [B, G, S, D] with H a multiple of G; query head h reads key head h // (H / G).
        v: values [B, G, S, D].
        branches: one branch or M of them, each the set of keys that one softmax reads.
        weights: [B, H, T, M], the weight of each branch; None for a single branch of weight 1.
        score: how a query rates a key; None for Dot(), q.k / sqrt(D).
        documents: integers [B, S], the document of each key. A document is a run of equal ids; documents do not see
            each other. Negative ids are padding, which sees nothing and is not seen.
        positions: integers [T] or [B, T], the index of each query's own key; None if the queries are the last T of
            the S keys. A query sees no key behind its own.
        backend: "auto", or the name of a backend, which then runs or says why it cannot.

    Returns:
        The output, each branch's log-sum-exp, and what each top-k selected. A query that sees nothing gets 0.
    """
    branches = as_branches(branches)
    score = Dot() if score is None else score
    layout = lay_out(q, k, v, documents=documents, positions=positions)
    in_place = positions is None and q.shape[2] == k.shape[2]
    check_equation(q, k, branches=branches, weights=weights, score=score, in_place=in_place)
    problem = Problem(q=q, k=k, v=v, branches=branches, weights=weights, score=score, layout=layout)
    return choose_backend(backend, problem).run(problem)


def lay_out(q: Tensor, k: Tensor, v: Tensor, *, documents: Tensor | None, positions: Tensor | None) -> Layout:
    """Where the queries of a checked call stand."""
    check_tokens(q, k, v, documents=documents, positions=positions)
    return make_layout(
        batch=q.shape[0],
        queries=q.shape[2],
        keys=k.shape[2],
        documents=documents,
        positions=positions,
        device=q.device,
    )
