// The pair network: logits sum_p w_p GELU(a_ip + b_jp) + bias of a few queries on one panel of keys, and its gradient.
//
// All pairs x P units go through GELU, so its cost is the kernel's cost. With u = a + b and t = |u|,
//
//     2 GELU(u) = u + t E(t)            E(t) = erf(t / sqrt 2) = 1 - f(t)^4
//     2 GELU'(u) = 1 + sign(u) (E(t) + t n(t^2))       n(s) = sqrt(2 / pi) exp(-s / 2) = e(s)^8
//
// f and e are roots of functions that fall to 0, so they are nearly straight: a short polynomial, squared two or three
// times, covers every u without a table, a division, a branch or an exponent trick. From t = 6 on E is 1 in float32.
// (A higher root of E would save a multiplication, but the power multiplies the root's rounding error.)
#pragma once

#include "simd/panels.hpp"

namespace VF_TARGET {

// Queries that go through the network together. GROUP * NV chains of dependent FMAs hide each other's latency: 8 on
// AVX-512 and NEON, 4 on targets of 16 registers, where more would not fit beside the polynomial's constants.
constexpr int GROUP = LANES == 16 ? 4 : 2;
static_assert(MR % GROUP == 0, "a register tile of queries is a whole number of groups");

VF_INLINE Vec absolute(Vec x) { return (Vec)((Ints)x & 0x7fffffff); }
VF_INLINE Vec square(Vec x) { return x * x; }

// erf(t / sqrt 2) for 0 <= t <= 6.
VF_INLINE Vec rise(Vec t) {
    Vec f = splat(6.90353943e-08f);
    f = f * t - 1.25274016e-06f;
    f = f * t + 5.31459045e-06f;
    f = f * t + 3.21162006e-05f;
    f = f * t - 0.000279089581f;
    f = f * t - 0.000159972769f;
    f = f * t + 0.00460594147f;
    f = f * t + 0.00549200689f;
    f = f * t - 0.0596892871f;
    f = f * t - 0.19947058f;
    f = f * t + 1.0f;
    return 1.0f - square(square(f));
}

// sqrt(2 / pi) exp(-s / 2) for 0 <= s <= 36.
VF_INLINE Vec bell(Vec s) {
    Vec e = splat(4.78136419e-11f);
    e = e * s - 7.06937264e-09f;
    e = e * s + 6.11626092e-07f;
    e = e * s - 3.95263887e-05f;
    e = e * s + 0.00189870154f;
    e = e * s - 0.0607606098f;
    e = e * s + 0.972170651f;
    return square(square(square(e)));
}

// What the gradient pass needs again of every unit: [P][2][ROWS][NR], E and then 2 GELU. It stays in L1 between the
// passes, where a load is cheaper than the polynomial.
VF_INLINE int64_t saved_floats(int64_t units) { return units * 2 * GROUP * NR; }

// logits[ROWS][NR] of ROWS queries on a panel of keys. a [ROWS, P] rows, b [P, NR], half_output w / 2.
template <int ROWS, bool SAVE>
static __attribute__((noinline)) void gate_logits(float *logits, const float *a, const float *b,
                                                  const float *half_output, float bias, int64_t units, float *saved) {
    Vec sum[ROWS][NV];
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < NV; v++) sum[row][v] = splat(bias);
    for (int64_t p = 0; p < units; p++) {
        // Units outside: a unit's weight is loaded once for the whole group, whose chains run side by side.
        Vec weight = splat(half_output[p]);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) {
                Vec u = a[row * units + p] + load(b + p * NR + v * LANES), size = absolute(u);
                // Beyond 6 the polynomial runs away, but E is 1 there: only the argument is clamped, not the factor in
                // front of it.
                Vec risen = rise(min(size, splat(6.0f))), hidden = size * risen + u;
                sum[row][v] += weight * hidden;
                if (SAVE) {
                    float *to = saved + (p * 2 * ROWS + row) * NR + v * LANES;
                    store(to, risen);
                    store(to + ROWS * NR, hidden);
                }
            }
    }
    for (int row = 0; row < ROWS; row++)
        for (int v = 0; v < NV; v++) store(logits + row * NR + v * LANES, sum[row][v]);
}

// From dlogits[ROWS][NR]: da[ROWS, P] += sum over keys, lane by lane, db[P, NR] += sum over queries (both still to be
// multiplied by w / 2), dw[P] += sum over pairs of 2 GELU, lane by lane (still to be halved).
template <int ROWS>
static __attribute__((noinline)) void gate_gradient(const float *dlogits, const float *a, const float *b, int64_t units,
                                                    const float *saved, Vec *da, float *db, Vec *dw) {
    Vec d[ROWS][NV], row_sum[ROWS], column_sum[NV] = {};
    for (int row = 0; row < ROWS; row++) {
        row_sum[row] = Vec{};
        for (int v = 0; v < NV; v++) {
            d[row][v] = load(dlogits + row * NR + v * LANES);
            row_sum[row] += d[row][v];
            column_sum[v] += d[row][v];
        }
    }
    for (int64_t p = 0; p < units; p++) {
        // The 1 of 1 + sign(u) (..) is the same for every unit: the sums start with it.
        Vec column[NV], total = {};
        for (int v = 0; v < NV; v++) column[v] = column_sum[v];
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) {
            Vec along = row_sum[row];
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) {
                const float *from = saved + (p * 2 * ROWS + row) * NR + v * LANES;
                Vec u = a[row * units + p] + load(b + p * NR + v * LANES), t = min(absolute(u), splat(6.0f));
                // Clamped at 6, where t n(t^2) is 7e-8, no more than the rounding of E = 1.
                Vec slope = t * bell(t * t) + load(from);
                // Times sign(u), by its sign bit.
                slope = (Vec)((Ints)slope ^ ((Ints)u & INT32_MIN));
                along += d[row][v] * slope;
                column[v] += d[row][v] * slope;
                total += d[row][v] * load(from + ROWS * NR);
            }
            da[row * units + p] += along;
        }
        for (int v = 0; v < NV; v++)
            store(db + p * NR + v * LANES, load(db + p * NR + v * LANES) + column[v]);
        dw[p] += total;
    }
}

}  // namespace VF_TARGET
