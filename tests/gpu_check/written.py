"""The flex backend's kernels for one GPU: the text that inductor writes for each mechanism, ready to be compiled."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.gpu_check import pretended
from tests.gpu_check.ahead import Kernel
from tests.gpu_check.flex import Memory, changed, load_text
from tests.gpu_check.gpus import Gpu
from varifocal.attention.attend import lay_out
from varifocal.bench.attention.workload import Workload, make_inputs
from varifocal.bench.rows import rows_of_ours
from varifocal.equations.problem import Problem
from varifocal.kernels.flex import backend as flex
from varifocal.kernels.flex import compiled
from varifocal.kernels.flex.reading import Reading
from varifocal.kernels.flex.tiles import TILE, Tiles, make_tiles

TRAINING = Workload(length=2048, batch=2, dtype=torch.bfloat16)
"""12 heads of 128 with 6 key heads: the sizes of the CPU benchmark."""
DECODED = ("dense", "head_gated")
"""Rows whose kernel of one token in DECODING_ROWS rows is written too."""
DECODING_ROWS = 4
PRODUCTS = {"forward": 2, "backward": 7}
"""Of a tile of queries with a tile of keys. FlexAttention's backward makes the scores and dP twice: for dQ, for dK."""


class Recorder:
    """Takes the place of every kernel that is launched, and notes those that are attention."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, str, float]] = []
        """Name, text, and bytes of all arguments."""

    def launcher(self, name: str, text: str) -> Any:
        def run(*arguments: Any, **options: Any) -> None:
            if name.startswith("triton_tem"):
                tensors = {id(one): one for one in arguments if isinstance(one, Tensor)}.values()
                size = sum(int(one.numel()) * one.element_size() for one in tensors)
                self.launches.append((name, text, float(size)))

        return mock.Mock(run=run)

    def taken(self) -> list[tuple[str, str, float]]:
        taken, self.launches = self.launches, []
        return taken


def written_kernels(gpu: Gpu, names: tuple[str, ...] = ()) -> Iterator[tuple[str, Kernel]]:
    """Every kernel of attention that flex launches in training, and some of decoding, with their rows' names."""
    problems = {row: (problem, True) for row, problem in problems_of(TRAINING, names).items()}
    decoding = {f"{row}, decoding {DECODING_ROWS} rows": row for row in DECODED}
    wanted = tuple(row for told, row in decoding.items() if not names or row in names or told in names)
    if wanted:
        asked = problems_of(replace(TRAINING, batch=DECODING_ROWS, queries=1), wanted)
        problems |= {told: (asked[row], False) for told, row in decoding.items() if row in wanted}
    recorder = Recorder()
    pretended.pretend(gpu, recorder.launcher)
    memory = Memory()
    pretended.allocate_by(memory.empty)
    for row, (problem, learns) in problems.items():
        found: list[Kernel] = []

        def execute(reading: Reading, *, at_end: bool, row: str = row, found: list[Kernel] = found) -> Any:
            found.extend(kernels_of(row, reading, at_end, memory=memory, recorder=recorder))
            memory.forget()
            shape = reading.q.shape
            return reading.q.detach().clone(), torch.zeros(shape[:3])

        with torch.set_grad_enabled(learns):
            flex.attend_flex(problem, execute=execute)
        yield from ((row, kernel) for kernel in numbered(found))


def numbered(kernels: list[Kernel]) -> Iterator[Kernel]:
    """Kernels of one row with names of their own: a mechanism may have several readings of a kind."""
    names = [kernel.name for kernel in kernels]
    for place, kernel in enumerate(kernels):
        several = names.count(kernel.name) > 1
        yield replace(kernel, name=f"{kernel.name} {names[:place].count(kernel.name) + 1}") if several else kernel


