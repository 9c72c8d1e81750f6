"""The inputs of a measurement: sizes, queries, keys and values, and our mechanisms' equations for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varifocal.attention.attend import lay_out
from varifocal.attention.mechanisms import HeadShape, make_mechanism
from varifocal.attention.mechanisms.base import Call
from varifocal.attention.mechanisms.registry import mechanism_type
from varifocal.equations.branches import Indexer
from varifocal.equations.equation import Equation
from varifocal.equations.problem import Shortcuts

SIZES = ("window", "window_max", "edge", "k_scale", "block", "hidden", "rank", "segment")
"""The sizes of a workload that mechanisms may have as options."""
NOISE = 0.06
"""Standard deviation of the logits of gates and widths: they differ between tokens but stay near their start."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention call: n queries on n keys, or a few queries on a cache of n keys."""

    length: int
    """n, the number of keys."""
    queries: int | None = None
    """How many of the last positions are queries; None for all."""
    batch: int = 1
    heads: int = 12
    kv_heads: int = 6
    head_width: int = 128
    model_width: int = 512
    """C, the width of the layer's input, from which gates are made; attention itself does not depend on it."""
    dtype: torch.dtype = torch.float32
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    window: int = 256
    """The window of mechanisms that have one; the narrowest where it is learned."""
    window_max: int = 512
    """The widest window, where it is learned."""
    edge: int = 32
    k_scale: float = 1.0
    block: int = 64
    hidden: int = 16
    """Hidden units of a pair network."""
    rank: int = 32
    """The rank of an indexer."""
    segment: int = 64

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")

    @property
    def asking(self) -> int:
        """T, the number of queries."""
        return self.length if self.queries is None else self.queries

    def options(self, mechanism: str) -> dict[str, Any]:
        """The sizes above as options of a mechanism, for those options that it has with the same name and type."""
        kind = mechanism_type(mechanism)
        given = {name: getattr(self, name) for name in SIZES} | {"window_min": self.window}
        defaults = vars(kind.config_type())
        own = {name: size for name, size in given.items() if type(defaults.get(name)) is type(size)}
        return own | dict(kind.bench_options)


class Law(NamedTuple):
    """What a contender must compute: an equation, and what a memory keeps for it while it decodes."""

    equation: Equation
    shortcuts: Shortcuts | None


