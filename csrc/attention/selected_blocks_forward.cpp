// Attention over the blocks of keys that each query selected and its own block.
//
// A block of keys is multiplied with all its readers, 96 at a time; each of these products is a softmax of its own, and
// is joined to what the reader has so far by their two maxima.
#include <math.h>
#include <omp.h>

#include "attention/selected_blocks.hpp"
#include "kernels.hpp"

namespace VF_TARGET {

namespace {

struct Work {
    float *k_transposed, *v;  // of the block's keys
    float *q, *part, *scores;
    Readers readers;
    float top[BLOCK], sum[BLOCK];
};

// Running softmax of every query: o holds sum 2^(score - top) v until its own block, the last, completes it.
struct State {
    float *top, *sum;  // [B, H, T]
    vf_tensor o;       // float32 [B, H, T, D]: the output itself if it is float32
    int64_t *passed, next;
};

}  // namespace

// Scores of a tile become 2^(score - top), 0 for keys a query may not read.
static void exponentiate(Work &w, int64_t padded_keys) {
    for (int row = 0; row < w.readers.count; row++) {
        float *scores = w.scores + row * NR;
        const int32_t valid = w.readers.valid[row];
        const Vec nothing = splat(-INFINITY);
        Vec best = nothing;
        for (int64_t key = 0; key < padded_keys; key += LANES) {
            float *at = scores + key / NR * BLOCK * NR + key % NR;
            Vec x = load(at);
            // Only the vectors that the end of the readable keys runs through, or that lie after it, pay for a mask.
            if (key + LANES > valid) store(at, x = (lanes() + (int32_t)key) < valid ? x : nothing);
            best = max(best, x);
        }
        // A reader sees the block's first key at least, so the maximum is finite.
        Vec top = splat(w.top[row] = max_lanes(best)), sum = {};
        for (int64_t key = 0; key < padded_keys; key += LANES) {
            float *at = scores + key / NR * BLOCK * NR + key % NR;
            Vec p = exp2(load(at) - top);
            store(at, p);
            sum += p;
        }
        w.sum[row] = sum_lanes(sum);
    }
}

// Joins a tile's part to its queries' running softmax.
template <typename T>
static void merge(const vf_selected &call, State &state, Work &w, int64_t b) {
    int64_t width = call.head_width;
    for (int row = 0; row < w.readers.count; row++) {
        int64_t h = w.readers.head[row], t = w.readers.query[row], query = (b * call.heads + h) * call.queries + t;
        // First, nothing may be read of o: it is the caller's memory and may hold NaN.
        float before = state.top[query], top = before > w.top[row] ? before : w.top[row];
        bool first = before == -INFINITY;
        // Both at most 1: nothing overflows, whichever maximum is the larger.
        float old = first ? 0.0f : exp2(splat(before - top))[0], now = exp2(splat(w.top[row] - top))[0];
        float sum = (first ? 0.0f : state.sum[query] * old) + w.sum[row] * now;
        state.top[query] = top, state.sum[query] = sum;
        float *o = row_at<float>(state.o, b, h, t);
        const float *part = w.part + row * NR;
        auto joined = [&](int64_t d) {
            Vec x = now * load(part + d / NR * BLOCK * NR + d % NR);
            return first ? x : x + old * load(o + d);
        };
        auto joined_one = [&](int64_t d) {
            float x = now * part[d / NR * BLOCK * NR + d % NR];
            return first ? x : x + old * o[d];
        };
        int64_t d = 0;
        // Blocks come in order, so the query's own is its last: what it has is complete, and leaves in one go.
        if (w.readers.own[row]) {
            call.logsumexp[query] = natural_logsumexp(top, sum);
            put_norm(call, query, top, 1.0f / sum);
            float factor = (call.weights ? call.weights[query] : 1.0f) / sum;
            T *out = row_at<T>(call.out, b, h, t);
            for (; d + LANES <= width; d += LANES) store(out + d, factor * joined(d));
            for (; d < width; d++) put(out + d, factor * joined_one(d));
        } else {
            for (; d + LANES <= width; d += LANES) store(o + d, joined(d));
            for (; d < width; d++) o[d] = joined_one(d);
        }
    }
}

template <typename T>
static void own_block_of_keys(const BlockIndex &x, const vf_selected &call, State &state, Work &w, int64_t b, int64_t g,
                              int64_t number, const Turn &turn) {
    const int64_t *begin = x.begin + (b * call.kv_heads + g) * (x.most_blocks + 1) + number;
    int64_t width = call.head_width, padded_keys = round_up(call.block, NR);
    // Blocks that some other kv head reads are numbered for all of them.
    if (begin[0] == begin[1]) return;
    int32_t key = x.first[b * (call.keys + 1) + number];
    int64_t rows = least(call.block, call.keys - key);
    const uint8_t *keep = x.visible + b * call.keys + key;
    // Packed once for all readers of the block: that is what turning the selection round is for.
    pack_transposed(w.k_transposed, padded_keys, (const T *)row_at<T>(call.k, b, g, key), call.k.stride[2], rows, width,
                    keep);
    pack(w.v, padded_keys, (const T *)row_at<T>(call.v, b, g, key), call.v.stride[2], rows, width, 1.0f, keep);
    for (int64_t from = begin[0]; from < begin[1]; from += BLOCK) {
        Readers &r = w.readers;
        read_readers(r, x, call, b, g, key, from, begin[1]);
        for (int row = 0; row < r.count; row++)
            // Queries come from anywhere in the text, row by row; a product needs them side by side.
            pack_row(w.q, row, (const T *)row_at<T>(call.q, b, r.head[row], r.query[row]), width,
                     call.scale[r.head[row]] * LOG2E);
        score_readers(w.scores, w.q, w.k_transposed, r.tiles, padded_keys, width);
        exponentiate(w, padded_keys);
        // All that is long is done before the turn; what is left is a few passes over rows.
        mix_rows(w.part, w.scores, w.v, r.tiles, padded_keys, width);
        // Merging in the order of blocks keeps every sum the same on any number of threads, and the own block last.
        wait_for(turn, r);
        merge<T>(call, state, w, b);
        pass_on(turn, r, x, from + BLOCK, begin[1]);
    }
}

template <typename T>
static int32_t run(const vf_selected &call) {
    BlockIndex index;
    if (int32_t status = make_block_index(index, call)) return status;
    int64_t width = call.head_width, padded = round_up(width, NR), padded_keys = round_up(call.block, NR);
    int64_t rows = call.batch * call.heads * call.queries, tasks = call.batch * call.kv_heads * index.most_blocks;
    // Sums must be float32: a bfloat16 output cannot hold them on the way.
    bool direct = sizeof(T) == sizeof(float);
    auto lay_out_work = [&](Work &w, Space &space) {
        w.k_transposed = space.take<float>(padded_keys * width), w.v = space.take<float>(padded_keys * padded);
        w.q = space.take<float>(BLOCK * padded), w.part = space.take<float>(BLOCK * padded);
        w.scores = space.take<float>(BLOCK * padded_keys);
    };
    size_t work_bytes = measure([&](Space &space) {
        Work w;
        lay_out_work(w, space);
    });
    State state;
    char *pieces;
    Scratch scratch;
    if (!scratch.lay_out([&](Space &space) {
            state.top = space.take<float>(rows), state.sum = space.take<float>(rows);
            state.passed = space.take<int64_t>(tasks);
            state.o = call.out;
            if (!direct)
                state.o = {space.take<float>(rows * width),
                           {call.heads * call.queries * width, call.queries * width, width}};
            pieces = space.take<char>((int64_t)work_bytes * call.threads);
        }))
        return VF_NO_MEMORY;
    state.next = 0;
    memset(state.passed, 0, (size_t)tasks * sizeof(int64_t));
    // Rows past a tile's readers are multiplied too, and ignored; they must not be denormal.
    memset(pieces, 0, work_bytes * call.threads);

#pragma omp parallel num_threads(call.threads)
    {
        Work w;
        Space space = {(uintptr_t)pieces + work_bytes * (size_t)omp_get_thread_num()};
        lay_out_work(w, space);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) {
            int64_t b = i / call.queries / call.heads, h = i / call.queries % call.heads, t = i % call.queries;
            // -inf says that o holds nothing of ours yet; it is never read before it is written, so it needs no
            // clearing.
            state.top[i] = -INFINITY;
            if (call.start[b * call.queries + t] <= call.position[b * call.queries + t]) continue;
            call.logsumexp[i] = -INFINITY;
            put_norm(call, i, INFINITY, 0.0f);
            memset(row_at<T>(call.out, b, h, t), 0, (size_t)width * sizeof(T));
        }
        take_tasks(index, call, &state.next, state.passed, [&](int64_t b, int64_t g, int64_t number, const Turn &turn) {
            own_block_of_keys<T>(index, call, state, w, b, g, number, turn);
        });
    }
    return VF_OK;
}

int32_t selected_blocks_forward(const vf_selected &call) {
    return call.dtype == VF_BFLOAT16 ? run<uint16_t>(call) : run<float>(call);
}

}  // namespace VF_TARGET
