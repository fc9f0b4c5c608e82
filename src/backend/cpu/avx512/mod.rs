//! Kernels for AVX-512 with VNNI. Dot products with quantised weights go by 64 weights at a time through `vpdpbusd`,
//! which multiplies unsigned weights with signed activations: a format gives its weights as unsigned bytes, and their
//! zero point is taken off the integer sum of each group.

mod along;
mod attention;
mod floats;
mod registers;
mod sixteen;

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
    is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
        && is_x86_feature_detected!("avx512vnni")
        && is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

portable::instantiate!(instance #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]);

use floats::{BF16, F16, F32, Floats, dot_float};

instantiate_tiles!(registers::Avx512, #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]);

pub static KERNELS: Kernels = table!("avx512", dot_for, panels_for, &[gemm::<true>, gemm::<false>]);

const fn dot_for(dtype: DType) -> Dot {
    match dtype {
        DType::Q4_0 => sixteen::dot_q4_0,
        _ => with_reader!(dtype, Pair, Super, floats F => dot_float::<F>, blocks F => dot_quantized::<F>),
    }
}

/// How a format's blocks become units of 64 weights. A step is the least whole number of blocks that makes whole units.
trait Units {
    const BLOCK_LEN: usize;
    const BLOCK_BYTES: usize;
    /// Blocks in a step: two of 32 weights, or one of 256.
    const BLOCKS: usize;
    /// Weights that share a scale: 16 or 32, a group.
    const SHARE: usize;
    /// Whether groups have offsets.
    const HAS_MIN: bool;
    /// Weights are unsigned: two to this power was added.
    const ZERO_BITS: Option<u32>;
    type State;

    /// # Safety
    /// `step` points to a whole step; the processor has the instruction set.
    unsafe fn begin(step: *const u8) -> Self::State;

    /// The unsigned weights of unit `i` of the step.
    ///
    /// # Safety
    /// As [`Units::begin`], `i` below the step's units.
    unsafe fn weights(state: &Self::State, step: *const u8, i: usize) -> __m512i;

    /// Scale and offset of group `g` of the step.
    ///
    /// # Safety
    /// As [`Units::begin`], `g` below the step's groups.
    unsafe fn scale(state: &Self::State, step: *const u8, g: usize) -> (f32, f32);

    /// The weights of unit `i` of the step, by sixteens.
    ///
    /// # Safety
    /// As [`Units::weights`].
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn floats(state: &Self::State, step: *const u8, i: usize) -> [__m512; 4] {
        // SAFETY: as the caller promises.
        let u = unsafe { Self::weights(state, step, i) };
        let quarters = [
            _mm512_castsi512_si128(u),
            _mm512_extracti32x4_epi32(u, 1),
            _mm512_extracti32x4_epi32(u, 2),
            _mm512_extracti32x4_epi32(u, 3),
        ];
        let mut out = [_mm512_setzero_ps(); 4];
        for g in 0..4 {
            // SAFETY: the group is one of the step's, where it has it.
            let (scale, min) = unsafe { Self::scale(state, step, (64 * i + 16 * g) / Self::SHARE) };
            let zero = Self::ZERO_BITS.map_or(0.0, |bits| -((1 << bits) as f32) * scale);
            let offset = if Self::HAS_MIN { zero + min } else { zero };
            let w = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(quarters[g]));
            out[g] = _mm512_fmadd_ps(w, _mm512_set1_ps(scale), _mm512_set1_ps(offset));
        }
        out
    }
}

/// # Safety
/// As [`Dot`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn dot_quantized<F: Units>(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
    over_tiles!(tile::<F>(rows, x, out, stride) by 4 1);
}

