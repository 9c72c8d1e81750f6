#include "attention/pair_gate_check.hpp"

int32_t check_pair_gate(const vf_pair_gate &c) {
    const int64_t limit = 1 << 30;  // positions are int32
    const int64_t sizes[] = {c.batch, c.heads, c.kv_heads, c.queries, c.keys};
    for (int64_t size : sizes)
        if (size < 0 || size > limit) return VF_BAD_SIZE;
    if (c.head_width < 1 || c.head_width > 4096 || c.threads < 1) return VF_BAD_SIZE;
    // A thread's sums for the gradient of a take 64 bytes a unit and query: 6 MB at this limit.
    if (c.units < 1 || c.units > 1024) return VF_BAD_SIZE;
    if (c.heads && (c.kv_heads < 1 || c.heads % c.kv_heads)) return VF_BAD_SIZE;
    if (c.dtype != VF_FLOAT32 && c.dtype != VF_BFLOAT16) return VF_BAD_DTYPE;
    if (c.form < VF_PAIR_PRODUCT || c.form > VF_PAIR_THRESHOLD) return VF_BAD_FORM;
    if (c.form == VF_PAIR_THRESHOLD && !(c.threshold > 0 && c.threshold < 1)) return VF_BAD_FORM;
    if (c.window < 0 || c.prefix < 0) return VF_BAD_BRANCH;
    if (c.heads && !c.output) return VF_BAD_POINTER;
    if (c.batch * c.heads * c.queries == 0) return VF_OK;
    if (!c.q.data || !c.a.data || !c.scale || !c.position || !c.start || !c.out.data || !c.lse) return VF_BAD_POINTER;
    if (c.keys && (!c.k.data || !c.v.data || !c.b.data)) return VF_BAD_POINTER;
    for (int64_t at = 0; at < c.batch * c.queries; at++)
        if (c.start[at] <= c.position[at] && (c.start[at] < 0 || c.position[at] >= c.keys)) return VF_BAD_POSITION;
    return VF_OK;
}

int32_t check_pair_gate_grad(const vf_pair_gate_grad &call) {
    const vf_pair_gate &c = call.forward;
    if (int32_t status = check_pair_gate(c)) return status;
    if (c.heads && (!call.grad_output || !call.grad_bias || !call.grad_scale)) return VF_BAD_POINTER;
    if (c.batch * c.heads * c.keys > 0 && (!call.grad_k.data || !call.grad_v.data || !call.grad_b.data))
        return VF_BAD_POINTER;
    if (c.batch * c.heads * c.queries > 0 && (!call.grad_out.data || !call.grad_q.data || !call.grad_a.data || !c.norm))
        return VF_BAD_POINTER;
    return VF_OK;
}
