//! Attention over the cache's blocks, for a few tokens of a sequence and the query heads of one key head at a time.
//!
//! In a block, a head's keys lie by dimension (dim, token), its values by token (token, dim): in both, what lies side by
//! side is what a register holds side by side, so scores need no sums across lanes. Q8_0 keys have, for every 32
//! dimensions, the tokens' scales before their bytes. A row of scores is kept whole, so a query's softmax and sums have one
//! order whoever is computed beside it.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::backend::{KV_BLOCK, KvShape, Place};
use crate::quant::{DType, encode_q8_0};

use super::fetch;
use super::kernels::Kernels;

/// Bytes of scores that a tile of queries may have: they stay in the second-level cache.
const SCORE_BYTES: usize = 256 << 10;
/// The most tokens in a tile.
const TILE_TOKENS: usize = 16;

/// Writes one head's key of the token that is `slot` in its block, where `keys` is the head's part of the block.
pub fn store_key(dtype: DType, x: &[f32], slot: usize, keys: &mut [u8]) {
    match dtype {
        DType::F32 => {
            let column = keys.as_chunks_mut::<4>().0.iter_mut().skip(slot).step_by(KV_BLOCK);
            column.zip(x).for_each(|(o, v)| *o = v.to_le_bytes());
        }
        DType::Q8_0 => {
            let mut block = [0u8; 34];
            for (x, keys) in x.chunks_exact(32).zip(keys.chunks_exact_mut(34 * KV_BLOCK)) {
                encode_q8_0(x, &mut block);
                let (scales, bytes) = keys.split_at_mut(2 * KV_BLOCK);
                scales[2 * slot..][..2].copy_from_slice(&block[..2]);
                bytes[slot..].iter_mut().step_by(KV_BLOCK).zip(&block[2..]).for_each(|(o, v)| *o = *v);
            }
        }
        _ => {
            let column = keys.as_chunks_mut::<2>().0.iter_mut().skip(slot).step_by(KV_BLOCK);
            column.zip(x).for_each(|(o, v)| *o = f16::from_f32(*v).to_le_bytes());
        }
    }
}

/// Writes one head's value of the token that is `slot` in its block.
pub fn store_value(dtype: DType, x: &[f32], slot: usize, values: &mut [u8]) {
    let row_bytes = dtype.row_bytes(x.len());
    let out = &mut values[slot * row_bytes..][..row_bytes];
    match dtype {
        DType::F32 => out.as_chunks_mut::<4>().0.iter_mut().zip(x).for_each(|(o, v)| *o = v.to_le_bytes()),
        DType::Q8_0 => encode_q8_0(x, out),
        _ => {
            let mut halves = [f16::ZERO; 64];
            for (x, out) in x.chunks(64).zip(out.chunks_mut(128)) {
                let halves = &mut halves[..x.len()];
                halves.convert_from_f32_slice(x);
                for (h, out) in halves.iter().zip(out.as_chunks_mut::<2>().0) {
                    *out = h.to_le_bytes();
                }
            }
        }
    }
}

/// How many tokens from place `start` on can share a tile: those that follow one another in one sequence.
pub fn tile_len<B>(places: &[Place<B>], start: usize, n_heads: usize) -> usize {
    let first = &places[start];
    let follows =
        |(i, p): (usize, &Place<B>)| std::ptr::eq(p.blocks, first.blocks) && p.position == first.position + i;
    let room = (SCORE_BYTES / 4 / n_heads / (first.position + TILE_TOKENS).next_multiple_of(KV_BLOCK)).max(1);
    let run = places[start..].iter().enumerate().take_while(|(i, p)| follows((*i, p))).count();
    run.min(room).min(TILE_TOKENS)
}

/// A tile's queries: `n_tokens` from `places[0]` on that follow one another, with `n_heads` heads each.
pub struct Tile<'a> {
    pub kernels: &'static Kernels,
    pub shape: &'a KvShape,
    pub layer: usize,
    /// The key and value head they share.
    pub head: usize,
    pub places: &'a [Place<'a, Vec<u8>>],
    pub n_heads: usize,
}

