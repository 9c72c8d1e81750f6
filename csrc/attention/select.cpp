// The best keys of each query by q . k, or the best blocks by q . (mean of their keys): scores tile by tile, each tile
// consumed by the candidates (candidates.hpp) while it is in cache. Nothing of size T x S exists.
//
// Blocks are keys of another kind: their means are pooled once, and a query's range of keys becomes a range of means.
#include <omp.h>

#include "attention/candidates.hpp"
#include "attention/gather.hpp"
#include "kernels.hpp"
#include "simd/matmul.hpp"
#include "attention/pooled.hpp"
#include "simd/scratch.hpp"

namespace VF_TARGET {

// Keys scored at a time: 96 x 128 scores are 48 KB, they reach the candidates from L1 or from L2.
static constexpr int SCORED = 128, SCORED_PANELS = SCORED / NR;
// Up to this many rows of queries per kv head, dot products with the keys where they lie cost less than packing.
static constexpr int64_t FEW_ROWS = 16;
// Keys of a task when there are few rows: 256 KB of float32 keys of width 128, some 20 us, long beside handing it out.
static constexpr int CHUNK = 512;

namespace {

// What is ranked: rows of `k` instead of the call's keys if blocks are selected, and the range of them a query may select.
struct Ranking {
    const vf_select &call;
    vf_tensor k;
    int64_t keys;
    const int32_t *position, *start;  // [B, T]
    const uint8_t *visible;           // [B, keys]
};

struct Block {
    float *q;                   // [D, BLOCK] panels
    float *scores;              // [BLOCK, SCORED] panels
    int32_t *ranks, *keys;      // [BLOCK, room]
    Candidates row[BLOCK];
    int32_t first[BLOCK], last[BLOCK];
    struct {
        int32_t least_first, most_last;  // no keys: every query of the tile has room for all it sees
    } tile[TILES];
};

}  // namespace

// How many of its keys a query selects. `all`: every one it sees, so that no score is needed.
static int32_t wanted_keys(const Ranking &r, int64_t at, bool *all) {
    int64_t seen = (int64_t)r.position[at] - r.start[at] + 1, wanted = r.call.budget[at];
    if (wanted > r.call.capacity) wanted = r.call.capacity;
    if (wanted > seen) wanted = seen;
    if (wanted < 0) wanted = 0;
    // Early queries select all they see, and need no scores.
    *all = wanted == 0 || wanted == seen;
    return (int32_t)wanted;
}

// Writes the selection of query (b, t) of a head.
static void write_selection(const Ranking &r, Candidates &c, int64_t b, int64_t h, int64_t t) {
    const vf_select &call = r.call;
    int64_t at = b * call.queries + t;
    int32_t *selected = call.selected + ((b * call.heads + h) * call.queries + t) * call.capacity;
    bool all;
    int32_t wanted = wanted_keys(r, at, &all), count = wanted;
    if (all) {
        for (int32_t i = 0; i < wanted; i++) selected[i] = r.start[at] + i;
    } else {
        // Prunes along the way leave a few too many; the last one is exact.
        prune(c, true);
        count = c.count;
        memcpy(selected, c.key, (size_t)count * sizeof(int32_t));
    }
    if (call.block)  // rows of means become first keys
        for (int32_t i = 0; i < count; i++)
            selected[i] = call.start[at] + (selected[i] - call.start[at] / call.block) * call.block;
    for (int64_t i = count; i < call.capacity; i++) selected[i] = -1;
}

template <typename Q>
static void select(Block &block, const Ranking &r, int64_t b, int64_t h, int64_t begin, const float *k) {
    const vf_select &call = r.call;
    int64_t width = call.head_width;
    int count = least(BLOCK, call.queries - begin), tiles = (count + MR - 1) / MR;
    uint8_t keep[BLOCK];
    for (int tile = 0; tile < tiles; tile++) block.tile[tile] = {INT32_MAX, -1};
    int32_t least_first = INT32_MAX, most_last = -1;
    for (int row = 0; row < count; row++) {
        int64_t at = b * call.queries + begin + row;
        bool all;
        int32_t wanted = wanted_keys(r, at, &all);
        // A buffer for each query of the block, so that a tile of scores is used up while it is in cache.
        start_candidates(block.row[row], block.ranks + row * room(call.capacity), block.keys + row * room(call.capacity),
                         wanted);
        keep[row] = !all;
        // An empty range: the query takes part in no tile, and does not widen the range of its block.
        block.first[row] = all ? INT32_MAX : r.start[at];
        block.last[row] = all ? -1 : r.position[at];
        auto &tile = block.tile[row / MR];
        tile.least_first = least(tile.least_first, block.first[row]);
        tile.most_last = most(tile.most_last, block.last[row]);
        least_first = least(least_first, block.first[row]), most_last = most(most_last, block.last[row]);
    }
    // Queries as they are: a positive scale that all keys of a query share would change no rank.
    if (most_last >= 0)
        pack(block.q, BLOCK, (const Q *)call.q.data + b * call.q.stride[0] + h * call.q.stride[1] + begin * call.q.stride[2],
             call.q.stride[2], count, width, 1.0f, keep);
    // Ascending, which is what makes the lower index win among equal scores (candidates.hpp).
    for (int64_t key = most_last < 0 ? 0 : least_first / SCORED * SCORED; key <= most_last; key += SCORED) {
        // Register tiles that no query of the block looks at are left out, as in the tile pass.
        for (int p = 0; p < SCORED_PANELS; p++)
            for (int tile = 0; tile < tiles; tile++)
                if (key + p * NR <= block.tile[tile].most_last && key + (p + 1) * NR > block.tile[tile].least_first)
                    multiply_tile(block.scores + (p * BLOCK + tile * MR) * NR, block.q + tile * MR * NR, BLOCK * NR,
                                  k + (key + p * NR) * width, width, false);
        for (int row = 0; row < count; row++) {
            if (key > block.last[row] || key + SCORED <= block.first[row]) continue;
            offer(block.row[row], block.scores + row * NR, BLOCK * NR, SCORED_PANELS, (int32_t)key, block.first[row],
                  block.last[row]);
        }
    }
    for (int row = 0; row < count; row++) write_selection(r, block.row[row], b, h, begin + row);
}

template <typename Q, typename K>
static int32_t select_in_tiles(const Ranking &r) {
    const vf_select &call = r.call;
    int64_t width = call.head_width, padded = round_up(width, NR), group = call.heads / call.kv_heads;
    int64_t key_blocks = (r.keys + SCORED - 1) / SCORED, query_blocks = (call.queries + BLOCK - 1) / BLOCK;
    int64_t pairs = call.batch * call.kv_heads, k_size = key_blocks * SCORED * width;
    // Waves as in the tile pass: as many packed keys at once as a shared cache holds.
    int64_t wave = wave_of(pairs, k_size * (int64_t)sizeof(float), WAVE_BYTES);
    // With k in the hundreds these buffers are larger than the scores; they must stay in L2 (k = 180: 2 x 180 KB).
    int64_t candidates = BLOCK * room(call.capacity);
    auto lay_out_block = [&](Block &block, Space &space) {
        block.q = space.take<float>(BLOCK * padded), block.scores = space.take<float>(BLOCK * SCORED);
        block.ranks = space.take<int32_t>(candidates), block.keys = space.take<int32_t>(candidates);
    };
    size_t block_bytes = measure([&](Space &space) {
        Block block;
        lay_out_block(block, space);
    });
    float *k;
    char *blocks;
    Scratch scratch;
    if (!scratch.lay_out([&](Space &space) {
            k = space.take<float>(k_size * wave);
            blocks = space.take<char>((int64_t)block_bytes * call.threads);
        }))
        return VF_NO_MEMORY;

#pragma omp parallel num_threads(call.threads)
    {
        Block block;
        Space space = {(uintptr_t)blocks + block_bytes * (size_t)omp_get_thread_num()};
        lay_out_block(block, space);
        for (int64_t base = 0; base < pairs; base += wave) {
            int64_t here = least(wave, pairs - base);
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < here * key_blocks; task++) {
                int64_t pair = base + task / key_blocks, key = task % key_blocks * SCORED, b = pair / call.kv_heads;
                pack_transposed(k + task / key_blocks * k_size + key * width, SCORED,
                                (const K *)r.k.data + b * r.k.stride[0] + pair % call.kv_heads * r.k.stride[1] +
                                    key * r.k.stride[2],
                                r.k.stride[2], least(SCORED, r.keys - key), width, r.visible + b * r.keys + key);
            }
            // Late blocks see the most keys: longest tasks first, so that threads end together.
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < here * group * query_blocks; task++) {
                int64_t qb = query_blocks - 1 - task / (here * group), head = task % (here * group);
                int64_t pair = base + head / group;
                select<Q>(block, r, pair / call.kv_heads, pair % call.kv_heads * group + head % group, qb * BLOCK,
                          k + head / group * k_size);
            }
        }
    }
    return VF_OK;
}

