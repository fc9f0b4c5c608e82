//! Kernels for AVX2 with FMA and F16C. Dot products with quantised weights go by 32 weights at a time through
//! `vpmaddubsw`, which multiplies unsigned with signed bytes into 16 bits: weights of up to six bits go in unsigned,
//! with their zero point in the offset; signed bytes lend their sign to the activations.

mod along;

use std::arch::x86_64::*;

use crate::quant::{self, Block, DType, Groups};

use crate::backend::cpu::kernels::{Dot, Kernels, Rows, over_tiles, table};
use crate::backend::cpu::operand::{Operand, QRow};
use crate::backend::cpu::portable;
use crate::backend::cpu::x86::fetch;

pub fn is_available() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
}

portable::instantiate!(all_but_along #[target_feature(enable = "avx2,fma,f16c")]);

pub const KERNELS: Kernels = table!("avx2", dot_for);

const fn dot_for(dtype: DType) -> Dot {
    match dtype {
        DType::F32 | DType::I32 => dot_float::<F32>,
        DType::F16 => dot_float::<F16>,
        DType::BF16 => dot_float::<BF16>,
        DType::Q4_0 => dot_quantized::<Q4_0>,
        DType::Q4_1 => dot_quantized::<Q4_1>,
        DType::Q5_0 => dot_quantized::<Unpacked<quant::Q5_0>>,
        DType::Q5_1 => dot_quantized::<Unpacked<quant::Q5_1>>,
        DType::Q8_0 => dot_quantized::<Q8_0>,
        DType::Q2K => dot_quantized::<Unpacked<quant::Q2K>>,
        DType::Q3K => dot_quantized::<Unpacked<quant::Q3K>>,
        DType::Q4K => dot_quantized::<Q4K>,
        DType::Q5K => dot_quantized::<Unpacked<quant::Q5K>>,
        DType::Q6K => dot_quantized::<Q6K>,
        DType::Iq4Nl => dot_quantized::<Unpacked<quant::Iq4Nl>>,
        DType::Iq4Xs => dot_quantized::<Unpacked<quant::Iq4Xs>>,
    }
}

/// 32 weights: `w = scale * q + min`, each lane's scale and offset being those of its four weights.
type Unit = (__m256i, __m256, __m256);

/// How a format's blocks become units.
trait Units {
    const BLOCK_LEN: usize;
    const BLOCK_BYTES: usize;
    /// Whether weights are signed bytes; otherwise unsigned ones of at most seven bits.
    const SIGNED: bool;
    type State;

    /// # Safety
    /// `block` points to a whole block; the processor has the instruction set.
    unsafe fn begin(block: *const u8) -> Self::State;

    /// Unit `i` of the block.
    ///
    /// # Safety
    /// As [`Units::begin`], `i` below the block's units.
    unsafe fn unit(state: &Self::State, block: *const u8, i: usize) -> Unit;
}

/// # Safety
/// As [`Dot`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_quantized<F: Units>(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
    over_tiles!(tile::<F>(rows, x, out, stride));
}

