"""A window and the first tokens in one softmax, over vLLM's blocks, on a CPU.

vLLM's own kernel reads a window alone. Here the keys that a request's queries read are gathered from their blocks: for
one query a softmax over all of them, for several the kernels of this package.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionMetadataBuilder
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

from varifocal.attention.attend import evaluate
from varifocal.equations.branches import Prefix, Window
from varifocal.equations.equation import Equation
from varifocal.equations.layout import Layout, make_layout
from varifocal.equations.normalizers import SinkLogit
from varifocal.serving.vllm.window_cache import WindowSpec


@dataclass(frozen=True)
class Chunk:
    """Several new tokens of one request."""

    first: int
    """Where they begin among the tokens of the batch."""
    tokens: int
    slots: Tensor
    """[S]: where the keys lie that they read."""
    layout: Layout


@dataclass(frozen=True)
class SinkMetadata:
    """Where the keys of a batch lie."""

    tokens: Tensor
    """[R]: the tokens of requests with one new token."""
    slots: Tensor
    """[R, S]: where the keys lie that each of them reads."""
    hidden: Tensor | None
    """bool [R, 1, 1, S]: False for what is not read, if there is any."""
    chunks: list[Chunk] = field(default_factory=list)


class SinkMetadataBuilder(AttentionMetadataBuilder[SinkMetadata]):
    """Finds the slots of first tokens and windows, once for all layers of a cache group."""

    def __init__(self, kv_cache_spec: WindowSpec, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.window, self.sinks, self.block = (
            kv_cache_spec.sliding_window,
            kv_cache_spec.sinks,
            kv_cache_spec.block_size,
        )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SinkMetadata:
        requests = common_attn_metadata.num_reqs
        starts = common_attn_metadata.query_start_loc_cpu[: requests + 1].to(torch.int64)
        lengths = common_attn_metadata.seq_lens[:requests].to(torch.int64)
        table = common_attn_metadata.block_table_tensor[:requests]
        new = starts.diff()
        alone = (new == 1).nonzero().flatten()
        chunks = [
            self.chunk(int(starts[row]), int(new[row]), int(lengths[row]), table[row])
            for row in (new > 1).nonzero().flatten().tolist()
        ]
        slots, hidden = self.alone(lengths[alone], table[alone])
        return SinkMetadata(starts[:-1][alone], slots, hidden, chunks)

    def alone(self, lengths: Tensor, table: Tensor) -> tuple[Tensor, Tensor | None]:
        """The slots [R, S] of one new token of each request, and which of them are read."""
        if not len(lengths):
            return lengths.new_zeros(0, 0), None
        room = self.sinks + self.window
        keys = min(room, int(lengths.max()))
        # Places of the text: those of the sinks, then what is last. A short text has its places in order.
        place = torch.arange(keys)[None] + torch.where(
            torch.arange(keys)[None] < self.sinks, 0, (lengths - room).clamp(min=0)[:, None]
        )
        seen = place < lengths[:, None]
        place = torch.where(seen, place, 0)
        return self.slots(table, place), None if bool(seen.all()) else seen[:, None, None]

    def chunk(self, first: int, tokens: int, length: int, row: Tensor) -> Chunk:
        """The slots of several new tokens of one request."""
        kept = min(length, self.sinks + self.window - 1 + tokens)
        place = torch.arange(kept)
        place[self.sinks :] += length - kept
        layout = make_layout(
            batch=1, queries=tokens, keys=length, documents=None, positions=None, device=torch.device("cpu")
        ).of_last(kept)
        return Chunk(first, tokens, self.slots(row[None], place[None])[0], layout)

    def slots(self, table: Tensor, place: Tensor) -> Tensor:
        """Where the keys of places [R, S] lie, by the block table [R, blocks]."""
        slots: Tensor = table.to(torch.int64).gather(1, place // self.block) * self.block + place % self.block
        return slots


class SinkImpl(CPUAttentionBackendImpl):
    """Writes keys beside their values, as they are, and reads them by their slots."""

    sinks: Tensor | None

    def __init__(self, *args: Any, first_tokens: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first_tokens = first_tokens

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        rows = self.rows(slot_mapping[: len(key)], kv_cache)  # [T, G]
        both = torch.cat([key, value], dim=-1).to(kv_cache.dtype)  # [T, G, 2 D]
        kv_cache.view(-1, kv_cache.shape[-1]).index_copy_(0, rows.flatten(), both.flatten(0, 1))

    def rows(self, slots: Tensor, kv_cache: Tensor) -> Tensor:
        """The rows [..., G] of slots [...] in a cache [blocks, G, block, 2 D]."""
        _, heads, block, _ = kv_cache.shape
        if heads == 1:
            return slots[..., None]
        each = torch.arange(heads) * block
        return ((slots // block) * (heads * block) + slots % block)[..., None] + each

    def keys_and_values(self, slots: Tensor, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Those of slots [R, S], each [R, G, S, D]."""
        rows = self.rows(slots, kv_cache).transpose(1, 2)  # [R, G, S]
        found = kv_cache.view(-1, kv_cache.shape[-1]).index_select(0, rows.flatten())
        return found.view(*rows.shape, -1).chunk(2, dim=-1)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: SinkMetadata | None,
        output: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        if attn_metadata is None:
            # vLLM's trial run, which has no cache yet.
            return output.zero_()
        if len(attn_metadata.tokens):
            q = query[attn_metadata.tokens].view(-1, self.num_kv_heads, self.num_queries_per_kv, self.head_size)
            k, v = self.keys_and_values(attn_metadata.slots, kv_cache)
            output[attn_metadata.tokens] = self.softmax(q, k, v, attn_metadata.hidden).flatten(1, 2)
        for chunk in attn_metadata.chunks:
            last = chunk.first + chunk.tokens
            k, v = self.keys_and_values(chunk.slots[None], kv_cache)
            q = query[chunk.first : last].transpose(0, 1)[None]  # [1, H, T, D]
            found = evaluate(self.equation, q, k, v, layout=chunk.layout, wants_logsumexp=False)
            output[chunk.first : last] = found.output[0].transpose(0, 1)
        return output

    @property
    def equation(self) -> Equation:
        """One softmax over the window and the first tokens."""
        normalizer = None if self.sinks is None else SinkLogit(self.sinks)
        return Equation((Window(self.sliding_window) | Prefix(self.first_tokens),), normalizer=normalizer)

    def softmax(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        """The output [R, G, H / G, D] of one query of each head over all keys that are seen."""
        if self.sinks is None:
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.scale)
        scores = (q.float() @ k.float().mT) * self.scale
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        sink = self.sinks.view(1, self.num_kv_heads, -1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sink], dim=-1).softmax(dim=-1)[..., :-1]
        return (weights @ v.float()).to(q.dtype)


class SinkBackend(CPUAttentionBackend):
    """For heads that read a window and the first tokens."""

    @staticmethod
    def get_name() -> str:
        # The name that vLLM keeps for backends of others.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SinkImpl]:
        return SinkImpl

    @staticmethod
    def get_builder_cls() -> type[SinkMetadataBuilder]:
        return SinkMetadataBuilder
