// Panels: the one layout every operand of a matrix product has here.
//
// A matrix [rows, columns] is cut into panels of NR columns; a panel is a dense array [rows][NR], and panels follow
// each other. A row of a panel is NV vectors, so a panel is read as it lies, whether the matrix is the right operand
// (sum over its rows), the left one (sum over its columns) or the transposed left one (sum over its rows).
// Columns beyond the matrix are 0. Packing is also where bfloat16 becomes float32 and where scale is applied.
#pragma once

#include "simd/vector.hpp"

namespace VF_TARGET {

VF_INLINE int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// panels[rows, columns] = scale * source rows; a row whose `keep` is 0 becomes 0 without being read (null: keep all).
// Rows from `rows` to `padded_rows` become 0.
template <typename T>
static void pack(float *panels, int64_t padded_rows, const T *source, int64_t row_stride, int64_t rows,
                 int64_t columns, float scale, const uint8_t *keep) {
    // NR is a multiple of LANES, so a vector never straddles two panels.
    int64_t whole = columns / LANES * LANES, padded = round_up(columns, NR);
    for (int64_t row = 0; row < padded_rows; row++) {
        float *to = panels + row * NR;
        const T *from = source + row * row_stride;
        // A row that is not kept may hold NaN or infinity: it must not even be multiplied by 0.
        bool zero = row >= rows || (keep && !keep[row]);
        int64_t column = 0;
        if (!zero)
            for (; column < whole; column += LANES)
                store(to + column / NR * padded_rows * NR + column % NR, load(from + column) * scale);
        // The columns up to the end of the panel are multiplied like all others: what they hold would reach the result.
        for (; column < padded; column++)
            to[column / NR * padded_rows * NR + column % NR] =
                zero || column >= columns ? 0.0f : to_float(from[column]) * scale;
    }
}

// Transposing LANES x LANES blocks in registers: log2(LANES) rounds of exchanges, each twice as wide as the one before,
// instead of LANES^2 scalar stores. One step: in every block of 2 GAP rows and lanes the off-diagonal halves change places.
template <int GAP>
VF_INLINE void exchange(Vec *row) {
    Ints upper = (lanes() & GAP) != 0;
    for (int i = 0; i < LANES; i++) {
        if (i & GAP) continue;
        Vec a = row[i], b = row[i + GAP];
        row[i] = upper ? swap_lanes<GAP>(b) : a;
        row[i + GAP] = upper ? b : swap_lanes<GAP>(a);
    }
}

VF_INLINE void transpose(Vec *row) {
    if constexpr (LANES > 8) exchange<8>(row);
    if constexpr (LANES > 4) exchange<4>(row);
    exchange<2>(row);
    exchange<1>(row);
}

// The transposed matrix in panels: panels of NR source rows, each [columns][NR]. Rows that are not kept become 0.
template <typename T>
static void pack_transposed(float *panels, int64_t padded_rows, const T *source, int64_t row_stride, int64_t rows,
                            int64_t columns, const uint8_t *keep) {
    // Here the columns are the depth of a product, which may be any number; the rows are padded instead, to whole
    // panels.
    for (int64_t row = 0; row < padded_rows; row += LANES) {
        float *to = panels + row / NR * columns * NR + row % NR;
        int64_t column = 0;
        for (; column + LANES <= columns; column += LANES) {
            Vec block[LANES];
            for (int i = 0; i < LANES; i++) {
                bool zero = row + i >= rows || (keep && !keep[row + i]);
                block[i] = zero ? Vec{} : load(source + (row + i) * row_stride + column);
            }
            transpose(block);
            for (int i = 0; i < LANES; i++) store(to + (column + i) * NR, block[i]);
        }
        for (; column < columns; column++)
            for (int i = 0; i < LANES; i++) {
                bool zero = row + i >= rows || (keep && !keep[row + i]);
                to[column * NR + i] = zero ? 0.0f : to_float(source[(row + i) * row_stride + column]);
            }
    }
}

// target rows = factor * panels[rows, columns], added to what they hold if `add`.
template <typename T>
static void unpack(T *target, int64_t row_stride, const float *panels, int64_t padded_rows, int64_t rows,
                   int64_t columns, const float *factor, float scale, bool add = false) {
    int64_t whole = columns / LANES * LANES;
    for (int64_t row = 0; row < rows; row++) {
        // By rows, not by panels: the tensor is written from front to back, and the panels lie in cache.
        const float *from = panels + row * NR;
        T *to = target + row * row_stride;
        float by = factor ? factor[row] * scale : scale;
        int64_t column = 0;
        for (; column < whole; column += LANES) {
            Vec x = load(from + column / NR * padded_rows * NR + column % NR) * by;
            store(to + column, add ? load(to + column) + x : x);
        }
        for (; column < columns; column++) {
            float x = from[column / NR * padded_rows * NR + column % NR] * by;
            put(to + column, add ? to_float(to[column]) + x : x);
        }
    }
}

}  // namespace VF_TARGET
