"""The sizes of tiles that each kernel is launched with, for each kind of GPU.

Nothing here was timed: no GPU has run these kernels. Tiles were chosen by what ptxas says of them, for causal
attention, windows, soft windows and documents: first that no register is spilled, then the larger tile, then more
blocks at once.
`python -m tests.gpu_check.one_pass compile` prints the table.

- Matrix units of sm_90 and sm_100 read operands from shared memory or tensor memory, so larger tiles leave registers
  over; on sm_80 and sm_86 both operands pass through registers, and 32 keys at a time are what fits.
- Gradients of keys and values hold two sums, [keys, channels] each, and three numbers for every query of a tile in each
  thread, which are columns of its pairs there: hence the few queries at a time, and eight warps for 128 channels.
- With documents a kernel looks up which keys there are, and what it reads passes through shared memory once more: the
  tile of query gradients is smaller then, to stay within the 99 KB of an sm_86.
- float32 has no matrix unit at full precision: small tiles, whose products are plain multiplications.
- 256 channels are twice the sums: half the tile. (Of 64 keys triton 3.7.1 makes an empty kernel for sm_100.)
- What ptxas still spills at 64 and 128 channels, up to 44 bytes a thread but none on sm_90, are addresses of a
  program's own rows: put aside once before the loops and read after them, as its machine code shows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """How a program is cut, and what it may use."""

    queries: int
    keys: int
    warps: int
    stages: int
    """Tiles that are on their way from memory at the same time."""


INTERPRETED = {"forward": Tile(32, 16, 1, 1), "queries": Tile(16, 32, 1, 1), "keys": Tile(16, 32, 1, 1)}
"""Small, and of three shapes: what is wrong with one tile beside another shows at a length of 33 already."""

FEW_QUERIES = 16
"""So many queries at most share a tile of 16, the least that matrix units take, when the keys are split."""
SPLIT = Tile(16, 64, 4, 2)
INTERPRETED_SPLIT = Tile(16, 16, 1, 1)
LEAST_SHARE, MOST_SHARES = 256, 64
"""Keys of a program at least, and programs of a head at most."""
INTERPRETED_SHARE = 32

AMPERE, HOPPER = 80, 90
"""The first compute capability of each kind: mma.sync up to 89; wgmma and tcgen05 from 90 on."""

TILES: dict[tuple[str, int, int], Tile] = {
    ("forward", AMPERE, 64): Tile(64, 32, 4, 2),
    ("queries", AMPERE, 64): Tile(64, 32, 4, 2),
    ("keys", AMPERE, 64): Tile(32, 64, 4, 2),
    ("forward", AMPERE, 128): Tile(128, 32, 8, 2),
    ("queries", AMPERE, 128): Tile(128, 32, 8, 2),
    ("keys", AMPERE, 128): Tile(32, 64, 8, 2),
    ("forward", AMPERE, 256): Tile(64, 32, 8, 1),
    ("queries", AMPERE, 256): Tile(32, 32, 8, 1),
    ("keys", AMPERE, 256): Tile(16, 32, 8, 1),
    ("forward", HOPPER, 64): Tile(64, 64, 4, 2),
    ("queries", HOPPER, 64): Tile(64, 32, 4, 2),
    ("keys", HOPPER, 64): Tile(32, 64, 4, 2),
    ("forward", HOPPER, 128): Tile(128, 64, 8, 2),
    ("queries", HOPPER, 128): Tile(128, 32, 8, 2),
    ("keys", HOPPER, 128): Tile(32, 64, 8, 2),
    ("forward", HOPPER, 256): Tile(64, 32, 8, 2),
    ("queries", HOPPER, 256): Tile(64, 32, 8, 2),
    ("keys", HOPPER, 256): Tile(32, 32, 8, 2),
}
"""By kernel, kind of GPU and channels at most, for numbers of two bytes."""

FLOAT32 = {64: Tile(16, 32, 4, 1), 128: Tile(16, 16, 8, 1), 256: Tile(16, 16, 8, 1)}
"""By channels at most, for float32, all kernels and GPUs."""


def tile_of(kernel: str, *, width: int, bytes_each: int, capability: int, documents: bool) -> Tile:
    """The tile of a kernel ("forward", "queries" or "keys") for heads of `width` channels, a power of two."""
    most = max(width, 64)
    if bytes_each == 4:
        return FLOAT32[most]
    kind = HOPPER if capability >= HOPPER else AMPERE
    if documents and (kernel, kind, most) == ("queries", AMPERE, 128):
        return Tile(64, 32, 8, 2)
    return TILES[kernel, kind, most]
