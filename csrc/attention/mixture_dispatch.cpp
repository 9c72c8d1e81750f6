// Checks the arguments of mixtures and calls the kernels of a target.
#include "kernels.hpp"

namespace {

bool is_pair_gate(const vf_mixture &c) {
    return c.score >= VF_SCORE_PAIR_PRODUCT && c.score <= VF_SCORE_PAIR_THRESHOLD;
}

int32_t check_branches(const vf_mixture &c) {
    for (int m = 0; m < c.branch_count; m++) {
        const vf_branch &branch = c.branch[m];
        if (branch.width && !(branch.edge > 0 && branch.limit >= 0)) return VF_BAD_BRANCH;
        if (c.heads && (!branch.window || !branch.prefix)) return VF_BAD_POINTER;
        for (int64_t h = 0; h < c.heads; h++)
            if (branch.window[h] < 0 || branch.prefix[h] < 0) return VF_BAD_BRANCH;
    }
    return VF_OK;
}

int32_t check_score(const vf_mixture &c) {
    if (c.score < VF_SCORE_DOT || c.score > VF_SCORE_DISTANCE_BIAS) return VF_BAD_SCORE;
    if (is_pair_gate(c)) {
        // A thread's sums for the gradient of a take 64 bytes a unit and query: 6 MB at this limit.
        if (c.pair.units < 1 || c.pair.units > VF_MAX_UNITS) return VF_BAD_SIZE;
        if (c.score == VF_SCORE_PAIR_THRESHOLD && !(c.pair.threshold > 0 && c.pair.threshold < 1)) return VF_BAD_SCORE;
        if (c.heads && !c.pair.output) return VF_BAD_POINTER;
        if (c.batch * c.heads * c.queries > 0 && !c.pair.a.data) return VF_BAD_POINTER;
        if (c.batch * c.heads * c.keys > 0 && !c.pair.b.data) return VF_BAD_POINTER;
    }
    if (c.score == VF_SCORE_DISTANCE_BIAS) {
        if (c.bias.distances < 1 || c.bias.distances > 1 << 30) return VF_BAD_SCORE;
        if (c.batch * c.heads * c.queries > 0 && !c.bias.table) return VF_BAD_POINTER;
    }
    return VF_OK;
}

int32_t check(const vf_mixture &c) {
    const int64_t limit = 1 << 30;  // positions are int32
    const int64_t sizes[] = {c.batch, c.heads, c.kv_heads, c.queries, c.keys};
    for (int64_t size : sizes)
        if (size < 0 || size > limit) return VF_BAD_SIZE;
    if (c.head_width < 1 || c.head_width > VF_MAX_WIDTH || c.threads < 1) return VF_BAD_SIZE;
    if (c.branch_count < 1 || c.branch_count > VF_MAX_BRANCHES) return VF_BAD_SIZE;
    if (c.heads && (c.kv_heads < 1 || c.heads % c.kv_heads)) return VF_BAD_SIZE;
    if (c.dtype != VF_FLOAT32 && c.dtype != VF_BFLOAT16) return VF_BAD_DTYPE;
    if (int32_t status = check_branches(c)) return status;
    if (int32_t status = check_score(c)) return status;
    if (c.batch * c.heads * c.queries == 0) return VF_OK;
    if (!c.q.data || !c.scale || !c.position || !c.start || !c.logsumexp) return VF_BAD_POINTER;
    if (c.keys && (!c.k.data || !c.v.data)) return VF_BAD_POINTER;
    for (int64_t at = 0; at < c.batch * c.queries; at++)
        if (c.start[at] <= c.position[at] && (c.start[at] < 0 || c.position[at] >= c.keys)) return VF_BAD_POSITION;
    return VF_OK;
}

// A few queries against a long cache: packing the keys would cost more than the products. Not when a backward
// follows: it repeats the scores of mixture_forward to the last bit, those of mixture_decode only nearly. And not for a
// pair gate: its network, not the keys, is what costs there.
bool decodes(const vf_mixture &c) {
    return !c.norm && !is_pair_gate(c) && c.queries * (c.heads / c.kv_heads) <= 16 && c.queries <= 8;
}

}  // namespace

int32_t vf_check_decode(const vf_mixture &call) {
    if (int32_t status = check(call)) return status;
    return decodes(call) ? VF_OK : VF_BAD_SIZE;
}

extern "C" {

int32_t vf_find_delta(int32_t target, const vf_delta *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (call->batch < 0 || call->heads < 0 || call->queries < 0 || call->head_width < 1 || call->threads < 1)
        return VF_BAD_SIZE;
    if (call->dtype != VF_FLOAT32 && call->dtype != VF_BFLOAT16) return VF_BAD_DTYPE;
    if (call->batch * call->heads * call->queries == 0) return VF_OK;
    if (!call->grad_out.data || !call->out.data || !call->position || !call->start || !call->delta)
        return VF_BAD_POINTER;
    return kernels->find_delta(*call);
}

int32_t vf_mixture_forward(int32_t target, const vf_mixture *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (int32_t status = check(*call)) return status;
    if (call->batch * call->heads * call->queries == 0) return VF_OK;
    if (!call->out.data) return VF_BAD_POINTER;
    return decodes(*call) ? kernels->mixture_decode(*call) : kernels->mixture_forward(*call);
}

int32_t vf_mixture_backward(int32_t target, const vf_mixture_grad *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    const vf_mixture &c = call->forward;
    if (int32_t status = check(c)) return status;
    if (c.batch * c.kv_heads * c.keys > 0 && (!call->grad_k.data || !call->grad_v.data)) return VF_BAD_POINTER;
    if (c.batch * c.heads * c.queries > 0 && (!call->grad_out.data || !call->grad_q.data || !c.norm || !call->delta))
        return VF_BAD_POINTER;
    if (is_pair_gate(c)) {
        if (c.heads && (!call->grad_pair_output || !call->grad_pair_bias || !call->grad_scale)) return VF_BAD_POINTER;
        if (c.batch * c.heads * c.queries > 0 && !call->grad_pair_a.data) return VF_BAD_POINTER;
        if (c.batch * c.heads * c.keys > 0 && !call->grad_pair_b.data) return VF_BAD_POINTER;
    }
    return kernels->mixture_backward(*call);
}

}  // extern "C"
