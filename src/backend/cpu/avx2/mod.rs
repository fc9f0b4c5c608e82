//! Kernels for AVX2 with FMA and F16C. Dot products with quantised weights go by 32 weights at a time through
//! `vpmaddubsw`, which multiplies unsigned with signed bytes into 16 bits: weights of up to seven bits go in unsigned, and
//! their zero point is taken off the integer sum of each group; signed bytes lend their sign to the activations.

mod along;
mod registers;
pub mod vnni;

use std::arch::x86_64::*;

use crate::quant::{self, Block, DType, Groups, Interleaved};
use crate::with_block;

use crate::backend::cpu::kernels::{Dot, Kernels, Panels, Rows, over_tiles, table};
use crate::backend::cpu::operand::{Operand, QRow, WeightTile, WordRow};
use crate::backend::cpu::panels;
use crate::backend::cpu::portable;
use crate::backend::cpu::tiles::{self, GemmTile, instantiate_tiles};
use crate::backend::cpu::x86::{fetch, half, with_reader};

pub fn is_available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

portable::instantiate!(instance #[target_feature(enable = "avx2,fma,f16c")]);
portable::instantiate!(attention #[target_feature(enable = "avx2,fma,f16c")]);

instantiate_tiles!(registers::Avx2, #[target_feature(enable = "avx2,fma,f16c")]);

pub static KERNELS: Kernels = table!("avx2", dot_for, panels_for, &[gemm::<true>]);

const fn dot_for(dtype: DType) -> Dot {
    with_reader!(dtype, Unpacked, Unpacked, floats F => dot_float::<F>, blocks F => dot_quantized::<F>)
}

/// How a format's blocks become units of 32 weights.
trait Units {
    const BLOCK_LEN: usize;
    const BLOCK_BYTES: usize;
    /// Weights that share a scale: 16 or 32, a group.
    const SHARE: usize;
    /// Whether groups have offsets.
    const HAS_MIN: bool;
    /// Whether weights are signed bytes; otherwise unsigned ones of at most seven bits.
    const SIGNED: bool;
    /// Where weights were made unsigned, two to this power was added.
    const ZERO_BITS: Option<u32>;
    type State;

    /// # Safety
    /// `block` points to a whole block; the processor has the instruction set.
    unsafe fn begin(block: *const u8) -> Self::State;

    /// The weights of unit `i` of the block.
    ///
    /// # Safety
    /// As [`Units::begin`], `i` below the block's units.
    unsafe fn weights(state: &Self::State, block: *const u8, i: usize) -> __m256i;

    /// Scale and offset of group `g` of the block.
    ///
    /// # Safety
    /// As [`Units::begin`], `g` below the block's groups.
    unsafe fn scale(state: &Self::State, block: *const u8, g: usize) -> (f32, f32);
}

/// # Safety
/// As [`Dot`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_quantized<F: Units>(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
    over_tiles!(tile::<F>(rows, x, out, stride) by 4 1);
}

/// Four rows with `T` tokens from `first` on, the results of the first `keep` rows. Every pair is summed in the order
/// of `panels`: the integer sum of each group, exact, then the groups one after another.
///
/// # Safety
/// As [`Dot`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<F: Units, const T: usize>(
    rows: &[*const u8; 4],
    next: &[*const u8; 4],
    keep: usize,
    x: &Operand,
    first: usize,
    out: *mut f32,
    stride: usize,
) {
    let x_rows: [QRow; T] = std::array::from_fn(|t| x.q_row(first + t));
    let mut sums = [_mm_setzero_ps(); T];
    for block in 0..x.n_cols / F::BLOCK_LEN {
        // SAFETY: the block lies inside the rows.
        let blocks: [*const u8; 4] = std::array::from_fn(|r| unsafe { rows[r].add(block * F::BLOCK_BYTES) });
        if T == 1 {
            fetch(next, block * F::BLOCK_BYTES, F::BLOCK_BYTES);
        }
        // SAFETY: as above.
        let states =
            unsafe { [F::begin(blocks[0]), F::begin(blocks[1]), F::begin(blocks[2]), F::begin(blocks[3])] };
        for i in 0..F::BLOCK_LEN / 32 {
            let at = block * F::BLOCK_LEN + 32 * i;
            let mut weights = [_mm256_setzero_si256(); 4];
            for r in 0..4 {
                // SAFETY: as above, and i counts the block's units.
                weights[r] = unsafe { F::weights(&states[r], blocks[r], i) };
            }
            let mut scales = [(_mm_setzero_ps(), _mm_setzero_ps()); 2];
            for (g, scales) in scales.iter_mut().enumerate().take(32 / F::SHARE) {
                let mut of = [(0.0, 0.0); 4];
                for r in 0..4 {
                    // SAFETY: as above, for the unit's groups.
                    of[r] = unsafe { F::scale(&states[r], blocks[r], 32 / F::SHARE * i + g) };
                }
                *scales = (
                    _mm_set_ps(of[3].0, of[2].0, of[1].0, of[0].0),
                    _mm_set_ps(of[3].1, of[2].1, of[1].1, of[0].1),
                );
            }
            for (x, sum) in x_rows.iter().zip(&mut sums) {
                debug_assert!(at + 32 <= x.high.len());
                // SAFETY: there are as many activations as weights, a scale for every 64 and a sum for every 16.
                let (high, low, d, x_sums) = unsafe {
                    (
                        _mm256_loadu_si256(x.high.as_ptr().add(at).cast()),
                        _mm256_loadu_si256(x.low.as_ptr().add(at).cast()),
                        *x.d.as_ptr().add(at / 64),
                        [*x.sum.as_ptr().add(at / 16), *x.sum.as_ptr().add(at / 16 + 1)],
                    )
                };
                let mut of_rows = [_mm256_setzero_si256(); 4];
                for r in 0..4 {
                    let highs = _mm256_slli_epi32(products::<F>(weights[r], high), 8);
                    of_rows[r] = _mm256_add_epi32(highs, products::<F>(weights[r], low));
                }
                // (group of 16, row)
                let dots = _mm256_hadd_epi32(
                    _mm256_hadd_epi32(of_rows[0], of_rows[1]),
                    _mm256_hadd_epi32(of_rows[2], of_rows[3]),
                );
                let dots = [_mm256_castsi256_si128(dots), _mm256_extracti128_si256(dots, 1)];
                if F::SHARE == 32 {
                    let (both, x_sum) = (_mm_add_epi32(dots[0], dots[1]), x_sums[0] + x_sums[1]);
                    add_group::<F>(sum, both, d, scales[0], x_sum);
                } else {
                    add_group::<F>(sum, dots[0], d, scales[0], x_sums[0]);
                    add_group::<F>(sum, dots[1], d, scales[1], x_sums[1]);
                }
            }
        }
    }
    for (t, sums) in sums.iter().enumerate() {
        let mut four = [0.0f32; 4];
        // SAFETY: an array of four.
        unsafe { _mm_storeu_ps(four.as_mut_ptr(), *sums) };
        for (r, sum) in four[..keep].iter().enumerate() {
            // SAFETY: the output has a place for every kept row and token.
            unsafe { *out.add(t * stride + r) = *sum };
        }
    }
}

/// Adds a group's dot products: those with the weights' integers, and the offsets' share.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn add_group<F: Units>(sum: &mut __m128, dots: __m128i, d: f32, (scale, min): (__m128, __m128), x_sum: i32) {
    let zero = F::ZERO_BITS.map_or(0, |bits| x_sum << bits);
    let dots = _mm_sub_epi32(dots, _mm_set1_epi32(zero));
    *sum = _mm_fmadd_ps(_mm_cvtepi32_ps(dots), _mm_mul_ps(scale, _mm_set1_ps(d)), *sum);
    if F::HAS_MIN {
        *sum = _mm_fmadd_ps(min, _mm_set1_ps(d * x_sum as f32), *sum);
    }
}

