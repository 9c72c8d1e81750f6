"""Where the command begins: loading torch and the verbs takes seconds, and Ctrl-C in them is no reason for a trace."""

from __future__ import annotations

import sys


def run() -> None:
    """Run the command line; see `varifocal.cli.main.run`."""
    try:
        from varifocal.cli.main import run as run_verbs

        run_verbs()
    except KeyboardInterrupt:
        # As a shell counts it: 128 and the number of the signal.
        sys.exit(130)
