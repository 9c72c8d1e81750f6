"""Varifocal: attention that adapts its focus between near and far.

`attend` evaluates the one equation that all mechanisms share; `make_mechanism` gives a trainable module by name.
"""

from varifocal.attention.attend import attend
from varifocal.attention.gates import GateConfig
from varifocal.attention.mechanisms import (
    MECHANISMS,
    HeadShape,
    Mechanism,
    MechanismConfig,
    MechanismOutput,
    make_mechanism,
)
from varifocal.equations.branches import (
    Branch,
    Causal,
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
    "MECHANISMS", "Attended", "Branch", "Causal", "Dot", "GateConfig", "HeadScale", "HeadShape", "Indexer", "Mechanism",
    "MechanismConfig", "MechanismOutput", "PairGate", "Prefix", "RandomBlocks", "Score", "Segments", "SoftWindow",
    "Strided", "TopK", "Window", "attend", "make_mechanism",
]  # fmt: skip
