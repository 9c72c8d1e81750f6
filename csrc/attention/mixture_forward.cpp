// The one forward pass over tiles: a mixture of softmaxes over shared scores, one pass over the keys for every chain of
// nested branches. The score is a policy (score.hpp).
//
// Queries go in blocks of 96, keys in blocks of 256 packed once per kv head and reused by all query blocks of all its
// heads. Within a pair of blocks only the register tiles that some branch reaches are computed.
#include <math.h>
#include <omp.h>

#include "attention/scores.hpp"
#include "kernels.hpp"
#include "simd/matmul.hpp"
#include "simd/scratch.hpp"

namespace VF_TARGET {

namespace {

// A thread's block of queries of one head.
template <typename Score>
struct Block {
    float *q;       // [D, BLOCK] panels, times the score's factor
    float *scores;  // [BLOCK, KEYS] panels
    float *o;       // [BLOCK, D] panels: sum of weight * 2^(score - top) * v
    float *mix;     // [BLOCK, D] panels: the weighted sum over branches
    typename Score::State state;
    Rows rows;
    float top[BLOCK];  // the largest score so far
    Vec sum[BLOCK];    // lane-wise sums of weight * 2^(score - top)
};

// The packed keys of one kv head, and what the score packs beside them for one query head.
struct Keys {
    const float *k, *v, *hidden;
};

// Key panels [first, end) a tile of queries reads in a key block, and which of them need no weights.
struct Reach {
    int first, end;
    uint32_t full;
};

}  // namespace

// The panels between the first and the last that is read are computed too, even if nothing of them is: with a prefix far
// from the window they lie in different key blocks anyway.
static Reach find_reach(const Rows &rows, int outer, int inner, int tile, int32_t key) {
    Reach reach = {PANELS, 0, 0};
    for (int p = 0; p < PANELS; p++) {
        // By tile and panel, the unit of the product: finer masks would save no multiplication.
        Cover c = cover_step(rows, outer, inner, tile, key + p * NR, key + (p + 1) * NR);
        if (c == NONE) continue;
        if (reach.first > p) reach.first = p;
        reach.end = p + 1;
        if (c == FULL) reach.full |= 1u << p;
    }
    return reach;
}

// Products become scores.
template <typename Score>
static void rate(const Score &score, Block<Score> &block, int64_t h, int tile, const Reach &reach, int32_t key,
                 const float *hidden) {
    int end = least((tile + 1) * MR, block.rows.count);
    for (int row = tile * MR, count; row < end; row += count) {
        // A score that rates whole groups is compiled for a group and for one query: what is left over goes one by one.
        count = Score::ROWS == MR ? end - row : end - row >= Score::ROWS ? Score::ROWS : 1;
        for (int p = reach.first; p < reach.end; p++)
            score.template rate<false>(block.state, block.rows, h, row, count, block.scores + (p * BLOCK + row) * NR,
                                       hidden + p * score.key_width() * NR, key + p * NR);
    }
}

// Scores become 2^(score - top) * weight; o and sum follow when top rises. Twice over a row of the tile, which stays in
// L1: once for its largest score, once for the powers.
template <typename Score>
static void exponentiate(Block<Score> &block, int outer, int inner, int tile, const Reach &reach, int32_t key, int64_t width) {
    const bool soft = block.rows.branch[outer].soft || (inner >= 0 && block.rows.branch[inner].soft);
    const Vec nothing = splat(-INFINITY);
    for (int row = tile * MR; row < (tile + 1) * MR && row < block.rows.count; row++) {
        float *scores = block.scores + row * NR;
        Vec best = nothing;
        for (int p = reach.first; p < reach.end; p++)
            for (int v = 0; v < NV; v++) {
                float *at = scores + p * BLOCK * NR + v * LANES;
                Vec x = load(at);
                // Only panels that the edge of a branch runs through pay for a mask.
                if (!(reach.full >> p & 1)) {
                    Vec weight = weigh_step(block.rows, outer, inner, row, lanes() + (key + p * NR + v * LANES));
                    // Masked before the maximum is taken: a key that is not read must not raise it, or all that is read
                    // might vanish beside it.
                    x = weight > 0.0f ? x : nothing;
                    store(at, x);
                }
                best = max(best, x);
            }
        // One maximum for the row of the whole key block, not for each panel: a later panel cannot make an earlier one
        // be rescaled.
        float top = max_lanes(best);
        // The running maximum rises rarely after the first key block, so that rescaling O costs little.
        if (top > block.top[row]) {
            // 2^(old - new), 0 at the first key.
            float shrink = exp2(splat(block.top[row] - top))[0];
            // O and the sum are relative to top, so both shrink together; only a row whose maximum rose pays.
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
                // Weights of hard branches are 0 or 1, and 0 has become 2^-inf already.
                if (soft && !(reach.full >> p & 1))
                    x *= weigh_step(block.rows, outer, inner, row, lanes() + (key + p * NR + v * LANES));
                // By lanes: one horizontal sum at the very end instead of one for each key block.
                sum += x;
                store(at, x);
            }
        block.sum[row] = sum;
    }
}

// Adds the keys of one block that branch `outer` has and `inner` has not.
template <typename Score>
static void add_keys(const Score &score, Block<Score> &block, int64_t h, int outer, int inner, int32_t key,
                     const Keys &keys) {
    int64_t width = score.call.head_width;
    // All reaches first: the products below go panel by panel over all tiles, and each tile takes part only in its own
    // panels.
    Reach reach[TILES];
    int tiles = block.rows.tile_count, first = PANELS, end = 0;
    for (int tile = 0; tile < tiles; tile++) {
        reach[tile] = find_reach(block.rows, outer, inner, tile, key);
        first = least(first, reach[tile].first);
        end = most(end, reach[tile].end);
    }
    // S = Q K^T. A panel of keys (D = 128: 16 KB on AVX-512) stays in L1 while all tiles of queries go past it.
    for (int p = first; p < end; p++)
        for (int tile = 0; tile < tiles; tile++)
            if (p >= reach[tile].first && p < reach[tile].end)
                multiply_tile(block.scores + (p * BLOCK + tile * MR) * NR, block.q + tile * MR * NR, BLOCK * NR,
                              keys.k + p * width * NR, width, false);
    for (int tile = 0; tile < tiles; tile++)
        if (reach[tile].end) {
            if (!Score::PLAIN) rate(score, block, h, tile, reach[tile], key, keys.hidden);
            exponentiate(block, outer, inner, tile, reach[tile], key, width);
        }
    // O += P V: again the right panel, NR columns of V, stays while the tiles go past.
    for (int64_t d = 0; d < width; d += NR)
        for (int tile = 0; tile < tiles; tile++) {
            // The probabilities are the left operand, one after the other from the tile's first panel on; V starts at
            // the same key, r.first * NR rows into its panel. Accumulated: the keys of earlier blocks are in O already.
            const Reach &r = reach[tile];
            if (r.end)
                multiply_tile(block.o + d * BLOCK + tile * MR * NR, block.scores + (r.first * BLOCK + tile * MR) * NR,
                              BLOCK * NR, keys.v + d * KEYS + r.first * NR * NR, (r.end - r.first) * NR, true);
        }
}

// A branch is complete: its logsumexp, its own output, its share of the mixture.
template <typename T, typename Score>
static void finish_branch(Block<Score> &block, const vf_mixture &call, int m, int64_t b, int64_t h, int64_t first) {
    int64_t at = (b * call.heads + h) * call.queries + first, width = call.head_width;
    float factor[BLOCK], share[BLOCK];
    for (int row = 0; row < block.rows.count; row++) {
        float sum = sum_lanes(block.sum[row]);
        // A query without keys: output 0 and logsumexp -inf, never 0 / 0.
        call.logsumexp[(at + row) * call.branch_count + m] = sum > 0 ? natural_logsumexp(block.top[row], sum) : -INFINITY;
        factor[row] = sum > 0 ? 1.0f / sum : 0.0f;
        // The backward takes probabilities from these two: from a rounded logsumexp they would not sum to 1.
        if (call.norm) put_norm(call, at + row, m, block.top[row], factor[row]);
        share[row] = call.weights ? factor[row] * call.weights[(at + row) * call.branch_count + m] : factor[row];
    }
    // The last branch's output is not kept: the backward finds what it needs of it from the sum (mixture_backward.cpp).
    const vf_tensor &own = call.branch_out[m];
    if (m + 1 < call.branch_count && own.data)
        unpack(row_at<T>(own, b, h, first), own.stride[2], block.o, BLOCK, block.rows.count, width, factor, 1.0f);
    // O itself stays unnormalized: the next branch of the chain goes on from it.
    for (int64_t d = 0; d < width; d += NR)
        for (int row = 0; row < block.rows.count; row++)
            for (int v = 0; v < NV; v++) {
                int64_t i = d * BLOCK + row * NR + v * LANES;
                store(block.mix + i, load(block.mix + i) + load(block.o + i) * share[row]);
            }
}

// One block of queries of head h.
template <typename T, typename Score>
static void attend(const Score &score, Block<Score> &block, int64_t b, int64_t h, int64_t first, const Keys &keys) {
    const vf_mixture &call = score.call;
    int count = least(BLOCK, call.queries - first);
    int64_t width = call.head_width, padded = round_up(width, NR), at = (b * call.heads + h) * call.queries + first;
    Rows &rows = block.rows;
    read_rows(rows, call, b, h, first, count);
    pack(block.q, BLOCK, (const T *)row_at<T>(call.q, b, h, first), call.q.stride[2], count, width, score.q_factor(h),
         rows.keep);
    score.open(block.state, rows, b, h, first);
    memset(block.mix, 0, (size_t)(padded * BLOCK) * sizeof(float));

    // Open is decided for the block, not for a query: a product of a tile costs the same for one query as for all.
    bool open[VF_MAX_BRANCHES];
    find_open(open, call, call.weights ? call.weights + at * call.branch_count : nullptr, count);
    Chains chains = make_chains(call, h, open);
    for (int link = 0; link < chains.count; link++) {
        int outer = chains.branch[link], inner = chains.inside[link];
        // Further along a chain the sums go on: a branch is the one inside it and some more keys.
        if (inner < 0) {
            memset(block.o, 0, (size_t)(padded * BLOCK) * sizeof(float));
            for (int row = 0; row < BLOCK; row++) block.top[row] = -INFINITY, block.sum[row] = Vec{};
        }
        // Near keys first: their scores are large more often, so the running maximum settles early.
        for (int64_t kb = rows.most_position < 0 ? -1 : rows.most_position / KEYS; kb >= 0; kb--) {
            int32_t key = (int32_t)(kb * KEYS);
            if (touches(rows, rows.branch[outer], key, key + KEYS))
                add_keys(score, block, h, outer, inner, key,
                         Keys{keys.k + key * width, keys.v + key * padded, keys.hidden + key * score.key_width()});
        }
        finish_branch<T>(block, call, outer, b, h, first);
    }
    // Closed branches: no output, no gradient, and a logsumexp that says that it was not computed.
    for (int m = 0; m < call.branch_count; m++) {
        if (open[m]) continue;
        for (int row = 0; row < count; row++) {
            call.logsumexp[(at + row) * call.branch_count + m] = INFINITY;
            if (call.norm) put_norm(call, at + row, m, 0.0f, 0.0f);
            const vf_tensor &own = call.branch_out[m];
            if (m + 1 < call.branch_count && own.data)
                memset(row_at<T>(own, b, h, first + row), 0, (size_t)width * sizeof(T));
        }
    }
    unpack(row_at<T>(call.out, b, h, first), call.out.stride[2], block.mix, BLOCK, count, width, nullptr, 1.0f);
}

template <typename T, typename Score>
static int32_t run(const vf_mixture &call) {
    Score score(call, nullptr);
    const int64_t width = call.head_width, padded = round_up(width, NR), group = call.heads / call.kv_heads;
    const int64_t key_blocks = (call.keys + KEYS - 1) / KEYS, query_blocks = (call.queries + BLOCK - 1) / BLOCK;
    const int64_t pairs = call.batch * call.kv_heads, packed = key_blocks * KEYS;
    const int64_t k_size = packed * width, v_size = packed * padded, hidden_size = packed * score.key_width();
    const int64_t wave =
        wave_of(pairs, (k_size + v_size + group * hidden_size) * (int64_t)sizeof(float), WAVE_BYTES);

    auto lay_out_block = [&](Block<Score> &block, Space &space) {
        // O and the mixture are padded to whole panels, because tiles are stored whole; the same for Q, which is packed
        // in panels.
        block.q = space.take<float>(BLOCK * padded), block.o = space.take<float>(BLOCK * padded);
        block.mix = space.take<float>(BLOCK * padded), block.scores = space.take<float>(BLOCK * KEYS);
        score.lay_out_state(block.state, space);
    };
    size_t block_bytes = measure([&](Space &space) {
        Block<Score> block;
        lay_out_block(block, space);
    });
    float *k, *v, *hidden;
    uint8_t *visible;
    int32_t *change;
    char *blocks;
    Scratch scratch;
    if (!scratch.lay_out([&](Space &space) {
            k = space.take<float>(k_size * wave), v = space.take<float>(v_size * wave);
            hidden = space.take<float>(hidden_size * wave * group);
            score.lay_out(space, key_blocks);
            visible = space.take<uint8_t>(call.batch * call.keys);
            change = space.take<int32_t>(call.keys + 1);
            blocks = space.take<char>((int64_t)block_bytes * call.threads);
        }))
        return VF_NO_MEMORY;
    score.prepare();
    for (int64_t b = 0; b < call.batch; b++)
        mark_visible(visible + b * call.keys, change, call.position + b * call.queries, call.start + b * call.queries,
                     call.queries, call.keys);

    // K, V and what the score has beside them, of one block of keys of a kv head, which is number `slot` of its wave.
    auto pack_keys = [&](int64_t pair, int64_t slot, int64_t key) {
        int64_t b = pair / call.kv_heads, g = pair % call.kv_heads, rows = least(KEYS, call.keys - key);
        const uint8_t *keep = visible + b * call.keys + key;
        pack_transposed(k + slot * k_size + key * width, KEYS, (const T *)row_at<T>(call.k, b, g, key),
                        call.k.stride[2], rows, width, keep);
        pack(v + slot * v_size + key * padded, KEYS, (const T *)row_at<T>(call.v, b, g, key), call.v.stride[2], rows,
             width, 1.0f, keep);
        for (int64_t i = 0; i < group; i++)
            score.pack_keys(hidden + (slot * group + i) * hidden_size + key * score.key_width(), b, g * group + i, key,
                            rows, keep);
    };

#pragma omp parallel num_threads(call.threads)
    {
        Block<Score> block;
        Space space = {(uintptr_t)blocks + block_bytes * (size_t)omp_get_thread_num()};
        lay_out_block(block, space);
        for (int64_t base = 0; base < pairs; base += wave) {
            // Each of the two loops ends with a barrier: nobody reads keys before they are packed, and nobody packs the
            // next wave over keys that are still read.
            int64_t here = least(wave, pairs - base);
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < here * key_blocks; task++)
                pack_keys(base + task / key_blocks, task / key_blocks, task % key_blocks * KEYS);
            // Late blocks see the most keys: longest tasks first, so that threads end together.
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < here * group * query_blocks; task++) {
                int64_t qb = query_blocks - 1 - task / (here * group), head = task % (here * group);
                int64_t slot = head / group, pair = base + slot;
                attend<T>(score, block, pair / call.kv_heads, pair % call.kv_heads * group + head % group, qb * BLOCK,
                          Keys{k + slot * k_size, v + slot * v_size, hidden + head * hidden_size});
            }
        }
    }
    return VF_OK;
}

int32_t mixture_forward(const vf_mixture &call) {
    return with_score(call.score, [&](auto tag) {
        typedef typename decltype(tag)::Policy Score;
        return call.dtype == VF_BFLOAT16 ? run<uint16_t, Score>(call) : run<float, Score>(call);
    });
}

}  // namespace VF_TARGET
