// Forward for a few queries against a long cache: keys and values are read where they lie, once for all query heads of
// a group, and only where some branch gives them a weight.
//
// The cache is cut into chunks of fixed length; each chunk yields partial sums, merged in chunk order afterwards, so
// one query of one head still uses every core and the result does not depend on how many there are.
#include <math.h>
#include <omp.h>

#include "attention/distance_bias.hpp"
#include "kernels.hpp"
#include "simd/scratch.hpp"

namespace VF_TARGET {

// Keys in a chunk: 256 KB of float32 keys and values of width 128 are a task of some tens of microseconds, long beside
// the cost of handing it out, and 32768 keys of one head still make 128 tasks.
static constexpr int CHUNK = 256;

namespace {

// One query head: its queries, and its branches in chain order ("links").
struct Head {
    Rows rows;
    Chains chains;
    float *q;  // [T, D] times scale * log2(e), so that products are scores, as powers of 2
};

// Partial results of one query over one chunk: the top score; for each link the sum and the output of what it adds
// to the link before.
struct Partial {
    float *top;     // [rows]
    float *sum;     // [rows, M]
    float *output;  // [rows, M, D]
};

// Work space of a thread for the rows (queries of all heads of a group) of one task.
struct Work {
    float *scores;   // [rows, CHUNK]
    float *weights;  // [rows, M, CHUNK], then probabilities
    float *merged, *mixed;  // [D]
};

struct Plan {
    const vf_mixture &call;
    int64_t group, rows, chunks;  // rows = group * T
    const Head *heads;            // [B, H]
    Partial all;
};

}  // namespace

static Partial partial_of(const Plan &plan, int64_t pair, int64_t chunk) {
    int64_t first = (pair * plan.chunks + chunk) * plan.rows, m = plan.call.branch_count;
    return {plan.all.top + first, plan.all.sum + first * m, plan.all.output + first * m * plan.call.head_width};
}

// scores[i] = q . key[i] for LANES keys. One sum per key, turned into lanes by a transposition at the end: cheaper than
// a horizontal sum for each key, and the keys stay in L1 for the next query.
// `next` are the keys after these: asked for now, they are there when their turn comes.
template <typename T>
static void dot_keys(float *scores, const float *q, const T *const *key, const T *const *next, int64_t width) {
    Vec sum[LANES] = {};
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) {
        Vec x = load(q + d);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) {
            __builtin_prefetch(next[i] + d);
            sum[i] += x * load(key[i] + d);
        }
    }
    transpose(sum);
    Vec total = {};
    for (int i = 0; i < LANES; i++) total += sum[i];
    store(scores, total);
    for (; d < width; d++)
        for (int i = 0; i < LANES; i++) scores[i] += q[d] * to_float(key[i][d]);
}

// output += sum of p[i] * value[i] over STRIDE keys: the output is loaded and stored once for all of them, in two chains
// of additions. More keys at once would need more pointers than there are registers.
static constexpr int STRIDE = 8;
template <typename T>
static void add_values(float *output, const float *p, const T *const *value, int64_t width) {
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) {
        Vec even = load(output + d), odd = {};
#pragma GCC unroll 4
        for (int i = 0; i < STRIDE; i += 2)
            even += load(value[i] + d) * p[i], odd += load(value[i + 1] + d) * p[i + 1];
        store(output + d, even + odd);
    }
    for (; d < width; d++)
        for (int i = 0; i < STRIDE; i++) output[d] += to_float(value[i][d]) * p[i];
}

static bool any_of(const float *weight, int count) {
    float any = 0;
    for (int i = 0; i < count; i++) any += weight[i];
    return any > 0;
}

static bool touches_chunk(const Plan &plan, const Head *heads, int32_t key) {
    for (int64_t i = 0; i < plan.group; i++)
        for (int link = 0; link < heads[i].chains.count; link++)
            if (touches(heads[i].rows, heads[i].rows.branch[heads[i].chains.branch[link]], key, key + CHUNK)) return true;
    return false;
}

// The weights every link adds on the chunk's keys; needed[key] is the largest of them: above 0 where a key is read.
static bool weigh_chunk(const Plan &plan, const Head *heads, int32_t key, float *weights, float *needed) {
    int64_t branches = plan.call.branch_count;
    Vec any = {};
    memset(needed, 0, CHUNK * sizeof(float));
    for (int64_t r = 0; r < plan.rows; r++) {
        const Head &head = heads[r / plan.call.queries];
        int row = (int)(r % plan.call.queries);
        for (int link = 0; link < head.chains.count; link++) {
            float *to = weights + (r * branches + link) * CHUNK;
            int outer = head.chains.branch[link], inner = head.chains.inside[link];
            if (!head.rows.keep[row] || !touches(head.rows, head.rows.branch[outer], key, key + CHUNK)) {
                memset(to, 0, CHUNK * sizeof(float));
                continue;
            }
            for (int j = 0; j < CHUNK; j += LANES) {
                Vec weight = weigh_step(head.rows, outer, inner, row, lanes() + (key + j));
                store(to + j, weight);
                store(needed + j, max(load(needed + j), weight));
                any = max(any, weight);
            }
        }
    }
    return max_lanes(any) > 0;
}

