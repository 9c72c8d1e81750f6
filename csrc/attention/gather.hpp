// Products with rows that lie scattered in memory: the keys and values that single queries selected.
#pragma once

#include "attention/tile.hpp"

namespace VF_TARGET {

// For single rows. Where there are several, dot_rows shares the horizontal sums.
template <typename A, typename B>
VF_INLINE float dot(const A *a, const B *b, int64_t width) {
    Vec sum = {};
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) sum += load(a + d) * load(b + d);
    float rest = sum_lanes(sum);
    for (; d < width; d++) rest += to_float(a[d]) * to_float(b[d]);
    return rest;
}

// to = x * factor, as float32.
template <typename T>
VF_INLINE void read_row(float *to, const T *x, int64_t width, float factor) {
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) store(to + d, load(x + d) * factor);
    for (; d < width; d++) to[d] = to_float(x[d]) * factor;
}

// One step of adding up the lanes of LANES vectors at once: halves the number of vectors.
template <int GAP>
VF_INLINE void fold(Vec *row) {
    // One addition folds two vectors into one. All LANES sums take LANES - 1 additions, where each by itself would take
    // log2(LANES).
    Ints upper = (lanes() & GAP) != 0;
#pragma GCC unroll 16
    for (int i = 0; i < GAP; i++) {
        Vec a = row[i], b = row[i + GAP];
        row[i] = (upper ? b : a) + swap_lanes<GAP>(upper ? a : b);
    }
}

// Lane i is the sum of the lanes of row[i].
VF_INLINE Vec sum_each(Vec *row) {
    if constexpr (LANES > 8) fold<8>(row);
    if constexpr (LANES > 4) fold<4>(row);
    fold<2>(row);
    fold<1>(row);
    return row[0];
}

// to[i] = x . row list[i]; LANES rows at a time keep as many sums in registers. Writes up to a multiple of LANES.
template <typename T>
static void dot_rows(float *to, const float *x, const T *base, int64_t stride, const int32_t *list, int count,
                     int64_t width) {
    for (int begin = 0; begin < count; begin += LANES) {
        const T *row[LANES];
        // Past the end the last row is read again: the loop stays without a branch, and nothing outside the list is
        // touched.
        for (int i = 0; i < LANES; i++) row[i] = base + list[begin + i < count ? begin + i : count - 1] * stride;
        Vec sum[LANES] = {};
        int64_t d = 0;
        for (; d + LANES <= width; d += LANES) {
            // LANES independent sums: x is loaded once for all rows, and the latency of each addition is hidden by the
            // others.
            Vec part = load(x + d);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) sum[i] += part * load(row[i] + d);
        }
        Vec total = sum_each(sum);
        for (; d < width; d++)
            for (int i = 0; i < LANES; i++) total[i] += x[d] * to_float(row[i][d]);
        store(to + begin, total);
    }
}

// to = sum of factor[i] * row list[i]; a stretch of `to` stays in registers over all rows.
template <typename T>
static void combine_rows(float *to, const float *factor, const T *base, int64_t stride, const int32_t *list, int count,
                         int64_t width) {
    // Vectors at once: 8 sums hide the latency of two FMA units, and a head of width 128 is one stretch on AVX-512.
    constexpr int WIDE = 8;
    int64_t d = 0;
    for (; d + WIDE * LANES <= width; d += WIDE * LANES) {
        Vec sum[WIDE] = {};
        for (int i = 0; i < count; i++) {
            const T *row = base + list[i] * stride + d;
            float by = factor[i];
#pragma GCC unroll 8
            for (int v = 0; v < WIDE; v++) sum[v] += by * load(row + v * LANES);
        }
        for (int v = 0; v < WIDE; v++) store(to + d + v * LANES, sum[v]);
    }
    for (; d + LANES <= width; d += LANES) {
        Vec sum = {};
        for (int i = 0; i < count; i++) sum += factor[i] * load(base + list[i] * stride + d);
        store(to + d, sum);
    }
    for (; d < width; d++) {
        float sum = 0;
        for (int i = 0; i < count; i++) sum += factor[i] * to_float(base[list[i] * stride + d]);
        to[d] = sum;
    }
}

// Rows list[i] - first of `to` += factor[i] * x; a stretch of x stays in registers over all rows.
static inline void scatter_row(float *to, const float *x, const int32_t *list, int64_t first, const float *factor,
                               int count, int64_t width) {
    constexpr int WIDE = 8;
    int64_t d = 0;
    for (; d + WIDE * LANES <= width; d += WIDE * LANES) {
        Vec part[WIDE];
#pragma GCC unroll 8
        for (int v = 0; v < WIDE; v++) part[v] = load(x + d + v * LANES);
        for (int i = 0; i < count; i++) {
            float *row = to + (list[i] - first) * width + d;
            float by = factor[i];
#pragma GCC unroll 8
            for (int v = 0; v < WIDE; v++) store(row + v * LANES, load(row + v * LANES) + by * part[v]);
        }
    }
    for (; d + LANES <= width; d += LANES) {
        Vec part = load(x + d);
        for (int i = 0; i < count; i++) {
            float *row = to + (list[i] - first) * width + d;
            store(row, load(row) + factor[i] * part);
        }
    }
    for (; d < width; d++)
        for (int i = 0; i < count; i++) to[(list[i] - first) * width + d] += factor[i] * x[d];
}

// What the index head of query (b, h, t) selected for it.
VF_INLINE const int32_t *selection_of(const vf_selected &call, int64_t b, int64_t h, int64_t t) {
    int64_t head = h / (call.heads / call.index_heads);
    return call.selected + ((b * call.index_heads + head) * call.queries + t) * call.capacity;
}

// The keys of query (b, h, t), ascending; how many, or -1 if the selection breaks its contract. `list` has room for
// capacity + 1.
VF_INLINE int read_selection(int32_t *list, const vf_selected &call, int64_t b, int64_t h, int64_t t) {
    int32_t position = call.position[b * call.queries + t], start = call.start[b * call.queries + t];
    if (start > position) return 0;
    // The list comes from the caller and is followed into memory: ascending and visible is checked before anything is
    // read.
    const int32_t *selected = selection_of(call, b, h, t);
    int count = 0;
    int32_t last = start - 1;
    for (; count < call.capacity && selected[count] >= 0; count++) {
        if (selected[count] <= last || selected[count] > position) return -1;
        last = list[count] = selected[count];
    }
    // The query's own key is the last it sees, so the list stays ascending.
    if (call.include_self && last != position) list[count++] = position;
    return count;
}

// What the backward takes probabilities from: from a rounded logsumexp they would not sum to 1, the less the larger the
// scores.
VF_INLINE void put_norm(const vf_selected &call, int64_t query, float top, float factor) {
    if (call.norm) call.norm[2 * query] = top, call.norm[2 * query + 1] = factor;
}

}  // namespace VF_TARGET
