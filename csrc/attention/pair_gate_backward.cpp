// Backward of pair-gated attention: the mixture's five matrix products, and the pair network twice for each pair: once
// for the logits, once for the gradients.
//
// A task owns a block of keys: it sums dK and dV over all queries of all heads that share the keys, and db over all
// queries of one head after the other. It adds to dQ and da in turn with the tasks of other key blocks (turns.hpp).
#include <omp.h>

#include "kernels.hpp"
#include "simd/matmul.hpp"
#include "attention/pair_gate_network.hpp"
#include "attention/pair_gate_score.hpp"
#include "simd/scratch.hpp"
#include "simd/turns.hpp"

namespace VF_TARGET {

// Keys in a block: five packed forms of 256 x 128 (K, K^T, V^T, dK, dV) are 640 KB, two tiles of scores 192 KB, three
// of queries 144 KB, sums for da (P = 16) 96 KB: about half of a 2 MB L2.
static constexpr int KEYS = 256, PANELS = KEYS / NR;

namespace {

// The keys a block of queries reads: [from, last] and [.., prefix_end). Lets tasks skip blocks unread.
struct Extent {
    int32_t from, last, prefix_end;
};

struct Work {
    float *k, *k_transposed, *v_transposed, *dk, *dv;  // of the task's keys
    float *b, *db;                                     // [PANELS][P][NR], of the task's keys and one head
    float *db_block;                                   // the same of one block of queries: its sum meets db at the end
    float *q, *dout, *dq;                              // of a block of queries
    float *a;                                          // [BLOCK, P] rows
    Vec *da, *dw;                                      // [BLOCK, P] and, of one tile, [P + 2] (bias, P, scale), by lanes
    double *dw_total;                                  // [P + 2]: long sums, whose terms mostly cancel
    float *scores, *dp;                                // [BLOCK, KEYS]; become p and scale * dalpha
    float *saved;                                      // of the network, one group on one panel
    float top[BLOCK], factor[BLOCK], delta[BLOCK];     // p = 2^(score - top) factor; delta = dO . O
    Rows rows;
};

struct Plan {
    const vf_pair_gate_grad &call;
    vf_mixture shape;
    int64_t group, padded, query_blocks, key_blocks;
    float cut;
    const float *half_output;  // [H, P]
    const float *delta;        // [B, H, T]
    const Extent *extent;      // [B, H, query_blocks]
    const uint8_t *visible;    // [B, S]
    float *output_parts;       // [B, key_blocks, H, P + 2]: each task's share of dbias, dw and dscale
};

}  // namespace

// In the order and with the rounding of multiply_tile (one lane of it): where a query reads one key alone, dO . O is then
// dO . v to the last bit and the gradient of its score exactly 0, as it should be.
template <typename T>
static float dot(const T *a, const T *b, int64_t width) {
    Vec sum = {};
    for (int64_t d = 0; d < width; d++) sum += splat(to_float(a[d])) * to_float(b[d]);
    return sum[0];
}

template <typename T>
static void prepare(const vf_pair_gate_grad &call, const vf_mixture &shape, Rows &rows, int64_t b, int64_t h,
                    int64_t first, float *delta, Extent &extent) {
    const vf_pair_gate &f = call.forward;
    read_rows(rows, shape, b, h, first, least(BLOCK, f.queries - first));
    extent = {rows.branch[0].least_from, rows.most_position, rows.branch[0].most_prefix_end};
    for (int row = 0; row < rows.count; row++) {
        memset(at<float>(call.grad_q, b, h, first + row), 0, (size_t)f.head_width * sizeof(float));
        memset(at<float>(call.grad_a, b, h, first + row), 0, (size_t)f.units * sizeof(float));
        delta[(b * f.heads + h) * f.queries + first + row] =
            rows.keep[row] ? dot((const T *)at<T>(call.grad_out, b, h, first + row),
                                 (const T *)at<T>(f.out, b, h, first + row), f.head_width)
                           : 0.0f;
    }
}

// q . k -> p, dP -> scale dalpha, logits -> dlogits, for `count` queries from `row` on one panel.
template <int FORM>
static __attribute__((noinline)) void differentiate_panel(Work &work, int row, int count, float *scores, float *dp,
                                                          float scale, float *logits, float cut, bool full,
                                                          int32_t key, Vec &scale_sum) {
    Vec bias = {}, pull = {};
    for (int i = 0; i < count; i++) {
        float top = work.top[row + i], factor = work.factor[row + i], delta = work.delta[row + i];
        for (int v = 0; v < NV; v++) {
            int at = i * NR + v * LANES;
            Vec product = load(scores + at), logit = load(logits + at), dalpha, dlogit;
            Vec alpha = product * (scale * LOG2E);
            Gate gate = sigmoid(logit);
            Vec x = rate<FORM>(alpha, logit, gate, cut);
            if (!full) {
                Vec weight = weigh(work.rows, work.rows.branch[0], row + i, lanes() + (key + v * LANES));
                x = weight > 0.0f ? x : splat(-INFINITY);
            }
            Vec p = exp2(x - top) * factor;
            differentiate<FORM>(p * (load(dp + at) - delta), alpha, gate, dalpha, dlogit);
            store(scores + at, p);
            store(dp + at, dalpha * scale);
            store(logits + at, dlogit);
            bias += dlogit;
            pull += dalpha * product;  // d alpha / d scale = q . k
        }
    }
    work.dw[0] += bias;
    scale_sum += pull;
}

static void clear(float *rows, int count) {
    for (int i = 0; i < count * NV; i++) store(rows + i * LANES, Vec{});
}

// One tile of queries on the key panels it reads: scores and dP become p and scale dalpha, and the network gets its share.
static void differentiate_tile(Work &work, const Plan &plan, int64_t h, int tile, uint32_t reads, uint32_t full,
                               int32_t key) {
    const vf_pair_gate &f = plan.call.forward;
    const auto through = f.form == VF_PAIR_PRODUCT ? differentiate_panel<VF_PAIR_PRODUCT>
                         : f.form == VF_PAIR_LOG   ? differentiate_panel<VF_PAIR_LOG>
                                                   : differentiate_panel<VF_PAIR_THRESHOLD>;
    const float *half_output = plan.half_output + h * f.units;
    float bias = f.bias ? f.bias[h] : 0.0f;
    alignas(64) float logits[GROUP * NR];
    int last = (tile + 1) * MR, end = least(last, work.rows.count);
    for (int row = tile * MR, count; row < last; row += count) {
        count = end - row >= GROUP ? GROUP : 1;
        const float *a = work.a + row * f.units;
        for (int p = 0; p < PANELS; p++) {
            float *scores = work.scores + (p * BLOCK + row) * NR, *dp = work.dp + (p * BLOCK + row) * NR;
            if (row >= end || !(reads >> p & 1)) {
                clear(scores, count), clear(dp, count);
                continue;
            }
            const float *b = work.b + p * f.units * NR;
            float *db = work.db_block + p * f.units * NR;
            Vec *da = work.da + row * f.units;
            (count == 1 ? gate_logits<1, true> : gate_logits<GROUP, true>)(logits, a, b, half_output, bias, f.units,
                                                                            work.saved);
            through(work, row, count, scores, dp, f.scale[h], logits, plan.cut, full >> p & 1, key + p * NR,
                    work.dw[f.units + 1]);
            (count == 1 ? gate_gradient<1> : gate_gradient<GROUP>)(logits, a, b, f.units, work.saved, da, db,
                                                                   work.dw + 1);
        }
    }
    for (int64_t p = 0; p < f.units + 2; p++) work.dw_total[p] += sum_lanes(work.dw[p]), work.dw[p] = Vec{};
}

template <typename T>
static void add_queries(Work &work, const Plan &plan, int64_t b, int64_t h, int64_t qb, int32_t key, const Turn &turn,
                        int64_t step) {
    const vf_pair_gate_grad &call = plan.call;
    const vf_pair_gate &f = call.forward;
    int64_t width = f.head_width, query = qb * BLOCK;
    Rows &rows = work.rows;
    read_rows(rows, plan.shape, b, h, query, least(BLOCK, f.queries - query));
    int tiles = rows.tile_count;
    uint32_t reads[TILES] = {}, full[TILES] = {};
    int first[TILES], end[TILES], top[PANELS], bottom[PANELS] = {};
    for (int p = 0; p < PANELS; p++) top[p] = TILES;
    bool any = false;
    for (int tile = 0; tile < tiles; tile++) {
        first[tile] = PANELS, end[tile] = 0;
        for (int p = 0; p < PANELS; p++) {
            Cover c = cover(rows, rows.branch[0], tile, key + p * NR, key + (p + 1) * NR);
            if (c == NONE) continue;
            any = true;
            reads[tile] |= 1u << p;
            full[tile] |= (uint32_t)(c == FULL) << p;
            first[tile] = least(first[tile], p), end[tile] = p + 1;
            top[p] = least(top[p], tile), bottom[p] = tile + 1;
        }
    }
    if (!any) return;

    pack(work.q, BLOCK, (const T *)at<T>(f.q, b, h, query), f.q.stride[2], rows.count, width, 1.0f,
         rows.keep);
    pack(work.dout, BLOCK, (const T *)at<T>(call.grad_out, b, h, query), call.grad_out.stride[2], rows.count, width,
         1.0f, rows.keep);
    copy_hidden(work.a, f, rows, b, h, query);
    memset(work.da, 0, (size_t)(BLOCK * f.units) * sizeof(Vec));
    for (int row = 0; row < rows.count; row++) {
        int64_t at = (b * f.heads + h) * f.queries + query + row;
        work.top[row] = f.norm[at * 2], work.factor[row] = f.norm[at * 2 + 1], work.delta[row] = plan.delta[at];
    }

    for (int p = 0; p < PANELS; p++)
        for (int tile = top[p]; tile < bottom[p]; tile++)
            if (reads[tile] >> p & 1)
                multiply_tile(work.scores + (p * BLOCK + tile * MR) * NR, work.q + tile * MR * NR, BLOCK * NR,
                              work.k_transposed + p * width * NR, width, false);
    for (int p = 0; p < PANELS; p++)
        for (int tile = top[p]; tile < bottom[p]; tile++)
            if (reads[tile] >> p & 1)
                multiply_tile(work.dp + (p * BLOCK + tile * MR) * NR, work.dout + tile * MR * NR, BLOCK * NR,
                              work.v_transposed + p * width * NR, width, false);
    memset(work.db_block, 0, (size_t)(KEYS * f.units) * sizeof(float));
    for (int tile = 0; tile < tiles; tile++) differentiate_tile(work, plan, h, tile, reads[tile], full[tile], key);
    for (int64_t i = 0; i < KEYS * f.units; i += LANES) store(work.db + i, load(work.db + i) + load(work.db_block + i));

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
    const float *half_output = plan.half_output + h * f.units;
    for (int row = 0; row < rows.count; row++) {
        if (!end[row / MR]) continue;
        float *to = at<float>(call.grad_q, b, h, query + row);
        int64_t d = 0;
        for (; d + LANES <= width; d += LANES)
            store(to + d, load(to + d) + load(work.dq + d / NR * NR * BLOCK + row * NR + d % NR));
        for (; d < width; d++) to[d] += work.dq[d / NR * NR * BLOCK + row * NR + d % NR];
        float *hidden = at<float>(call.grad_a, b, h, query + row);
        for (int64_t p = 0; p < f.units; p++) hidden[p] += half_output[p] * sum_lanes(work.da[row * f.units + p]);
    }
    turn.pass(step);
}

// db of the task's keys and one head, and the head's share of dw and dbias.
static void finish_head(Work &work, const Plan &plan, int64_t b, int64_t h, int64_t kb, int64_t count) {
    const vf_pair_gate &f = plan.call.forward;
    const float *half_output = plan.half_output + h * f.units;
    for (int64_t j = 0; j < count; j++) {
        float *to = at<float>(plan.call.grad_b, b, h, kb * KEYS + j);
        const float *from = work.db + j / NR * f.units * NR + j % NR;
        for (int64_t p = 0; p < f.units; p++) to[p] = half_output[p] * from[p * NR];
    }
    float *part = plan.output_parts + ((b * plan.key_blocks + kb) * f.heads + h) * (f.units + 2);
    for (int64_t p = 0; p < f.units + 2; p++) part[p] = (float)work.dw_total[p];
}

// dK, dV and db of one block of keys of one kv head.
template <typename T>
static void own_keys(Work &work, const Plan &plan, int64_t b, int64_t g, int64_t kb, const Turn &turn) {
    const vf_pair_gate &f = plan.call.forward;
    int64_t width = f.head_width, padded = plan.padded, key = kb * KEYS, count = least(KEYS, f.keys - key);
    const uint8_t *keep = plan.visible + b * f.keys + key;
    pack(work.k, KEYS, (const T *)at<T>(f.k, b, g, key), f.k.stride[2], count, width, 1.0f, keep);
    pack_transposed(work.k_transposed, KEYS, (const T *)at<T>(f.k, b, g, key), f.k.stride[2], count, width, keep);
    pack_transposed(work.v_transposed, KEYS, (const T *)at<T>(f.v, b, g, key), f.v.stride[2], count, width, keep);
    memset(work.dk, 0, (size_t)(KEYS * padded) * sizeof(float));
    memset(work.dv, 0, (size_t)(KEYS * padded) * sizeof(float));
    for (int64_t i = 0; i < plan.group; i++) {
        int64_t h = g * plan.group + i;
        pack_transposed(work.b, KEYS, (const float *)at<float>(f.b, b, h, key), f.b.stride[2], count, f.units, keep);
        memset(work.db, 0, (size_t)(KEYS * f.units) * sizeof(float));
        memset(work.dw, 0, (size_t)(f.units + 2) * sizeof(Vec));
        memset(work.dw_total, 0, (size_t)(f.units + 2) * sizeof(double));
        for (int64_t qb = 0; qb < plan.query_blocks; qb++) {
            const Extent &x = plan.extent[(b * f.heads + h) * plan.query_blocks + qb];
            if (key > x.last || (key + KEYS <= x.from && key >= x.prefix_end)) continue;
            add_queries<T>(work, plan, b, h, qb, (int32_t)key, turn, i * plan.query_blocks + qb);
        }
        finish_head(work, plan, b, h, kb, count);
    }
    unpack(at<T>(plan.call.grad_k, b, g, key), plan.call.grad_k.stride[2], work.dk, KEYS, count, width, nullptr, 1.0f);
    unpack(at<T>(plan.call.grad_v, b, g, key), plan.call.grad_v.stride[2], work.dv, KEYS, count, width, nullptr, 1.0f);
    int64_t last = plan.group * plan.query_blocks;
    turn.wait(last);
    turn.pass(last);
}

// dw, dbias and dscale: the tasks' shares in a fixed order.
static void add_parts(const Plan &plan) {
    const vf_pair_gate &f = plan.call.forward;
    for (int64_t h = 0; h < f.heads; h++)
        for (int64_t p = 0; p < f.units + 2; p++) {
            double sum = 0;
            for (int64_t i = 0; i < f.batch * plan.key_blocks; i++)
                sum += plan.output_parts[(i * f.heads + h) * (f.units + 2) + p];
            if (p == 0)
                plan.call.grad_bias[h] = (float)sum;
            else if (p == f.units + 1)
                plan.call.grad_scale[h] = (float)sum;
            else
                plan.call.grad_output[h * f.units + p - 1] = (float)(0.5 * sum);
        }
}

template <typename T>
static int32_t run(const vf_pair_gate_grad &call) {
    const vf_pair_gate &f = call.forward;
    int64_t padded = round_up(f.head_width, NR), pairs = f.batch * f.kv_heads, units = f.units;
    int64_t query_blocks = (f.queries + BLOCK - 1) / BLOCK, key_blocks = (f.keys + KEYS - 1) / KEYS;
    int64_t heads = f.batch * f.heads, tasks = pairs * key_blocks;
    size_t work_floats = (size_t)(KEYS * (3 * padded + 2 * f.head_width + 3 * units) +
                                  BLOCK * (3 * padded + 2 * KEYS) + round_up(BLOCK * units, LANES) +
                                  (BLOCK * units + units + 2) * LANES + saved_floats(units) + 2 * (units + 2));
    size_t work_bytes = Scratch::padded<Work>(1) + Scratch::padded<float>(work_floats);
    size_t parts = (size_t)(f.batch * key_blocks * f.heads * (units + 2));
    Scratch scratch;
    if (!scratch.reserve(Scratch::padded<char>(work_bytes * f.threads) + Scratch::padded<float>(heads * f.queries) +
                         Scratch::padded<float>(f.heads * units) + Scratch::padded<float>(parts) +
                         Scratch::padded<Extent>(heads * query_blocks) + Scratch::padded<uint8_t>(f.batch * f.keys) +
                         Scratch::padded<int32_t>(f.keys + 1) + Scratch::padded<int64_t>(tasks)))
        return VF_NO_MEMORY;
    char *works = scratch.take<char>(work_bytes * f.threads);
    float *delta = scratch.take<float>(heads * f.queries), *half_output = scratch.take<float>(f.heads * units);
    float *output_parts = scratch.take<float>(parts);
    Extent *extent = scratch.take<Extent>(heads * query_blocks);
    uint8_t *visible = scratch.take<uint8_t>(f.batch * f.keys);
    int32_t *change = scratch.take<int32_t>(f.keys + 1);
    int64_t *passed = scratch.take<int64_t>(tasks);
    memset(passed, 0, (size_t)tasks * sizeof(int64_t));
    halve(half_output, f.output, f.heads * units);
    for (int64_t b = 0; b < f.batch; b++)
        mark_visible(visible + b * f.keys, change, f.position + b * f.queries, f.start + b * f.queries, f.queries,
                     f.keys);
    const Plan plan = {call, geometry(f), f.kv_heads ? f.heads / f.kv_heads : 0,
                       padded, query_blocks, key_blocks, threshold_logit(f), half_output, delta, extent, visible,
                       output_parts};
    int64_t next = 0;

#pragma omp parallel num_threads(f.threads)
    {
        char *piece = works + work_bytes * omp_get_thread_num();
        Work &work = *(Work *)piece;
        float *floats = (float *)(piece + Scratch::padded<Work>(1));
        auto take = [&](int64_t count) { return floats += count, floats - count; };
        // Counts are multiples of a vector, so the vectors of da and dw lie aligned.
        work.k = take(KEYS * padded), work.dk = take(KEYS * padded), work.dv = take(KEYS * padded);
        work.k_transposed = take(KEYS * f.head_width), work.v_transposed = take(KEYS * f.head_width);
        work.b = take(KEYS * units), work.db = take(KEYS * units), work.db_block = take(KEYS * units);
        work.q = take(BLOCK * padded), work.dout = take(BLOCK * padded), work.dq = take(BLOCK * padded);
        work.scores = take(BLOCK * KEYS), work.dp = take(BLOCK * KEYS);
        work.da = (Vec *)take(BLOCK * units * LANES), work.dw = (Vec *)take((units + 2) * LANES);
        work.saved = take(saved_floats(units));
        work.dw_total = (double *)take(2 * (units + 2));
        work.a = take(BLOCK * units);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < heads * query_blocks; task++) {
            int64_t head = task / query_blocks;
            prepare<T>(call, plan.shape, work.rows, head / f.heads, head % f.heads, task % query_blocks * BLOCK, delta,
                       extent[task]);
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
    add_parts(plan);
    scratch.release();
    return VF_OK;
}

int32_t pair_gate_backward(const vf_pair_gate_grad &call) {
    return call.forward.dtype == VF_BFLOAT16 ? run<uint16_t>(call) : run<float>(call);
}

}  // namespace VF_TARGET
