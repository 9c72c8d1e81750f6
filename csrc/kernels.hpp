// The kernels of one target. Each target's object files define one table in their own namespace, from this one list.
#pragma once

#include "varifocal.h"

#define VF_KERNELS                                                                                                  \
    VF_KERNEL(find_delta, vf_delta)                                                                                 \
    VF_KERNEL(mixture_forward, vf_mixture)                                                                          \
    VF_KERNEL(mixture_backward, vf_mixture_grad)                                                                    \
    VF_KERNEL(mixture_decode, vf_mixture)                                                                           \
    VF_KERNEL(select_best, vf_select)                                                                               \
    VF_KERNEL(pool_keys, vf_pool)                                                                                   \
    VF_KERNEL(selected_keys_forward, vf_selected)                                                                   \
    VF_KERNEL(selected_keys_backward, vf_selected_grad)                                                             \
    VF_KERNEL(selected_blocks_forward, vf_selected)                                                                 \
    VF_KERNEL(selected_blocks_backward, vf_selected_grad)                                                           \
    VF_KERNEL(norm_forward, vf_norm)                                                                                \
    VF_KERNEL(norm_backward, vf_norm_grad)                                                                          \
    VF_KERNEL(swiglu_forward, vf_swiglu)                                                                            \
    VF_KERNEL(swiglu_backward, vf_swiglu_grad)                                                                      \
    VF_KERNEL(cross_entropy, vf_cross_entropy)                                                                      \
    VF_KERNEL(linear, vf_linear)                                                                                    \
    VF_KERNEL(layer_project, vf_layer)                                                                              \
    VF_KERNEL(layer_finish, vf_layer)                                                                               \
    VF_KERNEL(layer_step, vf_step)

#define VF_KERNEL(name, call) int32_t (*name)(const call &);
struct vf_kernels {
    VF_KERNELS
};
#undef VF_KERNEL

// The table of a target, or null if the processor cannot run it (targets.cpp).
const vf_kernels *vf_find_kernels(int32_t target);

// VF_OK if a mixture's arguments are right and mixture_decode may serve it (mixture_dispatch.cpp).
int32_t vf_check_decode(const vf_mixture &call);

// Only files that are compiled for a target have one; those that dispatch do without.
#ifdef VF_TARGET
namespace VF_TARGET {
#define VF_KERNEL(name, call) int32_t name(const call &);
VF_KERNELS
#undef VF_KERNEL
// The same as mixture_decode for key heads that each keep tokens of their own (null: all keep the same).
int32_t mixture_decode_kept(const vf_mixture &call, const vf_kept *kept);
extern const vf_kernels kernels;
}  // namespace VF_TARGET
#endif
