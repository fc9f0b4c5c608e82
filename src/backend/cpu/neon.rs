//! Kernels for 64-bit Arm, where NEON is always there. Quantised weights go through their scalar reference, sixteen
//! signed bytes at a time.

use std::arch::aarch64::*;

use crate::quant::{self, Block, DType, GROUP, Groups};
use crate::with_block;

use super::kernels::{Dot, Kernels, Rows, over_tiles, table};
use super::operand::{Operand, QRow};
use super::portable;

portable::instantiate!(#[target_feature(enable = "neon")]);

pub static KERNELS: Kernels = table!("neon", dot_for);

const fn dot_for(dtype: DType) -> Dot {
    with_block!(dtype, B => dot_quantized::<B>, _ => match dtype {
        DType::F16 => dot_float::<F16>,
        DType::BF16 => dot_float::<BF16>,
        _ => dot_float::<F32>,
    })
}

/// # Safety
/// As [`Dot`].
unsafe fn dot_quantized<B: Block>(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
    over_tiles!(tile::<B>(rows, x, out, stride) by 4 1);
}

/// # Safety
/// As [`Dot`].
#[inline]
#[target_feature(enable = "neon")]
unsafe fn tile<B: Block, const T: usize>(
    rows: &[*const u8; 4],
    _next: &[*const u8; 4],
    keep: usize,
    x: &Operand,
    first: usize,
    out: *mut f32,
    stride: usize,
) {
    let x_rows: [QRow; T] = std::array::from_fn(|t| x.q_row(first + t));
    let mut sums = [[vdupq_n_f32(0.0); T]; 4];
    let mut groups = Groups::new();
    for block in 0..x.n_cols / B::LEN {
        for r in 0..4 {
            // SAFETY: the block lies inside the row.
            let bytes = unsafe { std::slice::from_raw_parts(rows[r].add(block * B::BYTES), B::BYTES) };
            B::unpack(bytes, &mut groups);
            for g in 0..B::LEN / GROUP {
                let at = block * B::LEN + g * GROUP;
                // SAFETY: a group is sixteen bytes.
                let w = unsafe { vld1q_s8(groups.q.as_ptr().add(g * GROUP)) };
                for t in 0..T {
                    debug_assert!(at + GROUP <= x_rows[t].high.len());
                    // SAFETY: there are as many activations as weights.
                    let (high, low) = unsafe {
                        (vld1q_s8(x_rows[t].high.as_ptr().add(at)), vld1q_s8(x_rows[t].low.as_ptr().add(at)))
                    };
                    let products = vaddq_s32(vshlq_n_s32::<8>(products(w, high)), products(w, low));
                    let scale = groups.scale[g] * x_rows[t].d[at / 64];
                    sums[r][t] = vfmaq_n_f32(sums[r][t], vcvtq_f32_s32(products), scale);
                    if B::HAS_MIN {
                        let min = vdupq_n_f32(groups.min[g]);
                        // A quarter in each lane: dividing by four loses nothing.
                        let x_sum = x_rows[t].d[at / 64] * x_rows[t].sum[at / 16] as f32;
                        sums[r][t] = vfmaq_n_f32(sums[r][t], min, 0.25 * x_sum);
                    }
                }
            }
        }
    }
    for r in 0..keep {
        for t in 0..T {
            // SAFETY: the output has a place for every kept row and token.
            unsafe { *out.add(t * stride + r) = vaddvq_f32(sums[r][t]) };
        }
    }
}

/// Sums of products over each four bytes.
#[inline]
#[target_feature(enable = "neon")]
fn products(a: int8x16_t, b: int8x16_t) -> int32x4_t {
    let low = vmull_s8(vget_low_s8(a), vget_low_s8(b));
    vpadalq_s16(vpaddlq_s16(low), vmull_high_s8(a, b))
}

/// A float type, one weight at a time; the compiler joins four.
trait Floats {
    const BYTES: usize;

    /// # Safety
    /// `at` points to a weight.
    unsafe fn load(at: *const u8) -> f32;
}

struct F32;
struct F16;
struct BF16;

impl Floats for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> f32 {
        // SAFETY: as the caller promises.
        unsafe { at.cast::<f32>().read_unaligned() }
    }
}

impl Floats for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> f32 {
        // SAFETY: as the caller promises.
        quant::f16_to_f32(unsafe { at.cast::<u16>().read_unaligned() })
    }
}

impl Floats for BF16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> f32 {
        // SAFETY: as the caller promises.
        quant::bf16_to_f32(unsafe { at.cast::<u16>().read_unaligned() })
    }
}

/// # Safety
/// As [`Dot`].
unsafe fn dot_float<F: Floats>(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
    over_tiles!(float_tile::<F>(rows, x, out, stride) by 4 1);
}

/// # Safety
/// As [`Dot`].
#[inline]
#[target_feature(enable = "neon")]
unsafe fn float_tile<F: Floats, const T: usize>(
    rows: &[*const u8; 4],
    _next: &[*const u8; 4],
    keep: usize,
    x: &Operand,
    first: usize,
    out: *mut f32,
    stride: usize,
) {
    let x_rows: [&[f32]; T] = std::array::from_fn(|t| x.float_row(first + t));
    let mut sums = [[vdupq_n_f32(0.0); T]; 4];
    let mut at = 0;
    while at < x.n_cols {
        let n = (x.n_cols - at).min(4);
        for r in 0..4 {
            let mut weights = [0.0f32; 4];
            for (i, w) in weights[..n].iter_mut().enumerate() {
                // SAFETY: the row's weights from `at` on.
                *w = unsafe { F::load(rows[r].add((at + i) * F::BYTES)) };
            }
            // SAFETY: an array of four.
            let w = unsafe { vld1q_f32(weights.as_ptr()) };
            for t in 0..T {
                let mut values = [0.0f32; 4];
                values[..n].copy_from_slice(&x_rows[t][at..at + n]);
                // SAFETY: an array of four.
                sums[r][t] = vfmaq_f32(sums[r][t], w, unsafe { vld1q_f32(values.as_ptr()) });
            }
        }
        at += 4;
    }
    for r in 0..keep {
        for t in 0..T {
            // SAFETY: the output has a place for every kept row and token.
            unsafe { *out.add(t * stride + r) = vaddvq_f32(sums[r][t]) };
        }
    }
}
