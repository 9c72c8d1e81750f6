"""How a query rates a key."""

from varifocal.equations.scores.base import Pairs, Score
from varifocal.equations.scores.distance_bias import DistanceBias
from varifocal.equations.scores.dot import Dot, HeadScale
from varifocal.equations.scores.own_features import OwnFeatures
from varifocal.equations.scores.pair_gate import PairGate

__all__ = ["DistanceBias", "Dot", "HeadScale", "OwnFeatures", "PairGate", "Pairs", "Score"]
