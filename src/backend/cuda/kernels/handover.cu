// Handing over to the host and back, through memory that both see. A step numbers its hand-overs from `*base` on; a flag
// holds the number of the last one done.
#include "common.cuh"

__device__ __forceinline__ bool is_reached(u32 flag, u32 number) { return (int)(flag - number) >= 0; }

// Copies `n` values to `to`, and as many of `more` to `to_more` where there are any; the last block to finish raises
// `flag`. `ticket` is 0 before and after.
KERNEL(hand_over, const float *from, float *to, const float *more, float *to_more, u64 n, u32 *ticket, u32 *flag,
       const u32 *base, u32 number) {
    __shared__ u32 is_last;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) {
        to[i] = from[i];
        if (more) to_more[i] = more[i];
    }
    __threadfence_system();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(ticket, 1u) == gridDim.x - 1;
    __syncthreads();
    if (is_last && threadIdx.x == 0) {
        *ticket = 0;
        __threadfence_system();
        store_release(flag, *base + number);
    }
}

// Waits for the host to raise `flag`, no longer than `patience` nanoseconds; past them, or where the host has given up,
// the rest of the step runs on whatever there is and `failed` says so.
KERNEL(await, const u32 *flag, const u32 *base, u32 number, const u32 *given_up, u32 *failed, u64 patience) {
    u64 start = nanoseconds();
    while (!is_reached(load_acquire(flag), *base + number)) {
        if (load_acquire(given_up)) return;
        if (nanoseconds() - start > patience) {
            store_release(failed, number + 1);
            return;
        }
        pause();
    }
}

// Copies what the host has handed over.
KERNEL(take_over, const float *from, float *to, u64 n) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (u64)gridDim.x * blockDim.x) to[i] = from[i];
}
