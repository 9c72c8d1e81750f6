"""This machine's rates for the cost model, each measured on its own: products, memory, attention, operators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from varifocal import HeadShape, Mechanism, make_mechanism
from varifocal.bench.rows import is_worth_timing
from varifocal.bench.timing import take_turns
from varifocal.device import CPU, Device
from varifocal.model import VarifocalForCausalLM, preset
from varifocal.plan.hardware import find_gpu
from varifocal.plan.plan import every_variant
from varifocal.plan.step_cost import AttentionWork, MicroBatch, attention_work, step_work
from varifocal.results.hardware import Hardware
from varifocal.results.plan_check import PlanCheck

LENGTH = 1024
"""Tokens of the text on which attention is measured."""
WIDE, NARROW = HeadShape(), HeadShape(model_width=256, heads=8, kv_heads=4, head_width=32)
"""The heads of the presets qwen-134m and small: products dominate in the first, exponentials in the second."""


def is_here(name: str) -> bool:
    """Whether a hardware name means this machine."""
    return name.lower() in ("this-machine", "cpu")


def find_hardware(name: str, calibration: Path | None = None) -> Hardware:
    """A GPU of the table; or this machine, measured now or as a result of `varifocal bench plan` holds it."""
    if is_here(name):
        return calibrate() if calibration is None else PlanCheck.read(calibration).machine
    if calibration is not None:
        raise ValueError(f"--calibration is for --gpu this-machine, got --gpu {name}")
    return find_gpu(name)


def calibrate(*, clock: Device = CPU, rounds: int = 7) -> Hardware:
    """The rates of this machine with torch's current number of threads; takes a few seconds."""
    dense = {shape: attention_seconds("dense", shape, clock, rounds) for shape in (WIDE, NARROW)}
    counted = {shape: counted_work("dense", shape) for shape in (WIDE, NARROW)}
    exponentials = exponential_rate(
        *(((one.reading, one.exponentials), dense[shape]) for shape, one in counted.items())
    )
    rates = {}
    for name in every_variant():
        if not is_worth_timing(layer_of(name, WIDE), "cpu"):
            continue
        seconds = dense[WIDE] if name == "dense" else attention_seconds(name, WIDE, clock, rounds)
        one = counted_work(name, WIDE)
        left = max(seconds - LENGTH * one.exponentials / exponentials, 0.1 * seconds)
        rates[name] = LENGTH * (one.reading + one.rating) / left
    return Hardware(
        name="this-machine",
        memory=float(memory_of_machine()),
        products={"float32": product_rate(clock, rounds)},
        bandwidth=bandwidth(clock, rounds),
        exponentials=exponentials,
        link=1e9,
        price=None,
        measured=True,
        attention=rates,
        call=call_seconds(clock, rounds),
    )


def least_seconds(run: Callable[[], object], clock: Device, rounds: int) -> float:
    """The shortest of several runs after a first one: disturbances only make a run longer."""
    return min(take_turns({"run": run}, rounds=rounds, device=clock)["run"].seconds)


def product_rate(clock: Device, rounds: int) -> float:
    """Operations a second of a layer's products: 1024 tokens through the widest weights of qwen-134m, up and down."""
    x, up, down = torch.randn(LENGTH, 512), torch.randn(1536, 512), torch.randn(512, 1536)

    def run() -> None:
        (x @ up.mT) @ down.mT

    return 2 * 2.0 * LENGTH * 512 * 1536 / least_seconds(run, clock, 4 * rounds)


def bandwidth(clock: Device, rounds: int) -> float:
    """Bytes a second of an operator that reads 12 MB and writes 12 MB to fresh memory, as a layer's operators do."""
    x = torch.randn(2048, 1536)
    return 8.0 * x.numel() / least_seconds(lambda: x * 2.0, clock, 4 * rounds)


def call_seconds(clock: Device, rounds: int) -> float:
    """The seconds of an operator that has almost nothing to do, from a step of the tiny model on 8 tokens."""
    config = preset("tiny", vocab_size=64)
    model = VarifocalForCausalLM(config).train()
    ids = torch.arange(8)[None]

    def run() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    work = step_work(config, MicroBatch(rows=1, length=8, precision="float32"), native=True)
    return least_seconds(run, clock, 4 * rounds) / work.calls


def layer_of(name: str, shape: HeadShape) -> Mechanism[Any]:
    """A mechanism with the options that it has in the preset whose heads these are."""
    stem, given = every_variant()[name]
    sizes = "qwen-134m" if shape == WIDE else "small"
    stem, options = preset(sizes, mechanism=stem, mechanism_options=given).layer_mechanism(0)
    return make_mechanism(stem, shape, **options)


def counted_work(name: str, shape: HeadShape) -> AttentionWork:
    """What the cost model counts per token for the attention that is measured."""
    return attention_work(layer_of(name, shape), MicroBatch(rows=1, length=LENGTH, precision="float32"))


def attention_seconds(name: str, shape: HeadShape, clock: Device, rounds: int) -> float:
    """The seconds of a mechanism's forward and backward pass."""
    mechanism = layer_of(name, shape).train()
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(1, *sizes, generator=generator).requires_grad_()

    x = normal(LENGTH, shape.model_width)
    q = normal(shape.heads, LENGTH, shape.head_width)
    k, v = (normal(shape.kv_heads, LENGTH, shape.head_width) for _ in range(2))

    def run() -> None:
        attended = mechanism(x, q, k, v)
        loss = attended.output.sum() + sum(attended.losses.values())
        loss.backward()

    return least_seconds(run, clock, rounds)


def exponential_rate(*measured: tuple[tuple[float, float], float]) -> float:
    """Exponentials a second, from the operations and exponentials per token and the seconds of two attentions.

    They give two equations, seconds = operations / rate + exponentials / their rate, with two unknown rates.
    """
    (first, one), (second, two) = measured
    (operations, functions), (fewer, others) = first, second
    determinant = operations * others - fewer * functions
    share = (operations * two - fewer * one) / determinant / LENGTH
    # If noise leaves no time for exponentials, they count as free.
    return 1 / share if share > 1e-13 else 1e13


def memory_of_machine() -> int:
    """Bytes of memory that are free for training."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return 1 << 40
    fields = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return fields["MemAvailable"]
