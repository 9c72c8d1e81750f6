// Forward of pair-gated attention: scores by matrix product, a gate on each from the pair network, one softmax.
//
// Blocks as in the mixture's forward: 96 queries, 256 keys packed once per kv head, b once per head.
#include <math.h>
#include <omp.h>

#include "kernels.hpp"
#include "simd/matmul.hpp"
#include "attention/pair_gate_network.hpp"
#include "attention/pair_gate_score.hpp"
#include "simd/scratch.hpp"

namespace VF_TARGET {

// 96 x 256 scores are 96 KB, K and V blocks of D = 128 are 128 KB each: well inside L2.
static constexpr int KEYS = 256, PANELS = KEYS / NR;
// Packed keys of several kv heads share a wave while they fit here; a wave ends with a barrier.
static constexpr int64_t WAVE_BYTES = 16 << 20;

namespace {

struct Block {
    float *q;       // [BLOCK, D] panels
    float *scores;  // [BLOCK, KEYS] panels
    float *o;       // [BLOCK, D] panels: sum of 2^(score - top) * v
    float *a;       // [BLOCK, P] rows
    Rows rows;
    float top[BLOCK];  // the largest score so far
    Vec sum[BLOCK];    // lane-wise sums of 2^(score - top)
};

struct Plan {
    const vf_pair_gate &call;
    vf_mixture shape;
    int64_t group, padded, key_blocks, query_blocks;
    int64_t k_size, v_size, b_size;  // packed floats of a kv head, kv head and head
    float *k, *v, *b;                // of the heads of one wave
    const float *half_output;        // [H, P]
    float cut;
    const uint8_t *visible;  // [B, S]
};

// Key panels [first, end) a tile of queries reads in a key block, and which of them need no mask.
struct Reach {
    int first, end;
    uint32_t full;
};

}  // namespace

static Reach find_reach(const Rows &rows, int tile, int32_t key) {
    Reach reach = {PANELS, 0, 0};
    for (int p = 0; p < PANELS; p++) {
        Cover c = cover(rows, rows.branch[0], tile, key + p * NR, key + (p + 1) * NR);
        if (c == NONE) continue;
        if (reach.first > p) reach.first = p;
        reach.end = p + 1;
        if (c == FULL) reach.full |= 1u << p;
    }
    return reach;
}

// q . k becomes the gated score, a power of 2, for `count` queries from `row` on one panel; -inf where a pair is not read.
template <int FORM>
static __attribute__((noinline)) void gate_panel(const Rows &rows, int row, int count, float *scores, float scale,
                                                 const float *logits, float cut, bool full, int32_t key) {
    for (int i = 0; i < count; i++)
        for (int v = 0; v < NV; v++) {
            float *at = scores + i * NR + v * LANES;
            Vec logit = load(logits + i * NR + v * LANES);
            Vec x = rate<FORM>(load(at) * scale, logit, sigmoid(logit), cut);
            if (!full) {
                Vec weight = weigh(rows, rows.branch[0], row + i, lanes() + (key + v * LANES));
                x = weight > 0.0f ? x : splat(-INFINITY);
            }
            store(at, x);
        }
}

static void gate_scores(Block &block, const Plan &plan, int64_t h, int tile, const Reach &reach, int32_t key,
                        const float *b) {
    const vf_pair_gate &call = plan.call;
    const auto gate = call.form == VF_PAIR_PRODUCT ? gate_panel<VF_PAIR_PRODUCT>
                      : call.form == VF_PAIR_LOG   ? gate_panel<VF_PAIR_LOG>
                                                   : gate_panel<VF_PAIR_THRESHOLD>;
    const float *half_output = plan.half_output + h * call.units;
    float bias = call.bias ? call.bias[h] : 0.0f;
    alignas(64) float logits[GROUP * NR];
    int end = least((tile + 1) * MR, block.rows.count);
    for (int row = tile * MR, count; row < end; row += count) {
        count = end - row >= GROUP ? GROUP : 1;
        const auto network = count == 1 ? gate_logits<1, false> : gate_logits<GROUP, false>;
        for (int p = reach.first; p < reach.end; p++) {
            network(logits, block.a + row * call.units, b + p * call.units * NR, half_output, bias, call.units, nullptr);
            gate(block.rows, row, count, block.scores + (p * BLOCK + row) * NR, call.scale[h] * LOG2E, logits, plan.cut,
                 reach.full >> p & 1, key + p * NR);
        }
    }
}

// Scores become 2^(score - top); o and sum follow when top rises.
static void exponentiate(Block &block, int tile, const Reach &reach, int64_t width) {
    for (int row = tile * MR; row < (tile + 1) * MR && row < block.rows.count; row++) {
        float *scores = block.scores + row * NR;
        Vec best = splat(-INFINITY);
        for (int p = reach.first; p < reach.end; p++)
            for (int v = 0; v < NV; v++) best = max(best, load(scores + p * BLOCK * NR + v * LANES));
        float top = max_lanes(best);
        if (top > block.top[row]) {
            // 2^(old - new), 0 at the first key.
            float shrink = exp2(splat(block.top[row] - top))[0];
            block.sum[row] *= shrink;
            for (int64_t d = 0; d < width; d += NR)
                for (int v = 0; v < NV; v++) {
                    float *o = block.o + d * BLOCK + row * NR + v * LANES;
                    store(o, load(o) * shrink);
                }
            block.top[row] = top;
        }
        // A row without any key so far has top = -inf; 0 keeps -inf - top from becoming NaN.
        Vec base = splat(block.top[row] == -INFINITY ? 0.0f : block.top[row]), sum = block.sum[row];
        for (int p = reach.first; p < reach.end; p++)
            for (int v = 0; v < NV; v++) {
                float *at = scores + p * BLOCK * NR + v * LANES;
                Vec x = exp2(load(at) - base);
                sum += x;
                store(at, x);
            }
        block.sum[row] = sum;
    }
}

static void add_keys(Block &block, const Plan &plan, int64_t h, int32_t key, const float *k, const float *v,
                     const float *b) {
    int64_t width = plan.call.head_width;
    Reach reach[TILES];
    int tiles = block.rows.tile_count, first = PANELS, end = 0;
    for (int tile = 0; tile < tiles; tile++) {
        reach[tile] = find_reach(block.rows, tile, key);
        first = least(first, reach[tile].first);
        end = most(end, reach[tile].end);
    }
    for (int p = first; p < end; p++)
        for (int tile = 0; tile < tiles; tile++)
            if (p >= reach[tile].first && p < reach[tile].end)
                multiply_tile(block.scores + (p * BLOCK + tile * MR) * NR, block.q + tile * MR * NR, BLOCK * NR,
                              k + p * width * NR, width, false);
    for (int tile = 0; tile < tiles; tile++)
        if (reach[tile].end) {
            gate_scores(block, plan, h, tile, reach[tile], key, b);
            exponentiate(block, tile, reach[tile], width);
        }
    for (int64_t d = 0; d < width; d += NR)
        for (int tile = 0; tile < tiles; tile++) {
            const Reach &r = reach[tile];
            if (r.end)
                multiply_tile(block.o + d * BLOCK + tile * MR * NR, block.scores + (r.first * BLOCK + tile * MR) * NR,
                              BLOCK * NR, v + d * KEYS + r.first * NR * NR, (r.end - r.first) * NR, true);
        }
}

template <typename T>
static void finish(Block &block, const vf_pair_gate &call, int64_t b, int64_t h, int64_t first) {
    float factor[BLOCK];
    for (int row = 0; row < block.rows.count; row++) {
        int64_t query = (b * call.heads + h) * call.queries + first + row;
        float sum = sum_lanes(block.sum[row]);
        bool empty = block.top[row] == -INFINITY;
        factor[row] = empty ? 0.0f : 1.0f / sum;
        // log(2^top * sum), rounded once.
        call.lse[query] = empty ? -INFINITY : (float)(0.6931471805599453 * (block.top[row] + log2((double)sum)));
        if (call.norm) call.norm[query * 2] = empty ? 0.0f : block.top[row], call.norm[query * 2 + 1] = factor[row];
    }
    unpack(at<T>(call.out, b, h, first), call.out.stride[2], block.o, BLOCK, block.rows.count, call.head_width, factor,
           1.0f);
}

// One block of queries of head h; k and v of its kv head, b of the head itself.
template <typename T>
static void attend(Block &block, const Plan &plan, int64_t b, int64_t h, int64_t first, const float *k, const float *v,
                   const float *hidden) {
    const vf_pair_gate &call = plan.call;
    int64_t width = call.head_width;
    Rows &rows = block.rows;
    read_rows(rows, plan.shape, b, h, first, least(BLOCK, call.queries - first));
    pack(block.q, BLOCK, (const T *)at<T>(call.q, b, h, first), call.q.stride[2], rows.count, width,
         1.0f, rows.keep);
    copy_hidden(block.a, call, rows, b, h, first);
    memset(block.o, 0, (size_t)(plan.padded * BLOCK) * sizeof(float));
    for (int row = 0; row < BLOCK; row++) block.top[row] = -INFINITY, block.sum[row] = Vec{};
    // Near keys first: their scores are large more often, so the running maximum settles early.
    for (int64_t kb = rows.most_position < 0 ? -1 : rows.most_position / KEYS; kb >= 0; kb--)
        if (touches(rows, rows.branch[0], (int32_t)(kb * KEYS), (int32_t)(kb * KEYS + KEYS)))
            add_keys(block, plan, h, (int32_t)(kb * KEYS), k + kb * KEYS * width, v + kb * KEYS * plan.padded,
                     hidden + kb * KEYS * call.units);
    finish<T>(block, call, b, h, first);
}

// K, V and b of one block of keys of kv head `pair`, which is number `slot` of its wave.
template <typename T>
static void pack_keys(const Plan &plan, int64_t pair, int64_t slot, int64_t kb) {
    const vf_pair_gate &call = plan.call;
    int64_t b = pair / call.kv_heads, g = pair % call.kv_heads, key = kb * KEYS, width = call.head_width;
    int64_t rows = least(KEYS, call.keys - key);
    const uint8_t *keep = plan.visible + b * call.keys + key;
    pack_transposed(plan.k + slot * plan.k_size + key * width, KEYS, (const T *)at<T>(call.k, b, g, key),
                    call.k.stride[2], rows, width, keep);
    pack(plan.v + slot * plan.v_size + key * plan.padded, KEYS, (const T *)at<T>(call.v, b, g, key), call.v.stride[2],
         rows, width, 1.0f, keep);
    for (int64_t i = 0; i < plan.group; i++)
        pack_transposed(plan.b + (slot * plan.group + i) * plan.b_size + key * call.units, KEYS,
                        (const float *)at<float>(call.b, b, g * plan.group + i, key), call.b.stride[2], rows,
                        call.units, keep);
}

template <typename T>
static int32_t run(const vf_pair_gate &call) {
    int64_t width = call.head_width, padded = round_up(width, NR), group = call.heads / call.kv_heads;
    int64_t key_blocks = (call.keys + KEYS - 1) / KEYS, query_blocks = (call.queries + BLOCK - 1) / BLOCK;
    int64_t pairs = call.batch * call.kv_heads, k_size = key_blocks * KEYS * width, v_size = key_blocks * KEYS * padded;
    int64_t b_size = key_blocks * KEYS * call.units;
    int64_t pair_bytes = (k_size + v_size + group * b_size) * (int64_t)sizeof(float);
    int64_t wave = pair_bytes ? WAVE_BYTES / pair_bytes : pairs;
    wave = wave < 1 ? 1 : wave > pairs ? pairs : wave;

    Scratch scratch;
    size_t block_bytes = Scratch::padded<Block>(1) +
                         Scratch::padded<float>((size_t)(BLOCK * (padded * 2 + KEYS + call.units)));
    if (!scratch.reserve(Scratch::padded<float>(k_size * wave) + Scratch::padded<float>(v_size * wave) +
                         Scratch::padded<float>(b_size * wave * group) + block_bytes * call.threads +
                         Scratch::padded<float>(call.heads * call.units) +
                         Scratch::padded<uint8_t>(call.batch * call.keys) + Scratch::padded<int32_t>(call.keys + 1)))
        return VF_NO_MEMORY;
    float *k = scratch.take<float>(k_size * wave), *v = scratch.take<float>(v_size * wave);
    float *b = scratch.take<float>(b_size * wave * group);
    char *pieces = scratch.take<char>(block_bytes * call.threads);
    float *half_output = scratch.take<float>(call.heads * call.units);
    uint8_t *visible = scratch.take<uint8_t>(call.batch * call.keys);
    int32_t *change = scratch.take<int32_t>(call.keys + 1);
    halve(half_output, call.output, call.heads * call.units);
    for (int64_t row = 0; row < call.batch; row++)
        mark_visible(visible + row * call.keys, change, call.position + row * call.queries,
                     call.start + row * call.queries, call.queries, call.keys);
    const Plan plan = {call, geometry(call), group, padded,      key_blocks,            query_blocks, k_size, v_size,
                       b_size, k,            v,     b, half_output, threshold_logit(call), visible};

#pragma omp parallel num_threads(call.threads)
    {
        char *piece = pieces + block_bytes * omp_get_thread_num();
        Block &block = *(Block *)piece;
        block.q = (float *)(piece + Scratch::padded<Block>(1));
        block.o = block.q + BLOCK * padded;
        block.scores = block.o + BLOCK * padded;
        block.a = block.scores + BLOCK * KEYS;
        for (int64_t base = 0; base < pairs; base += wave) {
            int64_t here = least(wave, pairs - base);
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < here * key_blocks; task++)
                pack_keys<T>(plan, base + task / key_blocks, task / key_blocks, task % key_blocks);
            // Late blocks see the most keys: longest tasks first, so that threads end together.
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < here * group * query_blocks; task++) {
                int64_t qb = query_blocks - 1 - task / (here * group), head = task % (here * group);
                int64_t slot = head / group, pair = base + slot;
                attend<T>(block, plan, pair / call.kv_heads, pair % call.kv_heads * group + head % group, qb * BLOCK,
                          k + slot * k_size, v + slot * v_size, b + head * b_size);
            }
        }
    }
    scratch.release();
    return VF_OK;
}

int32_t pair_gate_forward(const vf_pair_gate &call) {
    return call.dtype == VF_BFLOAT16 ? run<uint16_t>(call) : run<float>(call);
}

}  // namespace VF_TARGET
