"""Time and memory are asked of every device through one interface; a missing device is named in a sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from varifocal.bench.timing import take_turns
from varifocal.device import CPU, Cuda, Device, find_device

MEGABYTE = 1 << 20
without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


class Event:
    """An event of a GPU whose clock counts the calls of the library."""

    def __init__(self, library: Library) -> None:
        self.library, self.time = library, -1

    def record(self) -> None:
        self.library.said.append("record")
        self.time = len(self.library.said)

    def elapsed_time(self, other: Event) -> float:
        return 1000.0 * (other.time - self.time)


class Library:
    """Answers in place of torch.cuda and writes down what it was asked.

    It shows which functions are called, in which order, on which device, and how their answers are put together. It
    does not show that a GPU's events and allocator mean what is taken from them: that takes a GPU.
    """

    def __init__(self, before: int = 0, peak: int = 0) -> None:
        self.before, self.peak = before, peak
        self.said: list[str] = []

    def Event(self, *, enable_timing: bool) -> Event:  # noqa: N802
        assert enable_timing
        return Event(self)

    def __getattr__(self, name: str) -> Any:
        answers = {"memory_allocated": self.before, "max_memory_allocated": self.peak}

        def ask(place: torch.device) -> Any:
            assert place == torch.device("cuda", 1)
            self.said.append(name)
            return answers.get(name)

        return ask


def pretended(library: Library) -> Cuda:
    return Cuda(torch.device("cuda", 1), library)


def test_cpu_measures_time_and_memory_of_a_run() -> None:
    device: Device = find_device("cpu")
    assert device is CPU
    assert device.place == torch.device("cpu")
    assert device.seconds(lambda: torch.ones(100)) > 0
    taken = device.peak_additional_bytes(lambda: torch.ones(16 * MEGABYTE))
    assert 60 * MEGABYTE < taken < 100 * MEGABYTE


def test_gpu_time_is_between_two_events_around_the_run_alone() -> None:
    library = Library()
    seconds = pretended(library).seconds(lambda: library.said.append("run"))
    assert library.said == ["synchronize", "record", "run", "record", "synchronize"]
    assert seconds == 2.0


def test_gpu_memory_is_the_peak_above_what_was_allocated_before() -> None:
    library = Library(before=300, peak=1000)
    taken = pretended(library).peak_additional_bytes(lambda: library.said.append("run"))
    assert taken == 700
    assert library.said == [
        "synchronize", "reset_peak_memory_stats", "memory_allocated", "run", "synchronize", "max_memory_allocated",
    ]  # fmt: skip


def test_turns_are_timed_by_the_device_they_run_on() -> None:
    library = Library()
    times = take_turns({"run": lambda: library.said.append("run")}, rounds=3, device=pretended(library))
    assert times["run"].seconds == (2.0, 2.0, 2.0)
    assert library.said.count("run") == 4


def test_functions_that_a_gpu_is_asked_for_exist_in_torch() -> None:
    names = (
        "Event", "synchronize", "reset_peak_memory_stats", "memory_allocated", "max_memory_allocated",
        "get_device_name", "set_device", "current_device",
    )  # fmt: skip
    assert all(callable(getattr(torch.cuda, name)) for name in names)


@without_cuda
def test_missing_gpu_is_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^device 'cuda' cannot be used here: .*; use --device cpu$"):
        find_device("cuda")


@pytest.mark.parametrize("name", ["meta", "gpu", "cuda:x"])
def test_unknown_device_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"device '{name}'"):
        find_device(name)
