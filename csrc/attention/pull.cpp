// dO . O of every query.
#include <omp.h>

#include "kernels.hpp"
#include "simd/vector.hpp"

namespace VF_TARGET {

// Rows at once: enough to hide the latency of one chain of additions.
static constexpr int ROWS = 8;

// Each dot product is summed one product after the other, as a register tile sums dO . v: where a query has one key of
// weight 1, O = v, and dP - delta comes out as exactly 0.
template <typename T>
static void dot_rows(float *dots, const T *a, int64_t a_stride, const T *b, int64_t b_stride, int count,
                     int64_t width) {
    float sum[ROWS] = {};
    const T *x[ROWS], *y[ROWS];
    for (int i = 0; i < ROWS; i++) {
        int64_t real = i < count ? i : 0;
        x[i] = a + real * a_stride, y[i] = b + real * b_stride;
    }
    for (int64_t d = 0; d < width; d++)
        for (int i = 0; i < ROWS; i++) sum[i] = multiply_add(to_float(x[i][d]), to_float(y[i][d]), sum[i]);
    for (int i = 0; i < count; i++) dots[i] = sum[i];
}

template <typename T>
static void run(const vf_pull &c) {
    int64_t tasks_a_head = (c.queries + ROWS - 1) / ROWS;
#pragma omp parallel for num_threads(c.threads) schedule(static)
    for (int64_t task = 0; task < c.batch * c.heads * tasks_a_head; task++) {
        int64_t head = task / tasks_a_head, first = task % tasks_a_head * ROWS, b = head / c.heads, h = head % c.heads;
        int count = (int)(c.queries - first < ROWS ? c.queries - first : ROWS);
        auto row = [&](const vf_tensor &x) {
            return (const T *)x.data + b * x.stride[0] + h * x.stride[1] + first * x.stride[2];
        };
        float *pull = c.pull + head * c.queries + first;
        dot_rows(pull, row(c.grad_out), c.grad_out.stride[2], row(c.out), c.out.stride[2], count, c.head_width);
        // A query that sees no key may come with any dO.
        for (int i = 0; i < count; i++)
            if (c.start[b * c.queries + first + i] > c.position[b * c.queries + first + i]) pull[i] = 0;
    }
}

int32_t pull_along(const vf_pull &call) {
    if (call.dtype == VF_BFLOAT16)
        run<uint16_t>(call);
    else
        run<float>(call);
    return VF_OK;
}

}  // namespace VF_TARGET
