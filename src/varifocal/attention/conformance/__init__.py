"""The conformance kit: holds any causal attention to what training and decoding rely on."""

from varifocal.attention.conformance.check import Conformance, Finding, assert_conforms, check
from varifocal.attention.conformance.imported import subjects_of
from varifocal.attention.conformance.rows import ROWS, Row
from varifocal.attention.conformance.subject import Attention
from varifocal.attention.conformance.variants import every_variant, variants_of

__all__ = [
    "ROWS", "Attention", "Conformance", "Finding", "Row", "assert_conforms", "check", "every_variant",
    "subjects_of", "variants_of",
]  # fmt: skip
