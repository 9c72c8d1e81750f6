"""The backward kernels: numbers of rows first, then the gradients of queries, and those of keys and values.

With e_rij = rho_rij exp(s_ij - lse_r) of the ring r that a pair is in, and the branches m = r, r + 1, ... from there
outwards in its chain:
    A_r = sum_m w_m exp(lse_r - lse_m)            B_r = sum_m w_m exp(lse_r - lse_m) (dO . O_m)
    a_ij = sum_r e_rij A_r                        dS_ij = sum_r e_rij (A_r dO.v_j - B_r)

so a pair costs one exponential, however many branches read it. The branch inside has the smaller logsumexp: no factor
is above 1. Nothing is added to memory that another program writes: results are the same bit for bit.
"""

import triton
import triton.language as tl

from .rings import (
    ANYWHERE,
    AT_END,
    CONTINUES,
    EVERY,
    LOG2E,
    NOTHING,
    PLAIN,
    PREFIX,
    SOFT,
    WINDOW,
    columns,
    key_tiles,
    load_rows,
    masked_tile,
    places,
    ring,
    rows,
    sizes_of,
    widths_of,
)


@triton.jit(do_not_specialize=["B", "T", "S"])
def row_numbers(
    GRAD,
    MEANS,
    WEIGHTS,
    SINK,
    LOGSUMEXP,
    POS,
    START,
    NUMBERS,
    GRAD_WEIGHTS,
    GRAD_SINK,
    sgb,
    sgh,
    sgt,
    smm,
    smb,
    smh,
    smt,
    B,
    H,
    T,
    S,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    KINDS: tl.constexpr,
    LAYOUT: tl.constexpr,
    BM: tl.constexpr,
):
    """NUMBERS float32 [M, 4, B, H, T]: of each ring lse (base 2), A and B, and dO . O of its branch.
    GRAD_WEIGHTS [B, H, T, M] is dO . O too; GRAD_SINK float32 [B, H, T] is summed over rows by the caller.
    """
    h, b = tl.program_id(1), tl.program_id(2)
    rowing = tl.program_id(0) * BM + tl.arange(0, BM)
    live = rowing < T
    i = tl.minimum(rowing, T - 1)
    col = tl.arange(0, DP)
    wide = b.to(tl.int64)
    pos, start = places(POS, START, b, i, T, S, LAYOUT)
    sees = start <= pos
    mask = sees[:, None] & (col[None, :] < D)
    grad = tl.load(
        GRAD + wide * sgb + h.to(tl.int64) * sgh + (i.to(tl.int64)[:, None] * sgt + col[None, :]), mask=mask, other=0.0
    ).to(tl.float32)
    row = (wide * H + h) * T + i
    many = B.to(tl.int64) * H * T
    grad_sink = tl.zeros([BM], tl.float32)
    outer_lse = tl.zeros([BM], tl.float32)
    outer_a = tl.zeros([BM], tl.float32)
    outer_b = tl.zeros([BM], tl.float32)
    for back in tl.static_range(M):
        r = M - 1 - back
        slot = (KINDS >> (7 * r + 5)) & 3
        mean = tl.load(
            MEANS + r * smm + wide * smb + h.to(tl.int64) * smh + (i.to(tl.int64)[:, None] * smt + col[None, :]),
            mask=mask, other=0.0,
        ).to(tl.float32)  # fmt: skip
        delta = tl.sum(grad * mean, 1)
        lse = tl.load(LOGSUMEXP + row * M + slot) * LOG2E
        weight = tl.zeros([BM], tl.float32) + 1.0
        if WEIGHTS is not None:
            weight = tl.load(WEIGHTS + row * M + slot).to(tl.float32)
            tl.store(GRAD_WEIGHTS + row * M + slot, delta.to(GRAD_WEIGHTS.dtype.element_ty), mask=live)
        if SINK is not None:
            sink2 = tl.load(SINK + h).to(tl.float32) * LOG2E
            most = tl.maximum(lse, sink2)
            safe = tl.where(most == NOTHING, 0.0, most)
            sum_of_both = tl.exp2(lse - safe) + tl.exp2(sink2 - safe)
            lse = tl.where(lse == NOTHING, NOTHING, safe + tl.log2(sum_of_both))
            share = tl.where(lse == NOTHING, 0.0, tl.exp2(sink2 - tl.where(lse == NOTHING, 0.0, lse)))
            grad_sink -= weight * share * delta
        a = weight
        inwards = weight * delta
        if r < M - 1:
            if CONTINUES & (KINDS >> (7 * (r + 1))):
                # A branch that reads nothing shares nothing with the one outside it.
                factor = tl.where(lse == NOTHING, 0.0, tl.exp2(tl.where(lse == NOTHING, 0.0, lse) - outer_lse))
                a += factor * outer_a
                inwards += factor * outer_b
        outer_lse, outer_a, outer_b = tl.where(lse == NOTHING, 0.0, lse), a, inwards
        numbers = NUMBERS + 4 * r * many + row
        # exp2(s - inf) = 0: no pair of a row that reads nothing counts.
        tl.store(numbers, tl.where(lse == NOTHING, float("inf"), lse), mask=live)
        tl.store(numbers + many, a, mask=live)
        tl.store(numbers + 2 * many, inwards, mask=live)
        tl.store(numbers + 3 * many, delta, mask=live)
    if SINK is not None:
        tl.store(GRAD_SINK + row, grad_sink, mask=live)