/// Four rows with `T` tokens from `first` on, the results of the first `keep` rows. Every pair is summed in the order
/// of `panels`: the integer sum of each group, exact, then the groups one after another.
///
/// # Safety
/// As [`Dot`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
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
    let n_blocks = x.n_cols / F::BLOCK_LEN;
    let step_bytes = F::BLOCKS * F::BLOCK_BYTES;
    for step in 0..n_blocks / F::BLOCKS {
        // SAFETY: the step lies inside the rows.
        let steps: [*const u8; 4] = std::array::from_fn(|r| unsafe { rows[r].add(step * step_bytes) });
        if T == 1 {
            fetch(next, step * step_bytes, step_bytes);
        }
        // SAFETY: as above; the activations are as many as the weights.
        unsafe { add_step::<F, T>(&steps, &x_rows, step * F::BLOCKS * F::BLOCK_LEN, &mut sums) };
    }
    if n_blocks % F::BLOCKS == 1 {
        // The last block of an odd number, in company of zeros: the activations are padded with zeros as well.
        let last = n_blocks - 1;
        let mut copies = [[0u8; 128]; 4];
        for (copy, row) in copies.iter_mut().zip(rows) {
            // SAFETY: the last block lies inside the row.
            let block = unsafe { std::slice::from_raw_parts(row.add(last * F::BLOCK_BYTES), F::BLOCK_BYTES) };
            copy[..F::BLOCK_BYTES].copy_from_slice(block);
        }
        let steps: [*const u8; 4] = std::array::from_fn(|r| copies[r].as_ptr());
        // SAFETY: a copy holds a whole step; the padded activations reach as far.
        unsafe { add_step::<F, T>(&steps, &x_rows, last * F::BLOCK_LEN, &mut sums) };
    }
    for (t, sums) in sums.iter().enumerate() {
        // SAFETY: the output has a place for every kept row and token.
        unsafe { _mm_mask_storeu_ps(out.add(t * stride), (1 << keep) - 1, *sums) };
    }
}

/// # Safety
/// `steps` point to whole steps, `x` reaches from `at` to the step's end, the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn add_step<F: Units, const T: usize>(
    steps: &[*const u8; 4],
    x: &[QRow; T],
    at: usize,
    sums: &mut [__m128; T],
) {
    // SAFETY: the caller's steps are whole.
    let states = unsafe { [F::begin(steps[0]), F::begin(steps[1]), F::begin(steps[2]), F::begin(steps[3])] };
    for i in 0..F::BLOCKS * F::BLOCK_LEN / 64 {
        let at = at + 64 * i;
        let mut weights = [_mm512_setzero_si512(); 4];
        for r in 0..4 {
            // SAFETY: the caller's steps are whole, and i counts their units.
            weights[r] = unsafe { F::weights(&states[r], steps[r], i) };
        }
        let mut scales = [(_mm_setzero_ps(), _mm_setzero_ps()); 4];
        for (g, scales) in scales.iter_mut().enumerate().take(64 / F::SHARE) {
            let mut of = [(0.0, 0.0); 4];
            for r in 0..4 {
                // SAFETY: as above, for the unit's groups.
                of[r] = unsafe { F::scale(&states[r], steps[r], 64 / F::SHARE * i + g) };
            }
            *scales = (
                _mm_set_ps(of[3].0, of[2].0, of[1].0, of[0].0),
                _mm_set_ps(of[3].1, of[2].1, of[1].1, of[0].1),
            );
        }
        for t in 0..T {
            debug_assert!(at + 64 <= x[t].high.len());
            // SAFETY: rows of activations are padded to whole units, and have a scale for each and a sum for every
            // 16 values.
            let (high, low, d, x_sums) = unsafe {
                (
                    _mm512_loadu_si512(x[t].high.as_ptr().add(at).cast()),
                    _mm512_loadu_si512(x[t].low.as_ptr().add(at).cast()),
                    _mm_set1_ps(*x[t].d.as_ptr().add(at / 64)),
                    _mm_loadu_si128(x[t].sum.as_ptr().add(at / 16).cast()),
                )
            };
            let mut products = [_mm512_setzero_si512(); 4];
            for r in 0..4 {
                let highs = _mm512_dpbusd_epi32(_mm512_setzero_si512(), weights[r], high);
                products[r] = _mm512_dpbusd_epi32(_mm512_slli_epi32(highs, 8), weights[r], low);
            }
            // (group of 16, row)
            let mut dots = sum_quads(&products);
            if let Some(bits) = F::ZERO_BITS {
                let zeros = _mm512_sll_epi32(spread_4(x_sums), _mm_cvtsi32_si128(bits as i32));
                dots = _mm512_sub_epi32(dots, zeros);
            }
            let quarters = [
                _mm512_castsi512_si128(dots),
                _mm512_extracti32x4_epi32(dots, 1),
                _mm512_extracti32x4_epi32(dots, 2),
                _mm512_extracti32x4_epi32(dots, 3),
            ];
            if F::SHARE == 32 {
                let x_sums = _mm_mul_ps(d, _mm_cvtepi32_ps(_mm_hadd_epi32(x_sums, x_sums)));
                let halves =
                    [_mm_add_epi32(quarters[0], quarters[1]), _mm_add_epi32(quarters[2], quarters[3])];
                add_group::<F>(&mut sums[t], halves[0], d, scales[0], _mm_broadcastss_ps(x_sums));
                add_group::<F>(&mut sums[t], halves[1], d, scales[1], _mm_permute_ps(x_sums, 0x55));
            } else {
                let x_sums = _mm_mul_ps(d, _mm_cvtepi32_ps(x_sums));
                add_group::<F>(&mut sums[t], quarters[0], d, scales[0], _mm_broadcastss_ps(x_sums));
                add_group::<F>(&mut sums[t], quarters[1], d, scales[1], _mm_permute_ps(x_sums, 0x55));
                add_group::<F>(&mut sums[t], quarters[2], d, scales[2], _mm_permute_ps(x_sums, 0xaa));
                add_group::<F>(&mut sums[t], quarters[3], d, scales[3], _mm_permute_ps(x_sums, 0xff));
            }
        }
    }
}

