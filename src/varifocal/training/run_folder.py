"""The folder of a run: whose it is, whether it may be written, and where its files lie."""

from __future__ import annotations

import fcntl
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from varifocal.results.files import write_whole
from varifocal.results.gate_traces import GATES
from varifocal.results.metrics import METRICS
from varifocal.results.run import CONFIG, MODEL, RunEnvironment, RunSummary
from varifocal.training.config import TrainingConfig, load_config

MAY_CHANGE = {
    "data.path", "optimization.micro_batch", "optimization.gradient_checkpointing", "checkpoints.every",
    "checkpoints.keep", "run.threads", "run.tensorboard",
}  # fmt: skip
"""Settings that another machine may need otherwise; the data are known by their fingerprint."""


@dataclass(frozen=True)
class RunFolder:
    """Names in the folder of a run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / CONFIG

    @property
    def environment(self) -> Path:
        return self.path / RunEnvironment.filename

    @property
    def metrics(self) -> Path:
        return self.path / METRICS

    @property
    def gates(self) -> Path:
        return self.path / GATES

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def data(self) -> Path:
        return self.path / "data"

    @property
    def model(self) -> Path:
        return self.path / MODEL

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def summary(self) -> Path:
        return self.path / RunSummary.filename

    def require_new(self) -> None:
        """ValueError if there is anything in the folder already."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path} is a file; name a folder for the run")
        if self.path.is_dir() and any(not one.name.startswith(".") for one in self.path.iterdir()):
            what = "a run" if self.config.is_file() else "files"
            do = "--resume goes on with it, or choose another folder" if what == "a run" else "choose another folder"
            raise ValueError(f"{self.path} already holds {what}; {do}")

    def require_same(self, config: TrainingConfig) -> None:
        """ValueError unless the folder holds a run of this config, apart from what may change."""
        if not self.config.is_file():
            raise ValueError(f"{self.path} holds no run to resume: there is no {CONFIG} in it")
        known = load_config(self.config)
        before, now = flattened(known), flattened(config)
        for name in sorted(before.keys() | now.keys()):
            if name not in MAY_CHANGE and before.get(name) != now.get(name):
                raise ValueError(
                    f"the run in {self.path} was started with {name} = {before.get(name)!r}, now it is "
                    f"{now.get(name)!r}; resume it with the same settings, or start another run"
                )

    def require_same_data(self, fingerprint: str) -> None:
        """ValueError unless the run was started on the data of this fingerprint."""
        try:
            known = RunEnvironment.read(self.environment).data_fingerprint
        except ValueError:
            known = None
        if known is not None and known != fingerprint:
            raise ValueError(
                f"the run in {self.path} was started on data of fingerprint {known[:12]}, these are of "
                f"{fingerprint[:12]}; resume it with the same data"
            )

    def begin(self, config: TrainingConfig, environment: RunEnvironment) -> None:
        """Write what the run is before anything else."""
        self.path.mkdir(parents=True, exist_ok=True)
        environment.write(self.environment)
        write_whole(self.config, config.as_toml())


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a second training out of the folder while this one lives."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ValueError(
                f"another process is training in {folder}; wait for it or choose another folder"
            ) from error
        yield


def flattened(config: TrainingConfig) -> dict[str, Any]:
    """Settings by section.key."""
    content = tomllib.loads(config.as_toml())
    return {f"{section}.{key}": value for section, values in content.items() for key, value in values.items()}