@triton.jit
def query_tile(
    dq,
    dz,
    q,
    grad,
    keys,
    values,
    first,
    pos,
    start,
    lse,
    a,
    inwards,
    weight,
    delta,
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
    """What the keys of a tile add to the gradients of queries and of their widths."""
    k = load_rows(keys, first, S, sk, SEEN, BN, D, DP, MASKED)
    v = load_rows(values, first, S, sv, SEEN, BN, D, DP, MASKED)
    e = tl.exp2(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale2 - lse[:, None])
    dp = tl.dot(grad, tl.trans(v), input_precision=PRECISION)
    if MASKED:
        j = first + tl.arange(0, BN)[None, :]
        x = pos[:, None] - j
        y = j - start[:, None]
        keep, share = ring(
            (x >= 0) & (y >= 0), x, y, sizes[0], sizes[1], sizes[2], sizes[3], rows(width, KIND),
            sizes1[0], sizes1[1], sizes1[2], sizes1[3], rows(width1, INNER), KIND, INNER,
        )  # fmt: skip
        e = tl.where(keep, e, 0.0)
        if SOFT & KIND:
            # d rho / d width = 1 / edge in the soft edge, 0 elsewhere.
            dz += tl.sum(tl.where(keep & (share < 1), e * (weight[:, None] * (dp - delta[:, None])), 0.0), 1)
        if SOFT & (KIND | INNER):
            e = tl.where(keep, e * share, 0.0)
    ds = e * (a[:, None] * dp - inwards[:, None])
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq, dz


@triton.jit
def query_ring(
    dq,
    q,
    grad,
    keys,
    values,
    pos,
    start,
    sees,
    row,
    many,
    WEIGHTS,
    WIDTH,
    NUMBERS,
    GRAD_WIDTH,
    SIZES,
    EDGES,
    SEEN,
    b,
    h,
    i,
    live,
    B,
    H,
    T,
    S,
    sk,
    sv,
    scale2,
    M: tl.constexpr,
    R: tl.constexpr,
    KINDS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What ring R adds to the gradients of queries; the gradient of its width is written."""
    KIND: tl.constexpr = (KINDS >> (7 * R)) & 127
    INNER: tl.constexpr = ((KINDS << 7) >> (7 * R)) & 127 if CONTINUES & KIND else 0
    if EVERY & INNER:
        return dq
    else:
        sizes = sizes_of(SIZES, EDGES, R, h, H)
        sizes1 = sizes_of(SIZES, EDGES, R - 1 if INNER else R, h, H)
        width = widths_of(WIDTH, b, h, i, B, H, T, sees, KIND)
        width1 = widths_of(WIDTH, b, h, i, B, H, T, sees, INNER)
        numbers = NUMBERS + 4 * R * many + row
        lse = tl.load(numbers)
        a = tl.load(numbers + many)
        inwards = tl.load(numbers + 2 * many)
        weight = a
        delta = a
        if SOFT & KIND:
            delta = tl.load(numbers + 3 * many)
            if WEIGHTS is not None:
                weight = tl.load(WEIGHTS + row * M + ((KINDS >> (7 * R + 5)) & 3)).to(tl.float32)
            else:
                weight = tl.zeros([BM], tl.float32) + 1.0
        prefix_from, prefix_count, near, whole_from, whole_to, end = key_tiles(
            pos, start, sizes[0], sizes[1], sizes[2], sizes[3], width, sizes1[0], sizes1[1], sizes1[2], sizes1[3],
            width1,
            BN, KIND, INNER,
        )  # fmt: skip
        dz = tl.zeros([BM], tl.float32)
        for tile in tl.range(whole_from, whole_to):
            dq, dz = query_tile(
                dq, dz, q, grad, keys, values, tile * BN, pos, start, lse, a, inwards, weight, delta, sizes, width,
                sizes1,
                width1, S, sk, sv, SEEN, scale2, D, DP, BN, KIND, INNER, False, PRECISION,
            )  # fmt: skip
        for t in tl.range(0, prefix_count + (whole_from - near) + (end - whole_to)):
            tile = masked_tile(t, prefix_from, prefix_count, near, whole_from, whole_to)
            dq, dz = query_tile(
                dq, dz, q, grad, keys, values, tile * BN, pos, start, lse, a, inwards, weight, delta, sizes, width,
                sizes1,
                width1, S, sk, sv, SEEN, scale2, D, DP, BN, KIND, INNER, True, PRECISION,
            )  # fmt: skip
        if SOFT & KIND:
            one = ((KIND >> 5) & 3) * many + row
            tl.store(GRAD_WIDTH + one, dz / sizes[3], mask=live)
        return dq


@triton.jit(do_not_specialize=["B", "T", "S"])
def backward_queries(
    Q,
    K,
    V,
    GRAD,
    WEIGHTS,
    SCALE,
    WIDTH,
    SIZES,
    EDGES,
    POS,
    START,
    SEEN,
    NUMBERS,
    GRAD_Q,
    GRAD_SCALE,
    GRAD_WIDTH,
    sqb,
    sqh,
    sqt,
    skb,
    skh,
    skt,
    svb,
    svh,
    svt,
    sgb,
    sgh,
    sgt,
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
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """GRAD_Q [B, H, T, D]; GRAD_WIDTH as WIDTH; GRAD_SCALE float32 [B, H, T], summed over rows by the caller."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    h, b = tl.program_id(1), tl.program_id(2)
    g = h // (H // G)
    rowing = tile * BM + tl.arange(0, BM)
    live = rowing < T
    i = tl.minimum(rowing, T - 1)
    col = tl.arange(0, DP)
    pos, start = places(POS, START, b, i, T, S, LAYOUT)
    sees = start <= pos
    wide = b.to(tl.int64)
    keys = K + wide * skb + g.to(tl.int64) * skh
    values = V + wide * svb + g.to(tl.int64) * svh
    seen = SEEN + wide * S if SEEN is not None else None
    query = Q + wide * sqb + h.to(tl.int64) * sqh + (i.to(tl.int64)[:, None] * sqt + col[None, :])
    upstream = GRAD + wide * sgb + h.to(tl.int64) * sgh + (i.to(tl.int64)[:, None] * sgt + col[None, :])
    if LAYOUT != PLAIN or DP != D:
        # Rows that see nothing may hold anything, even NaN.
        mask = sees[:, None] & (col[None, :] < D)
        q = tl.load(query, mask=mask, other=0.0)
        grad = tl.load(upstream, mask=mask, other=0.0)
    else:
        q = tl.load(query)
        grad = tl.load(upstream)
    scale = factor
    if SCALE is not None:
        scale = factor * tl.load(SCALE + h)
    row = (wide * H + h) * T + i
    many = B.to(tl.int64) * H * T
    dq = tl.zeros([BM, DP], tl.float32)
    for r in tl.static_range(M):
        dq = query_ring(
            dq, q, grad, keys, values, pos, start, sees, row, many, WEIGHTS, WIDTH, NUMBERS, GRAD_WIDTH, SIZES, EDGES,
            seen, b, h, i, live, B, H, T, S, skt, svt, scale * LOG2E, M, r, KINDS, D, DP, BM, BN, PRECISION,
        )  # fmt: skip
    if SCALE is not None:  # ds / dscale = factor q.k, summed over keys
        tl.store(GRAD_SCALE + row, tl.sum(dq * q.to(tl.float32), 1) * factor, mask=live)
    out = GRAD_Q + wide * sob + h.to(tl.int64) * soh + (i.to(tl.int64)[:, None] * sot + col[None, :])
    tl.store(out, (dq * scale).to(GRAD_Q.dtype.element_ty), mask=live[:, None] & (col[None, :] < D))


@triton.jit
def key_tile(
    dk,
    dv,
    k,
    v,
    queries,
    grads,
    POS,
    START,
    NUMBERS,
    WIDTH,
    b,
    h,
    first,
    j,
    many,
    B,
    H,
    T,
    S,
    sq,
    sg,
    scale2,
    scale,
    sizes,
    sizes1,
    R: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    KIND: tl.constexpr,
    INNER: tl.constexpr,
    LAYOUT: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What the queries of a tile add to the gradients of keys and values; pairs are [keys, queries]."""
    i = first + tl.arange(0, BM)
    numbers = NUMBERS + 4 * R * many + (b.to(tl.int64) * H + h) * T + i
    if MASKED:
        there = i < T
        at = tl.minimum(i, T - 1)
        pos, start = places(POS, START, b, at, T, S, LAYOUT)
        sees = there & (start <= pos)
        col = tl.arange(0, DP)
        mask = sees[:, None] & (col[None, :] < D)
        inside = tl.arange(0, BM)[:, None]
        q = tl.load(queries + tl.cast(first, tl.int64) * sq + (inside * sq + col[None, :]), mask=mask, other=0.0)
        grad = tl.load(grads + tl.cast(first, tl.int64) * sg + (inside * sg + col[None, :]), mask=mask, other=0.0)
        lse = tl.load(numbers, mask=sees, other=float("inf"))
        a = tl.load(numbers + many, mask=sees, other=0.0)
        inwards = tl.load(numbers + 2 * many, mask=sees, other=0.0)
    else:
        q = load_rows(queries, first, T, sq, None, BM, D, DP, False)
        grad = load_rows(grads, first, T, sg, None, BM, D, DP, False)
        lse = tl.load(numbers)
        a = tl.load(numbers + many)
        inwards = tl.load(numbers + 2 * many)
    e = tl.exp2(tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale2 - lse[None, :])
    if MASKED:
        width = widths_of(WIDTH, b, h, at, B, H, T, sees, KIND)
        width1 = widths_of(WIDTH, b, h, at, B, H, T, sees, INNER)
        x = pos[None, :] - j[:, None]
        y = j[:, None] - start[None, :]
        keep, share = ring(
            sees[None, :] & (x >= 0) & (y >= 0), x, y, sizes[0], sizes[1], sizes[2], sizes[3], columns(width, KIND),
            sizes1[0], sizes1[1], sizes1[2], sizes1[3], columns(width1, INNER), KIND, INNER,
        )  # fmt: skip
        if SOFT & (KIND | INNER):
            e = tl.where(keep, e * share, 0.0)
        else:
            e = tl.where(keep, e, 0.0)
    weighted = e * a[None, :]
    dv = tl.dot(weighted.to(grad.dtype), grad, dv, input_precision=PRECISION)
    dp = tl.dot(v, tl.trans(grad), input_precision=PRECISION)
    ds = weighted * dp - e * inwards[None, :]
    if SCALED:
        ds = ds * scale
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def query_tiles(
    lo,
    hi,
    prefix_hi,
    first,
    window,
    prefix,
    limit,
    window1,
    prefix1,
    limit1,
    T,
    S,
    BM: tl.constexpr,
    BN: tl.constexpr,
    KIND: tl.constexpr,
    INNER: tl.constexpr,
    LAYOUT: tl.constexpr,
):
    """Tiles of queries that read a tile of keys in a ring: (from; whole from, to; to), as in `key_tiles`.

    lo and hi bound the rows that see any of the keys, prefix_hi those that may see one of the first of their document.
    """
    begin = lo
    end = hi
    whole_from = hi
    whole_to = lo
    if LAYOUT != ANYWHERE:
        off = S - T  # position - row
        last = tl.minimum(first + BN, S) - 1
        if (EVERY & KIND) == 0:
            near = 0
            if WINDOW & KIND:
                near = window
            if SOFT & KIND:
                near = tl.maximum(near, limit)
            end = tl.minimum(hi, last + near - off)
            if PREFIX & KIND:
                if LAYOUT == PLAIN:
                    end = tl.where(first < prefix, hi, end)
                else:
                    end = tl.maximum(end, prefix_hi)
        if WINDOW & INNER:
            begin = tl.maximum(lo, first + window1 - off)
        if LAYOUT == PLAIN and (SOFT & KIND) == 0:
            beyond = 0
            if WINDOW & INNER:
                beyond = window1
            if SOFT & INNER:
                beyond = tl.maximum(beyond, limit1)
            whole_from = tl.maximum(begin, last + beyond - off)
            if EVERY & KIND:
                whole_to = end
            else:
                whole_to = lo
                if WINDOW & KIND:
                    whole_to = tl.minimum(end, first + window - off)
                if PREFIX & KIND:
                    whole_to = tl.where(first + BN <= prefix, end, whole_to)
            if PREFIX & INNER:
                whole_to = tl.where(first < prefix1, lo, whole_to)
            whole_to = tl.where(first + BN > S, lo, whole_to)
    tile_from = tl.maximum(begin, 0) // BM
    tile_to = tl.maximum((end + BM - 1) // BM, tile_from)
    tile_to = tl.where(end > begin, tile_to, tile_from)
    whole_from = tl.minimum(tl.maximum((whole_from + BM - 1) // BM, tile_from), tile_to)
    whole_to = tl.minimum(tl.maximum(whole_to // BM, whole_from), tile_to)
    return tile_from, whole_from, whole_to, tile_to


@triton.jit
def key_ring(
    dk,
    dv,
    k,
    v,
    queries,
    grads,
    POS,
    START,
    NUMBERS,
    WIDTH,
    SIZES,
    EDGES,
    b,
    h,
    first,
    j,
    lo,
    hi,
    prefix_hi,
    many,
    B,
    H,
    T,
    S,
    sq,
    sg,
    scale2,
    scale,
    R: tl.constexpr,
    KINDS: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    LAYOUT: tl.constexpr,
    SCALED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What ring R of one head adds to the gradients of a tile of keys and values."""
    KIND: tl.constexpr = (KINDS >> (7 * R)) & 127
    INNER: tl.constexpr = ((KINDS << 7) >> (7 * R)) & 127 if CONTINUES & KIND else 0
    if EVERY & INNER:
        return dk, dv
    else:
        sizes = sizes_of(SIZES, EDGES, R, h, H)
        sizes1 = sizes_of(SIZES, EDGES, R - 1 if INNER else R, h, H)
        tile_from, whole_from, whole_to, tile_to = query_tiles(
            lo, hi, prefix_hi, first, sizes[0], sizes[1], sizes[2], sizes1[0], sizes1[1], sizes1[2], T, S,
            BM, BN, KIND, INNER, LAYOUT,
        )  # fmt: skip
        if LAYOUT == PLAIN and (SOFT & KIND) == 0:
            for tile in tl.range(whole_from, whole_to):
                dk, dv = key_tile(
                    dk, dv, k, v, queries, grads, POS, START, NUMBERS, WIDTH, b, h, tile * BM, j, many, B, H, T, S,
                    sq, sg,
                    scale2, scale, sizes, sizes1, R, D, DP, BM, KIND, INNER, LAYOUT, SCALED, False, PRECISION,
                )  # fmt: skip
        for t in tl.range(0, (whole_from - tile_from) + (tile_to - whole_to)):
            tile = masked_tile(t, tile_from, 0, tile_from, whole_from, whole_to)
            dk, dv = key_tile(
                dk, dv, k, v, queries, grads, POS, START, NUMBERS, WIDTH, b, h, tile * BM, j, many, B, H, T, S, sq, sg,
                scale2, scale, sizes, sizes1, R, D, DP, BM, KIND, INNER, LAYOUT, SCALED, True, PRECISION,
            )  # fmt: skip
        return dk, dv


@triton.jit
def rows_that_see(POS, START, b, first, last, least_prefix, T, S, LAYOUT: tl.constexpr, CHUNK: tl.constexpr):
    """Bounds of the rows that see a key of first..last, and the end of those that may count it to their prefix."""
    if LAYOUT == PLAIN:
        return tl.maximum(first - (S - T), 0), T, T
    else:
        lo = T
        hi = 0
        prefix_hi = 0
        begin = T * 0
        if LAYOUT == AT_END:
            begin = tl.maximum(first - (S - T), 0)
            lo = begin
        for at in tl.range(begin, T, CHUNK):
            i = at + tl.arange(0, CHUNK)
            there = i < T
            pos, start = places(POS, START, b, tl.minimum(i, T - 1), T, S, LAYOUT)
            reads = there & (start <= last) & (pos >= first) & (start <= pos)
            hi = tl.maximum(hi, tl.max(tl.where(reads, i + 1, 0)))
            prefix_hi = tl.maximum(prefix_hi, tl.max(tl.where(reads & (start + least_prefix > first), i + 1, 0)))
            if LAYOUT == ANYWHERE:
                lo = tl.minimum(lo, tl.min(tl.where(reads, i, T)))
        return lo, hi, prefix_hi


@triton.jit(do_not_specialize=["B", "T", "S", "longest_prefix"])
def backward_keys(
    Q,
    K,
    V,
    GRAD,
    SCALE,
    WIDTH,
    SIZES,
    EDGES,
    POS,
    START,
    SEEN,
    NUMBERS,
    GRAD_K,
    GRAD_V,
    sqb,
    sqh,
    sqt,
    skb,
    skh,
    skt,
    svb,
    svh,
    svt,
    sgb,
    sgh,
    sgt,
    sob,
    soh,
    sot,
    spb,
    sph,
    spt,
    B,
    H,
    G,
    T,
    S,
    longest_prefix,
    factor,
    D: tl.constexpr,
    DP: tl.constexpr,
    M: tl.constexpr,
    KINDS: tl.constexpr,
    LAYOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
):
    """GRAD_K and GRAD_V [B, G, S, D]: the heads that share a key head are summed here, one after another."""
    tile = tl.program_id(0)  # the first keys are read by most rows
    g, b = tl.program_id(1), tl.program_id(2)
    first = tile * BN
    wide = b.to(tl.int64)
    seen = SEEN + wide * S if SEEN is not None else None
    k = load_rows(K + wide * skb + g.to(tl.int64) * skh, first, S, skt, seen, BN, D, DP, True)
    v = load_rows(V + wide * svb + g.to(tl.int64) * svh, first, S, svt, seen, BN, D, DP, True)
    j = first + tl.arange(0, BN)
    lo, hi, prefix_hi = rows_that_see(
        POS, START, b, first, tl.minimum(first + BN, S) - 1, longest_prefix, T, S, LAYOUT, 1024
    )
    dk = tl.zeros([BN, DP], tl.float32)
    dv = tl.zeros([BN, DP], tl.float32)
    many = B.to(tl.int64) * H * T
    # What does not change from head to head would take registers through all of its tiles if it were worked out before.
    for member in tl.range(0, H // G, disable_licm=True):
        h = g * (H // G) + member
        scale2 = factor * LOG2E
        scale = factor
        if SCALE is not None:
            scale = tl.load(SCALE + h)
            scale2 = scale2 * scale
        queries = Q + wide * sqb + h.to(tl.int64) * sqh
        grads = GRAD + wide * sgb + h.to(tl.int64) * sgh
        for r in tl.static_range(M):
            dk, dv = key_ring(
                dk, dv, k, v, queries, grads, POS, START, NUMBERS, WIDTH, SIZES, EDGES, b, h, first, j, lo, hi,
                prefix_hi,
                many, B, H, T, S, sqt, sgt, scale2, scale, r, KINDS, D, DP, BM, BN, LAYOUT, SCALE is not None,
                PRECISION,
            )  # fmt: skip
    col = tl.arange(0, DP)
    kept = (j[:, None] < S) & (col[None, :] < D)
    rest = j.to(tl.int64)[:, None]
    tl.store(GRAD_K + wide * sob + g.to(tl.int64) * soh + (rest * sot + col[None, :]),
             (dk * factor).to(GRAD_K.dtype.element_ty), mask=kept)  # fmt: skip
    tl.store(GRAD_V + wide * spb + g.to(tl.int64) * sph + (rest * spt + col[None, :]),
             dv.to(GRAD_V.dtype.element_ty), mask=kept)  # fmt: skip
