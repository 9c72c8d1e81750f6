"""Train, validation or test: decided by a document's text alone."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

SPLITS = ("train", "validation", "test")


@dataclass(frozen=True)
class Splits:
    """The shares of train, validation and test."""

    train: float = 0.8
    validation: float = 0.1
    test: float = 0.1

    def __post_init__(self) -> None:
        shares = self.train, self.validation, self.test
        if min(shares) < 0 or not math.isclose(sum(shares), 1.0, abs_tol=1e-9):
            raise ValueError(f"shares of train, validation and test must be 0 or more and sum to 1, got {shares}")

    def of(self, text: str | bytes) -> str:
        """The split of a document: the same for the same text, whatever stands around it and wherever it is read.

        The first 8 bytes of BLAKE2b of the UTF-8 text, as a fraction of all, fall below `train`, below `train` +
        `validation`, or above.
        """
        content = text.encode("utf-8") if isinstance(text, str) else text
        # `person` makes this a hash of its own, unrelated to any checksum of the same text.
        digest = hashlib.blake2b(content, digest_size=8, person=b"varifocal-split").digest()
        fraction = int.from_bytes(digest, "big") / 2**64
        if fraction < self.train:
            return "train"
        return "validation" if fraction < self.train + self.validation else "test"

    def as_json(self) -> dict[str, float]:
        return {"train": self.train, "validation": self.validation, "test": self.test}


def splits_from(text: str | Mapping[str, float]) -> Splits:
    """Shares written as `80/10/10` (any three numbers of which the sum is the whole), or as a mapping."""
    if not isinstance(text, str):
        return Splits(**text)
    try:
        parts = [float(part) for part in text.split("/")]
        total = math.fsum(parts)
        train, validation, test = (part / total for part in parts)
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"splits are three numbers such as 80/10/10, got {text!r}") from error
    return Splits(train, validation, test)
