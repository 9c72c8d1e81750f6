"""The public names of varifocal and where they live; `varifocal` itself loads them when one is first asked for."""

from varifocal.attention.attend import attend, lay_out
from varifocal.attention.backends import ReferenceWarning
from varifocal.attention.forced_gates import force_gates
from varifocal.attention.gate_metrics import GateStatistics, gate_gradient_norms, gate_statistics
from varifocal.attention.gates import Gate, GateConfig, set_gate_warmth
from varifocal.attention.mechanisms import (
    MECHANISMS,
    HeadShape,
    Mechanism,
    MechanismConfig,
    MechanismOutput,
    make_mechanism,
    register,
)
from varifocal.attention.mechanisms.ablation import Ablation
from varifocal.attention.mechanisms.base import Call, Scale, two_way
from varifocal.attention.mechanisms.variant import Variant
from varifocal.attention.memories import KeysAndValues, Memory, Remembered
from varifocal.equations.branches import (
    Branch,
    Causal,
    Cluster,
    Compressed,
    FixedBranch,
    Indexer,
    OwnBlock,
    Prefix,
    RandomBlocks,
    Segments,
    SoftWindow,
    Strided,
    TopK,
    Window,
)
from varifocal.equations.equation import Equation
from varifocal.equations.layout import Layout
from varifocal.equations.normalizers import Entmax, Polynomial, SinkLogit
from varifocal.equations.problem import Attended, Shortcuts
from varifocal.equations.scores import DistanceBias, Dot, HeadScale, OwnFeatures, PairGate, Pairs, Score

__all__ = [
    "MECHANISMS", "Ablation", "Attended", "Branch", "Call", "Causal", "Cluster", "Compressed", "DistanceBias",
    "Dot", "Entmax", "Equation", "FixedBranch", "Gate", "GateConfig", "GateStatistics", "HeadScale", "HeadShape",
    "Indexer", "KeysAndValues", "Layout", "Mechanism", "MechanismConfig", "MechanismOutput", "Memory", "OwnBlock",
    "OwnFeatures", "PairGate", "Pairs", "Polynomial", "Prefix", "RandomBlocks", "ReferenceWarning", "Remembered",
    "Scale", "Score", "Segments", "Shortcuts", "SinkLogit", "SoftWindow", "Strided", "TopK", "Variant", "Window",
    "attend", "force_gates", "gate_gradient_norms", "gate_statistics", "lay_out", "make_mechanism", "register",
    "set_gate_warmth", "two_way",
]  # fmt: skip
