"""Torch operators whose arguments, results and gradients have names.

An operator is declared by two named tuples, its inputs and its outputs; torch's schema is made from them. Kernels,
fakes and backwards take and return these tuples, so that nobody counts arguments. A named tuple inside another stands
for its fields: a backward takes the inputs of its forward as one of its own.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor

from .once import differentiable_once, has_tangent, in_forward_mode, transformed

Inputs = TypeVar("Inputs", bound=NamedTuple)
Outputs = TypeVar("Outputs", bound=NamedTuple)

_KINDS: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    int: "SymInt",
    float: "float",
    bool: "bool",
    Sequence[int]: "SymInt[]",
    Sequence[float]: "float[]",
}


class Context(Generic[Inputs, Outputs]):
    """What a backward may ask for: the operator's inputs, its outputs (None for those not kept), and what is wanted."""

    def __init__(self, ctx: Any, operator: "Operator[Inputs, Outputs]") -> None:
        self._ctx = ctx
        self._operator = operator

    def saved(self) -> tuple[Inputs, Outputs]:
        """Both tuples, for the caller alone: what it deletes after `release` is freed."""
        tensors = iter(self._ctx.saved_tensors)
        values = (next(tensors) if is_tensor else value for is_tensor, value in self._ctx.kept)
        inputs = _build(self._operator.inputs, values)
        return inputs, _build(self._operator.outputs, values)

    def release(self) -> None:
        """Let go of what was saved, unless the graph is to be kept. Compiled code frees by itself."""
        if not torch.compiler.is_compiling():
            self._ctx.maybe_clear_saved_tensors()

    def wants(self, name: str) -> bool:
        """Whether the gradient of an input is asked for."""
        return bool(self._ctx.needs_input_grad[self._operator.names.index(name)])


Gradients = dict[str, Tensor | None]
"""By the name of the input; those left out have none."""


