// The KV cache and decode attention. Blocks of 32 tokens lie as on the host: a head's keys column by column, so that a
// lane has a token; its values row by row, so that a lane has a column.
#include "common.cuh"

#define KV_BLOCK 32
enum { KV_F32, KV_F16, KV_Q8_0 };

// Where a batch's tokens stand, and what their blocks hold.
struct Cache {
    const u64 *blocks;    // addresses of blocks
    const u32 *first;     // (n_tokens): where a token's blocks begin in `blocks`
    const u32 *positions; // (n_tokens)
    int n_kv_heads, head_dim;
    int type;   // of all blocks but the first `n_full` of a sequence, which are F32
    int n_full;
};

__device__ __forceinline__ u32 row_bytes(int type, int n) {
    return type == KV_F32 ? n * 4 : type == KV_F16 ? n * 2 : n / 32 * 34;
}

// A head's keys or values of `layer` in block number `b` of token `t`.
__device__ __forceinline__ u8 *part_of(const Cache &cache, int t, int b, int layer, int is_value, int head, int *type) {
    *type = b < cache.n_full ? KV_F32 : cache.type;
    u64 row = ((u64)(layer * 2 + is_value) * cache.n_kv_heads + head) * KV_BLOCK;
    return (u8 *)cache.blocks[cache.first[t] + b] + row * row_bytes(*type, cache.head_dim);
}

// Writes the keys and values of each token: a block a token and 32 of its values a warp.
KERNEL(store, const float *k, const float *v, Cache cache, int layer) {
    int t = blockIdx.x, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int position = cache.positions[t], slot = position % KV_BLOCK, dim = cache.head_dim;
    int strips = (dim + 31) / 32;
    for (int i = warp; i < 2 * cache.n_kv_heads * strips; i += blockDim.x / WARP) {
        int is_value = i % 2, head = i / 2 / strips, c = i / 2 % strips * 32 + lane, type;
        u8 *to = part_of(cache, t, position / KV_BLOCK, layer, is_value, head, &type);
        const float *from = (is_value ? v : k) + ((u64)t * cache.n_kv_heads + head) * dim;
        float value = c < dim ? from[c] : 0.f;
        int at = is_value ? slot * dim + c : c * KV_BLOCK + slot;
        if (type == KV_Q8_0) {
            float d = warp_max(fabsf(value)) / 127.f;
            i8 q = (i8)roundf(d == 0 ? 0.f : value * (1.f / d));
            int strip = c / 32;
            u8 *scale = is_value ? to + (slot * strips + strip) * 34 : to + strip * 34 * KV_BLOCK + 2 * slot;
            u8 *bytes = is_value ? scale + 2 + lane : to + strip * 34 * KV_BLOCK + 2 * KV_BLOCK + lane * KV_BLOCK + slot;
            if (lane == 0) *(u16 *)scale = float_to_half(d);
            *(i8 *)bytes = q;
        } else if (c < dim) {
            if (type == KV_F32) ((float *)to)[at] = value;
            else ((u16 *)to)[at] = float_to_half(value);
        }
    }
}

// q · key of the token in `slot`.
__device__ __forceinline__ float score(const float *q, const u8 *keys, int type, int dim, int slot) {
    float sum = 0;
    if (type == KV_F32) {
        for (int d = 0; d < dim; d++) sum += q[d] * ((const float *)keys)[d * KV_BLOCK + slot];
    } else if (type == KV_F16) {
        for (int d = 0; d < dim; d++) sum += q[d] * half_to_float(((const u16 *)keys)[d * KV_BLOCK + slot]);
    } else {
        for (int s = 0; s < dim / 32; s++) {
            const u8 *strip = keys + s * 34 * KV_BLOCK;
            float part = 0;
            for (int d = 0; d < 32; d++) part += q[s * 32 + d] * ((const i8 *)strip)[2 * KV_BLOCK + d * KV_BLOCK + slot];
            sum += part * half_at(strip + 2 * slot);
        }
    }
    return sum;
}

__device__ __forceinline__ float value_at(const u8 *values, int type, int dim, int slot, int c) {
    if (type == KV_F32) return ((const float *)values)[slot * dim + c];
    if (type == KV_F16) return half_to_float(((const u16 *)values)[slot * dim + c]);
    const u8 *block = values + (slot * (dim / 32) + c / 32) * 34;
    return half_at(block) * ((const i8 *)block)[2 + c % 32];
}

#define MOST_STRIPS 8

