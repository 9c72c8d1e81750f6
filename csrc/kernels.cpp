#include "kernels.hpp"

namespace VF_TARGET {
#define VF_KERNEL(name, call) name,
const vf_kernels kernels = {VF_KERNELS};
#undef VF_KERNEL
}  // namespace VF_TARGET