/// Adds a group's dot products: those with the weights' integers, and the offsets' share.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn add_group<F: Units>(
    sum: &mut __m128,
    dots: __m128i,
    d: __m128,
    (scale, min): (__m128, __m128),
    x_sum: __m128,
) {
    *sum = _mm_fmadd_ps(_mm_cvtepi32_ps(dots), _mm_mul_ps(scale, d), *sum);
    if F::HAS_MIN {
        *sum = _mm_fmadd_ps(min, x_sum, *sum);
    }
}

/// Four rows of sixteen values as the sums of their quads: (quad, row).
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
fn sum_quads(rows: &[__m512i; 4]) -> __m512i {
    let pairs = |a, b| _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    let (ab, cd) = (pairs(rows[0], rows[1]), pairs(rows[2], rows[3]));
    _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
}

/// Four values, each in four lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn spread_4(x: __m128i) -> __m512i {
    let which = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    _mm512_permutexvar_epi32(which, _mm512_castsi128_si512(x))
}

/// The first `n` lanes, or all sixteen where that is more.
fn first_lanes(n: usize) -> __mmask16 {
    if n >= 16 { 0xffff } else { (1 << n) - 1 }
}

/// Two runs of 16 bytes of nibbles as 64 bytes: low halves, then high halves, of each run.
///
/// # Safety
/// Both pointers point to sixteen bytes; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn nibbles(a: *const u8, b: *const u8) -> __m512i {
    // SAFETY: as the caller promises.
    let (a, b) = unsafe { (_mm_loadu_si128(a.cast()), _mm_loadu_si128(b.cast())) };
    let both = _mm512_castsi256_si512(_mm256_set_m128i(b, a));
    let doubled = _mm512_permutexvar_epi64(_mm512_set_epi64(3, 2, 3, 2, 1, 0, 1, 0), both);
    let shifted = _mm512_srlv_epi64(doubled, _mm512_set_epi64(4, 4, 0, 0, 4, 4, 0, 0));
    _mm512_and_si512(shifted, _mm512_set1_epi8(0x0f))
}

