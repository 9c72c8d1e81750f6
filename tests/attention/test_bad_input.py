"""Bad input gets one sentence: what was given, what was expected, what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.attention.mechanisms import SHAPE, small_mechanism, tokens
from varifocal import (
    Branch,
    Causal,
    Dot,
    GateConfig,
    HeadScale,
    HeadShape,
    Indexer,
    PairGate,
    Prefix,
    RandomBlocks,
    Segments,
    SoftWindow,
    Strided,
    TopK,
    Window,
    attend,
    make_mechanism,
)
from varifocal.attention.gates import set_gate_warmth
from varifocal.equations.branches import Union

NAN, INFINITY = float("nan"), float("inf")


@dataclass(frozen=True)
class Mistake:
    """Something that must raise ValueError, and the essential part of the sentence."""

    name: str
    make: Callable[[], object]
    sentence: str


def assert_explained(mistake: Mistake) -> None:
    with pytest.raises(ValueError, match=re.escape(mistake.sentence)):
        mistake.make()


def each(mistakes: list[Mistake]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("mistake", mistakes, ids=lambda mistake: mistake.name)


def call(q: Any = None, k: Any = None, v: Any = None, **options: Any) -> object:
    """attend with B = 2, H = 4, G = 2, T = S = 6, D = 3 and a causal branch, and whatever is given in place of that."""
    q = torch.zeros(2, 4, 6, 3) if q is None else q
    k = torch.zeros(2, 2, 6, 3) if k is None else k
    v = k if v is None else v
    return attend(q, k, v, **{"branches": Causal(), **options})


def zeros(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.zeros(shape, dtype=dtype, device=device)


def whole(*values: Any, **options: Any) -> Tensor:
    return torch.tensor(values, **options)


def holding(bad: float, *shape: int) -> Tensor:
    tensor = torch.ones(shape)
    tensor.view(-1)[-1] = bad
    return tensor


TOKENS = [
    Mistake("q_list", lambda: call(q=[1.0]), "q must be a tensor, got list"),
    Mistake("k_list", lambda: call(k=[1.0], v=zeros(2, 2, 6, 3)), "k must be a tensor, got list"),
    Mistake("v_none",
            lambda: attend(zeros(1, 1, 1, 1), zeros(1, 1, 1, 1), None, branches=Causal()),  # type: ignore[arg-type]
            "v must be a tensor, got NoneType"),
    Mistake("q_3_dimensions", lambda: call(q=zeros(4, 6, 3)),
            "q must have 4 dimensions [batch, heads, length, width], got shape (4, 6, 3)"),
    Mistake("k_5_dimensions", lambda: call(k=zeros(1, 2, 2, 6, 3)), "k must have 4 dimensions"),
    Mistake("v_2_dimensions", lambda: call(v=zeros(6, 3)), "v must have 4 dimensions"),
    Mistake("q_integers", lambda: call(q=zeros(2, 4, 6, 3, dtype=torch.int64)),
            "q must be float64, float32, bfloat16 or float16, got torch.int64"),
    Mistake("q_float8", lambda: call(q=zeros(2, 4, 6, 3).to(torch.float8_e4m3fn)), "got torch.float8_e4m3fn"),
    Mistake("q_complex", lambda: call(q=zeros(2, 4, 6, 3, dtype=torch.complex64)), "got torch.complex64"),
    Mistake("k_other_dtype", lambda: call(k=zeros(2, 2, 6, 3, dtype=torch.bfloat16)),
            "q, k and v must have one dtype, got q torch.float32 and k torch.bfloat16; convert one"),
    Mistake("v_other_dtype", lambda: call(v=zeros(2, 2, 6, 3, dtype=torch.float64)),
            "got q torch.float32 and v torch.float64"),
    Mistake("k_other_device", lambda: call(k=zeros(2, 2, 6, 3, device="meta")),
            "q, k and v must be on one device, got q on cpu and k on meta"),
    Mistake("v_other_device", lambda: call(v=zeros(2, 2, 6, 3, device="meta")), "got q on cpu and v on meta"),
    Mistake("k_and_v_differ", lambda: call(v=zeros(2, 2, 5, 3)),
            "k and v must have one shape [B, G, S, D], got k (2, 2, 6, 3) and v (2, 2, 5, 3)"),
    Mistake("batches_differ", lambda: call(q=zeros(3, 4, 6, 3)),
            "must agree in B and D, got q (3, 4, 6, 3) and k (2, 2, 6, 3)"),
    Mistake("widths_differ", lambda: call(q=zeros(2, 4, 6, 5)),
            "must agree in B and D, got q (2, 4, 6, 5) and k (2, 2, 6, 3)"),
    Mistake("width_0", lambda: call(q=zeros(2, 4, 6, 0), k=zeros(2, 2, 6, 0)), "the head width D must be at least 1"),
    Mistake("heads_not_a_multiple", lambda: call(q=zeros(2, 5, 6, 3)),
            "query heads must be a multiple of key heads, got 5 query heads and 2 key heads"),
    Mistake("more_key_heads", lambda: call(q=zeros(2, 1, 6, 3)), "got 1 query heads and 2 key heads"),
    Mistake("no_key_heads", lambda: call(k=zeros(2, 0, 6, 3)), "got 4 query heads and 0 key heads"),
    Mistake("more_queries_than_keys", lambda: call(q=zeros(2, 4, 7, 3)),
            "7 queries cannot be the last of 6 keys; pass positions to say where they stand"),
]  # fmt: skip

DOCUMENTS = [
    Mistake("floats", lambda: call(documents=zeros(2, 6)), "documents must be a tensor of integers, got torch.float32"),
    Mistake("bools", lambda: call(documents=zeros(2, 6, dtype=torch.bool)),
            "documents must be a tensor of integers, got torch.bool"),
    Mistake("list", lambda: call(documents=[[0] * 6] * 2), "documents must be a tensor of integers, got list"),
    Mistake("one_row", lambda: call(documents=whole(0, 0, 0, 0, 0, 0)),
            "documents must be [B, S] = (2, 6), got shape (6,)"),
    Mistake("too_short", lambda: call(documents=zeros(2, 5, dtype=torch.int64)),
            "documents must be [B, S] = (2, 6), got shape (2, 5)"),
    Mistake("other_device", lambda: call(documents=zeros(2, 6, dtype=torch.int64, device="meta")),
            "documents must be on the device of q, cpu, got meta"),
    Mistake("repeated", lambda: call(documents=whole([0] * 6, [7, 7, 3, 3, 7, 7])),
            "document 7 appears in two separate places of a row; a document must be one unbroken run"),
    Mistake("split_by_padding", lambda: call(documents=whole([0] * 6, [7, 7, -1, -1, 7, 7])),
            "document 7 appears in two separate places of a row"),
]  # fmt: skip

POSITIONS = [
    Mistake("floats", lambda: call(positions=zeros(6)), "positions must be a tensor of integers, got torch.float32"),
    Mistake("list", lambda: call(positions=[0, 1, 2, 3, 4, 5]), "positions must be a tensor of integers, got list"),
    Mistake("too_few", lambda: call(positions=whole(0, 1, 2)),
            "positions must be [T] or [B, T] with T = 6, got shape (3,)"),
    Mistake("too_many_rows", lambda: call(positions=zeros(3, 6, dtype=torch.int64)), "got shape (3, 6)"),
    Mistake("other_device", lambda: call(positions=zeros(6, dtype=torch.int64, device="meta")),
            "positions must be on the device of q, cpu, got meta"),
    Mistake("negative", lambda: call(positions=whole(0, 1, -2, 3, 4, 5)),
            "positions must lie in 0..5 (the keys' indices), got -2..5"),
    Mistake("too_large", lambda: call(positions=whole(0, 1, 2, 3, 4, 6)),
            "positions must lie in 0..5 (the keys' indices), got 0..6"),
]  # fmt: skip

TWO = (Window(2), Causal())
WEIGHTS = [
    Mistake("none", lambda: call(branches=TWO),
            "2 branches need weights of shape [B, H, T, M] = (2, 4, 6, 2), got None; for one softmax over all of them "
            "join the branches with |"),
    Mistake("one_too_many", lambda: call(branches=TWO, weights=zeros(2, 4, 6, 3)),
            "weights must have shape [B, H, T, M] with B = 2, H = 4, T = 6, M = 2, got (2, 4, 6, 3)"),
    Mistake("without_branches", lambda: call(branches=TWO, weights=zeros(2, 4, 6)), "got (2, 4, 6)"),
    Mistake("heads_last", lambda: call(branches=TWO, weights=zeros(2, 6, 4, 2)), "got (2, 6, 4, 2)"),
    Mistake("integers", lambda: call(weights=zeros(2, 4, 6, 1, dtype=torch.int64)),
            "weights must be a floating-point tensor, got torch.int64"),
    Mistake("number", lambda: call(weights=1.0), "weights must be a floating-point tensor, got float"),
    Mistake("other_device", lambda: call(weights=zeros(2, 4, 6, 1, device="meta")),
            "weights must be on the device of q, cpu, got meta"),
    Mistake("nan", lambda: call(weights=holding(NAN, 2, 4, 6, 1)),
            "weights must be finite for every query, got NaN or infinity; look at the gate that made them"),
    Mistake("infinity", lambda: call(weights=holding(-INFINITY, 2, 4, 6, 1)), "weights must be finite"),
]  # fmt: skip

BRANCHES = [
    Mistake("none_at_all", lambda: call(branches=()),
            "branches is empty; expected at least one, for example branches=Causal()"),
    Mistake("a_number", lambda: call(branches=(Causal(), 3), weights=zeros(2, 4, 6, 2)),
            "a branch must be a value such as Causal() or Window(256), got 3"),
    Mistake("a_class", lambda: call(branches=(Causal,)),
            "a branch must be a value such as Causal() or Window(256), got <class"),
    Mistake("unknown", lambda: call(branches=Branch()), "does not know the branch Branch()"),
    Mistake("two_top_ks_in_a_union", lambda: call(branches=TopK() | Window(2) | TopK(minimum=3)),
            "a union may hold one TopK, got 2; give each a branch of its own"),
    Mistake("window_0", lambda: Window(0), "window size must be at least 1, got 0"),
    Mistake("window_negative", lambda: Window(-3), "window size must be at least 1, got -3"),
    Mistake("prefix_0", lambda: Prefix(0), "prefix size must be at least 1, got 0"),
    Mistake("stride_0", lambda: Strided(0), "stride must be at least 1, got 0"),
    Mistake("no_random_blocks", lambda: RandomBlocks(0), "number of random blocks must be at least 1, got 0"),
    Mistake("random_block_0", lambda: RandomBlocks(1, block=0), "block must be at least 1, got 0"),
    Mistake("segment_0", lambda: Segments(0), "segment length must be at least 1, got 0"),
    Mistake("k_0", lambda: TopK(minimum=0), "top-k minimum must be at least 1, got 0"),
    Mistake("k_scale_negative", lambda: TopK(scale=-1.0),
            "top-k scale must be at least 0, got -1.0"),
    Mistake("k_scale_nan", lambda: TopK(scale=NAN), "top-k scale must be a finite number, got nan"),
    Mistake("k_scale_infinite", lambda: TopK(scale=INFINITY), "finite number, got inf"),
    Mistake("top_k_block_0", lambda: TopK(block=0), "block must be at least 1, got 0"),
    Mistake("unknown_select", lambda: TopK(select="best"),  # type: ignore[arg-type]
            "top-k select must be 'exact' or 'blocks', got 'best'"),
    Mistake("edge_0", lambda: SoftWindow(zeros(2, 4, 6), edge=0.0), "soft edge must be at least 1, got 0.0"),
    Mistake("edge_nan", lambda: SoftWindow(zeros(2, 4, 6), edge=NAN), "soft edge must be a finite number, got nan"),
    Mistake("limit_0", lambda: SoftWindow(zeros(2, 4, 6), limit=0), "window limit must be at least 1, got 0"),
    Mistake("width_shape", lambda: call(branches=SoftWindow(zeros(2, 6))),
            "SoftWindow.width must have shape [B, H, T] with B = 2, H = 4, T = 6, got (2, 6)"),
    Mistake("width_number", lambda: call(branches=SoftWindow(5.0)),  # type: ignore[arg-type]
            "SoftWindow.width must be a floating-point tensor, got float"),
    Mistake("width_integers", lambda: call(branches=SoftWindow(zeros(2, 4, 6, dtype=torch.int64))),
            "SoftWindow.width must be a floating-point tensor, got torch.int64"),
    Mistake("width_nan", lambda: call(branches=SoftWindow(holding(NAN, 2, 4, 6)) | Prefix(1)),
            "SoftWindow.width must be finite for every query"),
    Mistake("width_other_device", lambda: call(branches=SoftWindow(zeros(2, 4, 6, device="meta"))),
            "SoftWindow.width must be on the device of q, cpu, got meta"),
    Mistake("segments_cached", lambda: call(q=zeros(2, 4, 2, 3), branches=Segments(2)),
            "Segments needs every key's query, got 2 queries for 6 keys"),
    Mistake("segments_at_positions", lambda: call(branches=Segments(2), positions=torch.arange(6)),
            "or queries at positions of their own; pass Segments(length, queries=...) of shape [B, H, S, D]"),
    Mistake("segments_queries_shape", lambda: call(branches=Segments(2, queries=zeros(2, 4, 5, 3))),
            "Segments.queries must have shape [B, H, S, D] with B = 2, H = 4, S = 6, D = 3, got (2, 4, 5, 3)"),
]  # fmt: skip


def indexed(queries: Any, keys: Any) -> object:
    return call(branches=TopK(indexer=Indexer(queries, keys)))


INDEXERS = [
    Mistake("ranks_differ", lambda: indexed(zeros(2, 4, 6, 2), zeros(2, 2, 6, 3)),
            "Indexer.queries must be [B, I, T, R] and Indexer.keys [B, J, S, R], got (2, 4, 6, 2) and (2, 2, 6, 3)"),
    Mistake("dimensions", lambda: indexed(zeros(2, 6, 2), zeros(2, 2, 6, 2)), "got (2, 6, 2) and (2, 2, 6, 2)"),
    Mistake("too_few_queries", lambda: indexed(zeros(2, 4, 5, 2), zeros(2, 2, 6, 2)),
            "Indexer.queries must have shape [B, *, T, *] with B = 2, T = 6, got (2, 4, 5, 2)"),
    Mistake("too_few_keys", lambda: indexed(zeros(2, 4, 6, 2), zeros(2, 2, 5, 2)),
            "Indexer.keys must have shape [B, *, S, *] with B = 2, S = 6, got (2, 2, 5, 2)"),
    Mistake("heads", lambda: indexed(zeros(2, 3, 6, 2), zeros(2, 1, 6, 2)),
            "the 4 query heads must be a multiple of the indexer's heads, and these of its key heads, got 3 and 1"),
    Mistake("key_heads", lambda: indexed(zeros(2, 2, 6, 2), zeros(2, 4, 6, 2)), "got 2 and 4"),
    Mistake("no_heads", lambda: indexed(zeros(2, 0, 6, 2), zeros(2, 1, 6, 2)), "got 0 and 1"),
    Mistake("integers", lambda: indexed(zeros(2, 4, 6, 2, dtype=torch.int64), zeros(2, 2, 6, 2)),
            "Indexer.queries must be a floating-point tensor, got torch.int64"),
    Mistake("other_device", lambda: indexed(zeros(2, 4, 6, 2), zeros(2, 2, 6, 2, device="meta")),
            "Indexer.keys must be on the device of q, cpu, got meta"),
]  # fmt: skip


def gated(**replacement: Any) -> object:
    parts: dict[str, Any] = {"queries": zeros(2, 4, 6, 5), "keys": zeros(2, 4, 6, 5), "output": zeros(4, 5)}
    return call(score=PairGate(**parts | replacement))


SCORES = [
    Mistake("not_a_score", lambda: call(score="dot"),
            "score must be a value such as Dot() or HeadScale(scale), got 'dot'"),
    Mistake("scale_nan", lambda: Dot(NAN), "score scale must be a finite number, got nan"),
    Mistake("scale_infinite", lambda: Dot(-INFINITY), "score scale must be a finite number, got -inf"),
    Mistake("head_scale_shape", lambda: call(score=HeadScale(zeros(3))),
            "HeadScale.scale must have shape [H] with H = 4, got (3,)"),
    Mistake("head_scale_number", lambda: call(score=HeadScale(2.0)),  # type: ignore[arg-type]
            "HeadScale.scale must be a floating-point tensor, got float"),
    Mistake("head_scale_other_device", lambda: call(score=HeadScale(zeros(4, device="meta"))),
            "HeadScale.scale must be on the device of q, cpu, got meta"),
    Mistake("pair_queries", lambda: gated(queries=zeros(2, 2, 6, 5)),
            "PairGate.queries must have shape [B, H, T, *] with B = 2, H = 4, T = 6, got (2, 2, 6, 5)"),
    Mistake("pair_keys", lambda: gated(keys=zeros(2, 2, 6, 5)),
            "PairGate.keys must have shape [B, H, S, *] with B = 2, H = 4, S = 6, got (2, 2, 6, 5)"),
    Mistake("pair_output", lambda: gated(output=zeros(5)),
            "PairGate.output must have shape [H, *] with H = 4, got (5,)"),
    Mistake("pair_widths", lambda: gated(output=zeros(4, 6)),
            "PairGate queries, keys and output must have one hidden width P, "
            "got (2, 4, 6, 5), (2, 4, 6, 5) and (4, 6)"),
    Mistake("pair_bias", lambda: gated(bias=zeros(4, 1)), "PairGate.bias must have shape [H] with H = 4, got (4, 1)"),
    Mistake("pair_scale", lambda: gated(scale=zeros(2)), "PairGate.scale must have shape [H] with H = 4, got (2,)"),
    Mistake("pair_other_device", lambda: gated(bias=zeros(4, device="meta")),
            "PairGate.bias must be on the device of q"),
    Mistake("pair_form", lambda: gated(form="sum"),
            "pair gate form must be 'product', 'log' or 'threshold', got 'sum'"),
    Mistake("pair_threshold_0", lambda: gated(threshold=0.0), "pair gate threshold must lie between 0 and 1, got 0.0"),
    Mistake("pair_threshold_1", lambda: gated(threshold=1), "pair gate threshold must lie between 0 and 1, got 1"),
    Mistake("pair_threshold_nan", lambda: gated(threshold=NAN),
            "pair gate threshold must lie between 0 and 1, got nan"),
    Mistake("pair_gate_with_segments",
            lambda: call(branches=Segments(2), score=PairGate(zeros(2, 4, 6, 5), zeros(2, 4, 6, 5), zeros(4, 5))),
            "Segments rates summaries, which a PairGate cannot; use Dot() or HeadScale with Segments"),
]  # fmt: skip

BACKENDS = [
    Mistake("unknown", lambda: call(backend="cuda"), "unknown backend 'cuda'; known are 'auto', "),
    Mistake("empty", lambda: call(backend=""), "unknown backend ''; known are 'auto', "),
]

GATES = [
    Mistake("kind", lambda: GateConfig(kind="cubic"),  # type: ignore[arg-type]
            "gate kind must be 'mlp', 'linear', 'static' or 'constant', got 'cubic'"),
    Mistake("hidden", lambda: GateConfig(hidden=0), "gate hidden width must be at least 1, got 0"),
    Mistake("start_nan", lambda: GateConfig(start=NAN), "gate start must be a finite logit, got nan"),
    Mistake("start_infinite", lambda: GateConfig(start=INFINITY), "gate start must be a finite logit, got inf"),
    Mistake("soft_cap", lambda: GateConfig(soft_cap=0.0),
            "gate soft_cap must be a finite number above 0, got 0.0; None switches it off"),
    Mistake("soft_cap_nan", lambda: GateConfig(soft_cap=NAN), "gate soft_cap must be a finite number above 0, got nan"),
    Mistake("z_loss", lambda: GateConfig(z_loss=-1.0), "gate z_loss must be a finite number of at least 0, got -1.0"),
    Mistake("z_loss_nan", lambda: GateConfig(z_loss=NAN), "gate z_loss must be a finite number of at least 0, got nan"),
    Mistake("normalize_gradient", lambda: GateConfig(normalize_gradient=0.0),
            "gate normalize_gradient must be finite and above 0, got 0.0; None switches it off"),
    Mistake("warmth_above_1", lambda: set_gate_warmth(small_mechanism("head_gated"), 1.5),
            "gate warmth must lie between 0 and 1, got 1.5"),
    Mistake("warmth_nan", lambda: set_gate_warmth(small_mechanism("head_gated"), NAN), "between 0 and 1, got nan"),
]  # fmt: skip


def making(name: str, **options: Any) -> Callable[[], object]:
    return lambda: make_mechanism(name, SHAPE, **options)


CONFIGS = [
    Mistake("unknown_mechanism", making("head_gate"),
            "unknown mechanism 'head_gate' (did you mean 'head_gated'?); known are dense, local, combiner, "),
    Mistake("unlike_any_mechanism", making("xyz"), "unknown mechanism 'xyz'; known are dense, local"),
    Mistake("unknown_option", making("local", windw=3),
            "mechanism 'local' has no option 'windw' (did you mean 'window'?); its options are: window, sinks"),
    Mistake("option_of_none", making("dense", window=3),
            "mechanism 'dense' has no option 'window'; its options are: none"),
    Mistake("unknown_gate_option", making("head_gated", gate={"softcap": 3.0}),
            "the gate of 'head_gated' has no option 'softcap' (did you mean 'soft_cap'?)"),
    Mistake("gate_name", making("head_gated", gate="mlp"),
            "the gate of 'head_gated' must be a GateConfig or a dict of its options, got 'mlp'"),
    Mistake("gate_none", making("head_gated", gate=None), "must be a GateConfig or a dict of its options, got None"),
    Mistake("gate_option_type", making("head_gated", gate={"soft_cap": "5"}), "option 'soft_cap' must be of the kind"),
    Mistake("window_text", making("local", window="3"),
            "mechanism 'local': option 'window' must be of the kind of its default 256, got '3'"),
    Mistake("window_fraction", making("local", window=2.5), "option 'window' must be of the kind of its default 256"),
    Mistake("window_true", making("local", window=True), "option 'window' must be of the kind of its default 256"),
    Mistake("window_none", making("local", window=None), "option 'window' must be of the kind of its default 256"),
    Mistake("scaling_number", making("sparse_geometric", scaling=1),
            "option 'scaling' must be of the kind of its default True, got 1"),
    Mistake("bias_text", making("sparse_geometric", bias="x"), "option 'bias' must be of the kind of its default None"),
    Mistake("local_window", making("local", window=0), "window must be at least 1, got 0"),
    Mistake("local_sinks", making("local", sinks=-1), "sinks must be at least 0, got -1"),
    Mistake("local_old_and_new_name", making("local", sinks=1, global_tokens=1),
            "mechanism 'local': option 'global_tokens' is now called 'sinks', got both; leave 'global_tokens' out"),
    Mistake("head_gated_sinks", making("head_gated", sinks=-1), "sinks must be at least 0, got -1"),
    Mistake("context_adaptive_sinks", making("context_adaptive", sinks=-1), "sinks must be at least 0, got -1"),
    Mistake("combiner_segment", making("combiner", segment=0), "segment must be at least 1, got 0"),
    Mistake("dynamic_sparse_rank", making("dynamic_sparse", rank=0), "rank must be at least 1, got 0"),
    Mistake("dynamic_sparse_divergence", making("dynamic_sparse", divergence=-1.0),
            "divergence must be at least 0, got -1.0"),
    Mistake("dynamic_sparse_k", making("dynamic_sparse", k_min=0), "top-k minimum must be at least 1, got 0"),
    Mistake("dynamic_sparse_select", making("dynamic_sparse", select="x"), "top-k select must be 'exact' or 'blocks'"),
    Mistake("context_adaptive_window_max", making("context_adaptive", window_max=0),
            "window_max must be at least 1, got 0"),
    Mistake("context_adaptive_edge_0", making("context_adaptive", edge=0), "edge must be at least 1, got 0"),
    Mistake("context_adaptive_range", making("context_adaptive", window_min=9, window_max=8, edge=2),
            "windows must satisfy edge <= window_min <= window_max, got edge 2, window_min 9, window_max 8"),
    Mistake("context_adaptive_edge", making("context_adaptive", window_min=16),
            "windows must satisfy edge <= window_min <= window_max, got edge 32, window_min 16, window_max 512"),
    Mistake("context_adaptive_width", making("context_adaptive", width="free"),
            "width must be 'learned' or 'fixed', got 'free'"),
    Mistake("context_adaptive_reads", making("context_adaptive", reads="all"),
            "reads must be 'both', 'local' or 'global', got 'all'"),
    Mistake("context_adaptive_k", making("context_adaptive", k_min=0), "top-k minimum must be at least 1, got 0"),
    Mistake("context_adaptive_k_scale", making("context_adaptive", k_scale=INFINITY), "top-k scale must be a finite"),
    Mistake("head_gated_window", making("head_gated", window=0), "window must be at least 1, got 0"),
    Mistake("sparse_geometric_hidden", making("sparse_geometric", hidden=0), "hidden must be at least 1, got 0"),
    Mistake("sparse_geometric_stride", making("sparse_geometric", stride=0), "stride must be at least 1, got 0"),
    Mistake("sparse_geometric_sparsity", making("sparse_geometric", sparsity="some"),
            "sparsity must be 'learned', 'fixed' or 'none', got 'some'"),
    Mistake("sparse_geometric_form", making("sparse_geometric", form="sum"),
            "form must be 'product', 'log' or 'threshold', got 'sum'"),
    Mistake("sparse_geometric_threshold", making("sparse_geometric", threshold=1.0),
            "threshold must lie between 0 and 1, got 1.0"),
    Mistake("bigbird_window", making("bigbird", window=0), "window must be at least 1, got 0"),
    Mistake("bigbird_blocks", making("bigbird", random_blocks=0), "random_blocks must be at least 1, got 0"),
    Mistake("sparse_transformer_stride", making("sparse_transformer", stride=0), "stride must be at least 1, got 0"),
    Mistake("no_heads", lambda: HeadShape(heads=0), "heads must be at least 1, got 0"),
    Mistake("no_kv_heads", lambda: HeadShape(kv_heads=0), "kv_heads must be at least 1, got 0"),
    Mistake("no_width", lambda: HeadShape(head_width=0), "head_width must be at least 1, got 0"),
    Mistake("no_model_width", lambda: HeadShape(model_width=-1), "model_width must be at least 1, got -1"),
    Mistake("heads_not_a_multiple", lambda: HeadShape(heads=12, kv_heads=5),
            "heads must be a multiple of kv_heads, got 12 and 5"),
]  # fmt: skip


def using(name: str, **replacement: Any) -> Callable[[], object]:
    """A forward pass of a small mechanism (H = 4, G = 2, D = 6, C = 10) on 12 tokens, with some arguments replaced."""
    return lambda: small_mechanism(name)(**tokens()._asdict() | replacement)


CALLS = [
    Mistake("q_heads", using("dense", q=zeros(2, 5, 12, 6)),
            "dense expects q [B, 4, T, 6] (heads and head width of its shape), got (2, 5, 12, 6)"),
    Mistake("q_dimensions", using("dense", q=zeros(2, 12, 24)), "dense expects q [B, 4, T, 6]"),
    Mistake("k_heads", using("local", k=zeros(2, 4, 12, 6)),
            "local expects k and v [B, 2, S, 6] (kv_heads and head width of its shape), got (2, 4, 12, 6)"),
    Mistake("x_width", using("head_gated", x=zeros(2, 12, 8)),
            "head_gated expects x [B, T, C] = (2, 12, 10), got (2, 12, 8)"),
    Mistake("x_length", using("head_gated", x=zeros(2, 11, 10)), "got (2, 11, 10)"),
    *(
        Mistake(f"{name}_without_memory", using(name, x=zeros(2, 3, 10), q=zeros(2, 4, 3, 6, dtype=torch.float64)),
                f"{name} reads the")
        for name in ("combiner", "dynamic_sparse", "sparse_geometric")
    ),
    Mistake("documents", using("head_gated", documents=zeros(2, 11, dtype=torch.int64)),
            "documents must be [B, S] = (2, 12), got shape (2, 11)"),
    Mistake("positions", using("context_adaptive", positions=torch.arange(1, 13)), "positions must lie in 0..11"),
    Mistake("backend", using("dense", backend="quick"), "unknown backend 'quick'"),
    Mistake("nan_gate", using("head_gated", x=torch.full((2, 12, 10), NAN, dtype=torch.float64)),
            "weights must be finite for every query, got NaN or infinity; look at the gate that made them"),
]  # fmt: skip


@each(TOKENS)
def test_queries_keys_and_values_that_do_not_fit_are_explained(mistake: Mistake) -> None:
    assert_explained(mistake)


@each(DOCUMENTS)
def test_bad_documents_are_explained(mistake: Mistake) -> None:
    assert_explained(mistake)


@each(POSITIONS)
def test_bad_positions_are_explained(mistake: Mistake) -> None:
    assert_explained(mistake)


@each(WEIGHTS)
def test_bad_weights_are_explained(mistake: Mistake) -> None:
    assert_explained(mistake)


@each(BRANCHES)
def test_bad_branches_are_explained(mistake: Mistake) -> None:
    assert_explained(mistake)


@each(INDEXERS)
def test_bad_indexers_are_explained(mistake: Mistake) -> None:
    assert_explained(mistake)


@each(SCORES)
def test_bad_scores_are_explained(mistake: Mistake) -> None:
    assert_explained(mistake)


@each(BACKENDS)
def test_unknown_backends_are_explained(mistake: Mistake) -> None:
    assert_explained(mistake)


@each(GATES)
def test_bad_gates_are_explained(mistake: Mistake) -> None:
    assert_explained(mistake)


@each(CONFIGS)
def test_bad_configs_are_explained(mistake: Mistake) -> None:
    assert_explained(mistake)


@each(CALLS)
def test_mechanisms_explain_input_that_does_not_fit_their_shape(mistake: Mistake) -> None:
    assert_explained(mistake)


WRONG_KINDS = [
    Mistake("branches_none", lambda: call(branches=None), "branch"),
    Mistake("branches_number", lambda: call(branches=3), "branch"),
    Mistake("union_with_a_number", lambda: call(branches=Causal() | 3), "branch"),  # type: ignore[operator]
    Mistake("union_of_nothing", lambda: call(branches=Union(())), "union"),
    Mistake("window_fraction", lambda: Window(2.5), "window size must be"),  # type: ignore[arg-type]
    Mistake("window_text", lambda: Window("3"), "window size must be"),  # type: ignore[arg-type]
    Mistake("top_k_fraction", lambda: TopK(minimum=2.5), "top-k minimum must be"),  # type: ignore[arg-type]
    Mistake("indexer_lists", lambda: indexed([1.0], [1.0]), "Indexer.queries"),
    Mistake("indexer_number", lambda: call(branches=TopK(indexer=3)), "ndexer"),  # type: ignore[arg-type]
    Mistake("segments_queries_list", lambda: call(branches=Segments(2, queries=[1.0])),  # type: ignore[arg-type]
            "Segments.queries"),
    Mistake("segments_queries_integers",
            lambda: call(branches=Segments(2, queries=zeros(2, 4, 6, 3, dtype=torch.int64))),
            "Segments.queries must be a floating-point tensor"),
    Mistake("segments_queries_other_device",
            lambda: call(branches=Segments(2, queries=zeros(2, 4, 6, 3, device="meta"))),
            "Segments.queries must be on the device of q"),
    Mistake("edge_infinite", lambda: SoftWindow(zeros(2, 4, 6), edge=INFINITY), "soft edge must be"),
    Mistake("soft_cap_infinite", lambda: GateConfig(soft_cap=INFINITY), "gate soft_cap must be"),
    Mistake("z_loss_infinite", lambda: GateConfig(z_loss=INFINITY), "gate z_loss must be"),
    Mistake("normalize_gradient_infinite", lambda: GateConfig(normalize_gradient=INFINITY),
            "gate normalize_gradient must be"),
]  # fmt: skip


@each(WRONG_KINDS)
def test_values_of_the_wrong_kind_are_explained(mistake: Mistake) -> None:
    assert_explained(mistake)


def test_no_query_heads_give_no_output() -> None:
    q, k = zeros(2, 0, 6, 3), zeros(2, 2, 6, 3)
    assert attend(q, k, k, branches=TopK(select="blocks", block=2)).output.shape == (2, 0, 6, 3)


def test_whole_number_given_as_float_becomes_an_integer() -> None:
    window = make_mechanism("local", SHAPE, window=3.0).config.window
    assert (window, type(window)) == (3, int)


def test_gate_options_complete_the_gate_of_the_mechanism() -> None:
    gate = make_mechanism("context_adaptive", SHAPE, gate={"soft_cap": 3.0}).config.gate
    assert gate == GateConfig(kind="mlp", soft_cap=3.0)
