//! What runs along one row: decoding it, and adding a multiple of it to another.

use std::arch::x86_64::*;

use crate::quant::{self, DType};

use super::*;

/// `out += a * row`, over whole blocks of the row.
///
/// # Safety
/// The processor has the instruction set.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub unsafe fn axpy(dtype: DType, a: f32, row: &[u8], out: &mut [f32]) {
    let (a, n, at) = (_mm512_set1_ps(a), out.len(), out.as_mut_ptr());
    // SAFETY: the masked lanes lie inside `out`.
    let add = |i: usize, w: __m512, mask: __mmask16| unsafe {
        let sum = _mm512_fmadd_ps(a, w, _mm512_maskz_loadu_ps(mask, at.add(i)));
        _mm512_mask_storeu_ps(at.add(i), mask, sum);
    };
    // SAFETY: the processor has the instruction set.
    unsafe { each_sixteen(dtype, row, n, add) };
}

/// Decodes whole blocks of a row.
///
/// # Safety
/// The processor has the instruction set.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub unsafe fn decode(dtype: DType, row: &[u8], out: &mut [f32]) {
    let (n, at) = (out.len(), out.as_mut_ptr());
    // SAFETY: the masked lanes lie inside `out`; the processor has the instruction set.
    unsafe { each_sixteen(dtype, row, n, |i, w, mask| _mm512_mask_storeu_ps(at.add(i), mask, w)) };
}

/// `out += a * x`
///
/// # Safety
/// The processor has the instruction set.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub unsafe fn axpy_f32(a: f32, x: &[f32], out: &mut [f32]) {
    // SAFETY: float32 in memory is its own encoding.
    let bytes = unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), 4 * x.len()) };
    // SAFETY: the processor has the instruction set.
    unsafe { axpy(DType::F32, a, bytes, out) };
}

/// Gives `f` the weights of a row by sixteens: where they are, what they are, which there are.
///
/// # Safety
/// The processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn each_sixteen(dtype: DType, row: &[u8], n: usize, f: impl FnMut(usize, __m512, __mmask16)) {
    assert!(row.len() >= dtype.row_bytes(n));
    // SAFETY: the row has n weights.
    unsafe {
        match dtype {
            DType::F32 | DType::I32 => each_float::<F32>(row, n, f),
            DType::F16 => each_float::<F16>(row, n, f),
            DType::BF16 => each_float::<BF16>(row, n, f),
            DType::Q4_0 => each_quantized::<Q4_0>(row, n, f),
            DType::Q4_1 => each_quantized::<Q4_1>(row, n, f),
            DType::Q5_0 => each_quantized::<Pair<quant::Q5_0>>(row, n, f),
            DType::Q5_1 => each_quantized::<Pair<quant::Q5_1>>(row, n, f),
            DType::Q8_0 => each_quantized::<Q8_0>(row, n, f),
            DType::Q2K => each_quantized::<Super<quant::Q2K>>(row, n, f),
            DType::Q3K => each_quantized::<Super<quant::Q3K>>(row, n, f),
            DType::Q4K => each_quantized::<Q4K>(row, n, f),
            DType::Q5K => each_quantized::<Super<quant::Q5K>>(row, n, f),
            DType::Q6K => each_quantized::<Q6K>(row, n, f),
            DType::Iq4Nl => each_quantized::<Pair<quant::Iq4Nl>>(row, n, f),
            DType::Iq4Xs => each_quantized::<Super<quant::Iq4Xs>>(row, n, f),
        }
    }
}

/// # Safety
/// `row` has `n` weights; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn each_float<F: Floats>(row: &[u8], n: usize, mut f: impl FnMut(usize, __m512, __mmask16)) {
    let mut at = 0;
    while at < n {
        let mask = if n - at >= 16 { 0xffff } else { (1u16 << (n - at)) - 1 };
        // SAFETY: the masked lanes lie inside the row.
        f(at, unsafe { F::load(row.as_ptr().add(at * F::BYTES), mask) }, mask);
        at += 16;
    }
}

/// # Safety
/// `row` has `n` weights, a whole number of blocks; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn each_quantized<F: Units>(row: &[u8], n: usize, mut f: impl FnMut(usize, __m512, __mmask16)) {
    let (n_blocks, step_bytes) = (n / F::BLOCK_LEN, F::BLOCKS * F::BLOCK_BYTES);
    for (i, step) in row.chunks_exact(step_bytes).take(n_blocks / F::BLOCKS).enumerate() {
        // SAFETY: the step is whole.
        unsafe {
            each_of_step::<F>(step.as_ptr(), i * F::BLOCKS * F::BLOCK_LEN, F::BLOCKS * F::BLOCK_LEN, &mut f)
        };
    }
    if n_blocks % F::BLOCKS == 1 {
        let mut copy = [0u8; 128];
        copy[..F::BLOCK_BYTES].copy_from_slice(&row[(n_blocks - 1) * F::BLOCK_BYTES..][..F::BLOCK_BYTES]);
        // SAFETY: the copy holds a whole step.
        unsafe { each_of_step::<F>(copy.as_ptr(), n - F::BLOCK_LEN, F::BLOCK_LEN, &mut f) };
    }
}

/// The first `n` weights of a step whose place is `at`.
///
/// # Safety
/// `step` points to a whole step; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn each_of_step<F: Units>(
    step: *const u8,
    at: usize,
    n: usize,
    f: &mut impl FnMut(usize, __m512, __mmask16),
) {
    // SAFETY: the caller's step is whole.
    let state = unsafe { F::begin(step) };
    for i in 0..n.div_ceil(64) {
        // SAFETY: i counts the step's units.
        let u = unsafe { F::weights(&state, step, i) };
        macro_rules! group {
            ($g:literal) => {
                if 64 * i + 16 * $g < n {
                    // SAFETY: the group is one of the step's.
                    let (scale, min) = unsafe { F::scale(&state, step, (64 * i + 16 * $g) / F::SHARE) };
                    let zero = F::ZERO_BITS.map_or(0.0, |bits| -((1 << bits) as f32) * scale);
                    let offset = if F::HAS_MIN { zero + min } else { zero };
                    let w = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(u, $g)));
                    let w = _mm512_fmadd_ps(w, _mm512_set1_ps(scale), _mm512_set1_ps(offset));
                    f(at + 64 * i + 16 * $g, w, 0xffff);
                }
            };
        }
        group!(0);
        group!(1);
        group!(2);
        group!(3);
    }
}
