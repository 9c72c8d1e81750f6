// From scores and dP = dO V^T to the mixed probabilities a and the score gradients dS, one tile of queries at a time:
//
//     p_m = omega_m 2^(s - top_m) f_m      a = sum_m w_m p_m      dS = sum_m p_m (w_m dP - offset_m)
//
// Where branches have weight 0 or 1 over the tile they share one exponential: with `base` the active one of least top,
// p_m = c_m p_base and c_m = 2^(top_base - top_m) f_m / f_base, so a = A p and dS = p (A dP - E) with a pair (A, E) per
// query: a mixture costs what one softmax costs. (Every active branch holds these keys, so s <= top_base.)
#pragma once

#include <math.h>

#include "attention/branches.hpp"

namespace VF_TARGET {

// Every set of branches that may be active on a tile together has its own (A, E). Few of them occur, so they are filled
// in as they come.
static constexpr int SETS = 1 << VF_MAX_BRANCHES;

struct Gradient {
    // Per branch and query: p_m = omega_m 2^(s - top_m) factor_m, as the forward had it; weight, offset = w dO . O less the
    // gradient of the logsumexp, and sums for the weight and the width.
    float top[VF_MAX_BRANCHES][BLOCK], factor[VF_MAX_BRANCHES][BLOCK];
    float weight[VF_MAX_BRANCHES][BLOCK], offset[VF_MAX_BRANCHES][BLOCK];
    float dweight[BLOCK], dwidth[VF_MAX_BRANCHES][BLOCK];  // the weight of the last branch only
    // Per set of active branches and query, filled when first needed.
    float base[SETS][BLOCK], base_factor[SETS][BLOCK], a[SETS][BLOCK], e[SETS][BLOCK], last[SETS][BLOCK];
    uint32_t ready;
    bool want_weights, want_width;
};

static void prepare_set(Gradient &g, int branches, int set, int count) {
    for (int row = 0; row < count; row++) {
        // A branch left out has factor 0, and p = 2^(s - inf) = 0 if there is no other.
        float base = INFINITY, factor = 0, a = 0, e = 0;
        for (int m = 0; m < branches; m++)
            // The least top: s - base is then largest, but never above 0 for keys that this branch reads, and c_m =
            // 2^(base - top_m) cannot overflow either.
            if (set >> m & 1 && g.factor[m][row] > 0 && g.top[m][row] < base)
                base = g.top[m][row], factor = g.factor[m][row];
        for (int m = 0; m < branches; m++) {
            bool active = set >> m & 1 && g.factor[m][row] > 0;
            float c = active ? exp2f(base - g.top[m][row]) * (g.factor[m][row] / factor) : 0.0f;
            // Overwritten in each round: what stays is that of the last branch, the only one whose weight gradient is
            // summed up from tiles.
            g.last[set][row] = c;
            a += c * g.weight[m][row];
            e += c * g.offset[m][row];
        }
        g.base[set][row] = base, g.base_factor[set][row] = factor, g.a[set][row] = a, g.e[set][row] = e;
    }
    g.ready |= 1u << set;
}

// scores -> a, dp -> dS, for `count` queries from `row` on, on one panel of keys where the branches of `set` have weight
// 1, others 0.
static void differentiate_full(Gradient &g, const Rows &rows, int branches, int set, int row, int count, float *scores,
                               float *dp) {
    if (!(g.ready >> set & 1)) prepare_set(g, branches, set, rows.count);
    for (int i = 0; i < count; i++, row++) {
        // One power for all branches, and two multiply-adds: p, then a = A p and dS = p (A dP - E).
        Vec base = splat(g.base[set][row]), factor = splat(g.base_factor[set][row]), dot = {};
        Vec a = splat(g.a[set][row]), e = splat(g.e[set][row]);
        for (int v = 0; v < NV; v++) {
            float *s_at = scores + i * NR + v * LANES, *d_at = dp + i * NR + v * LANES;
            Vec p = exp2(load(s_at) - base) * factor, d = load(d_at);
            store(s_at, p * a);
            store(d_at, p * (a * d - e));
            dot += p * d;
        }
        // sum p dP = dO . O over these keys; p is the base's, and c_last makes it the last branch's.
        if (g.want_weights && set >> (branches - 1) & 1) g.dweight[row] += g.last[set][row] * sum_lanes(dot);
    }
}

// The same with exact weights key by key, for the branches of `set`.
static void differentiate_mixed(Gradient &g, const Rows &rows, int branches, int set, int row, int count,
                                int32_t key, float *scores, float *dp) {
    // A power for each branch: the sums cannot be shared where weights differ from key to key. Few panels are like this.
    for (int i = 0; i < count; i++, row++) {
        Vec dweight = {}, dwidth[VF_MAX_BRANCHES] = {};
        for (int v = 0; v < NV; v++) {
            float *s_at = scores + i * NR + v * LANES, *d_at = dp + i * NR + v * LANES;
            Vec s = load(s_at), d = load(d_at), a = {}, ds = {};
            for (int m = 0; m < branches; m++) {
                if (!(set >> m & 1)) continue;
                Vec slope, weight = weigh(rows, rows.branch[m], row, lanes() + (key + v * LANES), &slope);
                // A key that a branch does not read may score above the branch's top: 2^x would overflow.
                Vec x = weight > 0.0f ? s - g.top[m][row] : splat(-INFINITY);
                Vec e = exp2(x) * g.factor[m][row], p = e * weight, excess = g.weight[m][row] * d - g.offset[m][row];
                a += g.weight[m][row] * p;
                ds += p * excess;
                if (m + 1 == branches) dweight += p * d;
                // The width acts through the weight alone, p = omega e, so its slope takes the weight's place; the
                // division by the edge waits until the end. On hard branches the slope is 0.
                dwidth[m] += slope * e * excess;
            }
            store(s_at, a);
            store(d_at, ds);
        }
        if (g.want_weights) g.dweight[row] += sum_lanes(dweight);
        for (int m = 0; m < branches && g.want_width; m++)
            if (set >> m & 1 && rows.branch[m].soft) g.dwidth[m][row] += sum_lanes(dwidth[m]) / rows.branch[m].edge;
    }
}

}  // namespace VF_TARGET
