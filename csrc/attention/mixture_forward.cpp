// Forward of a mixture of softmaxes over shared scores: one pass over the keys for every chain of nested branches.
//
// Queries go in blocks of 96, keys in blocks of 256 packed once per kv head and reused by all query blocks of all its
// heads. Within a pair of blocks only the register tiles that some branch reaches are computed.
#include <math.h>
#include <omp.h>

#include "kernels.hpp"
#include "simd/matmul.hpp"
#include "attention/mixture_rows.hpp"
#include "simd/scratch.hpp"

namespace VF_TARGET {

// Keys in a block: 96 x 256 scores are 96 KB, K and V blocks of D = 128 are 128 KB each. Together with Q and O well
// inside L2, and long enough to make the rescaling of O by a new maximum rare.
static constexpr int KEYS = 256, PANELS = KEYS / NR;
// Packed keys of several kv heads share a wave while they fit here; a wave ends with a barrier.
static constexpr int64_t WAVE_BYTES = 16 << 20;
static constexpr float LOG2E = 1.44269504f;

namespace {

struct Block {
    float *q;       // [D, BLOCK] panels, times scale * log2(e): scores come out as powers of 2
    float *scores;  // [BLOCK, KEYS] panels
    float *o;       // [BLOCK, D] panels: sum of weight * 2^(score - top) * v
    float *mix;     // [BLOCK, D] panels: the weighted sum over branches
    Rows rows;
    float top[BLOCK];  // the largest score so far
    Vec sum[BLOCK];    // lane-wise sums of weight * 2^(score - top)
};

// Key panels [first, end) a tile of queries reads in a key block, and which of them need no weights.
struct Reach {
    int first, end;
    uint32_t full;
};

}  // namespace

static Reach find_reach(const Rows &rows, int outer, int inner, int tile, int32_t key) {
    Reach reach = {PANELS, 0, 0};
    for (int p = 0; p < PANELS; p++) {
        Cover c = cover_step(rows, outer, inner, tile, key + p * NR, key + (p + 1) * NR);
        if (c == NONE) continue;
        if (reach.first > p) reach.first = p;
        reach.end = p + 1;
        if (c == FULL) reach.full |= 1u << p;
    }
    return reach;
}

// Scores become 2^(score - top) * weight; o and sum follow when top rises.
static void exponentiate(Block &block, int outer, int inner, int tile, const Reach &reach, int32_t key, int64_t width) {
    const bool soft = block.rows.branch[outer].soft || (inner >= 0 && block.rows.branch[inner].soft);
    const Vec nothing = splat(-INFINITY);
    for (int row = tile * MR; row < (tile + 1) * MR && row < block.rows.count; row++) {
        float *scores = block.scores + row * NR;
        Vec best = nothing;
        for (int p = reach.first; p < reach.end; p++)
            for (int v = 0; v < NV; v++) {
                float *at = scores + p * BLOCK * NR + v * LANES;
                Vec x = load(at);
                if (!(reach.full >> p & 1)) {
                    Vec weight = weigh_step(block.rows, outer, inner, row, lanes() + (key + p * NR + v * LANES));
                    x = weight > 0.0f ? x : nothing;
                    store(at, x);
                }
                best = max(best, x);
            }
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
                if (soft && !(reach.full >> p & 1))
                    x *= weigh_step(block.rows, outer, inner, row, lanes() + (key + p * NR + v * LANES));
                sum += x;
                store(at, x);
            }
        block.sum[row] = sum;
    }
}

// Adds the keys of one block that branch `outer` has and `inner` has not.
static void add_keys(Block &block, int outer, int inner, int32_t key, const float *k, const float *v, int64_t width) {
    Reach reach[TILES];
    int tiles = block.rows.tile_count, first = PANELS, end = 0;
    for (int tile = 0; tile < tiles; tile++) {
        reach[tile] = find_reach(block.rows, outer, inner, tile, key);
        first = least(first, reach[tile].first);
        end = most(end, reach[tile].end);
    }
    for (int p = first; p < end; p++)
        for (int tile = 0; tile < tiles; tile++)
            if (p >= reach[tile].first && p < reach[tile].end)
                multiply_tile(block.scores + (p * BLOCK + tile * MR) * NR, block.q + tile * MR * NR, BLOCK * NR,
                              k + p * width * NR, width, false);
    for (int tile = 0; tile < tiles; tile++)
        if (reach[tile].end) exponentiate(block, outer, inner, tile, reach[tile], key, width);
    for (int64_t d = 0; d < width; d += NR)
        for (int tile = 0; tile < tiles; tile++) {
            const Reach &r = reach[tile];
            if (r.end)
                multiply_tile(block.o + d * BLOCK + tile * MR * NR, block.scores + (r.first * BLOCK + tile * MR) * NR,
                              BLOCK * NR, v + d * KEYS + r.first * NR * NR, (r.end - r.first) * NR, true);
        }
}

