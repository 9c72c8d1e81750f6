// Checks the arguments of the top-k kernels and calls those of a target.
#include <stdlib.h>

#include "kernels.hpp"

namespace {

bool is_size(int64_t x) { return x >= 0 && x <= 1 << 30; }  // positions are int32

int32_t check_shape(int64_t batch, int64_t heads, int64_t kv_heads, int64_t queries, int64_t keys, int64_t width,
                    int32_t dtype, int32_t threads) {
    if (!is_size(batch) || !is_size(heads) || !is_size(kv_heads) || !is_size(queries) || !is_size(keys))
        return VF_BAD_SIZE;
    if (width < 1 || width > VF_MAX_WIDTH || threads < 1) return VF_BAD_SIZE;
    if (heads < 1 || kv_heads < 1 || heads % kv_heads) return VF_BAD_SIZE;
    // Readers of a block are numbered query * (heads / kv_heads) + head in int32.
    if (!is_size(heads / kv_heads * queries)) return VF_BAD_SIZE;
    if (dtype != VF_FLOAT32 && dtype != VF_BFLOAT16) return VF_BAD_DTYPE;
    return VF_OK;
}

int32_t check_positions(const int32_t *position, const int32_t *start, int64_t count, int64_t keys) {
    for (int64_t at = 0; at < count; at++)
        if (start[at] <= position[at] && (start[at] < 0 || position[at] >= keys)) return VF_BAD_POSITION;
    return VF_OK;
}

int32_t check(const vf_select &c) {
    if (int32_t status = check_shape(c.batch, c.heads, c.kv_heads, c.queries, c.keys, c.head_width, c.dtype, c.threads))
        return status;
    if (!is_size(c.capacity) || c.block < 0) return VF_BAD_SIZE;
    if (c.batch * c.queries == 0) return VF_OK;
    if (!c.q.data || !c.position || !c.start || !c.budget || (c.capacity && !c.selected)) return VF_BAD_POINTER;
    if (c.keys && !c.k.data && !(c.block && c.pooled.data)) return VF_BAD_POINTER;
    return check_positions(c.position, c.start, c.batch * c.queries, c.keys);
}

int32_t check(const vf_selected &c) {
    if (int32_t status = check_shape(c.batch, c.heads, c.kv_heads, c.queries, c.keys, c.head_width, c.dtype, c.threads))
        return status;
    if (!is_size(c.capacity) || c.block < 0 || c.index_heads < 1 || c.heads % c.index_heads) return VF_BAD_SIZE;
    if (c.batch * c.queries == 0) return VF_OK;
    if (!c.q.data || !c.scale || !c.position || !c.start) return VF_BAD_POINTER;
    if ((c.capacity && !c.selected) || (c.keys && (!c.k.data || !c.v.data))) return VF_BAD_POINTER;
    return check_positions(c.position, c.start, c.batch * c.queries, c.keys);
}

// Threads worth waking for so many multiplications: each should find some 0.1 ms of work, or the barrier costs more
// than it saves. A decoded token runs on one. Results do not depend on the number.
int32_t worthwhile(int32_t threads, double products) {
    double most = products / 2e6 + 1;
    return most < threads ? (int32_t)most : threads;
}

double products(const vf_selected &c) {
    return (double)(c.batch * c.heads * c.queries) * (double)((c.capacity + 1) * (c.block ? c.block : 1) * c.head_width);
}

// Queries that share keys, up to which blocks are read key by key: packing a block for a matrix product takes longer
// than a product of so few rows.
constexpr int64_t FEW_ROWS = 4;

// The keys of a query's selected blocks and of its own block, ascending; -1 beyond the last.
void list_keys(int32_t *keys, int64_t room, const int32_t *blocks, const vf_selected &c, int32_t position, int32_t start) {
    int64_t count = 0;
    if (start <= position) {
        for (int64_t i = 0; i < c.capacity && blocks[i] >= 0; i++)
            for (int32_t j = 0; j < c.block; j++) keys[count++] = blocks[i] + j;
        for (int32_t j = position - (position - start) % c.block; j <= position; j++) keys[count++] = j;
    }
    for (; count < room; count++) keys[count] = -1;
}

// Attention over blocks as attention over their keys.
int32_t attend_listed_blocks(const vf_kernels &kernels, vf_selected c) {
    int64_t room = (c.capacity + 1) * c.block, rows = c.batch * c.index_heads * c.queries;
    int32_t *listed = (int32_t *)malloc((size_t)(rows * room) * sizeof(int32_t));
    if (!listed) return VF_NO_MEMORY;
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = row / (c.index_heads * c.queries) * c.queries + row % c.queries;
        list_keys(listed + row * room, room, c.selected + row * c.capacity, c, c.position[at], c.start[at]);
    }
    c.selected = listed, c.capacity = room, c.block = 0;
    int32_t status = kernels.selected_keys_forward(c);
    free(listed);
    return status;
}

}  // namespace

