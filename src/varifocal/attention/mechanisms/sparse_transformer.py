"""Near keys and every stride-th far one: Child et al., Sparse Transformers, arXiv:1904.10509."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from varifocal.attention.mechanisms.base import Call, Mechanism, MechanismConfig, Scale
from varifocal.attention.mechanisms.variant import Variant
from varifocal.equations.branches import Strided, Window
from varifocal.equations.branches.base import require_at_least
from varifocal.equations.equation import Equation


@dataclass(frozen=True, kw_only=True)
class SparseTransformerConfig(MechanismConfig):
    """The stride of the pattern, near the square root of the context."""

    stride: int = 128
    """The last `stride` keys are read, and before them every `stride`-th."""

    def __post_init__(self) -> None:
        require_at_least("stride", self.stride, 1)


class SparseTransformer(Mechanism[SparseTransformerConfig]):
    """The strided pattern, both of its halves merged into one softmax in every head."""

    name = "sparse_transformer"
    config_type = SparseTransformerConfig
    variants = (Variant({"stride": 5}),)

    def equation(self, call: Call) -> Equation:
        stride = self.config.stride
        return Equation((Window(stride) | Strided(stride),))

    @classmethod
    def scaled_options(cls, scale: Scale) -> dict[str, Any]:
        return {"stride": scale.root}

    def words(self) -> str:
        stride = self.config.stride
        return f"no gate: the last {stride} keys and before them every {stride}th"
