"""metrics.jsonl: a line for every step of a run and for every validation."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from varifocal.results.files import explained, write_whole
from varifocal.results.record import Record, maybe

METRICS = "metrics.jsonl"
WHAT = "the metrics of a run"


@dataclass(frozen=True, kw_only=True)
class MetricsEntry(Record):
    """A line: the numbers of a step, or of a validation."""

    step: int
    tokens: int | None = maybe()
    """Tokens trained on so far."""
    loss: float | None = maybe()
    """The loss of this step in nats a token."""
    learning_rate: float | None = maybe()
    gradient_norm: float | None = maybe()
    tokens_per_second: float | None = maybe()
    seconds: float | None = maybe()
    """Training time so far."""
    processor_seconds: float | None = maybe()
    """Processor time of training so far."""
    auxiliary: dict[str, float] | None = maybe()
    """Losses other than the cross entropy."""
    validation_loss: float | None = maybe()
    bits_per_byte: float | None = maybe()
    accuracy: float | None = maybe()
    """The share of right answers in this validation, for a probe."""

    def line(self) -> str:
        """The entry as it stands in the file."""
        return json.dumps(self.to_json()) + "\n"


def read_metrics(path: Path) -> list[MetricsEntry]:
    """The entries of a file, or none if it does not exist; a line that a killed process did not finish is left out."""
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"cannot read {path} as {WHAT}: {error}") from error
    with explained(path, what=WHAT):
        return [
            MetricsEntry.from_json(content, f"line {number + 1}")
            for number, content in enumerate(map(whole, lines))
            if content is not None
        ]


def write_metrics(path: Path, entries: Iterable[MetricsEntry]) -> None:
    """Replace the whole file."""
    write_whole(path, "".join(entry.line() for entry in entries))


def last_entry(path: Path) -> MetricsEntry | None:
    """The last whole line of a file that is being written; None if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4096))
            tail = file.read().decode("utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for content in map(whole, reversed(tail)):
        try:
            return MetricsEntry.from_json(content)
        except ValueError:
            continue
    return None


def whole(line: str) -> object | None:
    """The content of a line; None if it was cut off."""
    try:
        content: object = json.loads(line)
    except (json.JSONDecodeError, RecursionError):
        return None
    return content


def validation_curve(entries: Iterable[MetricsEntry]) -> tuple[tuple[int, float], ...]:
    """Tokens and validation loss at each validation; if a step was validated twice, the later validation counts."""
    points = {
        entry.tokens: entry.validation_loss
        for entry in entries
        if entry.tokens is not None and entry.validation_loss is not None
    }
    return tuple(sorted(points.items()))


def accuracy_curve(entries: Iterable[MetricsEntry]) -> tuple[tuple[int, float], ...]:
    """Steps and the share of right answers at each validation of a probe; the later one of a step counts."""
    return tuple(sorted({entry.step: entry.accuracy for entry in entries if entry.accuracy is not None}.items()))


def validation_times(entries: Iterable[MetricsEntry]) -> tuple[tuple[float, float], ...]:
    """Processor seconds of training and validation loss at each validation; the later one of a step counts."""
    points = {
        entry.step: (entry.processor_seconds, entry.validation_loss)
        for entry in entries
        if entry.processor_seconds is not None and entry.validation_loss is not None
    }
    return tuple(points[step] for step in sorted(points))
