// Memory for the length of one call: one aligned piece, handed out front to back.
#pragma once

#include <stdlib.h>

#include "simd/vector.hpp"

namespace VF_TARGET {

struct Scratch {
    char *base = nullptr;
    size_t size = 0, used = 0;

    bool reserve(size_t bytes) {
        size = (bytes + 4095) / 4096 * 4096;
        base = size ? (char *)aligned_alloc(4096, size) : nullptr;
        return base || !size;
    }
    // 64 bytes apart: a cache line, and a whole vector of any target.
    template <typename T>
    T *take(size_t count) {
        T *piece = (T *)(base + used);
        used += padded<T>(count);
        return piece;
    }
    template <typename T>
    static size_t padded(size_t count) {
        return (count * sizeof(T) + 63) / 64 * 64;
    }
    void release() { free(base), base = nullptr; }
};

// 1 for every key that some query of batch row b may see. Others may hold anything and are packed as 0.
[[maybe_unused]] static void mark_visible(uint8_t *visible, int32_t *change, const int32_t *position, const int32_t *start,
                         int64_t queries, int64_t keys) {
    memset(change, 0, (size_t)(keys + 1) * sizeof(int32_t));
    for (int64_t t = 0; t < queries; t++)
        if (start[t] <= position[t]) change[start[t]]++, change[position[t] + 1]--;
    int32_t depth = 0;
    for (int64_t j = 0; j < keys; j++) visible[j] = (depth += change[j]) > 0;
}

}  // namespace VF_TARGET
