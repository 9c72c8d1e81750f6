// Checks the arguments of products with few vectors and of layers for few tokens, calls their kernels.
#include "kernels.hpp"

namespace {

bool fits(const vf_matrix &m, int64_t rows, int64_t columns) {
    if (m.rows != rows || m.columns != columns || rows < 0 || columns < 1) return false;
    if (m.kind != VF_FLOAT32 && m.kind != VF_BFLOAT16 && m.kind != VF_INT8) return false;
    if (rows && !m.data) return false;
    // A group is a whole number of vectors on every target.
    return m.kind != VF_INT8 || (m.scales && m.group > 0 && m.group % 16 == 0 && columns % m.group == 0);
}

bool few(int64_t count) { return count >= 1 && count <= VF_MOST_FEW; }

int32_t check(const vf_layer &c) {
    if (!few(c.tokens) || c.threads < 1 || c.width < 1 || c.heads < 1 || c.kv_heads < 1 || c.heads % c.kv_heads)
        return VF_BAD_SIZE;
    if (c.head_width < 2 || c.head_width % 2 || c.angles < 1) return VF_BAD_SIZE;
    int64_t read = c.heads * c.head_width, kept = c.kv_heads * c.head_width, inner = c.gate.rows;
    if (!fits(c.q, read, c.width) || !fits(c.k, kept, c.width) || !fits(c.v, kept, c.width) ||
        !fits(c.o, c.width, read) || !fits(c.gate, inner, c.width) || !fits(c.up, inner, c.width) ||
        !fits(c.down, c.width, inner))
        return VF_BAD_SIZE;
    const void *needed[] = {c.input_norm, c.output_norm, c.cosines,  c.sines,    c.x,    c.normed,
                            c.queries,    c.keys,        c.values,   c.attended, c.inner};
    for (const void *one : needed)
        if (!one) return VF_BAD_POINTER;
    return VF_OK;
}

int32_t check(const vf_step &c) {
    if (int32_t status = check(c.layer)) return status;
    const vf_mixture &a = c.attention;
    if (a.batch < 1 || a.queries < 1 || a.batch * a.queries != c.layer.tokens || a.keys < a.queries) return VF_BAD_SIZE;
    if (a.heads != c.layer.heads || a.kv_heads != c.layer.kv_heads || a.head_width != c.layer.head_width)
        return VF_BAD_SIZE;
    if (a.dtype != VF_FLOAT32) return VF_BAD_DTYPE;
    if (a.branch_count < 1 || a.branch_count > 2 || (a.branch_count == 2 && (!a.weights || !c.mix_warmth)))
        return VF_BAD_BRANCH;
    if (a.branch_count == 2 && c.mix.data && !fits(c.mix, a.heads, c.layer.width)) return VF_BAD_SIZE;
    for (int64_t g = 0; c.kept && g < a.kv_heads; g++) {
        if (c.kept[g].keys < a.queries || c.kept[g].keys > a.keys) return VF_BAD_SIZE;
        if (!c.kept[g].k.data || !c.kept[g].v.data) return VF_BAD_POINTER;
    }
    if (c.sink && a.branch_count != 1) return VF_BAD_BRANCH;
    if (c.kept && a.score != VF_SCORE_DOT) return VF_BAD_SCORE;
    return a.q.data == c.layer.queries && a.out.data == c.layer.attended ? vf_check_decode(a) : VF_BAD_POINTER;
}

}  // namespace

extern "C" {

int32_t vf_linear_of_few(int32_t target, const vf_linear *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (!few(call->vectors) || call->threads < 1) return VF_BAD_SIZE;
    if (!fits(call->matrix, call->matrix.rows, call->matrix.columns)) return VF_BAD_SIZE;
    if (!call->x || (call->matrix.rows && !call->out)) return VF_BAD_POINTER;
    return kernels->linear(*call);
}

int32_t vf_layer_project(int32_t target, const vf_layer *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (int32_t status = check(*call)) return status;
    return kernels->layer_project(*call);
}

int32_t vf_layer_finish(int32_t target, const vf_layer *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (int32_t status = check(*call)) return status;
    return kernels->layer_finish(*call);
}

int32_t vf_layer_step(int32_t target, const vf_step *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (int32_t status = check(*call)) return status;
    return kernels->layer_step(*call);
}

}  // extern "C"