// A few queries against a long cache: all scores of a kv head first, split over chunks of keys, then one scan a query.
template <typename Q, typename K>
static int32_t select_for_few(const Ranking &r) {
    const vf_select &call = r.call;
    int64_t width = call.head_width, group = call.heads / call.kv_heads, rows = group * call.queries;
    int64_t pairs = call.batch * call.kv_heads, chunks = (r.keys + CHUNK - 1) / CHUNK, padded = chunks * CHUNK;
    int64_t space = room(call.capacity);
    float *scores, *q;
    int32_t *buffers;
    Scratch scratch;
    if (!scratch.lay_out([&](Space &s) {
            scores = s.take<float>(pairs * rows * padded), q = s.take<float>(pairs * rows * width);
            buffers = s.take<int32_t>(2 * space * call.threads);
        }))
        return VF_NO_MEMORY;
    // The queries of a kv head lie together, as float32: they are read again for every key.
    for (int64_t i = 0; i < pairs * rows; i++) {
        int64_t b = i / rows / call.kv_heads, h = i / rows % call.kv_heads * group + i % rows / call.queries;
        const Q *from = (const Q *)call.q.data + b * call.q.stride[0] + h * call.q.stride[1] +
                        i % call.queries * call.q.stride[2];
        for (int64_t d = 0; d < width; d++) q[i * width + d] = to_float(from[d]);
    }
#pragma omp parallel num_threads(call.threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < pairs * chunks; task++) {
            int64_t pair = task / chunks, b = pair / call.kv_heads, begin = task % chunks * CHUNK;
            // A key is read once, for all queries that share it: memory is the limit here.
            const K *k = (const K *)r.k.data + b * r.k.stride[0] + pair % call.kv_heads * r.k.stride[1];
            for (int64_t key = begin; key < begin + CHUNK && key < r.keys; key++) {
                // A key that no query sees may be NaN. Its score stays unset, and is in no query's range.
                if (!r.visible[b * r.keys + key]) continue;
                for (int64_t row = pair * rows; row < (pair + 1) * rows; row++)
                    // Scores of all keys exist here, but for at most 16 queries of a kv head: a row of them is as long
                    // as the cache.
                    scores[row * padded + key] = dot(q + row * width, k + key * r.k.stride[2], width);
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < pairs * rows; i++) {
            int64_t b = i / rows / call.kv_heads, h = i / rows % call.kv_heads * group + i % rows / call.queries;
            int64_t t = i % call.queries, at = b * call.queries + t;
            Candidates c;
            bool all;
            int32_t *own = buffers + 2 * space * omp_get_thread_num();
            start_candidates(c, own, own + space, wanted_keys(r, at, &all));
            if (!all)
                // One scan over the whole row: a stretch of NR scores after the other, as if it were a line of panels.
                offer(c, scores + i * padded, NR, (int)(padded / NR), 0, r.start[at], r.position[at]);
            write_selection(r, c, b, h, t);
        }
    }
    return VF_OK;
}