// A branch is complete: its lse, its own output, its share of the mixture.
template <typename T>
static void finish_branch(Block &block, const vf_mixture &call, int m, int64_t b, int64_t h, int64_t first) {
    int64_t at = (b * call.heads + h) * call.queries + first, width = call.head_width;
    float factor[BLOCK], share[BLOCK];
    for (int row = 0; row < block.rows.count; row++) {
        float sum = sum_lanes(block.sum[row]);
        call.lse[(at + row) * call.branch_count + m] = sum > 0 ? natural_lse(block.top[row], sum) : -INFINITY;
        factor[row] = sum > 0 ? 1.0f / sum : 0.0f;
        if (call.norm) put_norm(call, at + row, m, block.top[row], factor[row]);
        share[row] = call.weights ? factor[row] * call.weights[(at + row) * call.branch_count + m] : factor[row];
    }
    const vf_tensor &own = call.branch_out[m];
    if (m + 1 < call.branch_count && own.data)
        unpack((T *)own.data + b * own.stride[0] + h * own.stride[1] + first * own.stride[2], own.stride[2], block.o,
               BLOCK, block.rows.count, width, factor, 1.0f);
    for (int64_t d = 0; d < width; d += NR)
        for (int row = 0; row < block.rows.count; row++)
            for (int v = 0; v < NV; v++) {
                int64_t i = d * BLOCK + row * NR + v * LANES;
                store(block.mix + i, load(block.mix + i) + load(block.o + i) * share[row]);
            }
}

template <typename T>
static void attend(Block &block, const vf_mixture &call, int64_t b, int64_t h, int64_t first, const float *k,
                   const float *v) {
    int count = least(BLOCK, call.queries - first);
    int64_t width = call.head_width, padded = round_up(width, NR), at = (b * call.heads + h) * call.queries + first;
    Rows &rows = block.rows;
    read_rows(rows, call, b, h, first, count);
    pack(block.q, BLOCK, (const T *)call.q.data + b * call.q.stride[0] + h * call.q.stride[1] + first * call.q.stride[2],
         call.q.stride[2], count, width, call.scale[h] * LOG2E, rows.keep);
    memset(block.mix, 0, (size_t)(padded * BLOCK) * sizeof(float));

    bool open[VF_MAX_BRANCHES];
    find_open(open, call, call.weights ? call.weights + at * call.branch_count : nullptr, count);
    Chains chains = make_chains(call, open);
    for (int link = 0; link < chains.count; link++) {
        int outer = chains.branch[link], inner = chains.inside[link];
        if (inner < 0) {
            memset(block.o, 0, (size_t)(padded * BLOCK) * sizeof(float));
            for (int row = 0; row < BLOCK; row++) block.top[row] = -INFINITY, block.sum[row] = Vec{};
        }
        // Near keys first: their scores are large more often, so the running maximum settles early.
        for (int64_t kb = rows.most_position < 0 ? -1 : rows.most_position / KEYS; kb >= 0; kb--)
            if (touches(rows, rows.branch[outer], (int32_t)(kb * KEYS), (int32_t)(kb * KEYS + KEYS)))
                add_keys(block, outer, inner, (int32_t)(kb * KEYS), k + kb * KEYS * width, v + kb * KEYS * padded,
                         width);
        finish_branch<T>(block, call, outer, b, h, first);
    }
    for (int m = 0; m < call.branch_count; m++) {
        if (open[m]) continue;
        for (int row = 0; row < count; row++) {
            call.lse[(at + row) * call.branch_count + m] = INFINITY;
            if (call.norm) put_norm(call, at + row, m, 0.0f, 0.0f);
            const vf_tensor &own = call.branch_out[m];
            if (m + 1 < call.branch_count && own.data)
                memset((T *)own.data + b * own.stride[0] + h * own.stride[1] + (first + row) * own.stride[2], 0,
                       (size_t)width * sizeof(T));
        }
    }
    unpack((T *)call.out.data + b * call.out.stride[0] + h * call.out.stride[1] + first * call.out.stride[2],
           call.out.stride[2], block.mix, BLOCK, count, width, nullptr, 1.0f);
}

