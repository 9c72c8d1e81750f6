// A learned gate on every pair of query and key:
//
//     alpha = scale_h q . k     l = output_h . GELU(a_i + b_j) + bias_h     s = sigmoid(l)
//
// and the score alpha s, or alpha + log s, or that without the pairs of s below a threshold.
#pragma once

#include <math.h>

#include "attention/pair_gate_network.hpp"
#include "attention/score.hpp"

namespace VF_TARGET {

struct Gate {
    Vec open, closed;  // sigmoid(logit) and 1 - sigmoid(logit), neither rounded against 1
    Vec small;         // 2^-|logit log2(e)|
};

VF_INLINE Gate sigmoid(Vec logit) {
    Ints positive = logit > 0.0f;
    // The power of a number that is not positive: at most 1, so nothing overflows whatever the logit, and 1 - s is
    // found without subtracting from 1.
    Vec power = logit * LOG2E, small = exp2(positive ? -power : power);
    Vec large_side = 1.0f / (1.0f + small), small_side = small * large_side;
    return {positive ? large_side : small_side, positive ? small_side : large_side, small};
}

// log2(1 + z) for 0 <= z <= 1, to 1.3e-7: a minimax polynomial, cheaper than any that takes exponents apart.
VF_INLINE Vec log2_one_plus(Vec z) {
    Vec p = splat(-0.00379414787f);
    p = p * z + 0.0244330429f;
    p = p * z - 0.0737751499f;
    p = p * z + 0.143822491f;
    p = p * z - 0.214902431f;
    p = p * z + 0.28157258f;
    p = p * z - 0.359497309f;
    p = p * z + 0.480789036f;
    p = p * z - 0.72134316f;
    p = p * z + 1.44269502f;
    return p * z;
}

// FORM is one of vf_score. The score as a power of 2, from alpha log2(e). A pair below the threshold (logit < cut) gets
// -inf: it is not read.
template <int FORM>
VF_INLINE Vec rate_pair(Vec alpha, Vec logit, const Gate &gate, float cut) {
    if constexpr (FORM == VF_SCORE_PAIR_PRODUCT) return alpha * gate.open;
    // log s(l) = min(l, 0) - log(1 + exp(-|l|)): exact at both ends, where the logarithm of a rounded s would be -inf
    // or 0.
    Vec score = alpha + min(logit, Vec{}) * LOG2E - log2_one_plus(gate.small);
    if constexpr (FORM == VF_SCORE_PAIR_LOG) return score;
    return logit < cut ? splat(-INFINITY) : score;
}

// The gradient of the score becomes that of alpha and of the logit.
template <int FORM>
VF_INLINE void differentiate_pair(Vec dscore, Vec alpha, const Gate &gate, Vec &dalpha, Vec &dlogit) {
    if constexpr (FORM == VF_SCORE_PAIR_PRODUCT) {
        dalpha = dscore * gate.open;
        // ds / dl = s (1 - s), and alpha comes times log2(e).
        dlogit = dalpha * (alpha * LN2) * gate.closed;
    } else {
        dalpha = dscore;
        // d log s / dl = 1 - s. A pair below the threshold has p = 0, so dscore is 0 already.
        dlogit = dscore * gate.closed;
    }
}

template <int FORM>
struct PairGate : DotScore {
    static constexpr bool PLAIN = false;
    // Groups as the network takes them: what it saves of a group stays in L1.
    static constexpr int ROWS = GROUP;
    struct State {
        float *a;       // [BLOCK, P] rows
        float *logits;  // [GROUP, NR]
        // In the backward, of one group of queries on one panel:
        float *product, *open, *closed;  // [GROUP, NR]: q . k, s and 1 - s
        float *saved;                    // of the network
        // and sums.
        Vec *da;           // [BLOCK, P], by lanes
        float *db;         // [PANELS][P][NR], of the task's keys and one head
        float *db_block;   // the same of one block of queries: its sum meets db at the end
        Vec *dw;           // [P + 2]: bias, output, scale, of one tile, by lanes
        double *dw_total;  // [P + 2]: long sums, whose terms mostly cancel
    };

    const int64_t units;
    float cut;           // sigmoid(cut) = threshold
    float *half_output;  // [H, P]: w / 2, as the network takes it
    float *parts;        // [B, key_blocks, H, P + 2]: each task's share of dbias, dw and dscale

