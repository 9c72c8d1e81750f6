// What forward and backward over selected blocks share: tiles of the queries that read a block, and their order.
//
// A task owns one block of keys of one kv head. It takes the block's readers 96 at a time, and adds to their rows of
// the output or of dQ in turn with the tasks of other blocks (turns.hpp), so every sum has one order.
#pragma once

#include "attention/block_index.hpp"
#include "attention/gather.hpp"
#include "simd/matmul.hpp"
#include "simd/turns.hpp"

namespace VF_TARGET {

// Queries in a step of a turn: a task lets the next one go on when it is past so many queries.
constexpr int STEP = 128;

// Up to BLOCK readers of a block of keys.
struct Readers {
    int count, tiles;
    int32_t query[BLOCK], head[BLOCK];
    int32_t valid[BLOCK];  // keys of the block the query may read
    bool own[BLOCK];       // it is the query's own block
};

VF_INLINE void read_readers(Readers &r, const BlockIndex &x, const vf_selected &call, int64_t b, int64_t g, int32_t key,
                            int64_t from, int64_t end) {
    r.count = least(BLOCK, end - from);
    r.tiles = (r.count + MR - 1) / MR;
    for (int i = 0; i < r.count; i++) {
        // Readers of one tile may be queries of several heads: they share the keys, and that is all a product needs.
        int32_t reader = x.reader[from + i];
        r.query[i] = (int32_t)(reader / x.group);
        r.head[i] = (int32_t)(g * x.group + reader % x.group);
        // Selected blocks end before the query's own, so only there does causality cut a block.
        int32_t distance = call.position[b * call.queries + r.query[i]] - key;
        r.own[i] = distance < call.block;
        r.valid[i] = least(call.block, distance + 1);
    }
}

// Row `row` of panels = x * factor.
template <typename T>
VF_INLINE void pack_row(float *panels, int row, const T *x, int64_t width, float factor) {
    float *to = panels + row * NR;
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) store(to + d / NR * BLOCK * NR + d % NR, load(x + d) * factor);
    for (; d < width; d++) to[d / NR * BLOCK * NR + d % NR] = to_float(x[d]) * factor;
}

// scores[BLOCK, keys] = x[BLOCK, width] times the transposed keys in panels.
VF_INLINE void score_readers(float *scores, const float *x, const float *transposed, int tiles, int64_t padded_keys,
                             int64_t width) {
    for (int64_t p = 0; p < padded_keys / NR; p++)
        for (int tile = 0; tile < tiles; tile++)
            multiply_tile(scores + (p * BLOCK + tile * MR) * NR, x + tile * MR * NR, BLOCK * NR,
                          transposed + p * width * NR, width, false);
}

// to[BLOCK, width] = scores[BLOCK, keys] times rows[keys, width].
VF_INLINE void mix_rows(float *to, const float *scores, const float *rows, int tiles, int64_t padded_keys,
                        int64_t width) {
    for (int64_t d = 0; d < width; d += NR)
        for (int tile = 0; tile < tiles; tile++)
            multiply_tile(to + d * BLOCK + tile * MR * NR, scores + tile * MR * NR, BLOCK * NR, rows + d * padded_keys,
                          padded_keys, false);
}

// Hands out tasks (block, kv head) in the order turns need: block by block, a few kv heads beside each other, so that
// neighbours in a line start apart and rarely wait; few, so that the rows of their queries stay in cache.
template <typename Own>
VF_INLINE void take_tasks(const BlockIndex &x, const vf_selected &call, int64_t *next, int64_t *passed, Own own) {
    // Twice as many lines as threads: while one task of a line runs, there is another line to begin with.
    int64_t pairs = call.batch * call.kv_heads, last_step = call.queries / STEP, wide = least(pairs, 2 * call.threads);
    for (;;) {
        int64_t task = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
        if (task >= pairs * x.most_blocks) return;
        int64_t base = task / (wide * x.most_blocks) * wide, here = least(wide, pairs - base);
        int64_t within = task - base * x.most_blocks, number = within / here, pair = base + within % here;
        int64_t *mine = passed + pair * x.most_blocks + number;
        Turn turn = {number ? mine - 1 : nullptr, mine};
        own(pair / call.kv_heads, pair % call.kv_heads, number, turn);
        // Tasks without readers, or past the last block of their row, take their turn as well: the next one waits for
        // this one, and through it for all before.
        turn.wait(last_step);
        turn.pass(last_step);
    }
}

// Before rows of a tile are added to, earlier blocks must be past its last query; afterwards this block is, too, but
// for the queries of that step that come with the next tile.
VF_INLINE void wait_for(const Turn &turn, const Readers &r) { turn.wait(r.query[r.count - 1] / STEP); }
VF_INLINE void pass_on(const Turn &turn, const Readers &r, const BlockIndex &x, int64_t next, int64_t end) {
    if (next < end) turn.pass(least(r.query[r.count - 1] / STEP, x.reader[next] / x.group / STEP - 1));
}

}  // namespace VF_TARGET
