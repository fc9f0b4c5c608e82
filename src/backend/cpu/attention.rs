//! Attention over the cache's blocks: of one token, one group of heads at a time.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::backend::{KV_BLOCK, KvShape, Place};
use crate::quant::{DType, encode_q8_0};

use super::kernels::{Kernels, Rows};
use super::operand::{Operand, Quantized};

/// Writes one head's keys or values as the cache holds them.
pub fn encode_kv(dtype: DType, x: &[f32], out: &mut [u8]) {
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

/// Attention of the query heads that share key and value head `head`, for one token.
pub fn attend_group(
    kernels: &Kernels,
    shape: &KvShape,
    layer: usize,
    head: usize,
    q: &[f32],
    place: &Place<Vec<u8>>,
    out: &mut [f32],
) {
    let dim = shape.head_dim;
    let group = q.len() / dim;
    let n_keys = place.position + 1;
    let mut quantized = Quantized::default();
    if shape.dtype.is_quantized() {
        quantized.resize(group, dim);
        let rows = quantized.parts();
        for (h, q) in q.chunks_exact(dim).enumerate() {
            // SAFETY: each head has its own row; the table is this processor's.
            unsafe { (kernels.quantize)(q, &mut rows.row(h)) };
        }
    }
    let operand = Operand { n_cols: dim, first: 0, n_tokens: group, values: q, quantized: Some(&quantized) };
    // Of block b its type, the length of a row, and the rows of this head.
    let rows = |b: usize, is_value: bool| {
        let dtype = shape.dtype_of(b);
        let row_bytes = dtype.row_bytes(dim);
        let start = shape.first_row(layer, is_value, head) * row_bytes;
        (dtype, row_bytes, &place.blocks[b][start..][..KV_BLOCK * row_bytes])
    };
    let mut scores = vec![0.0f32; group * n_keys]; // (group, n_keys)
    for (b, start) in (0..n_keys).step_by(KV_BLOCK).enumerate() {
        let n = KV_BLOCK.min(n_keys - start);
        let (dtype, row_bytes, keys) = rows(b, false);
        let pointers: [*const u8; KV_BLOCK] = std::array::from_fn(|i| keys[i * row_bytes..].as_ptr());
        let out = scores[start..].as_mut_ptr();
        // SAFETY: the rows lie inside the block, `scores` has a place for each key and head, and the table is this
        // processor's.
        unsafe {
            (kernels.dot[dtype as usize])(Rows { now: &pointers[..n], next: &[] }, &operand, out, n_keys)
        };
    }
    for scores in scores.chunks_exact_mut(n_keys) {
        // SAFETY: the table is this processor's.
        unsafe { (kernels.softmax)(scores, 1.0 / (dim as f32).sqrt()) };
    }
    out.fill(0.0);
    let mut value = vec![0.0f32; dim];
    for (b, start) in (0..n_keys).step_by(KV_BLOCK).enumerate() {
        let n = KV_BLOCK.min(n_keys - start);
        let (dtype, row_bytes, values) = rows(b, true);
        for (i, row) in values.chunks_exact(row_bytes).take(n).enumerate() {
            // SAFETY: the table is this processor's.
            unsafe {
                (kernels.decode)(dtype, row, &mut value);
                for (h, out) in out.chunks_exact_mut(dim).enumerate() {
                    (kernels.axpy_f32)(scores[h * n_keys + start + i], &value, out);
                }
            }
        }
    }
}
