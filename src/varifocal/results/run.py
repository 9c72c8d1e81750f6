"""The files of a run's folder: what it was started with, what it found, and the settings that a table names."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord, explained, read_toml
from varifocal.results.record import Record, maybe

CONFIG, MODEL = "config.toml", "model"
"""The complete settings of a run, which stand in its folder from the start, and the folder of its trained model."""


@dataclass(frozen=True, kw_only=True)
class RunEnvironment(Environment, FileRecord):
    """environment.json: where and on which data a run was started."""

    filename: ClassVar[str] = "environment.json"
    what: ClassVar[str] = "the environment of a run"

    data_fingerprint: str | None = maybe()


@dataclass(frozen=True, kw_only=True)
class RunSummary(FileRecord):
    """summary.json: what a finished run found. It is written last and makes the run a finished one."""

    filename: ClassVar[str] = "summary.json"
    what: ClassVar[str] = "the summary of a run"

    mechanism: str | tuple[str, ...]
    preset: str | None
    seed: int
    parameters: int
    steps: int
    tokens: int
    validation_loss: float
    """Nats a token, at the last step."""
    bits_per_byte: float
    validation_tokens: int
    """Tokens that were predicted for it."""
    seconds: float
    """Training time, without validation and checkpoints."""
    tokens_per_second: float
    peak_bytes: int
    """Most memory of one process above what stood before the model was made; on a GPU, most of its memory."""
    processes: int
    data_fingerprint: str
    tokenizer_fingerprint: str
    finished: str


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings(Record):
    """What tables name of a run's optimization."""

    batch: int | None = None
    length: int | None = None
    precision: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Record):
    """What tables name of a run's model."""

    preset: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunSettings(Record):
    """The part of config.toml that tables name."""

    optimization: OptimizationSettings = field(default_factory=OptimizationSettings)
    model: ModelSettings = field(default_factory=ModelSettings)


def read_settings(run: Path) -> RunSettings:
    """The settings in the config of a run's folder."""
    file, what = run / CONFIG, "the config of a run"
    content = read_toml(file, what=what)
    with explained(file, what=what):
        return RunSettings.from_json(content)
