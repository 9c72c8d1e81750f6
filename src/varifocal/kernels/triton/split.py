"""A few queries against many keys, as in decoding: the keys are split among programs, and their sums joined.

Outputs only. Every program reads its share of the keys once, for all branches: the sums of each ring are put down apart
from those of the others, and joined in the order of shares and rings, so that results are the same bit for bit.
"""

import triton
import triton.language as tl

from .forward import finish_ring, read_ring
from .rings import CONTINUES, LOG2E, NOTHING, places


@triton.jit(do_not_specialize=["B", "T", "S", "share"])
def read_shares(Q, K, V, SCALE, WIDTH, SIZES, EDGES, POS, START, SEEN, SUMS, NUMBERS,
                sqb, sqh, sqt, skb, skh, skt, svb, svh, svt, B, H, G, T, S, share, factor,
                D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, KINDS: tl.constexpr, LAYOUT: tl.constexpr,
                PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):  # fmt: skip
    """SUMS float32 [shares, M, B, H, T, D]; NUMBERS float32 [shares, M, 2, B, H, T], the sum of weights and their top.

    A share is a number of tiles of keys. Up to BM queries.
    """
    part, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = h // (H // G)
    rowing = tl.arange(0, BM)
    live = rowing < T
    i = tl.minimum(rowing, T - 1)
    col = tl.arange(0, DP)
    pos, start = places(POS, START, b, i, T, S, LAYOUT)
    sees = start <= pos
    wide = b.to(tl.int64)
    keys = K + wide * skb + g.to(tl.int64) * skh
    values = V + wide * svb + g.to(tl.int64) * svh
    seen = SEEN + wide * S if SEEN is not None else None
    at = Q + wide * sqb + h.to(tl.int64) * sqh + (i.to(tl.int64)[:, None] * sqt + col[None, :])
    q = tl.load(at, mask=col[None, :] < D, other=0.0) if DP != D else tl.load(at)
    scale2 = factor * LOG2E
    if SCALE is not None:
        scale2 = scale2 * tl.load(SCALE + h)
    row = (wide * H + h) * T + i
    many = B.to(tl.int64) * H * T
    kept = live[:, None] & (col[None, :] < D)
    for r in tl.static_range(M):
        acc = tl.zeros([BM, DP], tl.float32)
        total = tl.zeros([BM], tl.float32)
        top = tl.full([BM], NOTHING, tl.float32)
        acc, total, top = read_ring(
            acc, total, top, q, keys, values, pos, start, sees, WIDTH, SIZES, EDGES, seen, b, h, i, B, H, T, S, skt,
            svt, scale2, part * share, part * share + share, r, KINDS, D, DP, BN, PRECISION,
        )  # fmt: skip
        ring = part * M + r
        tl.store(SUMS + (ring * many + row)[:, None] * D + col[None, :], acc, mask=kept)
        tl.store(NUMBERS + 2 * ring * many + row, total, mask=live)
        tl.store(NUMBERS + (2 * ring + 1) * many + row, top, mask=live)


@triton.jit(do_not_specialize=["B", "T", "shares"])
def join_shares(SUMS, NUMBERS, WEIGHTS, SINK, OUT, MEANS, LOGSUMEXP, sob, soh, sot, B, H, T, shares,
                D: tl.constexpr, DP: tl.constexpr, M: tl.constexpr, KINDS: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """The output, the logsumexp and the means of the inner branches, as `forward` writes them."""
    h, b = tl.program_id(0), tl.program_id(1)
    rowing = tl.arange(0, BM)
    live = rowing < T
    i = tl.minimum(rowing, T - 1)
    col = tl.arange(0, DP)
    wide = b.to(tl.int64)
    row = (wide * H + h) * T + i
    many = B.to(tl.int64) * H * T
    place = row[:, None] * D + col[None, :]
    kept = live[:, None] & (col[None, :] < D)
    acc = tl.zeros([BM, DP], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], NOTHING, tl.float32)
    for r in tl.static_range(M):
        if (CONTINUES & (KINDS >> (7 * r))) == 0:
            acc = tl.zeros([BM, DP], tl.float32)
            total = tl.zeros([BM], tl.float32)
            top = tl.full([BM], NOTHING, tl.float32)
        for part in tl.range(0, shares):
            ring = wide * 0 + part * M + r
            more = tl.load(NUMBERS + 2 * ring * many + row)
            height = tl.load(NUMBERS + (2 * ring + 1) * many + row)
            higher = tl.maximum(top, height)
            safe = tl.where(higher == NOTHING, 0.0, higher)
            old, new = tl.exp2(top - safe), tl.exp2(height - safe)
            sums = tl.load(SUMS + (ring * many + row)[:, None] * D + col[None, :], mask=kept, other=0.0)
            acc = acc * old[:, None] + sums * new[:, None]
            total = total * old + more * new
            top = higher
        finish_ring(
            acc, total, top, WEIGHTS, SINK, OUT, MEANS, LOGSUMEXP, h, row, live, place, kept, many * D,
            wide * sob + h.to(tl.int64) * soh + (i.to(tl.int64)[:, None] * sot + col[None, :]), r, M, KINDS, False,
        )  # fmt: skip
