"""The readings that were made last, up to a number of bytes: looking at another head reads no text again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from varifocal.explorer.reading import Reading


class Readings:
    """Forgets what was not asked for the longest, until the rest fits; the newest always stays."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.kept: OrderedDict[Hashable, Reading] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Reading]) -> Reading:
        """The reading of that key, made if it is not there."""
        if key not in self.kept:
            self.kept[key] = make()
        self.kept.move_to_end(key)
        while len(self.kept) > 1 and self.bytes() > self.most_bytes:
            self.kept.popitem(last=False)
        return self.kept[key]

    def bytes(self) -> int:
        """What is held now."""
        return sum(reading.size() for reading in self.kept.values())
