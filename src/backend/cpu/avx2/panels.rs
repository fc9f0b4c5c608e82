//! Rows side by side: a row in each lane of two registers. Of weights that share a scale the integer sum is exact, and
//! such groups are added one after another, so that one token, a few and many give the same bits.

use std::arch::x86_64::*;

use crate::backend::cpu::kernels::Panels;
use crate::backend::cpu::operand::{Line, WeightTile, WordRow};
use crate::backend::cpu::x86::{PANEL_AHEAD, parts_of_span, upper_bits};
use crate::quant::{CHUNK, Interleaved, LANES};
use crate::with_interleaved;

use super::*;

pub const fn panels_for(dtype: DType) -> Option<Panels> {
    with_interleaved!(dtype, B => Some(Panels { dot: dot::<B>, unpack: unpack::<B> }), _ => None)
}

/// Tokens that a matrix-matrix kernel takes at a time: as many as the registers hold.
const TOKENS: usize = 3;

/// # Safety
/// As [`Panels::dot`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot<F: Interleaved>(panel: *const u8, n: usize, x: &Operand, out: *mut f32, stride: usize) {
    let mut t = 0;
    while t < x.n_tokens {
        // SAFETY: as the caller promises, for these tokens.
        unsafe {
            let out = out.add(t * stride);
            t += match x.n_tokens - t {
                1 => dot_tokens::<F, 1>(panel, n, x, t, out, stride),
                _ => dot_tokens::<F, 2>(panel, n, x, t, out, stride),
            }
        }
    }
}

/// # Safety
/// As [`Panels::dot`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn dot_tokens<F: Interleaved, const T: usize>(
    panel: *const u8,
    n: usize,
    x: &Operand,
    first: usize,
    out: *mut f32,
    stride: usize,
) -> usize {
    let x_rows: [QRow; T] = std::array::from_fn(|t| x.q_row(first + t));
    let mut sums = [[_mm256_setzero_ps(); 2]; T];
    let ones = _mm256_set1_epi16(1);
    for span in 0..x.n_cols / F::LEN {
        // SAFETY: the span lies inside the panel.
        let (head, chunks) = unsafe { parts_of_span::<F>(panel, span) };
        for c in 0..F::LEN / CHUNK {
            // SAFETY: the chunk lies inside the span; a prefetch of any address is harmless.
            let chunk = unsafe {
                let chunk = chunks.add(c * F::CHUNK_BYTES);
                for line in (0..F::CHUNK_BYTES).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(chunk.wrapping_add(PANEL_AHEAD + line).cast());
                }
                chunk
            };
            let at = span * F::LEN + c * CHUNK;
            for half in 0..2 {
                // SAFETY: head and chunk are whole, the processor has the instruction set.
                let (scales, quads) = unsafe { (scales::<F>(head, chunk, half), quads::<F>(chunk, half)) };
                for t in 0..T {
                    let x = &x_rows[t];
                    debug_assert!(at + CHUNK <= x.high.len());
                    // SAFETY: there are as many activations as weights, a scale for every 64 and a sum for every 16.
                    let (high, low, d, sum) = unsafe {
                        (
                            x.high.as_ptr().add(at).cast::<i32>(),
                            x.low.as_ptr().add(at).cast::<i32>(),
                            *x.d.as_ptr().add(at / 64),
                            [*x.sum.as_ptr().add(at / 16), *x.sum.as_ptr().add(at / 16 + 1)],
                        )
                    };
                    let product = |of: *const i32, j: usize| {
                        // SAFETY: a chunk has eight quads.
                        let x = _mm256_set1_epi32(unsafe { of.add(j).read_unaligned() });
                        // No 16-bit sum saturates: weights of six bits unsigned, or of magnitude up to 128, meet bytes of
                        // magnitude up to 127.
                        let pairs = if F::BITS == 8 {
                            _mm256_maddubs_epi16(_mm256_abs_epi8(quads[j]), _mm256_sign_epi8(x, quads[j]))
                        } else {
                            _mm256_maddubs_epi16(quads[j], x)
                        };
                        _mm256_madd_epi16(pairs, ones)
                    };
                    let per_group = 8 * F::SHARE / CHUNK;
                    for g in 0..CHUNK / F::SHARE {
                        let x_sum = if F::SHARE == CHUNK { sum[0] + sum[1] } else { sum[g] };
                        let (mut highs, mut lows) = (_mm256_setzero_si256(), _mm256_setzero_si256());
                        if let Some(bits) = zero_bits::<F>() {
                            lows = _mm256_set1_epi32(-(x_sum << bits));
                        }
                        for j in g * per_group..(g + 1) * per_group {
                            highs = _mm256_add_epi32(highs, product(high, j));
                            lows = _mm256_add_epi32(lows, product(low, j));
                        }
                        let dots = _mm256_add_epi32(_mm256_slli_epi32(highs, 8), lows);
                        let (scale, min) = scales[g];
                        let scale = _mm256_mul_ps(scale, _mm256_set1_ps(d));
                        let sum = &mut sums[t][half];
                        *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots), scale, *sum);
                        if F::HAS_MIN {
                            *sum = _mm256_fmadd_ps(min, _mm256_set1_ps(d * x_sum as f32), *sum);
                        }
                    }
                }
            }
        }
    }
    for (t, sums) in sums.iter().enumerate() {
        // SAFETY: the output has places for n rows of every token.
        unsafe { store(sums, n, out.add(t * stride)) };
    }
    T
}