/// Sums of products over each four bytes. No 16-bit sum saturates: weights of seven bits unsigned, or of magnitude
/// up to 128, meet bytes of magnitude up to 127.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn products<F: Units>(weights: __m256i, q: __m256i) -> __m256i {
    let pairs = if F::SIGNED {
        _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(q, weights))
    } else {
        _mm256_maddubs_epi16(weights, q)
    };
    _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn reduce(x: __m256) -> f32 {
    let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
}

/// Sixteen bytes of nibbles as 32 bytes: low halves, then high halves.
///
/// # Safety
/// `at` points to sixteen bytes; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn nibbles(at: *const u8) -> __m256i {
    // SAFETY: as the caller promises.
    let bytes = unsafe { _mm_loadu_si128(at.cast()) };
    let both = _mm256_set_m128i(_mm_srli_epi16(bytes, 4), bytes);
    _mm256_and_si256(both, _mm256_set1_epi8(0x0f))
}

macro_rules! units_of {
    ($name:ident, $block:ty, $signed:literal, $zero:expr, $state:ty, begin($p:ident) $begin:block, weights($s:ident, $q:ident, $i:ident) $weights:block, scale($t:ident, $r:ident, $g:ident) $scale:block) => {
        struct $name;
        impl Units for $name {
            const BLOCK_LEN: usize = <$block>::LEN;
            const BLOCK_BYTES: usize = <$block>::BYTES;
            const SHARE: usize = <$block>::SHARE;
            const HAS_MIN: bool = <$block>::HAS_MIN;
            const SIGNED: bool = $signed;
            const ZERO_BITS: Option<u32> = $zero;
            type State = $state;

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn begin($p: *const u8) -> $state {
                // SAFETY: the loads stay inside the block, which the caller promises to be whole.
                #[allow(unused_unsafe)]
                unsafe {
                    $begin
                }
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn weights($s: &$state, $q: *const u8, $i: usize) -> __m256i {
                // SAFETY: as above.
                unsafe { $weights }
            }

            #[inline]
            #[target_feature(enable = "avx2,fma,f16c")]
            unsafe fn scale($t: &$state, $r: *const u8, $g: usize) -> (f32, f32) {
                // SAFETY: as above.
                #[allow(unused_unsafe)]
                unsafe {
                    $scale
                }
            }
        }
    };
}

units_of!(Q4_0, quant::Q4_0, false, Some(3), (), begin(_p) {}, weights(_s, p, _i) {
    nibbles(p.add(2))
}, scale(_s, p, _g) {
    (half(p), 0.0)
});

units_of!(Q4_1, quant::Q4_1, false, None, (), begin(_p) {}, weights(_s, p, _i) {
    nibbles(p.add(4))
}, scale(_s, p, _g) {
    (half(p), half(p.add(2)))
});

units_of!(Q8_0, quant::Q8_0, true, None, (), begin(_p) {}, weights(_s, p, _i) {
    _mm256_loadu_si256(p.add(2).cast())
}, scale(_s, p, _g) {
    (half(p), 0.0)
});

units_of!(Q4K, quant::Q4K, false, None, ([f32; 8], [f32; 8]), begin(p) {
    let (d, dmin) = (half(p), half(p.add(2)));
    let scales = &*p.add(4).cast::<[u8; 12]>();
    let mut out = ([0.0; 8], [0.0; 8]);
    for run in 0..8 {
        let (scale, min) = quant::k_scale_min(scales, run);
        out.0[run] = d * scale as f32;
        out.1[run] = -(dmin * min as f32);
    }
    out
}, weights(_s, p, i) {
    let bytes = _mm256_loadu_si256(p.add(16 + 32 * (i / 2)).cast());
    let bytes = if i % 2 == 1 { _mm256_srli_epi16(bytes, 4) } else { bytes };
    _mm256_and_si256(bytes, _mm256_set1_epi8(0x0f))
}, scale(s, _p, g) {
    (s.0[g], s.1[g])
});

units_of!(Q6K, quant::Q6K, false, Some(5), [f32; 16], begin(p) {
    let d = half(p.add(208));
    let mut out = [0.0; 16];
    for g in 0..16 {
        out[g] = d * (*p.add(192 + g) as i8) as f32;
    }
    out
}, weights(_s, p, i) {
    let (half, quarter) = (i / 4, i % 4);
    let ql = _mm256_loadu_si256(p.add(64 * half + 32 * (quarter % 2)).cast());
    let ql = if quarter >= 2 { _mm256_srli_epi16(ql, 4) } else { ql };
    let qh = _mm256_loadu_si256(p.add(128 + 32 * half).cast());
    let qh = _mm256_srl_epi16(qh, _mm_cvtsi32_si128(2 * quarter as i32));
    let high = _mm256_slli_epi16(_mm256_and_si256(qh, _mm256_set1_epi8(3)), 4);
    _mm256_or_si256(_mm256_and_si256(ql, _mm256_set1_epi8(0x0f)), high)
}, scale(s, _p, g) {
    (s[g], 0.0)
});

/// Any format, through its scalar reference.
struct Unpacked<B>(std::marker::PhantomData<B>);

impl<B: Block> Units for Unpacked<B> {
    const BLOCK_LEN: usize = B::LEN;
    const BLOCK_BYTES: usize = B::BYTES;
    const SHARE: usize = B::SHARE;
    const HAS_MIN: bool = B::HAS_MIN;
    const SIGNED: bool = true;
    const ZERO_BITS: Option<u32> = None;
    type State = Groups;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn begin(block: *const u8) -> Groups {
        let mut groups = Groups::new();
        // SAFETY: the caller's block is whole.
        B::unpack(unsafe { std::slice::from_raw_parts(block, B::BYTES) }, &mut groups);
        groups
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn weights(groups: &Groups, _block: *const u8, i: usize) -> __m256i {
        // SAFETY: the groups hold a whole block.
        unsafe { _mm256_loadu_si256(groups.q.as_ptr().add(32 * i).cast()) }
    }

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn scale(groups: &Groups, _block: *const u8, g: usize) -> (f32, f32) {
        groups.of_share::<B>(g)
    }
}

/// A float type, eight weights at a time.
trait Floats {
    const BYTES: usize;

    /// # Safety
    /// `at` points to eight weights; the processor has the instruction set.
    unsafe fn load(at: *const u8) -> __m256;
}

struct F32;
struct F16;
struct BF16;

impl Floats for F32 {
    const BYTES: usize = 4;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(at: *const u8) -> __m256 {
        // SAFETY: as the caller promises.
        unsafe { _mm256_loadu_ps(at.cast()) }
    }
}

impl Floats for F16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(at: *const u8) -> __m256 {
        // SAFETY: as the caller promises.
        _mm256_cvtph_ps(unsafe { _mm_loadu_si128(at.cast()) })
    }
}

impl Floats for BF16 {
    const BYTES: usize = 2;

    #[inline]
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn load(at: *const u8) -> __m256 {
        // SAFETY: as the caller promises.
        let halves = unsafe { _mm_loadu_si128(at.cast()) };
        _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16))
    }
}

