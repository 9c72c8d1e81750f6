// Attention over the keys that each query selected, row by row: no two queries select alike, so there is no matrix to
// multiply. Forward, and the backward in two passes over the same lists.
#include <math.h>
#include <omp.h>

#include "attention/gather.hpp"
#include "kernels.hpp"
#include "simd/scratch.hpp"

namespace VF_TARGET {

// Queries of a task: long beside the cost of handing it out, and one short sequence still makes many.
static constexpr int QUERIES = 32;
// Keys whose gradients a task of the backward owns: dK and dV of width 128 take 1 MB, half of L2.
static constexpr int OWNED = 1024;
// Probabilities and score gradients of several kv heads share a wave while they fit here.
static constexpr int64_t LIST_BYTES = 12 << 20;

namespace {

struct Work {
    int32_t *list;               // [capacity + 1]
    float *q, *dout, *sum;       // [D]
    float *scores, *dp;          // [capacity + 1 + LANES]
};

}  // namespace

static Work make_work(const vf_selected &call, Space &space) {
    Work w;
    w.list = space.take<int32_t>(call.capacity + 1);
    w.q = space.take<float>(call.head_width);
    w.dout = space.take<float>(call.head_width);
    w.sum = space.take<float>(call.head_width);
    w.scores = space.take<float>(call.capacity + 1 + LANES);
    w.dp = space.take<float>(call.capacity + 1 + LANES);
    return w;
}

static void fail(int32_t *status) { __atomic_store_n(status, (int32_t)VF_BAD_SELECTION, __ATOMIC_RELAXED); }

template <typename T>
static void attend(const vf_selected &call, Work &w, int64_t b, int64_t h, int64_t t, int32_t *status) {
    int64_t g = h / (call.heads / call.kv_heads), width = call.head_width, query = (b * call.heads + h) * call.queries + t;
    T *out = row_at<T>(call.out, b, h, t);
    int count = read_selection(w.list, call, b, h, t);
    if (count < 0) fail(status);
    if (count <= 0) {
        memset(out, 0, (size_t)width * sizeof(T));
        call.logsumexp[query] = -INFINITY;
        put_norm(call, query, INFINITY, 0.0f);
        return;
    }
    // The query as float32, scaled once: it meets every selected key.
    read_row(w.q, row_at<T>(call.q, b, h, t), width, call.scale[h] * LOG2E);
    dot_rows(w.scores, w.q, row_at<T>(call.k, b, g, 0), call.k.stride[2], w.list, count, width);
    // The last vector is filled up with keys that count nothing.
    for (int i = count; i % LANES; i++) w.scores[i] = -INFINITY;
    Vec best = splat(-INFINITY), sum = {};
    // All scores of a query are at hand, so one maximum serves: nothing is rescaled.
    for (int i = 0; i < count; i += LANES) best = max(best, load(w.scores + i));
    float top = max_lanes(best);
    for (int i = 0; i < count; i += LANES) {
        Vec p = exp2(load(w.scores + i) - top);
        store(w.scores + i, p);
        sum += p;
    }
    float total = sum_lanes(sum);
    // The division by the sum waits until the values are mixed: once for each output, not for each key.
    call.logsumexp[query] = natural_logsumexp(top, total);
    put_norm(call, query, top, 1.0f / total);
    combine_rows(w.sum, w.scores, row_at<T>(call.v, b, g, 0), call.v.stride[2], w.list, count, width);
    float factor = (call.weights ? call.weights[query] : 1.0f) / total;
    for (int64_t d = 0; d < width; d++) put(out + d, w.sum[d] * factor);
}

template <typename T>
static int32_t run_forward(const vf_selected &call) {
    int64_t tasks_a_head = (call.queries + QUERIES - 1) / QUERIES, heads = call.batch * call.heads;
    size_t bytes = measure([&](Space &space) { make_work(call, space); });
    char *works;
    Scratch scratch;
    if (!scratch.lay_out([&](Space &space) { works = space.take<char>((int64_t)bytes * call.threads); }))
        return VF_NO_MEMORY;
    // A thread cannot leave the parallel region: a bad list is remembered, its query gets 0, and the status says so at
    // the end.
    int32_t status = VF_OK;
#pragma omp parallel num_threads(call.threads)
    {
        Space space = {(uintptr_t)works + bytes * (size_t)omp_get_thread_num()};
        Work work = make_work(call, space);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < heads * tasks_a_head; task++) {
            int64_t head = task / tasks_a_head, first = task % tasks_a_head * QUERIES;
            // Neighbours in the text: keys that both select are still in cache for the second.
            for (int64_t t = first; t < first + QUERIES && t < call.queries; t++)
                attend<T>(call, work, head / call.heads, head % call.heads, t, &status);
        }
    }
    return status;
}