/// What was added to weights as [`quads`] gives them: bytes of eight bits are signed again.
const fn zero_bits<F: Interleaved>() -> Option<u32> {
    if F::BITS == 8 { None } else { F::ZERO_BITS }
}

/// Writes the first `n` of sixteen values.
///
/// # Safety
/// `out` has places for them; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn store(values: &[__m256; 2], n: usize, out: *mut f32) {
    let mut all = [0.0f32; LANES];
    // SAFETY: an array of sixteen; the caller's places.
    unsafe {
        _mm256_storeu_ps(all.as_mut_ptr(), values[0]);
        _mm256_storeu_ps(all.as_mut_ptr().add(8), values[1]);
        std::ptr::copy_nonoverlapping(all.as_ptr(), out, n);
    }
}

/// Scales and offsets of a chunk's one or two groups, for the first eight lanes or the others.
///
/// # Safety
/// Head and chunk are whole; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn scales<F: Interleaved>(head: *const u8, chunk: *const u8, half: usize) -> [(__m256, __m256); 2] {
    let zero = _mm256_setzero_ps();
    // SAFETY: the loads stay inside head and chunk.
    unsafe {
        let halves = |at: *const u8| _mm256_cvtph_ps(_mm_loadu_si128(at.add(16 * half).cast()));
        if F::SIDE_BYTES == 2 {
            let min = if F::HAS_MIN { halves(chunk.add(2 * LANES)) } else { zero };
            return [(halves(chunk), min), (zero, zero)];
        }
        let bytes = |i: usize| _mm_loadl_epi64(chunk.add(i * LANES + 8 * half).cast());
        let d = halves(head);
        if F::HAS_MIN {
            let unsigned = |i| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes(i)));
            let min = _mm256_mul_ps(halves(head.add(2 * LANES)), unsigned(1));
            [(_mm256_mul_ps(d, unsigned(0)), _mm256_sub_ps(zero, min)), (zero, zero)]
        } else {
            let signed = |i| _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes(i)));
            [(_mm256_mul_ps(d, signed(0)), zero), (_mm256_mul_ps(d, signed(1)), zero)]
        }
    }
}