class Operator(Generic[Inputs, Outputs]):
    """`varifocal::name`, on the CPU."""

    def __init__(
        self,
        name: str,
        inputs: type[Inputs],
        outputs: type[Outputs],
        kernel: Callable[[Inputs], Outputs],
        *,
        fake: Callable[[Inputs], Outputs],
        mutates: Collection[str] = (),
    ) -> None:
        self.name = name
        self.inputs: Any = inputs
        self.outputs: Any = outputs
        self.names = [name for name, _ in _fields(inputs)]

        def as_torch(function: Callable[[Inputs], Outputs]) -> Callable[..., Any]:
            def run(*given: Any) -> Any:
                made = tuple(function(_build(inputs, iter(given))))
                # Torch wants one output bare, and None for none.
                return made if len(made) > 1 else made[0] if made else None

            return run

        self._defined = torch.library.custom_op(
            f"varifocal::{name}",
            as_torch(kernel),
            mutates_args=mutates,
            device_types="cpu",
            schema=schema(inputs, outputs, mutates),
        )
        self._defined.register_fake(as_torch(fake))
        self._overload = getattr(torch.ops.varifocal, name).default
        self._kernel = kernel
        self._nested = _nests(inputs)

    def __call__(self, inputs: Inputs) -> Outputs:
        """Run it; without torch's dispatcher where that would do nothing but pass the call on."""
        if runs_plainly(_flat(inputs) if self._nested else inputs):
            return self._kernel(inputs)
        if not torch.compiler.is_compiling() and in_forward_mode():
            self._refuse_tangents(inputs)
        made = self._overload(*_flat(inputs))
        count = len(self.outputs._fields)
        result: Outputs = self.outputs(*(made if count > 1 else (made,) * count))
        return result

    def _refuse_tangents(self, inputs: Inputs) -> None:
        """RuntimeError if a derivative along an input's tangent is wanted: it would be dropped."""
        for value in _flat(inputs):
            if isinstance(value, Tensor) and has_tangent(value):
                raise RuntimeError(
                    f"varifocal::{self.name} has no forward-mode derivative; use backend='auto' or 'reference'"
                )

    def differentiate(
        self,
        backward: Callable[[Context[Inputs, Outputs], Outputs], Gradients],
        *,
        without: Collection[str] = (),
        keeps: Callable[[Inputs, str], bool] = lambda inputs, output: True,
    ) -> None:
        """Register a backward: from a context and the outputs' gradients (None for none) to those of the inputs.

        `without` names outputs that carry no gradient; `keeps` says whether the backward needs an output.
        """

        def setup(ctx: Any, inputs: Any, output: Any) -> None:
            given, made = _build(self.inputs, iter(inputs)), self.outputs(*output)
            values = [*inputs, *(x if keeps(given, name) else None for name, x in made._asdict().items())]
            ctx.kept = [(isinstance(x, Tensor), None if isinstance(x, Tensor) else x) for x in values]
            ctx.save_for_backward(*(x for x in values if isinstance(x, Tensor)))
            ctx.mark_non_differentiable(*(getattr(made, name) for name in without))
            ctx.set_materialize_grads(False)  # outputs kept for the backward are large, and never have gradients

        @differentiable_once(f"varifocal::{self.name}")
        def run(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
            if all(grad is None for grad in grads):
                return (None,) * len(self.names)
            found = backward(Context(ctx, self), self.outputs(*grads))
            unknown = found.keys() - set(self.names)
            assert not unknown, f"varifocal::{self.name} has no input {unknown}"
            return tuple(found.get(name) for name in self.names)

        self._defined.register_autograd(run, setup_context=setup)

    def autocast_to_float32(self) -> None:
        """Under autocast the operator sees float32, whatever comes in."""
        self._defined.register_autocast("cpu", torch.float32)


def runs_plainly(values: Sequence[Any]) -> bool:
    """Whether nothing traces, differentiates, casts or transforms a call on these values.

    Torch's dispatcher takes longer than a kernel that decodes one token.
    """
    if (
        torch.compiler.is_compiling()
        or torch.is_autocast_enabled("cpu")
        or transformed()
        or torch._C._len_torch_dispatch_stack()
    ):
        return False
    grad = torch.is_grad_enabled()
    for value in values:
        kind = type(value)
        if kind is Tensor or kind is torch.nn.Parameter:
            if grad and value.requires_grad:
                return False
        elif isinstance(value, Tensor):
            return False
    return True


def schema(inputs: type[NamedTuple], outputs: type[NamedTuple], mutates: Collection[str]) -> str:
    """Torch's schema of an operator with these inputs and outputs: "(Tensor q, SymInt block) -> (Tensor, Tensor)"."""
    arguments = []
    for number, (name, kind) in enumerate(_fields(inputs)):
        arguments.append(f"{f'Tensor(a{number}!)' if name in mutates else _KINDS[kind]} {name}")
    results = ", ".join(_KINDS[kind] for _, kind in _fields(outputs))
    written = results if len(outputs._fields) == 1 else f"({results})"
    return f"({', '.join(arguments)}) -> {written}"


@functools.cache
def _kinds(kind: Any) -> dict[str, Any]:
    """The types of a named tuple's fields; torch asks for them at every call."""
    return get_type_hints(kind)


@functools.cache
def _nests(kind: Any) -> bool:
    """Whether a named tuple has another one inside."""
    return any(_is_tuple(inner) for inner in _kinds(kind).values())


def _is_tuple(kind: Any) -> bool:
    return hasattr(kind, "_fields")


def _fields(kind: Any) -> list[tuple[str, Any]]:
    """Names and types of the fields of a named tuple, those of a tuple inside it in its place."""
    found: list[tuple[str, Any]] = []
    for name, inner in _kinds(kind).items():
        found.extend(_fields(inner) if _is_tuple(inner) else [(name, inner)])
    return found


def _flat(values: Any) -> Sequence[Any]:
    """The values of a named tuple in the order of `_fields`. Nothing cached here: torch.compile traces it."""
    found: list[Any] = []
    for value in values:
        if _is_tuple(value):
            found.extend(_flat(value))
        else:
            found.append(value)
    return found


def _build(kind: Any, values: Iterator[Any]) -> Any:
    """A named tuple from its values in the order of `_fields`; takes no more of them than it has fields."""
    if not _nests(kind):
        return kind(*itertools.islice(values, len(kind._fields)))
    return kind(*(_build(inner, values) if _is_tuple(inner) else next(values) for inner in _kinds(kind).values()))