macro_rules! units_of {
    ($name:ident, $block:ty, $blocks:literal, $zero:expr, $state:ty, begin($p:ident) $begin:block, weights($s:ident, $q:ident, $i:ident) $weights:block, scale($t:ident, $r:ident, $g:ident) $scale:block $(, floats($f:ident) $floats:block)?) => {
        struct $name;
        impl Units for $name {
            const BLOCK_LEN: usize = <$block>::LEN;
            const BLOCK_BYTES: usize = <$block>::BYTES;
            const BLOCKS: usize = $blocks;
            const SHARE: usize = <$block>::SHARE;
            const HAS_MIN: bool = <$block>::HAS_MIN;
            const ZERO_BITS: Option<u32> = $zero;
            type State = $state;

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            unsafe fn begin($p: *const u8) -> $state {
                // SAFETY: the loads stay inside the step, which the caller promises to be whole.
                #[allow(unused_unsafe)]
                unsafe {
                    $begin
                }
            }

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            unsafe fn weights($s: &$state, $q: *const u8, $i: usize) -> __m512i {
                // SAFETY: as above.
                unsafe { $weights }
            }

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            unsafe fn scale($t: &$state, $r: *const u8, $g: usize) -> (f32, f32) {
                // SAFETY: as above.
                #[allow(unused_unsafe)]
                unsafe {
                    $scale
                }
            }

            $(
                #[inline]
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
                unsafe fn floats(_: &$state, $f: *const u8, _: usize) -> [__m512; 4] {
                    // SAFETY: as above.
                    unsafe { $floats }
                }
            )?
        }
    };
}

units_of!(Q4_0, quant::Q4_0, 2, Some(3), (), begin(_p) {}, weights(_s, p, _i) {
    nibbles(p.add(2), p.add(20))
}, scale(_s, p, g) {
    (half(p.add(18 * g)), 0.0)
}, floats(p) {
    // A nibble's value is looked up; bits above it are not seen.
    let values = _mm512_set_ps(7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0);
    let mut out = [_mm512_setzero_ps(); 4];
    for b in 0..2 {
        let scale = _mm512_set1_ps(half(p.add(18 * b)));
        let bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.add(18 * b + 2).cast()));
        out[2 * b] = _mm512_mul_ps(_mm512_permutexvar_ps(bytes, values), scale);
        out[2 * b + 1] = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values), scale);
    }
    out
});

units_of!(Q4_1, quant::Q4_1, 2, None, (), begin(_p) {}, weights(_s, p, _i) {
    nibbles(p.add(4), p.add(24))
}, scale(_s, p, g) {
    (half(p.add(20 * g)), half(p.add(20 * g + 2)))
});

units_of!(Q8_0, quant::Q8_0, 2, Some(7), (), begin(_p) {}, weights(_s, p, _i) {
    let (a, b) = (_mm256_loadu_si256(p.add(2).cast()), _mm256_loadu_si256(p.add(36).cast()));
    _mm512_xor_si512(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1), _mm512_set1_epi8(-128))
}, scale(_s, p, g) {
    (half(p.add(34 * g)), 0.0)
});

units_of!(Q4K, quant::Q4K, 1, None, ([f32; 8], [f32; 8]), begin(p) {
    let (scales, mins) = k_scales(p);
    let halves = _mm_cvtph_ps(_mm_cvtsi32_si128(p.cast::<i32>().read_unaligned()));
    let d = _mm256_broadcastss_ps(halves);
    let dmin = _mm256_broadcastss_ps(_mm_movehdup_ps(halves));
    let mut out = ([0.0; 8], [0.0; 8]);
    _mm256_storeu_ps(out.0.as_mut_ptr(), _mm256_mul_ps(d, scales));
    _mm256_storeu_ps(out.1.as_mut_ptr(), _mm256_sub_ps(_mm256_setzero_ps(), _mm256_mul_ps(dmin, mins)));
    out
}, weights(_s, p, i) {
    let bytes = _mm256_loadu_si256(p.add(16 + 32 * i).cast());
    let low = _mm256_and_si256(bytes, _mm256_set1_epi8(0x0f));
    let high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(0x0f));
    _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)
}, scale(s, _p, g) {
    (s.0[g], s.1[g])
});

