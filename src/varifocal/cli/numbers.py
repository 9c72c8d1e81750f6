"""Numbers as options give them."""

from __future__ import annotations


def parse_lengths(text: str) -> tuple[int, ...]:
    """Whole numbers above 0, separated by commas."""
    try:
        lengths = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError as error:
        raise ValueError(f"lengths must be whole numbers separated by commas, got {text!r}") from error
    if not lengths or lengths[0] < 1:
        raise ValueError(f"lengths must be at least 1, got {text!r}")
    return lengths
