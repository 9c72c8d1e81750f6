"""The files of a run's folder: what it was started with, what it reached, and the settings that tables name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord, explained, read_toml
from varifocal.results.record import Record, maybe

CONFIG, MODEL = "config.toml", "model"
"""The complete settings of a run, which are in its folder from the start, and the folder of its trained model."""


@dataclass(frozen=True, kw_only=True)
class RunEnvironment(Environment, FileRecord):
    """environment.json: where a run was started, and on which data."""

    filename: ClassVar[str] = "environment.json"
    what: ClassVar[str] = "the environment of a run"

    data_fingerprint: str | None = maybe()


@dataclass(frozen=True, kw_only=True)
class RunSummary(FileRecord):
    """summary.json: what a finished run reached. It is written last: a run that has it is finished."""

    filename: ClassVar[str] = "summary.json"
    what: ClassVar[str] = "the summary of a run"

    mechanism: str | tuple[str, ...]
    preset: str | None
    seed: int
    parameters: int
    steps: int
    tokens: int
    validation_loss: float
    """The loss of the saved weights, in nats a token."""
    unaveraged_loss: float | None = maybe()
    """The loss of the last step's own weights, where the saved ones are a mean over the last steps."""
    bits_per_byte: float
    validation_tokens: int
    """Tokens that were predicted for the validation loss."""
    seconds: float
    """Training time, without validation and checkpoints."""
    processor_seconds: float | None = maybe()
    """The processor's share of it, over all threads of one process; on a GPU, the same as `seconds`."""
    tokens_per_second: float
    peak_bytes: int
    """Peak memory of one process above what it held before the model was made; on a GPU, its peak memory."""
    processes: int
    data_fingerprint: str
    tokenizer_fingerprint: str
    finished: str


@dataclass(frozen=True, kw_only=True)
class OptimizationSettings(Record):
    """The settings of a run's optimization that tables name."""

    seconds: float | None = None
    average_share: float | None = None
    batch: int | None = None
    length: int | None = None
    precision: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Record):
    """The settings of a run's model that tables name."""

    preset: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunSettings(Record):
    """The part of config.toml that tables name."""

    optimization: OptimizationSettings = field(default_factory=OptimizationSettings)
    model: ModelSettings = field(default_factory=ModelSettings)


def read_settings(run: Path) -> RunSettings:
    """The settings in the config of a run, given its folder."""
    file, what = run / CONFIG, "the config of a run"
    content = read_toml(file, what=what)
    with explained(file, what=what):
        return RunSettings.from_json(content)