extern "C" {

int32_t vf_select_best(int32_t target, const vf_select *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (int32_t status = check(*call)) return status;
    if (call->batch * call->queries * call->capacity == 0) return VF_OK;
    vf_select c = *call;
    int64_t candidates = c.block ? c.keys / c.block : c.keys, rows = c.batch * c.heads * c.queries;
    bool pools = c.block && !c.pooled.data;
    c.threads = worthwhile(c.threads, (double)rows * (double)(candidates * c.head_width) +
                                          (pools ? (double)(c.batch * c.kv_heads * c.keys * c.head_width) : 0));
    return kernels->select_best(c);
}

int32_t vf_pool_keys(int32_t target, const vf_pool *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    vf_pool c = *call;
    if (int32_t status =
            check_shape(c.batch, c.kv_heads, c.kv_heads, c.new_keys, c.keys, c.head_width, c.dtype, c.threads))
        return status;
    if (c.block < 1) return VF_BAD_SIZE;
    if (c.batch * c.new_keys == 0) return VF_OK;
    if (!c.k.data || !c.position || !c.start || !c.pooled.data) return VF_BAD_POINTER;
    if (int32_t status = check_positions(c.position, c.start, c.batch * c.new_keys, c.keys)) return status;
    c.threads = worthwhile(c.threads, (double)(c.batch * c.kv_heads) * (double)(c.new_keys * c.head_width));
    return kernels->pool_keys(c);
}

int32_t vf_attend_selected(int32_t target, const vf_selected *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (int32_t status = check(*call)) return status;
    if (call->batch * call->queries == 0) return VF_OK;
    if (!call->out.data || !call->logsumexp) return VF_BAD_POINTER;
    vf_selected c = *call;
    c.threads = worthwhile(c.threads, products(c));
    // Not when a backward follows: it repeats the scores of the block kernel to the last bit, those of single keys only
    // nearly.
    if (c.block && !c.norm && c.queries * (c.heads / c.kv_heads) <= FEW_ROWS) return attend_listed_blocks(*kernels, c);
    return c.block ? kernels->selected_blocks_forward(c) : kernels->selected_keys_forward(c);
}

int32_t vf_attend_selected_backward(int32_t target, const vf_selected_grad *call) {
    const vf_kernels *kernels = vf_find_kernels(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    const vf_selected &c = call->forward;
    if (int32_t status = check(c)) return status;
    if (c.batch * c.keys > 0 && (!call->grad_k.data || !call->grad_v.data)) return VF_BAD_POINTER;
    if (c.batch * c.queries > 0 && (!call->grad_out.data || !call->grad_q.data || !c.norm || (c.block && !call->delta)))
        return VF_BAD_POINTER;
    vf_selected_grad limited = *call;
    limited.forward.threads = worthwhile(c.threads, products(c));
    return c.block ? kernels->selected_blocks_backward(limited) : kernels->selected_keys_backward(limited);
}

}  // extern "C"
