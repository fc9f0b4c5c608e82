//! What runs along one row: decoding it, and adding a multiple of it to another.

use std::arch::x86_64::*;

use crate::quant::{self, DType};

use super::*;

/// See [`crate::backend::cpu::kernels::AddRows`].
///
/// # Safety
/// The processor has the instruction set.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn add_rows(dtype: DType, rows: &[(&[u8], f32)], next: &[(&[u8], f32)], out: &mut [f32]) {
    next.iter().for_each(|(row, _)| crate::backend::cpu::fetch(row));
    for (row, a) in rows {
        // SAFETY: the processor has the instruction set.
        unsafe { axpy(dtype, *a, row, out) };
    }
}

/// `out += a * row`, over whole blocks of the row.
///
/// # Safety
/// The processor has the instruction set.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn axpy(dtype: DType, a: f32, row: &[u8], out: &mut [f32]) {
    let (n, at, factor) = (out.len(), out.as_mut_ptr(), _mm256_set1_ps(a));
    // SAFETY: `each_eight` names eight places of `out`; the processor has the instruction set.
    let done = unsafe {
        each_eight(dtype, row, n, |i, w| {
            _mm256_storeu_ps(at.add(i), _mm256_fmadd_ps(factor, w, _mm256_loadu_ps(at.add(i))));
        })
    };
    let mut tail = [0.0f32; 8];
    let tail = &mut tail[..n - done];
    quant::decode(dtype, &row[dtype.row_bytes(done)..], tail);
    for (o, w) in out[done..].iter_mut().zip(tail) {
        *o = a.mul_add(*w, *o);
    }
}

/// Decodes whole blocks of a row.
///
/// # Safety
/// The processor has the instruction set.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn decode(dtype: DType, row: &[u8], out: &mut [f32]) {
    let at = out.as_mut_ptr();
    // SAFETY: as in `axpy`.
    let done = unsafe { each_eight(dtype, row, out.len(), |i, w| _mm256_storeu_ps(at.add(i), w)) };
    quant::decode(dtype, &row[dtype.row_bytes(done)..], &mut out[done..]);
}

/// `out += a * x`
///
/// # Safety
/// The processor has the instruction set.
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn axpy_f32(a: f32, x: &[f32], out: &mut [f32]) {
    // SAFETY: float32 in memory is its own encoding.
    let bytes = unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), 4 * x.len()) };
    // SAFETY: the processor has the instruction set.
    unsafe { axpy(DType::F32, a, bytes, out) };
}

/// Gives `f` the weights of a row by eights, and returns how many that was: all but a float row's tail.
///
/// # Safety
/// The processor has the instruction set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn each_eight(dtype: DType, row: &[u8], n: usize, f: impl FnMut(usize, __m256)) -> usize {
    assert!(row.len() >= dtype.row_bytes(n));
    // SAFETY: the row has n weights.
    unsafe {
        with_reader!(dtype, Unpacked, Unpacked,
            floats F => each_float::<F>(row, n, f),
            blocks F => each_quantized::<F>(row, n, f))
    }
}

/// # Safety
/// `row` has `n` weights; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn each_float<F: Floats>(row: &[u8], n: usize, mut f: impl FnMut(usize, __m256)) -> usize {
    for at in (0..n / 8 * 8).step_by(8) {
        // SAFETY: eight weights of the row.
        f(at, unsafe { F::load(row.as_ptr().add(at * F::BYTES)) });
    }
    n / 8 * 8
}

/// # Safety
/// `row` has `n` weights, a whole number of blocks; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn each_quantized<F: Units>(row: &[u8], n: usize, mut f: impl FnMut(usize, __m256)) -> usize {
    for (b, block) in row.chunks_exact(F::BLOCK_BYTES).take(n / F::BLOCK_LEN).enumerate() {
        // SAFETY: the block is whole.
        let state = unsafe { F::begin(block.as_ptr()) };
        for i in 0..F::BLOCK_LEN / 32 {
            // SAFETY: i counts the block's units.
            let q = unsafe { F::weights(&state, block.as_ptr(), i) };
            for part in 0..4 {
                let half = if part >= 2 { _mm256_extracti128_si256(q, 1) } else { _mm256_castsi256_si128(q) };
                let eight = if part % 2 == 1 { _mm_srli_si128(half, 8) } else { half };
                let wide = if F::SIGNED { _mm256_cvtepi8_epi32(eight) } else { _mm256_cvtepu8_epi32(eight) };
                // SAFETY: the group is one of the block's.
                let (scale, min) =
                    unsafe { F::scale(&state, block.as_ptr(), (32 * i + 8 * part) / F::SHARE) };
                let zero = F::ZERO_BITS.map_or(0.0, |bits| -((1 << bits) as f32) * scale);
                let offset = if F::HAS_MIN { zero + min } else { zero };
                let at = b * F::BLOCK_LEN + 32 * i + 8 * part;
                let w = _mm256_cvtepi32_ps(wide);
                f(at, _mm256_fmadd_ps(w, _mm256_set1_ps(scale), _mm256_set1_ps(offset)));
            }
        }
    }
    n / F::BLOCK_LEN * F::BLOCK_LEN
}
