//! Kernels for AVX-512 with VNNI. Dot products with quantised weights go by 64 weights at a time through `vpdpbusd`,
//! which multiplies unsigned weights with signed activations: a format gives its weights as unsigned bytes and puts
//! their zero point into the offset.

mod along;

use std::arch::x86_64::*;

use crate::quant::{self, Block, DType, Groups};

use crate::backend::cpu::kernels::{Dot, Kernels, Rows, over_tiles, table};
use crate::backend::cpu::operand::{Operand, QRow};
use crate::backend::cpu::portable;
use crate::backend::cpu::x86::fetch;

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

portable::instantiate!(all_but_along #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]);

pub const KERNELS: Kernels = table!("avx512", dot_for);

const fn dot_for(dtype: DType) -> Dot {
    match dtype {
        DType::F32 | DType::I32 => dot_float::<F32>,
        DType::F16 => dot_float::<F16>,
        DType::BF16 => dot_float::<BF16>,
        DType::Q4_0 => dot_quantized::<Q4_0>,
        DType::Q4_1 => dot_quantized::<Q4_1>,
        DType::Q5_0 => dot_quantized::<Pair<quant::Q5_0>>,
        DType::Q5_1 => dot_quantized::<Pair<quant::Q5_1>>,
        DType::Q8_0 => dot_quantized::<Q8_0>,
        DType::Q2K => dot_quantized::<Super<quant::Q2K>>,
        DType::Q3K => dot_quantized::<Super<quant::Q3K>>,
        DType::Q4K => dot_quantized::<Q4K>,
        DType::Q5K => dot_quantized::<Super<quant::Q5K>>,
        DType::Q6K => dot_quantized::<Q6K>,
        DType::Iq4Nl => dot_quantized::<Pair<quant::Iq4Nl>>,
        DType::Iq4Xs => dot_quantized::<Super<quant::Iq4Xs>>,
    }
}

/// 64 weights: `w = scale * u + min`, each lane's scale and offset being those of its four weights. A format whose
/// offset is a multiple of the scale says so in [`Units::ZERO`] and leaves it zero here.
type Unit = (__m512i, __m512, __m512);

/// How a format's blocks become units. A step is the least whole number of blocks that makes whole units.
trait Units {
    const BLOCK_LEN: usize;
    const BLOCK_BYTES: usize;
    /// Blocks in a step: two of 32 weights, or one of 256.
    const BLOCKS: usize;
    /// What `scale` is multiplied with to be the offset, where that is the same for all weights.
    const ZERO: Option<f32> = None;
    type State;

    /// # Safety
    /// `step` points to a whole step; the processor has the instruction set.
    unsafe fn begin(step: *const u8) -> Self::State;

    /// Unit `i` of the step.
    ///
    /// # Safety
    /// As [`Units::begin`], `i` below the step's units.
    unsafe fn unit(state: &Self::State, step: *const u8, i: usize) -> Unit;
}

/// # Safety
/// As [`Dot`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn dot_quantized<F: Units>(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
    over_tiles!(tile::<F>(rows, x, out, stride));
}

