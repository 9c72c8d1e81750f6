"""The keys and values of the last tokens only, for a layer whose queries look back a bounded way."""

from __future__ import annotations

from varifocal.attention.memories.base import Memory
from varifocal.attention.memories.rows import Rows


class RecentKeys(Memory):
    """Keys and values of as many tokens as the next query can read besides its own."""

    def __init__(self, reach: int) -> None:
        super().__init__()
        self.reach = reach
        """How many keys back, its own included, a query ever looks."""

    @property
    def keeps_all(self) -> bool:
        return False

    def kept(self, length: int) -> float:
        return min(length, self.reach)

    def new_rows(self) -> Rows:
        """With room for a window: of a fixed number of tokens it never holds all."""
        return Rows()

    def forget_unread(self) -> None:
        if not self.records_past:
            for rows in self.rows.values():
                # The next query brings its own key, so one fewer is enough.
                rows.keep_last(self.reach - 1)

    def crop(self, tokens: int) -> None:
        kept = self.rows["k"].length if "k" in self.rows else 0
        forgotten = self.length - kept
        if tokens and forgotten and kept - tokens < self.reach - 1:
            raise ValueError(
                f"cannot take back {tokens} tokens: a window of {self.reach} keys forgot {forgotten} before them; "
                "call activate_past_recording() on the cache before them"
            )
        super().crop(tokens)
        for rows in self.rows.values():
            rows.keep_last(self.reach - 1)
