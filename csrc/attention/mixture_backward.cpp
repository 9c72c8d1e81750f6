// The one backward pass over tiles: five matrix products for each pair of blocks, nothing recomputed but the scores. The
// score is a policy (score.hpp).
//
// A task owns a block of keys: it sums dK and dV over all queries of all heads that share the keys, and adds to dQ in
// turn with the tasks of other key blocks (turns.hpp).
#include <omp.h>

#include "attention/mixture_gradient.hpp"
#include "attention/scores.hpp"
#include "kernels.hpp"
#include "simd/matmul.hpp"
#include "simd/scratch.hpp"
#include "simd/turns.hpp"

namespace VF_TARGET {

namespace {

// The keys any branch gives a block of queries: [from, last] and [.., prefix_end). Lets tasks skip blocks unread.
struct Extent {
    int32_t from, last, prefix_end;
};

template <typename Score>
struct Work {
    float *k, *k_transposed, *v_transposed, *dk, *dv;  // of the task's keys
    float *hidden;                                     // what the score has beside them, of one head
    float *q, *dout, *dq;                              // of a block of queries
    float *scores, *dp;                                // [BLOCK, KEYS]; become a and the gradient of the products
    typename Score::State state;
    Rows rows;
    Gradient gradient;
};

template <typename Score>
struct Plan {
    const vf_mixture_grad &call;
    const Score &score;
    int64_t group, padded, query_blocks, key_blocks;
    const float *offset;     // [B, H, T, M]
    const Extent *extent;    // [B, H, query_blocks]
    const uint8_t *visible;  // [B, S]
};

}  // namespace

// dw_m = dO . O_m, the delta of branch m, and offset_m = w_m dw_m. The last branch's offset follows from
// sum_m w_m dO . O_m = dO . O, so its output need not be saved; its dw is summed up with the tiles, because dividing by
// w_m would lose it where w_m is 0.
static void prepare(const vf_mixture_grad &call, Rows &rows, int64_t b, int64_t h, int64_t first, float *offset,
                    Extent &extent) {
    const vf_mixture &f = call.forward;
    int count = least(BLOCK, f.queries - first), branches = f.branch_count;
    read_rows(rows, f, b, h, first, count);
    // For the whole block of queries, so that tasks of far key blocks need not read its geometry again.
    extent = {INT32_MAX, rows.most_position, INT32_MIN};
    for (int m = 0; m < branches; m++) {
        extent.from = least(extent.from, rows.branch[m].least_from);
        extent.prefix_end = most(extent.prefix_end, rows.branch[m].most_prefix_end);
    }
    for (int row = 0; row < count; row++) {
        // The delta of the last entry is that of the whole output, dO . O (delta.cpp); taking away the shares of the
        // others leaves the last branch's.
        int64_t query = (b * f.heads + h) * f.queries + first + row;
        // Cleared here, once and before all tasks: many of them add to each row of dQ.
        if (!call.accumulate)
            memset(row_at<float>(call.grad_q, b, h, first + row), 0, (size_t)f.head_width * sizeof(float));
        const float *delta = call.delta + query * branches;
        float rest = delta[branches - 1];
        for (int m = 0; m < branches; m++) {
            if (call.grad_width[m]) call.grad_width[m][query] = 0;
            float dweight = m + 1 < branches ? delta[m] : 0.0f;
            if (call.grad_weights) call.grad_weights[query * branches + m] = dweight;
            float share = f.weights ? f.weights[query * branches + m] * dweight : dweight;
            // d logsumexp_m / d score = p_m: its gradient counts like dP on every key of the branch.
            float from_lse = call.grad_logsumexp && rows.keep[row] ? call.grad_logsumexp[query * branches + m] : 0.0f;
            offset[query * branches + m] = (m + 1 < branches ? share : rest) - from_lse;
            rest -= share;
        }
    }
}

static void load_gradient(Gradient &g, const vf_mixture_grad &call, const float *offset, int64_t query, int count) {
    const vf_mixture &f = call.forward;
    g.ready = 0;
    g.want_weights = call.grad_weights != nullptr;
    g.want_width = false;
    for (int m = 0; m < f.branch_count; m++) {
        g.want_width |= call.grad_width[m] != nullptr;
        for (int row = 0; row < count; row++) {
            int64_t i = (query + row) * f.branch_count + m;
            // The forward's own maximum and factor: probabilities come out with the same rounding and sum to 1.
            g.top[m][row] = f.norm[2 * i], g.factor[m][row] = f.norm[2 * i + 1];
            g.weight[m][row] = f.weights ? f.weights[i] : 1.0f;
            g.offset[m][row] = offset[i];
            g.dwidth[m][row] = g.dweight[row] = 0;
        }
    }
}

// Which branches read a tile of queries on a panel of keys, and whether all of them with weight 1.
struct Active {
    uint8_t set;
    bool full;
};

// Whether any branch reads any tile. On return first[tile] .. end[tile] are the panels a tile reads, top[p] ..
// bottom[p] the tiles that read a panel.
static bool find_active(const Rows &rows, int branches, int32_t key, Active (*active)[PANELS], int *first, int *end,
                        int *top, int *bottom) {
    bool any = false;
    // Both views of the same map are needed: dQ sums over the panels of a tile, dK and dV over the tiles of a panel.
    for (int p = 0; p < PANELS; p++) top[p] = TILES, bottom[p] = 0;
    for (int tile = 0; tile < rows.tile_count; tile++) {
        first[tile] = PANELS, end[tile] = 0;
        for (int p = 0; p < PANELS; p++) {
            Active &x = active[tile][p] = {0, true};
            for (int m = 0; m < branches; m++) {
                Cover c = cover(rows, rows.branch[m], tile, key + p * NR, key + (p + 1) * NR);
                if (c == NONE) continue;
                x.set |= (uint8_t)(1 << m);
                // One branch that needs weights key by key is enough: the panel has one way for all of them.
                x.full &= c == FULL;
            }
            if (!x.set) continue;
            any = true;
            first[tile] = least(first[tile], p), end[tile] = p + 1;
            top[p] = least(top[p], tile), bottom[p] = tile + 1;
        }
    }
    return any;
}

static void clear_rows(float *rows, int count) {
    for (int i = 0; i < count * NV; i++) store(rows + i * LANES, Vec{});
}

// `count` queries from `row` on, on panel p: products and dP become a and the gradient of the products.
template <typename Score>
VF_INLINE void differentiate(Work<Score> &work, const Plan<Score> &plan, int64_t h, int row, int count, int p, Active x,
                             int32_t key) {
    const Score &score = plan.score;
    const Rows &rows = work.rows;
    const int branches = plan.call.forward.branch_count;
    // In place: what a block of queries touches stays at half of L2 (tile.hpp).
    float *s = work.scores + (p * BLOCK + row) * NR, *d = work.dp + (p * BLOCK + row) * NR;
    const float *hidden = work.hidden + p * score.key_width() * NR;
    if (!Score::PLAIN) score.template rate<true>(work.state, rows, h, row, count, s, hidden, key + p * NR);
    if (x.full)
        differentiate_full(work.gradient, rows, branches, x.set, row, count, s, d);
    else
        differentiate_mixed(work.gradient, rows, branches, x.set, row, count, key + p * NR, s, d);
    if (!Score::PLAIN) score.differentiate(work.state, rows, h, row, count, d, hidden, key + p * NR, p);
}

// All tiles of a block of queries on the panels they read. What is not read but lies in a stretch of panels or tiles that
// the products below run over counts 0: `clears` says which.
template <typename Score, typename Clears>
static void differentiate_block(Work<Score> &work, const Plan<Score> &plan, int64_t h,
                                const Active (*active)[PANELS], int32_t key, Clears clears) {
    const int count = work.rows.count;
    auto clear = [&](int row, int rows, int p) {
        clear_rows(work.scores + (p * BLOCK + row) * NR, rows), clear_rows(work.dp + (p * BLOCK + row) * NR, rows);
    };
    if (Score::ROWS == MR) {
        // Panel by panel, as they lie in memory.
        for (int p = 0; p < PANELS; p++)
            for (int tile = 0; tile < work.rows.tile_count; tile++) {
                int row = tile * MR, filled = least(MR, count - row);
                Active x = active[tile][p];
                if (x.set) {
                    differentiate(work, plan, h, row, filled, p, x, key);
                    // Sums over queries run over whole tiles: rows past the last query hold old scores, and must count
                    // 0.
                    if (filled < MR) clear(row + filled, MR - filled, p);
                } else if (clears(tile, p)) {
                    clear(row, MR, p);
                }
            }
        return;
    }
    // Groups outside, panels inside: what the score saves of a group and panel is still in L1 when it is needed again,
    // and what it sums up for a tile is added up once.
    for (int tile = 0; tile < work.rows.tile_count; tile++) {
        const int last = (tile + 1) * MR, end = least(last, count);
        for (int row = tile * MR, rows; row < last; row += rows) {
            rows = end - row >= Score::ROWS ? Score::ROWS : 1;
            for (int p = 0; p < PANELS; p++) {
                Active x = active[tile][p];
                if (x.set && row < end)
                    differentiate(work, plan, h, row, rows, p, x, key);
                else if (x.set || clears(tile, p))
                    clear(row, rows, p);
            }
        }
        plan.score.end_tile(work.state);
    }
}

template <typename T, typename Score>
static void add_queries(Work<Score> &work, const Plan<Score> &plan, int64_t b, int64_t h, int64_t qb, int32_t key,
                        const Turn &turn, int64_t step) {
    const vf_mixture_grad &call = plan.call;
    const vf_mixture &f = call.forward;
    const Score &score = plan.score;
    int64_t width = f.head_width, query = qb * BLOCK;
    int count = least(BLOCK, f.queries - query), branches = f.branch_count;
    Rows &rows = work.rows;
    read_rows(rows, f, b, h, query, count);
    Active active[TILES][PANELS];
    int first[TILES], end[TILES], top[PANELS], bottom[PANELS];
    // The extent bounds the block as a whole: that a prefix belongs to a document which begins after these keys shows
    // only here.
    if (!find_active(rows, branches, key, active, first, end, top, bottom)) return;

    pack(work.q, BLOCK, (const T *)row_at<T>(f.q, b, h, query), f.q.stride[2], count, width, score.q_factor(h),
         rows.keep);
    pack(work.dout, BLOCK, (const T *)row_at<T>(call.grad_out, b, h, query), call.grad_out.stride[2], count, width, 1.0f,
         rows.keep);
    int64_t row_index = (b * f.heads + h) * f.queries + query;
    // dO of a query that sees nothing may hold anything: `keep` packed it as 0.
    load_gradient(work.gradient, call, plan.offset, row_index, count);
    score.open(work.state, rows, b, h, query);

    // Q K^T and dO V^T, a panel of keys or values at a time: it stays in L1 while the tiles of queries go past.
    // In two loops: a panel of K^T takes up to 16 KB of L1, and one of V^T beside it would leave no room for the tiles.
    int tiles = rows.tile_count;
    for (int p = 0; p < PANELS; p++)
        for (int tile = top[p]; tile < bottom[p]; tile++)
            if (active[tile][p].set)
                multiply_tile(work.scores + (p * BLOCK + tile * MR) * NR, work.q + tile * MR * NR, BLOCK * NR,
                              work.k_transposed + p * width * NR, width, false);
    for (int p = 0; p < PANELS; p++)
        for (int tile = top[p]; tile < bottom[p]; tile++)
            if (active[tile][p].set)
                multiply_tile(work.dp + (p * BLOCK + tile * MR) * NR, work.dout + tile * MR * NR, BLOCK * NR,
                              work.v_transposed + p * width * NR, width, false);
    differentiate_block(work, plan, h, active, key, [&](int tile, int p) {
        return (tile >= top[p] && tile < bottom[p]) || (p >= first[tile] && p < end[tile]);
    });
    score.end_block(work.state);

    // dV += A^T dO, dK += dS^T Q, dQ = dS K. A sum over queries leaves out the tiles before the first and after the last
    // that read the panel; one over keys, the panels.
    for (int64_t d = 0; d < width; d += NR)
        for (int p = 0; p < PANELS; p++) {
            // A causal block of keys is read by late queries only, a window's by few: half of these sums would be over
            // zeros.
            int64_t skip = top[p] * MR, depth = bottom[p] * MR - skip;
            if (depth <= 0) continue;
            for (int j = 0; j < NR; j += TR)
                multiply_tile_transposed(work.dv + d * KEYS + (p * NR + j) * NR,
                                         work.scores + (p * BLOCK + skip) * NR + j,
                                         work.dout + d * BLOCK + skip * NR, depth, true);
        }
    for (int64_t d = 0; d < width; d += NR)
        for (int p = 0; p < PANELS; p++) {
            int64_t skip = top[p] * MR, depth = bottom[p] * MR - skip;
            if (depth <= 0) continue;
            for (int j = 0; j < NR; j += TR)
                multiply_tile_transposed(work.dk + d * KEYS + (p * NR + j) * NR, work.dp + (p * BLOCK + skip) * NR + j,
                                         work.q + d * BLOCK + skip * NR, depth, true);
        }
    for (int64_t d = 0; d < width; d += NR)
        for (int tile = 0; tile < tiles; tile++)
            if (end[tile])
                multiply_tile(work.dq + d * BLOCK + tile * MR * NR, work.dp + (first[tile] * BLOCK + tile * MR) * NR,
                              BLOCK * NR, work.k + d * KEYS + first[tile] * NR * NR, (end[tile] - first[tile]) * NR,
                              false);

    // Other tasks add to the same rows of dQ. All that is long is done: turns are short, and rarely waited for.
    turn.wait(step);
    const float factor = score.dq_factor(h);
    for (int row = 0; row < count; row++) {
        // Tiles that read nothing here have no dQ in `work.dq`: it was not computed.
        if (!end[row / MR]) continue;
        float *to = row_at<float>(call.grad_q, b, h, query + row);
        int64_t d = 0;
        for (; d + LANES <= width; d += LANES)
            store(to + d, load(to + d) + factor * load(work.dq + d / NR * NR * BLOCK + row * NR + d % NR));
        for (; d < width; d++) to[d] += factor * work.dq[d / NR * NR * BLOCK + row * NR + d % NR];
        if (call.grad_weights) call.grad_weights[(row_index + row + 1) * branches - 1] += work.gradient.dweight[row];
        for (int m = 0; m < branches; m++)
            if (call.grad_width[m]) call.grad_width[m][row_index + row] += work.gradient.dwidth[m][row];
    }
    score.in_turn(work.state, rows, b, h, query, end);
    turn.pass(step);
}

// dK and dV of one block of keys of one kv head, and what the score has beside them.
template <typename T, typename Score>
static void own_keys(Work<Score> &work, const Plan<Score> &plan, int64_t b, int64_t g, int64_t kb, const Turn &turn) {
    const vf_mixture_grad &call = plan.call;
    const vf_mixture &f = call.forward;
    int64_t width = f.head_width, padded = plan.padded, key = kb * KEYS, count = least(KEYS, f.keys - key);
    const uint8_t *keep = plan.visible + b * f.keys + key;
    const T *k = row_at<T>(f.k, b, g, key), *v = row_at<T>(f.v, b, g, key);
    // K in both forms: dQ = dS K sums over keys, S = Q K^T over the width, and an operand is read as it lies.
    pack(work.k, KEYS, k, f.k.stride[2], count, width, 1.0f, keep);
    pack_transposed(work.k_transposed, KEYS, k, f.k.stride[2], count, width, keep);
    pack_transposed(work.v_transposed, KEYS, v, f.v.stride[2], count, width, keep);
    // Over all heads that share the keys: dK and dV leave this core once, and need no turns.
    memset(work.dk, 0, (size_t)(KEYS * padded) * sizeof(float));
    memset(work.dv, 0, (size_t)(KEYS * padded) * sizeof(float));
    for (int64_t i = 0; i < plan.group; i++) {
        int64_t h = g * plan.group + i;
        plan.score.pack_keys(work.hidden, b, h, key, count, keep);
        plan.score.open_head(work.state);
        for (int64_t qb = 0; qb < plan.query_blocks; qb++) {
            // Blocks of queries whose windows do not reach these keys cost one look.
            const Extent &x = plan.extent[(b * f.heads + h) * plan.query_blocks + qb];
            if (key > x.last || (key + KEYS <= x.from && key >= x.prefix_end)) continue;
            add_queries<T>(work, plan, b, h, qb, (int32_t)key, turn, i * plan.query_blocks + qb);
        }
        plan.score.close_head(work.state, b, h, kb, plan.key_blocks, count);
    }
    // Packed q carries scale log2(e); the factor takes log2(e) out again and leaves the scale, which belongs to dK.
    unpack(row_at<T>(call.grad_k, b, g, key), call.grad_k.stride[2], work.dk, KEYS, count, width, nullptr,
           plan.score.dk_factor(), call.accumulate != 0);
    unpack(row_at<T>(call.grad_v, b, g, key), call.grad_v.stride[2], work.dv, KEYS, count, width, nullptr, 1.0f,
           call.accumulate != 0);
    // A task may skip steps, its last one included; this one, past all others, lets whoever follows go on.
    int64_t last = plan.group * plan.query_blocks;
    turn.wait(last);
    turn.pass(last);
}

template <typename T, typename Score>
static int32_t run(const vf_mixture_grad &call) {
    const vf_mixture &f = call.forward;
    Score score(f, &call);
    const int64_t width = f.head_width, padded = round_up(width, NR), pairs = f.batch * f.kv_heads;
    const int64_t query_blocks = (f.queries + BLOCK - 1) / BLOCK, key_blocks = (f.keys + KEYS - 1) / KEYS;
    const int64_t heads = f.batch * f.heads, tasks = pairs * key_blocks;

    auto lay_out_work = [&](Work<Score> &work, Space &space) {
        // Right operands and sums are padded to whole panels of their columns; transposed ones have the width as their
        // depth.
        work.k = space.take<float>(KEYS * padded);
        work.dk = space.take<float>(KEYS * padded), work.dv = space.take<float>(KEYS * padded);
        work.k_transposed = space.take<float>(KEYS * width), work.v_transposed = space.take<float>(KEYS * width);
        work.hidden = space.take<float>(KEYS * score.key_width());
        work.q = space.take<float>(BLOCK * padded), work.dout = space.take<float>(BLOCK * padded);
        work.dq = space.take<float>(BLOCK * padded);
        work.scores = space.take<float>(BLOCK * KEYS), work.dp = space.take<float>(BLOCK * KEYS);
        score.lay_out_state(work.state, space);
    };
    size_t work_bytes = measure([&](Space &space) {
        Work<Score> work;
        lay_out_work(work, space);
    });
    float *offset;
    Extent *extent;
    uint8_t *visible;
    int32_t *change;
    int64_t *passed;
    char *works;
    Scratch scratch;
    if (!scratch.lay_out([&](Space &space) {
            works = space.take<char>((int64_t)work_bytes * f.threads);
            score.lay_out(space, key_blocks);
            offset = space.take<float>(heads * f.queries * f.branch_count);
            extent = space.take<Extent>(heads * query_blocks);
            visible = space.take<uint8_t>(f.batch * f.keys);
            change = space.take<int32_t>(f.keys + 1);
            passed = space.take<int64_t>(tasks);
        }))
        return VF_NO_MEMORY;
    score.prepare();
    memset(passed, 0, (size_t)tasks * sizeof(int64_t));
    for (int64_t b = 0; b < f.batch; b++)
        mark_visible(visible + b * f.keys, change, f.position + b * f.queries, f.start + b * f.queries, f.queries,
                     f.keys);
    const Plan<Score> plan = {call,   score,  f.kv_heads ? f.heads / f.kv_heads : 0, padded, query_blocks, key_blocks,
                              offset, extent, visible};
    int64_t next = 0;

#pragma omp parallel num_threads(f.threads)
    {
        Work<Score> work;
        Space space = {(uintptr_t)works + work_bytes * (size_t)omp_get_thread_num()};
        lay_out_work(work, space);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < heads * query_blocks; task++) {
            int64_t b = task / query_blocks / f.heads, h = task / query_blocks % f.heads;
            int64_t first = task % query_blocks * BLOCK;
            // The loop ends with a barrier: no task below may add to dQ, or read an offset, before all of them are set.
            prepare(call, work.rows, b, h, first, offset, extent[task]);
            score.clear(b, h, first, work.rows.count);
        }
        // Tasks are handed out in order, as turns require: key block 0, read by the most queries, of every kv head
        // first. Neighbours in a line start far apart, so they rarely wait.
        for (;;) {
            // Not an omp loop: its order of handing out is not promised, and a turn that waits for a task nobody has
            // begun waits for ever.
            int64_t task = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
            if (task >= tasks) break;
            int64_t kb = task / pairs, pair = task % pairs;
            // A line is the key blocks of one kv head in ascending order, `pairs` tasks apart; the steps of a task are
            // the query blocks of all its heads.
            Turn turn = {kb ? passed + task - pairs : nullptr, passed + task};
            own_keys<T>(work, plan, pair / f.kv_heads, pair % f.kv_heads, kb, turn);
        }
    }
    score.finish(key_blocks);
    return VF_OK;
}

int32_t mixture_backward(const vf_mixture_grad &call) {
    return with_score(call.forward.score, [&](auto tag) {
        typedef typename decltype(tag)::Policy Score;
        return call.forward.dtype == VF_BFLOAT16 ? run<uint16_t, Score>(call) : run<float, Score>(call);
    });
}

}  // namespace VF_TARGET