// A head's keys are cut into PARTS parts of as many blocks each, and those put together in order: how many share the work
// changes no bit.
#define PARTS 16

// How much of what is there so far is kept, and how much of what comes is taken, as softmax's maximum grows.
__device__ __forceinline__ void rescale(float &most, float next, float *keep, float *take) {
    float higher = fmaxf(most, next);
    *keep = expf(most - higher);
    *take = expf(next - higher);
    most = higher;
}

// One head of one token over some of its parts, a warp each; heads of a group stand in one block. `parts` is
// (n_tokens, n_heads, gridDim.z, head_dim + 2): sum, maximum and weight (Dao et al., "Flash-Decoding", 2023).
KERNEL(attend, const float *q, Cache cache, int layer, int n_heads, float scale, float *parts) {
    DYNAMIC_SHARED(shared);
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, dim = cache.head_dim;
    int head = blockIdx.x * (blockDim.x / WARP) + warp, t = blockIdx.y;
    float *query = shared + warp * (dim + KV_BLOCK), *p = query + dim;
    for (int d = lane; d < dim; d += WARP) query[d] = q[((u64)t * n_heads + head) * dim + d] * scale;
    __syncwarp();
    int kv_head = head / (n_heads / cache.n_kv_heads), n_keys = cache.positions[t] + 1;
    int n_blocks = (n_keys + KV_BLOCK - 1) / KV_BLOCK, each = (n_blocks + PARTS - 1) / PARTS;
    int n_mine = PARTS / gridDim.z, first = blockIdx.z * n_mine;
    float most = -INFINITE, weight = 0, acc[MOST_STRIPS];
    for (int i = 0; i < MOST_STRIPS; i++) acc[i] = 0;
    for (int part = first; part < first + n_mine && part * each < n_blocks; part++) {
        float part_most = -INFINITE, part_weight = 0, sum[MOST_STRIPS];
        for (int i = 0; i < MOST_STRIPS; i++) sum[i] = 0;
        for (int b = part * each; b < min(n_blocks, (part + 1) * each); b++) {
            int type, n_valid = min(KV_BLOCK, n_keys - b * KV_BLOCK);
            const u8 *keys = part_of(cache, t, b, layer, 0, kv_head, &type);
            const u8 *values = part_of(cache, t, b, layer, 1, kv_head, &type);
            float s = lane < n_valid ? score(query, keys, type, dim, lane) : -INFINITE;
            float keep, take, block_most = warp_max(s);
            rescale(part_most, block_most, &keep, &take);
            float mine = lane < n_valid ? expf(s - part_most) : 0.f;
            part_weight = fmaf(part_weight, keep, warp_sum(mine));
            __syncwarp();
            p[lane] = mine;
            __syncwarp();
#pragma unroll
            for (int i = 0; i < MOST_STRIPS; i++) {
                int c = i * WARP + lane;
                if (c >= dim) continue;
                sum[i] *= keep;
                for (int j = 0; j < n_valid; j++) sum[i] = fmaf(p[j], value_at(values, type, dim, j, c), sum[i]);
            }
        }
        float keep, take;
        rescale(most, part_most, &keep, &take);
        weight = fmaf(weight, keep, part_weight * take);
#pragma unroll
        for (int i = 0; i < MOST_STRIPS; i++) acc[i] = fmaf(acc[i], keep, sum[i] * take);
    }
    float *out = parts + (((u64)t * n_heads + head) * gridDim.z + blockIdx.z) * (dim + 2);
#pragma unroll
    for (int i = 0; i < MOST_STRIPS; i++) {
        if (i * WARP + lane < dim) out[i * WARP + lane] = acc[i];
    }
    if (lane == 0) {
        out[dim] = most;
        out[dim + 1] = weight;
    }
}

// Puts the parts of each head together in order, a warp a head.
KERNEL(attended, const float *parts, int n_parts, float *out, int n_rows, int dim) {
    int row = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= n_rows) return;
    const float *from = parts + (u64)row * n_parts * (dim + 2);
    for (int c = lane; c < dim; c += WARP) {
        float most = from[dim], weight = from[dim + 1], sum = from[c];
        for (int i = 1; i < n_parts; i++) {
            const float *part = from + i * (dim + 2);
            if (part[dim + 1] == 0) continue;
            float keep, take;
            rescale(most, part[dim], &keep, &take);
            weight = fmaf(weight, keep, part[dim + 1] * take);
            sum = fmaf(sum, keep, part[c] * take);
        }
        out[(u64)row * dim + c] = sum / weight;
    }
}
