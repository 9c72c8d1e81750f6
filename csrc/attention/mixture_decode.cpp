// Forward for a few queries against a long cache: keys and values are read where they lie, once for all query heads of
// a group, and only where some branch gives them a weight.
//
// The cache is cut into chunks of fixed length; each chunk yields partial sums, merged in chunk order afterwards, so
// one query of one head still uses every core and the result does not depend on how many there are.
#include <math.h>
#include <omp.h>

#include "attention/distance_bias.hpp"
#include "attention/gather.hpp"
#include "kernels.hpp"
#include "simd/scratch.hpp"

namespace VF_TARGET {

// Keys in a chunk: 256 KB of float32 keys and values of width 128 are a task of some tens of microseconds, long beside
// the cost of handing it out, and 32768 keys of one head still make 128 tasks.
static constexpr int CHUNK = 256;
// Products of queries and keys that another thread is woken for: about 50 microseconds of one.
static constexpr int64_t WORK_OF_A_THREAD = 1 << 19;
// Queries of all heads of a group: vf_mixture_forward sends no more here.
static constexpr int MOST_ROWS = 16;

namespace {

// One query head: its queries, and its branches in chain order ("links").
struct Head {
    Rows rows;
    Chains chains;
    float *q;  // [T, D] times scale * log2(e), so that products are scores, as powers of 2
};

// Partial results over one chunk: for each link of each query the top score of the keys that it adds to the link before,
// and their sum and output relative to that top. Every link has a top of its own: far keys may outscore the best key
// of a window by any amount, and the window's own sum must not vanish beside them.
struct Partial {
    float *top, *sum;  // [rows, M]; a top of -inf: nothing was read, and the rest is not set
    float *output;     // [rows, M, D]
};

// Work space of a thread for the rows (queries of all heads of a group) of one task.
struct Work {
    Cover *cover;    // [rows, M]: how much of the chunk a link reads
    float *scores;   // [rows, CHUNK]
    float *weights;  // [rows, M, CHUNK], set where a link's cover is MIXED; then probabilities
    float *merged, *mixed;  // [D]
};

struct Plan {
    const vf_mixture &call;
    const vf_kept *kept;          // [G], or null
    int64_t group, rows, chunks;  // rows = group * T
    const Head *heads;            // [B, H]
    Partial all;
};

}  // namespace

static Partial partial_of(const Plan &plan, int64_t pair, int64_t chunk) {
    int64_t first = (pair * plan.chunks + chunk) * plan.rows * plan.call.branch_count;
    return {plan.all.top + first, plan.all.sum + first, plan.all.output + first * plan.call.head_width};
}

// scores[r][i] = q[r] . key[i] for LANES keys and ROWS queries that share them. Keys are taken a few at a time, which
// keeps ROWS * FEW sums in registers: each key is loaded once for all queries, and few keys at once are few streams for
// the processor's own prefetching. The sums of a query become the lanes of one vector at the end: cheaper than a
// horizontal sum for each key.
//
// `next` are the LANES keys after these, or any: they are asked for ahead of their use. A row of a head is as short as 256
// bytes, and the processor's own prefetching loses the thread at every one: 8192 keys took 1.8 times as long without.
template <int ROWS, typename T>
static void dot_keys(float *scores, const float *const *q, const T *const *key, const T *const *next, int64_t width) {
    constexpr int FEW = ROWS == 1 && LANES >= 8 ? 8 : 4;
    Vec sums[ROWS][LANES];
    const int64_t whole = width / LANES * LANES;
#pragma GCC unroll 4
    for (int first = 0; first < LANES; first += FEW) {
        Vec sum[ROWS][FEW] = {};
        for (int64_t d = 0; d < whole; d += LANES) {
            Vec part[FEW];
#pragma GCC unroll 8
            for (int i = 0; i < FEW; i++) part[i] = load(key[first + i] + d), __builtin_prefetch(next[first + i] + d);
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                Vec x = load(q[r] + d);
#pragma GCC unroll 8
                for (int i = 0; i < FEW; i++) sum[r][i] += x * part[i];
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int i = 0; i < FEW; i++) sums[r][first + i] = sum[r][i];
    }
    for (int r = 0; r < ROWS; r++) {
        Vec total = sum_each(sums[r]);
        for (int64_t d = whole; d < width; d++)
            for (int i = 0; i < LANES; i++) total[i] += q[r][d] * to_float(key[i][d]);
        store(scores + r * CHUNK, total);
    }
}

// The same for any number of queries.
template <typename T>
static void dot_keys_of_all(float *scores, const float *const *q, int64_t rows, const T *const *key,
                            const T *const *next, int64_t width) {
    int64_t r = 0;
    for (; r + 3 <= rows; r += 3) dot_keys<3>(scores + r * CHUNK, q + r, key, next, width);
    if (rows - r == 2) dot_keys<2>(scores + r * CHUNK, q + r, key, next, width);
    if (rows - r == 1) dot_keys<1>(scores + r * CHUNK, q + r, key, next, width);
}

// output += sum of p[i] * value[i] over STRIDE keys: the output is loaded and stored once for all of them, in two chains
// of additions. More keys at once would need more pointers than there are registers.
static constexpr int STRIDE = 8;
template <typename T>
static void add_values(float *output, const float *p, const T *const *value, const T *const *next, int64_t width) {
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) {
        Vec even = load(output + d), odd = {};
#pragma GCC unroll 4
        for (int i = 0; i < STRIDE; i += 2)
            even += load(value[i] + d) * p[i], odd += load(value[i + 1] + d) * p[i + 1];
        for (int i = 0; i < STRIDE; i++) __builtin_prefetch(next[i] + d);
        store(output + d, even + odd);
    }
    for (; d < width; d++)
        for (int i = 0; i < STRIDE; i++) output[d] += to_float(value[i][d]) * p[i];
}

