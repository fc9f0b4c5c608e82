//! What runs along one row: decoding it, and adding a multiple of it to another.

use std::arch::x86_64::*;

use crate::quant::DType;

use super::*;

/// See [`crate::backend::cpu::kernels::AddRows`].
///
/// # Safety
/// The processor has the instruction set.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub unsafe fn add_rows(dtype: DType, rows: &[(&[u8], f32)], next: &[(&[u8], f32)], out: &mut [f32]) {
    rows.iter().for_each(|(row, _)| assert!(row.len() >= dtype.row_bytes(out.len())));
    // SAFETY: the rows have `out.len()` weights.
    unsafe {
        with_reader!(dtype, Pair, Super,
            floats F => add_floats::<F>(rows, next, out),
            blocks F => add_quantized::<F>(rows, next, out))
    }
}

/// # Safety
/// The rows have `out.len()` weights; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn add_floats<F: Floats>(rows: &[(&[u8], f32)], next: &[(&[u8], f32)], out: &mut [f32]) {
    for at in (0..out.len()).step_by(16) {
        ask(next, at * F::BYTES, 16 * F::BYTES);
        let mask = first_lanes(out.len() - at);
        // SAFETY: the masked lanes lie inside `out`, and inside the rows.
        unsafe {
            let to = out.as_mut_ptr().add(at);
            let mut sum = _mm512_maskz_loadu_ps(mask, to);
            for (row, a) in rows {
                let w = F::load(row.as_ptr().add(at * F::BYTES), mask);
                sum = _mm512_fmadd_ps(_mm512_set1_ps(*a), w, sum);
            }
            _mm512_mask_storeu_ps(to, mask, sum);
        }
    }
}

/// # Safety
/// The rows have `out.len()` weights, a whole number of blocks; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn add_quantized<F: Units>(rows: &[(&[u8], f32)], next: &[(&[u8], f32)], out: &mut [f32]) {
    // Of a unit's sums only those of 64 columns stay in registers; a format of longer blocks unpacks too much for them.
    let together = if F::BLOCKS * F::BLOCK_LEN == 64 { out.len() / 64 } else { 0 };
    let step_bytes = F::BLOCKS * F::BLOCK_BYTES;
    let (units, rest) = out.split_at_mut(64 * together);
    for (i, out) in units.as_chunks_mut::<64>().0.iter_mut().enumerate() {
        ask(next, i * step_bytes, step_bytes);
        let mut sums = [_mm512_setzero_ps(); 4];
        for g in 0..4 {
            // SAFETY: a quarter of 64 values.
            sums[g] = unsafe { _mm512_loadu_ps(out.as_ptr().add(16 * g)) };
        }
        for (row, a) in rows {
            let a = _mm512_set1_ps(*a);
            // SAFETY: the step lies inside the row, and is a unit; the processor has the instruction set.
            let w = unsafe {
                let step = row.as_ptr().add(i * step_bytes);
                F::floats(&F::begin(step), step, 0)
            };
            for g in 0..4 {
                sums[g] = _mm512_fmadd_ps(a, w[g], sums[g]);
            }
        }
        for g in 0..4 {
            // SAFETY: as above.
            unsafe { _mm512_storeu_ps(out.as_mut_ptr().add(16 * g), sums[g]) };
        }
    }
    if rest.is_empty() {
        return;
    }
    let at = together * step_bytes;
    ask(next, at, rest.len() / F::BLOCK_LEN * F::BLOCK_BYTES);
    for (row, a) in rows {
        let (a, to) = (_mm512_set1_ps(*a), rest.as_mut_ptr());
        // SAFETY: the masked lanes lie inside `rest`, and as many weights inside the row.
        unsafe {
            each_quantized::<F>(&row[at..], rest.len(), |i, w, mask| {
                let sum = _mm512_fmadd_ps(a, w, _mm512_maskz_loadu_ps(mask, to.add(i)));
                _mm512_mask_storeu_ps(to.add(i), mask, sum);
            });
        }
    }
}

/// Asks memory for a stretch of rows.
#[inline]
#[target_feature(enable = "avx512f")]
fn ask(rows: &[(&[u8], f32)], at: usize, n: usize) {
    for (row, _) in rows {
        fetch(&[row.as_ptr()], at, n);
    }
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
    unsafe { add_rows(DType::F32, &[(bytes, a)], &[], out) };
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
        with_reader!(dtype, Pair, Super,
            floats F => each_float::<F>(row, n, f),
            blocks F => each_quantized::<F>(row, n, f))
    }
}

/// # Safety
/// `row` has `n` weights; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn each_float<F: Floats>(row: &[u8], n: usize, mut f: impl FnMut(usize, __m512, __mmask16)) {
    let mut at = 0;
    while at < n {
        let mask = first_lanes(n - at);
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
        // SAFETY: i counts the step's units; the processor has the instruction set.
        let w = unsafe { F::floats(&state, step, i) };
        for g in 0..4 {
            if 64 * i + 16 * g < n {
                f(at + 64 * i + 16 * g, w[g], 0xffff);
            }
        }
    }
}