template <typename T>
static void attend_chunk(const Plan &plan, Work &work, int64_t pair, int64_t chunk) {
    const vf_mixture &call = plan.call;
    int64_t b = pair / call.kv_heads, g = pair % call.kv_heads, width = call.head_width, branches = call.branch_count;
    const Head *heads = plan.heads + b * call.heads + g * plan.group;
    Partial part = partial_of(plan, pair, chunk);
    int32_t key = (int32_t)(chunk * CHUNK);
    float needed[CHUNK];
    for (int64_t r = 0; r < plan.rows; r++) part.top[r] = -INFINITY;
    if (!touches_chunk(plan, heads, key) || !weigh_chunk(plan, heads, key, work.weights, needed)) return;

    // A key no query needs may hold anything, or lie past the end: a needed one stands in for it, with probability 0.
    const T *k = row_at<T>(call.k, b, g, key), *v = row_at<T>(call.v, b, g, key);
    const T *keys[CHUNK], *values[CHUNK];
    int some = 0;
    while (!(needed[some] > 0)) some++;
    for (int j = 0; j < CHUNK; j++) {
        int real = needed[j] > 0 ? j : some;
        keys[j] = k + real * call.k.stride[2], values[j] = v + real * call.v.stride[2];
    }
    for (int j = 0; j < CHUNK; j += LANES) {
        if (!any_of(needed + j, LANES)) {
            for (int64_t r = 0; r < plan.rows; r++) store(work.scores + r * CHUNK + j, Vec{});
            continue;
        }
        const T *const *next = j + LANES < CHUNK ? keys + j + LANES : values;
        for (int64_t r = 0; r < plan.rows; r++)
            dot_keys(work.scores + r * CHUNK + j, heads[r / call.queries].q + r % call.queries * width, keys + j,
                     r == 0 ? next : keys + j, width);
    }

    // What a bias adds to the products; pair gates do not come here.
    if (call.score == VF_SCORE_DISTANCE_BIAS)
        for (int64_t r = 0; r < plan.rows; r++) {
            int64_t h = g * plan.group + r / call.queries, t = r % call.queries;
            const float *table = bias_row(call.bias, b, h, t);
            int32_t last = (int32_t)call.bias.distances - 1, farthest = call.position[b * call.queries + t] - key;
            for (int j = 0; j < CHUNK; j += LANES) {
                float *at = work.scores + r * CHUNK + j;
                store(at, load(at) + bias_at(table, last, farthest - j) * LOG2E);
            }
        }

    for (int64_t r = 0; r < plan.rows; r++) {
        int links = heads[r / call.queries].chains.count;
        float *scores = work.scores + r * CHUNK, *weights = work.weights + r * branches * CHUNK;
        // One top for all links of the chunk, so that links are added up without rescaling.
        Vec best = splat(-INFINITY);
        for (int link = 0; link < links; link++)
            for (int j = 0; j < CHUNK; j += LANES)
                best = max(best, load(weights + link * CHUNK + j) > 0.0f ? load(scores + j) : splat(-INFINITY));
        float top = part.top[r] = max_lanes(best);
        if (top == -INFINITY) continue;
        for (int link = 0; link < links; link++) {
            Vec sum = {};
            for (int j = 0; j < CHUNK; j += LANES) {
                float *at = weights + link * CHUNK + j;
                Vec weight = load(at), p = weight > 0.0f ? weight * exp2(load(scores + j) - top) : Vec{};
                store(at, p);
                sum += p;
            }
            part.sum[r * branches + link] = sum_lanes(sum);
        }
        memset(part.output + r * branches * width, 0, (size_t)(branches * width) * sizeof(float));
    }
    // Values outside, queries inside: STRIDE values come from memory once and from L1 for every other query of the group.
    for (int j = 0; j < CHUNK; j += STRIDE) {
        if (!any_of(needed + j, STRIDE)) continue;
        for (int64_t r = 0; r < plan.rows; r++) {
            if (part.top[r] == -INFINITY) continue;
            for (int link = 0; link < heads[r / call.queries].chains.count; link++) {
                const float *p = work.weights + (r * branches + link) * CHUNK + j;
                float any = 0;
                for (int i = 0; i < STRIDE; i++) any += p[i];
                if (any > 0) add_values(part.output + (r * branches + link) * width, p, values + j, width);
            }
        }
    }
}

