"""Calls of one kind: what was checked and classified once is not checked and classified again.

A decoded token asks for the same attention as the token before it: other numbers in other tensors, one key more. A
lane keeps the arguments of the C call filled in, but for the addresses and the number of keys. It is made when a call
of its kind has gone the general way, which checks everything; what its key names is all that those checks look at,
save for values, which a lane looks at itself. Each thread has lanes of its own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from varifocal.equations.branches import Branch, Causal, Prefix, SoftWindow, TopK, Union, Window
from varifocal.equations.problem import Asked, Attended, Shortcuts
from varifocal.equations.scores import Dot

from . import abi, library
from .arguments import dtype_argument, put_tensor, row_pointer, scale_per_head
from .mixture import DOT, MixtureBranch, per_head, sized_call
from .operator import runs_plainly

MOST_ROWS = 16
"""Queries of all heads that share a key head: of more, a kernel takes longer than the way to it."""
MOST_LANES = 256
"""Kinds of calls that a thread remembers; a program that has more forgets them all and begins again."""
TYPES = (torch.float32, torch.bfloat16)


Run = Callable[[Asked], Attended]


class Kept(threading.local):
    """The lanes of a thread."""

    def __init__(self) -> None:
        self.lanes: dict[Any, Run] = {}


KEPT = Kept()


def lane_of(key: Any) -> Run | None:
    """What runs calls of a kind, if one was seen before."""
    return KEPT.lanes.get(key)


def keep(key: Any, run: Run) -> None:
    """Remember what runs calls of a kind."""
    if len(KEPT.lanes) >= MOST_LANES:
        KEPT.lanes.clear()
    KEPT.lanes[key] = run


def key_of(asked: Asked) -> Any:
    """All that distinguishes one kind of call from another, but for the number of keys; None if no lane serves it."""
    q, k, v, branches, weights, score, shortcuts, wants = asked
    if type(score) is not Dot or not all_tensors(q, k, v) or not runs_plainly((q, k, v, weights)):
        return None
    shape, held = q.shape, k.shape
    if len(shape) != 4 or len(held) != 4 or held != v.shape or not q.is_cpu or not k.is_cpu or not v.is_cpu:
        return None
    batch, heads, queries, width = shape
    fits = held[0] == batch and held[3] == width and held[2] >= queries and batch * queries * heads * width > 0
    if not fits or heads * queries > MOST_ROWS * held[1]:
        return None
    dtype = q.dtype
    if dtype not in TYPES or k.dtype is not dtype or v.dtype is not dtype:
        return None
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        return None
    kinds = []
    for branch in branches:
        kind = kind_of(branch)
        if kind is None:
            return None
        kinds.append(kind)
    if weights is None:
        gate = None
    elif all_tensors(weights):
        gate = weights.shape, weights.dtype, weights.is_cpu
    else:
        return None
    means = None if shortcuts is None else shape_of_means(shortcuts)
    threads = torch.get_num_threads()
    return shape, held[1], dtype, tuple(kinds), gate, score.scale, means, wants, threads, library.target()


def all_tensors(*values: object) -> bool:
    """Whether values are what a call says they are; if not, the general way explains it."""
    return all(isinstance(value, Tensor) for value in values)


def shape_of_means(shortcuts: Shortcuts) -> Any:
    """The kind of a memory's means of blocks, but for how many there are: they grow with the keys."""
    means = shortcuts.block_means
    return None if means is None else (means.dtype, means.is_cpu, means.stride(-1), means.shape[:2], means.shape[3:])


def kind_of(branch: Branch) -> Any:
    """A branch but for its tensors; None for one that no lane serves."""
    kind = type(branch)
    if kind is Causal or kind is Window or kind is Prefix:
        return branch
    if kind is SoftWindow:
        width = branch.width  # type: ignore[attr-defined]
        if not all_tensors(width) or not runs_plainly((width,)):
            return None
        return kind, width.shape, width.dtype, width.is_cpu, branch.edge, branch.limit  # type: ignore[attr-defined]
    if kind is TopK:
        if branch.indexer is not None:  # type: ignore[attr-defined]
            return None
        return kind, branch.scale, branch.minimum, branch.select, branch.block  # type: ignore[attr-defined]
    if kind is Union:
        kinds = tuple(kind_of(member) for member in branch.branches)  # type: ignore[attr-defined]
        return None if None in kinds else (kind, kinds)
    return None