/// `R` rows with `T` tokens from `first` on. Every pair is summed in the same order whatever R and T are.
///
/// # Safety
/// As [`Dot`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn tile<F: Units, const R: usize, const T: usize>(
    rows: &[*const u8; R],
    next: &[*const u8; R],
    x: &Operand,
    first: usize,
    out: *mut f32,
    stride: usize,
) {
    let x_rows: [QRow; T] = std::array::from_fn(|t| x.q_row(first + t));
    let mut sums = [[_mm512_setzero_ps(); T]; R];
    let n_blocks = x.n_cols / F::BLOCK_LEN;
    let step_bytes = F::BLOCKS * F::BLOCK_BYTES;
    for step in 0..n_blocks / F::BLOCKS {
        // SAFETY: the step lies inside the rows.
        let steps: [*const u8; R] = std::array::from_fn(|r| unsafe { rows[r].add(step * step_bytes) });
        if T == 1 {
            fetch(next, step * step_bytes, step_bytes);
        }
        // SAFETY: as above; the activations are as many as the weights.
        unsafe { add_step::<F, R, T>(&steps, &x_rows, step * F::BLOCKS * F::BLOCK_LEN, &mut sums) };
    }
    if n_blocks % F::BLOCKS == 1 {
        // The last block of an odd number, in company of zeros: the activations are padded with zeros as well.
        let last = n_blocks - 1;
        let mut copies = [[0u8; 128]; R];
        for (copy, row) in copies.iter_mut().zip(rows) {
            // SAFETY: the last block lies inside the row.
            let block = unsafe { std::slice::from_raw_parts(row.add(last * F::BLOCK_BYTES), F::BLOCK_BYTES) };
            copy[..F::BLOCK_BYTES].copy_from_slice(block);
        }
        let steps: [*const u8; R] = std::array::from_fn(|r| copies[r].as_ptr());
        // SAFETY: a copy holds a whole step; the padded activations reach as far.
        unsafe { add_step::<F, R, T>(&steps, &x_rows, last * F::BLOCK_LEN, &mut sums) };
    }
    for r in 0..R {
        for t in 0..T {
            // SAFETY: the output has a place for every row and token.
            unsafe { *out.add(t * stride + r) = _mm512_reduce_add_ps(sums[r][t]) };
        }
    }
}

/// # Safety
/// `steps` point to whole steps, `x` reaches from `at` to the step's end, the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn add_step<F: Units, const R: usize, const T: usize>(
    steps: &[*const u8; R],
    x: &[QRow; T],
    at: usize,
    sums: &mut [[__m512; T]; R],
) {
    // SAFETY: the caller's steps are whole.
    let states: [F::State; R] = std::array::from_fn(|r| unsafe { F::begin(steps[r]) });
    for i in 0..F::BLOCKS * F::BLOCK_LEN / 64 {
        let at = at + 64 * i;
        let mut units = [(_mm512_setzero_si512(), _mm512_setzero_ps(), _mm512_setzero_ps()); R];
        for r in 0..R {
            // SAFETY: the caller's steps are whole, and i counts their units.
            units[r] = unsafe { F::unit(&states[r], steps[r], i) };
        }
        for t in 0..T {
            debug_assert!(at + 64 <= x[t].high.len());
            // SAFETY: rows of activations are padded to whole units, and have a scale for each and a sum for every
            // 16 values.
            let (high, low, d, quarter_sums) = unsafe {
                (
                    _mm512_loadu_si512(x[t].high.as_ptr().add(at).cast()),
                    _mm512_loadu_si512(x[t].low.as_ptr().add(at).cast()),
                    _mm512_set1_ps(*x[t].d.as_ptr().add(at / 64)),
                    spread_4(_mm_loadu_ps(x[t].quarter_sum.as_ptr().add(at / 16))),
                )
            };
            let zero_sums = _mm512_mul_ps(quarter_sums, _mm512_set1_ps(F::ZERO.unwrap_or(0.0)));
            for r in 0..R {
                let (u, scale, min) = units[r];
                let highs = _mm512_dpbusd_epi32(_mm512_setzero_si512(), u, high);
                let products = _mm512_dpbusd_epi32(_mm512_slli_epi32(highs, 8), u, low);
                sums[r][t] =
                    _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), _mm512_mul_ps(scale, d), sums[r][t]);
                sums[r][t] = match F::ZERO {
                    Some(_) => _mm512_fmadd_ps(scale, zero_sums, sums[r][t]),
                    None => _mm512_fmadd_ps(min, quarter_sums, sums[r][t]),
                };
            }
        }
    }
}

/// The two lowest values, each in eight lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn spread_8(x: __m128) -> __m512 {
    let which = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    _mm512_permutexvar_ps(which, _mm512_castps128_ps512(x))
}

/// Four values, each in four lanes.
#[inline]
#[target_feature(enable = "avx512f")]
fn spread_4(x: __m128) -> __m512 {
    let which = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
    _mm512_permutexvar_ps(which, _mm512_castps128_ps512(x))
}

