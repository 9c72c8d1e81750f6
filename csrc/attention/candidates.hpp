// The best few of a stream of scores: candidates above a running threshold are collected, and thrown out again in bulk
// when there are twice as many as wanted.
//
// Scores arrive in ascending order of their keys, so a later score that only equals the threshold loses to the
// earlier ones ("of equal scores the lower index wins"), and the survivors stay in ascending order by themselves.
#pragma once

#include <math.h>

#include "simd/vector.hpp"
#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>  // one bit per lane and the compressing store have no vector-extension form
#endif

namespace VF_TARGET {

struct Candidates {
    int32_t *rank;  // scores as integers of the same order; room for `room(wanted)`
    int32_t *key;
    int32_t count, wanted;
    int32_t limit;  // candidates before the worst are thrown out
    float above;    // a score must be greater than this to come in
};

// One bit per lane.
VF_INLINE uint32_t bits_of(Ints mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#elif defined(__SSE2__)
    return (uint32_t)_mm_movemask_ps((__m128)mask);
#else
    uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= (uint32_t)(mask[lane] & 1) << lane;
    return bits;
#endif
}

// The lanes of x whose bit is set, one after the other; may write LANES values.
VF_INLINE void put_where(int32_t *to, Ints x, uint32_t bits) {
#if defined(__AVX512F__)
    _mm512_storeu_si512(to, _mm512_maskz_compress_epi32((__mmask16)bits, (__m512i)x));
#else
    int32_t lane[LANES];
    memcpy(lane, &x, sizeof(lane));
    for (; bits; bits &= bits - 1) *to++ = lane[__builtin_ctz(bits)];
#endif
}

// Floats below 0 descend as integers; flipping all bits but the sign lets them ascend. -0 + 0 is +0: zeros of either
// sign must rank alike, or a tie between them would not go to the lower index.
// Integers in the order of the scores; both zeros become one. Its own inverse on integers.
VF_INLINE Ints flip(Ints bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }
VF_INLINE Ints order_of(Vec score) { return flip((Ints)(score + 0.0f)); }

VF_INLINE Ints load_ints(const int32_t *from) {
    Ints x;
    memcpy(&x, from, sizeof(x));
    return x;
}

// The limit is tested once a panel, so up to NR candidates may go past it, and a compressing store writes whole
// vectors.
VF_INLINE int32_t room(int64_t wanted) { return (int32_t)(2 * wanted + 64 + NR + LANES); }

[[maybe_unused]] static void start_candidates(Candidates &c, int32_t *rank, int32_t *key, int32_t wanted) {
    // Twice as many as wanted: a prune of 2 k candidates throws out k, so its cost is shared by k that came in. 64
    // more, so that a small k does not prune at every panel. Above -inf: a score of -inf or NaN never comes in.
    c = {rank, key, 0, wanted, 2 * wanted + 64, -INFINITY};
}

static int32_t count_at_least(const Candidates &c, int32_t pivot) {
    Ints total = {};
    for (int32_t i = 0; i < c.count; i += LANES) total -= load_ints(c.rank + i) >= pivot;
    int32_t sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += total[lane];
    return sum;
}

// Halves the range of ranks until the pivot leaves `wanted` candidates, or, unless `exact`, a few more.
static __attribute__((noinline)) void prune(Candidates &c, bool exact) {
    if (c.count <= c.wanted) return;
    // The rest of the last vector must not be counted: only a NaN has this rank, and none comes in.
    for (int32_t i = c.count; i % LANES; i++) c.rank[i] = INT32_MIN;
    // 64 bits, because the distance of two ranks does not fit 32.
    int64_t low = INT32_MAX, high = INT32_MIN;
    for (int32_t i = 0; i < c.count; i++) {
        if (c.rank[i] < low) low = c.rank[i];
        if (c.rank[i] > high) high = c.rank[i];
    }
    // At least `wanted` candidates are >= low, fewer are >= high.
    int32_t kept = c.count, over = 0;
    // While scores still come, a few too many do no harm, and some rounds of bisection are saved.
    int32_t slack = exact ? 0 : c.wanted / 4;
    for (high++; high - low > 1 && kept > c.wanted + slack;) {
        int64_t pivot = low + (high - low) / 2;
        int32_t count = count_at_least(c, (int32_t)pivot);
        if (count >= c.wanted)
            low = pivot, kept = count;
        else
            high = pivot, over = count;
    }
    int32_t pivot = (int32_t)low, size = 0;
    if (kept <= c.wanted + slack) {
        for (int32_t i = 0; i < c.count; i += LANES) {
            Ints rank = load_ints(c.rank + i), key = load_ints(c.key + i);
            uint32_t bits = bits_of(rank >= pivot);
            // The last vector may hold lanes past the end, all of them INT32_MIN.
            if (c.count - i < LANES) bits &= (1u << (c.count - i)) - 1;
            // In place: what is kept is never more than what was read, so a store ends where the vector just read ends
            // at the latest.
            put_where(c.rank + size, rank, bits);
            put_where(c.key + size, key, bits);
            size += __builtin_popcount(bits);
        }
    } else {
        // More candidates equal the pivot than are wanted: the first of them stay.
        int32_t equal = c.wanted - over;
        for (int32_t i = 0; i < c.count; i++) {
            int32_t rank = c.rank[i], key = c.key[i];
            bool keep = rank > pivot || (rank == pivot && equal-- > 0);
            c.rank[size] = rank, c.key[size] = key, size += keep;
        }
    }
    c.count = size;
    // At least `wanted` candidates reach the pivot and all of them came earlier, so a later score must exceed it. This
    // is exact, though more than `wanted` may still be here.
    Ints bits = flip(splat(pivot));
    c.above = ((Vec)bits)[0];
}

// Offers `panels` stretches of NR scores, `step` floats apart, of the keys from `key` on; only [first, last] count.
VF_INLINE void offer(Candidates &c, const float *scores, int64_t step, int panels, int32_t key, int32_t first,
                     int32_t last) {
    for (int p = 0; p < panels; p++, key += NR, scores += step) {
        if (key > last || key + NR <= first) continue;
        // Bits for the keys of the panel that are in range; both shifts are below 32, because the panel overlaps the
        // range. What lies outside may be anything: it is loaded, and left out by its bit.
        uint32_t allowed = ~0u;
        if (key < first) allowed <<= first - key;
        if (key + NR - 1 > last) allowed &= ~0u >> (31 - (last - key));
        int32_t count = c.count;
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            Vec x = load(scores + v * LANES);
            uint32_t bits = bits_of(x > c.above) & (allowed >> (v * LANES));
            // While the threshold settles, one key in six comes in: on AVX-512 it is cheaper to store nothing than to
            // guess wrong whether there is something to store.
            if (LANES < 16 && !bits) continue;
            put_where(c.rank + count, order_of(x), bits);
            put_where(c.key + count, lanes() + (key + v * LANES), bits);
            count += __builtin_popcount(bits);
        }
        c.count = count;
        if (count > c.limit) prune(c, false);
    }
}

}  // namespace VF_TARGET