/// # Safety
/// As [`Dot`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_float<F: Floats>(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
    over_tiles!(float_tile::<F>(rows, x, out, stride) by 3 1);
}

/// # Safety
/// As [`Dot`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
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
    let mut sums = [[_mm256_setzero_ps(); T]; 4];
    let whole = x.n_cols / 8 * 8;
    let mut step = |at: usize, rows: &[*const u8; 4], x: &[*const f32; T]| {
        let mut values = [_mm256_setzero_ps(); T];
        for t in 0..T {
            // SAFETY: the callers below point to eight activations from `at` on.
            values[t] = unsafe { _mm256_loadu_ps(x[t].add(at)) };
        }
        for r in 0..4 {
            // SAFETY: likewise to eight weights.
            let weights = unsafe { F::load(rows[r].add(at * F::BYTES)) };
            for t in 0..T {
                sums[r][t] = _mm256_fmadd_ps(weights, values[t], sums[r][t]);
            }
        }
    };
    let starts: [*const f32; T] = std::array::from_fn(|t| x_rows[t].as_ptr());
    for at in (0..whole).step_by(8) {
        if T == 1 {
            fetch(next, at * F::BYTES, 8 * F::BYTES);
        }
        step(at, rows, &starts);
    }
    if whole < x.n_cols {
        let n = x.n_cols - whole;
        let (mut weight_tails, mut x_tails) = ([[0u8; 32]; 4], [[0f32; 8]; T]);
        for (tail, row) in weight_tails.iter_mut().zip(rows) {
            // SAFETY: the row's last n weights.
            let left = unsafe { std::slice::from_raw_parts(row.add(whole * F::BYTES), n * F::BYTES) };
            tail[..left.len()].copy_from_slice(left);
        }
        for (tail, x) in x_tails.iter_mut().zip(x_rows) {
            tail[..n].copy_from_slice(&x[whole..]);
        }
        let rows = std::array::from_fn(|r| weight_tails[r].as_ptr());
        let x = std::array::from_fn(|t| x_tails[t].as_ptr());
        step(0, &rows, &x);
    }
    for r in 0..keep {
        for t in 0..T {
            // SAFETY: the output has a place for every kept row and token.
            unsafe { *out.add(t * stride + r) = reduce(sums[r][t]) };
        }
    }
}
