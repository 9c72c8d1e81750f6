"""The process in which one cell of a comparison is trained: its memory can be measured, and it ends with its parent."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from varifocal.results.run import CONFIG
from varifocal.training.config import load_config
from varifocal.training.divergence import DivergedError
from varifocal.training.interruption import StoppedError


def main() -> None:
    """`python -m varifocal.experiments.cell CONFIG OUT`: train, or continue where an earlier process stopped."""
    config_file, out = (Path(argument) for argument in sys.argv[1:])
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        train_cell(config_file, out)
    except (ValueError, OSError, DivergedError, StoppedError) as reason:
        sys.stderr.write(f"{' '.join(str(reason).split())}\n")
        sys.exit(2)


def train_cell(config_file: Path, out: Path) -> None:
    """Train the run of a config, from its newest checkpoint if it has one."""
    from varifocal.training.run import train

    train(load_config(config_file), out, resume=(out / CONFIG).is_file())


def end_with_parent() -> None:
    """Wait until the parent's end of standard input is closed, then end this process as SIGTERM does."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main()
