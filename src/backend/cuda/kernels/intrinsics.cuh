// What the hardware does in one instruction and NVRTC's bare language has no name for. The emulator has its own.
#pragma once

typedef signed char i8;
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARP 32
#define FULL 0xffffffffu

#ifndef EMULATOR

#define KERNEL(name, ...) extern "C" __global__ void __launch_bounds__(256, 1) name(__VA_ARGS__)
#define DYNAMIC_SHARED(name) extern __shared__ float name[]
#define SHARED(type, name) __shared__ type name

__device__ __forceinline__ int dot4(int a, int b, int sum) {
    int out;
    asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(sum));
    return out;
}

// sums += a · b by a warp's tensor cores, signed bytes: `a` has 8 rows of 16, of which a lane holds four in row lane / 4 from
// column lane % 4 * 4 on, `b` 8 columns of 16 likewise; a lane's sums are of row lane / 4, columns lane % 4 * 2 and the next.
__device__ __forceinline__ void multiply_tile(int *sums, int a, int b) {
    asm volatile("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(sums[0]), "+r"(sums[1])
        : "r"(a), "r"(b));
}

__device__ __forceinline__ float half_to_float(u16 bits) {
    float out;
    asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(bits));
    return out;
}

__device__ __forceinline__ u16 float_to_half(float value) {
    u16 out;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out) : "f"(value));
    return out;
}

__device__ __forceinline__ u64 nanoseconds() {
    u64 out;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(out));
    return out;
}

__device__ __forceinline__ void pause() { asm volatile("nanosleep.u32 100;"); }

// Reads what the other side of the bus wrote, and orders what follows after it.
__device__ __forceinline__ u32 load_acquire(const u32 *at) {
    u32 out;
    asm volatile("ld.acquire.sys.u32 %0, [%1];" : "=r"(out) : "l"(at) : "memory");
    return out;
}

// Writes for the other side of the bus, after all that came before.
__device__ __forceinline__ void store_release(u32 *at, u32 value) {
    asm volatile("st.release.sys.u32 [%0], %1;" : : "l"(at), "r"(value) : "memory");
}

// In a fixed order, the same value for all lanes.
__device__ __forceinline__ float warp_sum(float v) {
    for (int step = WARP / 2; step; step /= 2) v += __shfl_xor_sync(FULL, v, step);
    return v;
}

__device__ __forceinline__ float warp_max(float v) {
    for (int step = WARP / 2; step; step /= 2) v = fmaxf(v, __shfl_xor_sync(FULL, v, step));
    return v;
}

#endif
