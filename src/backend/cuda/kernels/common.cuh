// What several kernels share: sums of a warp in a fixed order, activations, and the weight formats.
#pragma once
#include "intrinsics.cuh"

#define INFINITE __int_as_float(0x7f800000)

// The sum over a block of 256 threads, for all of them; `shared` holds a value a warp.
__device__ __forceinline__ float block_sum(float v, float *shared) {
    v = warp_sum(v);
    __syncthreads();
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = v;
    __syncthreads();
    float sum = 0;
    for (int i = 0; i < (int)(blockDim.x / WARP); i++) sum += shared[i];
    return sum;
}

enum { RELU, SILU, GELU };

__device__ __forceinline__ float activate(float v, int activation) {
    // NaN is not zeroed: a broken model must show.
    if (activation == RELU) return v <= 0 ? 0.f : v;
    if (activation == SILU) return v / (1.f + expf(-v));
    return 0.5f * v * (1.f + tanhf(0.7978845608028654f * (v + 0.044715f * v * v * v)));
}

// Rows of activations: as float32, and as integers of 24 bits in three signed bytes, which lose nothing that float32 holds
// of the largest of 32: x = d * (65536 * high + 256 * middle + low), with a scale for each 32 and the sum of each 16.
struct Rows {
    const float *values; // (n_tokens, n_cols)
    const i8 *high;      // (n_tokens, n_cols)
    const i8 *middle;    // (n_tokens, n_cols)
    const i8 *low;       // (n_tokens, n_cols)
    const float *d;      // (n_tokens, n_cols / 32)
    const int *sum;      // (n_tokens, n_cols / 16)
};

// 32 weights as signed bytes, each half with a scale and an offset: w = scale * q + min.
struct Group {
    int q[8];
    float scale[2], min[2];
};

__device__ __forceinline__ u32 word_at(const u8 *p) { // p is even
    const u16 *halves = (const u16 *)p;
    return halves[0] | (u32)halves[1] << 16;
}

__device__ __forceinline__ float half_at(const u8 *p) { return half_to_float(*(const u16 *)p); }

#define NIBBLES 0x0f0f0f0fu

__device__ __forceinline__ void both(Group &w, float scale, float min) {
    w.scale[0] = w.scale[1] = scale;
    w.min[0] = w.min[1] = min;
}

// A quantised format: blocks of GROUPS groups; `load` takes one of them apart.
struct Q4_0 {
    enum { GROUPS = 1, BYTES = 18, HAS_MIN = 0 };
    static __device__ __forceinline__ void load(const u8 *block, int, Group &w) {
        for (int i = 0; i < 4; i++) {
            u32 v = word_at(block + 2 + 4 * i);
            w.q[i] = ((v & NIBBLES) + 0x78787878u) ^ 0x80808080u; // less 8 in each byte
            w.q[i + 4] = ((v >> 4 & NIBBLES) + 0x78787878u) ^ 0x80808080u;
        }
        both(w, half_at(block), 0);
    }
};

struct Q4_1 {
    enum { GROUPS = 1, BYTES = 20, HAS_MIN = 1 };
    static __device__ __forceinline__ void load(const u8 *block, int, Group &w) {
        for (int i = 0; i < 4; i++) {
            u32 v = *(const u32 *)(block + 4 + 4 * i);
            w.q[i] = v & NIBBLES;
            w.q[i + 4] = v >> 4 & NIBBLES;
        }
        both(w, half_at(block), half_at(block + 2));
    }
};

struct Q8_0 {
    enum { GROUPS = 1, BYTES = 34, HAS_MIN = 0 };
    static __device__ __forceinline__ void load(const u8 *block, int, Group &w) {
        for (int i = 0; i < 8; i++) w.q[i] = word_at(block + 2 + 4 * i);
        both(w, half_at(block), 0);
    }
};

