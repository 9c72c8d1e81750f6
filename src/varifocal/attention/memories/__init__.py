"""What a layer remembers of past tokens, one kind a file."""

from varifocal.attention.memories.associations import RememberedSegments, SegmentsInMatrix
from varifocal.attention.memories.base import Memory, Remembered, RememberedHeads, TakesTokens
from varifocal.attention.memories.keys_and_values import KeysAndValues, RankedBlocks
from varifocal.attention.memories.recent import RecentKeys
from varifocal.attention.memories.split import SplitKeys
from varifocal.attention.memories.summaries import SegmentSummaries

__all__ = [
    "KeysAndValues", "Memory", "RankedBlocks", "RecentKeys", "Remembered", "RememberedHeads", "RememberedSegments",
    "SegmentSummaries", "SegmentsInMatrix", "SplitKeys", "TakesTokens",
]  # fmt: skip
