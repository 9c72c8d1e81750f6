"""What a layer remembers of past tokens, one kind a file."""

from varifocal.attention.memories.base import Memory, Remembered, TakesTokens
from varifocal.attention.memories.keys_and_values import KeysAndValues, RankedBlocks
from varifocal.attention.memories.recent import RecentKeys
from varifocal.attention.memories.summaries import SegmentSummaries

__all__ = ["KeysAndValues", "Memory", "RankedBlocks", "RecentKeys", "Remembered", "SegmentSummaries", "TakesTokens"]
