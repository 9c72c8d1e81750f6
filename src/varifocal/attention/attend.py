"""attend: the one equation, evaluated by whichever backend is asked for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from varifocal.attention.backends import prepare
from varifocal.attention.checks import as_branches, check_equation, check_heads, check_layout, check_tokens
from varifocal.attention.repeats import answer_again, is_plain, learn
from varifocal.equations.branches import Branch
from varifocal.equations.equation import Equation
from varifocal.equations.layout import Layout, make_layout
from varifocal.equations.normalizers import Normalizer
from varifocal.equations.problem import Asked, Attended, Problem, Shortcuts
from varifocal.equations.scores import Dot, Score


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    branches: Branch | Sequence[Branch],
    weights: Tensor | None = None,
    score: Score | None = None,
    normalizer: Normalizer | None = None,
    relative_values: Tensor | None = None,
    documents: Tensor | None = None,
    positions: Tensor | None = None,
    layout: Layout | None = None,
    shortcuts: Shortcuts | None = None,
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
        normalizer: how scores become weights; None for softmax, or a SinkLogit.
        relative_values: [N, D], of which row min(x, N - 1) is added to the value of a key at distance x.
        documents: integers [B, S], the document of each key. A document is a run of equal ids; documents do not see
            each other. Negative ids are padding, which sees nothing and is not seen.
        positions: integers [T] or [B, T], the index of each query's own key; None if the queries are the last T of
            the S keys. A query sees no key after its own.
        layout: in place of documents and positions: what `lay_out` made of them, for calls that share it.
        shortcuts: what a memory keeps of past keys; it saves work and changes no result.
        backend: "auto", or the name of a backend, which then runs or says why it cannot.

    Returns:
        The output, each branch's logsumexp, and what each top-k selected. A query that sees nothing gets 0.
    """
    equation = Equation(as_branches(branches), weights, Dot() if score is None else score, normalizer, relative_values)
    if layout is None and documents is None and positions is None and is_plain(equation):
        # As most decoded tokens come: where the queries stand follows from the number of keys.
        asked = Asked(q, k, v, equation.branches, weights, equation.score, shortcuts, wants_logsumexp=True)
        if (attended := answer_again(asked, backend)) is not None:
            return attended
    if layout is None:
        layout = lay_out(q, k, v, documents=documents, positions=positions)
    else:
        check_heads(q, k, v)
        check_layout(q, k, layout, documents=documents, positions=positions)
    return evaluate(equation, q, k, v, layout=layout, shortcuts=shortcuts, backend=backend)


def evaluate(
    equation: Equation,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: Layout,
    shortcuts: Shortcuts | None = None,
    backend: str = "auto",
    wants_logsumexp: bool = True,
) -> Attended:
    """An equation on queries, keys and values that are known to fit their layout."""
    asked = None
    if layout.first_place is not None and is_plain(equation):
        asked = Asked(q, k, v, equation.branches, equation.weights, equation.score, shortcuts, wants_logsumexp)
        if (again := answer_again(asked, backend)) is not None:
            return again
    check_equation(q, k, equation, aligned=layout.aligned)
    problem = Problem(
        q=q,
        k=k,
        v=v,
        branches=equation.branches,
        weights=equation.weights,
        score=equation.score,
        layout=layout,
        normalizer=equation.normalizer,
        relative_values=equation.relative_values,
        shortcuts=shortcuts,
        wants_logsumexp=wants_logsumexp,
    )
    attended: Attended = prepare(backend, problem, device=q.device.type)()
    if asked is not None:
        learn(asked, backend)
    return attended


def lay_out(
    q: Tensor, k: Tensor, v: Tensor, *, documents: Tensor | None = None, positions: Tensor | None = None
) -> Layout:
    """Where the queries of a call stand among its keys; ValueError if queries, keys and values do not fit together."""
    check_tokens(q, k, v, documents=documents, positions=positions)
    return make_layout(
        batch=q.shape[0],
        queries=q.shape[2],
        keys=k.shape[2],
        documents=documents,
        positions=positions,
        device=q.device,
    )
