// Means of blocks of keys. A block's row is (index of its first key) / block: blocks of one document follow each
// other row by row, and of two documents only the unfinished last block of the first, which no query may select, can
// share a row with the second.
#pragma once

#include "simd/vector.hpp"

namespace VF_TARGET {

// mean (+)= key / block. Bulk and one-by-one pooling both add in this order, so they agree bit for bit.
template <typename T>
VF_INLINE void add_to_mean(float *mean, const T *key, int64_t width, int32_t block, bool first) {
    const float part = 1.0f / (float)block;
    int64_t d = 0;
    for (; d + LANES <= width; d += LANES) {
        Vec before = first ? Vec{} : load(mean + d);
        store(mean + d, before + load(key + d) * part);
    }
    for (; d < width; d++) mean[d] = (first ? 0.0f : mean[d]) + to_float(key[d]) * part;
}

// The blocks before its own that a query may select: rows [first, end) of the pooled keys.
struct BlockRange {
    int32_t first, end;
};
VF_INLINE BlockRange earlier_blocks(int32_t position, int32_t start, int32_t block) {
    if (start > position) return {0, 0};
    int32_t first = start / block;
    return {first, first + (position - start) / block};
}

}  // namespace VF_TARGET