units_of!(Q6K, quant::Q6K, 1, Some(5), [f32; 16], begin(p) {
    let d = _mm512_set1_ps(half(p.add(208)));
    let scales = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.add(192).cast())));
    let mut out = [0.0; 16];
    _mm512_storeu_ps(out.as_mut_ptr(), _mm512_mul_ps(d, scales));
    out
}, weights(_s, p, i) {
    let (half, high) = (i / 2, i % 2 == 1);
    let ql = _mm512_loadu_si512(p.add(64 * half).cast());
    let ql = if high { _mm512_srli_epi16(ql, 4) } else { ql };
    let qh = _mm512_broadcast_i64x4(_mm256_loadu_si256(p.add(128 + 32 * half).cast()));
    let shifts = if high { _mm512_set_epi64(6, 6, 6, 6, 4, 4, 4, 4) } else { _mm512_set_epi64(2, 2, 2, 2, 0, 0, 0, 0) };
    let qh = _mm512_and_si512(_mm512_srlv_epi64(qh, shifts), _mm512_set1_epi8(3));
    _mm512_or_si512(_mm512_and_si512(ql, _mm512_set1_epi8(0x0f)), _mm512_slli_epi16(qh, 4))
}, scale(s, _p, g) {
    (s[g], 0.0)
});

/// The eight six-bit scales and offsets of a Q4_K block, as floats.
///
/// # Safety
/// `block` points to a Q4_K block; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn k_scales(block: *const u8) -> (__m256, __m256) {
    // SAFETY: the twelve bytes lie inside the block.
    let [a, b, c] = unsafe { block.add(4).cast::<[u32; 3]>().read_unaligned() };
    let (scales_low, mins_low) = (a & 0x3f3f_3f3f, b & 0x3f3f_3f3f);
    let scales_high = c & 0x0f0f_0f0f | (a >> 6 & 0x0303_0303) << 4;
    let mins_high = c >> 4 & 0x0f0f_0f0f | (b >> 6 & 0x0303_0303) << 4;
    let floats = |low: u32, high: u32| {
        let bytes = _mm_cvtsi64_si128((low as u64 | (high as u64) << 32) as i64);
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes))
    };
    (floats(scales_low, scales_high), floats(mins_low, mins_high))
}

/// The weights of unit `i` of unpacked groups, made unsigned.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn weights_of_groups(groups: &Groups, i: usize) -> __m512i {
    let q = &groups.q[64 * i..][..64];
    // SAFETY: 64 bytes.
    let q = unsafe { _mm512_loadu_si512(q.as_ptr().cast()) };
    _mm512_xor_si512(q, _mm512_set1_epi8(-128))
}

macro_rules! units_of_groups {
    ($(#[$doc:meta])* $name:ident, $blocks:literal, begin($p:ident) $begin:block) => {
        $(#[$doc])*
        struct $name<B>(std::marker::PhantomData<B>);

        impl<B: Block> Units for $name<B> {
            const BLOCK_LEN: usize = B::LEN;
            const BLOCK_BYTES: usize = B::BYTES;
            const BLOCKS: usize = $blocks;
            const SHARE: usize = B::SHARE;
            const HAS_MIN: bool = B::HAS_MIN;
            const ZERO_BITS: Option<u32> = Some(7);
            type State = Groups;

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            unsafe fn begin($p: *const u8) -> Groups {
                $begin
            }

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            unsafe fn weights(groups: &Groups, _step: *const u8, i: usize) -> __m512i {
                weights_of_groups(groups, i)
            }

            #[inline]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
            unsafe fn scale(groups: &Groups, _step: *const u8, g: usize) -> (f32, f32) {
                groups.of_share::<B>(g)
            }
        }
    };
}

units_of_groups!(
    /// Any format of 256 weights, through its scalar reference.
    Super, 1, begin(step) {
        let mut groups = Groups::new();
        // SAFETY: the caller's step is a block.
        B::unpack(unsafe { std::slice::from_raw_parts(step, B::BYTES) }, &mut groups);
        groups
    }
);

units_of_groups!(
    /// Any format of 32 weights, two blocks a step, through its scalar reference.
    Pair, 2, begin(step) {
        let (mut groups, mut second) = (Groups::new(), Groups::new());
        // SAFETY: the caller's step is two blocks.
        let blocks = unsafe { std::slice::from_raw_parts(step, 2 * B::BYTES) };
        B::unpack(&blocks[..B::BYTES], &mut groups);
        B::unpack(&blocks[B::BYTES..], &mut second);
        groups.q[32..64].copy_from_slice(&second.q[..32]);
        groups.scale[2..4].copy_from_slice(&second.scale[..2]);
        groups.min[2..4].copy_from_slice(&second.min[..2]);
        groups
    }
);