class Places:
    """Where the queries of a call stand, as C takes it: int32 [B, T] of positions and of starts."""

    def __init__(self, batch: int, queries: int) -> None:
        self.batch, self.queries = batch, queries
        self.position = (ctypes.c_int32 * (batch * queries))()
        self.start = (ctypes.c_int32 * (batch * queries))()

    def put(self, keys: int) -> None:
        """The queries are the last tokens of `keys`."""
        first = keys - self.queries
        for i in range(self.batch * self.queries):
            self.position[i] = first + i % self.queries


def gate_of(weights: Tensor) -> Tensor:
    """Weights as the kernels take them."""
    weights = weights if weights.is_contiguous() else weights.contiguous()
    return weights if weights.dtype is torch.float32 else weights.float()


def width_of(branch: Branch) -> Tensor | None:
    """The widths of a branch's soft window, if it has one."""
    for member in branch.branches if isinstance(branch, Union) else (branch,):
        if isinstance(member, SoftWindow):
            return gate_of(member.width)
    return None


class WindowLane:
    """A mixture of windows and prefixes."""

    def __init__(self, asked: Asked, branches: Sequence[MixtureBranch], *, weighted: bool, places: Places) -> None:
        batch, heads, queries, width = asked.q.shape
        self.places, self.branches = places, branches
        self.shape = (batch, heads, queries, len(branches))
        self.soft = any(branch.width is not None for branch in branches)
        # Kept alive for as long as the call holds their addresses.
        self.factors = scale_per_head(asked.score.factor(width), asked.q)  # type: ignore[attr-defined]
        self.windows = per_head([branch.window for branch in branches], heads, "window")
        self.prefixes = per_head([branch.prefix for branch in branches], heads, "prefix")
        self.call = sized_call(
            batch, heads, asked.k.shape[1], queries, asked.k.shape[2], width,
            branch_count=len(branches), dtype=dtype_argument(asked.q), threads=torch.get_num_threads(),
            skip_closed=weighted and not asked.wants_logsumexp, score=DOT,
        )  # fmt: skip
        self.call.scale = self.factors.data_ptr()
        self.call.position, self.call.start = ctypes.addressof(places.position), ctypes.addressof(places.start)
        for m in range(len(branches)):
            self.put_branch(m, 0)

    def put_branch(self, m: int, width: int) -> None:
        """Branch m with the address of its widths, 0 for none."""
        branch = self.branches[m]
        abi.put_branch(
            self.call, m, window=row_pointer(self.windows, m) or 0, prefix=row_pointer(self.prefixes, m) or 0,
            width=width, limit=branch.limit, edge=0.0 if branch.width is None else branch.edge,
        )  # fmt: skip

    def fill(self, q: Tensor, k: Tensor, v: Tensor, widths: Sequence[Tensor | None]) -> Tensor:
        """Everything but places, weights and logsumexp; returns room for the output."""
        call, output = self.call, torch.empty_like(q)
        call.keys = k.shape[2]
        put_tensor(call, abi.Mixture.q, q)
        put_tensor(call, abi.Mixture.k, k)
        put_tensor(call, abi.Mixture.v, v)
        put_tensor(call, abi.Mixture.out, output)
        if self.soft:
            for m, width in enumerate(widths):
                if width is not None:
                    self.put_branch(m, width.data_ptr())
        return output

    def __call__(self, asked: Asked) -> Attended:
        weights = None if asked.weights is None else gate_of(asked.weights)
        widths = [width_of(branch) for branch in asked.branches] if self.soft else ()
        self.places.put(asked.k.shape[2])
        output = self.fill(asked.q, asked.k, asked.v, widths)
        logsumexp = torch.empty(self.shape)
        self.call.weights = None if weights is None else weights.data_ptr()
        self.call.logsumexp = logsumexp.data_ptr()
        library.call("mixture_forward", self.call)
        return Attended(output, logsumexp, (None,) * len(self.branches))


