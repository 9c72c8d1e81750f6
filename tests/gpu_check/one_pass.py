"""The triton backend: its kernels run in the interpreter as they are, behind attend; and all that it ships, to compile.

`python -m tests.gpu_check.one_pass compile` prints what each kernel takes of each GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu_check.ahead import Kernel, compile_kernel
from tests.gpu_check.gpus import GPUS, Gpu


def install() -> None:
    """Nothing to do: on CPU tensors attend(backend="triton") runs in the interpreter, once that was started."""


@dataclass(frozen=True)
class Call:
    """A kind of call that kernels are compiled for."""

    name: str
    branches: Callable[[], tuple[Any, ...]]
    weighted: bool = False
    documents: bool = False


HEADS = 12


def calls() -> tuple[Call, ...]:
    """What mechanisms ask for, from the plainest to the most."""
    from varifocal.kernels.triton.arrangement import EVERY_KEY, Sizes

    def window(size: int, prefix: int = 0, limit: int = 0, edge: float = 0.0) -> Sizes:
        return Sizes((size,) * HEADS, (prefix,) * HEADS, limit, edge)

    return (
        Call("causal", lambda: (window(EVERY_KEY),)),
        Call("window, prefix", lambda: (window(256, 4),)),
        Call("window, causal", lambda: (window(256), window(EVERY_KEY)), weighted=True),
        Call("window, causal; documents", lambda: (window(256), window(EVERY_KEY)), weighted=True, documents=True),
        Call("soft window, causal", lambda: (window(0, 0, 512, 32.0), window(EVERY_KEY)), weighted=True),
    )


Choose = Callable[..., Any]
"""As `tiles.tile_of`."""


def kernels(
    gpu: Gpu,
    *,
    widths: tuple[int, ...] = (64, 128),
    kinds: tuple[str, ...] = ("bf16",),
    choose: Choose | None = None,
) -> Iterator[Kernel]:
    """Every kernel that is shipped for a GPU, for heads of some widths and numbers of some types."""
    from varifocal.kernels.triton import backward, forward

    functions = {"forward": forward.forward, "queries": backward.backward_queries, "keys": backward.backward_keys}
    for width, kind, call in itertools.product(widths, kinds, calls()):
        for name, function in functions.items():
            yield kernel_of(name, function, call, gpu=gpu, width=width, kind=kind, choose=choose)
        yield rows_of(backward.row_numbers, call, width=width, kind=kind)
        if any(branch.every for branch in call.branches()):
            yield from shares_of(call, width=width, kind=kind)


def kernel_of(
    name: str, function: Any, call: Call, *, gpu: Gpu, width: int, kind: str, choose: Choose | None
) -> Kernel:
    """One of the three kernels that multiply matrices, as a call launches it."""
    from varifocal.kernels.triton.tiles import tile_of

    bytes_each = 4 if kind == "fp32" else 2
    tile = (choose or tile_of)(
        name, width=width, bytes_each=bytes_each, capability=gpu.number, documents=call.documents
    )
    constants = constants_of(call, width) | {
        "PRECISION": "ieee" if kind == "fp32" else "tf32",
        "BM": tile.queries,
        "BN": tile.keys,
    }
    if name == "forward":
        constants["SAVE"] = True
    return finished(
        f"{call.name}: {name}, {width}, {kind}", function, call, constants, kind=kind, warps=tile.warps,
        stages=tile.stages, tile=f"{tile.queries} queries x {tile.keys} keys",
    )  # fmt: skip


def rows_of(function: Any, call: Call, *, width: int, kind: str) -> Kernel:
    """The kernel of numbers of rows, before the others of a backward."""
    from varifocal.kernels.triton.mixture import ROWS

    constants = constants_of(call, width) | {"BM": ROWS}
    return finished(
        f"{call.name}: rows, {width}, {kind}", function, call, constants, kind=kind, warps=4, stages=3,
        tile=f"{ROWS} queries",
    )  # fmt: skip


def shares_of(call: Call, *, width: int, kind: str) -> Iterator[Kernel]:
    """The kernels that few queries read many keys with."""
    from varifocal.kernels.triton import split
    from varifocal.kernels.triton.tiles import SPLIT

    constants = constants_of(call, width) | {"BM": SPLIT.queries}
    shape: dict[str, Any] = {"kind": kind, "warps": SPLIT.warps, "stages": SPLIT.stages}
    tile = f"{SPLIT.queries} queries x {SPLIT.keys} keys"
    reading = constants | {"BN": SPLIT.keys, "PRECISION": "ieee" if kind == "fp32" else "tf32"}
    yield finished(f"{call.name}: shares, {width}, {kind}", split.read_shares, call, reading, tile=tile, **shape)
    constants.pop("LAYOUT")
    tile = f"{SPLIT.queries} queries"
    yield finished(f"{call.name}: joining, {width}, {kind}", split.join_shares, call, constants, tile=tile, **shape)


def constants_of(call: Call, width: int) -> dict[str, Any]:
    """What all kernels of a call are compiled for."""
    from varifocal.kernels.triton.arrangement import arrange

    arranged = arrange(call.branches())
    return {
        "D": width,
        "DP": width,
        "M": len(arranged.order),
        "KINDS": arranged.kinds,
        "LAYOUT": int(call.documents),
    }


def finished(name: str, function: Any, call: Call, constants: dict[str, Any], *, kind: str, **shape: Any) -> Kernel:
    """A kernel with the types of its arguments; those that the call does without are constants."""
    absent = {"SINK", "GRAD_SINK", "SCALE", "POS", "GRAD_SCALE"}
    if not call.weighted:
        absent |= {"WEIGHTS", "GRAD_WEIGHTS"}
    if not call.documents:
        absent |= {"START", "SEEN"}
    if not any(branch.soft for branch in call.branches()):
        absent |= {"WIDTH", "GRAD_WIDTH"}
    names = function.arg_names
    constants = constants | dict.fromkeys((one for one in names if one in absent), None)
    types = signature(names, constants, kind)
    return Kernel(
        name=name,
        function=function,
        signature=types,
        constants=constants,
        # Addresses and strides of heads whose width is a multiple of 16.
        divisible=tuple(
            one for one, what in types.items() if what.startswith("*") or (one.startswith("s") and what == "i32")
        ),
        **shape,
    )


FLOATS = {
    *("SUMS", "WEIGHTS", "SINK", "SCALE", "WIDTH", "EDGES", "LOGSUMEXP", "NUMBERS"),
    *("GRAD_WIDTH", "GRAD_SCALE", "GRAD_SINK", "GRAD_WEIGHTS"),
}
WHOLE = {"SIZES", "POS", "START"}


def signature(names: list[str], constants: dict[str, Any], kind: str) -> dict[str, str]:
    """The types of the arguments of a kernel."""
    found = {}
    for name in names:
        if name in constants:
            found[name] = "constexpr"
        elif name == "SEEN":
            found[name] = "*i8"
        elif name in WHOLE:
            found[name] = "*i32"
        elif name in FLOATS:
            found[name] = "*fp32"
        elif name == "factor":
            found[name] = "fp32"
        else:
            found[name] = f"*{kind}" if (name.isupper() and len(name) > 1) or name in ("Q", "K", "V") else "i32"
    # B, H, G, T and S are numbers.
    return found | {name: "i32" for name in ("B", "H", "G", "T", "S") if name in found}


def main() -> int:
    """`cases [NAME...] [--dtype]` in the interpreter, or `compile [--json FILE]` for every GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_check.one_pass", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    cases = verbs.add_parser("cases", help="run cases that the backend honours, in the interpreter")
    cases.add_argument("names", nargs="*", help="all that it honours if none are given")
    cases.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    compiled = verbs.add_parser("compile", help="compile every kernel, and say what it takes")
    compiled.add_argument("--gpu", action="append", choices=tuple(GPUS), help="several times; all if it is not given")
    compiled.add_argument("--width", action="append", type=int, help="of a head, several times; default 64 and 128")
    compiled.add_argument("--kind", default="bf16", choices=("bf16", "fp16", "fp32"))
    compiled.add_argument("--json", type=Path, help="write the table to a file as well")
    options = parser.parse_args()
    if options.verb == "cases":
        return interpret(options.names, options.dtype)
    found = compile_all(options.gpu or list(GPUS), tuple(options.width or (64, 128)), options.kind)
    if options.json is not None:
        beside = options.json.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(found, indent=1) + "\n")
        beside.replace(options.json)
    return 1 if any(one["blocks"] == 0 or is_empty(one) for one in found) else 0


