// A layer of the model for a few tokens: everything before its attention, everything after it, or all of it, in one
// call. What the general path does between two kernels, in Python, would take as long as the kernels.
#include <math.h>

#include "kernels.hpp"
#include "steps/few_rows.hpp"

namespace VF_TARGET {

namespace {

// Several matrices with the same input, one after another as if they were one: rows count through.
struct Stack {
    const vf_matrix *matrix[4];
    float *out[4];  // [tokens, rows] of each
    int count;
};

}  // namespace

static void norm_rows(float *out, const float *x, const float *weight, int64_t rows, int64_t width, float epsilon) {
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * width;
        float *to = out + row * width;
        Vec sum = {};
        int64_t d = 0;
        for (; d + LANES <= width; d += LANES) sum += load(from + d) * load(from + d);
        float square = sum_lanes(sum);
        for (; d < width; d++) square = multiply_add(from[d], from[d], square);
        float inverse = 1.0f / __builtin_sqrtf(square / (float)width + epsilon);
        for (d = 0; d < width; d++) to[d] = weight[d] * (from[d] * inverse);
    }
}

// One region of threads for all matrices: each row of each is a product with every token.
static void multiply_stack(const Stack &stack, const float *x, int64_t tokens, int32_t threads) {
    int64_t first[5] = {}, step = rows_of_task(*stack.matrix[0]);
    for (int i = 0; i < stack.count; i++) first[i + 1] = first[i] + (stack.matrix[i]->rows + step - 1) / step;
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t task = 0; task < first[stack.count]; task++) {
        int i = 0;
        while (task >= first[i + 1]) i++;
        const vf_matrix &m = *stack.matrix[i];
        int64_t begin = (task - first[i]) * step, end = begin + step < m.rows ? begin + step : m.rows;
        for (int64_t row = begin; row < end; row++) {
            float found[VF_MOST_FEW];
            multiply(found, m, row, x, m.columns, tokens);
            for (int64_t token = 0; token < tokens; token++) stack.out[i][token * m.rows + row] = found[token];
        }
    }
}

// x += matrix input.
static void add_product(float *x, const vf_matrix &m, const float *input, int64_t tokens, int32_t threads) {
    int64_t step = rows_of_task(m);
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t begin = 0; begin < m.rows; begin += step)
        for (int64_t row = begin; row < m.rows && row < begin + step; row++) {
            float found[VF_MOST_FEW];
            multiply(found, m, row, input, m.columns, tokens);
            for (int64_t token = 0; token < tokens; token++) x[token * m.rows + row] += found[token];
        }
}

// Heads [tokens, heads, D] are normed where a norm is given, and rotated by halves.
static void place_heads(float *heads, int64_t count, const float *norm, const vf_layer &c) {
    int64_t width = c.head_width, half = width / 2;
    if (norm) norm_rows(heads, heads, norm, c.tokens * count, width, c.epsilon);
    for (int64_t token = 0; token < c.tokens; token++) {
        const float *cosines = c.cosines + token % c.angles * width, *sines = c.sines + token % c.angles * width;
        for (int64_t head = 0; head < count; head++) {
            float *row = heads + (token * count + head) * width;
            for (int64_t d = 0; d < half; d++) {
                float low = row[d], high = row[d + half];
                row[d] = low * cosines[d] - high * sines[d];
                row[d + half] = high * cosines[d + half] + low * sines[d + half];
            }
        }
    }
}

int32_t layer_project(const vf_layer &c) {
    norm_rows(c.normed, c.x, c.input_norm, c.tokens, c.width, c.epsilon);
    Stack stack = {{&c.q, &c.k, &c.v}, {c.queries, c.keys, c.values}, 3};
    multiply_stack(stack, c.normed, c.tokens, c.threads);
    place_heads(c.queries, c.heads, c.q_norm, c);
    place_heads(c.keys, c.kv_heads, c.k_norm, c);
    return VF_OK;
}

