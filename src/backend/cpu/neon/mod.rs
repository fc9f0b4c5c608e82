//! Kernels for 64-bit Arm, where NEON is always there, and for its dot and matrix product instructions, where they are. Rows of
//! quantised weights go through their scalar reference, sixteen signed bytes at a time; rows side by side don't.

mod registers;

use std::arch::aarch64::*;

use crate::quant::{Block, DType, GROUP, Groups, Interleaved};
use crate::with_block;

use super::kernels::{Dot, Kernels, Panels, Rows, over_tiles, table};
use super::operand::{Operand, Q_BLOCK, QRow};
use super::panels::{self, Registers, instantiate_panels};
use super::portable;
use registers::{DotProduct, MatrixProduct, Neon, prefetch};

portable::instantiate!(#[target_feature(enable = "neon")]);

/// A set with products of its own: rows and panels through them, the rest as without.
macro_rules! extension {
    ($(#[$doc:meta])* $module:ident, $registers:ty, $is_available:expr, #[$feature:meta]) => {
        $(#[$doc])*
        pub mod $module {
            use super::*;

            pub fn is_available() -> bool {
                $is_available
            }

            instantiate_panels!($registers, #[$feature]);
            instantiate_rows!($registers, #[$feature]);

            pub static KERNELS: Kernels = table!(stringify!($module), dot_for, panels_for, &[]);
        }
    };
}

/// Compiles products with rows for an instruction set: `dot_for`.
macro_rules! instantiate_rows {
    ($registers:ty, #[$feature:meta]) => {
        const fn dot_for(dtype: DType) -> Dot {
            with_block!(dtype, B => dot_quantized::<B>, _ => dot_float_for(dtype))
        }

        /// # Safety
        /// As [`Dot`].
        #[$feature]
        unsafe fn dot_quantized<B: Block>(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
            over_tiles!(tile::<B>(rows, x, out, stride) by 4 1);
        }

        /// # Safety
        /// As [`Dot`].
        #[inline]
        #[$feature]
        unsafe fn tile<B: Block, const T: usize>(
            rows: &[*const u8; 4],
            next: &[*const u8; 4],
            keep: usize,
            x: &Operand,
            first: usize,
            out: *mut f32,
            stride: usize,
        ) {
            // SAFETY: as the caller promises.
            unsafe { four_rows::<$registers, B, T>(rows, next, keep, x, first, out, stride) };
        }
    };
}

instantiate_panels!(Neon, #[target_feature(enable = "neon")]);
instantiate_rows!(Neon, #[target_feature(enable = "neon")]);

pub static KERNELS: Kernels = table!("neon", dot_for, panels_for, &[]);

extension!(
    /// With the dot product instructions.
    dotprod, DotProduct, std::arch::is_aarch64_feature_detected!("dotprod"),
    #[target_feature(enable = "neon,dotprod")]
);

extension!(
    /// With the matrix product instructions too.
    i8mm, MatrixProduct, dotprod::is_available() && std::arch::is_aarch64_feature_detected!("i8mm"),
    #[target_feature(enable = "neon,dotprod,i8mm")]
);

/// Asks memory for the bytes `at..at + n` of each row.
#[inline(always)]
pub fn fetch(rows: &[*const u8], at: usize, n: usize) {
    for row in rows {
        (0..n).step_by(64).for_each(|line| prefetch(row.wrapping_add(at + line)));
    }
}

/// Four rows with `T` tokens from `first` on, the results of the first `keep` rows. Every pair is summed in the order
/// of `panels`: the integer sum of each group, exact, then the groups one after another.
///
/// # Safety
/// As [`Dot`]; the processor has the registers' instruction set.
#[inline(always)]
unsafe fn four_rows<R: Registers<Ints = int32x4_t, Floats = float32x4_t>, B: Block, const T: usize>(
    rows: &[*const u8; 4],
    next: &[*const u8; 4],
    keep: usize,
    x: &Operand,
    first: usize,
    out: *mut f32,
    stride: usize,
) {
    let x_rows: [QRow; T] = std::array::from_fn(|t| x.q_row(first + t));
    let mut groups = [const { Groups::new() }; 4];
    // SAFETY: blocks lie inside the rows; there are as many activations as weights, a scale for every 64 and a sum for
    // every 16; the output has a place for every kept row and token.
    unsafe {
        let mut sums = [R::splat_float(0.0); T];
        for block in 0..x.n_cols / B::LEN {
            if T == 1 {
                fetch(next, block * B::BYTES, B::BYTES);
            }
            for (groups, row) in groups.iter_mut().zip(rows) {
                B::unpack(std::slice::from_raw_parts(row.add(block * B::BYTES), B::BYTES), groups);
            }
            for g in (0..B::LEN / GROUP).step_by(B::SHARE / GROUP) {
                let (mut scale, mut min) = ([0.0f32; 4], [0.0f32; 4]);
                for r in 0..4 {
                    (scale[r], min[r]) = (groups[r].scale[g], groups[r].min[g]);
                }
                let (scale, min) = (R::load_floats(scale.as_ptr()), R::load_floats(min.as_ptr()));
                for t in 0..T {
                    let mut of_rows = [R::splat(0); 4];
                    let mut x_sum = 0;
                    for sixteen in 0..B::SHARE / GROUP {
                        let in_block = (g + sixteen) * GROUP;
                        let at = block * B::LEN + in_block;
                        debug_assert!(at + GROUP <= x_rows[t].high.len());
                        let high = R::load(x_rows[t].high.as_ptr().add(at).cast());
                        let low = R::load(x_rows[t].low.as_ptr().add(at).cast());
                        x_sum += *x_rows[t].sum.as_ptr().add(at / GROUP);
                        for r in 0..4 {
                            let w = R::load(groups[r].q.as_ptr().add(in_block).cast());
                            let highs = R::times_256(R::dot_bytes::<true>(R::splat(0), w, high));
                            of_rows[r] = R::dot_bytes::<true>(R::add(of_rows[r], highs), w, low);
                        }
                    }
                    let pairs = [vpaddq_s32(of_rows[0], of_rows[1]), vpaddq_s32(of_rows[2], of_rows[3])];
                    let dots = R::to_floats(vpaddq_s32(pairs[0], pairs[1]));
                    let d = *x_rows[t].d.as_ptr().add((block * B::LEN + g * GROUP) / Q_BLOCK);
                    sums[t] = R::multiply_add(dots, R::multiply(scale, R::splat_float(d)), sums[t]);
                    if B::HAS_MIN {
                        sums[t] = R::multiply_add(min, R::splat_float(d * x_sum as f32), sums[t]);
                    }
                }
            }
        }
        for (t, sums) in sums.iter().enumerate() {
            let mut four = [0.0f32; 4];
            R::store_floats(four.as_mut_ptr(), *sums);
            std::ptr::copy_nonoverlapping(four.as_ptr(), out.add(t * stride), keep);
        }
    }
}

/// A float type, four weights at a time.
trait Floats {
    const BYTES: usize;

    /// # Safety
    /// `at` points to four weights.
    unsafe fn load(at: *const u8) -> float32x4_t;
}

struct F32;
struct F16;
struct BF16;

impl Floats for F32 {
    const BYTES: usize = 4;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> float32x4_t {
        // SAFETY: as the caller promises.
        unsafe { vreinterpretq_f32_u8(vld1q_u8(at)) }
    }
}

impl Floats for F16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> float32x4_t {
        // SAFETY: as the caller promises.
        unsafe { registers::halves(at) }
    }
}

impl Floats for BF16 {
    const BYTES: usize = 2;

    #[inline(always)]
    unsafe fn load(at: *const u8) -> float32x4_t {
        // SAFETY: as the caller promises.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(at)))) }
    }
}

const fn dot_float_for(dtype: DType) -> Dot {
    match dtype {
        DType::F16 => dot_float::<F16>,
        DType::BF16 => dot_float::<BF16>,
        _ => dot_float::<F32>,
    }
}

/// # Safety
/// As [`Dot`].
#[target_feature(enable = "neon")]
unsafe fn dot_float<F: Floats>(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
    over_tiles!(float_tile::<F>(rows, x, out, stride) by 4 1);
}

/// # Safety
/// As [`Dot`].
#[inline]
#[target_feature(enable = "neon")]
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
    let mut sums = [[vdupq_n_f32(0.0); T]; 4];
    let mut add = |weights: &[*const u8; 4], values: &[*const f32; T]| {
        for r in 0..4 {
            // SAFETY: four weights and four values each.
            unsafe {
                let w = F::load(weights[r]);
                for t in 0..T {
                    sums[r][t] = vfmaq_f32(sums[r][t], w, vld1q_f32(values[t]));
                }
            }
        }
    };
    let whole = x.n_cols / 4 * 4;
    for at in (0..whole).step_by(4) {
        if T == 1 && at % 32 == 0 {
            fetch(next, at * F::BYTES, 32 * F::BYTES);
        }
        add(&rows.map(|row| row.wrapping_add(at * F::BYTES)), &x_rows.map(|x| x[at..].as_ptr()));
    }
    if whole < x.n_cols {
        let (mut weights, mut values) = ([[0u8; 16]; 4], [[0.0f32; 4]; T]);
        for (weights, row) in weights.iter_mut().zip(rows) {
            let n = (x.n_cols - whole) * F::BYTES;
            // SAFETY: what is left of the row, three weights at most.
            unsafe { weights.as_mut_ptr().copy_from_nonoverlapping(row.add(whole * F::BYTES), n) };
        }
        for (values, x) in values.iter_mut().zip(&x_rows) {
            values[..x.len() - whole].copy_from_slice(&x[whole..]);
        }
        add(&weights.each_ref().map(|w| w.as_ptr()), &values.each_ref().map(|v| v.as_ptr()));
    }
    for r in 0..keep {
        for t in 0..T {
            // SAFETY: the output has a place for every kept row and token.
            unsafe { *out.add(t * stride + r) = vaddvq_f32(sums[r][t]) };
        }
    }
}
