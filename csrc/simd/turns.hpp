// Tasks that add to the same rows take turns, in task order: sums come out the same whatever the threads do, without
// a copy of the rows per task.
//
// Each task of a line walks the same steps 0, 1, 2, ... (it may skip some) and adds to shared rows at a step only
// after the task before it is past that step. Tasks must be started in line order, so the one waited for is always
// running or done, and tasks that run together follow each other like a wave, one step apart.
#pragma once

#include <sched.h>
#include <stdint.h>

namespace VF_TARGET {

struct Turn {
    const int64_t *before;  // steps the task before has passed; null for the first of a line
    int64_t *mine;

    // Returns once every earlier task is past `step`.
    void wait(int64_t step) const {
        // Acquire here and release below: whatever the earlier task added to the rows is seen before anything is added
        // to them.
        if (!before) return;
        for (int spins = 0; __atomic_load_n(before, __ATOMIC_ACQUIRE) <= step; spins++)
            // The other thread may need this very core.
            if (spins > 1000) sched_yield();
    }
    // Only after wait(step).
    void pass(int64_t step) const { __atomic_store_n(mine, step + 1, __ATOMIC_RELEASE); }
};

}  // namespace VF_TARGET
