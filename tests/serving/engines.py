"""vLLM's engine in this process, and the answers of our own model beside it."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.serving.models import log_probabilities
from varifocal.model import VarifocalForCausalLM, load_model

os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
BLOCK = 32


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Any]:
    """An engine that serves a folder: chunks of 256 tokens, prefixes kept, all in float32."""
    from vllm import LLM

    given = {
        "dtype": "float32", "max_model_len": 4224, "enforce_eager": True, "skip_tokenizer_init": True,
        "max_num_batched_tokens": 256, "max_num_seqs": 64, "block_size": BLOCK, "enable_prefix_caching": True,
        "kv_cache_memory_bytes": 1 << 28, "disable_log_stats": False, **options,
    }  # fmt: skip
    llm = LLM(str(folder), **given)
    try:
        yield llm
    finally:
        del llm
        gc.collect()


def answers(llm: Any, prompts: list[list[int]], *, tokens: int = 8, **sampling: Any) -> list[Any]:
    """Greedy answers with their log-probabilities."""
    from vllm import SamplingParams

    wanted = SamplingParams(**{"temperature": 0, "max_tokens": tokens, "logprobs": 0, "detokenize": False, **sampling})
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    found: list[Any] = llm.generate(given, wanted, use_tqdm=False)
    return found


def assert_ours(folder: Path, found: list[Any], model: VarifocalForCausalLM | None = None) -> None:
    """Our model gives the same tokens, and the same log-probabilities within 1e-3."""
    model = load_model(folder) if model is None else model
    for answer in found:
        output = answer.outputs[0]
        tokens = list(output.token_ids)
        ours = log_probabilities(model, list(answer.prompt_token_ids), tokens)
        assert ours.argmax(dim=-1).tolist() == tokens
        for row, token, given in zip(ours, tokens, output.logprobs, strict=True):
            assert abs(float(row[token]) - given[token].logprob) < 1e-3


def scheduler(llm: Any) -> Any:
    """The engine's own, in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def counter(llm: Any, name: str) -> float:
    """One of vLLM's own counters."""
    return float(sum(metric.value for metric in llm.get_metrics() if metric.name == name))
