// The cross entropy of rows of logits, which turn into their exponentials where they lie.
#include <math.h>

#include "kernels.hpp"
#include "simd/vector.hpp"

namespace VF_TARGET {

// Once over the row: its largest entry; NaN if an entry is NaN or +infinity.
static float highest(const float *row, int64_t classes) {
    Vec most = splat(-INFINITY);
    Ints strange{};
    int64_t at = 0;
    for (; at + LANES <= classes; at += LANES) {
        Vec x = load(row + at);
        most = max(most, x);
        // max() forgets a NaN at the next entry, so NaN is looked for by itself.
        strange |= x != x;
    }
    float found = max_lanes(most);
    bool bad = false;
    for (int lane = 0; lane < LANES; lane++) bad |= strange[lane] != 0;
    for (; at < classes; at++) {
        found = row[at] > found ? row[at] : found;
        bad |= row[at] != row[at];
    }
    return bad || found == INFINITY ? NAN : found;
}

// exp(row - highest) in place, and its sum.
static float exponentials(float *row, int64_t classes, float highest) {
    // Two sums: rows are 150,000 long, and one chain of additions would be slower than memory.
    Vec even{}, odd{};
    int64_t at = 0;
    for (; at + 2 * LANES <= classes; at += 2 * LANES) {
        Vec x = exp2((load(row + at) - highest) * LOG2E), y = exp2((load(row + at + LANES) - highest) * LOG2E);
        even += x, odd += y;
        store(row + at, x), store(row + at + LANES, y);
    }
    float sum = sum_lanes(even + odd);
    for (; at < classes; at++) {
        row[at] = exp2(splat((row[at] - highest) * LOG2E))[0];
        sum += row[at];
    }
    return sum;
}

int32_t cross_entropy(const vf_cross_entropy &c) {
#pragma omp parallel for num_threads(c.threads) schedule(static)
    for (int64_t i = 0; i < c.rows; i++) {
        float *row = c.logits + i * c.classes, most = highest(row, c.classes);
        if (most != most) {
            c.losses[i] = NAN, c.shares[i] = NAN;
            continue;
        }
        // The label's logit is read before exponentials overwrite it.
        float target = row[c.labels[i]], sum = exponentials(row, c.classes, most);
        // In double, so that the loss is rounded once. The share makes the exponentials probabilities, for the
        // gradient.
        c.losses[i] = (float)(log((double)sum) + ((double)most - (double)target));
        c.shares[i] = 1.0f / sum;
    }
    return VF_OK;
}

}  // namespace VF_TARGET
