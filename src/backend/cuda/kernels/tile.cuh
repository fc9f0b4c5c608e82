// Products of many tokens with many rows: a block takes TILE_TOKENS of one and TILE_ROWS of the other through shared memory,
// quantised weights by tensor cores. The sums are those of a warp a row, to the bit: lane l of it has units l, l + 32, ... of a
// row, in order, and the lanes' sums meet in a butterfly. So a block goes through the units lane by lane, lanes in the order
// in which a butterfly's sums become a tree that is climbed as it grows.
#pragma once
#include "common.cuh"

#define TILE_TOKENS 32
#define TILE_ROWS 64
// Units of a row that are in shared memory at a time.
#define TILE_UNITS 4
// Words of a row's units; the rest keeps rows in other banks.
#define TILE_STRIDE 36
// Sums of a thread.
#define TILE_SUMS 8

// The place in the tile of a thread's k-th sum: eight warps have 16 tokens by 16 rows each, as tensor cores lay them out.
__device__ __forceinline__ int tile_token(int k) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    return warp % 2 * 16 + k / 4 * 8 + lane / 4;
}

__device__ __forceinline__ int tile_row(int k) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    return warp / 2 * 16 + k / 2 % 2 * 8 + lane % 4 * 2 + k % 2;
}

// A way through `n` units, lane by lane.
struct Walk {
    int rank, step, n;
    __device__ __forceinline__ int unit() const {
        int lane = (rank & 1) << 4 | (rank & 2) << 2 | (rank & 4) | (rank & 8) >> 2 | (rank & 16) >> 4;
        return lane + WARP * step;
    }
    __device__ __forceinline__ bool is_over() const { return rank == WARP; }
    // Past lanes that have no more.
    __device__ __forceinline__ void settle() {
        while (!is_over() && unit() >= n) {
            rank++;
            step = 0;
        }
    }
    __device__ __forceinline__ void next() {
        step++;
        settle();
    }
};

// Lanes' sums on their way up the tree.
struct Tree {
    float waiting[5][TILE_SUMS];
    int rank;
    // Takes in the next lane's sums, which begin anew; after the last lane they are those of all.
    __device__ __forceinline__ void take(float *sums) {
        bool is_climbing = true;
#pragma unroll
        for (int level = 0; level < 5; level++) {
            if (!is_climbing) continue;
            is_climbing = rank >> level & 1;
#pragma unroll
            for (int k = 0; k < TILE_SUMS; k++) {
                if (is_climbing) {
                    sums[k] = waiting[level][k] + sums[k];
                } else {
                    waiting[level][k] = sums[k];
                    sums[k] = 0;
                }
            }
        }
        rank++;
    }
};

// The rows of a tile.
struct TileRows {
    u32 at[TILE_ROWS];
};

template <class M> struct Tile;

