// The vector type of the target this file is compiled for, and the few operations kernels need on it.
// GCC/clang vector extensions: arithmetic, comparison and ?: work lane by lane, a scalar operand is broadcast.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VF_INLINE static inline __attribute__((always_inline))

namespace VF_TARGET {

// LANES  floats in a vector register.
// NR     floats in a panel row: the width of a register tile.
// MR     rows of a register tile. MR * NR / LANES accumulators plus one row of B and one broadcast must fit the
//        register file, and at least 8 accumulators hide the latency of two FMA units.
// TR     rows of a register tile whose left operand is transposed; divides NR, so a tile stays inside a panel.
#if defined(__AVX512F__)
constexpr int LANES = 16, NR = 32, MR = 12, TR = 8;  // 32 registers: 24 accumulators, 2 of B, broadcasts
#elif defined(__AVX2__)
constexpr int LANES = 8, NR = 16, MR = 6, TR = 4;  // 16 registers: 12 accumulators, 2 of B, broadcasts
#elif defined(__ARM_NEON)
constexpr int LANES = 4, NR = 16, MR = 6, TR = 4;  // 32 registers: 24 accumulators, 4 of B, broadcasts
#else
constexpr int LANES = 4, NR = 8, MR = 4, TR = 4;  // 16 registers of SSE2: 8 accumulators, 2 of B, broadcasts
#endif
constexpr int NV = NR / LANES;  // vectors in a panel row

// Scores are kept as powers of 2, because exp2 below is cheaper than exp: a score times LOG2E, and back by LN2.
constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

typedef float Vec __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));  // unsigned: overflow is defined
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
// Unaligned, and over memory of any type: rows of tensors begin anywhere.
typedef float LooseVec __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t LooseHalves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

VF_INLINE Vec load(const float *from) { return *(const LooseVec *)from; }
VF_INLINE void store(float *to, Vec x) { *(LooseVec *)to = x; }
// x - 0 is x, also for -0 and NaN, so the compiler drops the subtraction; x + 0 would turn -0 into +0.
VF_INLINE Vec splat(float x) { return x - Vec{}; }
VF_INLINE Ints splat(int32_t x) { return x - Ints{}; }
// As the instructions have it: b where either is NaN.
VF_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
VF_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }

// The tail of a row is done by scalars: it must not round otherwise than the same numbers would in a vector.
// a * b + c of scalars, rounded as the target rounds it in vectors.
VF_INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

// 0, 1, 2, ... in the lanes.
VF_INLINE Ints lanes() {
    Ints x;
    for (int lane = 0; lane < LANES; lane++) x[lane] = lane;
    return x;
}

// Lane i takes the value of lane i ^ GAP.
template <int GAP>
VF_INLINE Vec swap_lanes(Vec x) {
#if defined(__clang__)
    // clang has no __builtin_shuffle; it turns this loop into the same single permutation.
    Vec y;
    for (int lane = 0; lane < LANES; lane++) y[lane] = x[lane ^ GAP];
    return y;
#else
    return __builtin_shuffle(x, lanes() ^ GAP);
#endif
}

// The lanes in the opposite order.
VF_INLINE Vec reversed(Vec x) {
#if defined(__clang__)
    Vec y;
    for (int lane = 0; lane < LANES; lane++) y[lane] = x[LANES - 1 - lane];
    return y;
#else
    return __builtin_shuffle(x, LANES - 1 - lanes());
#endif
}

// Halving in a fixed order: the same sum on every run.
VF_INLINE float sum_lanes(Vec x) {
    if constexpr (LANES > 8) x += swap_lanes<8>(x);
    if constexpr (LANES > 4) x += swap_lanes<4>(x);
    x += swap_lanes<2>(x);
    x += swap_lanes<1>(x);
    return x[0];
}

VF_INLINE float max_lanes(Vec x) {
    if constexpr (LANES > 8) x = max(x, swap_lanes<8>(x));
    if constexpr (LANES > 4) x = max(x, swap_lanes<4>(x));
    x = max(x, swap_lanes<2>(x));
    x = max(x, swap_lanes<1>(x));
    return x[0];
}

// 2^x to 1e-7 relative; exactly 1 at 0, exactly 0 below -126 (so at -inf). x must be below 127.
// Adding 1.5 * 2^23 rounds x to an integer kept in the low mantissa bits (this is what -ffast-math would break);
// the rest, in [-1/2, 1/2], goes through a minimax polynomial and the integer is added to the exponent. Far below -126
// that is nonsense, which the last line replaces; denormals would slow every product they enter.
VF_INLINE Vec exp2(Vec x) {
    const float rounder = 12582912.0f;
    Vec shifted = x + rounder;
    Vec f = x - (shifted - rounder);
    Vec p = splat(0.000153458111f);
    p = p * f + 0.00133999315f;
    p = p * f + 0.00961848896f;
    p = p * f + 0.0555032878f;
    p = p * f + 0.240226469f;
    p = p * f + 0.693147206f;
    p = p * f + 1.0f;
    Bits scaled = (Bits)p + ((Bits)shifted << 23);
    return x < -126.0f ? Vec{} : (Vec)scaled;
}

// bfloat16 is the upper half of a float32; rounding is to nearest even, and NaN stays NaN.
VF_INLINE float from_bfloat16(uint16_t x) {
    uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}
VF_INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    // Rounding adds to the bits, and the carry of a NaN's mantissa could run through the exponent into the sign.
    if (x != x) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
// Widening only shifts the bits to the top of 32, so subnormals and NaN come through as they are.
VF_INLINE Vec load(const uint16_t *from) {
    Bits wide = __builtin_convertvector(*(const LooseHalves *)from, Bits);
    return (Vec)(wide << 16);
}
VF_INLINE float to_float(float x) { return x; }
VF_INLINE float to_float(uint16_t x) { return from_bfloat16(x); }
VF_INLINE void put(float *to, float x) { *to = x; }
VF_INLINE void put(uint16_t *to, float x) { *to = to_bfloat16(x); }
VF_INLINE void store(uint16_t *to, Vec x) {
    Bits bits = (Bits)x;
    // Half of the last kept place, less one where that place is even, so that a tie goes to the even neighbour.
    Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    Ints quiet = x != x ? splat((int32_t)0x7fc0) : (Ints)rounded;
    *(LooseHalves *)to = __builtin_convertvector(quiet, Halves);
}

}  // namespace VF_TARGET