// Merges the chunks of one query in order, then adds link to link within each chain.
template <typename T>
static void merge(const Plan &plan, int64_t b, int64_t h, int64_t t, float *output, float *mixed) {
    const vf_mixture &call = plan.call;
    int64_t width = call.head_width, branches = call.branch_count, query = (b * call.heads + h) * call.queries + t;
    int64_t pair = b * call.kv_heads + h / plan.group, r = h % plan.group * call.queries + t;
    const Chains &chains = plan.heads[b * call.heads + h].chains;
    memset(mixed, 0, (size_t)width * sizeof(float));
    for (int m = 0; m < branches; m++) call.logsumexp[query * branches + m] = INFINITY;
    float top = -INFINITY;
    // The whole query's top first: every chunk is then brought to it by one factor of at most 1.
    for (int64_t c = 0; c < plan.chunks; c++) top = fmaxf(top, partial_of(plan, pair, c).top[r]);
    float sum = 0;
    for (int link = 0; link < chains.count; link++) {
        if (chains.inside[link] < 0) memset(output, 0, (size_t)width * sizeof(float)), sum = 0;
        for (int64_t c = 0; c < plan.chunks; c++) {
            Partial part = partial_of(plan, pair, c);
            if (part.top[r] == -INFINITY) continue;
            float share = exp2f(part.top[r] - top);
            const float *from = part.output + (r * branches + link) * width;
            sum += share * part.sum[r * branches + link];
            for (int64_t d = 0; d < width; d++) output[d] += share * from[d];
        }
        int m = chains.branch[link];
        call.logsumexp[query * branches + m] =
            sum > 0 ? natural_logsumexp(top, sum) : -INFINITY;
        float factor = sum > 0 ? 1.0f / sum : 0.0f;
        float share = call.weights ? call.weights[query * branches + m] * factor : factor;
        for (int64_t d = 0; d < width; d++) mixed[d] += share * output[d];
    }
    T *out = row_at<T>(call.out, b, h, t);
    for (int64_t d = 0; d < width; d++) put(out + d, mixed[d]);
}

template <typename T>
static void read_head(const vf_mixture &call, Head &head, int64_t b, int64_t h) {
    int count = (int)call.queries;
    read_rows(head.rows, call, b, h, 0, count);
    bool open[VF_MAX_BRANCHES];
    find_open(open, call,
              call.weights ? call.weights + (b * call.heads + h) * call.queries * call.branch_count : nullptr, count);
    head.chains = make_chains(call, h, open);
    for (int t = 0; t < count; t++) {
        const T *q = row_at<T>(call.q, b, h, t);
        for (int64_t d = 0; d < call.head_width; d++)
            head.q[t * call.head_width + d] = to_float(q[d]) * (call.scale[h] * LOG2E);
    }
}

template <typename T>
static int32_t run(const vf_mixture &call) {
    int64_t group = call.heads / call.kv_heads, rows = group * call.queries, width = call.head_width;
    int64_t pairs = call.batch * call.kv_heads, heads = call.batch * call.heads, branches = call.branch_count;
    int64_t chunks = (call.keys + CHUNK - 1) / CHUNK, parts = pairs * chunks * rows;
    Head *head;
    float *q;
    Partial all;
    char *works;
    auto lay_out_work = [&](Work &work, Space &space) {
        work.scores = space.take<float>(rows * CHUNK), work.weights = space.take<float>(rows * branches * CHUNK);
        work.merged = space.take<float>(width), work.mixed = space.take<float>(width);
    };
    size_t work_bytes = measure([&](Space &space) {
        Work work;
        lay_out_work(work, space);
    });
    Scratch scratch;
    if (!scratch.lay_out([&](Space &space) {
            head = space.take<Head>(heads), q = space.take<float>(heads * call.queries * width);
            all.top = space.take<float>(parts), all.sum = space.take<float>(parts * branches);
            all.output = space.take<float>(parts * branches * width);
            works = space.take<char>((int64_t)work_bytes * call.threads);
        }))
        return VF_NO_MEMORY;
    Plan plan = {call, group, rows, chunks, head, all};

#pragma omp parallel num_threads(call.threads)
    {
        Work work;
        Space space = {(uintptr_t)works + work_bytes * (size_t)omp_get_thread_num()};
        lay_out_work(work, space);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < heads; i++) {
            head[i].q = q + i * call.queries * width;
            read_head<T>(call, head[i], i / call.heads, i % call.heads);
        }
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < pairs * chunks; task++)
            attend_chunk<T>(plan, work, task / chunks, task % chunks);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < heads * call.queries; i++) {
            int64_t h = i / call.queries;
            merge<T>(plan, h / call.heads, h % call.heads, i % call.queries, work.merged, work.mixed);
        }
    }
    return VF_OK;
}

int32_t mixture_decode(const vf_mixture &call) {
    return call.dtype == VF_BFLOAT16 ? run<uint16_t>(call) : run<float>(call);
}

}  // namespace VF_TARGET
