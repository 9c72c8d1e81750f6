"""What the kernels share: which keys each branch adds to the branch inside it, and where they are.

Branches are put in order from the inside out. Where one lies inside the next (no key has less weight in the outer
one), the outer one reads only what is left, its ring: the weights of rings add up to those of branches. So a window
inside causal attention costs one attention, and the state of the softmax after the window is that of the window.

    rho_rij = omega_rij - omega_(r-1)ij        omega of a branch: the largest of 1[x < window], 1[y < prefix] and
                                               clamp((width - x) / edge, 0, 1) 1[x < limit],
                                               x = position - j, y = j - start

A branch that does not lie so begins a chain of its own, with nothing inside. Kinds of branches are bits of one number,
which a kernel is compiled for; sizes are not. A ring has seven bits: five of what follows, and two for the
branch's number in the call.
"""

import triton
import triton.language as tl

EVERY = tl.constexpr(1)
"""Reads every visible key, in every head."""
WINDOW = tl.constexpr(2)
PREFIX = tl.constexpr(4)
SOFT = tl.constexpr(8)
CONTINUES = tl.constexpr(16)
"""The ring before it lies inside."""
PLAIN = tl.constexpr(0)
"""Each row of keys is one document, read to its end: places are known."""
AT_END = tl.constexpr(1)
"""The queries are the last ones of each row; documents make a difference."""
ANYWHERE = tl.constexpr(2)
"""Positions are given."""

FAR = tl.constexpr(1 << 30)
"""Farther than any key: sizes are at most that."""
LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit
def places(POS, START, b, i, T, S, LAYOUT: tl.constexpr):
    """Position and start of rows i of T; rows see the keys start <= j <= position."""
    if LAYOUT == ANYWHERE:
        pos = tl.load(POS + b.to(tl.int64) * T + i)
    else:
        pos = i + (S - T)
    if LAYOUT == PLAIN:
        start = i * 0
    else:
        start = tl.load(START + b.to(tl.int64) * T + i)
    return pos, start


@triton.jit
def sizes_of(SIZES, EDGES, r: tl.constexpr, h, H):
    """Window, prefix, limit and edge of ring r in head h."""
    at = SIZES + (r * H + h) * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(EDGES + r)


@triton.jit
def widths_of(WIDTH, b, h, i, B, H, T, sees, KIND: tl.constexpr):
    """The soft window of each row; 0 for a branch without one."""
    if SOFT & KIND:
        one = ((KIND >> 5) & 3) * B.to(tl.int64) + b
        return tl.load(WIDTH + (one * H + h) * T + i, mask=sees, other=0.0)
    else:
        return 0.0


@triton.jit
def rows(width, KIND: tl.constexpr):
    """Widths as a column beside a tile whose first dimension is rows."""
    return width[:, None] if SOFT & KIND else width


@triton.jit
def columns(width, KIND: tl.constexpr):
    """Widths as a row beside a tile whose second dimension is rows of queries."""
    return width[None, :] if SOFT & KIND else width


@triton.jit
def whole(x, y, window, prefix, KIND: tl.constexpr):
    """Where a window or a prefix reads with the weight 1. Not for a branch of every key, nor for one with neither."""
    if (WINDOW & KIND) != 0 and (PREFIX & KIND) != 0:
        return (x < window) | (y < prefix)
    elif WINDOW & KIND:
        return x < window
    else:
        return y < prefix


@triton.jit
def soft(x, y, window, prefix, limit, edge, width, KIND: tl.constexpr):
    """The weight of a branch with a soft window."""
    weight = tl.minimum(tl.maximum((width - x) / edge, 0.0), 1.0)
    weight = tl.where(x < limit, weight, 0.0)
    if (WINDOW | PREFIX) & KIND:
        weight = tl.where(whole(x, y, window, prefix, KIND), 1.0, weight)
    return weight


@triton.jit
def ring(
    keep,
    x,
    y,
    window,
    prefix,
    limit,
    edge,
    width,
    window1,
    prefix1,
    limit1,
    edge1,
    width1,
    KIND: tl.constexpr,
    INNER: tl.constexpr,
):
    """Which of the pairs `keep` a ring reads, and with what weight (a number that means nothing without soft windows).

    x is the distance of a key, y its place in the document; numbers with a 1 are of the branch inside.
    """
    if SOFT & KIND:
        weight = soft(x, y, window, prefix, limit, edge, width, KIND)
        if INNER:
            weight = tl.where(whole(x, y, window1, prefix1, INNER), 0.0, weight)
        return keep & (weight > 0), weight
    else:
        if (WINDOW | PREFIX) & KIND:
            keep = keep & whole(x, y, window, prefix, KIND)
        if SOFT & INNER:
            weight = 1 - soft(x, y, window1, prefix1, limit1, edge1, width1, INNER)
            return keep & (weight > 0), weight
        else:
            if INNER:
                keep = keep & (whole(x, y, window1, prefix1, INNER) == 0)
            return keep, 1.0


