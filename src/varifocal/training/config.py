"""What a run is made of: data, model, optimization, validation, checkpoints; read from TOML and saved complete."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_type_hints

from varifocal.training.settings import (
    apply_override,
    known_keys,
    read_config_file,
    section_from,
    suggestion,
    toml_key,
    toml_value,
)

MOST_SEED = (1 << 32) - 1
"""What numpy's first generator takes; transformers seeds it too."""
MOST_ROWS = (1 << 31) - 1
"""Rows and tokens that one tensor could ever hold: more is a slip of the pen."""
MOST_TOTAL = 1 << 53
"""Steps and tokens of a run; beyond it floats skip whole numbers."""


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Which tokens: a prepared data set, or a source that the run prepares in its own folder."""

    path: str | None = None
    """A folder made by `varifocal data prepare`."""
    source: str | None = None
    """As `varifocal data prepare` takes it; prepared into the run's folder `data`."""
    tokenizer: str = "train:8192"
    """For `source`."""
    separator: str | None = None
    """For `source`: what stands between the documents of a text file."""
    column: str = "text"
    """For `source`."""
    joined: bool = False
    """Make each row one document instead of isolating the documents in it."""

    def __post_init__(self) -> None:
        if (self.path is None) == (self.source is None):
            given = "both" if self.path is not None else "neither"
            raise ValueError(f"data needs either a path to prepared data or a source to prepare, got {given}")


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Which model: a preset with a mechanism, or a saved model to go on with."""

    preset: str | None = None
    """A name from PRESETS; "tiny" unless `start` is given."""
    mechanism: str | list[str] | None = None
    """One for all layers or one for each; "dense" unless `start` is given."""
    mechanism_options: dict[str, Any] | list[dict[str, Any]] = field(default_factory=dict)
    """Laid over those that the preset scales to its context."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Fields of VarifocalConfig, such as num_hidden_layers. vocab_size defaults to the tokenizer's."""
    start: str | None = None
    """The folder of a saved model to start from, in place of all the others."""

    def __post_init__(self) -> None:
        # None and {} are what these have where nobody gives them; [] and "" are a mistake and must not pass for that.
        known = ("preset", "mechanism", "mechanism_options", "overrides")
        others = [name for name in known if getattr(self, name) not in (None, {})]
        for name in ("preset", "start"):
            if getattr(self, name) == "":
                raise ValueError(f"model.{name} must not be empty; leave it out for the default")
        if self.start is not None and others:
            raise ValueError(
                f"model.start brings a whole model, so model.{others[0]} cannot be given with it; leave one of them "
                "out (another mechanism for a trained model: `varifocal retrofit`)"
            )
        if self.start is None:
            object.__setattr__(self, "preset", "tiny" if self.preset is None else self.preset)
            object.__setattr__(self, "mechanism", "dense" if self.mechanism is None else self.mechanism)
            self._check_mechanisms()

    def _check_mechanisms(self) -> None:
        """ValueError unless the mechanisms are names, and options in a list are as many."""
        names = [self.mechanism] if isinstance(self.mechanism, str) else self.mechanism or []
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(
                "model.mechanism must be a name or a list with one for each layer, got "
                f"{reprlib.repr(self.mechanism)}; leave it out for dense attention"
            )
        options = self.mechanism_options
        if isinstance(options, list) and (isinstance(self.mechanism, str) or len(options) != len(names)):
            raise ValueError(
                f"model.mechanism_options: a list of options needs a list of as many mechanisms, got {len(options)} "
                f"and {reprlib.repr(self.mechanism)}"
            )


