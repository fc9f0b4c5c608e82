// The sparse FFN: which neurons are on, their gate, up and activation in one go, and the sum of their rows of the down
// projection. Matrices hold the rows of this device's neurons alone, in the order of `ids`.
#include "tile.cuh"

// Counts `is_on` over the threads before this one in a block of 256, and over all of them.
__device__ __forceinline__ int place_in_block(bool is_on, u32 *shared, int *all) {
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    u32 votes = __ballot_sync(FULL, is_on);
    __syncthreads();
    if (lane == 0) shared[warp] = __popc(votes);
    __syncthreads();
    int before = __popc(votes & ((1u << lane) - 1)), total = 0;
    for (int w = 0; w < (int)(blockDim.x / WARP); w++) {
        if (w < warp) before += shared[w];
        total += shared[w];
    }
    *all = total;
    return before;
}

// How many tokens call on each neuron.
KERNEL(count_calls, const float *scores, int n_tokens, int n_ff, float threshold, u32 *calls) {
    int id = blockIdx.x * blockDim.x + threadIdx.x;
    if (id >= n_ff) return;
    u32 n = 0;
    for (int t = 0; t < n_tokens; t++) n += scores[(u64)t * n_ff + id] >= threshold;
    calls[id] = n;
}

// The neurons that `calls` says some token calls on, or (null) the only token's score, in order. Block 0 lists this device's, as places in `hot`;
// block 1 the host's, as neurons, with `on`, (n_tokens, listed), which token needs which, unless it is null. `selected`
// counts pairs.
KERNEL(select, const float *scores, int n_tokens, int n_ff, float threshold, const u32 *calls, const u32 *hot,
       int n_hot, u32 *list, u32 *n_listed, const u32 *cold, int n_cold, u32 *cold_list, u32 *n_cold_listed, u8 *on, u64 *selected) {
    __shared__ u32 shared[8];
    bool is_hot = blockIdx.x == 0;
    const u32 *ids = is_hot ? hot : cold;
    int n = is_hot ? n_hot : n_cold, listed = 0;
    u64 pairs = 0;
    for (int base = 0; base < n; base += blockDim.x) {
        int i = base + threadIdx.x;
        u32 id = i < n ? ids[i] : 0;
        int n_on = i >= n ? 0 : calls ? (int)calls[id] : scores[id] >= threshold;
        int all, at = listed + place_in_block(n_on > 0, shared, &all);
        if (n_on && is_hot) list[at] = i;
        if (n_on && !is_hot) cold_list[at] = id;
        pairs += n_on;
        listed += all;
    }
    if (threadIdx.x == 0) *(is_hot ? n_listed : n_cold_listed) = listed;
    if (pairs) atomicAdd(selected, pairs);
    if (is_hot || !on) return;
    __threadfence_block();
    __syncthreads();
    for (int t = 0; t < n_tokens; t++) {
        for (int i = threadIdx.x; i < listed; i += blockDim.x) {
            on[(u64)t * listed + i] = scores[(u64)t * n_ff + cold_list[i]] >= threshold;
        }
    }
}

// What a layer's FFN is, beside its weights.
struct Neurons {
    const u32 *list;     // places of the neurons to run; null: all
    const u32 *n_listed; // null: `n`
    const u32 *ids;      // the neuron at each place
    const float *scores; // (n_tokens, n_ff); null: nobody is called off
    int n, n_ff;
    float threshold;
    int is_sparse; // whether what isn't positive is off
    int activation, relu_up;
};