int32_t layer_finish(const vf_layer &c) {
    add_product(c.x, c.o, c.attended, c.tokens, c.threads);
    norm_rows(c.normed, c.x, c.output_norm, c.tokens, c.width, c.epsilon);
    int64_t step = rows_of_task(c.gate), inner = c.gate.rows;
#pragma omp parallel for num_threads(c.threads) schedule(dynamic)
    for (int64_t begin = 0; begin < inner; begin += step)
        for (int64_t row = begin; row < inner && row < begin + step; row++) {
            float gate[VF_MOST_FEW], up[VF_MOST_FEW];
            multiply(gate, c.gate, row, c.normed, c.width, c.tokens);
            multiply(up, c.up, row, c.normed, c.width, c.tokens);
            for (int64_t token = 0; token < c.tokens; token++)
                c.inner[token * inner + row] = gate[token] / (1.0f + expf(-gate[token])) * up[token];
        }
    add_product(c.x, c.down, c.inner, c.tokens, c.threads);
    return VF_OK;
}

// The weights g and 1 - g of two branches, [B, H, T, 2].
static void mix_branches(float *weights, const vf_step &c) {
    const vf_layer &layer = c.layer;
    int64_t queries = c.attention.queries;
    for (int64_t head = 0; head < layer.heads; head++) {
        float learned[VF_MOST_FEW] = {};
        if (c.mix.data)
            multiply(learned, c.mix, head, layer.normed, layer.width, layer.tokens);
        else if (c.mix.bias)
            for (int64_t token = 0; token < layer.tokens; token++) learned[token] = c.mix.bias[head];
        for (int64_t token = 0; token < layer.tokens; token++) {
            float logit = c.mix_start + *c.mix_warmth * learned[token];
            if (c.mix_cap > 0) logit = c.mix_cap * tanhf(logit / c.mix_cap);
            float gate = 1.0f / (1.0f + expf(-logit));
            float *to = weights + ((token / queries * layer.heads + head) * queries + token % queries) * 2;
            to[0] = gate, to[1] = 1 - gate;
        }
    }
}

// The new keys or values [B, T, G, D] of head g at the end of the `keys` that are kept of it.
static void append(const vf_tensor &kept, int64_t head, int64_t keys, int64_t g, const float *added, const vf_step &c) {
    const vf_mixture &a = c.attention;
    for (int64_t b = 0; b < a.batch; b++)
        for (int64_t t = 0; t < a.queries; t++) {
            int64_t row = keys - a.queries + t;
            float *to = (float *)kept.data + b * kept.stride[0] + head * kept.stride[1] + row * kept.stride[2];
            memcpy(to, added + ((b * a.queries + t) * a.kv_heads + g) * a.head_width, a.head_width * sizeof(float));
        }
}

// A sink in the softmax's sum takes its share of every output: what is left is sigmoid(logsumexp - sink).
static void leave_share(const vf_step &c) {
    const vf_mixture &a = c.attention;
    for (int64_t b = 0; b < a.batch; b++)
        for (int64_t h = 0; h < a.heads; h++)
            for (int64_t t = 0; t < a.queries; t++) {
                float logsumexp = a.logsumexp[(b * a.heads + h) * a.queries + t];
                if (logsumexp == -INFINITY) continue;  // nothing was read, and the output is 0
                float share = 1.0f / (1.0f + expf(c.sink[h] - logsumexp));
                float *out = c.layer.attended + ((b * a.queries + t) * a.heads + h) * a.head_width;
                for (int64_t d = 0; d < a.head_width; d++) out[d] *= share;
            }
}

int32_t layer_step(const vf_step &c) {
    layer_project(c.layer);
    for (int64_t g = 0; g < c.attention.kv_heads; g++) {
        const vf_kept *own = c.kept ? c.kept + g : nullptr;
        int64_t head = own ? 0 : g, keys = own ? own->keys : c.attention.keys;
        append(own ? own->k : c.attention.k, head, keys, g, c.layer.keys, c);
        append(own ? own->v : c.attention.v, head, keys, g, c.layer.values, c);
    }
    if (c.attention.branch_count == 2) mix_branches((float *)c.attention.weights, c);
    if (int32_t status = mixture_decode_kept(c.attention, c.kept)) return status;
    if (c.sink) leave_share(c);
    return layer_finish(c.layer);
}

}  // namespace VF_TARGET