    PairGate(const vf_mixture &mixture, const vf_mixture_grad *gradient)
        : DotScore(mixture, gradient), units(mixture.pair.units), cut(-INFINITY) {
        // Pairs are compared by their logits: a sigmoid near 1 is too coarse to tell them apart.
        if (FORM == VF_SCORE_PAIR_THRESHOLD) cut = (float)log(call.pair.threshold / (1.0 - call.pair.threshold));
    }

    void lay_out(Space &space, int64_t key_blocks) {
        half_output = space.take<float>(call.heads * units);
        parts = grad ? space.take<float>(call.batch * key_blocks * call.heads * (units + 2)) : nullptr;
    }
    void prepare() {
        for (int64_t i = 0; i < call.heads * units; i++) half_output[i] = 0.5f * call.pair.output[i];
    }
    void lay_out_state(State &state, Space &space) const {
        state.a = space.take<float>(BLOCK * units);
        state.logits = space.take<float>(GROUP * NR);
        if (!grad) return;
        state.product = space.take<float>(GROUP * NR);
        state.open = space.take<float>(GROUP * NR), state.closed = space.take<float>(GROUP * NR);
        state.saved = space.take<float>(saved_floats(units));
        state.da = space.take<Vec>(BLOCK * units);
        state.db = space.take<float>(KEYS * units), state.db_block = space.take<float>(KEYS * units);
        state.dw = space.take<Vec>(units + 2);
        state.dw_total = space.take<double>(units + 2);
    }

    int64_t key_width() const { return units; }
    void pack_keys(float *to, int64_t b, int64_t h, int64_t key, int64_t rows, const uint8_t *keep) const {
        pack_transposed(to, KEYS, (const float *)row_at<float>(call.pair.b, b, h, key), call.pair.b.stride[2], rows, units,
                        keep);
    }

    // The gate multiplies alpha, or needs alpha itself for its gradient: products stay plain, scale comes with the
    // gate.
    float q_factor(int64_t) const { return 1.0f; }
    float dq_factor(int64_t) const { return 1.0f; }
    float dk_factor() const { return 1.0f; }

    // Rows of a as they lie; a query that sees nothing may hold anything and becomes 0, as do rows past the end.
    void open(State &state, const Rows &rows, int64_t b, int64_t h, int64_t first) const {
        for (int row = 0; row < BLOCK; row++) {
            bool zero = row >= rows.count || !rows.keep[row];
            const float *from = zero ? nullptr : row_at<float>(call.pair.a, b, h, first + row);
            for (int64_t p = 0; p < units; p++) state.a[row * units + p] = zero ? 0.0f : from[p];
        }
        if (!grad) return;
        memset(state.da, 0, (size_t)(BLOCK * units) * sizeof(Vec));
        memset(state.db_block, 0, (size_t)(KEYS * units) * sizeof(float));
    }

    template <bool SAVE>
    void rate(State &state, const Rows &, int64_t h, int row, int count, float *scores, const float *hidden,
              int32_t) const {
        // Two sizes, both known when compiled: the sums of a group live in registers.
        (count == 1 ? gate_logits<1, SAVE> : gate_logits<GROUP, SAVE>)(
            state.logits, state.a + row * units, hidden, half_output + h * units,
            call.pair.bias ? call.pair.bias[h] : 0.0f, units, state.saved);
        gate_panel<SAVE>(state, count, scores, call.scale[h] * LOG2E);
    }

    void differentiate(State &state, const Rows &, int64_t h, int row, int count, float *dscores, const float *hidden,
                       int32_t, int panel) const {
        differentiate_panel(state, count, dscores, call.scale[h]);
        (count == 1 ? gate_gradient<1> : gate_gradient<GROUP>)(
            state.logits, state.a + row * units, hidden, units, state.saved, state.da + row * units,
            state.db_block + panel * units * NR, state.dw + 1);
    }