struct Q4_K {
    enum { GROUPS = 8, BYTES = 144, HAS_MIN = 1 };
    static __device__ __forceinline__ void load(const u8 *block, int g, Group &w) {
        const u8 *s = block + 4;
        int scale = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | s[g - 4] >> 6 << 4;
        int min = g < 4 ? s[g + 4] & 63 : s[g + 4] >> 4 | s[g] >> 6 << 4;
        for (int i = 0; i < 8; i++) {
            w.q[i] = *(const u32 *)(block + 16 + g / 2 * 32 + 4 * i) >> (g % 2 * 4) & NIBBLES;
        }
        both(w, half_at(block) * scale, -half_at(block + 2) * min);
    }
};

struct Q6_K {
    enum { GROUPS = 8, BYTES = 210, HAS_MIN = 0 };
    static __device__ __forceinline__ void load(const u8 *block, int g, Group &w) {
        int half = g / 4, k = g % 4;
        for (int i = 0; i < 8; i++) {
            u32 low = word_at(block + half * 64 + k % 2 * 32 + 4 * i) >> (k / 2 * 4) & NIBBLES;
            u32 high = word_at(block + 128 + half * 32 + 4 * i) >> (2 * k) & 0x03030303u;
            w.q[i] = ((low | high << 4) + 0x60606060u) ^ 0x80808080u; // less 32 in each byte
        }
        const i8 *scales = (const i8 *)block + 192 + half * 8 + k * 2;
        float d = half_at(block + 208);
        w.scale[0] = d * scales[0];
        w.scale[1] = d * scales[1];
        w.min[0] = w.min[1] = 0;
    }
};

// Any other quantised format, taken apart once at load.
struct Groups {
    enum { GROUPS = 1, BYTES = 48, HAS_MIN = 1 };
    static __device__ __forceinline__ void load(const u8 *block, int, Group &w) {
        const int *q = (const int *)block;
        for (int i = 0; i < 8; i++) w.q[i] = q[i];
        const float *f = (const float *)(block + 32);
        w.scale[0] = f[0];
        w.scale[1] = f[1];
        w.min[0] = f[2];
        w.min[1] = f[3];
    }
};

// Eight weights of a row of floats from column `i` on; those past the end are zero.
struct F32 {
    static __device__ __forceinline__ u32 bytes() { return 4; }
    static __device__ __forceinline__ void eight(const u8 *at, float *out) {
        for (int i = 0; i < 8; i++) out[i] = ((const float *)at)[i];
    }
    static __device__ __forceinline__ float one(const u8 *row, int i) { return ((const float *)row)[i]; }
};

struct F16 {
    static __device__ __forceinline__ u32 bytes() { return 2; }
    static __device__ __forceinline__ void eight(const u8 *at, float *out) {
        uint4 v = *(const uint4 *)at;
        u32 words[4] = {v.x, v.y, v.z, v.w};
        for (int i = 0; i < 8; i++) out[i] = half_to_float((u16)(words[i / 2] >> (i % 2 * 16)));
    }
    static __device__ __forceinline__ float one(const u8 *row, int i) { return half_to_float(((const u16 *)row)[i]); }
};

struct BF16 {
    static __device__ __forceinline__ u32 bytes() { return 2; }
    static __device__ __forceinline__ void eight(const u8 *at, float *out) {
        uint4 v = *(const uint4 *)at;
        u32 words[4] = {v.x, v.y, v.z, v.w};
        for (int i = 0; i < 8; i++) out[i] = __int_as_float((int)(words[i / 2] >> (i % 2 * 16) << 16));
    }
    static __device__ __forceinline__ float one(const u8 *row, int i) {
        return __int_as_float((int)((u32)((const u16 *)row)[i] << 16));
    }
};

