"""A segment's softmax and a matrix of all earlier ones: Munkhdalai et al., Infini-attention, arXiv:2404.07143."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from varifocal.attention.gates import CLOSED, Gate, GateConfig
from varifocal.attention.mechanisms.ablation import GATE_TOOLS, Ablation, plain
from varifocal.attention.mechanisms.base import (
    Call,
    HeadShape,
    Mechanism,
    MechanismConfig,
    MechanismOutput,
    Scale,
    two_way,
)
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.memories import Memory, Remembered, RememberedSegments, SegmentsInMatrix
from varifocal.attention.precision import wide
from varifocal.equations.branches import Compressed
from varifocal.equations.branches.base import require_at_least, require_finite
from varifocal.equations.branches.own_block import OwnBlock
from varifocal.equations.equation import Equation
from varifocal.equations.layout import Layout, make_layout
from varifocal.equations.scores import Dot, OwnFeatures, Score

Rotary = Literal["segment", "model", "none"]


@dataclass(frozen=True, kw_only=True)
class InfiniConfig(MechanismConfig):
    """The length of a segment, how the memory learns, and the gate between both."""

    segment: int = 2048
    """Keys in a segment."""
    delta: bool = False
    """Whether the memory learns by the delta rule: of a value only what it would not have answered."""
    rotary: Rotary = "segment"
    """"segment": rotary positions inside a segment, none in the memory, as in the paper; "model": the model's own in
    both; "none": in neither."""
    theta: float = 10000.0
    """The base of the rotary positions inside a segment."""
    gate: GateConfig = field(default_factory=lambda: GateConfig(kind="static"))
    """How much of the segment is read, and how much of the memory; the paper's is a number for each head."""

    def __post_init__(self) -> None:
        require_at_least("segment", self.segment, 1)
        require_finite("theta", self.theta, least=1.0)
        if self.rotary not in ("segment", "model", "none"):
            raise ValueError(f"rotary must be 'segment', 'model' or 'none', got {self.rotary!r}")


class Infini(Mechanism[InfiniConfig]):
    """g * softmax inside the segment + (1 - g) * phi(q) M / phi(q) z, with M and z of all earlier segments."""

    name = "infini"
    config_type = InfiniConfig
    ways = {"linear": {"delta": False}, "delta": {"delta": True}}  # noqa: RUF012
    bench_options: ClassVar[Mapping[str, Any]] = {"segment": 512}
    """Of a length that follows from the window there, and not combiner's."""
    variants = (
        Variant({"segment": 5}),
        Variant({"segment": 4, "delta": True, "gate": {"kind": "linear"}}, "delta"),
        Variant({"segment": 5, "rotary": "model"}, "rotary"),
    )
    ablations = (
        Ablation(
            name="delta", question="should the memory learn only what it does not know?", options=plain(delta=True)
        ),
        Ablation(name="token_gate", question="must the gate see the token?", options=plain(gate={"kind": "linear"})),
        Ablation(
            name="half_segment",
            question="segments of half the length",
            options=lambda sizes: {"segment": max(1, sizes.window)},
        ),
        *GATE_TOOLS,
    )

    def __init__(self, config: InfiniConfig | None = None, shape: HeadShape | None = None) -> None:
        super().__init__(config, shape)
        self.gate = Gate(self.config.gate, model_width=self.shape.model_width, heads=self.shape.heads)

    def reset_parameters(self) -> None:
        self.gate.reset_parameters()

    @property
    def rotates(self) -> bool:
        return self.config.rotary == "model"

    def memory(self) -> Memory:
        return SegmentsInMatrix(self.config.segment, features, delta=self.config.delta, width=self.shape.head_width)

    def equation(self, call: Call) -> Equation:
        place, length = call.layout.query_place, self.config.segment
        gate, losses = self.gate(call.x, counted=call.counted)
        # In a first segment there is no memory, and the segment must not be scaled.
        near = torch.where((place < length)[:, None], 1.0, gate)
        memory = Compressed(
            length, features(call.q), features(call.k), delta=self.config.delta,
            past=call.remembered.past if isinstance(call.remembered, RememberedSegments) else None,
        )  # fmt: skip
        return Equation((OwnBlock(length), memory), two_way(near), score=self.score(call), losses=losses)

    def score(self, call: Call) -> Score:
        """That of the softmax inside a segment."""
        if self.config.rotary != "segment":
            return Dot()
        length, theta, layout = self.config.segment, self.config.theta, call.layout
        queries = rotated(wide(call.q) * self.shape.head_width**-0.5, layout.query_place % length, theta)
        return OwnFeatures(queries, rotated(wide(call.k), layout.key_place % length, theta))

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
        if isinstance(remembered, RememberedSegments) and (gone := remembered.gone):
            if documents is not None or positions is not None:
                raise ValueError(
                    f"documents and positions count all keys, of which this memory holds {gone} in a matrix; give a "
                    "layout of all tokens instead"
                )
            kept = remembered.k.shape[2]
            if layout is None:
                layout = make_layout(
                    batch=q.shape[0],
                    queries=q.shape[2],
                    keys=gone + kept,
                    documents=None,
                    positions=None,
                    device=q.device,
                )
            layout = from_first_kept(layout, gone)
        return super().read(x, q, remembered, layout=layout, documents=documents, positions=positions, backend=backend)

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        """Segments of two windows: as many keys are read as in a window, on the average."""
        return {"segment": 2 * scale.window}

    @classmethod
    def dense_options(cls, context: int) -> dict[str, Any]:
        """One segment for all of the context, with the positions that the model was trained with."""
        return {"segment": context, "rotary": "model", "gate": {"kind": "static", "start": -CLOSED}}

    def words(self) -> str:
        rule = ", which learns by the delta rule" if self.config.delta else ""
        return (
            f"a gate mixes local, its own segment of {self.config.segment} keys, with global, a matrix that holds all "
            f"earlier ones{rule}"
        )


def features(x: Tensor) -> Tensor:
    """phi(x) = ELU(x) + 1 of [..., D], in float32 or wider; NaN, which only padding holds, as 0."""
    x = wide(x)
    x = x.masked_fill(x.isnan(), 0.0)
    # e^x below 0, and not e^x - 1 + 1, of which rounding leaves 0.
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def rotated(x: Tensor, place: Tensor, theta: float) -> Tensor:
    """x [B, *, T, D] with rotary positions for places [B, T]; of an odd width the last channel stays as it is."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, dtype=x.dtype, device=x.device) / max(half, 1))
    angles = place[:, None, :, None].to(x.dtype) * rates
    cosines, sines = angles.cos(), angles.sin()
    x = x.masked_fill(x.isnan(), 0.0)
    one, other, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((one * cosines - other * sines, other * cosines + one * sines, rest), dim=-1)


def from_first_kept(layout: Layout, gone: int) -> Layout:
    """The layout counted from the first kept key on, so that every place in a document stays what it was."""
    name = f"after {gone}"
    # All layers have forgotten the same tokens.
    if name not in layout.derived:
        layout.derived[name] = Layout(
            position=layout.position - gone,
            start=layout.start - gone,
            key_start=layout.key_start[:, gone:] - gone,
            at_end=layout.at_end,
        )
    made: Layout = layout.derived[name]
    return made