/// Two half precision values, each in eight lanes.
///
/// # Safety
/// Both pointers point to two bytes; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,f16c")]
unsafe fn two_halves(a: *const u8, b: *const u8) -> __m512 {
    // SAFETY: as the caller promises.
    let (a, b) = unsafe { (a.cast::<u16>().read_unaligned(), b.cast::<u16>().read_unaligned()) };
    spread_8(_mm_cvtph_ps(_mm_cvtsi32_si128((a as u32 | (b as u32) << 16) as i32)))
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
    ($name:ident, $block:ty, $blocks:literal, $zero:expr, $state:ty, begin($p:ident) $begin:block, unit($s:ident, $q:ident, $i:ident) $unit:block) => {
        struct $name;
        impl Units for $name {
            const BLOCK_LEN: usize = <$block>::LEN;
            const BLOCK_BYTES: usize = <$block>::BYTES;
            const BLOCKS: usize = $blocks;
            const ZERO: Option<f32> = $zero;
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
            unsafe fn unit($s: &$state, $q: *const u8, $i: usize) -> Unit {
                // SAFETY: as above.
                unsafe { $unit }
            }
        }
    };
}

units_of!(Q4_0, quant::Q4_0, 2, Some(-8.0), (), begin(_p) {}, unit(_s, p, _i) {
    let scale = two_halves(p, p.add(18));
    (nibbles(p.add(2), p.add(20)), scale, _mm512_setzero_ps())
});

units_of!(Q4_1, quant::Q4_1, 2, None, (), begin(_p) {}, unit(_s, p, _i) {
    (nibbles(p.add(4), p.add(24)), two_halves(p, p.add(20)), two_halves(p.add(2), p.add(22)))
});

units_of!(Q8_0, quant::Q8_0, 2, Some(-128.0), (), begin(_p) {}, unit(_s, p, _i) {
    let (a, b) = (_mm256_loadu_si256(p.add(2).cast()), _mm256_loadu_si256(p.add(36).cast()));
    let q = _mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1);
    let scale = two_halves(p, p.add(34));
    (_mm512_xor_si512(q, _mm512_set1_epi8(-128)), scale, _mm512_setzero_ps())
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
}, unit(s, p, i) {
    let bytes = _mm256_loadu_si256(p.add(16 + 32 * i).cast());
    let low = _mm256_and_si256(bytes, _mm256_set1_epi8(0x0f));
    let high = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), _mm256_set1_epi8(0x0f));
    let two = |of: &[f32; 8]| spread_8(_mm_castpd_ps(_mm_load_sd(of.as_ptr().add(2 * i).cast())));
    (_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), two(&s.0), two(&s.1))
});

units_of!(Q6K, quant::Q6K, 1, Some(-32.0), [f32; 16], begin(p) {
    let d = _mm512_set1_ps(quant::f16_to_f32(p.add(208).cast::<u16>().read_unaligned()));
    let scales = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.add(192).cast())));
    let mut out = [0.0; 16];
    _mm512_storeu_ps(out.as_mut_ptr(), _mm512_mul_ps(d, scales));
    out
}, unit(s, p, i) {
    let (half, high) = (i / 2, i % 2 == 1);
    let ql = _mm512_loadu_si512(p.add(64 * half).cast());
    let ql = if high { _mm512_srli_epi16(ql, 4) } else { ql };
    let qh = _mm512_broadcast_i64x4(_mm256_loadu_si256(p.add(128 + 32 * half).cast()));
    let shifts = if high { _mm512_set_epi64(6, 6, 6, 6, 4, 4, 4, 4) } else { _mm512_set_epi64(2, 2, 2, 2, 0, 0, 0, 0) };
    let qh = _mm512_and_si512(_mm512_srlv_epi64(qh, shifts), _mm512_set1_epi8(3));
    let u = _mm512_or_si512(_mm512_and_si512(ql, _mm512_set1_epi8(0x0f)), _mm512_slli_epi16(qh, 4));
    let scale = spread_4(_mm_loadu_ps(s.as_ptr().add(4 * i)));
    (u, scale, _mm512_setzero_ps())
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

/// Unit `i` of unpacked groups.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn unit_of_groups(groups: &Groups, i: usize) -> Unit {
    // SAFETY: a block of 256 has four units; callers keep i below that.
    let (q, scale, min) = unsafe {
        (
            _mm512_loadu_si512(groups.q.as_ptr().add(64 * i).cast()),
            spread_4(_mm_loadu_ps(groups.scale.as_ptr().add(4 * i))),
            spread_4(_mm_loadu_ps(groups.min.as_ptr().add(4 * i))),
        )
    };
    let u = _mm512_xor_si512(q, _mm512_set1_epi8(-128));
    (u, scale, _mm512_fmadd_ps(scale, _mm512_set1_ps(-128.0), min))
}

