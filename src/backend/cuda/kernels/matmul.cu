// Rows of weights times rows of activations: a warp a row, TT tokens at a time, so that a weight is fetched and unpacked
// once for all of them, or many tokens in tiles. Sums run in one order whichever it is.
#include "tile.cuh"

template <class M, int TT>
__device__ __forceinline__ void multiply(const u8 *weights, const float *bias, Rows x, float *out, int n_rows, int n_cols,
                                         int n_tokens) {
    int r = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int t0 = blockIdx.y * TT;
    if (r >= n_rows) return;
    float acc[TT];
    for (int t = 0; t < TT; t++) acc[t] = 0;
    M::template dot<TT>(M::row(weights, r, n_cols), n_cols, x, t0, n_tokens, lane, acc);
    for (int t = 0; t < TT; t++) {
        float v = warp_sum(acc[t]);
        if (lane == 0 && t0 + t < n_tokens) out[(u64)(t0 + t) * n_rows + r] = v + (bias ? bias[r] : 0.f);
    }
}

template <class M>
__device__ __forceinline__ void multiply_many(const u8 *weights, const float *bias, Rows x, float *out, int n_rows,
                                              int n_cols, int n_tokens) {
    SHARED(TileRows, rows);
    int t0 = blockIdx.x * TILE_TOKENS, r0 = blockIdx.y * TILE_ROWS;
    if (threadIdx.x < TILE_ROWS) rows.at[threadIdx.x] = min(r0 + (int)threadIdx.x, n_rows - 1);
    __syncthreads();
    float sums[TILE_SUMS];
    Tile<M>::multiply(weights, rows.at, x, n_cols, t0, n_tokens, sums);
    for (int k = 0; k < TILE_SUMS; k++) {
        int token = t0 + tile_token(k), r = r0 + tile_row(k);
        if (token < n_tokens && r < n_rows) out[(u64)token * n_rows + r] = sums[k] + (bias ? bias[r] : 0.f);
    }
}

#define FORM(name, M)                                                                                                  \
    KERNEL(matmul_1_##name, const u8 *weights, const float *bias, Rows x, float *out, int n_rows, int n_cols,          \
           int n_tokens) {                                                                                             \
        multiply<M, 1>(weights, bias, x, out, n_rows, n_cols, n_tokens);                                               \
    }                                                                                                                  \
    KERNEL(matmul_4_##name, const u8 *weights, const float *bias, Rows x, float *out, int n_rows, int n_cols,          \
           int n_tokens) {                                                                                             \
        multiply<M, 4>(weights, bias, x, out, n_rows, n_cols, n_tokens);                                               \
    }                                                                                                                  \
    KERNEL(matmul_many_##name, const u8 *weights, const float *bias, Rows x, float *out, int n_rows, int n_cols,       \
           int n_tokens) {                                                                                             \
        multiply_many<M>(weights, bias, x, out, n_rows, n_cols, n_tokens);                                             \
    }
EACH_FORM(FORM)
#undef FORM