// Whether any of STRIDE or LANES weights is above 0.
static bool any_of(const float *weight, int count) {
    bool any = false;
    for (int i = 0; i < count; i++) any |= weight[i] > 0;
    return any;
}

static bool touches_chunk(const Plan &plan, const Head *heads, int32_t key) {
    for (int64_t i = 0; i < plan.group; i++)
        for (int link = 0; link < heads[i].chains.count; link++)
            if (touches(heads[i].rows, heads[i].rows.branch[heads[i].chains.branch[link]], key, key + CHUNK)) return true;
    return false;
}

// How much of the chunk's keys every link reads, with weights where it is neither nothing nor everything.
// needed[key] is above 0 where any of them reads a key. Returns whether any does.
static bool weigh_chunk(const Plan &plan, const Head *heads, int32_t key, const Work &work, float *needed) {
    int64_t branches = plan.call.branch_count;
    bool any = false, all = false;
    memset(needed, 0, CHUNK * sizeof(float));
    for (int64_t r = 0; r < plan.rows; r++) {
        const Head &head = heads[r / plan.call.queries];
        int row = (int)(r % plan.call.queries);
        for (int link = 0; link < head.chains.count; link++) {
            int outer = head.chains.branch[link], inner = head.chains.inside[link];
            Cover &found = work.cover[r * branches + link];
            found = head.rows.keep[row] ? cover_step(head.rows, outer, inner, row / MR, key, key + CHUNK) : NONE;
            any |= found != NONE, all |= found == FULL;
            if (found != MIXED) continue;
            float *to = work.weights + (r * branches + link) * CHUNK;
            for (int j = 0; j < CHUNK; j += LANES) {
                Vec weight = weigh_step(head.rows, outer, inner, row, lanes() + (key + j));
                store(to + j, weight);
                store(needed + j, max(load(needed + j), weight));
            }
        }
    }
    if (all)
        for (int j = 0; j < CHUNK; j++) needed[j] = 1;
    return any;
}

// The top of a link's scores, their sum relative to it, and probabilities in place of the weights.
static void exponentiate(float *weights, const float *scores, Cover cover, float *top, float *sum) {
    Vec best = splat(-INFINITY), total = {};
    if (cover == FULL)
        for (int j = 0; j < CHUNK; j += LANES) best = max(best, load(scores + j));
    else
        for (int j = 0; j < CHUNK; j += LANES)
            best = max(best, load(weights + j) > 0.0f ? load(scores + j) : splat(-INFINITY));
    *top = max_lanes(best);
    if (*top == -INFINITY) return;
    for (int j = 0; j < CHUNK; j += LANES) {
        Vec p = exp2(load(scores + j) - *top);
        if (cover == MIXED) {
            Vec weight = load(weights + j);
            p = weight > 0.0f ? weight * p : Vec{};
        }
        store(weights + j, p);
        total += p;
    }
    *sum = sum_lanes(total);
}

// What a bias by distance adds to the products of one query.
static void add_bias(const vf_mixture &call, float *scores, int64_t b, int64_t h, int64_t t, int32_t key) {
    const float *table = bias_row(call.bias, b, h, t);
    int32_t last = (int32_t)call.bias.distances - 1, farthest = call.position[b * call.queries + t] - key;
    for (int j = 0; j < CHUNK; j += LANES)
        store(scores + j, load(scores + j) + bias_at(table, last, farthest - j) * LOG2E);
}

