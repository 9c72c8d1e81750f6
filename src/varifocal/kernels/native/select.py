"""Native selection: the keys, or blocks of keys, that each query rates highest.

    select_exact:  the budget_i keys with the greatest q_i . k_j,           start_i <= j <= position_i
    select_blocks: the budget_i blocks with the greatest q_i . mean(k_j),   completed before the query's own block

Of equal scores the lower index wins. The selection carries no gradient.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from . import abi, library
from .arguments import (
    contiguous,
    dtype_argument,
    pointer,
    put_tensor,
    require_inputs,
    require_range,
    rows_contiguous,
    tensor_argument,
)
from .operator import Operator


class SelectInputs(NamedTuple):
    """The inputs of the selection: keys, or means of blocks in `pooled`."""

    q: Tensor
    k: Tensor | None
    pooled: Tensor | None
    position: Tensor
    start: Tensor
    budget: Tensor
    keys: int
    capacity: int
    block: int
    """0 for single keys."""


class SelectOutputs(NamedTuple):
    """The output of the selection."""

    selected: Tensor
    """int32 [B, I, T, capacity]."""


def _select_kernel(given: SelectInputs) -> SelectOutputs:
    q, k, pooled = rows_contiguous(given.q), rows_contiguous(given.k), rows_contiguous(given.pooled)
    position, start, budget = contiguous(given.position), contiguous(given.start), contiguous(given.budget)
    source, made = k if pooled is None else pooled, _empty(given)
    assert source is not None
    batch, heads, queries, width = q.shape
    call = abi.Select(
        batch, heads, source.shape[1], queries, given.keys, width, given.capacity,
        dtype=dtype_argument(q),
        threads=torch.get_num_threads(),
        block=given.block,
        position=pointer(position),
        start=pointer(start),
        budget=pointer(budget),
        selected=pointer(made.selected),
    )  # fmt: skip
    put_tensor(call, abi.Select.q, q)
    put_tensor(call, abi.Select.k if pooled is None else abi.Select.pooled, source)
    library.call("select_best", call)
    return made


def _empty(given: SelectInputs) -> SelectOutputs:
    return SelectOutputs(given.q.new_empty((*given.q.shape[:3], given.capacity), dtype=torch.int32))


_select = Operator("select", SelectInputs, SelectOutputs, _select_kernel, fake=_empty)


def _capacity(budget: Tensor, capacity: int | None, most: int) -> int:
    if capacity is None:
        capacity = int(budget.max()) if budget.numel() else 0
    return max(0, min(capacity, most))


def _require(q: Tensor, k: Tensor, position: Tensor, start: Tensor, budget: Tensor) -> None:
    batch, heads, queries, width = q.shape
    if k.shape[0] != batch or k.shape[3] != width or k.shape[1] < 1 or heads % k.shape[1]:
        raise ValueError(f"q and keys of shapes {[*q.shape]} and {[*k.shape]} do not fit together")
    require_range(position, start, batch=batch, queries=queries)
    if budget.shape != (batch, queries) or budget.dtype != torch.int32:
        raise ValueError(f"budget must be int32 [{batch}, {queries}], got {budget.dtype} {[*budget.shape]}")


@torch.no_grad()
def select_exact(
    q: Tensor,
    k: Tensor,
    *,
    position: Tensor,
    start: Tensor,
    budget: Tensor,
    capacity: int | None = None,
) -> Tensor:
    """The best keys of each query: int32 [B, I, T, K], -1 beyond the selected.

    q [B, I, T, R] and k [B, J, S, R] rank the keys: the attention's own, or an indexer's, I a multiple of J.
    position, start and budget [B, T] int32. K is `capacity`, by default the greatest budget. The indices ascend,
    as attend_selected needs them.
    """
    require_inputs(q=q, k=k)
    _require(q, k, position, start, budget)
    keys = k.shape[2]
    most = _capacity(budget, capacity, keys)
    inputs = SelectInputs(q, k, None, position, start, budget, keys=keys, capacity=most, block=0)
    return _select(inputs).selected


@torch.no_grad()
def select_blocks(
    q: Tensor,
    k: Tensor | None,
    *,
    position: Tensor,
    start: Tensor,
    budget: Tensor,
    block: int,
    pooled: Tensor | None = None,
    keys: int | None = None,
    capacity: int | None = None,
) -> Tensor:
    """The first keys of the best blocks of each query: int32 [B, I, T, M], -1 beyond the selected.

    As select_exact; blocks of `block` keys are counted from `start`, only those completed before the query's own
    block can be selected. With `pooled` (see update_pooled) the means are taken from there, k may be None, and
    `keys` is the S that pooled was made for.
    """
    if block < 1:
        raise ValueError(f"block must be at least 1, got {block}")
    source = k if pooled is None else pooled
    if source is None:
        raise ValueError("select_blocks needs k or pooled, got neither")
    if pooled is None:
        require_inputs(q=q, k=source)
        keys = source.shape[2]
    else:
        require_inputs(q=q)
        if keys is None:
            keys = k.shape[2] if k is not None else pooled.shape[2] * block
        if pooled.dtype != torch.float32 or pooled.shape[2] < -(-keys // block):
            raise ValueError(
                f"pooled must be float32 with {-(-keys // block)} rows for {keys} keys in blocks of {block}, "
                f"got {pooled.dtype} {[*pooled.shape]}"
            )
        k = None
    _require(q, source, position, start, budget)
    block = min(block, max(keys, 1))  # none longer than the text is ever complete
    most = _capacity(budget, capacity, keys // block)
    inputs = SelectInputs(q, k, pooled, position, start, budget, keys=keys, capacity=most, block=block)
    return _select(inputs).selected


class PoolInputs(NamedTuple):
    """The inputs of `update_pooled`, which writes to `pooled`."""

    pooled: Tensor
    k_new: Tensor
    position: Tensor
    start: Tensor
    block: int


class PoolOutputs(NamedTuple):
    """None."""


def _pool_kernel(given: PoolInputs) -> PoolOutputs:
    k_new, position, start = rows_contiguous(given.k_new), contiguous(given.position), contiguous(given.start)
    call = abi.Pool(
        batch=k_new.shape[0],
        kv_heads=k_new.shape[1],
        new_keys=k_new.shape[2],
        keys=given.pooled.shape[2] * given.block,
        head_width=k_new.shape[3],
        block=given.block,
        dtype=dtype_argument(k_new),
        threads=torch.get_num_threads(),
        k=tensor_argument(k_new),
        position=pointer(position),
        start=pointer(start),
        pooled=tensor_argument(given.pooled),
    )
    library.call("pool_keys", call)
    return PoolOutputs()


_pool = Operator(
    "update_pooled", PoolInputs, PoolOutputs, _pool_kernel, fake=lambda given: PoolOutputs(), mutates=("pooled",)
)


@torch.no_grad()
def update_pooled(pooled: Tensor, k_new: Tensor, *, position: Tensor, start: Tensor, block: int) -> None:
    """Adds new keys [B, J, T, R], in order, to the means of their blocks, in place: O(1) for each key.

    position and start [B, T] int32: the index of each new key and of the first key of its document; start > position
    for padding. The first key of a block starts its mean anew, so a store needs no clearing.
    """
    require_inputs(k_new=k_new)
    batch, heads, count, width = k_new.shape
    if pooled.dtype != torch.float32 or pooled.shape[:2] != (batch, heads) or pooled.shape[3] != width:
        raise ValueError(f"pooled {pooled.dtype} {[*pooled.shape]} does not fit new keys {[*k_new.shape]}")
    if pooled.stride(-1) != 1:
        raise ValueError(f"pooled must have a contiguous last dimension, got strides {pooled.stride()}")
    require_range(position, start, batch=batch, queries=count)
    # Positions are int32: a longer block never ends, and its mean is never looked at.
    _pool(PoolInputs(pooled, k_new, position, start, min(block, 2**30 // max(pooled.shape[2], 1))))
