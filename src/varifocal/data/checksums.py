"""Checksums of a file chunk by chunk, so that a large file can be verified where it is read and when it is read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy
from numpy.typing import NDArray

CHUNK = 1 << 20
"""Bytes that share a checksum: hashed in about a millisecond, and 10 GB need a table of 160 kB in the manifest."""
WIDTH = 8
"""Bytes of a checksum."""


class DamagedDataError(ValueError):
    """A file of a data set is not the one that was written."""


def checksum(chunk: bytes | memoryview) -> bytes:
    """BLAKE2b of one chunk."""
    return hashlib.blake2b(chunk, digest_size=WIDTH).digest()


def file_checksums(path: Path) -> str:
    """The checksums of all chunks of a file, one after the other, in hexadecimal."""
    found = bytearray()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            found += checksum(chunk)
    return found.hex()


class CheckedFile:
    """A memory-mapped file; `require` verifies what is about to be read, once."""

    def __init__(self, path: Path, *, size: int, checksums: str) -> None:
        self.path, self.size = path, size
        try:
            found = path.stat().st_size
        except OSError as error:
            raise DamagedDataError(
                f"{path} is missing from the data set; prepare it again ({error.strerror})"
            ) from error
        if found != size:
            raise DamagedDataError(
                f"{path} has {found} bytes where {size} were written: it is truncated or not of this data set; "
                "prepare it again or copy it anew"
            )
        try:
            self._wanted = bytes.fromhex(checksums)
        except ValueError as error:
            raise DamagedDataError(f"the manifest's checksums of {path} are not hexadecimal: {error}") from error
        if len(self._wanted) != WIDTH * -(-size // CHUNK):
            raise DamagedDataError(f"the manifest's checksums of {path} do not fit its size; prepare the data again")
        self.content: NDArray[numpy.uint8] = (
            numpy.memmap(path, dtype=numpy.uint8, mode="r").view(numpy.ndarray)
            if size
            else numpy.empty(0, dtype=numpy.uint8)
        )
        self._verified = bytearray(-(-size // CHUNK))
        self._left = len(self._verified)

    def require(self, begin: int, end: int) -> None:
        """DamagedDataError unless the chunks of bytes begin to end are as written."""
        if not self._left or end <= begin:
            return
        for chunk in range(begin // CHUNK, (end - 1) // CHUNK + 1):
            if not self._verified[chunk]:
                self._verify(chunk)

    def require_all(self) -> None:
        """DamagedDataError unless the whole file is as written."""
        self.require(0, self.size)

    def require_ends(self) -> None:
        """DamagedDataError unless the first and the last chunk are as written: what a foreign file would not have."""
        self.require(0, 1)
        self.require(self.size - 1, self.size)

    def _verify(self, chunk: int) -> None:
        found = checksum(self.content[chunk * CHUNK : (chunk + 1) * CHUNK].data)
        if found != self._wanted[chunk * WIDTH : (chunk + 1) * WIDTH]:
            raise DamagedDataError(
                f"{self.path} is not what was written: the checksum of megabyte {chunk} differs; "
                "prepare it again or copy it anew"
            )
        self._verified[chunk] = 1
        self._left -= 1
