// out = matrix x + bias for a few vectors x.
#include "kernels.hpp"
#include "steps/few_rows.hpp"

namespace VF_TARGET {

int32_t linear(const vf_linear &c) {
    const vf_matrix &m = c.matrix;
    int64_t step = rows_of_task(m), tasks = (m.rows + step - 1) / step;
    int64_t threads = tasks < c.threads ? tasks : c.threads;
#pragma omp parallel for num_threads((int)(threads < 1 ? 1 : threads)) schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++) {
        int64_t end = (task + 1) * step < m.rows ? (task + 1) * step : m.rows;
        for (int64_t row = task * step; row < end; row++) {
            float found[VF_MOST_FEW];
            multiply(found, m, row, c.x, m.columns, c.vectors);
            for (int64_t r = 0; r < c.vectors; r++) c.out[r * m.rows + row] = found[r];
        }
    }
    return VF_OK;
}

}  // namespace VF_TARGET
