"""Varifocal: attention that adapts its focus between near and far.

`attend` evaluates the one equation that all mechanisms share; `make_mechanism` gives a trainable module by name.
"""

from varifocal.attention.attend import attend
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
)
from varifocal.attention.pooled_keys import PooledKeys
from varifocal.attention.segment_summaries import SegmentSummaries
from varifocal.equations.branches import (
    Branch,
    Causal,
    FixedBranch,
    Indexer,
    Prefix,
    RandomBlocks,
    Segments,
    SoftWindow,
    Strided,
    TopK,
    Window,
)
from varifocal.equations.problem import Attended
from varifocal.equations.scores import Dot, HeadScale, PairGate, Score

__version__ = "0.1.0"

__all__ = [
    "MECHANISMS", "Attended", "Branch", "Causal", "Dot", "FixedBranch", "Gate", "GateConfig", "GateStatistics",
    "HeadScale", "HeadShape", "Indexer", "Mechanism", "MechanismConfig", "MechanismOutput", "PairGate",
    "PooledKeys", "Prefix", "RandomBlocks", "Score", "SegmentSummaries",
    "Segments", "SoftWindow", "Strided", "TopK", "Window",
    "attend", "force_gates", "gate_gradient_norms", "gate_statistics", "make_mechanism", "set_gate_warmth",
]  # fmt: skip
