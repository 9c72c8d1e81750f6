// Which queries read which block of keys: the selection of blocks turned round, so that a block is read once and
// multiplied with all its queries as a matrix.
//
// Every visible query reads the blocks it selected and its own, the last. Blocks are numbered in the order of their first
// keys, for each row of the batch; the queries of a block in ascending order, all heads of a kv head's group together.
#pragma once

#include "attention/gather.hpp"
#include "simd/scratch.hpp"
#include "varifocal.h"

namespace VF_TARGET {

struct BlockIndex {
    int64_t group;
    int64_t most_blocks;      // of any row of the batch
    int32_t *block_count;     // [B]
    int32_t *number;          // [B, S]: the number of the block that starts at a key
    int32_t *first;           // [B, S + 1]: the first key of a block by number; S after the last
    int64_t *begin;           // [B * G, most_blocks + 1]: where a block's readers begin
    int32_t *reader;          // (query * group + head in the group) by block
    uint8_t *visible;         // [B, S]
    Scratch fixed, sized;     // what depends on the sizes, and on the selection
};

VF_INLINE int32_t own_block(const vf_selected &call, int64_t at) {
    return call.position[at] - (call.position[at] - call.start[at]) % call.block;
}

// Calls visit(first key of a block, is it the query's own) for each block that query t of a head reads; false if the
// selection is not valid.
template <typename Visit>
VF_INLINE bool each_block(const vf_selected &call, int64_t b, int64_t h, int64_t t, Visit visit) {
    int64_t at = b * call.queries + t;
    int32_t start = call.start[at];
    if (start > call.position[at]) return true;
    int32_t own = own_block(call, at), last = start - 1;
    const int32_t *selected = selection_of(call, b, h, t);
    for (int64_t i = 0; i < call.capacity && selected[i] >= 0; i++) {
        // Ascending, before the query's own block, and at the beginning of a block: the list comes from the caller and
        // is followed into memory.
        if (selected[i] <= last || selected[i] >= own || (selected[i] - start) % call.block) return false;
        visit(last = selected[i], false);
    }
    visit(own, true);
    return true;
}

// Numbers the blocks of batch row b. False if the selection is not valid or documents overlap: a selected block is whole,
// and nobody reads past the start of the next block, so every key belongs to one block.
static bool number_blocks(BlockIndex &x, const vf_selected &call, int64_t b) {
    int32_t *number = x.number + b * call.keys, *first = x.first + b * (call.keys + 1);
    memset(number, 0, (size_t)call.keys * sizeof(int32_t));
    bool valid = true;
    for (int64_t h = 0; h < call.heads; h += call.heads / call.index_heads)
        for (int64_t t = 0; t < call.queries; t++)
            // 1: somebody's own block, which may be unfinished. 2: selected, so it must be whole.
            valid &= each_block(call, b, h, t, [&](int32_t key, bool own) { number[key] |= own ? 1 : 2; });
    int32_t count = 0;
    int64_t whole_until = 0;
    for (int32_t key = 0; key < call.keys; key++) {
        if (!number[key]) continue;
        // A block that begins inside a whole one would give keys to two blocks.
        valid &= key >= whole_until;
        if (number[key] & 2) whole_until = (int64_t)key + call.block;
        number[key] = count;
        first[count++] = key;
    }
    first[count] = (int32_t)call.keys;
    x.block_count[b] = count;
    // An unfinished block ends at its last query, and that must be before the next block begins.
    for (int64_t t = 0; t < call.queries && valid; t++) {
        int64_t at = b * call.queries + t;
        if (call.start[at] <= call.position[at]) valid &= call.position[at] < first[number[own_block(call, at)] + 1];
    }
    return valid && whole_until <= call.keys;
}

// Counts, then places, the readers of every block of one kv head.
static void count_readers(BlockIndex &x, const vf_selected &call, int64_t b, int64_t g) {
    int64_t *begin = x.begin + (b * call.kv_heads + g) * (x.most_blocks + 1);
    const int32_t *number = x.number + b * call.keys;
    memset(begin, 0, (size_t)(x.most_blocks + 1) * sizeof(int64_t));
    // The lists were checked when blocks were numbered, so each_block cannot fail here.
    for (int64_t i = 0; i < x.group; i++)
        for (int64_t t = 0; t < call.queries; t++)
            each_block(call, b, g * x.group + i, t, [&](int32_t key, bool) { begin[number[key]]++; });
}

static void place_readers(BlockIndex &x, const vf_selected &call, int64_t b, int64_t g) {
    int64_t *begin = x.begin + (b * call.kv_heads + g) * (x.most_blocks + 1);
    const int32_t *number = x.number + b * call.keys;
    // Queries outside, heads inside: readers ascend by query, and turns are taken in that order.
    int64_t base = begin[0];
    for (int64_t t = 0; t < call.queries; t++)
        for (int64_t i = 0; i < x.group; i++)
            each_block(call, b, g * x.group + i, t, [&](int32_t key, bool) {
                x.reader[begin[number[key]]++] = (int32_t)(t * x.group + i);
            });
    // Every begin has moved to its end, which is the next one's begin.
    for (int64_t i = x.most_blocks; i > 0; i--) begin[i] = begin[i - 1];
    begin[0] = base;
}

[[maybe_unused]] static int32_t make_block_index(BlockIndex &x, const vf_selected &call) {
    x.group = call.heads / call.kv_heads;
    int64_t pairs = call.batch * call.kv_heads, keys = call.keys;
    int32_t *change;
    if (!x.fixed.lay_out([&](Space &space) {
            x.number = space.take<int32_t>(call.batch * keys);
            x.first = space.take<int32_t>(call.batch * (keys + 1));
            x.block_count = space.take<int32_t>(call.batch);
            x.visible = space.take<uint8_t>(call.batch * keys);
            change = space.take<int32_t>(keys + 1);
        }))
        return VF_NO_MEMORY;
    x.most_blocks = 0;
    for (int64_t b = 0; b < call.batch; b++) {
        mark_visible(x.visible + b * keys, change, call.position + b * call.queries, call.start + b * call.queries,
                     call.queries, keys);
        if (!number_blocks(x, call, b)) return VF_BAD_SELECTION;
        x.most_blocks = most(x.most_blocks, x.block_count[b]);
    }
    // An upper bound: the exact number is known only after counting, and counting needs its memory first.
    int64_t readers = pairs * x.group * call.queries * (call.capacity + 1);
    if (!x.sized.lay_out([&](Space &space) {
            x.begin = space.take<int64_t>(pairs * (x.most_blocks + 1));
            x.reader = space.take<int32_t>(readers);
        }))
        return VF_NO_MEMORY;
#pragma omp parallel for num_threads(call.threads) schedule(static)
    for (int64_t pair = 0; pair < pairs; pair++) count_readers(x, call, pair / call.kv_heads, pair % call.kv_heads);
    // Counts become begins. One line over all kv heads, so that the end of one is the begin of the next.
    int64_t total = 0;
    for (int64_t pair = 0; pair < pairs; pair++)
        for (int64_t i = 0; i <= x.most_blocks; i++) {
            int64_t *at = x.begin + pair * (x.most_blocks + 1) + i, count = *at;
            *at = total, total += count;
        }
#pragma omp parallel for num_threads(call.threads) schedule(static)
    for (int64_t pair = 0; pair < pairs; pair++) place_readers(x, call, pair / call.kv_heads, pair % call.kv_heads);
    return VF_OK;
}

}  // namespace VF_TARGET
