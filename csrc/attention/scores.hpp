// All scores, by their number in the C interface.
#pragma once

#include "attention/distance_bias.hpp"
#include "attention/pair_gate.hpp"

namespace VF_TARGET {

// Calls run(tag) with a tag whose type is the score's policy.
template <typename Score>
struct Tag {
    typedef Score Policy;
};

template <typename Run>
VF_INLINE int32_t with_score(int32_t score, Run run) {
    switch (score) {
        case VF_SCORE_DOT: return run(Tag<DotScore>{});
        case VF_SCORE_PAIR_PRODUCT: return run(Tag<PairGate<VF_SCORE_PAIR_PRODUCT>>{});
        case VF_SCORE_PAIR_LOG: return run(Tag<PairGate<VF_SCORE_PAIR_LOG>>{});
        case VF_SCORE_PAIR_THRESHOLD: return run(Tag<PairGate<VF_SCORE_PAIR_THRESHOLD>>{});
        case VF_SCORE_DISTANCE_BIAS: return run(Tag<DistanceBias>{});
        default: return VF_BAD_SCORE;
    }
}

}  // namespace VF_TARGET