template <class M, int TT>
__device__ __forceinline__ void activated(const u8 *gate, const float *gate_bias, const u8 *up, const float *up_bias,
                                          Rows x, Neurons of, float *h, int n_cols, int n_tokens, u64 *active,
                                          u64 *fired) {
    int i = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    int t0 = blockIdx.y * TT;
    if (i >= (of.n_listed ? (int)*of.n_listed : of.n)) return;
    u32 place = of.list ? of.list[i] : i, id = of.ids[place];
    const u8 *first = gate ? gate : up;
    const float *first_bias = gate ? gate_bias : up_bias;
    float acc[TT];
    for (int t = 0; t < TT; t++) acc[t] = 0;
    M::template dot<TT>(M::row(first, place, n_cols), n_cols, x, t0, n_tokens, lane, acc);
    bool is_any = false;
    for (int t = 0; t < TT; t++) {
        float v = warp_sum(acc[t]) + (first_bias ? first_bias[place] : 0.f);
        u64 token = min(t0 + t, n_tokens - 1);
        bool is_on = !of.scores || of.scores[token * of.n_ff + id] >= of.threshold;
        // NaN is not zeroed: a broken model must show.
        if (of.is_sparse) is_on = is_on && !(v <= 0);
        acc[t] = !is_on ? 0.f : of.is_sparse ? v : activate(v, of.activation);
        is_any = is_any || acc[t] != 0;
    }
    if (gate && is_any) {
        float times[TT];
        for (int t = 0; t < TT; t++) times[t] = 0;
        M::template dot<TT>(M::row(up, place, n_cols), n_cols, x, t0, n_tokens, lane, times);
        for (int t = 0; t < TT; t++) {
            float v = warp_sum(times[t]) + (up_bias ? up_bias[place] : 0.f);
            if (of.relu_up && v <= 0) v = 0;
            if (acc[t] != 0) acc[t] *= v;
        }
    }
    if (lane) return;
    u32 n_active = 0;
    for (int t = 0; t < TT && t0 + t < n_tokens; t++) {
        h[(u64)(t0 + t) * of.n + i] = acc[t];
        n_active += acc[t] != 0;
    }
    if (n_active && active) atomicAdd(active, (u64)n_active);
    if (n_active && fired) atomicAdd(fired + id, (u64)n_active);
}

// What a block's neurons came to.
struct Found {
    u32 n_active, is_any;
};

// As `activated`, for many tokens in tiles.
template <class M>
__device__ __forceinline__ void activated_many(const u8 *gate, const float *gate_bias, const u8 *up,
                                               const float *up_bias, Rows x, Neurons of, float *h, int n_cols,
                                               int n_tokens, u64 *active, u64 *fired) {
    SHARED(TileRows, rows);
    SHARED(Found, found);
    int t0 = blockIdx.x * TILE_TOKENS, i0 = blockIdx.y * TILE_ROWS, n = of.n_listed ? (int)*of.n_listed : of.n;
    if (i0 >= n) return;
    if (threadIdx.x < TILE_ROWS) {
        int i = min(i0 + (int)threadIdx.x, n - 1);
        rows.at[threadIdx.x] = of.list ? of.list[i] : i;
    }
    if (threadIdx.x == 0) found.n_active = found.is_any = 0;
    __syncthreads();
    const u8 *first = gate ? gate : up;
    const float *first_bias = gate ? gate_bias : up_bias;
    float v[TILE_SUMS];
    Tile<M>::multiply(first, rows.at, x, n_cols, t0, n_tokens, v);
    bool is_mine = false;
    for (int k = 0; k < TILE_SUMS; k++) {
        int token = t0 + tile_token(k), i = i0 + tile_row(k);
        u32 place = rows.at[tile_row(k)], id = of.ids[place];
        v[k] += first_bias ? first_bias[place] : 0.f;
        bool is_on = token < n_tokens && i < n;
        if (is_on && of.scores) is_on = of.scores[(u64)token * of.n_ff + id] >= of.threshold;
        // NaN is not zeroed: a broken model must show.
        if (of.is_sparse) is_on = is_on && !(v[k] <= 0);
        v[k] = !is_on ? 0.f : of.is_sparse ? v[k] : activate(v[k], of.activation);
        is_mine = is_mine || v[k] != 0;
    }
    if (is_mine) found.is_any = 1;
    __syncthreads();
    if (gate && found.is_any) {
        float times[TILE_SUMS];
        Tile<M>::multiply(up, rows.at, x, n_cols, t0, n_tokens, times);
        for (int k = 0; k < TILE_SUMS; k++) {
            u32 place = rows.at[tile_row(k)];
            float u = times[k] + (up_bias ? up_bias[place] : 0.f);
            if (of.relu_up && u <= 0) u = 0;
            if (v[k] != 0) v[k] *= u;
        }
    }
    u32 mine = 0;
    for (int k = 0; k < TILE_SUMS; k++) {
        int token = t0 + tile_token(k), i = i0 + tile_row(k);
        if (token >= n_tokens || i >= n) continue;
        h[(u64)token * of.n + i] = v[k];
        if (v[k] == 0) continue;
        mine++;
        if (fired) atomicAdd(fired + of.ids[rows.at[tile_row(k)]], (u64)1);
    }
    if (mine) atomicAdd(&found.n_active, mine);
    __syncthreads();
    if (threadIdx.x == 0 && found.n_active && active) atomicAdd(active, (u64)found.n_active);
}

