"""The conformance kit: `check` any causal attention, or `assert_conforms` in a test."""

from varifocal.attention.conformance import (
    ROWS,
    Attention,
    Conformance,
    Finding,
    Row,
    assert_conforms,
    check,
    every_variant,
    subjects_of,
    variants_of,
)

__all__ = [
    "ROWS", "Attention", "Conformance", "Finding", "Row", "assert_conforms", "check", "every_variant",
    "subjects_of", "variants_of",
]  # fmt: skip