def is_empty(row: dict[str, Any]) -> bool:
    """Whether triton made nothing of a kernel that should multiply matrices: it does so where it fails."""
    multiplies = not any(f": {name}," in row["kernel"] for name in ("rows", "joining"))
    return multiplies and row["unit"] == "none" and "fp32" not in row["kernel"]


def compile_all(gpus: list[str], widths: tuple[int, ...], kind: str) -> list[dict[str, Any]]:
    """A row for each kernel and GPU; a kernel that asks for more than the GPU has can run in 0 blocks."""
    found = []
    for name in gpus:
        for kernel in kernels(GPUS[name], widths=widths, kinds=(kind,)):
            usage = compile_kernel(kernel, GPUS[name])
            row = {"gpu": name, "kernel": kernel.name, "tile": kernel.tile, "warps": kernel.warps}
            row |= {"stages": kernel.stages, **dataclasses.asdict(usage), "shared_limit": GPUS[name].shared_memory}
            row.pop("seconds")
            found.append(row)
            tell(
                f"{name:7} {kernel.name:46} {kernel.tile:24} {kernel.warps} warps: {usage.registers:3} registers, "
                f"{usage.spilled:5} bytes spilled, {usage.shared:6} of {GPUS[name].shared_memory} bytes shared, "
                f"{usage.blocks} blocks, {usage.unit}, {usage.atomics} atomics"
            )
    return found


def interpret(names: list[str], kind: str) -> int:
    """Hold cases to the reference, with what kernels are to write filled with NaN; 1 if any is wrong."""
    from tests.gpu_check import interpreter

    interpreter.start()
    interpreter.fill_fresh_memory()
    import torch

    from tests.gpu_check import cases

    torch.set_num_threads(1)
    counts = {"right": 0, "wrong": 0, "declined": 0}
    for case in cases.named(names):
        verdict = cases.hold(case, "triton", cases.DTYPES[kind])
        counts[verdict.outcome] += 1
        if names or verdict.outcome != "declined":
            tell(str(verdict))
    tell(f"triton in {kind}: " + ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    return 1 if counts["wrong"] or not counts["right"] else 0


def tell(line: str) -> None:
    """Say it at once: what follows may take minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