/// `R` rows with `T` tokens from `first` on. Every pair is summed in the same order whatever R and T are.
///
/// # Safety
/// As [`Dot`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tile<F: Units, const R: usize, const T: usize>(
    rows: &[*const u8; R],
    next: &[*const u8; R],
    x: &Operand,
    first: usize,
    out: *mut f32,
    stride: usize,
) {
    let x_rows: [QRow; T] = std::array::from_fn(|t| x.q_row(first + t));
    let mut sums = [[_mm256_setzero_ps(); T]; R];
    for block in 0..x.n_cols / F::BLOCK_LEN {
        // SAFETY: the block lies inside the rows.
        let blocks: [*const u8; R] = std::array::from_fn(|r| unsafe { rows[r].add(block * F::BLOCK_BYTES) });
        if T == 1 {
            fetch(next, block * F::BLOCK_BYTES, F::BLOCK_BYTES);
        }
        // SAFETY: as above.
        let states: [F::State; R] = std::array::from_fn(|r| unsafe { F::begin(blocks[r]) });
        for i in 0..F::BLOCK_LEN / 32 {
            let at = block * F::BLOCK_LEN + 32 * i;
            let mut units = [(_mm256_setzero_si256(), _mm256_setzero_ps(), _mm256_setzero_ps()); R];
            for r in 0..R {
                // SAFETY: as above, and i counts the block's units.
                units[r] = unsafe { F::unit(&states[r], blocks[r], i) };
            }
            for t in 0..T {
                debug_assert!(at + 32 <= x_rows[t].high.len());
                // SAFETY: there are as many activations as weights, a scale for every 64 and a sum for every 16.
                let (high, low, d, quarter_sums) = unsafe {
                    (
                        _mm256_loadu_si256(x_rows[t].high.as_ptr().add(at).cast()),
                        _mm256_loadu_si256(x_rows[t].low.as_ptr().add(at).cast()),
                        _mm256_broadcast_ss(&*x_rows[t].d.as_ptr().add(at / 64)),
                        spread_4(x_rows[t].quarter_sum.as_ptr().add(at / 16)),
                    )
                };
                for r in 0..R {
                    let (weights, scale, min) = units[r];
                    let highs = _mm256_slli_epi32(products::<F>(weights, high), 8);
                    let products = _mm256_add_epi32(highs, products::<F>(weights, low));
                    sums[r][t] =
                        _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_mul_ps(scale, d), sums[r][t]);
                    sums[r][t] = _mm256_fmadd_ps(min, quarter_sums, sums[r][t]);
                }
            }
        }
    }
    for r in 0..R {
        for t in 0..T {
            // SAFETY: the output has a place for every row and token.
            unsafe { *out.add(t * stride + r) = reduce(sums[r][t]) };
        }
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

/// Two values, each in four lanes.
///
/// # Safety
/// `at` points to two values; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn spread_4(at: *const f32) -> __m256 {
    // SAFETY: as the caller promises.
    let two = unsafe { _mm_castpd_ps(_mm_load_sd(at.cast())) };
    _mm256_permutevar8x32_ps(_mm256_castps128_ps256(two), _mm256_set_epi32(1, 1, 1, 1, 0, 0, 0, 0))
}

/// A half precision value in all lanes.
///
/// # Safety
/// `at` points to two bytes; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn half(at: *const u8) -> __m256 {
    // SAFETY: as the caller promises.
    let bits = unsafe { at.cast::<u16>().read_unaligned() };
    _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(bits as i32)))
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
    ($name:ident, $block:ty, $signed:literal, $state:ty, begin($p:ident) $begin:block, unit($s:ident, $q:ident, $i:ident) $unit:block) => {
        struct $name;
        impl Units for $name {
            const BLOCK_LEN: usize = <$block>::LEN;
            const BLOCK_BYTES: usize = <$block>::BYTES;
            const SIGNED: bool = $signed;
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
            unsafe fn unit($s: &$state, $q: *const u8, $i: usize) -> Unit {
                // SAFETY: as above.
                unsafe { $unit }
            }
        }
    };
}

units_of!(Q4_0, quant::Q4_0, false, (), begin(_p) {}, unit(_s, p, _i) {
    let scale = half(p);
    (nibbles(p.add(2)), scale, _mm256_mul_ps(scale, _mm256_set1_ps(-8.0)))
});

units_of!(Q4_1, quant::Q4_1, false, (), begin(_p) {}, unit(_s, p, _i) {
    (nibbles(p.add(4)), half(p), half(p.add(2)))
});

units_of!(Q8_0, quant::Q8_0, true, (), begin(_p) {}, unit(_s, p, _i) {
    (_mm256_loadu_si256(p.add(2).cast()), half(p), _mm256_setzero_ps())
});