impl Tile<'_> {
    /// The part of block `b` that is this head's keys, or values.
    fn part(&self, b: usize, is_value: bool) -> (DType, &[u8]) {
        let dtype = self.shape.dtype_of(b);
        let row_bytes = dtype.row_bytes(self.shape.head_dim);
        let start = self.shape.first_row(self.layer, is_value, self.head) * row_bytes;
        (dtype, &self.places[0].blocks[b][start..][..KV_BLOCK * row_bytes])
    }

    /// Asks memory for what follows block `b`, if anything does: it lies far from it.
    fn fetch_after(&self, b: usize, goes_on: bool, is_value: bool) {
        if goes_on {
            fetch(self.part(b + 1, is_value).1);
        }
    }

    /// Attention of queries `q` (n_tokens, n_heads, head_dim) into `out`, of the same shape.
    pub fn attend(&self, q: &[f32], out: &mut [f32]) {
        let (dim, k) = (self.shape.head_dim, self.kernels);
        let (n_tokens, first) = (self.places.len(), self.places[0].position);
        let n_keys = first + n_tokens;
        let stride = n_keys.next_multiple_of(KV_BLOCK);
        let mut scores = vec![0.0f32; n_tokens * self.n_heads * stride]; // (n_tokens, n_heads, stride)
        let mut decoded = vec![0.0f32; KV_BLOCK * dim];
        // The first token that sees something of a block that starts at key `start`.
        let first_token = |start: usize| start.saturating_sub(first);
        for (b, start) in (0..n_keys).step_by(KV_BLOCK).enumerate() {
            self.fetch_after(b, start + KV_BLOCK < n_keys, false);
            let (dtype, keys) = self.part(b, false);
            let keys = floats(dtype, keys).unwrap_or_else(|| {
                decode_keys(k, dtype, keys, &mut decoded);
                &decoded
            });
            let from = first_token(start) * self.n_heads;
            // SAFETY: the table is this processor's.
            unsafe { (k.scores)(keys, &q[from * dim..], dim, &mut scores[from * stride + start..], stride) };
        }
        for (i, scores) in scores.chunks_exact_mut(stride).enumerate() {
            let n = first + i / self.n_heads + 1;
            // SAFETY: the table is this processor's.
            unsafe { (k.softmax)(&mut scores[..n], 1.0 / (dim as f32).sqrt()) };
        }
        out.fill(0.0);
        for (b, start) in (0..n_keys).step_by(KV_BLOCK).enumerate() {
            self.fetch_after(b, start + KV_BLOCK < n_keys, true);
            let (dtype, values) = self.part(b, true);
            let values = floats(dtype, values).unwrap_or_else(|| {
                // SAFETY: the table is this processor's.
                unsafe { (k.decode)(dtype, values, &mut decoded) };
                &decoded
            });
            let mut mix = |tokens: std::ops::Range<usize>, n: usize| {
                let rows = tokens.start * self.n_heads..tokens.end * self.n_heads;
                let (scores, out) =
                    (&scores[rows.start * stride + start..], &mut out[rows.start * dim..rows.end * dim]);
                // SAFETY: the table is this processor's.
                unsafe { (k.mix)(&values[..n * dim], scores, stride, dim, out) };
            };
            // Tokens that see all of the block, and those that see a part: each its own.
            let whole = (start + KV_BLOCK - 1).saturating_sub(first).min(n_tokens);
            for t in first_token(start)..whole {
                mix(t..t + 1, first + t + 1 - start);
            }
            if whole < n_tokens {
                mix(whole..n_tokens, KV_BLOCK);
            }
        }
    }
}

/// Bytes that are float32 as they lie.
fn floats(dtype: DType, bytes: &[u8]) -> Option<&[f32]> {
    // SAFETY: every pattern of bits is a float32.
    let (before, floats, after) = unsafe { bytes.align_to::<f32>() };
    (dtype == DType::F32 && cfg!(target_endian = "little") && before.is_empty() && after.is_empty())
        .then_some(floats)
}

/// Decodes a head's keys into (dim, token).
fn decode_keys(kernels: &Kernels, dtype: DType, keys: &[u8], out: &mut [f32]) {
    if dtype != DType::Q8_0 {
        // SAFETY: the table is this processor's.
        return unsafe { (kernels.decode)(dtype, keys, out) };
    }
    let mut scales = [0.0f32; KV_BLOCK];
    for (keys, out) in keys.chunks_exact(34 * KV_BLOCK).zip(out.chunks_exact_mut(32 * KV_BLOCK)) {
        let (halves, bytes) = keys.split_at(2 * KV_BLOCK);
        // SAFETY: the table is this processor's.
        unsafe { (kernels.decode)(DType::F16, halves, &mut scales) };
        for (bytes, out) in bytes.chunks_exact(KV_BLOCK).zip(out.chunks_exact_mut(KV_BLOCK)) {
            for ((o, b), scale) in out.iter_mut().zip(bytes).zip(&scales) {
                *o = *b as i8 as f32 * scale;
            }
        }
    }
}
