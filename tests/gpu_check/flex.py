"""The flex backend: the kernels that inductor writes for it, run in the interpreter behind attend."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes

from tests.gpu_check import pretended
from tests.gpu_check.ahead import Kernel
from tests.gpu_check.gpus import GPUS, Gpu
from varifocal.attention.backends import BACKENDS, LOADED
from varifocal.equations.problem import Problem
from varifocal.kernels.flex import backend as flex
from varifocal.kernels.flex import compiled
from varifocal.kernels.flex.reading import Reading
from varifocal.kernels.flex.tiles import Tiles, make_tiles


def install() -> None:
    """backend="flex" on CPU tensors: readings go to the kernels written for an H100, in the interpreter."""
    pretended.pretend(GPUS["sm_90"], InterpretedKernel)
    memory = Memory()
    pretended.allocate_by(memory.empty)
    InterpretedKernel.memory = memory
    run = functools.partial(
        flex.attend_flex,
        execute=functools.partial(attend_interpreted, memory),
        mix=functools.partial(mix_interpreted, memory),
    )

    def prepare(problem: Any) -> Callable[[], Any] | str:
        if isinstance(problem, Problem):
            return flex.why_not_equation(problem) or functools.partial(run, problem)
        return flex.prepare(problem)

    LOADED[BACKENDS["flex"].module] = SimpleNamespace(HONOURS=flex.HONOURS, prepare=prepare)


def kernels(gpu: Gpu, names: tuple[str, ...] = ()) -> Iterator[tuple[str, Kernel]]:
    """Every kernel of attention in training, with its row of the benchmark; in a process that does not interpret."""
    from tests.gpu_check.written import written_kernels

    yield from written_kernels(gpu, names)


class Memory:
    """The numbers of fake tensors, on the CPU."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.numbers: dict[int, Tensor] = {}
        self.alive: list[Tensor] = []
        """Storages are told apart by their address, so none may be freed."""

    def fake(self, real: Tensor, *, learns: bool = False) -> Tensor:
        """A tensor of the GPU with the numbers of one of the CPU."""
        with without_modes():
            dense = real.detach().contiguous()
            numbers = dense.clone().view(-1) if dense.numel() else torch.empty(1, dtype=dense.dtype)
        with self.mode:
            made = torch.empty_strided(dense.size(), dense.stride(), dtype=dense.dtype, device="cuda:0")
        return self.keep(made, numbers).requires_grad_(learns)

    def empty(self, size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
        """A new tensor of the GPU, NaN throughout."""
        with self.mode:
            made = torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")
        last = sum((int(length) - 1) * int(step) for length, step in zip(size, stride, strict=True))
        with without_modes():
            fill = float("nan") if dtype.is_floating_point else -1
            numbers = torch.full((max(1, last + 1),), fill, dtype=dtype)
        return self.keep(made, numbers)

    def keep(self, made: Tensor, numbers: Tensor) -> Tensor:
        self.numbers[made.untyped_storage()._cdata] = numbers
        self.alive.append(made)
        return made

    def real(self, part: Any) -> Any:
        """The numbers of a fake tensor; anything else as it is."""
        if not isinstance(part, FakeTensor):
            return part
        numbers = self.numbers[part.untyped_storage()._cdata]
        with without_modes():
            sizes, steps = ([int(one) for one in ones] for ones in (part.shape, part.stride()))
            return torch.as_strided(numbers, sizes, steps, int(part.storage_offset()))

    def forget(self) -> None:
        self.numbers.clear()
        self.alive.clear()


class InterpretedKernel:
    """A kernel of inductor's, from its text."""

    memory: Memory
    cap: Any = None

    def __init__(self, name: str, text: str) -> None:
        grid = re.search(r"'grid_type': '(\w+)'", text)
        self.grid_type = grid[1] if grid else ""
        module = load_text(name, without_heuristics(text))
        module.libdevice = Libdevice()
        self.function = getattr(module, name)

    def run(self, *arguments: Any, stream: Any = None, **options: Any) -> None:
        real = [self.memory.real(argument) for argument in arguments]
        with without_modes():
            self.launch(real)

    def launch(self, arguments: list[Any]) -> None:
        if self.grid_type == "FixedGrid":
            grid = tuple(int(number) for number in arguments[-3:])
            self.function[grid](*arguments[:-3])
            return
        # A kernel of single numbers: inductor leaves the sizes of its blocks to a tuner.
        names = self.function.arg_names
        given = dict(zip(names, arguments, strict=False))
        blocks = {name: 64 if name == "XBLOCK" else 8 for name in names if name.endswith("BLOCK")}
        grid = tuple(
            -(-int(given[f"{axis}numel"]) // blocks[f"{axis.upper()}BLOCK"])
            for axis in "xyz"
            if f"{axis}numel" in given
        )
        self.function[grid](*arguments, **blocks)


def without_heuristics(text: str) -> str:
    """The text of a kernel without the decorator that chooses sizes and starts it on a device."""
    bare = re.sub(r"@triton_heuristics\.\w+\((?:.|\n)*?\n\)\n(?=@triton\.jit)", "", text)
    return bare.replace("triton_helpers.set_driver_to_gpu()", "")


def load_text(name: str, text: str) -> Any:
    """A module from its text; triton wants to read its functions from a file."""
    pretended.BUILD.mkdir(parents=True, exist_ok=True)
    path = pretended.BUILD / f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Libdevice:
    """CUDA's library of functions, for the interpreter."""

    def __getattr__(self, name: str) -> Any:
        import numpy as np
        import triton.language as tl
        from triton.runtime.interpreter import TensorHandle

        if name in ("abs", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sqrt"):
            return getattr(tl, name)
        if name in ("expm1", "log1p", "tanh"):
            function = getattr(np, name)
            return lambda x: tl.core.tensor(TensorHandle(function(x.handle.data), x.handle.dtype), x.type)
        raise AttributeError(f"the interpreter has no stand-in for libdevice.{name}; give it one in {__name__}")


def attend_interpreted(memory: Memory, reading: Reading, *, at_end: bool) -> tuple[Tensor, Tensor]:
    """The output [B, H, T, D] and logsumexp [B, H, T] of a reading, as attend_compiled gives them on a GPU."""
    tiles = make_tiles(reading, at_end=at_end, backward=torch.is_grad_enabled())
    width = reading.q.shape[-1]
    q, k, v = (compiled.filled_up(part, on_cpu=False) for part in (reading.q, reading.k, reading.v))
    reading = dataclasses.replace(reading, q=q, k=k, v=v)

    def run(there: Reading, listed: Tiles) -> tuple[Tensor, ...]:
        output, logsumexp = compiled.launch(there.q, there.k, there.v, there, listed)
        assert logsumexp is not None
        return output, logsumexp

    output, logsumexp = on_device(memory, run, reading, tiles)
    return output[..., :width], logsumexp


def mix_interpreted(
    memory: Memory, means: tuple[Tensor, ...], factors: tuple[Tensor | None, ...], dtype: torch.dtype
) -> Tensor:
    """What is made of several readings, as mix_compiled gives it on a GPU."""

    def run(means: tuple[Tensor, ...], factors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
        return (compiled.mix_compiled(means, factors, dtype),)

    (output,) = on_device(memory, run, means, factors)
    return output


def on_device(memory: Memory, run: Callable[..., tuple[Tensor, ...]], *values: Any) -> tuple[Tensor, ...]:
    """run(*values) with all tensors in the values on the GPU; differentiable."""
    leaves: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and not any(tensor is leaf for leaf in leaves):
            leaves.append(tensor)
        return tensor

    changed(values, note)
    found: tuple[Tensor, ...] = OnDevice.apply(memory, run, values, leaves, *leaves)  # type: ignore[no-untyped-call]
    return found


class OnDevice(torch.autograd.Function):
    """A function of CPU tensors, evaluated with fake tensors of the GPU."""

    @staticmethod
    def forward(ctx: Any, memory: Memory, run: Any, values: Any, first: list[Tensor], *leaves: Tensor) -> Any:
        # Here all seem to need no gradient; those that were given tell which do.
        fakes = [memory.fake(leaf, learns=one.requires_grad) for one, leaf in zip(first, leaves, strict=True)]
        known = {id(one): made for one, made in zip(first, fakes, strict=True)}

        def moved(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                known[id(tensor)] = memory.fake(tensor)
            return known[id(tensor)]

        learns = any(one.requires_grad for one in first)
        there = changed(values, moved)
        with memory.mode, torch.set_grad_enabled(learns):
            results = run(*there)
        ctx.memory, ctx.results, ctx.leaves = memory, results, fakes
        return tuple(memory.real(one).clone() for one in results)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        memory: Memory = ctx.memory
        wanted = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        # In this thread, where the fake mode is.
        with memory.mode, torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(
                ctx.results, wanted, [memory.fake(one) for one in upstream], allow_unused=True, retain_graph=True
            )
        gradients = {id(leaf): gradient for leaf, gradient in zip(wanted, found, strict=True) if gradient is not None}
        given = (memory.real(gradients[id(leaf)]).clone() if id(leaf) in gradients else None for leaf in ctx.leaves)
        return (None, None, None, None, *given)


def changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A value with every tensor inside its tuples and dataclasses changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        parts = [changed(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Not by `replace`: what the checks of a value look at, a fake tensor does not have.
        copy = object.__new__(type(value))
        for one in dataclasses.fields(value):
            object.__setattr__(copy, one.name, changed(getattr(value, one.name), change))
        return copy
    return value
