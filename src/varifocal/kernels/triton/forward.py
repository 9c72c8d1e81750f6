"""The forward kernel: ring after ring, with the state of one online softmax."""

import triton
import triton.language as tl

from .rings import (
    CONTINUES,
    EVERY,
    LOG2E,
    NOTHING,
    SOFT,
    clipped,
    key_tiles,
    load_rows,
    masked_tile,
    places,
    ring,
    rows,
    sizes_of,
    widths_of,
)


@triton.jit
def read_tile(
    acc,
    total,
    top,
    q,
    keys,
    values,
    first,
    pos,
    start,
    sizes,
    width,
    sizes1,
    width1,
    S,
    sk,
    sv,
    SEEN,
    scale2,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
    KIND: tl.constexpr,
    INNER: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One step of the online softmax, over the keys of a tile; scores are to the base of 2."""
    # Of keys that nobody sees, which may hold NaN, scores are masked; values would be multiplied by 0.
    k = load_rows(keys, first, S, sk, None, BN, D, DP, MASKED)
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2
    if MASKED:
        j = first + tl.arange(0, BN)[None, :]
        x = pos[:, None] - j
        y = j - start[:, None]
        keep, weight = ring(
            (x >= 0) & (y >= 0), x, y, sizes[0], sizes[1], sizes[2], sizes[3], rows(width, KIND),
            sizes1[0], sizes1[1], sizes1[2], sizes1[3], rows(width1, INNER), KIND, INNER,
        )  # fmt: skip
        s = tl.where(keep, s, NOTHING)
        higher = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(higher == NOTHING, 0.0, higher)
        p = tl.exp2(s - safe[:, None])
        if SOFT & (KIND | INNER):
            p = tl.where(keep, p * weight, 0.0)
    else:
        higher = tl.maximum(top, tl.max(s, 1))
        safe = higher
        p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(top - safe)
    total = total * shrink + tl.sum(p, 1)
    acc = acc * shrink[:, None]
    v = load_rows(values, first, S, sv, SEEN, BN, D, DP, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, total, higher


@triton.jit
def read_ring(
    acc,
    total,
    top,
    q,
    keys,
    values,
    pos,
    start,
    sees,
    WIDTH,
    SIZES,
    EDGES,
    SEEN,
    b,
    h,
    i,
    B,
    H,
    T,
    S,
    sk,
    sv,
    scale2,
    FROM,
    TO,
    R: tl.constexpr,
    KINDS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All keys of ring R, or those in the tiles FROM..TO."""
    KIND: tl.constexpr = (KINDS >> (7 * R)) & 127
    INNER: tl.constexpr = ((KINDS << 7) >> (7 * R)) & 127 if CONTINUES & KIND else 0
    if EVERY & INNER:
        return acc, total, top  # nothing is left
    else:
        sizes = sizes_of(SIZES, EDGES, R, h, H)
        sizes1 = sizes_of(SIZES, EDGES, R - 1 if INNER else R, h, H)
        width = widths_of(WIDTH, b, h, i, B, H, T, sees, KIND)
        width1 = widths_of(WIDTH, b, h, i, B, H, T, sees, INNER)
        prefix_from, prefix_count, near, whole_from, whole_to, end = key_tiles(
            pos, start, sizes[0], sizes[1], sizes[2], sizes[3], width, sizes1[0], sizes1[1], sizes1[2], sizes1[3],
            width1,
            BN, KIND, INNER,
        )  # fmt: skip
        if FROM is not None:
            prefix_to = clipped(prefix_from + prefix_count, FROM, TO)
            prefix_from = clipped(prefix_from, FROM, TO)
            prefix_count = prefix_to - prefix_from
            near = clipped(near, FROM, TO)
            whole_from = clipped(whole_from, FROM, TO)
            whole_to = clipped(whole_to, FROM, TO)
            end = clipped(end, FROM, TO)
        for tile in tl.range(whole_from, whole_to):
            acc, total, top = read_tile(
                acc, total, top, q, keys, values, tile * BN, pos, start, sizes, width, sizes1, width1, S, sk, sv, SEEN,
                scale2, D, DP, BN, KIND, INNER, False, PRECISION,
            )  # fmt: skip
        for t in tl.range(0, prefix_count + (whole_from - near) + (end - whole_to)):
            tile = masked_tile(t, prefix_from, prefix_count, near, whole_from, whole_to)
            acc, total, top = read_tile(
                acc, total, top, q, keys, values, tile * BN, pos, start, sizes, width, sizes1, width1, S, sk, sv, SEEN,
                scale2, D, DP, BN, KIND, INNER, True, PRECISION,
            )  # fmt: skip
        return acc, total, top


@triton.jit
def finish_ring(acc, total, top, WEIGHTS, SINK, OUT, MEANS, LOGSUMEXP, h, row, live, place, kept, many, out,
                R: tl.constexpr, M: tl.constexpr, KINDS: tl.constexpr, SAVE: tl.constexpr):  # fmt: skip
    """Write what a branch comes to once ring R was read; after the last one, the output at `out`."""
    slot = (KINDS >> (7 * R + 5)) & 3
    nothing = total == 0.0
    tl.store(
        LOGSUMEXP + row * M + slot,
        tl.where(nothing, NOTHING, (tl.log2(tl.where(nothing, 1.0, total)) + top) / LOG2E),
        mask=live,
    )
    if SINK is not None:
        sink2 = tl.load(SINK + h).to(tl.float32) * LOG2E
        most = tl.maximum(top, sink2)
        safe = tl.where(most == NOTHING, 0.0, most)
        shrink = tl.exp2(top - safe)
        whole = total * shrink + tl.exp2(sink2 - safe)
        share = tl.where(nothing, 0.0, shrink / tl.where(nothing, 1.0, whole))
    else:
        share = 1.0 / tl.where(nothing, 1.0, total)
    mean = acc * share[:, None]
    # What is inside goes to memory, to save registers while the rest is read.
    if R < M - 1 or SAVE:
        tl.store(MEANS + R * many + place, mean.to(MEANS.dtype.element_ty), mask=kept)
    if R == M - 1:
        if WEIGHTS is not None:
            mean = mean * tl.load(WEIGHTS + row * M + slot).to(tl.float32)[:, None]
        if M > 1:
            tl.debug_barrier()
        for other in tl.static_range(M - 1):
            near = (KINDS >> (7 * other + 5)) & 3
            part = tl.load(MEANS + other * many + place, mask=kept, other=0.0).to(tl.float32)
            if WEIGHTS is not None:
                part = part * tl.load(WEIGHTS + row * M + near).to(tl.float32)[:, None]
            mean += part
        tl.store(OUT + out, mean.to(OUT.dtype.element_ty), mask=kept)


@triton.jit(do_not_specialize=["B", "T", "S"])
def forward(
    Q,
    K,
    V,
    WEIGHTS,
    SINK,
    SCALE,
    WIDTH,
    SIZES,
    EDGES,
    POS,
    START,
    SEEN,
    OUT,
    MEANS,
    LOGSUMEXP,
    sqb,
    sqh,
    sqt,
    skb,
    skh,
    skt,
    svb,
    svh,
    svt,
    sob,
    soh,
    sot,
    B,
    H,
    G,
    T,
    S,
    factor,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    KINDS: tl.constexpr,
    LAYOUT: tl.constexpr,
    SAVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """OUT [B, H, T, D]; MEANS [M, B, H, T, D], of each ring's branch (the last one only if SAVE); LOGSUMEXP [B, H,
    T, M].
    WEIGHTS [B, H, T, M], SINK [H], SCALE [H], POS and START [B, T] and SEEN [B, S] may be None; WIDTH float32
    [M, B, H, T]; SIZES int32 [M, H, 3] and EDGES float32 [M] of the rings, from the inside out.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    h, b = tl.program_id(1), tl.program_id(2)
    g = h // (H // G)
    rowing = tile * BM + tl.arange(0, BM)
    live = rowing < T
    i = tl.minimum(rowing, T - 1)  # rows that are not there repeat the last one
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
    place = row[:, None] * D + col[None, :]
    kept = live[:, None] & (col[None, :] < D)
    many = B.to(tl.int64) * H * T * D
    acc = tl.zeros([BM, DP], tl.float32)
    total = tl.zeros([BM], tl.float32)
    top = tl.full([BM], NOTHING, tl.float32)
    for r in tl.static_range(M):
        if (CONTINUES & (KINDS >> (7 * r))) == 0:
            acc = tl.zeros([BM, DP], tl.float32)
            total = tl.zeros([BM], tl.float32)
            top = tl.full([BM], NOTHING, tl.float32)
        acc, total, top = read_ring(
            acc, total, top, q, keys, values, pos, start, sees, WIDTH, SIZES, EDGES, seen, b, h, i, B, H, T, S, skt,
            svt,
            scale2, None, None, r, KINDS, D, DP, BN, PRECISION,
        )  # fmt: skip
        finish_ring(
            acc, total, top, WEIGHTS, SINK, OUT, MEANS, LOGSUMEXP, h, row, live, place, kept, many,
            wide * sob + h.to(tl.int64) * soh + (i.to(tl.int64)[:, None] * sot + col[None, :]), r, M, KINDS, SAVE,
        )  # fmt: skip
