//! What a GPU needs beside weights and cache, counted before anything is asked for.

/// What an allocation is rounded up to.
pub const GRANULE: u64 = 512;
/// Rows of logits that are made at a time.
pub const LOGIT_ROWS: usize = 8;
/// Tokens up to which a step is recorded as a graph, and attention's parts are shared among blocks.
pub const FEW: usize = 4;
/// Parts of a head's attention, as the kernels have them.
const ATTENTION_PARTS: usize = 16;
/// Parts of a sum of neurons, as the kernels have them.
const SUM_PARTS: usize = 64;
/// Tokens up to which those are shared among blocks.
const SUM_FEW: usize = 8;

/// Parts that a sum of neurons leaves in memory: all, or the whole sum alone.
pub fn sum_parts(n_tokens: usize) -> usize {
    if n_tokens <= SUM_FEW { SUM_PARTS } else { 1 }
}

/// Parts that a head's attention leaves in memory: all, or the whole alone.
pub fn attention_parts(n_tokens: usize) -> usize {
    if n_tokens <= FEW { ATTENTION_PARTS } else { 1 }
}

/// The sizes that buffers follow from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shape {
    pub n_embd: usize,
    pub n_ff: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    /// The widest predictor's hidden layer.
    pub rank: usize,
    pub n_vocab: usize,
    /// Rotated pairs of a head.
    pub n_pairs: usize,
    /// Tokens side by side.
    pub batch: usize,
    /// Blocks of a full context.
    pub n_blocks: usize,
    /// Blocks that there is room for.
    pub n_cached: usize,
    /// Bytes of a piece of the host's neurons on its way through; 0 where none go.
    pub piece: usize,
}

/// Bytes of each buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// A row of the residual for each token.
    pub residual: usize,
    /// A row of all heads.
    pub heads: usize,
    pub hidden: usize,
    pub scores: usize,
    pub h: usize,
    pub list: usize,
    /// Bytes of one plane of the widest rows as integers.
    pub plane: usize,
    /// Parts of sums and of attention, whichever is more.
    pub parts: usize,
    pub logits: usize,
    pub turns: usize,
    /// Positions, places in the table, and wanted rows, a number each a token, after the step's number.
    pub numbers: usize,
    /// Addresses of blocks.
    pub table: usize,
}

/// Buffers as wide as the residual: x, normed, attn_in, update, ffn_update.
const RESIDUALS: usize = 5;
/// As wide as the heads: q, k, v, turned, attended.
const HEADS: usize = 5;

impl Shape {
    /// The blocks that a step's tokens may see at once.
    pub fn table_len(&self) -> usize {
        4 * (self.n_blocks + 1) + self.batch
    }

    pub fn sizes(&self) -> Sizes {
        let Shape { n_embd, n_ff, n_heads, head_dim, batch, .. } = *self;
        let floats = |n: usize| 4 * n;
        let widest = n_embd.max(n_ff).max(n_heads * head_dim).max(self.rank);
        let sums = (1..=batch).map(|n| n * sum_parts(n)).max().unwrap_or(0);
        let attention = |n: usize| n * attention_parts(n);
        let most = (1..=batch).map(attention).max().unwrap_or(0);
        Sizes {
            residual: floats(batch * n_embd),
            heads: floats(batch * n_heads.max(self.n_kv_heads) * head_dim),
            hidden: floats(batch * self.rank),
            scores: if self.rank > 0 { floats(batch * n_ff) } else { 0 },
            h: floats(batch * n_ff),
            list: floats(n_ff + 1),
            plane: batch * widest,
            parts: floats((sums * n_embd).max(most * n_heads * (head_dim + 2))),
            logits: floats(LOGIT_ROWS * self.n_vocab),
            turns: floats(2 * batch * self.n_pairs),
            numbers: floats(1 + 3 * batch),
            table: 8 * self.table_len(),
        }
    }

    /// All of them, on a device that holds `n_layers` layers.
    pub fn bytes(&self, n_layers: usize) -> u64 {
        let s = self.sizes();
        // The integers' scale, for each 32, and sums, for each 16, are floats.
        let integers = [s.plane, s.plane, s.plane, s.plane / 8, s.plane / 4];
        let once = [s.hidden, s.scores, s.h, s.list, s.parts, s.logits, s.turns, s.numbers, s.table];
        let pieces = [self.piece; 2];
        let rows = [s.residual; RESIDUALS].into_iter().chain([s.heads; HEADS]);
        let all = rows
            .chain(integers)
            .chain(once)
            .chain(pieces)
            .map(|n| (n as u64).next_multiple_of(GRANULE))
            .sum::<u64>();
        // A layer's weights are rounded up too, and it counts what it does.
        all + n_layers as u64 * (PER_LAYER * GRANULE + 12 * self.n_ff as u64) + 2 * GRANULE
    }
}

/// Allocations that a layer makes at most.
const PER_LAYER: u64 = 24;
