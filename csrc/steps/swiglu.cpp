// silu(gate) * up, and its gradients, in one pass each.
#include "kernels.hpp"
#include "simd/vector.hpp"

namespace VF_TARGET {

// Elements to a task: both operands and both results stay in L1 and L2.
static constexpr int64_t TASK = 16384;

// 1 / (1 + exp(-x)); 0 where that is denormal.
VF_INLINE Vec sigmoid(Vec x) {
    // exp2 takes arguments below 127 only; above 126 the sigmoid is below the smallest normal number.
    Vec exponent = x * -LOG2E;
    return exponent > 126.0f ? Vec{} : 1.0f / (1.0f + exp2(min(exponent, splat(126.0f))));
}

// The last elements, fewer than a vector, go through a vector of zeros.
template <typename Step>
static void each(const vf_swiglu &c, Step step) {
#pragma omp parallel for num_threads(c.threads) schedule(static)
    for (int64_t task = 0; task < (c.elements + TASK - 1) / TASK; task++) {
        int64_t end = (task + 1) * TASK < c.elements ? (task + 1) * TASK : c.elements;
        for (int64_t at = task * TASK; at < end; at += LANES)
            // TASK is a multiple of LANES, so only the very last vector can be short.
            step(at, end - at < LANES ? (int)(end - at) : LANES);
    }
}

VF_INLINE Vec load_some(const float *from, int count) {
    if (count == LANES) return load(from);
    Vec x{};
    memcpy(&x, from, count * sizeof(float));
    return x;
}

VF_INLINE void store_some(float *to, Vec x, int count) {
    if (count == LANES)
        store(to, x);
    else
        memcpy(to, &x, count * sizeof(float));
}

int32_t swiglu_forward(const vf_swiglu &c) {
    each(c, [&](int64_t at, int count) {
        Vec gate = load_some(c.gate + at, count), up = load_some(c.up + at, count);
        store_some(c.out + at, gate * sigmoid(gate) * up, count);
    });
    return VF_OK;
}

int32_t swiglu_backward(const vf_swiglu_grad &g) {
    const vf_swiglu &c = g.forward;
    each(c, [&](int64_t at, int count) {
        Vec gate = load_some(c.gate + at, count), up = load_some(c.up + at, count);
        Vec grad = load_some(g.grad_out + at, count), open = sigmoid(gate);
        store_some(g.grad_up + at, grad * gate * open, count);
        // d silu / d gate = s (1 + gate (1 - s)): s is computed again, so that the forward keeps nothing but its
        // inputs.
        store_some(g.grad_gate + at, grad * up * open * (1.0f + gate * (1.0f - open)), count);
    });
    return VF_OK;
}

}  // namespace VF_TARGET
