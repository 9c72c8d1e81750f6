// From a dot product and a gate's logit to a score, in each of the three forms, and back.
#pragma once

#include <math.h>

#include "attention/mixture_rows.hpp"

namespace VF_TARGET {

constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

struct Gate {
    Vec open, closed;  // sigmoid(logit) and 1 - sigmoid(logit), neither rounded against 1
    Vec small;         // 2^-|logit log2(e)|
};

VF_INLINE Gate sigmoid(Vec logit) {
    Ints positive = logit > 0.0f;
    Vec power = logit * LOG2E, small = exp2(positive ? -power : power);
    Vec large_side = 1.0f / (1.0f + small), small_side = small * large_side;
    return {positive ? large_side : small_side, positive ? small_side : large_side, small};
}

// log2(1 + z) for 0 <= z <= 1, to 1.3e-7.
VF_INLINE Vec log2_one_plus(Vec z) {
    Vec p = splat(-0.00379414787f);
    p = p * z + 0.0244330429f;
    p = p * z - 0.0737751499f;
    p = p * z + 0.143822491f;
    p = p * z - 0.214902431f;
    p = p * z + 0.28157258f;
    p = p * z - 0.359497309f;
    p = p * z + 0.480789036f;
    p = p * z - 0.72134316f;
    p = p * z + 1.44269502f;
    return p * z;
}

// The score as a power of 2, from alpha log2(e). A pair below the threshold (logit < cut) gets -inf: it is not read.
template <int FORM>
VF_INLINE Vec rate(Vec alpha, Vec logit, const Gate &gate, float cut) {
    if constexpr (FORM == VF_PAIR_PRODUCT) return alpha * gate.open;
    Vec score = alpha + min(logit, Vec{}) * LOG2E - log2_one_plus(gate.small);
    if constexpr (FORM == VF_PAIR_LOG) return score;
    return logit < cut ? splat(-INFINITY) : score;
}

// The gradient of the score becomes that of alpha and of the logit.
template <int FORM>
VF_INLINE void differentiate(Vec dscore, Vec alpha, const Gate &gate, Vec &dalpha, Vec &dlogit) {
    if constexpr (FORM == VF_PAIR_PRODUCT) {
        dalpha = dscore * gate.open;
        dlogit = dalpha * (alpha * LN2) * gate.closed;
    } else {
        dalpha = dscore;
        dlogit = dscore * gate.closed;
    }
}

// sigmoid(cut) = threshold.
VF_INLINE float threshold_logit(const vf_pair_gate &call) {
    if (call.form != VF_PAIR_THRESHOLD) return -INFINITY;
    return (float)log(call.threshold / (1.0 - call.threshold));
}

// The pairs a call reads, as mixture_rows.hpp describes them: one branch.
VF_INLINE vf_mixture geometry(const vf_pair_gate &call) {
    vf_mixture shape = {};
    shape.batch = call.batch, shape.heads = call.heads, shape.kv_heads = call.kv_heads;
    shape.queries = call.queries, shape.keys = call.keys;
    shape.position = call.position, shape.start = call.start;
    shape.branch_count = 1;
    shape.branch[0].window = call.window, shape.branch[0].prefix = call.prefix, shape.branch[0].edge = 1.0f;
    return shape;
}

template <typename T>
VF_INLINE T *at(const vf_tensor &x, int64_t b, int64_t h, int64_t row) {
    return (T *)x.data + b * x.stride[0] + h * x.stride[1] + row * x.stride[2];
}

// Rows of a [count, P] as they lie; a query that sees nothing may hold anything and becomes 0, as do rows past the end.
[[maybe_unused]] static void copy_hidden(float *to, const vf_pair_gate &call, const Rows &rows, int64_t b, int64_t h,
                                         int64_t first) {
    for (int row = 0; row < BLOCK; row++) {
        bool zero = row >= rows.count || !rows.keep[row];
        const float *from = zero ? nullptr : at<float>(call.a, b, h, first + row);
        for (int64_t p = 0; p < call.units; p++) to[row * call.units + p] = zero ? 0.0f : from[p];
    }
}

VF_INLINE void halve(float *to, const float *from, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = 0.5f * from[i];
}

}  // namespace VF_TARGET
