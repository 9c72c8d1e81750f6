"""The process in which vLLM serves a contender: it reads a task as JSON, and writes vLLM's own figures as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from varifocal.memory import peak_bytes


def main() -> None:
    """Serve with the bytes of cache that are given, and say what a cache for all requests takes."""
    task = json.load(sys.stdin)
    torch.set_num_threads(task["threads"])
    llm = engine(task)
    answer: dict[str, Any] = {
        "engine": engine_name(),
        "capacity": capacity(llm, task),
        "room_bytes": room_bytes(llm, task),
        "row": answered(llm, task) | {"cache_bytes": cache_bytes(llm), "peak_bytes": peak_bytes()},
    }
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


def engine(task: dict[str, Any]) -> Any:
    """An engine in this process."""
    from vllm import LLM

    return LLM(
        task["folder"], dtype=task["dtype"], max_model_len=task["prompt"] + task["new_tokens"], enforce_eager=True,
        skip_tokenizer_init=True, block_size=task["block"], max_num_batched_tokens=task["chunk"],
        max_num_seqs=task["requests"], kv_cache_memory_bytes=task["engine_bytes"], disable_log_stats=False, seed=0,
    )  # fmt: skip


def engine_name() -> str:
    """Name and version."""
    import vllm

    return f"vLLM {vllm.__version__}"


def core(llm: Any) -> Any:
    """The engine's own heart, in this process."""
    return llm.llm_engine.engine_core.engine_core


def cache_bytes(llm: Any) -> int:
    """Of the one allocation in which vLLM lays out all layers."""
    sizes: list[int] = [tensor.size for tensor in core(llm).scheduler.kv_cache_config.kv_cache_tensors]
    return max(sizes)


def request_bytes(llm: Any, length: int) -> int:
    """What vLLM reckons that a text of so many tokens takes at its largest."""
    from vllm.v1.core.kv_cache_utils import get_max_concurrency_for_kv_cache_config

    config, held = llm.llm_engine.vllm_config, core(llm).scheduler.kv_cache_config
    usual = config.model_config.max_model_len
    config.model_config.max_model_len = length
    try:
        at_once: float = get_max_concurrency_for_kv_cache_config(config, held)
    finally:
        config.model_config.max_model_len = usual
    return round(cache_bytes(llm) / at_once)


def capacity(llm: Any, task: dict[str, Any]) -> dict[str, Any]:
    """How many tokens fit, and the share of key heads that read everything."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    windowed, heads = 0, 0
    for spec in core(llm).model_executor.get_kv_cache_specs()[0].values():
        heads += spec.num_kv_heads
        windowed += spec.num_kv_heads if isinstance(spec, SlidingWindowSpec) else 0
    needed = request_bytes(llm, task["context"])
    return {
        "kept_heads": 1 - windowed / heads,
        "bytes_per_request": needed,
        "tokens": int(task["cache_bytes"] / needed * task["context"]),
    }


def room_bytes(llm: Any, task: dict[str, Any]) -> int:
    """A cache that holds all requests; one block more, which vLLM keeps for itself."""
    held = core(llm).scheduler.kv_cache_config
    block = -(-cache_bytes(llm) // int(held.num_blocks))
    return int(task["requests"]) * request_bytes(llm, task["prompt"] + task["new_tokens"]) + block


def answered(llm: Any, task: dict[str, Any]) -> dict[str, Any]:
    """What vLLM counted while it answered all requests, which came at once."""
    generator = torch.Generator().manual_seed(1)
    words = llm.llm_engine.vllm_config.model_config.get_vocab_size()

    def prompt(length: int) -> list[int]:
        found: list[int] = torch.randint(words, (length,), generator=generator).tolist()
        return found

    # Libraries are loaded and threads are running before the first request counts.
    ask(llm, [prompt(min(64, task["prompt"]))], tokens=4)
    before = preemptions(llm)
    running, finished = ask(llm, [prompt(task["prompt"]) for _ in range(task["requests"])], tokens=task["new_tokens"])
    times = [output.metrics for output in finished]
    assert all(len(output.outputs[0].token_ids) == task["new_tokens"] for output in finished)
    between = [(one.last_token_ts - one.first_token_ts) / max(1, task["new_tokens"] - 1) for one in times]
    return {
        "running": running,
        "preemptions": int(preemptions(llm) - before),
        "seconds": max(one.last_token_ts for one in times) - min(one.queued_ts for one in times),
        "milliseconds_per_token": 1e3 * sum(between) / len(between),
        "first_token_seconds": sum(one.first_token_latency for one in times) / len(times),
    }


def ask(llm: Any, prompts: list[list[int]], *, tokens: int) -> tuple[int, list[Any]]:
    """The most requests that were at work at once, and the answers."""
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for number, prompt in enumerate(prompts):
        llm.llm_engine.add_request(f"{len(prompts)}-{number}", {"prompt_token_ids": prompt}, wanted)
    running, finished = 0, []
    while llm.llm_engine.has_unfinished_requests():
        finished += [output for output in llm.llm_engine.step() if output.finished]
        running = max(running, len(core(llm).scheduler.running))
    return running, finished


def preemptions(llm: Any) -> float:
    """How often a request had to make room for another."""
    return float(sum(one.value for one in llm.get_metrics() if one.name == "vllm:num_preemptions"))


if __name__ == "__main__":
    main()
