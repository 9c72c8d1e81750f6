// Argument checks of the pair gate, apart from dispatch so that each family keeps its own.
#pragma once

#include "varifocal.h"

int32_t check_pair_gate(const vf_pair_gate &call);
int32_t check_pair_gate_grad(const vf_pair_gate_grad &call);
