// Memory for the length of one call: one aligned piece, handed out front to back, given back when the call is over.
//
// What a call needs is written down once, as a function that takes its arrays from a Space. It runs twice: over nothing,
// to find out how much that is, and over the memory itself.
#pragma once

#include <stdlib.h>

#include "simd/vector.hpp"

namespace VF_TARGET {

struct Space {
    // An integer, because a Space also measures: then it starts at 0, and arithmetic on a null pointer is undefined.
    uintptr_t base = 0;
    size_t used = 0;

    // 64 bytes apart: a cache line, and a whole vector of any target.
    template <typename T>
    T *take(int64_t count) {
        T *piece = (T *)(base + used);
        used += ((size_t)count * sizeof(T) + 63) / 64 * 64;
        return piece;
    }
};

// Bytes that `lay_out(Space &)` takes.
template <typename LayOut>
VF_INLINE size_t measure(LayOut lay_out) {
    Space space;
    lay_out(space);
    return space.used;
}

// One small piece is kept for the next call. Fresh memory costs a page fault for every 4 KB, and a decoded token makes
// one such call for each layer: the faults would take as long as its attention. Calls that overlap find none and
// allocate.
constexpr size_t KEPT_BYTES = 2 << 20;
inline char *kept_piece = nullptr;

struct Scratch {
    char *base = nullptr;
    bool small = false;

    Scratch() = default;
    Scratch(const Scratch &) = delete;
    Scratch &operator=(const Scratch &) = delete;
    ~Scratch() { free(small ? __atomic_exchange_n(&kept_piece, base, __ATOMIC_ACQ_REL) : base); }

    // False if there is no memory. Pages, so that no two calls share one.
    template <typename LayOut>
    bool lay_out(LayOut lay_out) {
        // aligned_alloc wants a multiple of the alignment, and for 0 bytes it may return null, which is no failure
        // here.
        size_t bytes = (measure(lay_out) + 4095) / 4096 * 4096;
        small = bytes && bytes <= KEPT_BYTES;
        if (small) bytes = KEPT_BYTES, base = __atomic_exchange_n(&kept_piece, (char *)nullptr, __ATOMIC_ACQ_REL);
        if (bytes && !base) base = (char *)aligned_alloc(4096, bytes);
        if (bytes && !base) return false;
        Space space = {(uintptr_t)base};
        lay_out(space);
        return true;
    }
};

}  // namespace VF_TARGET
