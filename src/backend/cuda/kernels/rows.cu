// What works row by row or value by value: norms, rope, activations, sums, and rows as integers.
#include "common.cuh"

// Makes integers of the rows of `values`, a warp for each 32 of them.
KERNEL(quantize, const float *values, i8 *high, i8 *middle, i8 *low, float *d, int *sum, int n_groups) {
    int group = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    int lane = threadIdx.x % WARP;
    if (group >= n_groups) return;
    float v = values[(u64)group * 32 + lane];
    float most = warp_max(fabsf(v));
    bool is_broken = __ballot_sync(FULL, v != v) != 0;
    const float LARGEST = 127.f * 65536.f; // so that the high byte fits
    float scale = most / LARGEST;
    int word = scale > 0 && !is_broken ? (int)rintf(fmaxf(-LARGEST, fminf(LARGEST, v / scale))) : 0;
    i8 lowest = (i8)word;
    int above = (word - lowest) >> 8;
    i8 next = (i8)above;
    high[(u64)group * 32 + lane] = (i8)((above - next) >> 8);
    middle[(u64)group * 32 + lane] = next;
    low[(u64)group * 32 + lane] = lowest;
    for (int step = 8; step; step /= 2) word += __shfl_xor_sync(FULL, word, step);
    if (lane % 16 == 0) sum[(u64)group * 2 + lane / 16] = word;
    // A broken value, or one too large, must show.
    if (lane == 0) d[group] = is_broken ? __int_as_float(0x7fffffff) : scale;
}

// Normalises runs of `width` values, a block for each.
KERNEL(normalize, const float *x, const float *weight, const float *bias, float *out, int width, float eps, int is_layer) {
    __shared__ float shared[8];
    x += (u64)blockIdx.x * width;
    out += (u64)blockIdx.x * width;
    float mean = 0;
    if (is_layer) {
        float sum = 0;
        for (int i = threadIdx.x; i < width; i += blockDim.x) sum += x[i];
        mean = block_sum(sum, shared) / width;
    }
    float squares = 0;
    for (int i = threadIdx.x; i < width; i += blockDim.x) squares += (x[i] - mean) * (x[i] - mean);
    float scale = 1.f / sqrtf(block_sum(squares, shared) / width + eps);
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        out[i] = (x[i] - mean) * scale * weight[i] + (bias ? bias[i] : 0.f);
    }
}

// Turns the heads of every token; `turns` is (n_tokens, n_pairs, 2): cosine and sine.
KERNEL(rope, float *x, const float *turns, int n_tokens, int n_heads, int head_dim, int n_pairs, int is_halves) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    int pair = (int)(i % n_pairs);
    u64 head = i / n_pairs;
    if (head >= (u64)n_tokens * n_heads) return;
    float *values = x + head * head_dim;
    int a = is_halves ? pair : 2 * pair, b = is_halves ? pair + n_pairs : 2 * pair + 1;
    const float *turn = turns + (head / n_heads * n_pairs + pair) * 2;
    float first = values[a], second = values[b];
    values[a] = first * turn[0] - second * turn[1];
    values[b] = first * turn[1] + second * turn[0];
}

KERNEL(add, float *x, const float *y, u64 n) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += y[i];
}

KERNEL(relu, float *x, u64 n) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] = activate(x[i], RELU);
}

// Row `rows[i]` of `x` becomes row i of `out`, a block for each.
KERNEL(take_rows, const float *x, const u32 *rows, float *out, int width) {
    const float *from = x + (u64)rows[blockIdx.x] * width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) out[(u64)blockIdx.x * width + i] = from[i];
}
