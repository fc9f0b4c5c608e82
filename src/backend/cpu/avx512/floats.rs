//! Float types: dot products with rows.

use std::arch::x86_64::*;

use super::*;

/// A float type, sixteen weights at a time.
pub trait Floats {
    const BYTES: usize;

    /// The weights whose lanes `mask` names; zeros elsewhere.
    ///
    /// # Safety
    /// `at` points to those weights; the processor has the instruction set.
    unsafe fn load(at: *const u8, mask: __mmask16) -> __m512;
}

pub struct F32;
pub struct F16;
pub struct BF16;

impl Floats for F32 {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn load(at: *const u8, mask: __mmask16) -> __m512 {
        // SAFETY: lanes outside the mask are not read.
        unsafe { _mm512_maskz_loadu_ps(mask, at.cast()) }
    }
}

impl Floats for F16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn load(at: *const u8, mask: __mmask16) -> __m512 {
        // SAFETY: lanes outside the mask are not read.
        _mm512_cvtph_ps(unsafe { _mm256_maskz_loadu_epi16(mask, at.cast()) })
    }
}

impl Floats for BF16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn load(at: *const u8, mask: __mmask16) -> __m512 {
        // SAFETY: lanes outside the mask are not read.
        let halves = unsafe { _mm256_maskz_loadu_epi16(mask, at.cast()) };
        _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))
    }
}

/// # Safety
/// As [`Dot`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub unsafe fn dot_float<F: Floats>(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
    over_tiles!(float_tile::<F>(rows, x, out, stride) by 6 2 1);
}

/// Adds the products of the columns from `at` on that `mask` names.
///
/// # Safety
/// Rows and activations have these columns; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn add_columns<F: Floats, const T: usize>(
    rows: &[*const u8; 4],
    x_rows: &[&[f32]; T],
    at: usize,
    mask: __mmask16,
    sums: &mut [[__m512; T]; 4],
) {
    let mut weights = [_mm512_setzero_ps(); 4];
    for r in 0..4 {
        // SAFETY: the masked lanes lie inside the rows.
        weights[r] = unsafe { F::load(rows[r].add(at * F::BYTES), mask) };
    }
    for t in 0..T {
        // SAFETY: the masked lanes lie inside the activations.
        let x = unsafe { _mm512_maskz_loadu_ps(mask, x_rows[t].as_ptr().add(at)) };
        for r in 0..4 {
            sums[r][t] = _mm512_fmadd_ps(weights[r], x, sums[r][t]);
        }
    }
}

/// # Safety
/// As [`Dot`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn float_tile<F: Floats, const T: usize>(
    rows: &[*const u8; 4],
    next: &[*const u8; 4],
    keep: usize,
    x: &Operand,
    first: usize,
    out: *mut f32,
    stride: usize,
) {
    let x_rows: [&[f32]; T] = std::array::from_fn(|t| x.float_row(first + t));
    let mut sums = [[_mm512_setzero_ps(); T]; 4];
    let whole = x.n_cols / 16 * 16;
    for at in (0..whole).step_by(16) {
        if T == 1 {
            fetch(next, at * F::BYTES, 16 * F::BYTES);
        }
        // SAFETY: sixteen columns of the rows and of the activations.
        unsafe { add_columns::<F, T>(rows, &x_rows, at, 0xffff, &mut sums) };
    }
    if whole < x.n_cols {
        // SAFETY: as above, for the columns left.
        unsafe { add_columns::<F, T>(rows, &x_rows, whole, first_lanes(x.n_cols - whole), &mut sums) };
    }
    for r in 0..keep {
        for t in 0..T {
            // SAFETY: the output has a place for every kept row and token.
            unsafe { *out.add(t * stride + r) = _mm512_reduce_add_ps(sums[r][t]) };
        }
    }
}
