"""The latest readings, up to a number of bytes, so that looking at another head does not read the text again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

from varifocal.explorer.reading import Reading


class Readings:
    """Forgets the least recently used readings until the rest fit; the newest always stays."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.kept: OrderedDict[Hashable, Reading] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Reading]) -> Reading:
        """The reading of that key; it is made if it is not kept."""
        if key not in self.kept:
            self.kept[key] = make()
        self.kept.move_to_end(key)
        while len(self.kept) > 1 and self.bytes() > self.most_bytes:
            self.kept.popitem(last=False)
        return self.kept[key]

    def bytes(self) -> int:
        """The bytes of all readings that are kept now."""
        return sum(reading.size() for reading in self.kept.values())