/// The eight quads of a chunk's weights, for the first eight lanes or the others.
///
/// # Safety
/// The chunk is whole; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn quads<F: Interleaved>(chunk: *const u8, half: usize) -> [__m256i; 8] {
    let mut quads = [_mm256_setzero_si256(); 8];
    // SAFETY: the loads stay inside the chunk.
    let load = |i: usize| unsafe {
        _mm256_loadu_si256(chunk.add(LANES * F::SIDE * F::SIDE_BYTES + 64 * i + 32 * half).cast())
    };
    if F::BITS == 8 {
        for j in 0..8 {
            quads[j] = _mm256_xor_si256(load(j), _mm256_set1_epi8(-128));
        }
        return quads;
    }
    let nibble = _mm256_set1_epi8(0x0f);
    for j in 0..4 {
        let both = load(j);
        quads[j] = _mm256_and_si256(both, nibble);
        quads[j + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
    }
    for j in 0..8 {
        let Some((plane, shift, mask)) = upper_bits::<F>(j) else { return quads };
        let plane = load(plane);
        // The bits' place in the plane, moved to the fifth.
        let bits = if shift >= 4 {
            _mm256_srl_epi16(plane, _mm_cvtsi32_si128(shift - 4))
        } else {
            _mm256_sll_epi16(plane, _mm_cvtsi32_si128(4 - shift))
        };
        quads[j] = _mm256_or_si256(quads[j], _mm256_and_si256(bits, _mm256_set1_epi8(mask)));
    }
    quads
}

/// # Safety
/// As [`Panels::unpack`].
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn unpack<F: Interleaved>(panel: *const u8, n_cols: usize, tile: &mut WeightTile) {
    tile.reset::<F>(n_cols);
    let zero = _mm256_set1_epi16(zero_bits::<F>().map_or(0, |bits| 1 << bits));
    let words = tile.words.as_mut_ptr();
    for span in 0..n_cols / F::LEN {
        // SAFETY: the span lies inside the panel.
        let (head, chunks) = unsafe { parts_of_span::<F>(panel, span) };
        for (c, half) in (0..F::LEN / CHUNK).flat_map(|c| [(c, 0), (c, 1)]) {
            // SAFETY: the chunk lies inside the span; the tile has room for the row's words and scales.
            unsafe {
                let chunk = chunks.add(c * F::CHUNK_BYTES);
                let at = span * F::LEN + c * CHUNK;
                let quads = quads::<F>(chunk, half);
                let mut products = [_mm256_setzero_si256(); 2];
                for j in 0..8 {
                    let (quad, out) = (quads[j], words.add(at / 2 + 2 * j).cast::<__m256i>().add(half));
                    // Of each quad the lower bytes' pair and the upper bytes', widened with their sign.
                    let low = _mm256_srai_epi16(_mm256_slli_epi16(quad, 8), 8);
                    let high = _mm256_srai_epi16(quad, 8);
                    // low: bytes 0 and 2 of a quad, high: 1 and 3; wanted are (0, 1) and (2, 3).
                    let first = _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
                    let second = _mm256_blend_epi16(_mm256_srli_epi32(low, 16), high, 0xaa);
                    let (first, second) = (_mm256_sub_epi16(first, zero), _mm256_sub_epi16(second, zero));
                    _mm256_store_si256(out, first);
                    _mm256_store_si256(out.add(2), second);
                    let products = &mut products[4 * j / F::SHARE];
                    *products = _mm256_add_epi32(*products, _mm256_madd_epi16(first, second));
                }
                let scales = scales::<F>(head, chunk, half);
                for g in 0..CHUNK / F::SHARE {
                    let (scale, min) = scales[g];
                    let at = at / F::SHARE + g;
                    let cross = _mm256_sub_epi32(_mm256_setzero_si256(), products[g]);
                    _mm256_store_si256(tile.cross.as_mut_ptr().add(at).cast::<__m256i>().add(half), cross);
                    let put = |to: &mut Vec<Line<f32>>, v| {
                        _mm256_store_ps(to.as_mut_ptr().add(at).cast::<f32>().add(8 * half), v)
                    };
                    put(&mut tile.scales, scale);
                    if F::HAS_MIN {
                        put(&mut tile.mins, min);
                    }
                }
            }
        }
    }
}

