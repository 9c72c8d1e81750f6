// Register tiles of a matrix product on panels (panels.hpp). A kernel loops over tiles itself, because only it
// knows which tiles its mask leaves out: right panel outside (it stays in L1), left tiles inside (they stream).
#pragma once

#include "simd/panels.hpp"

namespace VF_TARGET {

// The sum of one call starts at 0 and meets c at the end, so thousands of small terms do not each round against a
// large total.
template <int ROWS>
VF_INLINE void store_tile(const Vec (&sum)[ROWS][NV], float *c, bool accumulate) {
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            float *at = c + row * NR + v * LANES;
            store(at, accumulate ? load(at) + sum[row][v] : sum[row][v]);
        }
}

// One step of the sum: sum[row] += a[row * row_step] * b[0..NR). ROWS * NV multiply-adds for NV + ROWS loads, so the FMA
// units are the limit, not the load ports. The loops must be unrolled for `sum` to live in registers.
template <int ROWS, int ROW_STEP>
VF_INLINE void step(Vec (&sum)[ROWS][NV], const float *a, const float *b) {
    Vec right[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; v++) right[v] = load(b + v * LANES);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
        Vec left = splat(a[row * ROW_STEP]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) sum[row][v] += left * right[v];
    }
}

// c[MR, NR] (+)= a[MR, depth] b[depth, NR].  `a` points at its first row in its first panel, panels `a_panel` floats
// apart; `b` and `c` are rows of NR floats.
// Not inlined: in a larger function the compiler may run out of registers for the sums, and a spill in this loop costs
// more than any call.
static __attribute__((noinline, unused)) void multiply_tile(float *c, const float *a, int64_t a_panel, const float *b,
                                                    int64_t depth, bool accumulate) {
    // The columns of `a` are the depth, and lie in panels as well: NR steps within one, then on to the next.
    Vec sum[MR][NV] = {};
    for (; depth >= NR; depth -= NR, a += a_panel)
#pragma GCC unroll 2
        for (int k = 0; k < NR; k++, b += NR) step<MR, NR>(sum, a + k, b);
    for (int64_t k = 0; k < depth; k++, b += NR) step<MR, NR>(sum, a + k, b);
    store_tile(sum, c, accumulate);
}

// c[TR, NR] (+)= transpose(a[depth, TR]) b[depth, NR].  `a` points at TR columns inside one panel. Backwards: in a
// sum over causal queries the early ones have the large probabilities, and small terms first rounds less.
static __attribute__((noinline, unused)) void multiply_tile_transposed(float *c, const float *a, const float *b,
                                                               int64_t depth, bool accumulate) {
    Vec sum[TR][NV] = {};
    a += (depth - 1) * NR, b += (depth - 1) * NR;
#pragma GCC unroll 2
    for (int64_t k = 0; k < depth; k++, a -= NR, b -= NR) step<TR, 1>(sum, a, b);
    store_tile(sum, c, accumulate);
}

}  // namespace VF_TARGET
