"""GPUs by name: the peaks of their data sheets, and an hourly price that is an assumption."""

from __future__ import annotations

import difflib
from typing import Literal, get_args

from varifocal.results.hardware import Hardware

Precision = Literal["float32", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
GB = 1e9


def find_precision(name: str) -> Precision:
    """The precision of that name; ValueError if it is unknown."""
    for known in PRECISIONS:
        if name == known:
            return known
    raise ValueError(f"unknown precision {name!r}; known are {', '.join(PRECISIONS)}")


def gpu(
    name: str, *, memory: float, bfloat16: float | None, float32: float, bandwidth: float, exponentials: float,
    link: float, price: float,
) -> Hardware:  # fmt: skip
    """A row of the table, in GB, TFLOP/s, GB/s and billions of exponentials a second."""
    products = {"float32": float32 * 1e12}
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
"""The GPUs that `varifocal plan` knows, by name."""
OTHER_NAMES = {"a100": "a100-80", "rtx4090": "4090", "rtx3090": "3090"}


def find_gpu(name: str) -> Hardware:
    """The GPU of that name; ValueError with the nearest known name if there is none."""
    key = name.lower().replace("_", "-")
    key = OTHER_NAMES.get(key, key)
    if key not in GPUS:
        close = difflib.get_close_matches(key, GPUS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown GPU {name!r}{hint}; known are {', '.join(GPUS)}, and this-machine")
    return GPUS[key]
