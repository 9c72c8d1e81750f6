"""Prefill and decoding of focused models in turns with our dense model and transformers' own, beside the bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from varifocal.bench.decode.contenders import ModelContender, check_agreement, weights_read
from varifocal.bench.decode.memory_speed import MemoryReader
from varifocal.bench.model.contenders import share_weights
from varifocal.bench.timing import Times, turns
from varifocal.environment import environment
from varifocal.results.focus import MapSpeed
from varifocal.retrofit.families import take_over
from varifocal.retrofit.focus.comparison import DENSE, Contestant
from varifocal.retrofit.focus.fit import FitPlan
from varifocal.retrofit.focus.focusing import Opened, focused_model

TRANSFORMERS = "transformers"
WARM_UP = 64


@dataclass(frozen=True, eq=False)
class Timed:
    """A model that takes part, and the map that it reads by; None for transformers' own."""

    contender: ModelContender
    map: Contestant | None
    keep: float


def time_maps(
    opened: Opened,
    maps: Sequence[Contestant],
    length: int,
    *,
    rounds: int = 2,
    tokens: int = 32,
    on_count: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> list[MapSpeed]:
    """Seconds of a prompt and milliseconds of a token after it; all take turns.

    Args:
        opened: the model; its source is transformers' own with SDPA.
        maps: dense and what is compared with it, all with the same weights.
        length: tokens of the prompt.
        rounds: how often each reads the prompt, and decodes.
        tokens: decoded after each prompt, in turns of 4.
        on_count: called with what is done, how much of it, and how much there is.
    """
    timed = build(opened, maps)
    by_name = {one.contender.name: one for one in timed}
    prefill: dict[str, list[float]] = {name: [] for name in by_name}
    decode: dict[str, list[float]] = {name: [] for name in by_name}
    memory, loop = MemoryReader(), list[float]()
    for one in timed:
        one.contender.prepare(texts=1, context=WARM_UP, room=0, prompt=True)
        one.contender.take_turn(2)
    done, total = 0, rounds * len(timed)
    for number in range(rounds):
        names = list(by_name)
        for name in names if number % 2 == 0 else reversed(names):
            seconds = by_name[name].contender.prepare(texts=1, context=length, room=tokens, prompt=True)
            assert seconds is not None
            prefill[name].append(seconds)
            done += 1
            on_count(f"speed at {length}", done, total)
        for name, turn in turns(tuple(names), max(1, tokens // 4)):
            taken = by_name[name].contender.take_turn(4)
            if turn:
                decode[name].append(taken.seconds / 4)
            if name == names[0]:
                loop.append(memory.seconds())
        for one in timed:
            one.contender.forget()
    a_byte = Times(tuple(loop)).median / memory.bytes
    found = []
    for name, one in by_name.items():
        times, read = Times(tuple(decode[name])), bytes_read(opened, one, length)
        found.append(
            MapSpeed(
                name=one.map.name if one.map else TRANSFORMERS, keep=one.keep, length=length,
                prefill_seconds=tuple(round(seconds, 4) for seconds in prefill[name]),
                decode_milliseconds=round(1e3 * times.median, 3), decode_spread=round(times.spread, 4),
                bytes_read=read, bound_milliseconds=round(1e3 * a_byte * read, 3), environment=environment(),
            )
        )  # fmt: skip
    return found


def build(opened: Opened, maps: Sequence[Contestant]) -> list[Timed]:
    """The models, all on one copy of the weights, after the logits of dense were compared with transformers'."""
    config = opened.gated.gates[0].config
    plan = FitPlan(window=config.window, sinks=config.sinks, lengths=(config.window + config.sinks + 1,))
    found = [Timed(ModelContender(TRANSFORMERS, opened.source), None, 1.0)]
    for one in maps:
        if one.name == DENSE:
            found.append(Timed(ModelContender(DENSE, take_over(opened.source)), one, 1.0))
        else:
            model = focused_model(opened.source, one.full, plan)
            found.append(Timed(ModelContender(f"{one.name} {one.keep}", model.eval()), one, one.keep))
    contenders = [one.contender for one in found]
    share_weights(contenders)
    with torch.no_grad():
        check_agreement(contenders)
    return found


def bytes_read(opened: Opened, one: Timed, length: int) -> int:
    """The weights, and the keys and values that a query after `length` tokens may read."""
    sizes = opened.sizes
    one_key = 2 * sizes.head_width * sizes.bytes_per_number
    full = one.map.full if one.map is not None else ((True,) * sizes.kv_heads,) * sizes.layers
    near = min(length, sizes.window + sizes.sinks)
    keys = sum(length if head else near for layer in full for head in layer)
    return weights_read(opened.source) + one_key * keys
