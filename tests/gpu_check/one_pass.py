"""The triton backend: its kernels run in the interpreter as they are, behind attend; and all that it ships, to compile.

`python -m tests.gpu_check.one_pass` prints what each kernel takes of each GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.gpu_check.ahead import Kernel
from tests.gpu_check.gpus import Gpu


def install() -> None:
    """Nothing to do: on CPU tensors attend(backend="triton") runs in the interpreter, once that was started."""


@dataclass(frozen=True)
class Call:
    """A kind of call that kernels are compiled for."""

    name: str
    branches: Callable[[], tuple[Any, ...]]
    weighted: bool = False
    documents: bool = False


HEADS, KEY_HEADS, LENGTH = 12, 4, 8192


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


def kernels(
    gpu: Gpu, *, widths: tuple[int, ...] = (64, 128), kinds: tuple[str, ...] = ("bf16",), choose: Any = None
) -> Iterator[Kernel]:
    """Every kernel that is shipped for a GPU, for heads of some widths and numbers of some types."""
    from varifocal.kernels.triton import backward, forward
    from varifocal.kernels.triton.arrangement import arrange
    from varifocal.kernels.triton.tiles import tile_of

    functions = {"forward": forward.forward, "queries": backward.backward_queries, "keys": backward.backward_keys}
    for width in widths:
        for kind in kinds:
            for call in calls():
                arranged = arrange(call.branches())
                for name, function in functions.items():
                    bytes_each = 4 if kind == "fp32" else 2
                    tile = (choose or tile_of)(name, width=width, bytes_each=bytes_each, capability=gpu.number)
                    constants = {
                        "D": width,
                        "DP": width,
                        "M": len(arranged.order),
                        "KINDS": arranged.kinds,
                        "LAYOUT": int(call.documents),
                        "PRECISION": "ieee" if kind == "fp32" else "tf32",
                        "BM": tile.queries,
                        "BN": tile.keys,
                    }
                    absent = {"SINK", "SCALE", "POS", "GRAD_SCALE"}
                    if name == "forward":
                        constants["SAVE"] = True
                        absent.discard("GRAD_SCALE")
                    if not call.weighted:
                        absent |= {"WEIGHTS"}
                    if not call.documents:
                        absent |= {"START", "SEEN"}
                    if not arranged.soft:
                        absent |= {"WIDTH", "GRAD_WIDTH"}
                    names = function.arg_names
                    constants |= dict.fromkeys((one for one in names if one in absent), None)
                    types = signature(names, constants, kind)
                    yield Kernel(
                        name=f"{call.name}: {name}, {width}, {kind}",
                        function=function,
                        signature=types,
                        constants=constants,
                        warps=tile.warps,
                        stages=tile.stages,
                        tile=f"{tile.queries} queries x {tile.keys} keys",
                        divisible=tuple(
                            one
                            for one, what in types.items()
                            if what.startswith("*") or (one.startswith("s") and what == "i32")
                        ),
                    )


FLOATS = {"WEIGHTS", "SINK", "SCALE", "WIDTH", "EDGES", "LOGSUMEXP", "NUMBERS", "GRAD_WIDTH", "GRAD_SCALE", "GRAD_SINK",
          "GRAD_WEIGHTS"}  # fmt: skip
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
    options = parser.parse_args()
    return interpret(options.names, options.dtype)


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