int32_t selected_keys_forward(const vf_selected &call) {
    return call.dtype == VF_BFLOAT16 ? run_forward<uint16_t>(call) : run_forward<float>(call);
}

// First pass of the backward, by query: dQ, dw, and for the second pass w * p and dS of every selected key.
template <typename T>
static void differentiate(const vf_selected_grad &call, Work &w, int64_t b, int64_t h, int64_t t, float *a, float *ds,
                          int32_t *status) {
    const vf_selected &f = call.forward;
    int64_t g = h / (f.heads / f.kv_heads), width = f.head_width, query = (b * f.heads + h) * f.queries + t;
    float *dq = row_at<float>(call.grad_q, b, h, t);
    int count = read_selection(w.list, f, b, h, t);
    if (count < 0) fail(status);
    if (call.grad_weights) call.grad_weights[query] = 0;
    if (count <= 0) {
        memset(dq, 0, (size_t)width * sizeof(float));
        return;
    }
    const T *k = row_at<T>(f.k, b, g, 0), *v = row_at<T>(f.v, b, g, 0);
    float weight = f.weights ? f.weights[query] : 1.0f;
    read_row(w.q, row_at<T>(f.q, b, h, t), width, f.scale[h] * LOG2E);
    read_row(w.dout, row_at<T>(call.grad_out, b, h, t), width, 1.0f);
    // The scores again, instead of keeping [B, H, T, k] numbers between the passes of a whole model.
    dot_rows(w.scores, w.q, k, f.k.stride[2], w.list, count, width);
    dot_rows(w.dp, w.dout, v, f.v.stride[2], w.list, count, width);
    for (int i = count; i % LANES; i++) w.scores[i] = -INFINITY, w.dp[i] = 0;
    const float top = f.norm[2 * query], factor = f.norm[2 * query + 1];
    Vec sum = {};
    for (int i = 0; i < count; i += LANES) {
        Vec p = exp2(load(w.scores + i) - top) * factor;
        store(w.scores + i, p);
        sum += p * load(w.dp + i);
    }
    // dw = sum p dO.v = dO . O: all of a query's keys are at hand, so its output need not be kept.
    float dweight = sum_lanes(sum), delta = weight * dweight - (call.grad_logsumexp ? call.grad_logsumexp[query] : 0.0f);
    if (call.grad_weights) call.grad_weights[query] = dweight;
    for (int i = 0; i < count; i += LANES) {
        Vec p = load(w.scores + i);
        store(w.scores + i, p * weight);
        store(w.dp + i, p * (weight * load(w.dp + i) - delta));
    }
    combine_rows(w.sum, w.dp, k, f.k.stride[2], w.list, count, width);
    read_row(dq, (const float *)w.sum, width, f.scale[h]);
    // For the second pass, which goes by keys: it would otherwise need every score again.
    memcpy(a, w.scores, (size_t)count * sizeof(float));
    memcpy(ds, w.dp, (size_t)count * sizeof(float));
}

// How many entries of a selection are below `key`; -1, which ends a selection, counts as the greatest.
static int count_below(const int32_t *selected, int64_t capacity, uint32_t key) {
    // As unsigned numbers the -1 at the end are above every key: a list that ends early is searched like a full one.
    int64_t low = 0, high = capacity;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if ((uint32_t)selected[middle] < key)
            low = middle + 1;
        else
            high = middle;
    }
    return (int)low;
}