template <typename Q, typename K>
static int32_t select_from(const vf_select &call, const vf_tensor &k, int64_t keys, const int32_t *position,
                           const int32_t *start) {
    uint8_t *visible;
    int32_t *change;
    Scratch scratch;
    if (!scratch.lay_out([&](Space &space) {
            visible = space.take<uint8_t>(call.batch * keys), change = space.take<int32_t>(keys + 1);
        }))
        return VF_NO_MEMORY;
    for (int64_t b = 0; b < call.batch; b++)
        mark_visible(visible + b * keys, change, position + b * call.queries, start + b * call.queries, call.queries,
                     keys);
    Ranking ranking = {call, k, keys, position, start, visible};
    // Both ways sum in another order, so they may rank keys of nearly equal scores differently; which one runs depends
    // on the sizes alone.
    bool few = call.heads / call.kv_heads * call.queries <= FEW_ROWS;
    return few ? select_for_few<Q, K>(ranking) : select_in_tiles<Q, K>(ranking);
}

// The first key of every block some query may select, -1 for rows no one asks for; false if documents overlap.
static bool find_blocks(const vf_select &call, int64_t b, int64_t rows, int32_t *first, int32_t *farthest) {
    for (int64_t j = 0; j < call.keys; j++) farthest[j] = -1;
    for (int64_t row = 0; row < rows; row++) first[row] = -1;
    for (int64_t t = 0; t < call.queries; t++) {
        int32_t position = call.position[b * call.queries + t], start = call.start[b * call.queries + t];
        // A document is known by its start; its blocks reach as far as the last of its queries.
        if (start <= position) farthest[start] = most(farthest[start], position);
    }
    for (int32_t start = 0; start < call.keys; start++) {
        BlockRange range = earlier_blocks(farthest[start], start, call.block);
        for (int32_t row = range.first; row < range.end; row++) {
            // Two documents would share a mean: their keys overlap, which the layout does not allow.
            if (first[row] >= 0) return false;
            first[row] = start + (row - range.first) * call.block;
        }
    }
    return true;
}

