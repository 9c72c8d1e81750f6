"""What a step runs on: the data sheets' peaks, an hourly price that is an assumption, and what of a peak is reached."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Precision = Literal["float32", "bfloat16"]
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device, by its makers' data sheet or by measurement."""

    name: str
    memory: float
    """Bytes."""
    products: Mapping[Precision, float]
    """Floating-point operations a second of matrix products, with sums in float32; no sparsity tricks."""
    bandwidth: float
    """Bytes a second of its memory."""
    exponentials: float
    """Exponentials (and functions like them) a second."""
    link: float
    """Bytes a second to and from another device of the same node, one way."""
    price: float | None
    """Dollars an hour: an assumption, prices change from week to week."""
    measured: bool = False
    """Whether the rates were measured as they are reached, instead of read from a data sheet."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """If measured: operations a second that each mechanism's attention reaches, by `variant_name`."""
    call: float = 0.0
    """If measured: seconds that it takes to start an operator."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What of a peak a program reaches. All of it is guessed for GPUs; nothing here was run on one."""

    products: float = 0.55
    """Of the peak of matrix products, for products with weights."""
    attention: float = 0.35
    """The same for attention, whose products are smaller and wait for a softmax."""
    selection: float = 0.10
    """The same for ranking keys and for reading keys that were chosen one by one."""
    bandwidth: float = 0.75
    """Of the memory's bandwidth, for operators that only read and write."""
    exponentials: float = 0.5
    call: float = 6e-6
    """Seconds that Python and torch take to start an operator. On a GPU they run ahead of it: the slower one counts."""
    overlap: float = 0.8
    """The part of a backward pass behind which gradients can be exchanged."""
    network: float = 12.5e9
    """Bytes a second between nodes, one way, for all devices of a node together: 100 Gbit/s."""
    devices_in_node: int = 8
    reserve: float = 0.08
    """Part of the memory that an allocator cannot use because of gaps."""
    context: float = 0.7 * GB
    """Bytes that the driver and libraries take."""


def gpu(
    name: str, *, memory: float, bfloat16: float | None, float32: float, bandwidth: float, exponentials: float,
    link: float, price: float,
) -> Hardware:  # fmt: skip
    """A row of the table in GB, TFLOP/s, GB/s and thousands of millions of exponentials a second."""
    products: dict[Precision, float] = {"float32": float32 * 1e12}
    if bfloat16 is not None:
        products["bfloat16"] = bfloat16 * 1e12
    return Hardware(
        name=name,
        memory=memory * GB,
        products=products,
        bandwidth=bandwidth * GB,
        exponentials=exponentials * 1e9,
        link=link * GB,
        price=price,
    )


# Exponentials: 16 a clock in each multiprocessor. Links: NVLink where there is one, else PCI Express. 1 GB is 1e9
# bytes; what a card calls 80 GB is 80 * 2^30 bytes, of which somewhat less can be used.
GPUS: dict[str, Hardware] = {
    one.name: one
    for one in (
        gpu("v100", memory=34.3, bfloat16=None, float32=15.7, bandwidth=900, exponentials=1958, link=150, price=1.5),
        gpu("a10", memory=24.1, bfloat16=125, float32=31.2, bandwidth=600, exponentials=1953, link=32, price=0.8),
        gpu("l4", memory=24.1, bfloat16=121, float32=30.3, bandwidth=300, exponentials=1893, link=32, price=0.7),
        gpu("l40s", memory=48.3, bfloat16=362, float32=91.6, bandwidth=864, exponentials=5725, link=32, price=1.2),
        gpu("3090", memory=25.3, bfloat16=71, float32=35.6, bandwidth=936, exponentials=2224, link=16, price=0.3),
        gpu("4090", memory=25.3, bfloat16=165, float32=82.6, bandwidth=1008, exponentials=5161, link=16, price=0.5),
        gpu("a100-40", memory=42.4, bfloat16=312, float32=19.5, bandwidth=1555, exponentials=2436, link=300, price=1.3),
        gpu("a100-80", memory=85.0, bfloat16=312, float32=19.5, bandwidth=2039, exponentials=2436, link=300, price=1.8),
        gpu("h100", memory=85.0, bfloat16=989, float32=66.9, bandwidth=3350, exponentials=3865, link=450, price=3.0),
        gpu("h200", memory=150.0, bfloat16=989, float32=66.9, bandwidth=4800, exponentials=3865, link=450, price=3.8),
    )
}
"""By name."""
OTHER_NAMES = {"a100": "a100-80", "rtx4090": "4090", "rtx3090": "3090"}


def find_gpu(name: str) -> Hardware:
    """The GPU of a name; ValueError with the nearest one."""
    key = name.lower().replace("_", "-")
    key = OTHER_NAMES.get(key, key)
    if key not in GPUS:
        close = difflib.get_close_matches(key, GPUS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown GPU {name!r}{hint}; known are {', '.join(GPUS)}, and this-machine")
    return GPUS[key]