// Neurons are summed in SUM_PARTS parts of as many places each, and those in order: a token's sum is the same to the bit
// whatever other tokens have listed.
#define SUM_PARTS 64

// How many of the list's places are below `place`.
__device__ __forceinline__ int n_below(const Neurons &of, int n, int place) {
    if (!of.list) return min(n, place);
    int low = 0, high = n;
    while (low < high) {
        int middle = (low + high) / 2;
        if ((int)of.list[middle] < place) low = middle + 1;
        else high = middle;
    }
    return low;
}

// Sums of the listed rows, each times its h: UNIT columns a thread, TT tokens. A block makes part blockIdx.y of the sum.
template <class M, int TT>
__device__ __forceinline__ void summed(const u8 *down, Neurons of, const float *h, float *parts, int n_cols,
                                       int n_tokens) {
    int c = (blockIdx.x * blockDim.x + threadIdx.x) * M::UNIT;
    int t0 = blockIdx.z * TT, n = of.n_listed ? (int)*of.n_listed : of.n;
    if (c >= n_cols) return;
    int each = (of.n + SUM_PARTS - 1) / SUM_PARTS, part = blockIdx.y;
    float acc[TT][M::UNIT];
    for (int t = 0; t < TT; t++) {
        for (int k = 0; k < M::UNIT; k++) acc[t][k] = 0;
    }
    for (int i = n_below(of, n, part * each), end = n_below(of, n, (part + 1) * each); i < end; i++) {
        float factor[TT];
        bool is_any = false;
        for (int t = 0; t < TT; t++) {
            factor[t] = t0 + t < n_tokens ? h[(u64)(t0 + t) * of.n + i] : 0.f;
            is_any = is_any || factor[t] != 0;
        }
        if (!is_any) continue;
        float w[M::UNIT];
        M::decode(M::row(down, of.list ? of.list[i] : i, n_cols), n_cols, c, w);
        for (int t = 0; t < TT; t++) {
            if (factor[t] == 0) continue;
#pragma unroll
            for (int k = 0; k < M::UNIT; k++) acc[t][k] = fmaf(factor[t], w[k], acc[t][k]);
        }
    }
    for (int t = 0; t < TT && t0 + t < n_tokens; t++) {
        float *out = parts + ((u64)part * n_tokens + t0 + t) * n_cols + c;
#pragma unroll
        for (int k = 0; k < M::UNIT; k++) {
            if (c + k < n_cols) out[k] = acc[t][k];
        }
    }
}

#define DOWN_TOKENS 32
#define DOWN_COLUMNS 128
// Neurons whose rows are in shared memory at a time.
#define DOWN_NEURONS 32

// A word is left out after every 32, so that threads that write as many each have banks of their own.
struct DownTile {
    float w[DOWN_NEURONS][DOWN_COLUMNS + DOWN_COLUMNS / WARP], factor[DOWN_NEURONS][DOWN_TOKENS + 1];
    int places[DOWN_NEURONS];
};