// Second pass, by keys: a task owns OWNED keys of a kv head and goes through all queries, so every sum has one order.
template <typename T>
static void own_keys(const vf_selected_grad &call, Work &w, float *dk, int64_t b, int64_t g, int64_t first, const float *a,
                     const float *ds) {
    const vf_selected &f = call.forward;
    int64_t width = f.head_width, group = f.heads / f.kv_heads, count = least(OWNED, f.keys - first), row = f.capacity + 1;
    // In float32 whatever the type of the gradients: many small terms would be lost in bfloat16.
    float *dv = dk + OWNED * width;
    // Owned by one task: no two threads add to the same key, without locks or turns.
    memset(dk, 0, (size_t)(2 * OWNED * width) * sizeof(float));
    for (int64_t t = 0; t < f.queries; t++) {
        int32_t position = f.position[b * f.queries + t], start = f.start[b * f.queries + t];
        // The query cannot see any of these keys: no list is opened.
        if (position < first || start >= first + count || start > position) continue;
        for (int64_t i = 0; i < group; i++) {
            int64_t h = g * group + i, at = (i * f.queries + t) * row;
            const int32_t *selected = selection_of(f, b, h, t);
            // Lists ascend, so the entries of these keys are one stretch, found in log2(capacity) looks.
            int from = count_below(selected, f.capacity, (uint32_t)first);
            int to = count_below(selected + from, f.capacity - from, (uint32_t)(first + count)) + from;
            // The query's own key comes last, if it is not the last of the selection already.
            bool self = f.include_self && position < first + count && !(to > 0 && selected[to - 1] == position);
            if (from >= to && !self) continue;
            read_row(w.q, row_at<T>(f.q, b, h, t), width, f.scale[h]);
            read_row(w.dout, row_at<T>(call.grad_out, b, h, t), width, 1.0f);
            scatter_row(dk, w.q, selected + from, first, ds + at + from, to - from, width);
            scatter_row(dv, w.dout, selected + from, first, a + at + from, to - from, width);
            if (!self) continue;
            scatter_row(dk, w.q, &position, first, ds + at + to, 1, width);
            scatter_row(dv, w.dout, &position, first, a + at + to, 1, width);
        }
    }
    for (int64_t j = 0; j < count; j++) {
        T *to_k = row_at<T>(call.grad_k, b, g, first + j), *to_v = row_at<T>(call.grad_v, b, g, first + j);
        for (int64_t d = 0; d < width; d++) put(to_k + d, dk[j * width + d]), put(to_v + d, dv[j * width + d]);
    }
}

template <typename T>
static int32_t run_backward(const vf_selected_grad &call) {
    const vf_selected &f = call.forward;
    int64_t group = f.heads / f.kv_heads, pairs = f.batch * f.kv_heads, width = f.head_width;
    int64_t query_tasks = (f.queries + QUERIES - 1) / QUERIES, key_tasks = (f.keys + OWNED - 1) / OWNED;
    int64_t entries = group * f.queries * (f.capacity + 1);
    // The second pass follows the first closely, so that it finds these numbers in cache.
    int64_t wave = wave_of(pairs, entries * 2 * (int64_t)sizeof(float) + 1, LIST_BYTES);
    size_t bytes = measure([&](Space &space) { space.take<float>(2 * OWNED * width), make_work(f, space); });
    float *a, *ds;
    char *works;
    Scratch scratch;
    if (!scratch.lay_out([&](Space &space) {
            a = space.take<float>(wave * entries), ds = space.take<float>(wave * entries);
            works = space.take<char>((int64_t)bytes * f.threads);
        }))
        return VF_NO_MEMORY;
    int32_t status = VF_OK;
#pragma omp parallel num_threads(f.threads)
    {
        Space space = {(uintptr_t)works + bytes * (size_t)omp_get_thread_num()};
        float *dk = space.take<float>(2 * OWNED * width);
        Work work = make_work(f, space);
        for (int64_t base = 0; base < pairs; base += wave) {
            int64_t here = least(wave, pairs - base);
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < here * group * query_tasks; task++) {
                int64_t head = task / query_tasks, first = task % query_tasks * QUERIES, pair = base + head / group;
                for (int64_t t = first; t < first + QUERIES && t < f.queries; t++) {
                    int64_t at = head / group * entries + (head % group * f.queries + t) * (f.capacity + 1);
                    differentiate<T>(call, work, pair / f.kv_heads, pair % f.kv_heads * group + head % group, t, a + at,
                                     ds + at, &status);
                }
            }
            // Only lists that kept their contract may be followed when writing.
            if (__atomic_load_n(&status, __ATOMIC_RELAXED)) break;
#pragma omp for schedule(dynamic)
            for (int64_t task = 0; task < here * key_tasks; task++) {
                // Early keys are read by the most queries, so they come first, of every kv head: threads end together.
                int64_t pair = base + task % here, first = task / here * OWNED;
                own_keys<T>(call, work, dk, pair / f.kv_heads, pair % f.kv_heads, first, a + task % here * entries,
                            ds + task % here * entries);
            }
        }
    }
    return status;
}

int32_t selected_keys_backward(const vf_selected_grad &call) {
    return call.forward.dtype == VF_BFLOAT16 ? run_backward<uint16_t>(call) : run_backward<float>(call);
}

}  // namespace VF_TARGET
