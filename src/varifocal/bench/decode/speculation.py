"""What transformers' speculative generation gains with our models: the same text in fewer calls."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from varifocal.bench.timing import Times, turns
from varifocal.model import VarifocalForCausalLM
from varifocal.results.decode_bench import SpeculationRow

PLAIN = "plain"
PROPOSED = 7
"""Tokens that the prompt proposes; with the one before them they are as many as a native call takes."""
ASSISTED = 5
"""Tokens that the assistant proposes."""


def time_speculation(
    name: str, model: VarifocalForCausalLM, assistant: VarifocalForCausalLM, ids: Tensor, *, tokens: int, rounds: int
) -> list[SpeculationRow]:
    """Greedy generation after the prompt ids [1, T]: proposed by the prompt itself, and by an assistant, in turns.

    Args:
        name: of the model.
        model: ours.
        assistant: the same model with narrow weights, which proposes what it would say itself.
        ids: the prompt.
        tokens: how many to generate.
        rounds: in which all take turns, after one to warm up.
    """
    settings = assistant.generation_config
    settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = ASSISTED, "constant"
    # By default an assistant stops as soon as it is unsure.
    settings.assistant_confidence_threshold = 0.0
    kinds: dict[str, dict[str, Any]] = {
        PLAIN: {},
        "prompt lookup": {"prompt_lookup_num_tokens": PROPOSED},
        "int8 assistant": {"assistant_model": assistant},
    }
    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    def generated(kind: str) -> Tensor:
        made: Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0, **kinds[kind],
        )  # fmt: skip
        return made[0, ids.shape[1] :]

    texts: dict[str, Tensor] = {}
    called: dict[str, int] = {}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    handle = model.register_forward_hook(count)
    try:
        for kind, number in turns(tuple(kinds), rounds):
            calls, begin = 0, time.perf_counter()
            texts[kind] = generated(kind)
            if number:
                seconds[kind].append(time.perf_counter() - begin)
            called[kind] = calls
    finally:
        handle.remove()
    times = {kind: Times(tuple(found)) for kind, found in seconds.items()}
    return [
        SpeculationRow(
            name=name,
            kind=kind,
            tokens=len(texts[kind]),
            calls=called[kind],
            speedup=times[PLAIN].speedup_of(times[kind]),
            same_text=torch.equal(texts[kind], texts[PLAIN]),
        )
        for kind in kinds
        if kind != PLAIN
    ]


def repeating_prompt(ids: Tensor) -> Tensor:
    """A prompt [1, T] that begins to repeat itself: what a look into the prompt is made for."""
    half = ids[:, : min(ids.shape[1], 160)]
    return torch.cat([half, half[:, : half.shape[1] // 2]], dim=1)