template <typename T>
static void pack_keys(const vf_mixture &call, int64_t pair, int64_t kb, const uint8_t *visible, float *k, float *v) {
    int64_t b = pair / call.kv_heads, g = pair % call.kv_heads, key = kb * KEYS, width = call.head_width;
    int64_t rows = least(KEYS, call.keys - key);
    const uint8_t *keep = visible + b * call.keys + key;
    pack_transposed(k + key * width, KEYS,
                    (const T *)call.k.data + b * call.k.stride[0] + g * call.k.stride[1] + key * call.k.stride[2],
                    call.k.stride[2], rows, width, keep);
    pack(v + key * round_up(width, NR), KEYS,
         (const T *)call.v.data + b * call.v.stride[0] + g * call.v.stride[1] + key * call.v.stride[2],
         call.v.stride[2], rows, width, 1.0f, keep);
}

template <typename T>
static int32_t run(const vf_mixture &call) {
    int64_t width = call.head_width, padded = round_up(width, NR), group = call.heads / call.kv_heads;
    int64_t key_blocks = (call.keys + KEYS - 1) / KEYS, query_blocks = (call.queries + BLOCK - 1) / BLOCK;
    int64_t pairs = call.batch * call.kv_heads, k_size = key_blocks * KEYS * width, v_size = key_blocks * KEYS * padded;
    int64_t pair_bytes = (k_size + v_size) * (int64_t)sizeof(float);
    int64_t wave = pair_bytes ? WAVE_BYTES / pair_bytes : pairs;
    wave = wave < 1 ? 1 : wave > pairs ? pairs : wave;

    Scratch scratch;
    size_t block_floats = (size_t)(BLOCK * (padded * 3 + KEYS));
    size_t bytes = Scratch::padded<float>(k_size * wave) + Scratch::padded<float>(v_size * wave) +
                   call.threads * (Scratch::padded<Block>(1) + Scratch::padded<float>(block_floats)) +
                   Scratch::padded<uint8_t>(call.batch * call.keys) + Scratch::padded<int32_t>(call.keys + 1);
    if (!scratch.reserve(bytes)) return VF_NO_MEMORY;
    float *k = scratch.take<float>(k_size * wave), *v = scratch.take<float>(v_size * wave);
    uint8_t *visible = scratch.take<uint8_t>(call.batch * call.keys);
    int32_t *change = scratch.take<int32_t>(call.keys + 1);
    for (int64_t b = 0; b < call.batch; b++)
        mark_visible(visible + b * call.keys, change, call.position + b * call.queries, call.start + b * call.queries,
                     call.queries, call.keys);
    size_t block_bytes = Scratch::padded<Block>(1) + Scratch::padded<float>(block_floats);
    char *pieces = scratch.take<char>(block_bytes * call.threads);

#pragma omp parallel num_threads(call.threads)
    {
        char *piece = pieces + block_bytes * omp_get_thread_num();
        Block &block = *(Block *)piece;
        block.q = (float *)(piece + Scratch::padded<Block>(1));
        block.o = block.q + BLOCK * padded;
        block.mix = block.o + BLOCK * padded;
        block.scores = block.mix + BLOCK * padded;
        for (int64_t base = 0; base < pairs; base += wave) {
            int64_t here = least(wave, pairs - base);
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < here * key_blocks; task++)
                pack_keys<T>(call, base + task / key_blocks, task % key_blocks, visible,
                             k + task / key_blocks * k_size, v + task / key_blocks * v_size);
            // Late blocks see the most keys: longest tasks first, so that threads end together.
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < here * group * query_blocks; task++) {
                int64_t qb = query_blocks - 1 - task / (here * group), head = task % (here * group);
                int64_t pair = base + head / group;
                attend<T>(block, call, pair / call.kv_heads, pair % call.kv_heads * group + head % group, qb * BLOCK,
                          k + head / group * k_size, v + head / group * v_size);
            }
        }
    }
    scratch.release();
    return VF_OK;
}

int32_t mixture_forward(const vf_mixture &call) {
    return call.dtype == VF_BFLOAT16 ? run<uint16_t>(call) : run<float>(call);
}

}  // namespace VF_TARGET
