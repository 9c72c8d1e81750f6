// Blocks of queries and the register tiles in them, as all kernels cut them.
#pragma once

#include "simd/panels.hpp"

namespace VF_TARGET {

// Queries in a block: a multiple of every MR, so 8 register tiles on AVX-512. 96 rows of Q, O or dO of width 128 take
// 48 KB each: the working set of a block fits the 1-2 MB of L2 with the keys beside it.
constexpr int BLOCK = 96;
constexpr int TILES = BLOCK / MR;

VF_INLINE int32_t least(int64_t a, int64_t b) { return (int32_t)(a < b ? a : b); }
VF_INLINE int32_t most(int64_t a, int64_t b) { return (int32_t)(a > b ? a : b); }

}  // namespace VF_TARGET
