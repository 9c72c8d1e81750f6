"""The cache of heads with a window: blocks of the first tokens and of the last are kept, those between are freed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock, resolve_block_hashes
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """vLLM's sliding window, and the first tokens of the text beside it."""

    sinks: int = 0

    @property
    def sink_blocks(self) -> int:
        """The blocks that hold the first tokens."""
        blocks: int = -(-self.sinks // self.block_size)
        return blocks

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        window: int = super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len)
        return window + self.sink_blocks

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(
            isinstance(spec, WindowSpec) and (spec.sliding_window, spec.sinks) == (self.sliding_window, self.sinks)
            for spec in kv_cache_specs.values()
        )


class WindowManager(SlidingWindowManager):
    """Frees what lies between the first tokens and the window, and finds both again for a text that begins alike."""

    kv_cache_spec: WindowSpec

    def __init__(self, kv_cache_spec: WindowSpec, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, **kwargs)
        self.sink_blocks = kv_cache_spec.sink_blocks

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        skipped = self.get_num_skipped_tokens(processed_computed_tokens) // self.block_size
        self._remove_blocks_in_range(request_id, self.sink_blocks, skipped)

    def skipped_sinks(self, blocks: Sequence[KVCacheBlock], computed_tokens: int) -> list[KVCacheBlock]:
        """The blocks of first tokens among those that a window alone would skip."""
        skipped = self.get_num_skipped_tokens(computed_tokens) // self.block_size
        return list(blocks[: min(self.sink_blocks, skipped)])

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        needed: int = super().get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, *args, **kwargs
        )
        if request_id in self.num_cached_block:
            return needed
        sinks = self.skipped_sinks(new_computed_blocks, total_computed_tokens)
        return needed + int(self._get_num_evictable_blocks(sinks))

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        sinks = self.skipped_sinks(new_computed_blocks, num_local_computed_tokens + num_external_computed_tokens)
        super().add_local_computed_blocks(
            request_id, new_computed_blocks, num_local_computed_tokens, num_external_computed_tokens
        )
        if sinks:
            self.block_pool.touch(sinks)
            self.req_to_blocks[request_id][: len(sinks)] = sinks

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Any,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: Any,
        kv_cache_spec: WindowSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        **kwargs: Any,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        found: tuple[list[KVCacheBlock], ...]
        found, length = super().find_longest_cache_hit(
            block_hashes, max_length, kv_cache_group_ids, block_pool, kv_cache_spec, drop_eagle_block,
            alignment_tokens, **kwargs,
        )  # fmt: skip
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            kv_cache_spec.block_size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        for number in range(min(kv_cache_spec.sink_blocks, len(found[0]))):
            cached = block_pool.get_cached_block(hashes[number], kv_cache_group_ids)
            if not cached:
                # Without the first tokens nothing that comes after them is of use.
                return tuple([] for _ in kv_cache_group_ids), 0
            for blocks, block in zip(found, cached, strict=True):
                blocks[number] = block
        return found, length

    @classmethod
    def reachable_block_mask(cls, start_block: int, end_block: int, *args: Any, **kwargs: Any) -> list[bool] | None:
        mask: list[bool] | None = super().reachable_block_mask(start_block, end_block, *args, **kwargs)
        spec: WindowSpec = kwargs["kv_cache_spec"]
        if mask is not None:
            for number in range(start_block, min(spec.sink_blocks, end_block)):
                mask[number - start_block] = True
        return mask


def register_windows() -> None:
    """Tell vLLM who manages blocks of such caches."""
    # vLLM registers its own kinds with the first question, but only while there are none.
    KVCacheSpecRegistry._ensure_registered()
    KVCacheSpecRegistry.register(WindowSpec, WindowManager, uniform_type_base_spec=WindowSpec)
