"""Own segment in full, earlier segments in summary: Ren et al., Combiner, arXiv:2107.05768."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from varifocal.attention.mechanisms.base import (
    Call,
    Mechanism,
    MechanismConfig,
    MechanismOutput,
    SummarizedSegments,
)
from varifocal.equations.branches import Segments
from varifocal.equations.branches.base import require_at_least


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

    def remember(self, x: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """The queries [B, H, T, D]: a segment's summary is what its pooled queries read."""
        return q

    def summarized_segments(self, k: Tensor, v: Tensor, memory: Tensor | None) -> SummarizedSegments | None:
        return None if memory is None else SummarizedSegments(memory, k, v, self.config.segment)

    def focus(self, call: Call) -> MechanismOutput:
        branch = Segments(self.config.segment, queries=self.needed_memory(call), summaries=call.pooled)
        return MechanismOutput(call.attend(branch).output)