/// Any format of 256 weights, through its scalar reference.
struct Super<B>(std::marker::PhantomData<B>);

impl<B: Block> Units for Super<B> {
    const BLOCK_LEN: usize = B::LEN;
    const BLOCK_BYTES: usize = B::BYTES;
    const BLOCKS: usize = 1;
    type State = Groups;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn begin(step: *const u8) -> Groups {
        let mut groups = Groups::new();
        // SAFETY: the caller's step is a block.
        B::unpack(unsafe { std::slice::from_raw_parts(step, B::BYTES) }, &mut groups);
        groups
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn unit(groups: &Groups, _step: *const u8, i: usize) -> Unit {
        unit_of_groups(groups, i)
    }
}

/// Any format of 32 weights, two blocks a step, through its scalar reference.
struct Pair<B>(std::marker::PhantomData<B>);

impl<B: Block> Units for Pair<B> {
    const BLOCK_LEN: usize = B::LEN;
    const BLOCK_BYTES: usize = B::BYTES;
    const BLOCKS: usize = 2;
    type State = Groups;

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn begin(step: *const u8) -> Groups {
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

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    unsafe fn unit(groups: &Groups, _step: *const u8, i: usize) -> Unit {
        unit_of_groups(groups, i)
    }
}

/// A float type, sixteen weights at a time.
trait Floats {
    const BYTES: usize;

    /// The weights whose lanes `mask` names; zeros elsewhere.
    ///
    /// # Safety
    /// `at` points to those weights; the processor has the instruction set.
    unsafe fn load(at: *const u8, mask: __mmask16) -> __m512;
}

struct F32;
struct F16;
struct BF16;

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
unsafe fn dot_float<F: Floats>(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
    over_tiles!(float_tile::<F>(rows, x, out, stride));
}

/// # Safety
/// As [`Dot`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn float_tile<F: Floats, const R: usize, const T: usize>(
    rows: &[*const u8; R],
    next: &[*const u8; R],
    x: &Operand,
    first: usize,
    out: *mut f32,
    stride: usize,
) {
    let x_rows: [&[f32]; T] = std::array::from_fn(|t| x.float_row(first + t));
    let mut sums = [[_mm512_setzero_ps(); T]; R];
    let mut at = 0;
    while at < x.n_cols {
        if T == 1 {
            fetch(next, at * F::BYTES, 16 * F::BYTES);
        }
        let left = x.n_cols - at;
        let mask = if left >= 16 { 0xffff } else { (1u16 << left) - 1 };
        let mut weights = [_mm512_setzero_ps(); R];
        for r in 0..R {
            // SAFETY: the masked lanes lie inside the rows.
            weights[r] = unsafe { F::load(rows[r].add(at * F::BYTES), mask) };
        }
        for t in 0..T {
            // SAFETY: the masked lanes lie inside the activations.
            let x = unsafe { _mm512_maskz_loadu_ps(mask, x_rows[t].as_ptr().add(at)) };
            for r in 0..R {
                sums[r][t] = _mm512_fmadd_ps(weights[r], x, sums[r][t]);
            }
        }
        at += 16;
    }
    for r in 0..R {
        for t in 0..T {
            // SAFETY: the output has a place for every row and token.
            unsafe { *out.add(t * stride + r) = _mm512_reduce_add_ps(sums[r][t]) };
        }
    }
}