class WindowAndTopKLane:
    """A window beside a top-k that ranks by the scores themselves, each with its weight."""

    def __init__(
        self, asked: Asked, window: MixtureBranch, top_k: TopK, *, include_self: bool, window_first: bool
    ) -> None:
        batch, heads, queries, width = asked.q.shape
        kv_heads, dtype, threads = asked.k.shape[1], dtype_argument(asked.q), torch.get_num_threads()
        self.places = Places(batch, queries)
        self.near = WindowLane(asked, [window], weighted=True, places=self.places)
        self.top_k, self.blocks, self.rows = top_k, top_k.select == "blocks", (batch, heads, queries)
        self.near_row, self.far_row = (0, 1) if window_first else (1, 0)
        self.budget = (ctypes.c_int32 * (batch * queries))()
        block = top_k.block if self.blocks else 0
        shared = {
            "dtype": dtype, "threads": threads, "block": block,
            "position": ctypes.addressof(self.places.position), "start": ctypes.addressof(self.places.start),
        }  # fmt: skip
        self.select = abi.Select(
            batch, heads, kv_heads, queries, 0, width, 0, budget=ctypes.addressof(self.budget), **shared
        )
        self.read = abi.Selected(
            batch, heads, kv_heads, heads, queries, 0, width, 0,
            include_self=include_self, scale=self.near.factors.data_ptr(), **shared,
        )  # fmt: skip

    def __call__(self, asked: Asked) -> Attended:
        q, k, v, branches, weights, _, shortcuts, _ = asked
        assert weights is not None
        keys, first = k.shape[2], k.shape[2] - self.rows[2]
        selected = self.choose(q, k, shortcuts, keys, first)
        weights = gate_of(weights.movedim(-1, 0))
        logsumexp = torch.empty((2, *self.rows))
        widths = [width_of(branches[self.near_row])]  # alive until the kernel has read them
        output = self.near.fill(q, k, v, widths)
        self.near.call.weights = weights.data_ptr() + weights.stride(0) * 4 * self.near_row
        self.near.call.logsumexp = logsumexp.data_ptr() + logsumexp.stride(0) * 4 * self.near_row
        library.call("mixture_forward", self.near.call)
        read, far = self.read, torch.empty_like(q)
        read.keys, read.capacity = keys, selected.shape[3]
        read.selected = selected.data_ptr() if selected.numel() else None
        read.weights = weights.data_ptr() + weights.stride(0) * 4 * self.far_row
        read.logsumexp = logsumexp.data_ptr() + logsumexp.stride(0) * 4 * self.far_row
        put_tensor(read, abi.Selected.q, q)
        put_tensor(read, abi.Selected.k, k)
        put_tensor(read, abi.Selected.v, v)
        put_tensor(read, abi.Selected.out, far)
        library.call("attend_selected", read)
        found = (None, selected) if self.near_row == 0 else (selected, None)
        return Attended(output.add_(far), logsumexp.movedim(0, -1), found)

    def choose(self, q: Tensor, k: Tensor, shortcuts: Shortcuts | None, keys: int, first: int) -> Tensor:
        """int32 [B, H, T, K]: what every query selects."""
        self.places.put(keys)
        count = self.top_k.blocks_of if self.blocks else self.top_k.keys_of
        for i in range(len(self.budget)):
            self.budget[i] = count(first + i % self.rows[2])
        capacity = self.top_k.most_blocks(keys) if self.blocks else self.top_k.most_keys(keys)
        selected = torch.empty((*self.rows, capacity), dtype=torch.int32)
        call = self.select
        call.keys, call.capacity, call.selected = keys, capacity, selected.data_ptr() if capacity else None
        put_tensor(call, abi.Select.q, q)
        if self.blocks:
            call.block = min(self.top_k.block, keys)
        means = None if shortcuts is None or not self.blocks else shortcuts.block_means
        if means is not None and means.shape[2] * self.top_k.block < keys:
            raise ValueError(f"{means.shape[2]} means of blocks of {self.top_k.block} do not reach over {keys} keys")
        if means is None:
            put_tensor(call, abi.Select.k, k)
        else:
            put_tensor(call, abi.Select.pooled, means)
        library.call("select_best", call)
        return selected
