"""The metrics of a run: one JSON object a line, and TensorBoard's files by option."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from varifocal.results.metrics import MetricsEntry, read_metrics, write_metrics


class Metrics:
    """Appends to metrics.jsonl, and to a TensorBoard folder if one is given."""

    def __init__(self, path: Path, *, tensorboard: Path | None = None, after_step: int = 0) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._writer: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            # What an interrupted run wrote beyond its checkpoint is to be hidden.
            self._writer = SummaryWriter(str(tensorboard), purge_step=after_step + 1)

    def write(self, entry: MetricsEntry) -> None:
        """One line; every number in it becomes a TensorBoard scalar."""
        self._file.write(entry.line())
        self._file.flush()
        if self._writer is not None:
            for name, value in flat(entry.to_json()):
                self._writer.add_scalar(name, value, entry.step)

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()


def flat(record: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Names and numbers of a record, without the step."""
    found: list[tuple[str, float]] = []
    for name, value in record.items():
        if isinstance(value, dict):
            found += flat(value, f"{prefix}{name}/")
        elif name != "step" and isinstance(value, int | float):
            found.append((prefix + name, float(value)))
    return found


def keep_metrics_until(path: Path, step: int) -> None:
    """Forget what was recorded after a step, so that a run that goes on from there records it once."""
    write_metrics(path, [entry for entry in read_metrics(path) if entry.step <= step])


def require_tensorboard() -> None:
    """ValueError unless TensorBoard is installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("run.tensorboard needs TensorBoard; install it with: pip install 'varifocal[tensorboard]'")