template <typename T>
static int32_t select_blocks(const vf_select &call) {
    int64_t rows = (call.keys + call.block - 1) / call.block, width = call.head_width, pairs = call.batch * call.kv_heads;
    bool given = call.pooled.data != nullptr;
    vf_tensor pooled = call.pooled;
    int32_t *position, *start, *first = nullptr, *farthest = nullptr;
    Scratch scratch;
    if (!scratch.lay_out([&](Space &space) {
            position = space.take<int32_t>(call.batch * call.queries);
            start = space.take<int32_t>(call.batch * call.queries);
            if (given) return;
            pooled = {space.take<float>(pairs * rows * width), {call.kv_heads * rows * width, rows * width, width}};
            first = space.take<int32_t>(call.batch * rows), farthest = space.take<int32_t>(call.keys);
        }))
        return VF_NO_MEMORY;
    for (int64_t at = 0; at < call.batch * call.queries; at++) {
        BlockRange range = earlier_blocks(call.position[at], call.start[at], call.block);
        start[at] = range.first, position[at] = range.end - 1;
    }
    // A cache keeps its means as keys arrive; without one they are made here, in the same order of additions
    // (pooled.hpp).
    if (!given) {
        for (int64_t b = 0; b < call.batch; b++)
            if (!find_blocks(call, b, rows, first + b * rows, farthest)) return VF_BAD_SELECTION;
#pragma omp parallel for num_threads(call.threads) schedule(static)
        for (int64_t task = 0; task < pairs * rows; task++) {
            int64_t b = task / rows / call.kv_heads, g = task / rows % call.kv_heads;
            int32_t from = first[b * rows + task % rows];
            // A row that no query may select is never read, so its mean may stay unset.
            if (from < 0) continue;
            const T *k = (const T *)call.k.data + b * call.k.stride[0] + g * call.k.stride[1] + from * call.k.stride[2];
            for (int32_t j = 0; j < call.block; j++)
                add_to_mean((float *)pooled.data + task * width, k + j * call.k.stride[2], width, call.block, j == 0);
        }
    }
    return select_from<T, float>(call, pooled, rows, position, start);
}

template <typename T>
static int32_t run(const vf_select &call) {
    return call.block ? select_blocks<T>(call) : select_from<T, T>(call, call.k, call.keys, call.position, call.start);
}

int32_t select_best(const vf_select &call) {
    return call.dtype == VF_BFLOAT16 ? run<uint16_t>(call) : run<float>(call);
}

}  // namespace VF_TARGET
