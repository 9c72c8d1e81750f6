// The kernels of one target. Each target's object files define one table in their own namespace.
#pragma once

#include "varifocal.h"

struct vf_kernels {
    int32_t (*pull_along)(const vf_pull &);
    int32_t (*mixture_forward)(const vf_mixture &);
    int32_t (*mixture_backward)(const vf_mixture_grad &);
    int32_t (*mixture_decode)(const vf_mixture &);
    int32_t (*select_best)(const vf_select &);
    int32_t (*pool_keys)(const vf_pool &);
    int32_t (*chosen_keys_forward)(const vf_chosen &);
    int32_t (*chosen_keys_backward)(const vf_chosen_grad &);
    int32_t (*chosen_blocks_forward)(const vf_chosen &);
    int32_t (*chosen_blocks_backward)(const vf_chosen_grad &);
    int32_t (*pair_gate_forward)(const vf_pair_gate &);
    int32_t (*pair_gate_backward)(const vf_pair_gate_grad &);
    int32_t (*norm_forward)(const vf_norm &);
    int32_t (*norm_backward)(const vf_norm_grad &);
    int32_t (*swiglu_forward)(const vf_swiglu &);
    int32_t (*swiglu_backward)(const vf_swiglu_grad &);
    int32_t (*cross_entropy)(const vf_cross_entropy &);
};

// The table of a target, or null if the processor cannot run it (dispatch.cpp).
const vf_kernels *vf_find_kernels(int32_t target);

namespace VF_TARGET {
int32_t pull_along(const vf_pull &);
int32_t mixture_forward(const vf_mixture &);
int32_t mixture_backward(const vf_mixture_grad &);
int32_t mixture_decode(const vf_mixture &);
int32_t select_best(const vf_select &);
int32_t pool_keys(const vf_pool &);
int32_t chosen_keys_forward(const vf_chosen &);
int32_t chosen_keys_backward(const vf_chosen_grad &);
int32_t chosen_blocks_forward(const vf_chosen &);
int32_t chosen_blocks_backward(const vf_chosen_grad &);
int32_t pair_gate_forward(const vf_pair_gate &);
int32_t pair_gate_backward(const vf_pair_gate_grad &);
int32_t norm_forward(const vf_norm &);
int32_t norm_backward(const vf_norm_grad &);
int32_t swiglu_forward(const vf_swiglu &);
int32_t swiglu_backward(const vf_swiglu_grad &);
int32_t cross_entropy(const vf_cross_entropy &);
extern const vf_kernels kernels;
}  // namespace VF_TARGET
