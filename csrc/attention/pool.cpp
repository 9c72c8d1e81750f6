// Keeps the means of blocks of keys up to date: O(1) work for each new key.
#include <omp.h>

#include "kernels.hpp"
#include "attention/pooled.hpp"

namespace VF_TARGET {

template <typename T>
static int32_t run(const vf_pool &call) {
#pragma omp parallel for num_threads(call.threads) schedule(static)
    for (int64_t pair = 0; pair < call.batch * call.kv_heads; pair++) {
        int64_t b = pair / call.kv_heads, g = pair % call.kv_heads;
        for (int64_t t = 0; t < call.new_keys; t++) {
            int32_t position = call.position[b * call.new_keys + t], start = call.start[b * call.new_keys + t];
            if (start > position) continue;  // padding belongs to no block
            int32_t place = (position - start) % call.block;
            int64_t row = (position - place) / call.block;
            float *mean = (float *)call.pooled.data + b * call.pooled.stride[0] + g * call.pooled.stride[1] +
                          row * call.pooled.stride[2];
            const T *key = (const T *)call.k.data + b * call.k.stride[0] + g * call.k.stride[1] + t * call.k.stride[2];
            add_to_mean(mean, key, call.head_width, call.block, place == 0);
        }
    }
    return VF_OK;
}

int32_t pool_keys(const vf_pool &call) {
    return call.dtype == VF_BFLOAT16 ? run<uint16_t>(call) : run<float>(call);
}

}  // namespace VF_TARGET