template <typename T>
static void attend_chunk(const Plan &plan, Work &work, int64_t pair, int64_t chunk) {
    const vf_mixture &call = plan.call;
    int64_t b = pair / call.kv_heads, g = pair % call.kv_heads, width = call.head_width, branches = call.branch_count;
    const Head *heads = plan.heads + b * call.heads + g * plan.group;
    Partial part = partial_of(plan, pair, chunk);
    int32_t key = (int32_t)(chunk * CHUNK);
    float needed[CHUNK];
    for (int64_t i = 0; i < plan.rows * branches; i++) part.top[i] = -INFINITY;
    if (!weigh_chunk(plan, heads, key, work, needed)) return;

    // A key no query needs may hold anything, or lie past the end: a needed one stands in for it, with probability 0.
    const vf_tensor &held_k = plan.kept ? plan.kept[g].k : call.k, &held_v = plan.kept ? plan.kept[g].v : call.v;
    int64_t at = plan.kept ? 0 : g;
    const T *k = row_at<T>(held_k, b, at, key), *v = row_at<T>(held_v, b, at, key);
    const T *keys[CHUNK], *values[CHUNK];
    int some = 0;
    while (some < CHUNK && !(needed[some] > 0)) some++;
    if (some == CHUNK) return;
    for (int j = 0; j < CHUNK; j++) {
        int real = needed[j] > 0 ? j : some;
        keys[j] = k + real * held_k.stride[2], values[j] = v + real * held_v.stride[2];
    }
    const float *queries[MOST_ROWS];
    for (int64_t r = 0; r < plan.rows; r++) queries[r] = heads[r / call.queries].q + r % call.queries * width;
    for (int j = 0; j < CHUNK; j += LANES) {
        if (any_of(needed + j, LANES)) {
            dot_keys_of_all(work.scores + j, queries, plan.rows, keys + j,
                            j + LANES < CHUNK ? keys + j + LANES : values, width);
            continue;
        }
        for (int64_t r = 0; r < plan.rows; r++) store(work.scores + r * CHUNK + j, Vec{});
    }
    for (int64_t r = 0; r < plan.rows; r++) {
        float *scores = work.scores + r * CHUNK;
        // Pair gates do not come here.
        if (call.score == VF_SCORE_DISTANCE_BIAS)
            add_bias(call, scores, b, g * plan.group + r / call.queries, r % call.queries, key);
        for (int64_t i = r * branches; i < r * branches + heads[r / call.queries].chains.count; i++) {
            if (work.cover[i] == NONE) continue;
            exponentiate(work.weights + i * CHUNK, scores, work.cover[i], part.top + i, part.sum + i);
            memset(part.output + i * width, 0, (size_t)width * sizeof(float));
        }
    }
    // Values outside, queries inside: STRIDE values come from memory once and from L1 for every other query of the group.
    for (int j = 0; j < CHUNK; j += STRIDE) {
        if (!any_of(needed + j, STRIDE)) continue;
        const T *const *next = values + (j + STRIDE < CHUNK ? j + STRIDE : j);
        for (int64_t r = 0; r < plan.rows; r++)
            for (int64_t i = r * branches; i < r * branches + heads[r / call.queries].chains.count; i++) {
                const float *p = work.weights + i * CHUNK + j;
                if (part.top[i] != -INFINITY && (work.cover[i] == FULL || any_of(p, STRIDE)))
                    add_values(part.output + i * width, p, values + j, next, width);
            }
    }
}

