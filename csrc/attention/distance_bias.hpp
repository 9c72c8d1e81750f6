// A bias by distance: score = scale_h q . k + table[min(x, N - 1)], x = position - key.
//
// One policy with strides serves two kinds. A table [H, N] for each head is a relative bias, or ALiBi, or the positional
// prior -(|x - mu| + eps)^beta e^s: whatever depends on the distance alone is made into a table, and differentiated
// through it, by whoever calls, so none of these needs a policy of its own. A table [B, H, T, N] for each query
// is Shaw et al. 2018, q . r_x.
#pragma once

#include "attention/score.hpp"

namespace VF_TARGET {

// The entries of LANES keys, the first of them at distance x. Keys ascend, so distances descend: a stretch of the table,
// read backwards. Keys after the query (x < 0) are masked; they get the entry at 0 to stay inside the table.
VF_INLINE Vec bias_at(const float *table, int32_t last, int32_t x) {
    if (x >= LANES - 1 && x <= last) return reversed(load(table + x - (LANES - 1)));
    // Far keys all share the last entry. Most vectors take one of these two ways; only those at the ends go lane by
    // lane.
    if (x - (LANES - 1) >= last) return splat(table[last]);
    Vec bias;
    for (int lane = 0; lane < LANES; lane++) {
        int32_t at = x - lane;
        bias[lane] = table[at < 0 ? 0 : at > last ? last : at];
    }
    return bias;
}

// The reverse: sums[x - lane] += d[lane] for distances in [0, last); what belongs to `last` and beyond is returned.
VF_INLINE float add_by_distance(float *sums, int32_t last, int32_t x, Vec d) {
    if (x >= LANES - 1 && x < last) {
        float *to = sums + x - (LANES - 1);
        store(to, load(to) + reversed(d));
        return 0;
    }
    if (x - (LANES - 1) >= last) return sum_lanes(d);
    float beyond = 0;
    for (int lane = 0; lane < LANES; lane++) {
        int32_t at = x - lane;
        if (at >= last)
            beyond += d[lane];
        else if (at >= 0)
            sums[at] += d[lane];
    }
    return beyond;
}

// The table's row of a query.
VF_INLINE const float *bias_row(const vf_distance_bias &bias, int64_t b, int64_t h, int64_t t) {
    return bias.table + b * bias.stride[0] + h * bias.stride[1] + t * bias.stride[2];
}

struct DistanceBias : DotScore {
    static constexpr bool PLAIN = false;
    struct State {
        const float *table[BLOCK];
        // Of the gradient: where a query's entries are added to, and its share of the last entry, which other tasks
        // add to as well.
        float *to[BLOCK];
        float beyond[BLOCK];
        float *sums;        // [N], of one block of queries, if they share a row of the table: then every `to` is this,
        int32_t from, end;  // and only these entries are other than 0
    };
    // [B, H, N] if queries share a row: sums over all pairs of a head, which mostly cancel, so in float64.
    double *totals = nullptr;

    using DotScore::DotScore;

    bool wanted() const { return grad && grad->grad_bias_table; }
    bool shared() const { return call.bias.stride[2] == 0; }
    int32_t last() const { return (int32_t)call.bias.distances - 1; }

    void lay_out(Space &space, int64_t) {
        if (wanted() && shared()) totals = space.take<double>(call.batch * call.heads * call.bias.distances);
    }
    void prepare() {
        if (totals) memset(totals, 0, (size_t)(call.batch * call.heads * call.bias.distances) * sizeof(double));
    }
    void lay_out_state(State &state, Space &space) const {
        state.sums = wanted() && shared() ? space.take<float>(call.bias.distances) : nullptr;
        // Rows below are set as blocks are opened; sums must start at 0 and go back to it in in_turn.
        state.from = 0, state.end = wanted() && shared() ? (int32_t)call.bias.distances : 0;
    }

    void open(State &state, const Rows &rows, int64_t b, int64_t h, int64_t first) const {
        // Only what the block before has touched: a table may be as long as the text, and clearing all of it would cost
        // more than a window's sums.
        if (state.sums && state.from < state.end)
            memset(state.sums + state.from, 0, (size_t)(state.end - state.from) * sizeof(float));
        state.from = INT32_MAX, state.end = 0;
        for (int row = 0; row < rows.count; row++) {
            state.table[row] = bias_row(call.bias, b, h, first + row);
            if (!wanted()) continue;
            state.beyond[row] = 0;
            state.to[row] = state.sums ? state.sums : gradient_row(b, h, first + row);
        }
    }

    template <bool SAVE>
    void rate(State &state, const Rows &rows, int64_t, int row, int count, float *scores, const float *,
              int32_t key) const {
        for (int i = 0; i < count; i++)
            for (int v = 0; v < NV; v++) {
                float *at = scores + i * NR + v * LANES;
                int32_t x = rows.position[row + i] - (key + v * LANES);
                // Products are scores as powers of 2 already; the table is in natural units.
                store(at, load(at) + bias_at(state.table[row + i], last(), x) * LOG2E);
            }
    }

    // The score is the product plus an entry: its gradient is the product's and the entry's alike. A query has one key
    // at each distance below `last`, and this task alone has that key, so it may add without waiting for its turn.
    void differentiate(State &state, const Rows &rows, int64_t, int row, int count, float *dscores, const float *,
                       int32_t key, int) const {
        if (!wanted()) return;
        for (int i = 0; i < count; i++) {
            int32_t nearest = rows.position[row + i] - (key + NR - 1), farthest = rows.position[row + i] - key;
            state.from = least(state.from, most(nearest, 0));
            state.end = most(state.end, least(farthest + 1, call.bias.distances));
            for (int v = 0; v < NV; v++)
                state.beyond[row + i] += add_by_distance(state.to[row + i], last(), farthest - v * LANES,
                                                         load(dscores + i * NR + v * LANES));
        }
    }

    void clear(int64_t b, int64_t h, int64_t first, int count) const {
        if (!wanted() || shared()) return;
        for (int row = 0; row < count; row++)
            memset(gradient_row(b, h, first + row), 0, (size_t)call.bias.distances * sizeof(float));
    }

    void in_turn(State &state, const Rows &rows, int64_t b, int64_t h, int64_t, const int *) const {
        if (!wanted()) return;
        double *total = shared() ? totals + (b * call.heads + h) * call.bias.distances : nullptr;
        for (int row = 0; row < rows.count; row++) {
            if (total)
                total[last()] += state.beyond[row];
            else
                state.to[row][last()] += state.beyond[row];
        }
        for (int32_t x = state.from; total && x < state.end; x++) total[x] += state.sums[x];
    }

    // Rows shared by all texts of the batch are summed over it, in order.
    void finish(int64_t) const {
        if (!totals) return;
        int64_t distances = call.bias.distances;
        bool summed = call.bias.stride[0] == 0;
        for (int64_t b = 0; b < (summed ? 1 : call.batch); b++)
            for (int64_t h = 0; h < call.heads; h++)
                for (int64_t x = 0; x < distances; x++) {
                    double sum = 0;
                    for (int64_t other = b; other < (summed ? call.batch : b + 1); other++)
                        sum += totals[(other * call.heads + h) * distances + x];
                    gradient_row(b, h, 0)[x] = (float)sum;
                }
    }

   private:
    // The gradient lies as the table does.
    float *gradient_row(int64_t b, int64_t h, int64_t t) const {
        const int64_t *stride = call.bias.stride;
        return grad->grad_bias_table + b * stride[0] + h * stride[1] + t * stride[2];
    }
};

}  // namespace VF_TARGET
