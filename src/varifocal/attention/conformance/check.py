"""Run the rows of the conformance table on one attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from varifocal.attention.backends import UnavailableError
from varifocal.attention.conformance.rows import ROWS, Bench, BrokenError, NotOfferedError, Row
from varifocal.attention.conformance.subject import Attention, CallableSubject, Subject
from varifocal.attention.conformance.variants import variant_subject


@dataclass(frozen=True)
class Finding:
    """What one row found."""

    row: Row
    verdict: str
    """"kept", "broken" or "not offered"."""
    error: float
    """The largest relative difference measured; NaN where none was."""
    detail: str
    """How the promise is broken, or what the attention does not offer."""


@dataclass(frozen=True)
class Conformance:
    """What the kit found about one attention."""

    name: str
    findings: tuple[Finding, ...]

    @property
    def broken(self) -> tuple[Finding, ...]:
        """The findings with a broken promise."""
        return tuple(finding for finding in self.findings if finding.verdict == "broken")

    @property
    def conforms(self) -> bool:
        """Whether every promise that applies is kept."""
        return not self.broken

    @property
    def worst(self) -> float:
        """The largest error measured in a row that was kept."""
        return max((finding.error for finding in self.findings if finding.verdict == "kept"), default=float("nan"))

    def __getitem__(self, row: str) -> Finding:
        """The finding of a row by its name."""
        return next(finding for finding in self.findings if finding.row.name == row)

    def __str__(self) -> str:
        lines = [f"{self.name}: {len(self.broken)} of {len(self.findings)} promises broken"]
        return "\n".join(lines + [f"  {finding.row.name}: {finding.detail}" for finding in self.broken])


def check(
    attention: str | Attention | Subject,
    *,
    rows: Sequence[str] | None = None,
    backend: str = "auto",
    dtype: torch.dtype = torch.float64,
    device: str | torch.device = "cpu",
    heads: int = 4,
    kv_heads: int = 2,
    head_width: int = 8,
    window: int | None = None,
    seed: int = 0,
    on_row: Callable[[Row], None] | None = None,
) -> Conformance:
    """Hold a causal attention to the promises of the conformance table.

    Args:
        attention: the name of a mechanism or variant of ours ("head_gated", "context_adaptive blocks", ...), or a
            function attention(q, k, v) -> output. See `Attention` for what else a function may take.
        rows: the names of the rows to run; None for all.
        backend: the backend for a mechanism of ours.
        dtype: the type of the inputs; gradients are checked by finite differences in float64 only.
        device: where to run.
        heads, kv_heads, head_width: H, G and D of the inputs.
        window: if a function is a pure window, the number of keys that it reads, the query's own included.
        seed: another seed draws other inputs.
        on_row: called before each row.
    """
    bench = Bench(
        heads=heads,
        kv_heads=kv_heads,
        head_width=head_width,
        model_width=12,
        dtype=dtype,
        device=torch.device(device),
        seed=seed,
    )
    subject = make_subject(attention, bench, backend=backend, window=window)
    findings = []
    for row in choose_rows(rows):
        if on_row is not None:
            on_row(row)
        findings.append(run_row(row, subject, bench))
    return Conformance(subject.name, tuple(findings))


def assert_conforms(attention: str | Attention | Subject, **options: Any) -> None:
    """For tests: AssertionError with a sentence for every broken promise. Takes the arguments of `check`."""
    result = check(attention, **options)
    assert result.conforms, str(result)


def make_subject(attention: str | Attention | Subject, bench: Bench, *, backend: str, window: int | None) -> Subject:
    """What to test, from a name, a function or a ready subject."""
    if isinstance(attention, str):
        return variant_subject(attention, bench, backend=backend)
    if isinstance(attention, Subject):
        return attention
    if not callable(attention):
        raise ValueError(f"expected a mechanism's name or a function of q, k and v, got {attention!r}")
    name = getattr(attention, "__name__", type(attention).__name__)
    if isinstance(attention, nn.Module):
        attention.to(bench.device, bench.dtype)
    return CallableSubject(attention=attention, name=name, window=window)


def choose_rows(names: Sequence[str] | None) -> tuple[Row, ...]:
    """The rows of those names, in the order of the table."""
    known = [row.name for row in ROWS]
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise ValueError(f"unknown conformance row {unknown[0]!r}; known are {', '.join(known)}")
    return tuple(row for row in ROWS if names is None or row.name in names)


def run_row(row: Row, subject: Subject, bench: Bench) -> Finding:
    """What a row finds; an attention that raises breaks the promise."""
    try:
        return Finding(row, "kept", row.check(subject, bench), "")
    except (NotOfferedError, UnavailableError) as reason:
        return Finding(row, "not offered", float("nan"), str(reason))
    except BrokenError as reason:
        return Finding(row, "broken", float("nan"), str(reason))
    except Exception as error:
        return Finding(row, "broken", float("nan"), f"it raised {type(error).__name__}: {error}")
