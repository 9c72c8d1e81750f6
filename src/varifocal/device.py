"""How long a run takes and how much memory it takes, asked in the same way of a CPU and of a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from varifocal.memory import peak_bytes, reset_peak, resident_bytes


class Device(Protocol):
    """What a measurement needs to know of the place where it runs."""

    @property
    def place(self) -> torch.device:
        """Where tensors go."""
        ...

    @property
    def description(self) -> str:
        """What it is called, for a result file."""
        ...

    def seconds(self, run: Callable[[], object]) -> float:
        """The time of one run, its work finished."""
        ...

    def peak_additional_bytes(self, run: Callable[[], object]) -> int:
        """How far memory rises above its present level while `run` runs."""
        ...


@dataclass(frozen=True)
class Cpu:
    """The wall clock, and the resident size of this process."""

    @property
    def place(self) -> torch.device:
        return torch.device("cpu")

    @property
    def description(self) -> str:
        return "cpu"

    def seconds(self, run: Callable[[], object]) -> float:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def peak_additional_bytes(self, run: Callable[[], object]) -> int:
        reset_peak()
        before = resident_bytes()
        run()
        return max(0, peak_bytes() - before)


@dataclass(frozen=True)
class SharedCpu(Cpu):
    """The processor time of this process, which others on the machine disturb less; it adds up over threads."""

    def seconds(self, run: Callable[[], object]) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start


@dataclass(frozen=True)
class Cuda:
    """Events in the stream of the work, and what torch's allocator has given out."""

    place: torch.device
    library: Any = torch.cuda
    """What is asked; a test may answer in its place."""

    @property
    def description(self) -> str:
        return str(self.library.get_device_name(self.place))

    def seconds(self, run: Callable[[], object]) -> float:
        begin, end = (self.library.Event(enable_timing=True) for _ in range(2))
        # What was asked for before must not be counted.
        self.library.synchronize(self.place)
        begin.record()
        run()
        end.record()
        self.library.synchronize(self.place)
        return float(begin.elapsed_time(end)) / 1000

    def peak_additional_bytes(self, run: Callable[[], object]) -> int:
        self.library.synchronize(self.place)
        self.library.reset_peak_memory_stats(self.place)
        before = int(self.library.memory_allocated(self.place))
        run()
        self.library.synchronize(self.place)
        return int(self.library.max_memory_allocated(self.place)) - before


CPU = Cpu()
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def find_dtype(name: str) -> torch.dtype:
    """The type of a name; ValueError for an unknown one."""
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; known are {', '.join(DTYPES)}")
    return DTYPES[name]


def find_device(name: str | torch.device) -> Device:
    """The device of a name such as cpu, cuda or cuda:1; ValueError of one sentence if it cannot be used here."""
    try:
        place = torch.device(name)
        if place.type not in ("cpu", "cuda"):
            raise ValueError(f"device {str(name)!r} is not known; use cpu or cuda")
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(f"device {str(name)!r} cannot be used here: {reason}; use --device cpu") from error
    if place.type == "cpu":
        return CPU
    place = torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
    # Events are recorded in the current device's stream.
    torch.cuda.set_device(place)
    return Cuda(place)
