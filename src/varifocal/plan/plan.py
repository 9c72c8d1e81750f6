"""What a training run will take, from a step's work and a device's rates: memory, tokens a second, hours, cost."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from varifocal.attention.mechanisms import MECHANISMS
from varifocal.attention.mechanisms.registry import mechanism_type, nearest
from varifocal.model.config import VarifocalConfig
from varifocal.plan.cost import parameters_by_part
from varifocal.plan.hardware import Precision
from varifocal.plan.step_cost import Execution, MicroBatch, StepWork, memory_by_part, step_work
from varifocal.results.hardware import Assumptions, Hardware

LIMITS = ("matrix units", "memory", "attention", "exponentials", "selection", "Python", "network")
"""What a step may wait for. Attention's products reach less of the matrix units than others, and stand alone; selection
is all that decides which keys are read and how much they count."""
LARGEST_MICRO_BATCH = 64
"""More rows than this at once do not make a step faster."""


def variant_name(mechanism: str, options: Mapping[str, Any]) -> str:
    """The mechanism's name, followed by its way to run if that is not its first one."""
    for label, way in list(mechanism_type(mechanism).ways.items())[1:]:
        if all(name in options and options[name] == value for name, value in way.items()):
            return f"{mechanism} {label}"
    return mechanism


def every_variant() -> dict[str, tuple[str, dict[str, Any]]]:
    """By name: a mechanism and its options. A mechanism with several ways to run has an entry for each of them."""
    others = {
        f"{name} {label}": (name, dict(way))
        for name, one in MECHANISMS.items()
        for label, way in list(one.ways.items())[1:]
    }
    return {name: (name, {}) for name in MECHANISMS} | others


