// Which keys the branches of a mixture give a block of queries, and with what weight.
#pragma once

#include <math.h>

#include "attention/tile.hpp"

namespace VF_TARGET {

// The keys one branch gives each query of a block. Keys [from, position] and [start, prefix_end) may have a weight above
// 0; keys [solid, position] and [start, prefix_end) have weight 1. A query's window begins at `hard`, its soft edge lies
// before that.
struct Support {
    int32_t from[BLOCK], solid[BLOCK], hard[BLOCK], prefix_end[BLOCK];
    float width[BLOCK];
    float edge;
    int32_t limit;
    bool soft;
    // The same for each tile of MR queries: what every, or any, of its queries reads. Most tiles are read whole or not at
    // all, and these few numbers say so without a look at single queries.
    struct {
        int32_t least_from, most_solid, least_prefix_end, most_prefix_end;
    } tile[TILES];
    int32_t least_from, most_prefix_end; // and for the whole block
};

struct Rows {
    int32_t count;      // queries in the block
    int32_t tile_count; // register tiles they need
    int32_t position[BLOCK], start[BLOCK];
    uint8_t keep[BLOCK]; // 0: the query sees no key
    struct {
        int32_t least_position, most_position, most_start, least_start;
    } tile[TILES];
    int32_t most_position; // of all queries
    Support branch[VF_MAX_BRANCHES];
};

// What a tile of queries reads of some keys: nothing, some or with weights between 0 and 1, or all with weight 1.
enum Cover { NONE, MIXED, FULL };

// floor(x) as an int32, any x (NaN included).
VF_INLINE int32_t floor_int(double x) {
    // A learned width may be infinite or NaN, and converting those to an integer is undefined. The bounds leave room
    // for the additions that follow.
    if (!(x > -2147483000.0)) return -2147483000;
    if (x > 2147483000.0) return 2147483000;
    int32_t whole = (int32_t)x;
    return whole - (whole > x);
}

// Windows and prefixes belong to the head: one with a small window reads no further, whatever its neighbours read.
static void read_support(Support &s, const vf_branch &branch, int64_t h, const Rows &rows, const float *width) {
    const int64_t window = branch.window[h], prefix = branch.prefix[h];
    s.edge = branch.edge;
    s.limit = branch.limit;
    s.soft = width != nullptr;
    for (int row = 0; row < rows.count; row++) {
        int64_t position = rows.position[row], start = rows.start[row];
        int64_t hard = position - window + 1, from = hard, solid = hard;
        if (s.soft) {
            // One key of slack on either side: the exact weight decides there.
            // In double: beyond position 2^24, position - z in float32 would be off by whole keys.
            double z = s.width[row] = width[row];
            int64_t limit_from = position - branch.limit + 1;
            int64_t soft_from = most(floor_int(position - z), limit_from);
            int64_t soft_solid = most((int64_t)floor_int(position - z + branch.edge) + 2, limit_from);
            from = least(from, soft_from);
            solid = least(solid, soft_solid);
        }
        s.hard[row] = most(hard, start);
        s.from[row] = most(from, start);
        s.solid[row] = most(solid, start);
        // Without a prefix nothing before `start` may look as if it were part of one.
        s.prefix_end[row] = prefix ? least(start + prefix, position + 1) : INT32_MIN;
    }
    s.least_from = INT32_MAX, s.most_prefix_end = INT32_MIN;
    for (int tile = 0; tile < rows.tile_count; tile++) {
        auto &t = s.tile[tile];
        t = {INT32_MAX, INT32_MIN, INT32_MAX, INT32_MIN};
        for (int row = tile * MR; row < (tile + 1) * MR && row < rows.count; row++) {
            if (!rows.keep[row]) {
                // A query that sees no key must get weight 0, so its tile may not be FULL; it has no other say.
                t.most_solid = INT32_MAX;
                t.least_prefix_end = INT32_MIN;
                continue;
            }
            t.least_from = least(t.least_from, s.from[row]);
            t.most_solid = most(t.most_solid, s.solid[row]);
            t.least_prefix_end = least(t.least_prefix_end, s.prefix_end[row]);
            t.most_prefix_end = most(t.most_prefix_end, s.prefix_end[row]);
        }
        s.least_from = least(s.least_from, t.least_from);
        s.most_prefix_end = most(s.most_prefix_end, t.most_prefix_end);
    }
}

// The geometry of queries first .. first + count of head h in batch row b.
static void read_rows(Rows &rows, const vf_mixture &call, int64_t b, int64_t h, int64_t first, int count) {
    rows.count = count;
    rows.tile_count = (count + MR - 1) / MR;
    rows.most_position = -1;
    for (int tile = 0; tile < rows.tile_count; tile++) rows.tile[tile] = {INT32_MAX, -1, INT32_MIN, INT32_MAX};
    for (int row = 0; row < count; row++) {
        int64_t at = b * call.queries + first + row;
        int32_t position = call.position[at], start = call.start[at];
        auto &t = rows.tile[row / MR];
        rows.keep[row] = start <= position;
        if (!rows.keep[row]) {
            // No key is at or before -1, so every test further down fails for this query without asking for `keep`.
            position = -1, start = 0;
            t.least_position = -1;
        }
        rows.position[row] = position;
        rows.start[row] = start;
        t.least_position = least(t.least_position, position);
        t.most_position = most(t.most_position, position);
        t.most_start = most(t.most_start, start);
        // The start that stands in for a query without keys would make the tile look as if it reached back to key 0.
        if (rows.keep[row]) t.least_start = least(t.least_start, start);
        rows.most_position = most(rows.most_position, position);
    }
    for (int m = 0; m < call.branch_count; m++) {
        const float *width = call.branch[m].width;
        read_support(rows.branch[m], call.branch[m], h, rows,
                     width ? width + (b * call.heads + h) * call.queries + first : nullptr);
    }
}

// What a branch gives a tile of queries on keys [first, end). Queries past the block's end count as indifferent.
VF_INLINE Cover cover(const Rows &rows, const Support &s, int tile, int32_t first, int32_t end) {
    const auto &r = rows.tile[tile];
    const auto &t = s.tile[tile];
    // After all queries, before all documents, or in the gap between every prefix and every window.
    if (first > r.most_position || end <= r.least_start || (end <= t.least_from && first >= t.most_prefix_end))
        return NONE;
    // The last key is not after any query, and the first is inside the solid part of every window, which begins at or
    // after the document. Or: no document begins after the first key, and every prefix, which ends at the query at the
    // latest, holds the last.
    if (end - 1 <= r.least_position && first >= t.most_solid) return FULL;
    if (first >= r.most_start && end <= t.least_prefix_end) return FULL;
    return MIXED;
}

// Whether a branch may give any query of the block a key in [first, end).
VF_INLINE bool touches(const Rows &rows, const Support &s, int32_t first, int32_t end) {
    return first <= rows.most_position && (end > s.least_from || first < s.most_prefix_end);
}

// Branch `outer` minus branch `inner` inside it (inner < 0: none).
VF_INLINE Cover cover_step(const Rows &rows, int outer, int inner, int tile, int32_t first, int32_t end) {
    Cover all = cover(rows, rows.branch[outer], tile, first, end);
    if (all == NONE || inner < 0) return all;
    Cover less = cover(rows, rows.branch[inner], tile, first, end);
    if (less == FULL) return NONE;
    return less == NONE ? all : MIXED;
}

// The weights a branch gives query `row` on LANES keys; `slope` (may be null) receives d weight / d width * edge,
// that is 1 strictly inside the soft edge.
VF_INLINE Vec weigh(const Rows &rows, const Support &s, int row, Ints key, Vec *slope = nullptr) {
    int32_t position = rows.position[row];
    Ints seen = (key <= position) & (key >= rows.start[row]);
    // A union: where the hard window or the prefix gives weight 1, the soft edge adds nothing and gets no gradient.
    Ints hard = seen & ((key >= s.hard[row]) | (key < s.prefix_end[row]));
    Vec one = splat(1.0f), weight = hard ? one : Vec{};
    if (s.soft) {
        Ints distance = position - key;
        Vec ratio = (s.width[row] - __builtin_convertvector(distance, Vec)) / s.edge;
        Ints inside = seen & ~hard & (distance < s.limit) & (ratio > 0.0f);
        weight = inside ? min(ratio, one) : weight;
        // Where the weight is clamped to 1, a wider window changes nothing.
        if (slope) *slope = (inside & (ratio < 1.0f)) ? one : Vec{};
    } else if (slope) {
        *slope = Vec{};
    }
    return weight;
}

// What the outer branch of a chain adds to the one inside it. Nested weights never fall from inner to outer, so this is
// not negative.
VF_INLINE Vec weigh_step(const Rows &rows, int outer, int inner, int row, Ints key) {
    Vec weight = weigh(rows, rows.branch[outer], row, key);
    return inner < 0 ? weight : weight - weigh(rows, rows.branch[inner], row, key);
}

// Chains. If every weight of branch a is at most that of branch b, one pass serves both: the keys of a first, then
// what b adds. Branches are listed so that each contains the one it is `inside` of (the one just before, or -1 at the
// head of a chain). A window inside causal attention thus costs what causal attention costs.
struct Chains {
    int32_t count;
    int32_t branch[VF_MAX_BRANCHES], inside[VF_MAX_BRANCHES];
};

VF_INLINE bool nests(const vf_branch &inner, const vf_branch &outer, int64_t h) {
    if (inner.window[h] > outer.window[h] || inner.prefix[h] > outer.prefix[h]) return false;
    // A soft edge nests when the outer hard window reaches past its limit.
    return !inner.width || inner.limit <= outer.window[h];
}

// The chains of head h: branches that nest in one head need not nest in another.
[[maybe_unused]] static Chains make_chains(const vf_mixture &call, int64_t h, const bool *open) {
    Chains chains = {};
    bool used[VF_MAX_BRANCHES] = {};
    for (;;) {
        int32_t last = -1;
        for (;;) {
            // The next link is the smallest branch left that contains the last one.
            int32_t best = -1;
            for (int32_t m = 0; m < call.branch_count; m++) {
                if (used[m] || !open[m] || (last >= 0 && !nests(call.branch[last], call.branch[m], h))) continue;
                if (best < 0 || nests(call.branch[m], call.branch[best], h)) best = m;
            }
            if (best < 0) break;
            used[best] = true;
            chains.branch[chains.count] = best;
            chains.inside[chains.count++] = last;
            last = best;
        }
        if (last < 0) return chains;
    }
}

// Infinity where nothing was summed up: 2^(score - infinity) is 0 whatever the score, and so is its product with 0.
VF_INLINE void put_norm(const vf_mixture &call, int64_t query, int m, float top, float factor) {
    float *norm = call.norm + (query * call.branch_count + m) * 2;
    norm[0] = factor > 0 ? top : INFINITY, norm[1] = factor;
}

// Branches with a weight other than 0 in the block; all of them unless the call allows to leave closed ones out.
[[maybe_unused]] static void find_open(bool *open, const vf_mixture &call, const float *weights, int count) {
    for (int m = 0; m < call.branch_count; m++) {
        // A closed branch still has a gradient to its weight, so only calls that need none may skip it.
        open[m] = !(call.skip_closed && weights);
        for (int row = 0; row < count && !open[m]; row++) open[m] = weights[row * call.branch_count + m] != 0.0f;
    }
}

}  // namespace VF_TARGET