// Rows of a quantised matrix with `n_cols` columns.
template <class F> struct Quantised {
    enum { UNIT = 32 };
    static __device__ __forceinline__ const u8 *row(const u8 *weights, u64 r, int n_cols) {
        return weights + r * (u64)(n_cols / 32 / F::GROUPS * F::BYTES);
    }
    // This lane's share of the products of a row with TT tokens from `t0` on; tokens past the last repeat it.
    template <int TT>
    static __device__ __forceinline__ void dot(const u8 *row, int n_cols, const Rows &x, int t0, int n_tokens, int lane,
                                               float *acc) {
        for (int g = lane; g < n_cols / 32; g += WARP) {
            Group w;
            F::load(row + g / F::GROUPS * F::BYTES, g % F::GROUPS, w);
#pragma unroll
            for (int t = 0; t < TT; t++) {
                u64 token = min(t0 + t, n_tokens - 1);
                const int *high = (const int *)(x.high + token * n_cols + g * 32);
                const int *middle = (const int *)(x.middle + token * n_cols + g * 32);
                const int *low = (const int *)(x.low + token * n_cols + g * 32);
                float sum = 0;
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    int h = 0, m = 0, l = 0;
#pragma unroll
                    for (int i = 4 * half; i < 4 * half + 4; i++) {
                        h = dot4(w.q[i], high[i], h);
                        m = dot4(w.q[i], middle[i], m);
                        l = dot4(w.q[i], low[i], l);
                    }
                    sum = fmaf(w.scale[half], fmaf(65536.f, (float)h, (float)(256 * m + l)), sum);
                    if (F::HAS_MIN) {
                        sum = fmaf(w.min[half], (float)x.sum[token * (n_cols / 16) + g * 2 + half], sum);
                    }
                }
                acc[t] = fmaf(x.d[token * (n_cols / 32) + g], sum, acc[t]);
            }
        }
    }
    // UNIT weights from column `c` on, which begins a group.
    static __device__ __forceinline__ void decode(const u8 *row, int, int c, float *out) {
        Group w;
        F::load(row + c / 32 / F::GROUPS * F::BYTES, c / 32 % F::GROUPS, w);
#pragma unroll
        for (int i = 0; i < 32; i++) {
            out[i] = w.scale[i / 16] * (float)(i8)(w.q[i / 4] >> (i % 4 * 8)) + w.min[i / 16];
        }
    }
};

// Rows of a matrix of floats.
template <class F> struct Floats {
    enum { UNIT = 8 };
    static __device__ __forceinline__ const u8 *row(const u8 *weights, u64 r, int n_cols) {
        return weights + r * (u64)n_cols * F::bytes();
    }
    static __device__ __forceinline__ void decode(const u8 *row, int n_cols, int c, float *out) {
        const u8 *at = row + (u64)c * F::bytes();
        if (c + 8 <= n_cols && (u64)at % 16 == 0) {
            F::eight(at, out);
            return;
        }
#pragma unroll
        for (int i = 0; i < 8; i++) out[i] = c + i < n_cols ? F::one(row, c + i) : 0.f;
    }
    template <int TT>
    static __device__ __forceinline__ void dot(const u8 *row, int n_cols, const Rows &x, int t0, int n_tokens, int lane,
                                               float *acc) {
        for (int c = lane * 8; c < n_cols; c += WARP * 8) {
            float w[8];
            decode(row, n_cols, c, w);
#pragma unroll
            for (int t = 0; t < TT; t++) {
                const float *values = x.values + (u64)min(t0 + t, n_tokens - 1) * n_cols + c;
#pragma unroll
                for (int i = 0; i < 8; i++) acc[t] = c + i < n_cols ? fmaf(w[i], values[i], acc[t]) : acc[t];
            }
        }
    }
};

// Every form a weight matrix has on the device, as FORM(name, type).
#define EACH_FORM(FORM)                                                                                                \
    FORM(f32, Floats<F32>)                                                                                             \
    FORM(f16, Floats<F16>)                                                                                             \
    FORM(bf16, Floats<BF16>)                                                                                           \
    FORM(q4_0, Quantised<Q4_0>)                                                                                        \
    FORM(q4_1, Quantised<Q4_1>)                                                                                        \
    FORM(q8_0, Quantised<Q8_0>)                                                                                        \
    FORM(q4_k, Quantised<Q4_K>)                                                                                        \
    FORM(q6_k, Quantised<Q6_K>)                                                                                        \
    FORM(groups, Quantised<Groups>)
