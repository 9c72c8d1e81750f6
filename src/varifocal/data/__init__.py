"""Documents to tokens to batches; imports no other layer, and datatrove only to prepare."""

from varifocal.data.batches import Batches
from varifocal.data.checksums import DamagedDataError
from varifocal.data.dataset import Answers, PreparedData, TokenSplit, open_data
from varifocal.data.manifest import Manifest
from varifocal.data.packing import PADDING, PackedRows, Row, RowAnswers, Rows
from varifocal.data.splits import SPLITS, Splits

__all__ = [
    "PADDING", "SPLITS", "Answers", "Batches", "DamagedDataError", "Manifest", "PackedRows", "PreparedData", "Row",
    "RowAnswers", "Rows", "Splits", "TokenSplit", "open_data",
]  # fmt: skip
