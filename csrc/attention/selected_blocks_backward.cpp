// Backward of attention over selected blocks: five matrix products for every tile of a block's readers.
#include <math.h>
#include <omp.h>

#include "attention/selected_blocks.hpp"
#include "kernels.hpp"

namespace VF_TARGET {

namespace {

struct Work {
    float *k, *k_transposed, *v_transposed, *dk, *dv;  // of the block's keys
    float *q, *dout, *dq;                              // of a tile of readers
    float *scores, *dp;                                // [BLOCK, keys]; become w * p and dS
    Readers readers;
    float dweight[BLOCK];
};

struct Plan {
    const vf_selected_grad &call;
    const BlockIndex &index;
    const float *offset; // [B, H, T]: delta - dlse
    uint8_t *begun;      // [B, H, T]: whether dQ has been written to
};

}  // namespace

static void differentiate(const Plan &plan, Work &w, int64_t b, int64_t padded_keys) {
    const vf_selected &f = plan.call.forward;
    for (int row = 0; row < w.readers.count; row++) {
        // Readers of a tile belong to several heads: weight, offset and norm are looked up for each.
        int64_t query = (b * f.heads + w.readers.head[row]) * f.queries + w.readers.query[row];
        float weight = f.weights ? f.weights[query] : 1.0f, offset = plan.offset[query];
        const float top = f.norm[2 * query], factor = f.norm[2 * query + 1];
        const int32_t valid = w.readers.valid[row];
        Vec dweight = {};
        for (int64_t key = 0; key < padded_keys; key += LANES) {
            int64_t at = row * NR + key / NR * BLOCK * NR + key % NR;
            Vec x = load(w.scores + at) - top, dp = load(w.dp + at);
            if (key + LANES > valid) x = (lanes() + (int32_t)key) < valid ? x : splat(-INFINITY);
            Vec p = exp2(x) * factor;
            dweight += p * dp;
            store(w.scores + at, p * weight);
            store(w.dp + at, p * (weight * dp - offset));
        }
        w.dweight[row] = sum_lanes(dweight);
    }
}

// dQ of a tile's queries, and dw.
static void add_to_queries(const Plan &plan, Work &w, int64_t b) {
    const vf_selected &f = plan.call.forward;
    for (int row = 0; row < w.readers.count; row++) {
        int64_t h = w.readers.head[row], t = w.readers.query[row], query = (b * f.heads + h) * f.queries + t;
        float *to = row_at<float>(plan.call.grad_q, b, h, t);
        const float *dq = w.dq + row * NR;
        // dQ is the caller's memory and may hold NaN: the first to come stores, all others add.
        bool first = !plan.begun[query];
        plan.begun[query] = 1;
        float scale = f.scale[h];
        int64_t d = 0;
        for (; d + LANES <= f.head_width; d += LANES) {
            Vec x = scale * load(dq + d / NR * BLOCK * NR + d % NR);
            store(to + d, first ? x : x + load(to + d));
        }
        for (; d < f.head_width; d++) to[d] = scale * dq[d / NR * BLOCK * NR + d % NR] + (first ? 0.0f : to[d]);
        if (plan.call.grad_weights)
            plan.call.grad_weights[query] = w.dweight[row] + (first ? 0.0f : plan.call.grad_weights[query]);
    }
}

// to[keys, width] += transposed(left[count, keys]) right[count, width].
static void add_transposed(float *to, const float *left, const float *right, int count, int64_t padded_keys,
                           int64_t width) {
    for (int64_t d = 0; d < width; d += NR)
        for (int64_t key = 0; key < padded_keys; key += TR)
            // Only over the readers that are there: rows past them hold what an earlier tile left.
            multiply_tile_transposed(to + d * padded_keys + key * NR, left + key / NR * BLOCK * NR + key % NR,
                                     right + d * BLOCK, count, true);
}

template <typename T>
static void clear_rows(const vf_tensor &x, int64_t b, int64_t g, int64_t from, int64_t end, int64_t width) {
    for (int64_t row = from; row < end; row++) memset(row_at<T>(x, b, g, row), 0, (size_t)width * sizeof(T));
}

template <typename T>
static void own_block_of_keys(const Plan &plan, Work &w, int64_t b, int64_t g, int64_t number, const Turn &turn) {
    const BlockIndex &x = plan.index;
    const vf_selected &f = plan.call.forward;
    if (number >= x.block_count[b]) return;
    const int64_t *begin = x.begin + (b * f.kv_heads + g) * (x.most_blocks + 1) + number;
    const int32_t *first = x.first + b * (f.keys + 1) + number;
    int64_t width = f.head_width, padded = round_up(width, NR), padded_keys = round_up(f.block, NR), key = first[0];
    // Up to the next block; what lies between two blocks nobody reads.
    int64_t rows = least(f.block, first[1] - key);
    const uint8_t *keep = x.visible + b * f.keys + key;
    const T *k = row_at<T>(f.k, b, g, key), *v = row_at<T>(f.v, b, g, key);
    // Without readers the gradients are 0, and must still be written.
    bool any = begin[0] < begin[1];
    if (any) {
        // K in both forms: dQ sums over keys, the scores over the width.
        pack(w.k, padded_keys, k, f.k.stride[2], rows, width, 1.0f, keep);
        pack_transposed(w.k_transposed, padded_keys, k, f.k.stride[2], rows, width, keep);
        pack_transposed(w.v_transposed, padded_keys, v, f.v.stride[2], rows, width, keep);
    }
    memset(w.dk, 0, (size_t)(padded_keys * padded) * sizeof(float));
    memset(w.dv, 0, (size_t)(padded_keys * padded) * sizeof(float));
    // The same five products as in the mixture's backward, over readers from anywhere in the text.
    for (int64_t from = begin[0]; from < begin[1]; from += BLOCK) {
        Readers &r = w.readers;
        read_readers(r, x, f, b, g, (int32_t)key, from, begin[1]);
        for (int row = 0; row < r.count; row++) {
            int64_t h = r.head[row], t = r.query[row];
            pack_row(w.q, row, (const T *)row_at<T>(f.q, b, h, t), width, f.scale[h] * LOG2E);
            pack_row(w.dout, row, (const T *)row_at<T>(plan.call.grad_out, b, h, t), width, 1.0f);
        }
        score_readers(w.scores, w.q, w.k_transposed, r.tiles, padded_keys, width);
        score_readers(w.dp, w.dout, w.v_transposed, r.tiles, padded_keys, width);
        differentiate(plan, w, b, padded_keys);
        // dK and dV stay with the task that owns the block; only dQ, whose rows other blocks add to as well, waits for
        // its turn.
        add_transposed(w.dv, w.scores, w.dout, r.count, padded_keys, width);
        add_transposed(w.dk, w.dp, w.q, r.count, padded_keys, width);
        mix_rows(w.dq, w.dp, w.k, r.tiles, padded_keys, width);
        wait_for(turn, r);
        add_to_queries(plan, w, b);
        pass_on(turn, r, x, from + BLOCK, begin[1]);
    }
    // q was packed times log2(e).
    unpack(row_at<T>(plan.call.grad_k, b, g, key), plan.call.grad_k.stride[2], w.dk, padded_keys, rows, width, nullptr,
           LN2);
    unpack(row_at<T>(plan.call.grad_v, b, g, key), plan.call.grad_v.stride[2], w.dv, padded_keys, rows, width, nullptr,
           1.0f);
    clear_rows<T>(plan.call.grad_k, b, g, key + rows, first[1], width);
    clear_rows<T>(plan.call.grad_v, b, g, key + rows, first[1], width);
}

template <typename T>
static int32_t run(const vf_selected_grad &call) {
    const vf_selected &f = call.forward;
    BlockIndex index;
    if (int32_t status = make_block_index(index, f)) return status;
    int64_t width = f.head_width, padded = round_up(width, NR), padded_keys = round_up(f.block, NR);
    int64_t rows = f.batch * f.heads * f.queries, pairs = f.batch * f.kv_heads, tasks = pairs * index.most_blocks;
    auto lay_out_work = [&](Work &w, Space &space) {
        w.k = space.take<float>(padded_keys * padded);
        w.dk = space.take<float>(padded_keys * padded), w.dv = space.take<float>(padded_keys * padded);
        w.k_transposed = space.take<float>(padded_keys * width), w.v_transposed = space.take<float>(padded_keys * width);
        w.q = space.take<float>(BLOCK * padded), w.dout = space.take<float>(BLOCK * padded);
        w.dq = space.take<float>(BLOCK * padded);
        w.scores = space.take<float>(BLOCK * padded_keys), w.dp = space.take<float>(BLOCK * padded_keys);
    };
    size_t work_bytes = measure([&](Space &space) {
        Work w;
        lay_out_work(w, space);
    });
    float *offset;
    uint8_t *begun;
    int64_t *passed, next = 0;
    char *pieces;
    Scratch scratch;
    if (!scratch.lay_out([&](Space &space) {
            offset = space.take<float>(rows), begun = space.take<uint8_t>(rows);
            passed = space.take<int64_t>(tasks);
            pieces = space.take<char>((int64_t)work_bytes * f.threads);
        }))
        return VF_NO_MEMORY;
    memset(passed, 0, (size_t)tasks * sizeof(int64_t));
    memset(begun, 0, (size_t)rows);
    // Rows past a tile's readers are multiplied too, and ignored; they must not be denormal.
    memset(pieces, 0, work_bytes * f.threads);
    Plan plan = {call, index, offset, begun};

#pragma omp parallel num_threads(f.threads)
    {
        Work w;
        Space space = {(uintptr_t)pieces + work_bytes * (size_t)omp_get_thread_num()};
        lay_out_work(w, space);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            int64_t b = i / f.queries / f.heads, h = i / f.queries % f.heads, t = i % f.queries;
            if (f.start[b * f.queries + t] > f.position[b * f.queries + t]) {
                // No block has this query as a reader, so nobody else writes its gradient.
                memset(row_at<float>(call.grad_q, b, h, t), 0, (size_t)width * sizeof(float));
                if (call.grad_weights) call.grad_weights[i] = 0;
                continue;
            }
            offset[i] = call.delta[i] - (call.grad_logsumexp ? call.grad_logsumexp[i] : 0.0f);
        }
        // Keys before the first block of a row: nobody reads them.
#pragma omp for schedule(static)
        for (int64_t pair = 0; pair < pairs; pair++) {
            int64_t b = pair / f.kv_heads, g = pair % f.kv_heads, end = index.first[b * (f.keys + 1)];
            clear_rows<T>(call.grad_k, b, g, 0, end, width);
            clear_rows<T>(call.grad_v, b, g, 0, end, width);
        }
        take_tasks(index, f, &next, passed, [&](int64_t b, int64_t g, int64_t number, const Turn &turn) {
            own_block_of_keys<T>(plan, w, b, g, number, turn);
        });
    }
    return VF_OK;
}

int32_t selected_blocks_backward(const vf_selected_grad &call) {
    return call.forward.dtype == VF_BFLOAT16 ? run<uint16_t>(call) : run<float>(call);
}

}  // namespace VF_TARGET
