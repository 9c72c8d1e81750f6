"""Own segment in full, earlier segments in summary: Ren et al., Combiner, arXiv:2107.05768."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from varifocal.attention.mechanisms.base import Call, Mechanism, MechanismConfig, Overhead, Scale
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.memories import SegmentSummaries
from varifocal.equations.branches import Segments
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.equation import Equation


@dataclass(frozen=True, kw_only=True)
class CombinerConfig(MechanismConfig):
    """The length of a segment, near the square root of the longest context; fixed, never from the batch."""

    segment: int = 64

    def __post_init__(self) -> None:
        require_at_least("segment", self.segment, 1)


class Combiner(Mechanism[CombinerConfig]):
    """One softmax over the keys of the query's segment and one summary of each earlier segment."""

    name = "combiner"
    config_type = CombinerConfig
    variants = (Variant({"segment": 4}),)

    def memory(self) -> SegmentSummaries:
        return SegmentSummaries(self.config.segment)

    def equation(self, call: Call) -> Equation:
        return Equation((Segments(self.config.segment, queries=self.note(call, "queries")),))

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        return {"segment": scale.root}

    def words(self) -> str:
        return f"no gate: its own segment of {self.config.segment} keys, and a summary of each earlier one"

    def overhead(self, length: int, bytes_per_number: int) -> Overhead:
        heads, width = self.shape.heads, self.shape.head_width
        return Overhead(traffic=4.0 * heads * width, operators=43, kept=16.0 * heads)
