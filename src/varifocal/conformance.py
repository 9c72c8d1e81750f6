"""The conformance kit: `check` any causal attention, or `assert_conforms` in a test."""

from varifocal.attention.conformance import (
    ROWS,
    VARIANTS,
    Attention,
    Conformance,
    Finding,
    Row,
    Variant,
    assert_conforms,
    check,
    variants_of,
)

__all__ = [
    "ROWS", "VARIANTS", "Attention", "Conformance", "Finding", "Row", "Variant", "assert_conforms", "check",
    "variants_of",
]  # fmt: skip
