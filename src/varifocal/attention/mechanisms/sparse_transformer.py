"""Near keys and every stride-th far one: Child et al., Sparse Transformers, arXiv:1904.10509."""

from __future__ import annotations

from dataclasses import dataclass

from varifocal.attention.mechanisms.base import Call, Mechanism, MechanismConfig, MechanismOutput
from varifocal.equations.branches import Strided, Window
from varifocal.equations.branches.base import require_at_least


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

    def focus(self, call: Call) -> MechanismOutput:
        stride = self.config.stride
        return MechanismOutput(call.attend(Window(stride) | Strided(stride)).output)
