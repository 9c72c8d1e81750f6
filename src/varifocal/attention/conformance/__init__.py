"""The conformance kit: holds any causal attention to what training and decoding rely on."""

from varifocal.attention.conformance.check import Conformance, Finding, assert_conforms, check
from varifocal.attention.conformance.rows import ROWS, Row
from varifocal.attention.conformance.subject import Attention
from varifocal.attention.conformance.variants import VARIANTS, Variant, variants_of

__all__ = [
    "ROWS", "VARIANTS", "Attention", "Conformance", "Finding", "Row", "Variant", "assert_conforms", "check",
    "variants_of",
]  # fmt: skip