@dataclass(frozen=True, kw_only=True)
class OptimizationSection:
    """How long and how: AdamW with a learning rate that warms up and then falls or stays."""

    steps: int | None = None
    """Optimizer steps; or say `tokens`."""
    tokens: int | None = None
    """Tokens to train on; the steps follow, rounded up."""
    seconds: float | None = None
    """Processor seconds of training alone: the run ends with the first step that uses them up. On a GPU, seconds."""
    batch: int = 32
    """Sequences of an optimizer step, over all processes."""
    micro_batch: int | None = None
    """Sequences at once in each process; the rest is accumulated. None for all of the process's share."""
    length: int = 512
    """Tokens of a sequence."""
    learning_rate: float = 1e-3
    gate_learning_rate: float = 1.0
    """Factor of the learning rate for the mechanisms' own parameters."""
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    """Of matrices; norms, biases and the mechanisms' own parameters take none."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """After the warm-up: down to 0 along half a cosine, or constant."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0."""
    warmup_share: float = 0.0
    """In place of warmup_steps: the share of the run over which it rises."""
    average_share: float = 0.0
    """The last share of the run, over which the weights are averaged; the mean is validated at the end and saved."""
    clip: float = 1.0
    """The largest norm of the gradient; 0 for no clipping."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """bfloat16: weights stay float32, products run narrow (autocast)."""
    gradient_checkpointing: bool = False
    gate_warmup_steps: int = 0
    """Steps during which every gate is held at its start."""

    def __post_init__(self) -> None:
        given = [name for name in ("steps", "tokens", "seconds") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"optimization needs one of steps, tokens and seconds, got {' and '.join(given) or 'none of them'}"
            )
        if self.seconds is not None and not 0 < self.seconds < math.inf:
            raise ValueError(f"optimization.seconds must be a finite number above 0, got {self.seconds}")
        for name in ("warmup_share", "average_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimization.{name} must be at least 0 and below 1, got {getattr(self, name)}")
        if self.warmup_share and self.warmup_steps:
            raise ValueError(
                "optimization.warmup_share and optimization.warmup_steps say the same thing; leave one of them out"
            )
        for name, least, most in (
            ("steps", 1, MOST_TOTAL),
            ("tokens", 1, MOST_TOTAL),
            ("batch", 1, MOST_ROWS),
            ("micro_batch", 1, MOST_ROWS),
            ("length", 2, MOST_ROWS),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"optimization.{name} must be between {least} and {most}, got {reprlib.repr(value)}")
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise ValueError(
                f"optimization.batch must be a multiple of micro_batch, got {self.batch} and {self.micro_batch}"
            )
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimization.betas must be two numbers from 0 to below 1, got {list(self.betas)}")
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"optimization.{name} must be a finite number above 0, got {getattr(self, name)}")
        for name in ("gate_learning_rate", "weight_decay", "clip", "warmup_steps", "gate_warmup_steps"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"optimization.{name} must be a finite number of at least 0, got {getattr(self, name)}"
                )
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            raise ValueError(
                f"optimization.warmup_steps must not exceed the {self.total_steps} steps of the run, "
                f"got {self.warmup_steps}"
            )

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the run; None for a budget in seconds, where the machine decides."""
        if self.tokens is not None:
            return -(-self.tokens // self.tokens_per_step)
        return self.steps

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.length


@dataclass(frozen=True, kw_only=True)
class ValidationSection:
    """When and on how much to measure the loss while training; the last step always is."""

    every: int = 100
    """Steps."""
    tokens: int = 200_000
    """Of the validation split, the same ones every time; 0 for all."""
    last_tokens: int | None = None
    """The same for the validation at the end; None for as many as in the others."""
    trace_rows: int = 4
    """Sequences of the validation split on which gates are recorded; 0 for no record."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"validation.every must be at least 1, got {self.every}")
        for name in ("tokens", "last_tokens"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"validation.{name} must be at least 1, or 0 for all, got {getattr(self, name)}")
        if self.trace_rows < 0:
            raise ValueError(f"validation.trace_rows must be at least 0, got {self.trace_rows}")


@dataclass(frozen=True, kw_only=True)
class CheckpointsSection:
    """How often to save what is needed to go on."""

    every: int = 500
    """Steps."""
    keep: int = 2
    """Checkpoints to keep, the newest ones; 0 keeps one while the run goes on and none when it is finished."""

    def __post_init__(self) -> None:
        if self.every < 1 or self.keep < 0:
            raise ValueError(
                f"checkpoints.every must be at least 1 and checkpoints.keep at least 0, got {self.every} and "
                f"{self.keep}"
            )


@dataclass(frozen=True, kw_only=True)
class RunSection:
    """What belongs to the machine and to chance."""

    seed: int = 0
    """Of the weights and of the order of the data."""
    threads: int | None = None
    """CPU threads of each process; None for torch's choice."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too, into the run's folder `tensorboard`."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed <= MOST_SEED:
            raise ValueError(
                f"run.seed must be a whole number between 0 and {MOST_SEED}, got {reprlib.repr(self.seed)}"
            )
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"run.threads must be at least 1, got {self.threads}")


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """A whole run. `load_config` reads one, `as_toml` writes it with every default."""

    data: DataSection
    model: ModelSection = field(default_factory=ModelSection)
    optimization: OptimizationSection
    validation: ValidationSection = field(default_factory=ValidationSection)
    checkpoints: CheckpointsSection = field(default_factory=CheckpointsSection)
    run: RunSection = field(default_factory=RunSection)
    trainer: dict[str, Any] = field(default_factory=dict)
    """Further arguments of transformers' TrainingArguments, such as fsdp or deepspeed."""

    def as_toml(self) -> str:
        """The config as TOML, complete; what is None is left out."""
        parts = []
        for section, values in asdict(self).items():
            lines = [
                f"{toml_key(key)} = {toml_value(value)}"
                for key, value in values.items()
                if value is not None and value != {}
            ]
            if lines:
                parts.append("\n".join([f"[{section}]", *lines]))
        return "\n\n".join(parts) + "\n"


def load_config(path: str | Path, overrides: Iterable[str] = ()) -> TrainingConfig:
    """The config in a TOML file, with `section.key=value` laid over it.

    ValueError of one sentence for whatever is unknown, of the wrong kind or impossible together.
    """
    file = Path(path)
    return config_from(read_config_file(file), overrides, where=str(file))


def config_from(
    content: Mapping[str, Any], overrides: Iterable[str] = (), *, where: str = "the config"
) -> TrainingConfig:
    """The config of nested plain values; `where` names them in errors."""
    hints = get_type_hints(TrainingConfig)
    given: dict[str, dict[str, Any]] = {}
    for section, values in content.items():
        if section not in hints:
            raise ValueError(f"{where} has the unknown section {section!r}{suggestion(section, known_keys(hints))}")
        if not isinstance(values, Mapping):
            raise ValueError(f"{where}: [{section}] must be a section of its own, got {section} = {values!r}")
        given[section] = dict(values)
    for override in overrides:
        apply_override(given, override, hints)
    for section in ("data", "optimization"):
        if section not in given:
            raise ValueError(f"{where} has no section [{section}], which every run needs")
    parts: dict[str, Any] = {}
    for section, values in given.items():
        if section == "trainer":
            parts[section] = values
            continue
        parts[section] = section_from(section, values, hints, where=where)
    return TrainingConfig(**parts)
