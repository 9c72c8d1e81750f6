// How attention is cut up: blocks of queries, blocks of keys, and the register tiles in them.
#pragma once

#include "simd/panels.hpp"
#include "varifocal.h"

namespace VF_TARGET {

// Queries in a block: a multiple of every MR, so 8 register tiles on AVX-512 and 16 on AVX2. 96 rows of Q, O or dO of
// width 128 take 48 KB each: what a block of queries needs fits L2 with the keys beside it.
constexpr int BLOCK = 96;
constexpr int TILES = BLOCK / MR;

// Keys in a block of the tile pass, and the panels they make.
// Forward: 96 x 256 scores are 96 KB, K and V of width 128 are 128 KB each. Together with Q and O well inside L2, and
// long enough to make the rescaling of O by a new maximum rare.
// Backward: five packed forms of 256 x 128 (K, K^T, V^T, dK, dV) are 640 KB, two tiles of scores 192 KB, three of
// queries 144 KB: about half of a 2 MB L2.
constexpr int KEYS = 256, PANELS = KEYS / NR;
static_assert(PANELS <= 32, "a tile's panels are told apart by the bits of 32");

// Packed keys of several kv heads share a wave while they fit here, so that few barriers end them; larger waves would
// push each other out of a shared L3.
constexpr int64_t WAVE_BYTES = 16 << 20;

VF_INLINE int32_t least(int64_t a, int64_t b) { return (int32_t)(a < b ? a : b); }
VF_INLINE int32_t most(int64_t a, int64_t b) { return (int32_t)(a > b ? a : b); }

// How many of `pairs` kv heads, each of `bytes` packed keys, make a wave.
VF_INLINE int64_t wave_of(int64_t pairs, int64_t bytes, int64_t limit) {
    int64_t wave = bytes ? limit / bytes : pairs;
    return wave < 1 ? 1 : wave > pairs ? pairs : wave;
}

// Row `row` of head h in batch row b.
template <typename T>
VF_INLINE T *row_at(const vf_tensor &x, int64_t b, int64_t h, int64_t row) {
    return (T *)x.data + b * x.stride[0] + h * x.stride[1] + row * x.stride[2];
}

// log(2^top * sum), rounded once.
VF_INLINE float natural_logsumexp(float top, float sum) {
    return (float)(0.6931471805599453 * (top + __builtin_log2((double)sum)));
}

// 1 for every key that some query of a batch row may see. Others may hold anything and are packed as 0.
// `change` has room for keys + 1.
[[maybe_unused]] static void mark_visible(uint8_t *visible, int32_t *change, const int32_t *position,
                                          const int32_t *start, int64_t queries, int64_t keys) {
    memset(change, 0, (size_t)(keys + 1) * sizeof(int32_t));
    for (int64_t t = 0; t < queries; t++)
        if (start[t] <= position[t]) change[start[t]]++, change[position[t] + 1]--;
    int32_t depth = 0;
    for (int64_t j = 0; j < keys; j++) visible[j] = (depth += change[j]) > 0;
}

}  // namespace VF_TARGET
