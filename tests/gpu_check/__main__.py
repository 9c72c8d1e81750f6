"""`python -m tests.gpu_check`: see the package."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check", description="GPU kernels, without a GPU.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, told in (("cases", "run cases in the interpreter"), ("mechanisms", "run the conformance kit there")):
        one = verbs.add_parser(verb, help=told)
        one.add_argument("names", nargs="*", help="all if none are given")
        one.add_argument("--backend", default="flex")
        one.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
        one.add_argument("--json", type=Path, help="enter the outcome in this file")
    verbs.choices["cases"].add_argument("--representative", action="store_true", help="some twenty cases")
    table = verbs.add_parser("table", help="compile every kernel for every GPU")
    table.add_argument("names", nargs="*", help="rows of the benchmark; all if none are given")
    table.add_argument("--backend", action="append", help="all if none is given")
    table.add_argument("--gpu", action="append", help="such as sm_80; all if none is given")
    table.add_argument("--json", type=Path, help="enter the rows in this file")
    one = verbs.add_parser("compile", help="what `table` runs for each GPU")
    one.add_argument("gpu")
    one.add_argument("names", nargs="*")
    one.add_argument("--backend", default="flex")
    one.add_argument("--into", type=Path, required=True)
    options = parser.parse_args()
    try:
        if options.verb == "table":
            return tabulate(options)
        if options.verb == "compile":
            return compile_one(options)
        return interpret(options)
    except ImportError as reason:
        sys.stderr.write(f"{reason}\n")
        return 2


def tabulate(options: argparse.Namespace) -> int:
    """Compile for all GPUs; 1 if a kernel does not fit."""
    from tests.gpu_check import BACKENDS, interpreter, pretended
    from tests.gpu_check.table import gpus_named, make_table

    pretended.require_torch()
    interpreter.require_triton()
    return make_table(options.backend or list(BACKENDS), gpus_named(options.gpu or ()), options.names, options.json)


def compile_one(options: argparse.Namespace) -> int:
    """Compile for one GPU, in this process."""
    from tests.gpu_check.gpus import GPUS
    from tests.gpu_check.table import compile_for

    compile_for(GPUS[options.gpu], options.backend, options.names, options.into)
    return 0


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
    verdicts: list[cases.Verdict] = []
    begin = time.process_time()
    for run in runs:
        verdicts.append(run())
        tell(str(verdicts[-1]))
    wrong = sum(verdict.outcome == "wrong" for verdict in verdicts)
    right = sum(verdict.outcome == "right" for verdict in verdicts)
    declined = len(verdicts) - right - wrong
    tell(f"{options.backend} in {options.dtype}: {right} right, {wrong} wrong, {declined} declined")
    if options.json is not None:
        cases.enter(options, verdicts, seconds=time.process_time() - begin)
    return 1 if wrong or not right else 0


def tell(line: str) -> None:
    """Say it at once: what follows may take minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
