"""The result of `varifocal retrofit`: every run adds what it measured to one file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord
from varifocal.results.record import Record, maybe


@dataclass(frozen=True, kw_only=True)
class AdaptationRecord(Record):
    """The adaptation before the model was saved."""

    steps: int
    batch: int
    rate: float
    mechanism_rate: float


@dataclass(frozen=True, kw_only=True)
class RetrofitRun(Record):
    """A mechanism in a pretrained model, measured on a text."""

    mechanism: str
    asked: dict[str, Any]
    """The options as they were given."""
    options: dict[str, Any] = field(default_factory=dict)
    """All options of the mechanism."""
    context: int = 0
    share: float | None
    """The share of the attention that is not dense at the start; None if nothing is promised."""
    seed: int = 0
    text: str | None = maybe()
    """The name of the text file that the losses were measured on."""
    tokens: int | None = maybe()
    source_loss: float | None = maybe()
    """The loss of the source model in nats a token."""
    loss_before: float | None = maybe()
    """The loss with the mechanism, before the adaptation."""
    largest_logit_difference: float | None = maybe()
    adaptation: AdaptationRecord | None = maybe()
    training_text: str | None = maybe()
    training_losses: tuple[float, ...] | None = maybe()
    loss_after: float | None = maybe()
    environment: Environment | None = maybe()


@dataclass(frozen=True, kw_only=True)
class RetrofitResult(FileRecord):
    """A result file."""

    tag: ClassVar[tuple[str, str]] = ("experiment", "retrofit")
    what: ClassVar[str] = "a result of 'varifocal retrofit'"
    remedy: ClassVar[str] = "give another name"

    runs: tuple[RetrofitRun, ...]

    def with_run(self, run: RetrofitRun) -> RetrofitResult:
        """The file with one more run; an earlier one of the same mechanism and options is replaced."""
        kept = [one for one in self.runs if (one.mechanism, one.asked) != (run.mechanism, run.asked)]
        return RetrofitResult(runs=(*kept, run), unknown=self.unknown)