units_of!(Q4K, quant::Q4K, false, ([f32; 8], [f32; 8]), begin(p) {
    let d = quant::f16_to_f32(p.cast::<u16>().read_unaligned());
    let dmin = quant::f16_to_f32(p.add(2).cast::<u16>().read_unaligned());
    let scales = &*p.add(4).cast::<[u8; 12]>();
    let mut out = ([0.0; 8], [0.0; 8]);
    for run in 0..8 {
        let (scale, min) = quant::k_scale_min(scales, run);
        out.0[run] = d * scale as f32;
        out.1[run] = -(dmin * min as f32);
    }
    out
}, unit(s, p, i) {
    let bytes = _mm256_loadu_si256(p.add(16 + 32 * (i / 2)).cast());
    let bytes = if i % 2 == 1 { _mm256_srli_epi16(bytes, 4) } else { bytes };
    (_mm256_and_si256(bytes, _mm256_set1_epi8(0x0f)), _mm256_set1_ps(s.0[i]), _mm256_set1_ps(s.1[i]))
});

units_of!(Q6K, quant::Q6K, false, [f32; 16], begin(p) {
    let d = quant::f16_to_f32(p.add(208).cast::<u16>().read_unaligned());
    let mut out = [0.0; 16];
    for g in 0..16 {
        out[g] = d * (*p.add(192 + g) as i8) as f32;
    }
    out
}, unit(s, p, i) {
    let (half, quarter) = (i / 4, i % 4);
    let ql = _mm256_loadu_si256(p.add(64 * half + 32 * (quarter % 2)).cast());
    let ql = if quarter >= 2 { _mm256_srli_epi16(ql, 4) } else { ql };
    let qh = _mm256_loadu_si256(p.add(128 + 32 * half).cast());
    let qh = _mm256_srl_epi16(qh, _mm_cvtsi32_si128(2 * quarter as i32));
    let high = _mm256_slli_epi16(_mm256_and_si256(qh, _mm256_set1_epi8(3)), 4);
    let u = _mm256_or_si256(_mm256_and_si256(ql, _mm256_set1_epi8(0x0f)), high);
    let scale = spread_4(s.as_ptr().add(2 * i));
    (u, scale, _mm256_mul_ps(scale, _mm256_set1_ps(-32.0)))
});

/// Any format, through its scalar reference.
struct Unpacked<B>(std::marker::PhantomData<B>);

impl<B: Block> Units for Unpacked<B> {
    const BLOCK_LEN: usize = B::LEN;
    const BLOCK_BYTES: usize = B::BYTES;
    const SIGNED: bool = true;
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
    unsafe fn unit(groups: &Groups, _block: *const u8, i: usize) -> Unit {
        // SAFETY: the groups hold a whole block.
        unsafe {
            (
                _mm256_loadu_si256(groups.q.as_ptr().add(32 * i).cast()),
                spread_4(groups.scale.as_ptr().add(2 * i)),
                spread_4(groups.min.as_ptr().add(2 * i)),
            )
        }
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
    over_tiles!(float_tile::<F>(rows, x, out, stride));
}

/// # Safety
/// As [`Dot`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn float_tile<F: Floats, const R: usize, const T: usize>(
    rows: &[*const u8; R],
    next: &[*const u8; R],
    x: &Operand,
    first: usize,
    out: *mut f32,
    stride: usize,
) {
    let x_rows: [&[f32]; T] = std::array::from_fn(|t| x.float_row(first + t));
    let mut sums = [[_mm256_setzero_ps(); T]; R];
    let whole = x.n_cols / 8 * 8;
    let mut step = |at: usize, rows: &[*const u8; R], x: &[*const f32; T]| {
        let mut weights = [_mm256_setzero_ps(); R];
        for r in 0..R {
            // SAFETY: the callers below point to eight weights from `at` on.
            weights[r] = unsafe { F::load(rows[r].add(at * F::BYTES)) };
        }
        for t in 0..T {
            // SAFETY: likewise to eight activations.
            let x = unsafe { _mm256_loadu_ps(x[t].add(at)) };
            for r in 0..R {
                sums[r][t] = _mm256_fmadd_ps(weights[r], x, sums[r][t]);
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
        let (mut weight_tails, mut x_tails) = ([[0u8; 32]; R], [[0f32; 8]; T]);
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
    for r in 0..R {
        for t in 0..T {
            // SAFETY: the output has a place for every row and token.
            unsafe { *out.add(t * stride + r) = reduce(sums[r][t]) };
        }
    }
}
