// Backward of a mixture of softmaxes: five matrix products per pair of blocks, nothing recomputed but the scores.
//
// A task owns a block of keys: it sums dK and dV over all queries of all heads that share the keys, and adds to dQ in
// turn with the tasks of other key blocks (turns.hpp).
#include <omp.h>

#include "kernels.hpp"
#include "simd/matmul.hpp"
#include "attention/mixture_gradient.hpp"
#include "simd/scratch.hpp"
#include "simd/turns.hpp"

namespace VF_TARGET {

// Keys in a block: five packed forms of 256 x 128 (K, K^T, V^T, dK, dV) are 640 KB, two tiles of scores 192 KB, three
// of queries 144 KB: about half of a 2 MB L2.
static constexpr int KEYS = 256, PANELS = KEYS / NR;
static constexpr float LOG2E = 1.44269504f, LN2 = 0.693147181f;

namespace {

// The keys any branch gives a block of queries: [from, last] and [.., prefix_end). Lets tasks skip blocks unread.
struct Extent {
    int32_t from, last, prefix_end;
};

struct Work {
    float *k, *k_transposed, *v_transposed, *dk, *dv;  // of the task's keys
    float *q, *dout, *dq;                              // of a block of queries
    float *scores, *dp;                                // [BLOCK, KEYS]; become a and dS
    Rows rows;
    Gradient gradient;
};

struct Plan {
    const vf_mixture_grad &call;
    int64_t group, padded, query_blocks, key_blocks;
    const float *delta;      // [B, H, T, M]
    const Extent *extent;    // [B, H, query_blocks]
    const uint8_t *visible;  // [B, S]
};

}  // namespace

template <typename T>
static T *at(const vf_tensor &x, int64_t b, int64_t h, int64_t row) {
    return (T *)x.data + b * x.stride[0] + h * x.stride[1] + row * x.stride[2];
}

// dw_m = dO . O_m, the pull, and delta_m = w_m dw_m. The last branch's delta follows from sum_m delta_m = dO . O, so its
// output need not be saved; its dw is summed up with the tiles, because dividing by w_m would lose it where w_m is 0.
static void prepare(const vf_mixture_grad &call, Rows &rows, int64_t b, int64_t h, int64_t first, float *delta,
                    Extent &extent) {
    const vf_mixture &f = call.forward;
    int count = least(BLOCK, f.queries - first), branches = f.branch_count;
    read_rows(rows, f, b, h, first, count);
    extent = {INT32_MAX, rows.most_position, INT32_MIN};
    for (int m = 0; m < branches; m++) {
        extent.from = least(extent.from, rows.branch[m].least_from);
        extent.prefix_end = most(extent.prefix_end, rows.branch[m].most_prefix_end);
    }
    for (int row = 0; row < count; row++) {
        int64_t query = (b * f.heads + h) * f.queries + first + row;
        if (!call.accumulate) memset(at<float>(call.grad_q, b, h, first + row), 0, (size_t)f.head_width * sizeof(float));
        const float *pull = call.pull + query * branches;
        float rest = pull[branches - 1];
        for (int m = 0; m < branches; m++) {
            if (call.grad_width[m]) call.grad_width[m][query] = 0;
            float dweight = m + 1 < branches ? pull[m] : 0.0f;
            if (call.grad_weights) call.grad_weights[query * branches + m] = dweight;
            float share = f.weights ? f.weights[query * branches + m] * dweight : dweight;
            // d lse_m / d score = p_m: a gradient of the log-sum-exp is one more pull on every key of the branch.
            float from_lse = call.grad_lse && rows.keep[row] ? call.grad_lse[query * branches + m] : 0.0f;
            delta[query * branches + m] = (m + 1 < branches ? share : rest) - from_lse;
            rest -= share;
        }
    }
}

static void load_gradient(Gradient &g, const Plan &plan, int64_t query, int count) {
    const vf_mixture &f = plan.call.forward;
    g.ready = 0;
    g.want_weights = plan.call.grad_weights != nullptr;
    g.want_width = false;
    for (int m = 0; m < f.branch_count; m++) {
        g.want_width |= plan.call.grad_width[m] != nullptr;
        for (int row = 0; row < count; row++) {
            int64_t i = (query + row) * f.branch_count + m;
            g.top[m][row] = f.norm[2 * i], g.factor[m][row] = f.norm[2 * i + 1];
            g.weight[m][row] = f.weights ? f.weights[i] : 1.0f;
            g.delta[m][row] = plan.delta[i];
            g.dwidth[m][row] = g.dweight[row] = 0;
        }
    }
}

// Which branches read a tile of queries on a panel of keys, and whether all of them with weight 1.
struct Active {
    uint8_t set;
    bool full;
};

// Whether any branch reads any tile. On return first[tile] .. end[tile] are the panels a tile reads, top[p] ..
// bottom[p] the tiles that read a panel.
static bool find_active(const Rows &rows, int branches, int32_t key, Active (*active)[PANELS], int *first, int *end,
                        int *top, int *bottom) {
    bool any = false;
    for (int p = 0; p < PANELS; p++) top[p] = TILES, bottom[p] = 0;
    for (int tile = 0; tile < rows.tile_count; tile++) {
        first[tile] = PANELS, end[tile] = 0;
        for (int p = 0; p < PANELS; p++) {
            Active &x = active[tile][p] = {0, true};
            for (int m = 0; m < branches; m++) {
                Cover c = cover(rows, rows.branch[m], tile, key + p * NR, key + (p + 1) * NR);
                if (c == NONE) continue;
                x.set |= (uint8_t)(1 << m);
                x.full &= c == FULL;
            }
            if (!x.set) continue;
            any = true;
            first[tile] = least(first[tile], p), end[tile] = p + 1;
            top[p] = least(top[p], tile), bottom[p] = tile + 1;
        }
    }
    return any;
}

static void clear_tile(float *tile) {
    for (int i = 0; i < MR * NV; i++) store(tile + i * LANES, Vec{});
}

template <typename T>
static void add_queries(Work &work, const Plan &plan, int64_t b, int64_t h, int64_t qb, int32_t key, const Turn &turn,
                        int64_t step) {
    const vf_mixture_grad &call = plan.call;
    const vf_mixture &f = call.forward;
    int64_t width = f.head_width, query = qb * BLOCK;
    int count = least(BLOCK, f.queries - query), branches = f.branch_count;
    Rows &rows = work.rows;
    read_rows(rows, f, b, h, query, count);
    Active active[TILES][PANELS];
    int first[TILES], end[TILES], top[PANELS], bottom[PANELS];
    if (!find_active(rows, branches, key, active, first, end, top, bottom)) return;

    pack(work.q, BLOCK, (const T *)at<T>(f.q, b, h, query), f.q.stride[2], count, width, f.scale[h] * LOG2E, rows.keep);
    pack(work.dout, BLOCK, (const T *)at<T>(call.grad_out, b, h, query), call.grad_out.stride[2], count, width, 1.0f,
         rows.keep);
    int64_t row_index = (b * f.heads + h) * f.queries + query;
    load_gradient(work.gradient, plan, row_index, count);

    int tiles = rows.tile_count;
    for (int p = 0; p < PANELS; p++)
        for (int tile = top[p]; tile < bottom[p]; tile++) {
            int64_t c = (p * BLOCK + tile * MR) * NR;
            if (active[tile][p].set)
                multiply_tile(work.scores + c, work.q + tile * MR * NR, BLOCK * NR, work.k_transposed + p * width * NR,
                              width, false);
        }
    for (int p = 0; p < PANELS; p++)
        for (int tile = top[p]; tile < bottom[p]; tile++) {
            int64_t c = (p * BLOCK + tile * MR) * NR;
            if (active[tile][p].set)
                multiply_tile(work.dp + c, work.dout + tile * MR * NR, BLOCK * NR, work.v_transposed + p * width * NR,
                              width, false);
        }
    for (int p = 0; p < PANELS; p++)
        for (int tile = 0; tile < tiles; tile++) {
            float *s = work.scores + (p * BLOCK + tile * MR) * NR, *d = work.dp + (p * BLOCK + tile * MR) * NR;
            Active x = active[tile][p];
            if (x.set && x.full)
                differentiate_full(work.gradient, rows, branches, x.set, tile, s, d);
            else if (x.set)
                differentiate_mixed(work.gradient, rows, branches, x.set, tile, key + p * NR, s, d);
            else if ((tile >= top[p] && tile < bottom[p]) || (p >= first[tile] && p < end[tile]))
                clear_tile(s), clear_tile(d);
        }

    for (int64_t d = 0; d < width; d += NR)
        for (int p = 0; p < PANELS; p++) {
            int64_t skip = top[p] * MR, depth = bottom[p] * MR - skip;
            if (depth <= 0) continue;
            for (int j = 0; j < NR; j += TR)
                multiply_tile_transposed(work.dv + d * KEYS + (p * NR + j) * NR,
                                         work.scores + (p * BLOCK + skip) * NR + j,
                                         work.dout + d * BLOCK + skip * NR, depth, true);
        }
    for (int64_t d = 0; d < width; d += NR)
        for (int p = 0; p < PANELS; p++) {
            int64_t skip = top[p] * MR, depth = bottom[p] * MR - skip;
            if (depth <= 0) continue;
            for (int j = 0; j < NR; j += TR)
                multiply_tile_transposed(work.dk + d * KEYS + (p * NR + j) * NR, work.dp + (p * BLOCK + skip) * NR + j,
                                         work.q + d * BLOCK + skip * NR, depth, true);
        }
    for (int64_t d = 0; d < width; d += NR)
        for (int tile = 0; tile < tiles; tile++)
            if (end[tile])
                multiply_tile(work.dq + d * BLOCK + tile * MR * NR, work.dp + (first[tile] * BLOCK + tile * MR) * NR,
                              BLOCK * NR, work.k + d * KEYS + first[tile] * NR * NR, (end[tile] - first[tile]) * NR,
                              false);

    turn.wait(step);
    for (int row = 0; row < count; row++) {
        if (!end[row / MR]) continue;
        float *to = at<float>(call.grad_q, b, h, query + row);
        int64_t d = 0;
        for (; d + LANES <= width; d += LANES)
            store(to + d, load(to + d) + f.scale[h] * load(work.dq + d / NR * NR * BLOCK + row * NR + d % NR));
        for (; d < width; d++) to[d] += f.scale[h] * work.dq[d / NR * NR * BLOCK + row * NR + d % NR];
        if (call.grad_weights) call.grad_weights[(row_index + row + 1) * branches - 1] += work.gradient.dweight[row];
        for (int m = 0; m < branches; m++)
            if (call.grad_width[m]) call.grad_width[m][row_index + row] += work.gradient.dwidth[m][row];
    }
    turn.pass(step);
}

// dK and dV of one block of keys of one kv head.
template <typename T>
static void own_keys(Work &work, const Plan &plan, int64_t b, int64_t g, int64_t kb, const Turn &turn) {
    const vf_mixture &f = plan.call.forward;
    int64_t width = f.head_width, padded = plan.padded, key = kb * KEYS, count = least(KEYS, f.keys - key);
    const uint8_t *keep = plan.visible + b * f.keys + key;
    pack(work.k, KEYS, (const T *)at<T>(f.k, b, g, key), f.k.stride[2], count, width, 1.0f, keep);
    pack_transposed(work.k_transposed, KEYS, (const T *)at<T>(f.k, b, g, key), f.k.stride[2], count, width, keep);
    pack_transposed(work.v_transposed, KEYS, (const T *)at<T>(f.v, b, g, key), f.v.stride[2], count, width, keep);
    memset(work.dk, 0, (size_t)(KEYS * padded) * sizeof(float));
    memset(work.dv, 0, (size_t)(KEYS * padded) * sizeof(float));
    for (int64_t i = 0; i < plan.group; i++)
        for (int64_t qb = 0; qb < plan.query_blocks; qb++) {
            int64_t h = g * plan.group + i;
            const Extent &x = plan.extent[(b * f.heads + h) * plan.query_blocks + qb];
            if (key > x.last || (key + KEYS <= x.from && key >= x.prefix_end)) continue;
            add_queries<T>(work, plan, b, h, qb, (int32_t)key, turn, i * plan.query_blocks + qb);
        }
    const vf_mixture_grad &call = plan.call;
    unpack(at<T>(call.grad_k, b, g, key), call.grad_k.stride[2], work.dk, KEYS, count, width, nullptr, LN2,
           call.accumulate != 0);
    unpack(at<T>(call.grad_v, b, g, key), call.grad_v.stride[2], work.dv, KEYS, count, width, nullptr, 1.0f,
           call.accumulate != 0);
    int64_t last = plan.group * plan.query_blocks;
    turn.wait(last);
    turn.pass(last);
}

template <typename T>
static int32_t run(const vf_mixture_grad &call) {
    const vf_mixture &f = call.forward;
    int64_t padded = round_up(f.head_width, NR), pairs = f.batch * f.kv_heads;
    int64_t query_blocks = (f.queries + BLOCK - 1) / BLOCK, key_blocks = (f.keys + KEYS - 1) / KEYS;
    int64_t heads = f.batch * f.heads, tasks = pairs * key_blocks;
    size_t work_floats = (size_t)(KEYS * (3 * padded + 2 * f.head_width) + BLOCK * (3 * padded + 2 * KEYS));
    size_t work_bytes = Scratch::padded<Work>(1) + Scratch::padded<float>(work_floats);
    Scratch scratch;
    if (!scratch.reserve(Scratch::padded<char>(work_bytes * f.threads) +
                         Scratch::padded<float>(heads * f.queries * f.branch_count) +
                         Scratch::padded<Extent>(heads * query_blocks) + Scratch::padded<uint8_t>(f.batch * f.keys) +
                         Scratch::padded<int32_t>(f.keys + 1) + Scratch::padded<int64_t>(tasks)))
        return VF_NO_MEMORY;
    char *works = scratch.take<char>(work_bytes * f.threads);
    float *delta = scratch.take<float>(heads * f.queries * f.branch_count);
    Extent *extent = scratch.take<Extent>(heads * query_blocks);
    uint8_t *visible = scratch.take<uint8_t>(f.batch * f.keys);
    int32_t *change = scratch.take<int32_t>(f.keys + 1);
    int64_t *passed = scratch.take<int64_t>(tasks);
    memset(passed, 0, (size_t)tasks * sizeof(int64_t));
    for (int64_t b = 0; b < f.batch; b++)
        mark_visible(visible + b * f.keys, change, f.position + b * f.queries, f.start + b * f.queries, f.queries,
                     f.keys);
    Plan plan = {call, f.kv_heads ? f.heads / f.kv_heads : 0, padded, query_blocks, key_blocks, delta, extent, visible};
    int64_t next = 0;

#pragma omp parallel num_threads(f.threads)
    {
        char *piece = works + work_bytes * omp_get_thread_num();
        Work &work = *(Work *)piece;
        float *floats = (float *)(piece + Scratch::padded<Work>(1));
        auto take = [&](int64_t count) { return floats += count, floats - count; };
        work.k = take(KEYS * padded), work.dk = take(KEYS * padded), work.dv = take(KEYS * padded);
        work.k_transposed = take(KEYS * f.head_width), work.v_transposed = take(KEYS * f.head_width);
        work.q = take(BLOCK * padded), work.dout = take(BLOCK * padded), work.dq = take(BLOCK * padded);
        work.scores = take(BLOCK * KEYS), work.dp = take(BLOCK * KEYS);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < heads * query_blocks; task++) {
            int64_t head = task / query_blocks;
            prepare(call, work.rows, head / f.heads, head % f.heads, task % query_blocks * BLOCK, delta, extent[task]);
        }
        // Tasks are handed out in order, as turns require: key block 0, read by the most queries, of every kv head
        // first. Neighbours in a line start far apart, so they rarely wait.
        for (;;) {
            int64_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (task >= tasks) break;
            int64_t kb = task / pairs, pair = task % pairs;
            Turn turn = {kb ? passed + task - pairs : nullptr, passed + task};
            own_keys<T>(work, plan, pair / f.kv_heads, pair % f.kv_heads, kb, turn);
        }
    }
    scratch.release();
    return VF_OK;
}

int32_t mixture_backward(const vf_mixture_grad &call) {
    return call.forward.dtype == VF_BFLOAT16 ? run<uint16_t>(call) : run<float>(call);
}

}  // namespace VF_TARGET
