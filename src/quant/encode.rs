//! From float32 to every format that can be written.
//!
//! Without importances the bytes of F16, BF16 and Q4_0 to Q8_0 are those of the `gguf` package; Q2_K to Q6_K, and all
//! with importances, follow ggml's searches (`fit.rs`). An importance is the mean square of the input that a column
//! meets, as in an importance matrix.

use half::f16;
use rayon::prelude::*;

use super::fit::extreme;
use super::{Block, DType, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0, decode};

/// A quantised format that can be written.
pub trait Encode: Block {
    /// Encodes a row, whole blocks of it, into `out`. `importance` is as long as the row.
    fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]);
}

impl DType {
    /// Whether [`encode`] writes it.
    pub const fn can_encode(self) -> bool {
        !matches!(self, DType::Iq4Nl | DType::Iq4Xs | DType::I32)
    }

    /// The largest magnitude that it can hold.
    pub const fn largest(self) -> f32 {
        // Quantised formats hold a scale in F16, and at least twice what that can be.
        if matches!(self, DType::F32 | DType::BF16) { f32::MAX } else { 65504.0 }
    }
}

/// Encodes one row into `out`. Panics where `dtype` can't be written or lengths differ.
pub fn encode(dtype: DType, row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
    assert_eq!(out.len(), dtype.row_bytes(row.len()));
    assert!(importance.is_none_or(|importance| importance.len() == row.len()));
    match dtype {
        DType::F32 => {
            for (o, v) in out.as_chunks_mut::<4>().0.iter_mut().zip(row) {
                *o = v.to_le_bytes();
            }
        }
        DType::F16 => {
            for (o, v) in out.as_chunks_mut::<2>().0.iter_mut().zip(row) {
                *o = f16::from_f32(*v).to_le_bytes();
            }
        }
        DType::BF16 => {
            for (o, v) in out.as_chunks_mut::<2>().0.iter_mut().zip(row) {
                *o = bf16_bits(*v).to_le_bytes();
            }
        }
        DType::Q4_0 => Q4_0::encode(row, importance, out),
        DType::Q4_1 => Q4_1::encode(row, importance, out),
        DType::Q5_0 => Q5_0::encode(row, importance, out),
        DType::Q5_1 => Q5_1::encode(row, importance, out),
        DType::Q8_0 => Q8_0::encode(row, importance, out),
        DType::Q2K => Q2K::encode(row, importance, out),
        DType::Q3K => Q3K::encode(row, importance, out),
        DType::Q4K => Q4K::encode(row, importance, out),
        DType::Q5K => Q5K::encode(row, importance, out),
        DType::Q6K => Q6K::encode(row, importance, out),
        DType::Iq4Nl | DType::Iq4Xs | DType::I32 => unreachable!("{} isn't written", dtype.name()),
    }
}

/// Rows of `n_cols` values from one format to another, on rayon's threads; a value that `to` can't hold is the error.
pub fn recode(
    rows: &[u8],
    from: DType,
    to: DType,
    n_cols: usize,
    importance: Option<&[f32]>,
) -> Result<Vec<u8>, f32> {
    let (n_in, n_out) = (from.row_bytes(n_cols), to.row_bytes(n_cols));
    let mut out = vec![0; rows.len() / n_in * n_out];
    rows.par_chunks_exact(n_in).zip(out.par_chunks_exact_mut(n_out)).try_for_each_init(
        || vec![0.0; n_cols],
        |row, (bytes, out)| {
            decode(from, bytes, row);
            if let Some(bad) = row.iter().find(|v| !v.is_finite() || v.abs() > to.largest()) {
                return Err(*bad);
            }
            encode(to, row, importance, out);
            Ok(())
        },
    )?;
    Ok(out)
}

/// To the nearest, ties to even; a NaN stays one.
fn bf16_bits(v: f32) -> u16 {
    let bits = v.to_bits();
    if v.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

/// The bytes of `v` in F16, and what they stand for.
#[inline(always)]
pub(super) fn in_f16(v: f32) -> ([u8; 2], f32) {
    let half = f16::from_f32(v);
    (half.to_le_bytes(), half.to_f32())
}

/// The mean square of a row.
pub(super) fn mean_square(row: &[f32]) -> f32 {
    (row.iter().map(|v| f64::from(v * v)).sum::<f64>() / row.len() as f64) as f32
}

/// How much an error in each of `x` weighs, where its column has an importance and the weights around it a mean square.
#[inline(always)]
pub(super) fn weigh<const N: usize>(x: &[f32; N], importance: &[f32], mean_square: f32) -> [f32; N] {
    let mut weights = [0.0; N];
    for i in 0..N {
        weights[i] = importance[i] * (mean_square + x[i] * x[i]).sqrt();
    }
    weights
}

/// Scale and levels of 32 weights from the value of largest magnitude, which becomes `-n`.
pub(super) fn plain_signed(x: &[f32; 32], n: f32) -> (f32, [u8; 32]) {
    let d = extreme(x) / -n;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    (d, x.map(|v| ((v * inverse + (n + 0.5)) as u8).min((2.0 * n) as u8 - 1)))
}

/// Scale, offset and levels from 0 to `n` of 32 weights between their extremes.
pub(super) fn plain_offset(x: &[f32; 32], n: f32) -> (f32, f32, [u8; 32]) {
    let high = x.iter().fold(f32::NEG_INFINITY, |m, v| m.max(*v));
    let low = x.iter().fold(f32::INFINITY, |m, v| m.min(*v));
    let d = (high - low) / n;
    let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
    (d, low, x.map(|v| (((v - low) * inverse + 0.5) as u8).min(n as u8)))
}
