"""Trainable sparse attention of other packages, where they are installed. Install them with --no-deps."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import torch
from torch import Tensor

from varifocal.bench.attention.contenders import QUADRATIC_LIMIT, Contender, window
from varifocal.bench.attention.workload import Inputs

TOP_K = 32


def peers() -> list[Contender]:
    """The peers that are installed."""
    known = {
        "local_attention": Contender(
            "peer local-attention",
            run_local_attention,
            # It reads one key more than its window.
            lambda inputs: window(inputs, 1),
            decodes=False,
        ),
        "x_transformers": Contender(
            "peer x-transformers top-32",
            run_x_transformers,
            None,  # it reads all keys that have the k-th score, so it is not top-k where scores are equal
            decodes=False,
            longest=QUADRATIC_LIMIT // 2,
        ),
        "native_sparse_attention_pytorch": Contender(
            "peer native-sparse-attention", run_native_sparse, None, decodes=False, longest=QUADRATIC_LIMIT // 4
        ),
        "entmax": Contender("peer entmax-1.5", run_entmax, None, decodes=False, longest=QUADRATIC_LIMIT // 2),
    }
    return [contender for name, contender in known.items() if importlib.util.find_spec(name) is not None]


def repeated(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Keys and values repeated for every query head: the peers cannot share key heads."""
    groups = inputs.workload.heads // inputs.workload.kv_heads
    return inputs.k.repeat_interleave(groups, dim=1), inputs.v.repeat_interleave(groups, dim=1)


@functools.cache
def local_attention(head_width: int, window: int) -> Any:
    from local_attention import LocalAttention  # type: ignore[import-not-found]

    return LocalAttention(
        dim=head_width,
        window_size=window,
        causal=True,
        look_backward=1,
        look_forward=0,
        exact_windowsize=True,
        autopad=True,
        use_rotary_pos_emb=False,
    )


def run_local_attention(inputs: Inputs) -> Tensor:
    k, v = repeated(inputs)
    output: Tensor = local_attention(inputs.workload.head_width, inputs.workload.window)(inputs.q, k, v)
    return output


def run_x_transformers(inputs: Inputs) -> Tensor:
    from x_transformers.attend import Attend  # type: ignore[import-not-found]

    work = inputs.workload
    k, v = repeated(inputs)
    peer = Attend(heads=work.heads, causal=True, sparse_topk=TOP_K, scale=work.head_width**-0.5)
    output: Tensor = peer(inputs.q, k, v)[0]
    return output


@functools.cache
def native_sparse(heads: int, head_width: int, window: int, device: torch.device, dtype: torch.dtype) -> Any:
    from native_sparse_attention_pytorch import SparseAttention  # type: ignore[import-not-found]

    return SparseAttention(
        dim=heads * head_width,
        dim_head=head_width,
        heads=heads,
        causal=True,
        sliding_window_size=window,
        compress_block_size=16,
        compress_block_sliding_stride=8,
        selection_block_size=16,
        num_selected_blocks=4,
        use_triton_kernel=False,
    ).to(device, dtype)


def run_native_sparse(inputs: Inputs) -> Tensor:
    """Its own projections are included: they cannot be separated from its attention."""
    work = inputs.workload
    x = inputs.q.transpose(1, 2).flatten(2)
    output: Tensor = native_sparse(work.heads, work.head_width, work.window, work.device, work.dtype)(x)
    return output.unflatten(2, (work.heads, work.head_width)).transpose(1, 2)  # type: ignore[no-untyped-call, no-any-return]


def run_entmax(inputs: Inputs) -> Tensor:
    from entmax import entmax15  # type: ignore[import-not-found]

    k, v = repeated(inputs)
    scores = inputs.q @ k.mT * inputs.workload.head_width**-0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    output: Tensor = entmax15(scores.masked_fill(future, -1e9), -1) @ v
    return output
