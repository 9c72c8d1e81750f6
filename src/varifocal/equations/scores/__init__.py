"""How a query rates a key."""

from varifocal.equations.scores.dot import Dot, HeadScale, Score
from varifocal.equations.scores.pair_gate import PairGate

__all__ = ["Dot", "HeadScale", "PairGate", "Score"]