// The results of one query: what its links found in all chunks, added up link by link within each chain.
template <typename T>
static void merge(const Plan &plan, int64_t b, int64_t h, int64_t t, float *output, float *mixed) {
    const vf_mixture &call = plan.call;
    int64_t width = call.head_width, branches = call.branch_count, query = (b * call.heads + h) * call.queries + t;
    int64_t pair = b * call.kv_heads + h / plan.group, r = h % plan.group * call.queries + t;
    const Chains &chains = plan.heads[b * call.heads + h].chains;
    memset(mixed, 0, (size_t)width * sizeof(float));
    for (int m = 0; m < branches; m++) call.logsumexp[query * branches + m] = INFINITY;
    float top = -INFINITY, sum = 0;
    for (int link = 0; link < chains.count; link++) {
        if (chains.inside[link] < 0) memset(output, 0, (size_t)width * sizeof(float)), sum = 0, top = -INFINITY;
        // The top of all that the branch reads first: whatever was found is then brought to it by a factor of at most 1.
        float before = top;
        for (int64_t c = 0; c < plan.chunks; c++) top = fmaxf(top, partial_of(plan, pair, c).top[r * branches + link]);
        if (before != top && before != -INFINITY) {
            float share = exp2f(before - top);
            sum *= share;
            for (int64_t d = 0; d < width; d++) output[d] *= share;
        }
        for (int64_t c = 0; c < plan.chunks; c++) {
            Partial part = partial_of(plan, pair, c);
            int64_t i = r * branches + link;
            if (part.top[i] == -INFINITY) continue;
            float share = exp2f(part.top[i] - top);
            const float *from = part.output + i * width;
            sum += share * part.sum[i];
            for (int64_t d = 0; d < width; d++) output[d] += share * from[d];
        }
        int m = chains.branch[link];
        call.logsumexp[query * branches + m] = sum > 0 ? natural_logsumexp(top, sum) : -INFINITY;
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

// Where the queries of a head stand among the keys that are kept of it: `before` of all keys are not.
static void place_queries(int32_t *position, int32_t *start, const vf_mixture &call, int32_t before) {
    for (int64_t i = 0; i < call.batch * call.queries; i++) {
        position[i] = call.position[i] - before;
        start[i] = call.start[i] > before ? call.start[i] - before : 0;
    }
}

template <typename T>
static int32_t run(const vf_mixture &call, const vf_kept *kept) {
    int64_t group = call.heads / call.kv_heads, rows = group * call.queries, width = call.head_width;
    int64_t pairs = call.batch * call.kv_heads, heads = call.batch * call.heads, branches = call.branch_count;
    int64_t chunks = (call.keys + CHUNK - 1) / CHUNK, parts = pairs * chunks * rows;
    Head *head;
    float *q;
    Partial all;
    int64_t *task_list;
    int32_t *position, *start;
    char *works;
    auto lay_out_work = [&](Work &work, Space &space) {
        work.cover = space.take<Cover>(rows * branches);
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
            all.top = space.take<float>(parts * branches), all.sum = space.take<float>(parts * branches);
            all.output = space.take<float>(parts * branches * width);
            task_list = space.take<int64_t>(pairs * chunks);
            position = space.take<int32_t>(call.batch * call.queries);
            start = space.take<int32_t>(call.batch * call.queries);
            works = space.take<char>((int64_t)work_bytes * call.threads);
        }))
        return VF_NO_MEMORY;
    Plan plan = {call, kept, group, rows, chunks, head, all};

    vf_mixture placed = call;
    if (kept) placed.position = position, placed.start = start;
    for (int64_t h = 0; h < call.heads; h++) {
        if (kept && h % group == 0) place_queries(position, start, call, (int32_t)(call.keys - kept[h / group].keys));
        for (int64_t b = 0; b < call.batch; b++) {
            Head &one = head[b * call.heads + h];
            one.q = q + (b * call.heads + h) * call.queries * width;
            read_head<T>(placed, one, b, h);
        }
    }
    int64_t tasks = 0;
    for (int64_t task = 0; task < pairs * chunks; task++) {
        int64_t pair = task / chunks, chunk = task % chunks;
        if (touches_chunk(plan, head + pair * group, (int32_t)(chunk * CHUNK)))
            task_list[tasks++] = task;
        else
            for (int64_t i = 0; i < rows * branches; i++) partial_of(plan, pair, chunk).top[i] = -INFINITY;
    }
    // A second thread has gone to sleep since the last call, and waking it takes as long as a few chunks.
    int64_t worth = 1 + tasks * CHUNK * width * rows / WORK_OF_A_THREAD;

#pragma omp parallel num_threads((int)(worth < call.threads ? worth : call.threads))
    {
        Work work;
        Space space = {(uintptr_t)works + work_bytes * (size_t)omp_get_thread_num()};
        lay_out_work(work, space);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tasks; i++) attend_chunk<T>(plan, work, task_list[i] / chunks, task_list[i] % chunks);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < heads * call.queries; i++) {
            int64_t h = i / call.queries;
            merge<T>(plan, h / call.heads, h % call.heads, i % call.queries, work.merged, work.mixed);
        }
    }
    return VF_OK;
}

int32_t mixture_decode_kept(const vf_mixture &call, const vf_kept *kept) {
    return call.dtype == VF_BFLOAT16 ? run<uint16_t>(call, kept) : run<float>(call, kept);
}

int32_t mixture_decode(const vf_mixture &call) { return mixture_decode_kept(call, nullptr); }

}  // namespace VF_TARGET