def find_variants(names: Sequence[str] | None) -> dict[str, tuple[str, dict[str, Any]]]:
    """The variants of those names, or all for None; ValueError with the nearest known name if one is unknown."""
    known = every_variant()
    for name in names or ():
        if name not in known:
            raise ValueError(f"unknown mechanism {name!r}{nearest(name, known)}; known are {', '.join(known)}")
    return {name: known[name] for name in names or known}


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is to be trained, and on how many devices."""

    config: VarifocalConfig
    tokens: float
    length: int
    batch: int = 512
    """Rows per optimizer step, over all devices."""
    devices: int = 1
    micro_batch: int | None = None
    """Rows that a device computes at once; None for the most that fit."""
    precision: Precision = "bfloat16"
    checkpointing: bool = False
    execution: Execution = "kernels"

    def __post_init__(self) -> None:
        if self.devices < 1 or self.batch % self.devices:
            raise ValueError(f"batch must be a multiple of the {self.devices} devices, got {self.batch}")
        if self.tokens <= 0:
            raise ValueError(f"tokens must be above 0, got {self.tokens:g}")
        if self.length < 2:
            raise ValueError(f"context must be at least 2, got {self.length}")
        share = self.batch // self.devices
        if self.micro_batch is not None and (self.micro_batch < 1 or share % self.micro_batch):
            raise ValueError(
                f"micro-batch must divide the {share} rows that each device has of a step, got {self.micro_batch}"
            )

    @property
    def share(self) -> int:
        """Rows per device and step."""
        return self.batch // self.devices

    def part(self, rows: int) -> MicroBatch:
        """A micro-batch of that many rows."""
        return MicroBatch(
            rows=rows,
            length=self.length,
            precision=self.precision,
            checkpointing=self.checkpointing,
            execution=self.execution,
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What the cost model says about a training run."""

    parameters: int
    flops: float
    """Operations of the forward and backward pass, per token."""
    memory: dict[str, float]
    """Bytes by part, for one device."""
    room: float
    """Bytes that a device has for them."""
    micro_batch: int
    seconds: dict[str, float]
    """Seconds of an optimizer step by part, without what overlaps with other parts."""
    tokens_per_second: float
    hours: float
    cost: float | None
    """Dollars; None without a price."""
    notes: tuple[str, ...] = field(default=())
    limits: dict[str, float] = field(default_factory=dict)
    """The share of an optimizer step that each part of the device limits, the largest first; they add up to 1."""

    @property
    def peak(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.peak <= self.room

    @property
    def step_seconds(self) -> float:
        return sum(self.seconds.values())


def predict(
    training: Training, hardware: Hardware, assumptions: Assumptions | None = None, *, price: float | None = None
) -> Prediction:
    """What the run takes on that hardware; `price` is in dollars an hour for one device, None for the table's price."""
    given = Assumptions() if assumptions is None else assumptions
    if training.precision not in hardware.products:
        raise ValueError(
            f"{hardware.name} has no products in {training.precision}; use --precision {' or '.join(hardware.products)}"
        )
    room = hardware.memory if hardware.measured else hardware.memory * (1 - given.reserve) - given.context
    parameters = sum(parameters_by_part(training.config).values())
    rows = training.micro_batch or largest_micro_batch(training, room, parameters)
    part = replace(training.part(rows), tiles=not hardware.measured)
    accumulated = training.share // rows
    memory = memory_by_part(
        training.config,
        part,
        parameters=parameters,
        devices=training.devices,
        accumulated=accumulated,
        native=hardware.measured,
    )
    work = step_work(training.config, part, native=hardware.measured)
    pass_seconds = seconds_of(work, training, hardware, given)
    seconds = {name: accumulated * value for name, value in pass_seconds.items()}
    # AdamW reads weight, gradient and two moments and writes all but the gradient; the norm reads each gradient, and
    # clipping reads and writes it.
    seconds["optimizer"] = 40.0 * parameters / (hardware.bandwidth * reached(hardware, given.bandwidth))
    seconds["exchange"] = exchange_seconds(training, hardware, given, parameters, sum(pass_seconds.values()))
    step = sum(seconds.values())
    tokens_per_second = training.batch * training.length / step
    hours = training.tokens / tokens_per_second / 3600
    hourly = hardware.price if price is None else price
    return Prediction(
        parameters=parameters,
        flops=work.flops / part.tokens,
        memory=memory,
        room=room,
        micro_batch=rows,
        seconds=seconds,
        tokens_per_second=tokens_per_second,
        hours=hours,
        cost=None if hourly is None else hours * training.devices * hourly,
        notes=(*notes_of(training, pass_seconds), *compiled_note(training, hardware, given, part, seconds)),
        limits=limits_of(work, seconds, hardware, given, peak=hardware.products[training.precision]),
    )


def reached(hardware: Hardware, fraction: float) -> float:
    """The fraction of a rate that is reached: the assumed one for a data sheet, all of it if it was measured."""
    return 1.0 if hardware.measured else fraction


def largest_micro_batch(training: Training, room: float, parameters: int) -> int:
    """The largest power of two of rows that divides a device's share and fits in its memory; 1 if none does."""
    rows = 1
    while rows < LARGEST_MICRO_BATCH and training.share % (2 * rows) == 0:
        more = memory_by_part(
            training.config,
            training.part(2 * rows),
            parameters=parameters,
            devices=training.devices,
            accumulated=training.share // (2 * rows),
        )
        if sum(more.values()) > room:
            break
        rows *= 2
    return rows


def seconds_of(work: StepWork, training: Training, hardware: Hardware, given: Assumptions) -> dict[str, float]:
    """Seconds of a micro-batch's forward and backward pass, by the parts that run one after another on the device."""
    peak = hardware.products[training.precision]
    rate = measured_rate(training.config, hardware) if hardware.measured else peak * given.attention
    moving = hardware.bandwidth * reached(hardware, given.bandwidth)
    # A GPU moves operands while it multiplies, so the slower of the two counts; a CPU core does one after the other.
    both = operator.add if hardware.measured else max
    seconds = {
        "products": both(work.products / (peak * reached(hardware, given.products)), work.operands / moving),
        "head": both(
            work.head / (peak * reached(hardware, given.products)),
            work.logits / moving,
        ),
        "attention": work.reading / rate
        + work.rating / (rate if hardware.measured else peak * given.selection)
        + work.exponentials / (hardware.exponentials * reached(hardware, given.exponentials)),
        "other operators": work.traffic / moving,
    }
    starting = work.calls * (hardware.call if hardware.measured else given.call)
    if hardware.measured:
        return seconds | {"starting operators": starting}
    # Python starts operators ahead of the GPU; where starting is slower, the GPU waits.
    return seconds | {"waiting for Python": max(0.0, starting - sum(seconds.values()))}


def limits_of(
    work: StepWork, seconds: dict[str, float], hardware: Hardware, given: Assumptions, *, peak: float
) -> dict[str, float]:
    """What a step waits for, by part of the device, as shares of its time."""
    found: dict[str, float] = dict.fromkeys(LIMITS, 0.0)
    moving = hardware.bandwidth * reached(hardware, given.bandwidth)
    multiplying = peak * reached(hardware, given.products)
    for name, operations, moved in (
        ("products", work.products, work.operands),
        ("head", work.head, work.logits),
    ):
        found["memory" if moved / moving > operations / multiplying else "matrix units"] += seconds[name]
    # The parts of attention follow one after another; what a measured machine takes for them is not told apart.
    parts = {
        "attention": work.reading / (peak * given.attention),
        "selection": work.rating / (peak * given.selection),
        "exponentials": work.exponentials / (hardware.exponentials * given.exponentials),
    }
    if hardware.measured:
        parts = {"attention": 1.0}
    for name, part in parts.items():
        found[name] += seconds["attention"] * part / sum(parts.values())
    found["memory"] += seconds["other operators"] + seconds["optimizer"]
    found["Python"] += seconds.get("starting operators", 0.0) + seconds.get("waiting for Python", 0.0)
    found["network"] += seconds["exchange"]
    total = sum(found.values())
    return {name: found[name] / total for name in sorted(found, key=lambda name: -found[name]) if found[name]}


def measured_rate(config: VarifocalConfig, hardware: Hardware) -> float:
    """Operations a second of the attention of all layers, each layer at the rate of its own mechanism."""
    names = [variant_name(*config.layer_mechanism(layer)) for layer in range(config.num_hidden_layers)]
    for name in names:
        if name not in hardware.attention:
            known = ", ".join(hardware.attention)
            raise ValueError(f"{hardware.name} was not measured with {name}; it was measured with {known}")
    return len(names) / sum(1 / hardware.attention[name] for name in names)


def exchange_seconds(
    training: Training, hardware: Hardware, given: Assumptions, parameters: int, pass_seconds: float
) -> float:
    """The seconds of the all-reduce of float32 gradients that do not overlap with the backward pass."""
    if training.devices == 1:
        return 0.0
    moved = 2 * (training.devices - 1) / training.devices * 4.0 * parameters
    slowest = hardware.link if training.devices <= given.devices_in_node else min(hardware.link, given.network)
    return max(0.0, moved / slowest - given.overlap * 2 / 3 * pass_seconds)


def compiled_note(
    training: Training, hardware: Hardware, given: Assumptions, part: MicroBatch, seconds: dict[str, float]
) -> tuple[str, ...]:
    """What torch.compile would bring, if it made one pass of what lies between products, as our CPU kernels do."""
    if hardware.measured:
        return ()
    fused = seconds_of(step_work(training.config, part, native=True), training, hardware, given)
    accumulated = training.share // part.rows
    before = sum(seconds.values())
    step = before - sum(seconds[name] for name in fused) + accumulated * sum(fused.values())
    return (
        f"compiled by torch.compile, with one pass over what lies between products, a step would take {step:.3g} s "
        f"instead of {before:.3g}, {before / step:.2f} times the speed (estimated like all of this)",
    )


def notes_of(training: Training, seconds: dict[str, float]) -> tuple[str, ...]:
    """What is worth knowing about where the time goes."""
    total = sum(seconds.values())
    share = seconds["attention"] / total
    notes = [f"attention takes {share:.0%} of a pass; without it, a pass would be {1 / (1 - share):.2f} times as fast"]
    return tuple(notes)
