// Chooses a target, checks arguments, calls its kernels.
#include "varifocal.h"

#include "attention/pair_gate_check.hpp"

#define VF_TARGET vf_none
#include "kernels.hpp"
#undef VF_TARGET

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

int32_t check(const vf_mixture &c) {
    const int64_t limit = 1 << 30;  // positions are int32
    const int64_t sizes[] = {c.batch, c.heads, c.kv_heads, c.queries, c.keys};
    for (int64_t size : sizes)
        if (size < 0 || size > limit) return VF_BAD_SIZE;
    if (c.head_width < 1 || c.head_width > 4096 || c.threads < 1) return VF_BAD_SIZE;
    if (c.branch_count < 1 || c.branch_count > VF_MAX_BRANCHES) return VF_BAD_SIZE;
    if (c.heads && (c.kv_heads < 1 || c.heads % c.kv_heads)) return VF_BAD_SIZE;
    if (c.dtype != VF_FLOAT32 && c.dtype != VF_BFLOAT16) return VF_BAD_DTYPE;
    for (int m = 0; m < c.branch_count; m++) {
        const vf_branch &branch = c.branch[m];
        if (branch.window < 0 || branch.prefix < 0) return VF_BAD_BRANCH;
        if (branch.width && !(branch.edge > 0 && branch.limit >= 0)) return VF_BAD_BRANCH;
    }
    if (c.batch * c.heads * c.queries == 0) return VF_OK;
    if (!c.q.data || !c.scale || !c.position || !c.start || !c.lse) return VF_BAD_POINTER;
    if (c.keys && (!c.k.data || !c.v.data)) return VF_BAD_POINTER;
    for (int64_t at = 0; at < c.batch * c.queries; at++)
        if (c.start[at] <= c.position[at] && (c.start[at] < 0 || c.position[at] >= c.keys)) return VF_BAD_POSITION;
    return VF_OK;
}

}  // namespace

const vf_kernels *vf_find_kernels(int32_t target) { return find(target); }

extern "C" {

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
        case VF_BAD_CHOICE: return "chosen keys or blocks are out of order or not visible, or documents overlap";
        case VF_BAD_FORM: return "a pair gate's form is unknown, or its threshold lies outside (0, 1)";
        case VF_BAD_LABEL: return "a label is no class";
        default: return "unknown status";
    }
}

int32_t vf_pull_along(int32_t target, const vf_pull *call) {
    const vf_kernels *kernels = find(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (call->batch < 0 || call->heads < 0 || call->queries < 0 || call->head_width < 1 || call->threads < 1)
        return VF_BAD_SIZE;
    if (call->dtype != VF_FLOAT32 && call->dtype != VF_BFLOAT16) return VF_BAD_DTYPE;
    if (call->batch * call->heads * call->queries == 0) return VF_OK;
    if (!call->grad_out.data || !call->out.data || !call->position || !call->start || !call->pull) return VF_BAD_POINTER;
    return kernels->pull_along(*call);
}

int32_t vf_mixture_forward(int32_t target, const vf_mixture *call) {
    const vf_kernels *kernels = find(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (int32_t status = check(*call)) return status;
    if (call->batch * call->heads * call->queries == 0) return VF_OK;
    if (!call->out.data) return VF_BAD_POINTER;
    // A few queries against a long cache: packing the keys would cost more than the products. Not when a backward
    // follows: it repeats the scores of mixture_forward to the last bit, those of mixture_decode only nearly.
    if (!call->norm && call->queries * (call->heads / call->kv_heads) <= 16 && call->queries <= 8)
        return kernels->mixture_decode(*call);
    return kernels->mixture_forward(*call);
}

int32_t vf_mixture_backward(int32_t target, const vf_mixture_grad *call) {
    const vf_kernels *kernels = find(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    const vf_mixture &c = call->forward;
    if (int32_t status = check(c)) return status;
    if (c.batch * c.kv_heads * c.keys > 0 && (!call->grad_k.data || !call->grad_v.data)) return VF_BAD_POINTER;
    if (c.batch * c.heads * c.queries > 0) {
        if (!call->grad_out.data || !call->grad_q.data || !c.norm || !call->pull) return VF_BAD_POINTER;
    }
    return kernels->mixture_backward(*call);
}

int32_t vf_pair_gate_forward(int32_t target, const vf_pair_gate *call) {
    const vf_kernels *kernels = find(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (int32_t status = check_pair_gate(*call)) return status;
    return call->batch * call->heads * call->queries > 0 ? kernels->pair_gate_forward(*call) : VF_OK;
}

int32_t vf_pair_gate_backward(int32_t target, const vf_pair_gate_grad *call) {
    const vf_kernels *kernels = find(target);
    if (!kernels) return VF_BAD_TARGET;
    if (!call) return VF_BAD_POINTER;
    if (int32_t status = check_pair_gate_grad(*call)) return status;
    return kernels->pair_gate_backward(*call);
}

}  // extern "C"