// As `summed`, for many tokens in tiles: 4 tokens by 4 columns a thread. A block makes all parts, one after the other.
template <class M>
__device__ __forceinline__ void summed_many(const u8 *down, Neurons of, const float *h, float *out, int n_cols,
                                            int n_tokens) {
    SHARED(DownTile, at_hand);
    int t0 = blockIdx.x * DOWN_TOKENS, c0 = blockIdx.y * DOWN_COLUMNS, n = of.n_listed ? (int)*of.n_listed : of.n;
    int each = (of.n + SUM_PARTS - 1) / SUM_PARTS, part = 0;
    int own_token = threadIdx.x / WARP * 4, own_column = threadIdx.x % WARP; // and every 32nd from there
    float sum[4][4], acc[4][4];
    for (int i = 0; i < 16; i++) sum[i / 4][i % 4] = acc[i / 4][i % 4] = 0;
    auto end_part = [&] {
#pragma unroll
        for (int i = 0; i < 16; i++) {
            sum[i / 4][i % 4] = part ? sum[i / 4][i % 4] + acc[i / 4][i % 4] : acc[i / 4][i % 4];
            acc[i / 4][i % 4] = 0;
        }
        part++;
    };
    for (int base = 0; base < n; base += DOWN_NEURONS) {
        int n_here = min(DOWN_NEURONS, n - base);
        __syncthreads();
        for (int i = threadIdx.x; i < n_here * (DOWN_COLUMNS / M::UNIT); i += blockDim.x) {
            int neuron = i / (DOWN_COLUMNS / M::UNIT), c = i % (DOWN_COLUMNS / M::UNIT) * M::UNIT;
            int place = of.list ? of.list[base + neuron] : base + neuron;
            if (c == 0) at_hand.places[neuron] = place;
            if (c0 + c >= n_cols) continue;
            M::decode(M::row(down, place, n_cols), n_cols, c0 + c, &at_hand.w[neuron][c + c / WARP]);
        }
        for (int i = threadIdx.x; i < DOWN_NEURONS * DOWN_TOKENS; i += blockDim.x) {
            int neuron = i % DOWN_NEURONS, token = i / DOWN_NEURONS;
            bool is_there = neuron < n_here && t0 + token < n_tokens;
            at_hand.factor[neuron][token] = is_there ? h[(u64)(t0 + token) * of.n + base + neuron] : 0.f;
        }
        __syncthreads();
        for (int neuron = 0; neuron < n_here; neuron++) {
            while (at_hand.places[neuron] >= (part + 1) * each) end_part();
#pragma unroll
            for (int i = 0; i < 16; i++) {
                float f = at_hand.factor[neuron][own_token + i / 4], v = at_hand.w[neuron][own_column + i % 4 * (WARP + 1)];
                // What is off adds nothing, whatever its weights are.
                if (f != 0) acc[i / 4][i % 4] = fmaf(f, v, acc[i / 4][i % 4]);
            }
        }
    }
    while (part < SUM_PARTS) end_part();
    for (int i = 0; i < 16; i++) {
        int token = t0 + own_token + i / 4, c = c0 + own_column + i % 4 * WARP;
        if (token < n_tokens && c < n_cols) out[(u64)token * n_cols + c] = sum[i / 4][i % 4];
    }
}

// The parts put together in order, then the bias, then what the host's neurons add.
KERNEL(combine, const float *parts, int n_parts, const float *bias, const float *cold, float *out, int n_cols,
       int n_tokens) {
    u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x, n = (u64)n_tokens * n_cols;
    if (i >= n) return;
    float sum = n_parts ? parts[i] : 0.f;
    for (int p = 1; p < n_parts; p++) sum += parts[p * n + i];
    if (bias) sum += bias[i % n_cols];
    out[i] = cold ? sum + cold[i] : sum;
}

#define ACTIVATED(TT, name, M)                                                                                         \
    KERNEL(ffn_##TT##_##name, const u8 *gate, const float *gate_bias, const u8 *up, const float *up_bias, Rows x,      \
           Neurons of, float *h, int n_cols, int n_tokens, u64 *active, u64 *fired) {                                  \
        activated<M, TT>(gate, gate_bias, up, up_bias, x, of, h, n_cols, n_tokens, active, fired);                     \
    }
#define SUMMED(TT, name, M)                                                                                            \
    KERNEL(down_##TT##_##name, const u8 *down, Neurons of, const float *h, float *parts, int n_cols, int n_tokens) {   \
        summed<M, TT>(down, of, h, parts, n_cols, n_tokens);                                                           \
    }
#define FORM(name, M)                                                                                                  \
    ACTIVATED(1, name, M)                                                                                              \
    ACTIVATED(4, name, M)                                                                                              \
    SUMMED(1, name, M)                                                                                                 \
    SUMMED(2, name, M)                                                                                                 \
    KERNEL(ffn_many_##name, const u8 *gate, const float *gate_bias, const u8 *up, const float *up_bias, Rows x,        \
           Neurons of, float *h, int n_cols, int n_tokens, u64 *active, u64 *fired) {                                  \
        activated_many<M>(gate, gate_bias, up, up_bias, x, of, h, n_cols, n_tokens, active, fired);                    \
    }                                                                                                                  \
    KERNEL(down_many_##name, const u8 *down, Neurons of, const float *h, float *out, int n_cols, int n_tokens) {       \
        summed_many<M>(down, of, h, out, n_cols, n_tokens);                                                            \
    }
EACH_FORM(FORM)
#undef FORM