def problems_of(workload: Workload, names: tuple[str, ...]) -> dict[str, Problem]:
    """A call of each row of ours that flex runs; made before there is a GPU whose random numbers torch would seed."""
    inputs = make_inputs(workload)
    problems = {}
    for row, (mechanism, options) in rows_of_ours().items():
        if names and row not in names:
            continue
        equation = inputs.law(mechanism, workload.options(mechanism) | options).equation
        problem = Problem(
            q=inputs.q, k=inputs.k, v=inputs.v, branches=equation.branches, weights=equation.weights,
            score=equation.score, layout=lay_out(inputs.q, inputs.k, inputs.v), normalizer=equation.normalizer,
        )  # fmt: skip
        if equation.relative_values is None and flex.why_not_equation(problem) is None:
            problems[row] = problem
    return problems


def kernels_of(row: str, reading: Reading, at_end: bool, *, memory: Memory, recorder: Recorder) -> Iterator[Kernel]:
    """The kernels that one reading launches, forward and (where gradients are on) backward."""
    learns = torch.is_grad_enabled()
    tiles = make_tiles(reading, at_end=at_end, backward=learns)
    pairs = pairs_in(tiles, reading)

    def moved(tensor: Tensor) -> Tensor:
        return memory.fake(tensor, learns=learns and tensor.requires_grad)

    there = changed(reading, moved)
    with memory.mode, torch.autograd.set_multithreading_enabled(False):
        output, logsumexp = compiled.launch(there.q, there.k, there.v, there, changed(tiles, moved))
        assert logsumexp is not None
        forward = recorder.taken()
        if learns:
            torch.autograd.backward((output, logsumexp), (torch.ones_like(output), torch.ones_like(logsumexp)))
    sets = " and ".join(type(one).__name__ for one in reading.sets)
    for direction, launches in (("forward", forward), ("backward", recorder.taken())):
        for name, text, size in launches:
            # One query fills no tile; how far its block is filled depends on the heads that share a key head.
            fills = reading.q.shape[2] > 1
            operations = PRODUCTS[direction] * 2.0 * pairs * reading.q.shape[-1] if fills else None
            yield from_text(f"{row} ({sets}) {direction}", name, text, operations=operations, size=size)


def pairs_in(tiles: Tiles, reading: Reading) -> float:
    """Pairs of a query and a key in the tiles that are read, over all rows and heads."""
    tiles_read = tiles.partial_count.sum() + tiles.full_count.sum()
    batch, heads = tiles.partial_count.shape[:2]
    repeated = reading.q.shape[0] // batch * (reading.q.shape[1] // heads)
    return float(tiles_read) * repeated * TILE * TILE


def from_text(told: str, name: str, text: str, *, operations: float | None, size: float) -> Kernel:
    """A kernel as its decorator in the text says that it is compiled."""
    from torch._inductor.runtime import triton_heuristics

    caught: list[dict[str, Any]] = []

    def template(**options: Any) -> Any:
        def keep(function: Any) -> Any:
            caught.append(options | {"function": function})
            return function

        return keep

    bare = text.replace("triton_helpers.set_driver_to_gpu()", "")
    importlib.invalidate_caches()
    with mock.patch.object(triton_heuristics, "template", template):
        load_text(name, bare)
    (options,) = caught
    meta, settings = options["triton_meta"], options["inductor_meta"].get("config_args", {})
    names = list(options["function"].arg_names)
    constants = {key if isinstance(key, str) else names[key[0]]: value for key, value in meta["constants"].items()}
    sizes = {key: value for key, value in settings.items() if re.fullmatch(r"BLOCK_[MN][12]?", key)}
    return Kernel(
        name=told,
        function=options["function"],
        signature=meta["signature"],
        constants=constants,
        warps=options["num_warps"],
        stages=options["num_stages"],
        tile=", ".join(f"{key.removeprefix('BLOCK_')} {value}" for key, value in sizes.items())
        + (f", keys among {settings['SPLIT_KV']} blocks" if "SPLIT_KV" in settings else ""),
        operations=operations,
        bytes=size,
        attributes=meta["configs"][0],
    )
