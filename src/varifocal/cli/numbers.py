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


def parse_count(text: str) -> float:
    """A number such as 250000, 3.3B, 500M or 1e9."""
    units = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    digits, unit = (text[:-1], units[text[-1].lower()]) if text[-1:].lower() in units else (text, 1.0)
    try:
        count = float(digits.replace("_", "")) * unit
    except ValueError as error:
        raise ValueError(f"expected a number such as 500M, 10B or 250000, got {text!r}") from error
    if not 0 < count < float("inf"):
        raise ValueError(f"expected a finite number above 0, got {text!r}")
    return count
