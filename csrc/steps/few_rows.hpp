// Products of a matrix with a few vectors: what a decoded token does with every weight of a model.
//
// Each weight is read once and multiplied with all vectors while it is in a register or in L1, row after row as the
// matrix lies in memory: one stream for each thread, which the processor's own prefetching follows best. There is next
// to nothing to gain in the arithmetic: memory gives a core some 4 bytes a cycle, and these loops take in 16 and more.
#pragma once

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "simd/vector.hpp"
#include "varifocal.h"

namespace VF_TARGET {

// Vectors that are multiplied at once: 4 x 2 sums hide the latency of two FMA units.
constexpr int TOGETHER = 4;

// LANES bytes as floats. Compilers widen bytes one by one, eight times as slowly as these two instructions.
VF_INLINE Vec load(const int8_t *from) {
#if defined(__AVX512F__)
    // All lanes by mask: the plain form starts from an undefined register, which GCC warns of.
    return (Vec)_mm512_cvtepi32_ps(_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128((const __m128i *)from)));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from)));
#else
    Vec wide;
    for (int lane = 0; lane < LANES; lane++) wide[lane] = (float)from[lane];
    return wide;
#endif
}
VF_INLINE float to_float(int8_t x) { return (float)x; }

// to[r] = row . x[r] for COUNT vectors.
template <int COUNT, typename T>
VF_INLINE void multiply_row(float *to, const T *row, const float *const *x, int64_t columns) {
    Vec even[COUNT] = {}, odd[COUNT] = {};
    int64_t d = 0;
    for (; d + 2 * LANES <= columns; d += 2 * LANES) {
        Vec low = load(row + d), high = load(row + d + LANES);
#pragma GCC unroll 4
        for (int r = 0; r < COUNT; r++) even[r] += low * load(x[r] + d), odd[r] += high * load(x[r] + d + LANES);
    }
    for (int r = 0; r < COUNT; r++) {
        float sum = sum_lanes(even[r] + odd[r]);
        for (int64_t rest = d; rest < columns; rest++) sum = multiply_add(to_float(row[rest]), x[r][rest], sum);
        to[r] = sum;
    }
}

// The same for bytes with a scale for every `group` columns, a multiple of LANES: the sum of a group is scaled once.
template <int COUNT>
VF_INLINE void multiply_scaled_row(float *to, const int8_t *row, const float *scales, int64_t group,
                                   const float *const *x, int64_t columns) {
    Vec total[COUNT] = {};
    for (int64_t first = 0; first < columns; first += group, scales++) {
        Vec even[COUNT] = {}, odd[COUNT] = {};
        int64_t d = first;
        for (; d + 2 * LANES <= first + group; d += 2 * LANES) {
            Vec low = load(row + d), high = load(row + d + LANES);
#pragma GCC unroll 4
            for (int r = 0; r < COUNT; r++) even[r] += low * load(x[r] + d), odd[r] += high * load(x[r] + d + LANES);
        }
        for (; d < first + group; d += LANES)
            for (int r = 0; r < COUNT; r++) even[r] += load(row + d) * load(x[r] + d);
        Vec scale = splat(*scales);
        for (int r = 0; r < COUNT; r++) total[r] += scale * (even[r] + odd[r]);
    }
    for (int r = 0; r < COUNT; r++) to[r] = sum_lanes(total[r]);
}

template <int COUNT>
VF_INLINE void multiply_some(float *to, const vf_matrix &m, int64_t row, const float *const *x) {
    int64_t at = row * m.columns;
    if (m.kind == VF_INT8)
        multiply_scaled_row<COUNT>(to, (const int8_t *)m.data + at, m.scales + row * (m.columns / m.group), m.group, x,
                                   m.columns);
    else if (m.kind == VF_BFLOAT16)
        multiply_row<COUNT>(to, (const uint16_t *)m.data + at, x, m.columns);
    else
        multiply_row<COUNT>(to, (const float *)m.data + at, x, m.columns);
}

// to[r] = matrix row . x[r] + bias, for `count` vectors that lie `stride` apart.
[[maybe_unused]] static void multiply(float *to, const vf_matrix &m, int64_t row, const float *x, int64_t stride,
                                      int64_t count) {
    const float *vector[TOGETHER];
    for (int64_t first = 0; first < count; first += TOGETHER) {
        int64_t here = count - first < TOGETHER ? count - first : TOGETHER;
        for (int64_t r = 0; r < here; r++) vector[r] = x + (first + r) * stride;
        if (here == 4) multiply_some<4>(to + first, m, row, vector);
        if (here == 3) multiply_some<3>(to + first, m, row, vector);
        if (here == 2) multiply_some<2>(to + first, m, row, vector);
        if (here == 1) multiply_some<1>(to + first, m, row, vector);
    }
    if (m.bias)
        for (int64_t r = 0; r < count; r++) to[r] += m.bias[row];
}

// Rows of a matrix that make a task: some 64 KB, so that a thread that is held up leaves the rest to the others.
VF_INLINE int64_t rows_of_task(const vf_matrix &m) {
    int64_t bytes = m.columns * (m.kind == VF_INT8 ? 1 : m.kind == VF_BFLOAT16 ? 2 : 4);
    return bytes < 65536 ? 65536 / (bytes ? bytes : 1) : 1;
}

}  // namespace VF_TARGET
