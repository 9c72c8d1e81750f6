"""The metrics of a run: one JSON object a line, and TensorBoard's files by option."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from varifocal.data.files import write_durably


class Metrics:
    """Appends to metrics.jsonl, and to a TensorBoard folder if one is given."""

    def __init__(self, path: Path, *, tensorboard: Path | None = None, after_step: int = 0) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._writer: Any = None
        if tensorboard is not None:
            from torch.utils.tensorboard import SummaryWriter

            # What an interrupted run wrote beyond its checkpoint is to be hidden.
            self._writer = SummaryWriter(str(tensorboard), purge_step=after_step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """One line; every number in it becomes a TensorBoard scalar."""
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in flat(record):
                self._writer.add_scalar(name, value, record["step"])

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


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line that was cut off is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def keep_metrics_until(path: Path, step: int) -> None:
    """Forget what was recorded after a step, so that a run that goes on from there records it once."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    write_durably(path, "".join(json.dumps(record) + "\n" for record in kept))


def require_tensorboard() -> None:
    """ValueError unless TensorBoard is installed."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ValueError("run.tensorboard needs TensorBoard; install it with: pip install 'varifocal[tensorboard]'")
