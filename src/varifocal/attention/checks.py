"""Bad input to attend: one sentence that says what was given, what was expected and what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from varifocal.equations.branches import (
    Branch,
    Cluster,
    Compressed,
    Indexer,
    Prefix,
    Segments,
    SoftWindow,
    TopK,
    Union,
    Window,
    members,
)
from varifocal.equations.equation import Equation
from varifocal.equations.layout import Layout, repeated_document
from varifocal.equations.normalizers import Entmax, SinkLogit
from varifocal.equations.scores import DistanceBias, HeadScale, OwnFeatures, PairGate, Score

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_equation(q: Tensor, k: Tensor, equation: Equation, *, aligned: bool) -> None:
    """ValueError unless branches, weights and score fit the queries and keys.

    `aligned` says that the queries are one for each key, in the order of the keys.
    """
    branches, weights, score = equation.branches, equation.weights, equation.score
    sizes = {"B": q.shape[0], "H": q.shape[1], "T": q.shape[2], "S": k.shape[2], "D": q.shape[3], "M": len(branches)}
    check_branches(q, branches, sizes)
    check_score(q, score, sizes)
    if any(isinstance(member, Segments) for branch in branches for member in members(branch)):
        check_segments(q, branches, score, sizes, aligned=aligned)
    if isinstance(equation.normalizer, SinkLogit):
        check_tensor("sink logits", equation.normalizer.logit, "H", sizes, like=q)
    if isinstance(equation.normalizer, Entmax):
        check_tensor("entmax's alpha", equation.normalizer.alpha, "H", sizes, like=q)
        alpha = equation.normalizer.alpha
        if readable(alpha) and not bool(((alpha > 1) & (alpha <= 2)).all()):
            raise ValueError(f"entmax's alpha must be above 1 and at most 2 in every head, got {alpha.tolist()}")
    if equation.relative_values is not None:
        check_tensor("relative values", equation.relative_values, "-D", sizes, like=q)
        if equation.relative_values.shape[0] == 0:
            raise ValueError("relative values need a row for at least one distance, got none")
        if any(isinstance(member, Segments) for branch in branches for member in members(branch)):
            raise ValueError("Segments reads summaries, which lie at no distance; leave relative_values out")
    if weights is not None:
        check_tensor("weights", weights, "BHTM", sizes, like=q)
        check_finite("weights", weights)
    elif len(branches) > 1:
        raise ValueError(
            f"{len(branches)} branches need weights of shape [B, H, T, M] = {expected_shape('BHTM', sizes)}, got None; "
            "for one softmax over all of them join the branches with |"
        )


def check_tokens(q: Tensor, k: Tensor, v: Tensor, *, documents: Tensor | None, positions: Tensor | None) -> None:
    """ValueError unless queries, keys, values, documents and positions fit together."""
    check_heads(q, k, v)
    sizes = {"B": q.shape[0], "T": q.shape[2], "S": k.shape[2]}
    check_documents(q, documents, sizes)
    check_positions(q, positions, sizes)


def check_layout(q: Tensor, k: Tensor, layout: Layout, *, documents: Tensor | None, positions: Tensor | None) -> None:
    """ValueError unless a layout is of these queries and keys, and stands alone."""
    if documents is not None or positions is not None:
        raise ValueError("give a layout, or documents and positions, not both: a layout is made of them")
    found, wanted = (tuple(layout.position.shape), layout.keys), ((q.shape[0], q.shape[2]), k.shape[2])
    if found != wanted:
        raise ValueError(
            f"the layout is of [B, T] = {found[0]} queries and {found[1]} keys, expected {wanted[0]} and {wanted[1]}"
        )


def check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Queries [B, H, T, D], keys and values [B, G, S, D], of one floating dtype on one device."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions [batch, heads, length, width], got shape {shape(tensor)}")
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} must be float64, float32, bfloat16 or float16, got {tensor.dtype}")
        if tensor.dtype != q.dtype:
            raise ValueError(f"q, k and v must have one dtype, got q {q.dtype} and {name} {tensor.dtype}; convert one")
        if tensor.device != q.device:
            raise ValueError(f"q, k and v must be on one device, got q on {q.device} and {name} on {tensor.device}")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape [B, G, S, D], got k {shape(k)} and v {shape(v)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q [B, H, T, D] and k [B, G, S, D] must agree in B and D, got q {shape(q)} and k {shape(k)}")
    if q.shape[3] == 0:
        raise ValueError(f"the head width D must be at least 1, got q {shape(q)}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"query heads must be a multiple of key heads, got {q.shape[1]} query heads and {k.shape[1]} key heads"
        )


def as_branches(branches: Branch | Sequence[Branch]) -> tuple[Branch, ...]:
    """One or several branches as a tuple."""
    if isinstance(branches, Branch):
        return (branches,)
    if not isinstance(branches, Sequence):
        raise ValueError(f"branches must be a branch such as Causal(), or several in a tuple, got {branches!r}")
    return tuple(branches)


def check_branches(q: Tensor, branches: tuple[Branch, ...], sizes: dict[str, int]) -> None:
    """At least one branch, and what the branches carry fits the call."""
    if not branches:
        raise ValueError("branches is empty; expected at least one, for example branches=Causal()")
    for branch in branches:
        if not isinstance(branch, Branch):
            raise ValueError(f"a branch must be a value such as Causal() or Window(256), got {branch!r}")
        selectors = [member for member in members(branch) if isinstance(member, TopK)]
        if isinstance(branch, Union) and len(selectors) > 1:
            raise ValueError(f"a union may hold one TopK, got {len(selectors)}; give each a branch of its own")
        for member in members(branch):
            if isinstance(member, SoftWindow):
                check_tensor("SoftWindow.width", member.width, "BHT", sizes, like=q)
                check_finite("SoftWindow.width", member.width)
            if isinstance(member, TopK) and member.indexer is not None:
                check_indexer(q, member.indexer, sizes)
            if isinstance(member, Compressed):
                if isinstance(branch, Union):
                    raise ValueError("Compressed is a softmax of its own; give it a branch of its own, not a union")
                check_features("Compressed", member.queries, member.keys, q, sizes)
            if isinstance(member, Cluster):
                check_integers("Cluster.clusters", member.clusters, like=q)
                wanted = (sizes["B"], sizes["S"])
                if member.clusters.ndim != 3 or (member.clusters.shape[0], member.clusters.shape[2]) != wanted:
                    raise ValueError(
                        f"Cluster.clusters must be [B, G, S] with B, S = {wanted}, got {shape(member.clusters)}"
                    )
                if member.clusters.shape[1] == 0 or sizes["H"] % member.clusters.shape[1]:
                    raise ValueError(
                        f"the {sizes['H']} query heads must be a multiple of the heads of Cluster.clusters, "
                        f"got {member.clusters.shape[1]}"
                    )
            if isinstance(member, Window | Prefix | Cluster):
                listed = member.size if isinstance(member.size, tuple) else None
                if listed is not None and len(listed) != sizes["H"]:
                    raise ValueError(
                        f"{type(member).__name__} lists {len(listed)} sizes, expected one for each of the "
                        f"{sizes['H']} query heads"
                    )


def check_indexer(q: Tensor, indexer: Indexer, sizes: dict[str, int]) -> None:
    """Indexer queries [B, I, T, R] and keys [B, J, S, R], I dividing H and J dividing I."""
    for name, tensor in (("queries", indexer.queries), ("keys", indexer.keys)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"Indexer.{name} must be a floating-point tensor, got {type(tensor).__name__}")
    if indexer.queries.ndim != 4 or indexer.keys.ndim != 4 or indexer.queries.shape[3] != indexer.keys.shape[3]:
        raise ValueError(
            "Indexer.queries must be [B, I, T, R] and Indexer.keys [B, J, S, R], "
            f"got {shape(indexer.queries)} and {shape(indexer.keys)}"
        )
    for name, tensor, letters in (("queries", indexer.queries, "B-T-"), ("keys", indexer.keys, "B-S-")):
        check_tensor(f"Indexer.{name}", tensor, letters, sizes, like=q)
    heads, key_heads = indexer.queries.shape[1], indexer.keys.shape[1]
    if heads == 0 or key_heads == 0 or sizes["H"] % heads or heads % key_heads:
        raise ValueError(
            f"the {sizes['H']} query heads must be a multiple of the indexer's heads, and these of its key heads, "
            f"got {heads} and {key_heads}"
        )


def check_score(q: Tensor, score: Score, sizes: dict[str, int]) -> None:
    """What the score carries fits the call."""
    if not isinstance(score, Score):
        raise ValueError(f"score must be a value such as Dot() or HeadScale(scale), got {score!r}")
    if isinstance(score, DistanceBias):
        rows = "H-" if isinstance(score.table, Tensor) and score.table.ndim == 2 else "BHT-"
        check_tensor("DistanceBias.table", score.table, rows, sizes, like=q)
        if score.table.shape[-1] == 0:
            raise ValueError("DistanceBias.table needs an entry for at least one distance, got none")
    if isinstance(score, OwnFeatures):
        check_features("OwnFeatures", score.queries, score.keys, q, sizes)
    if isinstance(score, HeadScale):
        check_tensor("HeadScale.scale", score.scale, "H", sizes, like=q)
    if isinstance(score, PairGate):
        for name, tensor, letters in (
            ("queries", score.queries, "BHT-"),
            ("keys", score.keys, "BHS-"),
            ("output", score.output, "H-"),
        ):
            check_tensor(f"PairGate.{name}", tensor, letters, sizes, like=q)
        if not score.queries.shape[3] == score.keys.shape[3] == score.output.shape[1]:
            raise ValueError(
                "PairGate queries, keys and output must have one hidden width P, "
                f"got {shape(score.queries)}, {shape(score.keys)} and {shape(score.output)}"
            )
        for name, vector in (("bias", score.bias), ("scale", score.scale)):
            if vector is not None:
                check_tensor(f"PairGate.{name}", vector, "H", sizes, like=q)


def check_features(name: str, queries: Tensor, keys: Tensor, q: Tensor, sizes: dict[str, int]) -> None:
    """Features of queries [B, H, T, F] and of keys [B, G, S, F], H a multiple of G."""
    check_tensor(f"{name}.queries", queries, "BHT-", sizes, like=q)
    check_tensor(f"{name}.keys", keys, "B-S-", sizes, like=q)
    if keys.shape[1] == 0 or sizes["H"] % keys.shape[1] or keys.shape[3] != queries.shape[3]:
        raise ValueError(
            f"{name} must have one width F, and query heads a multiple of key heads, "
            f"got {shape(queries)} and {shape(keys)}"
        )


def check_segments(
    q: Tensor, branches: tuple[Branch, ...], score: Score, sizes: dict[str, int], *, aligned: bool
) -> None:
    """Summaries need the queries of every key, and a score that can rate a summary."""
    if not score.rates_summaries:
        raise ValueError(
            f"Segments rates summaries, which a {type(score).__name__} cannot; use Dot() or HeadScale with Segments"
        )
    for member in (member for branch in branches for member in members(branch)):
        if isinstance(member, Segments):
            if member.queries is None:
                if not aligned:
                    raise ValueError(
                        f"Segments needs every key's query, got {sizes['T']} queries for {sizes['S']} keys, "
                        "or queries at positions of their own; pass Segments(length, queries=...) of shape [B, H, S, D]"
                    )
            else:
                check_tensor("Segments.queries", member.queries, "BHSD", sizes, like=q)


def check_documents(q: Tensor, documents: Tensor | None, sizes: dict[str, int]) -> None:
    """Integers [B, S] in unbroken runs."""
    if documents is None:
        return
    check_integers("documents", documents, like=q)
    if tuple(documents.shape) != expected_shape("BS", sizes):
        raise ValueError(f"documents must be [B, S] = {expected_shape('BS', sizes)}, got shape {shape(documents)}")
    check_runs(documents)


def check_runs(documents: Tensor) -> None:
    """ValueError if an id names two separate runs of a row of documents [B, S], where values may be looked at."""
    if readable(documents) and (repeated := repeated_document(documents)) is not None:
        raise ValueError(
            f"document {repeated} appears in two separate places of a row; a document must be one unbroken run of "
            "its id (padding, with negative ids, before or after it)"
        )


def check_positions(q: Tensor, positions: Tensor | None, sizes: dict[str, int]) -> None:
    """Integers [T] or [B, T] in 0..S-1; without them, no more queries than keys."""
    if positions is None:
        if sizes["T"] > sizes["S"]:
            raise ValueError(
                f"{sizes['T']} queries cannot be the last of {sizes['S']} keys; pass positions to say where they stand"
            )
        return
    check_integers("positions", positions, like=q)
    if tuple(positions.shape) not in (expected_shape("T", sizes), expected_shape("BT", sizes)):
        raise ValueError(f"positions must be [T] or [B, T] with T = {sizes['T']}, got shape {shape(positions)}")
    if readable(positions) and positions.numel():
        low, high = int(positions.min()), int(positions.max())
        if low < 0 or high >= sizes["S"]:
            raise ValueError(f"positions must lie in 0..{sizes['S'] - 1} (the keys' indices), got {low}..{high}")


def check_integers(name: str, tensor: Tensor, *, like: Tensor) -> None:
    """An integer tensor on the device of `like`."""
    if (
        not isinstance(tensor, Tensor)
        or tensor.is_floating_point()
        or tensor.is_complex()
        or tensor.dtype == torch.bool
    ):
        given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be a tensor of integers, got {given}")
    check_device(name, tensor, like)


def check_tensor(name: str, tensor: Tensor, letters: str, sizes: dict[str, int], *, like: Tensor) -> None:
    """A floating tensor on the device of `like` with the sizes that `letters` name ('-' is any size)."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise ValueError(f"{name} must be a floating-point tensor, got {given}")
    check_device(name, tensor, like)
    fits = tensor.ndim == len(letters) and all(
        letter == "-" or size == sizes[letter] for letter, size in zip(letters, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join(letters).replace("-", "*")
        known = ", ".join(f"{letter} = {sizes[letter]}" for letter in letters if letter != "-")
        raise ValueError(f"{name} must have shape [{wanted}] with {known}, got {shape(tensor)}")


def check_finite(name: str, tensor: Tensor) -> None:
    """No NaN and no infinity, where values may be looked at."""
    if not readable(tensor):
        return
    # The sum of finite numbers is finite, unless it overflows: only then is every number looked at.
    if not math.isfinite(tensor.detach().sum().item()) and not bool(torch.isfinite(tensor).all()):
        raise ValueError(f"{name} must be finite for every query, got NaN or infinity; look at the gate that made them")


def check_device(name: str, tensor: Tensor, like: Tensor) -> None:
    """The tensor lies where the queries lie."""
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on the device of q, {like.device}, got {tensor.device}")


def readable(tensor: Tensor) -> bool:
    """Whether values may be looked at: not while compiling, and not where it would make a device wait."""
    return not torch.compiler.is_compiling() and tensor.device.type == "cpu"


def expected_shape(letters: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """The sizes that letters name."""
    return tuple(sizes[letter] for letter in letters)


def shape(tensor: Tensor) -> tuple[int, ...]:
    """A tensor's shape as a plain tuple, for messages."""
    return tuple(tensor.shape)
