// What the library is: its targets, its version, the words for its statuses. Arguments are checked, and kernels called,
// by attention/*dispatch.cpp and steps/dispatch.cpp.
#include <string.h>

#include "kernels.hpp"

#define VF_DECLARE(name)                \
    namespace vf_##name {               \
    extern const vf_kernels kernels;    \
    }
#ifdef VF_HAVE_AVX512
VF_DECLARE(avx512)
#endif
#ifdef VF_HAVE_AVX2
VF_DECLARE(avx2)
#endif
#ifdef VF_HAVE_NEON
VF_DECLARE(neon)
#endif
VF_DECLARE(portable)

namespace {

bool always() { return true; }
#if defined(__x86_64__) || defined(__i386__)
bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma");
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

struct Target {
    const char *name;
    bool (*runs)();
    const vf_kernels *kernels;
};

const Target targets[] = {
#ifdef VF_HAVE_AVX512
    {"avx512", has_avx512, &vf_avx512::kernels},
#endif
#ifdef VF_HAVE_AVX2
    {"avx2", has_avx2, &vf_avx2::kernels},
#endif
#ifdef VF_HAVE_NEON
    {"neon", always, &vf_neon::kernels},
#endif
    {"portable", always, &vf_portable::kernels},
};
constexpr int32_t target_count = sizeof(targets) / sizeof(targets[0]);

const vf_kernels *find(int32_t target) {
    if (target < 0 || target >= target_count || !targets[target].runs()) return nullptr;
    return targets[target].kernels;
}

struct Named {
    const char *name;
    int64_t size;
};

#define VF_SIZE(name) {#name, (int64_t)sizeof(name)},
const Named structs[] = {
    VF_SIZE(vf_tensor) VF_SIZE(vf_branch) VF_SIZE(vf_pair_gate) VF_SIZE(vf_distance_bias) VF_SIZE(vf_mixture)
    VF_SIZE(vf_delta) VF_SIZE(vf_mixture_grad) VF_SIZE(vf_select) VF_SIZE(vf_pool) VF_SIZE(vf_selected)
    VF_SIZE(vf_selected_grad) VF_SIZE(vf_norm) VF_SIZE(vf_norm_grad) VF_SIZE(vf_swiglu) VF_SIZE(vf_swiglu_grad)
    VF_SIZE(vf_cross_entropy) VF_SIZE(vf_matrix) VF_SIZE(vf_linear) VF_SIZE(vf_layer) VF_SIZE(vf_kept)
    VF_SIZE(vf_step)
};
#undef VF_SIZE

}  // namespace

const vf_kernels *vf_find_kernels(int32_t target) { return find(target); }

extern "C" {

int32_t vf_abi_version(void) { return VF_ABI_VERSION; }
int64_t vf_struct_size(const char *name) {
    for (const Named &one : structs)
        if (name && !strcmp(name, one.name)) return one.size;
    return -1;
}

int32_t vf_target_count(void) { return target_count; }
const char *vf_target_name(int32_t target) {
    return target >= 0 && target < target_count ? targets[target].name : nullptr;
}
int32_t vf_target_runs(int32_t target) { return find(target) != nullptr; }

const char *vf_status_text(int32_t status) {
    switch (status) {
        case VF_OK: return "ok";
        case VF_BAD_TARGET: return "unknown target, or one this processor cannot run";
        case VF_BAD_SIZE: return "a size is out of range, or heads are not a multiple of kv heads";
        case VF_BAD_POINTER: return "a required pointer is null";
        case VF_BAD_POSITION: return "a query's start or position lies outside the keys";
        case VF_BAD_BRANCH: return "a branch has a negative window, prefix or limit, or an edge that is not positive";
        case VF_NO_MEMORY: return "out of memory for scratch space";
        case VF_BAD_DTYPE: return "dtype must be float32 or bfloat16";
        case VF_BAD_SELECTION: return "selected keys or blocks are out of order or not visible, or documents overlap";
        case VF_BAD_SCORE: return "a score is unknown, its threshold lies outside (0, 1), or its table is empty";
        case VF_BAD_LABEL: return "a label is negative or not below the number of classes";
        default: return "unknown status";
    }
}

}  // extern "C"
