// The score as a policy of the tile pass: how the product q . k of a pair becomes its score, and back.
//
// mixture_forward.cpp and mixture_backward.cpp know how to walk over tiles, mask, exponentiate and sum. A score is what
// they take as a template parameter: a class with the members of DotScore below, which does nothing but scale. A new
// score derives from it, replaces what it does differently, and gets one more line in scores.hpp.
//
// In both passes:   lay_out, prepare, then for each block of queries open, then rate for each of its panels.
// In the backward, besides:   clear; open_head for each task and head; differentiate after each rate; end_tile,
// end_block; in_turn, while no other task adds to the same queries; close_head; finish at the very end.
#pragma once

#include "attention/branches.hpp"
#include "simd/scratch.hpp"

namespace VF_TARGET {

// score = scale_h q . k. Queries are packed times scale log2(e), so that products are scores, as powers of 2.
struct DotScore {
    // Scores are the packed products as they are: the passes leave out whatever serves other scores.
    static constexpr bool PLAIN = true;
    // Queries that are rated together: a register tile, of which `count` are there, or a group, of which a tile is a whole
    // number; then `count` is ROWS or 1.
    static constexpr int ROWS = MR;
    // What a thread keeps for a block of queries, and in the backward for a task.
    struct State {};

    const vf_mixture &call;
    const vf_mixture_grad *grad;  // null in the forward

    DotScore(const vf_mixture &mixture, const vf_mixture_grad *gradient) : call(mixture), grad(gradient) {}

    // What all threads share, taken from the call's memory, and filled in.
    void lay_out(Space &, int64_t /* key_blocks */) {}
    void prepare() {}
    template <typename State>
    void lay_out_state(State &, Space &) const {}

    // Floats that each key of each query head brings along, and those of `rows` keys from `key` on, in panels: "hidden".
    int64_t key_width() const { return 0; }
    void pack_keys(float *, int64_t, int64_t, int64_t, int64_t, const uint8_t *) const {}

    // Queries are packed times q_factor. dQ and dK, sums of dS k and dS times packed q, are multiplied by the others.
    float q_factor(int64_t h) const { return call.scale[h] * LOG2E; }
    float dq_factor(int64_t h) const { return call.scale[h]; }
    float dk_factor() const { return LN2; }

    // A block of queries from `first` on, of head h in batch row b.
    template <typename State>
    void open(State &, const Rows &, int64_t /* b */, int64_t /* h */, int64_t /* first */) const {}

    // Products of `count` queries from `row` on, on a panel of keys from `key` on, become scores. -inf: the
    // pair is not read. SAVE: differentiate follows.
    template <bool SAVE, typename State>
    void rate(State &, const Rows &, int64_t, int, int, float *, const float *, int32_t) const {}

    // From the gradients of these scores to those of the products; the score's own inputs get their share.
    // `panel` is the panel's number within the task's keys.
    template <typename State>
    void differentiate(State &, const Rows &, int64_t, int, int, float *, const float *, int32_t, int) const {}

    // Own gradients of the `count` queries from `first` on: 0, before anything is added.
    void clear(int64_t /* b */, int64_t /* h */, int64_t /* first */, int /* count */) const {}
    template <typename State>
    void open_head(State &) const {}
    template <typename State>
    void end_tile(State &) const {}
    template <typename State>
    void end_block(State &) const {}
    // end[tile] is 0 for tiles that read none of the task's keys.
    template <typename State>
    void in_turn(State &, const Rows &, int64_t, int64_t, int64_t, const int *) const {}
    template <typename State>
    void close_head(State &, int64_t /* b */, int64_t /* h */, int64_t /* kb */, int64_t /* key_blocks */,
                    int64_t /* count of keys */) const {}
    void finish(int64_t /* key_blocks */) const {}
};

}  // namespace VF_TARGET
