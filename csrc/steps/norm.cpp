// Root-mean-square norms, rotated or not: each row is read once and written once.
#include "kernels.hpp"
#include "simd/vector.hpp"

namespace VF_TARGET {

// Two chains of additions hide some of their latency; rows are as short as a head.
static float dot(const float *a, const float *b, int64_t width) {
    Vec even{}, odd{};
    int64_t d = 0;
    for (; d + 2 * LANES <= width; d += 2 * LANES) {
        even += load(a + d) * load(b + d);
        odd += load(a + d + LANES) * load(b + d + LANES);
    }
    float sum = sum_lanes(even + odd);
    for (; d < width; d++) sum = multiply_add(a[d], b[d], sum);
    return sum;
}

static float inverse_root(const float *x, const vf_norm &c) {
    return 1.0f / __builtin_sqrtf(dot(x, x, c.width) / (float)c.width + c.epsilon);
}

// (u, v) of the two halves turn into (u cos - v sin, v cos + u sin), with the angles of each half.
// `__restrict__` here and below: only if rows cannot overlap may the compiler use vectors without testing for it.
static void rotate(float *__restrict__ row, const float *__restrict__ cosines, const float *__restrict__ sines,
                   int64_t half) {
    for (int64_t d = 0; d < half; d++) {
        float low = row[d], high = row[d + half];
        row[d] = low * cosines[d] - high * sines[d];
        row[d + half] = high * cosines[d + half] + low * sines[d + half];
    }
}

// The inverse of `rotate` for halves that turn by the same angle, whose cosines and sines may carry a common factor.
static void restore(float *__restrict__ to, const float *__restrict__ row, const float *__restrict__ cosines,
                    const float *__restrict__ sines, int64_t half) {
    for (int64_t d = 0; d < half; d++) {
        float low = row[d], high = row[d + half];
        // Rotary embeddings of long contexts scale their tables, so the sum of squares need not be 1.
        float shrink = 1.0f / (cosines[d] * cosines[d] + sines[d] * sines[d]);
        to[d] = (low * cosines[d] + high * sines[d]) * shrink;
        to[d + half] = (high * cosines[d] - low * sines[d]) * shrink;
    }
}

// The transpose of `rotate`.
static void rotate_back(float *__restrict__ to, const float *__restrict__ row, const float *__restrict__ cosines,
                        const float *__restrict__ sines, int64_t half) {
    for (int64_t d = 0; d < half; d++) {
        float low = row[d], high = row[d + half];
        to[d] = low * cosines[d] + high * sines[d + half];
        to[d + half] = high * cosines[d + half] - low * sines[d];
    }
}

int32_t norm_forward(const vf_norm &c) {
#pragma omp parallel for num_threads(c.threads) schedule(static)
    for (int64_t token = 0; token < c.tokens; token++) {
        int64_t angle = c.cosines ? token % c.angles * c.width : 0;
        for (int64_t head = 0; head < c.heads; head++) {
            int64_t at = (token * c.heads + head) * c.width;
            const float *x = c.x + at;
            float *out = c.out + at, inverse = inverse_root(x, c);
            c.inverse[token * c.heads + head] = inverse;
            // In this order, as transformers does it: x r is rounded first, then the weight.
            for (int64_t d = 0; d < c.width; d++) out[d] = c.weight[d] * (x[d] * inverse);
            if (c.cosines) rotate(out, c.cosines + angle, c.sines + angle, c.width / 2);
        }
    }
    return VF_OK;
}

// y = x r of one row, from x or back from the output; r is returned.
static float normal_row(float *__restrict__ y, int64_t row, int64_t angle, const vf_norm &c) {
    int64_t at = row * c.width;
    // Whoever keeps x need not keep r: the row is read anyway.
    if (c.x) {
        float inverse = inverse_root(c.x + at, c);
        for (int64_t d = 0; d < c.width; d++) y[d] = c.x[at + d] * inverse;
        return inverse;
    }
    const float *out = c.out + at;
    if (c.cosines) {
        restore(y, out, c.cosines + angle, c.sines + angle, c.width / 2);
        out = y;
    }
    // Only where dispatch.cpp found that no weight is too small for this.
    for (int64_t d = 0; d < c.width; d++) y[d] = out[d] / c.weight[d];
    return c.inverse[row];
}

// With y = x r, r = 1 / sqrt(mean(x^2) + epsilon) and g = dy w:  dw = sum dy y,  dx = r (g - y mean(g y)).
// grad_x comes in as y.
static void row_backward(float *__restrict__ grad_x, float *__restrict__ grad_weight, const float *__restrict__ grad,
                         float inverse, const vf_norm &c) {
    Vec sum{};
    int64_t d = 0;
    for (; d + LANES <= c.width; d += LANES) {
        // dy y serves both sums, for the weight and for the mean.
        Vec to_weight = load(grad + d) * load(grad_x + d);
        store(grad_weight + d, load(grad_weight + d) + to_weight);
        sum += to_weight * load(c.weight + d);
    }
    float along = sum_lanes(sum);
    for (; d < c.width; d++) {
        float to_weight = grad[d] * grad_x[d];
        grad_weight[d] += to_weight;
        along = multiply_add(to_weight, c.weight[d], along);
    }
    along /= (float)c.width;
    for (d = 0; d < c.width; d++) grad_x[d] = inverse * (grad[d] * c.weight[d] - grad_x[d] * along);
}

int32_t norm_backward(const vf_norm_grad &g) {
    const vf_norm &c = g.forward;
    // A part of the tokens to each row of grad_weight: sums do not depend on the number of threads.
#pragma omp parallel for num_threads(c.threads) schedule(static)
    for (int64_t part = 0; part < g.parts; part++) {
        float *grad_weight = g.grad_weight + part * c.width;
        for (int64_t d = 0; d < c.width; d++) grad_weight[d] = 0;
        for (int64_t token = c.tokens * part / g.parts; token < c.tokens * (part + 1) / g.parts; token++) {
            int64_t angle = c.cosines ? token % c.angles * c.width : 0;
            for (int64_t head = 0; head < c.heads; head++) {
                int64_t row = token * c.heads + head, at = row * c.width;
                const float *grad = g.grad_out + at;
                float inverse = normal_row(g.grad_x + at, row, angle, c);
                // On the stack, because grad_x holds y meanwhile.
                float turned[VF_MAX_ROTATED];
                if (c.cosines) {
                    rotate_back(turned, grad, c.cosines + angle, c.sines + angle, c.width / 2);
                    grad = turned;
                }
                row_backward(g.grad_x + at, grad_weight, grad, inverse, c);
            }
        }
    }
    return VF_OK;
}

}  // namespace VF_TARGET