@triton.jit
def reach(pos, start, window, limit, edge, width, KIND: tl.constexpr):
    """How many of the nearest keys of each row have any weight, and how many are sure to have all of it."""
    if EVERY & KIND:
        near = pos - start + 1
        full = near
    else:
        near = pos * 0
        full = near
        if WINDOW & KIND:
            near = near + window
            full = near
        if SOFT & KIND:
            cut = limit.to(tl.float32)
            near = tl.maximum(near, tl.ceil(tl.minimum(width, cut)).to(tl.int32))
            full = tl.maximum(full, tl.floor(tl.minimum(width - edge, cut)).to(tl.int32))
    return near, full


@triton.jit
def key_tiles(
    pos,
    start,
    window,
    prefix,
    limit,
    edge,
    width,
    window1,
    prefix1,
    limit1,
    edge1,
    width1,
    BN: tl.constexpr,
    KIND: tl.constexpr,
    INNER: tl.constexpr,
):
    """Tiles of keys that a ring has for these rows: (prefix from, count; near from; whole from, to; near to).

    Between `whole from` and `whole to` every row reads every key with the weight 1.
    """
    sees = start <= pos
    near, full = reach(pos, start, window, limit, edge, width, KIND)
    begin = tl.min(tl.where(sees, tl.maximum(start, pos - near + 1), FAR))
    filled = tl.max(tl.maximum(start, pos - full + 1))
    if INNER:
        near1, full1 = reach(pos, start, window1, limit1, edge1, width1, INNER)
        end = tl.max(tl.where(sees, pos - full1, -1)) + 1
        free = tl.min(tl.where(sees, pos - near1, -1)) + 1
        if PREFIX & INNER:
            filled = tl.maximum(filled, tl.max(start) + prefix1)
    else:
        end = tl.max(tl.where(sees, pos, -1)) + 1
        free = tl.min(tl.where(sees, pos, -1)) + 1
    last = (tl.maximum(end, 0) + BN - 1) // BN
    first = tl.minimum(begin // BN, last)
    whole_from = tl.minimum(tl.maximum((filled + BN - 1) // BN, first), last)
    whole_to = tl.minimum(tl.maximum(tl.maximum(free, 0) // BN, whole_from), last)
    if (PREFIX & KIND) != 0:
        origin = tl.min(tl.where(sees, start, FAR))
        prefix_from = tl.minimum(origin // BN, first)
        least = tl.max(tl.where(sees, start, 0)) + prefix
        if PREFIX & INNER:  # it may have read the same keys
            least = tl.where(prefix1 >= prefix, 0, least)
        prefix_count = tl.minimum((least + BN - 1) // BN, first) - prefix_from
        prefix_count = tl.where(prefix > 0, tl.maximum(prefix_count, 0), 0)
    else:
        prefix_from = first
        prefix_count = first * 0
    return prefix_from, prefix_count, first, whole_from, whole_to, last


@triton.jit
def clipped(tile, first, last):
    """A bound of tiles, brought into first..last: what lies between two bounds stays between them."""
    return tl.minimum(tl.maximum(tile, first), last)


@triton.jit
def masked_tile(t, prefix_from, prefix_count, first, whole_from, whole_to):
    """The t-th of the tiles in which some pair may be left out."""
    head = prefix_count + whole_from - first
    beyond = tl.where(t < head, first + t - prefix_count, whole_to + t - head)
    return tl.where(t < prefix_count, prefix_from + t, beyond)


@triton.jit
def load_rows(
    base, first, limit, stride, SEEN, N: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, MASKED: tl.constexpr
):
    """[N, DP] rows from `first` on; 0 beyond `limit`, for rows that SEEN (if there is one) denies, and beyond D."""
    row = tl.arange(0, N)
    col = tl.arange(0, DP)
    at = base + tl.cast(first, tl.int64) * stride + (row[:, None] * stride + col[None, :])
    row = first + row
    if MASKED:
        there = row < limit
        if SEEN is not None:
            there = there & (tl.load(SEEN + row, mask=there, other=0) != 0)
        mask = there[:, None]
        if DP != D:
            mask = mask & (col[None, :] < D)
        return tl.load(at, mask=mask, other=0.0)
    elif DP != D:
        return tl.load(at, mask=col[None, :] < D, other=0.0)
    else:
        return tl.load(at)
