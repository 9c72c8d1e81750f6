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


class Arrivals:
    """When tokens came, and how many at a time; the prompt comes first."""

    def __init__(self) -> None:
        self.came: list[tuple[float, int]] = []

    def put(self, value: Tensor) -> None:
        """Take some tokens."""
        self.came.append((time.perf_counter(), value.numel()))

    def end(self) -> None:
        """No more tokens come."""

    def seconds_a_token(self) -> float:
        """After the first call, which reads the prompt."""
        (_, (first, _), *_), (last, _) = self.came, self.came[-1]
        return (last - first) / max(1, sum(count for _, count in self.came[2:]))

    def calls(self) -> int:
        """Of the model: each gives some tokens."""
        return len(self.came) - 1


def time_speculation(
    name: str,
    model: VarifocalForCausalLM,
    assistant: VarifocalForCausalLM,
    ids: Tensor,
    *,
    prompt: str,
    tokens: int,
    rounds: int,
) -> list[SpeculationRow]:
    """Greedy generation after the prompt ids [1, T]: proposed by the prompt itself, and by an assistant, in turns.

    Args:
        name: of the model.
        model: ours.
        assistant: the same model with narrow weights, which proposes what it would say itself.
        ids: the prompt.
        prompt: what kind of prompt it is.
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
    texts: dict[str, Tensor] = {}
    calls: dict[str, int] = {}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    for kind, number in turns(tuple(kinds), rounds):
        arrivals = Arrivals()
        made: Tensor = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            pad_token_id=0, streamer=arrivals, **kinds[kind],
        )  # fmt: skip
        texts[kind], calls[kind] = made[0, ids.shape[1] :], arrivals.calls()
        if number:
            seconds[kind].append(arrivals.seconds_a_token())
    times = {kind: Times(tuple(found)) for kind, found in seconds.items()}
    return [
        SpeculationRow(
            name=name,
            kind=kind,
            prompt=prompt,
            context=ids.shape[1],
            tokens=len(texts[kind]),
            calls=calls[kind],
            speedup=times[PLAIN].speedup_of(times[kind]),
            same_text=torch.equal(texts[kind], texts[PLAIN]),
        )
        for kind in kinds
        if kind != PLAIN
    ]


def prompts(ids: Tensor, context: int) -> dict[str, Tensor]:
    """Prompts [1, context] from a text [1, T] by their kind: its beginning, and a part of it that begins to repeat.

    The second is what a look into the prompt is made for.
    """
    ids = ids[:, :context]
    part = ids[:, : max(1, 2 * ids.shape[1] // 3)]
    return {"running": ids, "repeating": torch.cat([part, part[:, : ids.shape[1] - part.shape[1]]], dim=1)}
