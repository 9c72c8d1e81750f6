"""What all mechanisms share: the shape of a layer's heads, a frozen config, one equation, one result."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

import torch
from torch import Tensor, nn

from varifocal.attention.attend import evaluate, lay_out
from varifocal.attention.gates import Gate
from varifocal.attention.mechanisms.ablation import Ablation
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.memories import KeysAndValues, Memory, RecentKeys, Remembered, TakesTokens
from varifocal.equations.branches import Branch, SoftWindow, members
from varifocal.equations.equation import Equation
from varifocal.equations.layout import Layout
from varifocal.equations.problem import Attended


@dataclass(frozen=True, kw_only=True)
class HeadShape:
    """The sizes of the attention layer that a mechanism serves; the defaults are those of the papers' model."""

    model_width: int = 512
    """C, the width of the layer input."""
    heads: int = 12
    """H, query heads."""
    kv_heads: int = 6
    """G, key and value heads."""
    head_width: int = 128
    """D."""

    def __post_init__(self) -> None:
        for name in ("model_width", "heads", "kv_heads", "head_width"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The sizes that a mechanism's options follow."""

    context: int
    """Tokens of a text."""
    window: int
    """Keys of a near branch; the papers' 256 for their contexts."""
    head_width: int
    """D."""
    kv_heads: int = 1
    """G."""

    @property
    def root(self) -> int:
        """The power of two at the square root of the context, or above: the length of segments and strides."""
        return int(2 ** math.ceil(math.log2(math.sqrt(self.context))))

    @property
    def block(self) -> int:
        """Keys in a block that is ranked as a whole."""
        return min(64, self.root)


@dataclass(frozen=True, kw_only=True)
class MechanismConfig:
    """The options of one mechanism: a frozen value, saved with a model."""

    renamed: ClassVar[Mapping[str, str]] = {}
    """By a name that an option had in earlier versions, the one it has now: saved options still load."""

    def for_repeated_heads(self, times: int) -> Self:
        """The options of the same attention for keys and values of which every head is given so many times."""
        return self

    def in_layer(self, layer: int) -> Self:
        """The options of one layer of a model whose layers share these; whatever is drawn at random may differ."""
        return self


class Part(NamedTuple):
    """The attention of some heads, where a memory keeps different tokens for different heads."""

    heads: tuple[int, ...]
    """Query heads."""
    equation: Equation
    layout: Layout
    """Where the queries stand among the keys of these heads."""
    remembered: Remembered


@dataclass(frozen=True, eq=False)
class MechanismOutput:
    """What a mechanism returns."""

    output: Tensor
    """[B, H, T, D]."""
    losses: dict[str, Tensor] = field(default_factory=dict)
    """Auxiliary losses by name, with their coefficients, to be added to the loss."""
    equation: Equation | None = None
    """What was evaluated."""
    attended: Attended | None = None
    """What came of it."""
    layout: Layout | None = None
    """Where the queries stood."""
    parts: tuple[Part, ...] = ()
    """What was evaluated, if heads keep different tokens; `layout` is that of the first part then."""

    @cached_property
    def records(self) -> dict[str, Tensor]:
        """What is worth recording, detached: "gate" [B, H, T] and "decides" bool [B, T] or [B, H, T] (where the gate
        has any effect), "width" [B, H, T], "selected" [B, H, T, K] (Attended.selected)."""
        found: dict[str, Tensor] = {}
        if self.equation is None or self.attended is None or self.layout is None:
            return found
        for member in (member for branch in self.equation.branches for member in members(branch)):
            if isinstance(member, SoftWindow):
                found["width"] = member.width.detach()
        if is_two_way(self.equation.weights):
            assert self.equation.weights is not None
            place = self.layout.query_place
            same = self.equation.all_read_everything(place)
            found["gate"] = self.equation.weights[..., 0].detach()
            # Padding has no decision either; its place is negative.
            found["decides"] = (place >= 0 if same.ndim == 2 else (place >= 0)[:, None]) & ~same
        for selected in self.attended.selected:
            if selected is not None:
                found["selected"] = selected
        return found


class Call(NamedTuple):
    """The arguments of one forward pass, as a mechanism sees them."""

    x: Tensor
    """[B, T, C]: the layer's normed input at the queries."""
    q: Tensor
    """[B, H, T, D]."""
    remembered: Remembered
    """Keys, values and notes of the tokens that may be read."""
    layout: Layout
    """Where the queries stand among them."""
    backend: str

    @property
    def k(self) -> Tensor:
        """[B, G, S, D]."""
        return self.remembered.k

    @property
    def v(self) -> Tensor:
        """[B, G, S, D]."""
        return self.remembered.v

    @property
    def counted(self) -> Tensor:
        """bool [B, T]: the queries that are not padding."""
        return self.layout.query_place >= 0


class Step(NamedTuple):
    """An equation whose branches no token changes: one softmax, or two that a gate mixes as `two_way` does."""

    branches: tuple[Branch, ...]
    """Of windows and prefixes."""
    gate: Gate | None = None
    sink: Tensor | None = None
    """[H]: the logits of a SinkLogit, for one softmax."""


class Overhead(NamedTuple):
    """What a mechanism costs in training beside its attention, for a token of one layer, as it was counted."""

    traffic: float = 0.0
    """Bytes that its own operators read and write, forward and backward."""
    operators: float = 0.0
    """How many it starts."""
    kept: float = 0.0
    """Bytes kept for the backward pass."""


ConfigT = TypeVar("ConfigT", bound=MechanismConfig)


class Mechanism(nn.Module, Generic[ConfigT]):
    """An attention mechanism: given a layer's normed input and its queries, keys and values, the heads' output.

    A mechanism says in `equation` what a call reads and how. Everything else has a default that a mechanism may better:
    what it remembers (`memory`), losses of its own (`losses`), how its options follow a context (`scaled_options`), how
    it starts as dense attention (`dense_options`, `start_as_dense`), what can be taken away from it (`ablations`),
    small sizes for tests (`variants`), and the words that describe it (`words`).
    """

    name: str
    """The stem: the mechanism's name in configs, files and docs."""
    config_type: type[ConfigT]
    variants: ClassVar[tuple[Variant, ...]] = ()
    """Options for texts of some thirty tokens, for tests; without any, the defaults stand for all."""
    ablations: ClassVar[tuple[Ablation, ...]] = ()
    """What can be taken away from it, or changed, to see what it is good for."""
    ways: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """By label, options that each get a row of their own in tables of cost and speed; the first are the defaults."""
    bench_options: ClassVar[Mapping[str, Any]] = {}
    """Options of its row in `varifocal bench attention`, where the defaults would not measure what is meant."""
    bench_reference: ClassVar[tuple[str, ...]] = ()
    """The rows that the reference runs there too, to compare: labels of `ways`, or "" where it has one row alone."""

    def __init__(self, config: ConfigT | None = None, shape: HeadShape | None = None) -> None:
        super().__init__()
        self.config: ConfigT = self.config_type() if config is None else config
        self.shape = HeadShape() if shape is None else shape

    def equation(self, call: Call) -> Equation:
        """Branches, weights and score of a call."""
        raise NotImplementedError

    def step(self) -> Step | None:
        """The equation of every decoded token, if it is of the kind that a layer's native call knows; else None.

        It saves time and changes no result: what `equation` says remains the law.
        """
        return None

    def losses(self, call: Call, equation: Equation, attended: Attended) -> dict[str, Tensor]:
        """Auxiliary losses of what the mechanism trains by itself, with their coefficients."""
        return {}

    def memory(self) -> Memory:
        """An empty memory of what later queries need; by default keys and values, as far back as any query reads."""
        reach = self.farthest()
        return KeysAndValues() if reach is None else RecentKeys(reach)

    def farthest(self) -> int | None:
        """How many keys back, its own included, a query ever looks; None if that has no bound."""
        return None

    @property
    def rotates(self) -> bool:
        """Whether its queries and keys carry rotary positions; a mechanism with positions of its own may do without."""
        return True

    def reset_parameters(self) -> None:
        """Initialise the mechanism's own parameters, if it has any."""

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        """The options that follow the sizes of a model; the others keep their defaults."""
        return {}

    @classmethod
    def dense_options(cls, context: int) -> dict[str, Any]:
        """Options with which it can take the place of dense attention on texts of up to `context` tokens."""
        return {}

    def start_as_dense(self) -> None:
        """Set its parameters such that it reads as dense attention does, as far as it can."""

    def words(self) -> str:
        """What it reads, as a clause for pages and tables."""
        return "reads as its own equation says"

    def rating_flops(self) -> float:
        """Operations a token of its own networks, all heads together: two for each weight of a matrix."""
        return 2.0 * sum(parameter.numel() for parameter in self.parameters() if parameter.ndim > 1)

    def training_flops(self, equation: Equation, length: int) -> float:
        """Operations a token that only training adds, all heads together: a loss of its own."""
        return 0.0

    def overhead(self, length: int, bytes_per_number: int) -> Overhead:
        """What it costs in training beside its attention, on texts of `length` tokens; nothing if nobody counted it."""
        return Overhead()

    def forward(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        memory: TakesTokens | None = None,
        layout: Layout | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        backend: str = "auto",
    ) -> MechanismOutput:
        """Attend from queries to keys.

        Args:
            x: the layer's normed input at the queries [B, T, C].
            q: queries [B, H, T, D], rotary embedding and norms already applied.
            k: keys [B, G, S, D]: those of the queries' own tokens (S = T) and, without a memory, any before them.
            v: values [B, G, S, D].
            memory: what `memory()` made, with all earlier tokens in it; it takes in the new ones.
            layout: where the queries stand among the S tokens that they may read, in place of the next two.
            documents: integers [B, S], as in attend.
            positions: integers [T] or [B, T], as in attend.
            backend: as in attend.
        """
        self.check(x, q, k)
        if memory is not None:
            remembered = memory.append(x, q, k, v, layout=layout)
        # A whole text: a memory that lives for this call makes the notes that the mechanism reads.
        elif positions is None and q.shape[2] == k.shape[2]:
            notes = self.memory()
            # No token follows, so nothing need be made smaller for one.
            notes.records_past = True
            remembered = notes.append(x, q, k, v, layout=layout)
        else:
            remembered = Remembered(k, v)
        return self.read(x, q, remembered, layout=layout, documents=documents, positions=positions, backend=backend)

    def read(
        self,
        x: Tensor,
        q: Tensor,
        remembered: Remembered,
        *,
        layout: Layout | None = None,
        documents: Tensor | None = None,
        positions: Tensor | None = None,
        backend: str = "auto",
    ) -> MechanismOutput:
        """Attend from queries to what is remembered; the arguments are those of `forward`."""
        k, v = remembered.k, remembered.v
        if layout is None:
            layout = lay_out(q, k, v, documents=documents, positions=positions)
        # A memory of a window keeps the last keys alone, and the model's layout counts all of them.
        elif layout.keys != k.shape[2]:
            layout = layout.of_last(k.shape[2])
        call = Call(x, q, remembered, layout, backend)
        equation = self.equation(call)
        attended = evaluate(
            equation, q, k, v,
            layout=layout, shortcuts=remembered.shortcuts, backend=backend, wants_logsumexp=False,
        )  # fmt: skip
        losses = {**equation.losses, **self.losses(call, equation, attended)}
        return MechanismOutput(attended.output, losses, equation, attended, layout)

    def check(self, x: Tensor, q: Tensor, k: Tensor) -> None:
        """ValueError unless x, q and k have this mechanism's sizes."""
        shape = self.shape
        if q.ndim != 4 or q.shape[1] != shape.heads or q.shape[3] != shape.head_width:
            raise ValueError(
                f"{self.name} expects q [B, {shape.heads}, T, {shape.head_width}] (heads and head width of its shape), "
                f"got {tuple(q.shape)}"
            )
        if k.ndim != 4 or k.shape[1] != shape.kv_heads or k.shape[3] != shape.head_width:
            raise ValueError(
                f"{self.name} expects k and v [B, {shape.kv_heads}, S, {shape.head_width}] (kv_heads and head width of "
                f"its shape), got {tuple(k.shape)}"
            )
        if x.ndim != 3 or tuple(x.shape) != (q.shape[0], q.shape[2], shape.model_width):
            expected = (q.shape[0], q.shape[2], shape.model_width)
            raise ValueError(f"{self.name} expects x [B, T, C] = {expected}, got {tuple(x.shape)}")

    def note(self, call: Call, name: str) -> Tensor:
        """A note of every remembered token [B, *, S, F]; ValueError if the call did not bring it."""
        if name not in call.remembered.notes:
            raise ValueError(
                f"{self.name} reads the {name.replace('_', ' ')} of all {call.k.shape[2]} keys, which a call of "
                f"{call.q.shape[2]} queries does not hold; pass a memory() that took in the tokens before them"
            )
        return call.remembered.notes[name]


def typical_equation(mechanism: Mechanism[Any], length: int, *, seed: int | None = None) -> Equation:
    """The equation of a text of `length` tokens that are all 0: what a mechanism reads before it sees anything.

    With a seed, the layer's input is random: what an equation then says of itself does not hold for 0 alone.
    """
    shape = mechanism.shape
    parameter = next(mechanism.parameters(), torch.empty(0))
    # One number, expanded: a long text of zeros takes no memory.
    zero = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    x = zero.expand(1, length, shape.model_width)
    if seed is not None:
        x = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(zero)
    q = zero.expand(1, shape.heads, length, shape.head_width)
    k = zero.expand(1, shape.kv_heads, length, shape.head_width)
    with torch.no_grad():
        memory = mechanism.memory()
        # No token follows, so nothing need be made smaller for one.
        memory.records_past = True
        remembered = memory.append(x, q, k, k)
        return mechanism.equation(Call(x, q, remembered, lay_out(q, k, k), "auto"))


def is_two_way(weights: Tensor | None) -> bool:
    """Whether weights [B, H, T, M] are those of one gate: g and 1 - g."""
    if weights is None or weights.shape[-1] != 2:
        return False
    total = weights.detach().float().sum(dim=-1)
    # Both may be rounded to bfloat16.
    return bool(torch.allclose(total, torch.ones_like(total), rtol=0.0, atol=2**-8))


def two_way(gate: Tensor) -> Tensor:
    """The weights [B, H, T, 2] of two branches from a gate [B, H, T]: g for the first, 1 - g for the second."""
    return torch.stack((gate, 1 - gate), dim=-1)
