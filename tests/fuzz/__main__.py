"""`python -m tests.fuzz --count 5000 --seed 0`: random calls of attend, held to the reference; a line per failure."""

from __future__ import annotations

import argparse
import sys

import torch

from tests.fuzz.judgement import auto, complaints, flex, flex_serves
from tests.fuzz.trials import make_trial


def failures(seed: int) -> list[str]:
    """A line for every backend that fails the trial of a seed: the command that repeats it, and what is wrong."""
    trial = make_trial(seed)
    runs = [("auto", auto)]
    if trial.ask == "gradients" and flex_serves(trial):
        runs.append(("flex", flex))
    lines = []
    for name, run in runs:
        wrong = complaints(make_trial(seed), run)
        if wrong:
            command = f"python -m tests.fuzz --seed {seed} --count 1"
            lines.append(f"{command}  # {name}: {'; '.join(wrong)} [{', '.join(trial.words)}]")
    return lines


def main() -> int:
    """Run the trials of `count` seeds from `seed` on; 1 if any failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="how many trials")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the first; the others follow it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        for line in failures(seed):
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            failed += 1
    sys.stdout.write(f"{options.count} trials from seed {options.seed}, {failed} failures\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
