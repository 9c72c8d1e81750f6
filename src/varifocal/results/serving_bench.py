"""The result of `varifocal bench serving`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from varifocal.results.environment import Environment
from varifocal.results.files import FileRecord
from varifocal.results.record import Record


@dataclass(frozen=True, kw_only=True)
class ServingCapacity(Record):
    """What a cache of so many bytes holds of a model, by vLLM's own count of blocks."""

    name: str
    kept_heads: float
    """The share of key heads that read everything."""
    bytes_per_request: int
    """Of a text of the result's context, at its largest."""
    tokens: int
    """Of texts as long, as many as fit at once."""
    ratio: float
    """To the first contender."""


@dataclass(frozen=True, kw_only=True)
class ServingRow(Record):
    """Requests that all come at once, and what vLLM counted until the last was answered."""

    name: str
    setting: str
    """`room`: the cache holds all requests at once; `limited`: the same few bytes for every contender."""
    cache_bytes: int
    running: int
    """Requests at work at once, at most."""
    preemptions: int
    seconds: float
    requests_per_second: float
    milliseconds_per_token: float
    """Between two tokens of a request: the mean over all."""
    first_token_seconds: float
    """From the moment that all come to a request's first token: the mean over all."""
    peak_bytes: int
    """Of the engine's process, with weights and cache."""
    ratio: float
    """Of the requests a second, to the first contender in the same setting."""


@dataclass(frozen=True, kw_only=True)
class ServingBench(FileRecord):
    """A result file."""

    tag: ClassVar[tuple[str, str]] = ("benchmark", "serving")
    what: ClassVar[str] = "a result of 'varifocal bench serving'"
    remedy: ClassVar[str] = "make one with its --json option"

    environment: Environment
    engine: str
    """Its name and version."""
    dtype: str
    context: int
    """Tokens of a text, where capacities are counted."""
    cache_bytes: int
    """What capacities are counted in."""
    requests: int
    prompt: int
    new_tokens: int
    """Of each request, after its prompt."""
    block: int
    """Tokens of a block of the cache."""
    chunk: int
    """Tokens that are read at once, at most."""
    capacities: tuple[ServingCapacity, ...]
    rows: tuple[ServingRow, ...]

    def of(self, setting: str) -> list[ServingRow]:
        """The rows of a setting, in the order of the file."""
        return [row for row in self.rows if row.setting == setting]