@dataclass(eq=False)
class Inputs:
    """The tensors of a workload. The law of a mechanism is made when it is first asked for."""

    workload: Workload
    x: Tensor
    """[B, n, C]: the layer's input at every key."""
    asked: Tensor
    """[B, H, n, D]: the query at the position of every key."""
    k: Tensor
    v: Tensor
    cotangent: Tensor
    """[B, H, T, D]: the gradient of the output."""
    exact: bool
    source: Inputs | None = None
    """The inputs that this is a float64 copy of, if it is one."""
    laws: dict[Any, Law] = field(default_factory=dict)
    made: dict[str, Tensor] = field(default_factory=dict)
    """Tensors that laws carry and a backward pass may reach, by name."""

    def __post_init__(self) -> None:
        asking = self.workload.asking
        self.q = self.asked if asking == self.workload.length else self.asked[:, :, -asking:].detach().clone()
        for tensor in (self.q, self.k, self.v):
            tensor.requires_grad_()

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that a backward pass may reach."""
        return {"q": self.q, "k": self.k, "v": self.v, **self.made}

    def law(self, mechanism: str, options: Mapping[str, Any]) -> Law:
        """The equation of a mechanism for these queries and keys; its tensors are leaves of their own."""
        # By a plain key: this is asked for at every timed call.
        key = (mechanism, *options.items())
        if key not in self.laws:
            name = f"{mechanism} {sorted(options.items())}"
            given = self.fresh_law if self.source is None else self.source.law
            made = given(mechanism, options)
            own = {} if self.source is None else {id(self.source.q): self.q, id(self.source.k): self.k}
            own |= {id(self.q): self.q, id(self.k): self.k, id(self.asked): self.q}
            number = 0

            def leaf(tensor: Tensor) -> Tensor:
                nonlocal number
                if id(tensor) in own:
                    return own[id(tensor)]
                number += 1
                dtype = torch.float64 if self.source is not None else tensor.dtype
                kept = tensor.detach().to(dtype).clone().requires_grad_()
                self.made[f"{name} {number}"] = own[id(tensor)] = kept
                return kept

            self.laws[key] = Law(mapped(made.equation, leaf), None if self.source is not None else made.shortcuts)
        return self.laws[key]

    @torch.no_grad()
    def fresh_law(self, mechanism: str, options: Mapping[str, Any]) -> Law:
        """The law that a mechanism with slightly random parameters gives for this call."""
        work = self.workload
        shape = HeadShape(
            model_width=work.model_width, heads=work.heads, kv_heads=work.kv_heads, head_width=work.head_width
        )
        torch.manual_seed(1)
        module = make_mechanism(mechanism, shape, **options).to(work.device)
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter), alpha=NOISE * parameter.shape[-1] ** -0.5)
        memory = module.memory()
        if work.queries is None:
            remembered = memory.append(self.x, self.asked, self.k, self.v)
        else:
            past = slice(0, work.length - work.asking)
            new = slice(work.length - work.asking, work.length)
            memory.append(self.x[:, past], self.asked[:, :, past], self.k[:, :, past], self.v[:, :, past])
            remembered = memory.append(self.x[:, new], self.asked[:, :, new], self.k[:, :, new], self.v[:, :, new])
        layout = lay_out(self.q, remembered.k, remembered.v)
        call = Call(self.x[:, -work.asking :], self.q, remembered, layout, "auto")
        equation = module.equation(call)
        return Law(mapped(equation, rounded, only=Indexer) if self.exact else equation, remembered.shortcuts)

    def widened(self) -> Inputs:
        """The same numbers in float64, for the reference."""
        x, asked, k, v, cotangent = (
            one.detach().double() for one in (self.x, self.asked, self.k, self.v, self.cotangent)
        )
        return Inputs(self.workload, x, asked, k, v, cotangent, exact=self.exact, source=self)


def mapped(value: Any, change: Callable[[Tensor], Tensor], *, only: type[Any] | None = None) -> Any:
    """A frozen value with every floating-point tensor inside it changed; with `only`, just those inside that type."""
    if isinstance(value, Tensor):
        return change(value) if only is None and value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(mapped(one, change, only=only) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        inside = None if only is not None and isinstance(value, only) else only
        parts = {one.name: mapped(getattr(value, one.name), change, only=inside) for one in fields(value)}
        return replace(value, **parts)
    return value


def rounded(tensor: Tensor) -> Tensor:
    """The nearest multiples of 1/8 between -2 and 2, whose dot products have no rounding error."""
    return ((tensor * 8).round() / 8).clamp(-2, 2)


def make_inputs(workload: Workload, *, seed: int = 0, exact: bool = False) -> Inputs:
    """Random inputs; `exact` makes queries and keys multiples of 1/8, whose dot products have no rounding error.

    With exact dot products every implementation ranks keys alike, whatever its order of summation.
    """
    work = workload
    generator = torch.Generator().manual_seed(seed)
    queries, keys = (work.batch, work.heads, work.length), (work.batch, work.kv_heads, work.length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    asked, k = normal(*queries, work.head_width), normal(*keys, work.head_width)
    if exact:
        asked, k = rounded(asked), rounded(k)
    v = normal(*keys, work.head_width)
    cotangent = normal(work.batch, work.heads, work.asking, work.head_width)
    x = normal(work.batch, work.length, work.model_width)
    x, asked, k, v, cotangent = (tensor.to(work.device, work.dtype) for tensor in (x, asked, k, v, cotangent))
    return Inputs(workload, x, asked, k, v, cotangent, exact=exact)