    void clear(int64_t b, int64_t h, int64_t first, int count) const {
        for (int row = 0; row < count; row++)
            memset(row_at<float>(grad->grad_pair_a, b, h, first + row), 0, (size_t)units * sizeof(float));
    }
    void open_head(State &state) const {
        memset(state.db, 0, (size_t)(KEYS * units) * sizeof(float));
        memset(state.dw, 0, (size_t)(units + 2) * sizeof(Vec));
        memset(state.dw_total, 0, (size_t)(units + 2) * sizeof(double));
    }
    void end_tile(State &state) const {
        // A tile's sums are short enough for float32; the sum of all tiles is not.
        for (int64_t p = 0; p < units + 2; p++) state.dw_total[p] += sum_lanes(state.dw[p]), state.dw[p] = Vec{};
    }
    void end_block(State &state) const {
        for (int64_t i = 0; i < KEYS * units; i += LANES)
            store(state.db + i, load(state.db + i) + load(state.db_block + i));
    }
    void in_turn(State &state, const Rows &rows, int64_t b, int64_t h, int64_t first, const int *end) const {
        const float *half = half_output + h * units;
        for (int row = 0; row < rows.count; row++) {
            if (!end[row / MR]) continue;
            float *to = row_at<float>(grad->grad_pair_a, b, h, first + row);
            // The factor w / 2 is the same for all keys, so it waits until here.
            for (int64_t p = 0; p < units; p++) to[p] += half[p] * sum_lanes(state.da[row * units + p]);
        }
    }
    // db of the task's keys and one head, and the head's share of dw, dbias and dscale.
    void close_head(State &state, int64_t b, int64_t h, int64_t kb, int64_t key_blocks, int64_t count) const {
        const float *half = half_output + h * units;
        for (int64_t j = 0; j < count; j++) {
            float *to = row_at<float>(grad->grad_pair_b, b, h, kb * KEYS + j);
            const float *from = state.db + j / NR * units * NR + j % NR;
            for (int64_t p = 0; p < units; p++) to[p] = half[p] * from[p * NR];
        }
        float *part = parts + ((b * key_blocks + kb) * call.heads + h) * (units + 2);
        for (int64_t p = 0; p < units + 2; p++) part[p] = (float)state.dw_total[p];
    }
    // dw, dbias and dscale: the tasks' shares in a fixed order.
    void finish(int64_t key_blocks) const {
        for (int64_t h = 0; h < call.heads; h++)
            for (int64_t p = 0; p < units + 2; p++) {
                double sum = 0;
                for (int64_t i = 0; i < call.batch * key_blocks; i++)
                    sum += parts[(i * call.heads + h) * (units + 2) + p];
                if (p == 0)
                    grad->grad_pair_bias[h] = (float)sum;
                else if (p == units + 1)
                    grad->grad_scale[h] = (float)sum;
                else
                    grad->grad_pair_output[h * units + p - 1] = (float)(0.5 * sum);
            }
    }

   private:
    template <bool SAVE>
    __attribute__((noinline)) void gate_panel(State &state, int count, float *scores, float scale) const {
        for (int at = 0; at < count * NR; at += LANES) {
            Vec product = load(scores + at), logit = load(state.logits + at);
            Gate gate = sigmoid(logit);
            store(scores + at, rate_pair<FORM>(product * scale, logit, gate, cut));
            if (!SAVE) continue;
            store(state.product + at, product);
            if (FORM == VF_SCORE_PAIR_PRODUCT) store(state.open + at, gate.open);
            store(state.closed + at, gate.closed);
        }
    }

    // dscore -> scale dalpha, and logits -> dlogits.
    __attribute__((noinline)) void differentiate_panel(State &state, int count, float *dscores, float scale) const {
        Vec bias = {}, product_sum = {};
        for (int at = 0; at < count * NR; at += LANES) {
            Vec product = load(state.product + at), dalpha, dlogit;
            // Only the product's gradient asks how far the gate is open.
            Gate gate = {FORM == VF_SCORE_PAIR_PRODUCT ? load(state.open + at) : Vec{}, load(state.closed + at), Vec{}};
            differentiate_pair<FORM>(load(dscores + at), product * (scale * LOG2E), gate, dalpha, dlogit);
            store(dscores + at, dalpha * scale);
            store(state.logits + at, dlogit);
            bias += dlogit;
            product_sum += dalpha * product;  // d alpha / d scale = q . k
        }
        state.dw[0] += bias;
        state.dw[units + 1] += product_sum;
    }
};

}  // namespace VF_TARGET
