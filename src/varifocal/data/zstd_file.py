"""A .zst file read to its true end: all frames, and an error if the last one is cut off.

The stream readers of the usual libraries stop after the first frame, and take a truncated file for a shorter one.
"""

from __future__ import annotations

import io
from typing import IO

BLOCK = 1 << 20


class ZstdFile(io.RawIOBase):
    """The decompressed content of a .zst file."""

    def __init__(self, compressed: IO[bytes]) -> None:
        super().__init__()
        import zstandard

        self.compressed = compressed
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self.frame = self.decompressor.decompressobj()
        self.within, self.waiting, self.ready = False, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self.ready and self._decompress_some():
            pass
        count = min(len(buffer), len(self.ready))
        buffer[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count

    def _decompress_some(self) -> bool:
        """Fill `ready` from the next bytes of the file; False at its end."""
        given = self.waiting or self.compressed.read(BLOCK)
        self.waiting = b""
        if not given:
            if self.within:
                raise EOFError("the compressed file ends in the middle of a frame")
            return False
        self.within = True
        self.ready = self.frame.decompress(given)
        if self.frame.eof:
            self.waiting = self.frame.unused_data
            self.frame, self.within = self.decompressor.decompressobj(), False
        return True

    def close(self) -> None:
        self.compressed.close()
        super().close()