/// # Safety
/// As [`super::super::kernels::Gemm`].
#[target_feature(enable = "avx2,fma,f16c")]
pub unsafe fn gemm(
    weights: &WeightTile,
    n: usize,
    x: &[WordRow],
    goes_on: bool,
    out: *mut f32,
    stride: usize,
) {
    const { assert!(TOKENS == 3) };
    for (i, x) in x.chunks(TOKENS).enumerate() {
        // SAFETY: as the caller promises, for these tokens.
        unsafe {
            let out = out.add(i * TOKENS * stride);
            match *x {
                [a, b, c] => gemm_tokens(weights, n, &[a, b, c], goes_on, out, stride),
                [a, b] => gemm_tokens(weights, n, &[a, b], goes_on, out, stride),
                _ => gemm_tokens(weights, n, &[x[0]], goes_on, out, stride),
            }
        }
    }
}

/// # Safety
/// As [`gemm`].
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn gemm_tokens<const T: usize>(
    weights: &WeightTile,
    n: usize,
    x: &[WordRow; T],
    goes_on: bool,
    out: *mut f32,
    stride: usize,
) {
    let (words, share) = (weights.words.as_ptr(), weights.share);
    let x_words: [*const i32; T] = x.map(|row| row.words.cast());
    let mut sums = [[_mm256_setzero_ps(); 2]; T];
    if goes_on {
        for t in 0..T {
            let mut all = [0.0f32; LANES];
            // SAFETY: the output has places for n rows of every token.
            sums[t] = unsafe {
                std::ptr::copy_nonoverlapping(out.add(t * stride), all.as_mut_ptr(), n);
                [_mm256_loadu_ps(all.as_ptr()), _mm256_loadu_ps(all.as_ptr().add(8))]
            };
        }
    }
    for g in 0..weights.n_cols / share {
        let mut dots = [[_mm256_setzero_si256(); 2]; T];
        // SAFETY: there is a cross sum for each group, of the weights and of the activations.
        unsafe {
            let cross = weights.cross.as_ptr().add(g).cast::<__m256i>();
            let cross = [_mm256_load_si256(cross), _mm256_load_si256(cross.add(1))];
            for t in 0..T {
                let of_token = _mm256_set1_epi32(*x[t].cross.add(g));
                for half in 0..2 {
                    dots[t][half] = _mm256_add_epi32(cross[half], of_token);
                }
            }
        }
        for pair in (g * share / 2..(g + 1) * share / 2).step_by(2) {
            // SAFETY: the tile and the rows have n_cols / 2 pairs, an even number.
            unsafe {
                let at = words.add(pair).cast::<__m256i>();
                let mut w = [_mm256_setzero_si256(); 4];
                for i in 0..4 {
                    w[i] = _mm256_load_si256(at.add(i));
                }
                for t in 0..T {
                    let x0 = _mm256_set1_epi32(x_words[t].add(pair).read_unaligned());
                    let x1 = _mm256_set1_epi32(x_words[t].add(pair + 1).read_unaligned());
                    for half in 0..2 {
                        let (a, b) = (_mm256_add_epi16(w[half], x1), _mm256_add_epi16(w[2 + half], x0));
                        dots[t][half] = _mm256_add_epi32(dots[t][half], _mm256_madd_epi16(a, b));
                    }
                }
            }
        }
        for half in 0..2 {
            // SAFETY: there are a scale and an offset of the weights for each group, a sum of the activations too, and a
            // scale of theirs for every 64.
            unsafe {
                let scale = _mm256_load_ps(weights.scales.as_ptr().add(g).cast::<f32>().add(8 * half));
                for t in 0..T {
                    let d = *x[t].d.add(g * share / 64);
                    let scale = _mm256_mul_ps(scale, _mm256_set1_ps(d));
                    let sum = &mut sums[t][half];
                    *sum = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dots[t][half]), scale, *sum);
                    if weights.has_min {
                        let min = _mm256_load_ps(weights.mins.as_ptr().add(g).cast::<f32>().add(8 * half));
                        *sum = _mm256_fmadd_ps(min, _mm256_set1_ps(*x[t].sum.add(g)), *sum);
                    }
                }
            }
        }
    }
    for (t, sums) in sums.iter().enumerate() {
        // SAFETY: the output has places for n rows of every token.
        unsafe { store(sums, n, out.add(t * stride)) };
    }
}
