"""The sets of keys that queries may read, one idea a file."""

from varifocal.equations.branches.base import Branch, FixedBranch, Union, members
from varifocal.equations.branches.causal import Causal
from varifocal.equations.branches.cluster import Cluster
from varifocal.equations.branches.compressed import Associations, Compressed
from varifocal.equations.branches.own_block import OwnBlock
from varifocal.equations.branches.prefix import Prefix
from varifocal.equations.branches.random_blocks import RandomBlocks
from varifocal.equations.branches.segments import Segments
from varifocal.equations.branches.soft_window import SoftWindow
from varifocal.equations.branches.strided import Strided
from varifocal.equations.branches.top_k import Indexer, TopK
from varifocal.equations.branches.window import Window

__all__ = [
    "Associations", "Branch", "Causal", "Cluster", "Compressed", "FixedBranch", "Indexer", "OwnBlock", "Prefix",
    "RandomBlocks", "Segments", "SoftWindow", "Strided", "TopK", "Union", "Window", "members",
]  # fmt: skip
