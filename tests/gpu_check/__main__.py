"""`python -m tests.gpu_check`: see the package."""

from __future__ import annotations

import argparse
import functools
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description="GPU kernels, without a GPU.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, told in (("cases", "run cases in the interpreter"), ("mechanisms", "run the conformance kit there")):
        one = verbs.add_parser(verb, help=told)
        one.add_argument("names", nargs="*", help="all if none are given")
        one.add_argument("--backend", default="flex")
        one.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    verbs.choices["cases"].add_argument("--representative", action="store_true", help="some twenty cases")
    options = parser.parse_args()
    try:
        return interpret(options)
    except ImportError as reason:
        sys.stderr.write(f"{reason}\n")
        return 2


def interpret(options: argparse.Namespace) -> int:
    """Run cases or mechanisms; 1 if any is wrong."""
    from tests.gpu_check import interpreter, module_of, pretended

    # Before anything imports torch, which asks once and for all whether there is a device.
    pretended.load_device()
    interpreter.start()
    module = module_of(options.backend)
    module.install()
    import torch

    from tests.gpu_check import cases
    from varifocal import conformance

    torch.set_num_threads(1)
    dtype = cases.DTYPES[options.dtype]
    runs: list[functools.partial[cases.Verdict]]
    if options.verb == "cases":
        names = list(cases.REPRESENTATIVE) if options.representative else options.names
        runs = [functools.partial(cases.hold, case, options.backend, dtype) for case in cases.named(names)]
    else:
        names = options.names or list(conformance.every_variant())
        runs = [functools.partial(cases.hold_mechanism, name, options.backend, dtype) for name in names]
    verdicts = []
    for run in runs:
        verdicts.append(run())
        tell(str(verdicts[-1]))
    wrong = sum(verdict.outcome == "wrong" for verdict in verdicts)
    right = sum(verdict.outcome == "right" for verdict in verdicts)
    declined = len(verdicts) - right - wrong
    tell(f"{options.backend} in {options.dtype}: {right} right, {wrong} wrong, {declined} declined")
    return 1 if wrong or not right else 0


def tell(line: str) -> None:
    """Say it at once: what follows may take minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
