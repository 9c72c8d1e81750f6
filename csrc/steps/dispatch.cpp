// Checks the arguments of the steps between matrix products, calls their kernels.
#include <math.h>
#include <string.h>

#include "kernels.hpp"

namespace {

int32_t check(const vf_norm &c) {
    if (c.tokens < 0 || c.heads < 0 || c.width < 1 || c.threads < 1) return VF_BAD_SIZE;
    if (c.cosines && (c.angles < 1 || c.width % 2 || c.width > VF_MAX_ROTATED)) return VF_BAD_SIZE;
    if (c.tokens * c.heads == 0) return VF_OK;
    if (!c.weight || !c.cosines != !c.sines) return VF_BAD_POINTER;
    return VF_OK;
}

// Smaller weights than this one would leave denormal outputs.
constexpr float LEAST_WEIGHT = 1e-12f;
// How many times as large as the other the larger weight of a pair may be: the other loses that many roundings.
constexpr float UNEVEN = 32;

bool restorable(const vf_norm &c) {
    for (int64_t d = 0; d < c.width; d++)
        if (!(fabsf(c.weight[d]) >= LEAST_WEIGHT)) return false;
    if (!c.cosines) return true;
    int64_t half = c.width / 2;
    for (int64_t d = 0; d < half; d++) {
        float low = fabsf(c.weight[d]), high = fabsf(c.weight[d + half]);
        if (low > UNEVEN * high || high > UNEVEN * low) return false;
    }
    for (int64_t row = 0; row < c.angles; row++) {
        const float *cosines = c.cosines + row * c.width, *sines = c.sines + row * c.width;
        size_t bytes = half * sizeof(float);
        // The inverse turns both halves by one angle, so their tables must be the same to the last bit.
        if (memcmp(cosines, cosines + half, bytes) || memcmp(sines, sines + half, bytes)) return false;
    }
    return true;
}

int32_t check(const vf_swiglu &c) {
    if (c.elements < 0 || c.threads < 1) return VF_BAD_SIZE;
    return c.elements && (!c.gate || !c.up) ? VF_BAD_POINTER : VF_OK;
}

}  // namespace

extern "C" {

int32_t vf_norm_restorable(const vf_norm *call) {
    return call && check(*call) == VF_OK && restorable(*call);
}

int32_t vf_norm_forward(int32_t target, const vf_norm *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (int32_t status = check(*call)) return status;
    if (call->tokens * call->heads > 0 && (!call->x || !call->out || !call->inverse)) return VF_BAD_POINTER;
    return kernels->norm_forward(*call);
}

int32_t vf_norm_backward(int32_t target, const vf_norm_grad *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    const vf_norm &c = call->forward;
    if (int32_t status = check(c)) return status;
    if (call->parts < 1) return VF_BAD_SIZE;
    if (c.tokens * c.heads > 0 && !c.x && (!c.out || !c.inverse)) return VF_BAD_POINTER;
    if (!call->grad_weight || (c.tokens * c.heads > 0 && (!call->grad_out || !call->grad_x))) return VF_BAD_POINTER;
    return kernels->norm_backward(*call);
}

int32_t vf_swiglu_forward(int32_t target, const vf_swiglu *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (int32_t status = check(*call)) return status;
    if (call->elements && !call->out) return VF_BAD_POINTER;
    return kernels->swiglu_forward(*call);
}

int32_t vf_swiglu_backward(int32_t target, const vf_swiglu_grad *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (int32_t status = check(call->forward)) return status;
    if (call->forward.elements && (!call->grad_out || !call->grad_gate || !call->grad_up)) return VF_BAD_POINTER;
    return kernels->swiglu_backward(*call);
}

int32_t vf_cross_entropy_of_rows(int32_t target, const vf_cross_entropy *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (call->rows < 0 || call->classes < 1 || call->threads < 1) return VF_BAD_SIZE;
    if (call->rows && (!call->logits || !call->labels || !call->losses || !call->shares)) return VF_BAD_POINTER;
    // Kernels take labels as indices, so a wrong one must not get that far.
    for (int64_t row = 0; row < call->rows; row++)
        if (call->labels[row] < 0 || call->labels[row] >= call->classes) return VF_BAD_LABEL;
    return kernels->cross_entropy(*call);
}

}  // extern "C"
