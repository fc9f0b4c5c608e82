//! Attention over a block of the cache: float32 and half precision as they lie.

use std::arch::x86_64::*;

use crate::backend::KV_BLOCK;
use crate::backend::cpu::kernels::AttentionKernels;

use super::*;

pub const ATTENTION: AttentionKernels = AttentionKernels { scores: scores::<F32>, mix: mix::<F32> };
pub const HALF_ATTENTION: Option<AttentionKernels> =
    Some(AttentionKernels { scores: scores::<F16>, mix: mix::<F16> });

/// # Safety
/// As [`AttentionKernels::scores`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn scores<F: Floats>(
    keys: &[u8],
    next: &[u8],
    queries: &[f32],
    dim: usize,
    out: &mut [f32],
    stride: usize,
) {
    let n = queries.len() / dim;
    assert!(keys.len() >= dim * KV_BLOCK * F::BYTES && (n == 0 || out.len() >= (n - 1) * stride + KV_BLOCK));
    let mut row = 0;
    while row < n {
        // SAFETY: the slices reach as far, as was asked.
        unsafe {
            let (q, out) = (queries.as_ptr().add(row * dim), out.as_mut_ptr().add(row * stride));
            row += match n - row {
                1 => score_rows::<F, 1>(keys.as_ptr(), next.as_ptr(), q, dim, out, stride),
                2 => score_rows::<F, 2>(keys.as_ptr(), next.as_ptr(), q, dim, out, stride),
                3 => score_rows::<F, 3>(keys.as_ptr(), next.as_ptr(), q, dim, out, stride),
                4..8 => score_rows::<F, 4>(keys.as_ptr(), next.as_ptr(), q, dim, out, stride),
                _ => score_rows::<F, 8>(keys.as_ptr(), next.as_ptr(), q, dim, out, stride),
            }
        }
    }
}

/// # Safety
/// The pointers reach as far as `N` queries do; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn score_rows<F: Floats, const N: usize>(
    keys: *const u8,
    next: *const u8,
    q: *const f32,
    dim: usize,
    out: *mut f32,
    stride: usize,
) -> usize {
    const { assert!(KV_BLOCK == 32) };
    let mut sums = [[_mm512_setzero_ps(); 2]; N];
    for d in 0..dim {
        // SAFETY: as the caller promises; a prefetch of any address is harmless.
        unsafe {
            for line in (0..KV_BLOCK * F::BYTES).step_by(64) {
                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(d * KV_BLOCK * F::BYTES + line).cast());
            }
            let at = keys.add(d * KV_BLOCK * F::BYTES);
            let k = [F::load(at, 0xffff), F::load(at.add(16 * F::BYTES), 0xffff)];
            for n in 0..N {
                let q = _mm512_set1_ps(*q.add(n * dim + d));
                sums[n][0] = _mm512_fmadd_ps(q, k[0], sums[n][0]);
                sums[n][1] = _mm512_fmadd_ps(q, k[1], sums[n][1]);
            }
        }
    }
    for (n, sums) in sums.iter().enumerate() {
        // SAFETY: as above.
        unsafe {
            _mm512_storeu_ps(out.add(n * stride), sums[0]);
            _mm512_storeu_ps(out.add(n * stride + 16), sums[1]);
        }
    }
    N
}

/// # Safety
/// As [`AttentionKernels::mix`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn mix<F: Floats>(
    values: &[u8],
    next: &[u8],
    weights: &[f32],
    stride: usize,
    dim: usize,
    out: &mut [f32],
) {
    let (n, n_keys) = (out.len() / dim, values.len() / F::BYTES / dim);
    assert!(n == 0 || weights.len() >= (n - 1) * stride + n_keys);
    let mut row = 0;
    while row < n {
        // SAFETY: the slices reach as far, as was asked.
        unsafe {
            let (w, out) = (weights.as_ptr().add(row * stride), out.as_mut_ptr().add(row * dim));
            row += match n - row {
                1 => mix_rows::<F, 1>(values.as_ptr(), next.as_ptr(), n_keys, w, stride, dim, out),
                2 => mix_rows::<F, 2>(values.as_ptr(), next.as_ptr(), n_keys, w, stride, dim, out),
                3 => mix_rows::<F, 3>(values.as_ptr(), next.as_ptr(), n_keys, w, stride, dim, out),
                _ => mix_rows::<F, 4>(values.as_ptr(), next.as_ptr(), n_keys, w, stride, dim, out),
            }
        }
    }
}

/// # Safety
/// The pointers reach as far as `N` rows and `n_keys` do; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn mix_rows<F: Floats, const N: usize>(
    values: *const u8,
    next: *const u8,
    n_keys: usize,
    weights: *const f32,
    stride: usize,
    dim: usize,
    out: *mut f32,
) -> usize {
    /// Registers of a row that are summed at a time.
    const WIDTH: usize = 4;
    for column in (0..dim).step_by(16 * WIDTH) {
        let mut masks = [0u16; WIDTH];
        for (i, mask) in masks.iter_mut().enumerate() {
            *mask = first_lanes(dim.saturating_sub(column + 16 * i));
        }
        let mut sums = [[_mm512_setzero_ps(); WIDTH]; N];
        for n in 0..N {
            for i in 0..WIDTH {
                // SAFETY: the masked lanes lie inside the row.
                sums[n][i] =
                    unsafe { _mm512_maskz_loadu_ps(masks[i], out.wrapping_add(n * dim + column + 16 * i)) };
            }
        }
        for k in 0..n_keys {
            let at = (k * dim + column) * F::BYTES;
            for line in (0..16 * WIDTH * F::BYTES).step_by(64) {
                _mm_prefetch::<_MM_HINT_T0>(next.wrapping_add(at + line).cast());
            }
            let at = values.wrapping_add(at);
            let mut v = [_mm512_setzero_ps(); WIDTH];
            for i in 0..WIDTH {
                // SAFETY: as above.
                v[i] = unsafe { F::load(at.wrapping_add(16 * i * F::BYTES), masks[i]) };
            }
            for n in 0..N {
                // SAFETY: a weight for each key.
                let w = _mm512_set1_ps(unsafe { *weights.add(n * stride + k) });
                for i in 0..WIDTH {
                    sums[n][i] = _mm512_fmadd_ps(w, v[i], sums[n][i]);
                }
            }
        }
        for n in 0..N {
            for i in 0..WIDTH {
                // SAFETY: as above.
                unsafe {
                    _mm512_mask_storeu_ps(out.wrapping_add(n * dim + column + 16 * i), masks[i], sums[n][i])
                };
            }
        }
    }
    N
}
