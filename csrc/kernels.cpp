#include "kernels.hpp"

namespace VF_TARGET {
const vf_kernels kernels = {
    pull_along,          mixture_forward,      mixture_backward,      mixture_decode,
    select_best,         pool_keys,            chosen_keys_forward,   chosen_keys_backward,
    chosen_blocks_forward, chosen_blocks_backward, pair_gate_forward, pair_gate_backward,
    norm_forward,        norm_backward,        swiglu_forward,        swiglu_backward,
    cross_entropy,
};
}
