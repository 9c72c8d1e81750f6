// delta = dO . O of every query: all that a backward needs to know of outputs.
#include <omp.h>

#include "kernels.hpp"
#include "attention/tile.hpp"

namespace VF_TARGET {

// Rows at once: a chain of additions waits 4 cycles for each, and two units take one each cycle, so 8 chains keep both
// busy.
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
static void run(const vf_delta &c) {
    int64_t tasks_a_head = (c.queries + ROWS - 1) / ROWS;
#pragma omp parallel for num_threads(c.threads) schedule(static)
    for (int64_t task = 0; task < c.batch * c.heads * tasks_a_head; task++) {
        int64_t head = task / tasks_a_head, first = task % tasks_a_head * ROWS, b = head / c.heads, h = head % c.heads;
        int count = least(ROWS, c.queries - first);
        float *delta = c.delta + head * c.queries + first;
        dot_rows(delta, (const T *)row_at<T>(c.grad_out, b, h, first), c.grad_out.stride[2],
                 (const T *)row_at<T>(c.out, b, h, first), c.out.stride[2], count, c.head_width);
        // A query that sees no key may come with any dO.
        for (int i = 0; i < count; i++)
            if (c.start[b * c.queries + first + i] > c.position[b * c.queries + first + i]) delta[i] = 0;
    }
}

int32_t find_delta(const vf_delta &call) {
    if (call.dtype == VF_BFLOAT16)
        run<uint16_t>(call);
    else
        run<float>(call);
    return VF_OK;
}

}  // namespace VF_TARGET