template <class F> struct Tile<Quantised<F>> {
    struct Shared {
        int planes[3][TILE_TOKENS][TILE_STRIDE];
        float d[TILE_TOKENS][TILE_UNITS];
        int sum[TILE_TOKENS][TILE_UNITS][2];
        int q[TILE_ROWS][TILE_STRIDE];
        float scale[TILE_ROWS][TILE_UNITS][2], min[TILE_ROWS][TILE_UNITS][2];
    };
    // A thread's sums over `n_cols` columns of the weights' `rows` (in shared memory, as many as the tile has) and the tokens
    // from `t0` on.
    static __device__ __forceinline__ void multiply(const u8 *weights, const u32 *rows, Rows x, int n_cols, int t0,
                                                    int n_tokens, float *sums) {
        SHARED(Shared, at_hand);
        int lane = threadIdx.x % WARP;
        Walk walk = {0, 0, n_cols / 32};
        Tree tree;
        tree.rank = 0;
        for (int k = 0; k < TILE_SUMS; k++) sums[k] = 0;
        for (walk.settle(); !walk.is_over();) {
            __syncthreads();
            {
                // A unit of a row for each thread; half as many of tokens.
                int slot = threadIdx.x % TILE_UNITS, i = threadIdx.x / TILE_UNITS;
                Walk at = walk;
                for (int s = 0; s < slot && !at.is_over(); s++) at.next();
                if (!at.is_over()) {
                    int g = at.unit();
                    Group w;
                    F::load(Quantised<F>::row(weights, rows[i], n_cols) + g / F::GROUPS * F::BYTES, g % F::GROUPS, w);
                    for (int k = 0; k < 8; k++) at_hand.q[i][slot * 8 + k] = w.q[k];
                    for (int half = 0; half < 2; half++) {
                        at_hand.scale[i][slot][half] = w.scale[half];
                        if (F::HAS_MIN) at_hand.min[i][slot][half] = w.min[half];
                    }
                    if (i < TILE_TOKENS) {
                        u64 token = min(t0 + i, n_tokens - 1);
                        const i8 *from[3] = {x.high, x.middle, x.low};
#pragma unroll
                        for (int plane = 0; plane < 3; plane++) {
                            const int *words = (const int *)(from[plane] + token * n_cols + g * 32);
                            for (int k = 0; k < 8; k++) at_hand.planes[plane][i][slot * 8 + k] = words[k];
                        }
                        at_hand.d[i][slot] = x.d[token * (n_cols / 32) + g];
                        for (int half = 0; half < 2; half++) {
                            at_hand.sum[i][slot][half] = x.sum[token * (n_cols / 16) + g * 2 + half];
                        }
                    }
                }
            }
            __syncthreads();
            for (int slot = 0; slot < TILE_UNITS && !walk.is_over(); slot++, walk.next()) {
                while (tree.rank < walk.rank) tree.take(sums);
#pragma unroll
                for (int part = 0; part < 4; part++) { // of 8 tokens by 8 rows
                    int token = tile_token(4 * (part / 2)), row = tile_row(2 * (part % 2)) - lane % 4 * 2;
                    float sum[2] = {0, 0};
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int word = slot * 8 + half * 4 + lane % 4;
                        int weight = at_hand.q[row + lane / 4][word];
                        int products[3][2];
#pragma unroll
                        for (int plane = 0; plane < 3; plane++) {
                            products[plane][0] = products[plane][1] = 0;
                            multiply_tile(products[plane], at_hand.planes[plane][token][word], weight);
                        }
#pragma unroll
                        for (int i = 0; i < 2; i++) {
                            int r = row + lane % 4 * 2 + i;
                            float rest = (float)(256 * products[1][i] + products[2][i]);
                            sum[i] = fmaf(at_hand.scale[r][slot][half], fmaf(65536.f, (float)products[0][i], rest), sum[i]);
                            if (F::HAS_MIN) {
                                float least = at_hand.min[r][slot][half];
                                sum[i] = fmaf(least, (float)at_hand.sum[token][slot][half], sum[i]);
                            }
                        }
                    }
                    for (int i = 0; i < 2; i++) {
                        sums[2 * part + i] = fmaf(at_hand.d[token][slot], sum[i], sums[2 * part + i]);
                    }
                }
            }
        }
        while (tree.rank < WARP) tree.take(sums);
    }
};

template <class F> struct Tile<Floats<F>> {
    struct Shared {
        float values[TILE_TOKENS][TILE_STRIDE], w[TILE_ROWS][TILE_STRIDE];
    };
    static __device__ __forceinline__ void multiply(const u8 *weights, const u32 *rows, Rows x, int n_cols, int t0,
                                                    int n_tokens, float *sums) {
        SHARED(Shared, at_hand);
        Walk walk = {0, 0, (n_cols + 7) / 8};
        Tree tree;
        tree.rank = 0;
        for (int k = 0; k < TILE_SUMS; k++) sums[k] = 0;
        for (walk.settle(); !walk.is_over();) {
            __syncthreads();
            {
                int slot = threadIdx.x % TILE_UNITS, i = threadIdx.x / TILE_UNITS;
                Walk at = walk;
                for (int s = 0; s < slot && !at.is_over(); s++) at.next();
                if (!at.is_over()) {
                    int c = at.unit() * 8;
                    float eight[8];
                    Floats<F>::decode(Floats<F>::row(weights, rows[i], n_cols), n_cols, c, eight);
                    for (int k = 0; k < 8; k++) at_hand.w[i][slot * 8 + k] = eight[k];
                    if (i < TILE_TOKENS) {
                        const float *from = x.values + (u64)min(t0 + i, n_tokens - 1) * n_cols + c;
                        for (int k = 0; k < 8; k++) at_hand.values[i][slot * 8 + k] = c + k < n_cols ? from[k] : 0.f;
                    }
                }
            }
            __syncthreads();
            for (int slot = 0; slot < TILE_UNITS && !walk.is_over(); slot++, walk.next()) {
                while (tree.rank < walk.rank) tree.take(sums);
#pragma unroll
                for (int c = slot * 8; c < slot * 8 + 8; c++) {
#pragma unroll
                    for (int k = 0; k < TILE_SUMS; k++) {
                        float w = at_hand.w[tile_row(k)][c], value = at_hand.values[tile_token(k)][c];
                        sums[k] = fmaf(w, value, sums[k]);
                    }
                }
            }
        }
        while (tree.rank < WARP) tree.take(sums);
    }
};
