//! Rows side by side: a row in each lane. Of weights that share a scale the integer sum is exact, and such groups
//! are added one after another, so that one token, a few and many give the same bits.

use std::arch::x86_64::*;

use crate::backend::cpu::kernels::Panels;
use crate::backend::cpu::operand::{TOKEN_TILE, WeightTile, WordRow};
use crate::backend::cpu::x86::{PANEL_AHEAD, parts_of_span, upper_bits};
use crate::quant::{CHUNK, Interleaved, LANES};
use crate::with_interleaved;

use super::*;

pub const fn panels_for(dtype: DType) -> Option<Panels> {
    with_interleaved!(dtype, B => Some(Panels { dot: dot::<B>, unpack: unpack::<B> }), _ => None)
}

/// # Safety
/// As [`Panels::dot`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn dot<F: Interleaved>(panel: *const u8, n: usize, x: &Operand, out: *mut f32, stride: usize) {
    let mut t = 0;
    while t < x.n_tokens {
        // SAFETY: as the caller promises, for these tokens.
        unsafe {
            let out = out.add(t * stride);
            t += match x.n_tokens - t {
                1 => dot_tokens::<F, 1>(panel, n, x, t, out, stride),
                2 => dot_tokens::<F, 2>(panel, n, x, t, out, stride),
                3 => dot_tokens::<F, 3>(panel, n, x, t, out, stride),
                _ => dot_tokens::<F, 4>(panel, n, x, t, out, stride),
            }
        }
    }
}

/// # Safety
/// As [`Panels::dot`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn dot_tokens<F: Interleaved, const T: usize>(
    panel: *const u8,
    n: usize,
    x: &Operand,
    first: usize,
    out: *mut f32,
    stride: usize,
) -> usize {
    let x_rows: [QRow; T] = std::array::from_fn(|t| x.q_row(first + t));
    let mut sums = [_mm512_setzero_ps(); T];
    for span in 0..x.n_cols / F::LEN {
        // SAFETY: the span lies inside the panel.
        let (head, chunks) = unsafe { parts_of_span::<F>(panel, span) };
        for c in 0..F::LEN / CHUNK {
            // SAFETY: the chunk lies inside the span, the processor has the instruction set.
            let (scales, quads) = unsafe {
                let chunk = chunks.add(c * F::CHUNK_BYTES);
                for line in (0..F::CHUNK_BYTES).step_by(64) {
                    _mm_prefetch::<_MM_HINT_T0>(chunk.wrapping_add(PANEL_AHEAD + line).cast());
                }
                (scales::<F>(head, chunk), quads::<F>(chunk))
            };
            let at = span * F::LEN + c * CHUNK;
            for t in 0..T {
                // SAFETY: there are as many activations as weights.
                unsafe { add_chunk::<F>(&quads, &scales, &x_rows[t], at, &mut sums[t]) };
            }
        }
    }
    for (t, sums) in sums.iter().enumerate() {
        // SAFETY: the output has places for n rows of every token.
        unsafe { _mm512_mask_storeu_ps(out.add(t * stride), lanes(n), *sums) };
    }
    T
}

/// Adds the products of a chunk of sixteen rows with one token's activations from `at` on: the integer sum of each group,
/// then the groups one after another.
///
/// # Safety
/// The activations reach to the chunk's end; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub unsafe fn add_chunk<F: Interleaved>(
    quads: &[__m512i; 8],
    scales: &[(__m512, __m512); 2],
    x: &QRow,
    at: usize,
    total: &mut __m512,
) {
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
    // SAFETY: a chunk has eight quads.
    let quad = |of: *const i32, j: usize| _mm512_set1_epi32(unsafe { of.add(j).read_unaligned() });
    let per_group = 8 * F::SHARE / CHUNK;
    for g in 0..CHUNK / F::SHARE {
        let x_sum = if F::SHARE == CHUNK { sum[0] + sum[1] } else { sum[g] };
        let (mut highs, mut lows) = (_mm512_setzero_si512(), _mm512_setzero_si512());
        if let Some(bits) = F::ZERO_BITS {
            lows = _mm512_set1_epi32(-(x_sum << bits));
        }
        for j in g * per_group..(g + 1) * per_group {
            highs = _mm512_dpbusd_epi32(highs, quads[j], quad(high, j));
            lows = _mm512_dpbusd_epi32(lows, quads[j], quad(low, j));
        }
        let dots = _mm512_add_epi32(_mm512_slli_epi32(highs, 8), lows);
        let (scale, min) = scales[g];
        let scale = _mm512_mul_ps(scale, _mm512_set1_ps(d));
        *total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, *total);
        if F::HAS_MIN {
            *total = _mm512_fmadd_ps(min, _mm512_set1_ps(d * x_sum as f32), *total);
        }
    }
}

/// The first `n` lanes.
fn lanes(n: usize) -> __mmask16 {
    debug_assert!((1..=LANES).contains(&n));
    0xffff >> (LANES - n)
}

/// Scales and offsets of a chunk's one or two groups.
///
/// # Safety
/// Head and chunk are whole; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn scales<F: Interleaved>(head: *const u8, chunk: *const u8) -> [(__m512, __m512); 2] {
    let zero = _mm512_setzero_ps();
    // SAFETY: the loads stay inside head and chunk.
    unsafe {
        let halves = |at: *const u8| _mm512_cvtph_ps(_mm256_loadu_si256(at.cast()));
        if F::SIDE_BYTES == 2 {
            let min = if F::HAS_MIN { halves(chunk.add(2 * LANES)) } else { zero };
            return [(halves(chunk), min), (zero, zero)];
        }
        let bytes = |i: usize| _mm_loadu_si128(chunk.add(i * LANES).cast());
        let d = halves(head);
        if F::HAS_MIN {
            let unsigned = |i| _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes(i)));
            let min = _mm512_mul_ps(halves(head.add(2 * LANES)), unsigned(1));
            [(_mm512_mul_ps(d, unsigned(0)), _mm512_sub_ps(zero, min)), (zero, zero)]
        } else {
            let signed = |i| _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes(i)));
            [(_mm512_mul_ps(d, signed(0)), zero), (_mm512_mul_ps(d, signed(1)), zero)]
        }
    }
}

/// The eight quads of a chunk's weights.
///
/// # Safety
/// The chunk is whole; the processor has the instruction set.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn quads<F: Interleaved>(chunk: *const u8) -> [__m512i; 8] {
    let mut quads = [_mm512_setzero_si512(); 8];
    // SAFETY: the loads stay inside the chunk.
    let load =
        |i: usize| unsafe { _mm512_loadu_si512(chunk.add(LANES * F::SIDE * F::SIDE_BYTES + 64 * i).cast()) };
    if F::BITS == 8 {
        for j in 0..8 {
            quads[j] = load(j);
        }
        return quads;
    }
    quads = low_bits(&[load(0), load(1), load(2), load(3)]);
    for j in 0..8 {
        let Some((plane, shift, mask)) = upper_bits::<F>(j) else { return quads };
        let plane = load(plane);
        // The bits' place in the plane, moved to the fifth.
        let bits = if shift >= 4 {
            _mm512_srl_epi16(plane, _mm_cvtsi32_si128(shift - 4))
        } else {
            _mm512_sll_epi16(plane, _mm_cvtsi32_si128(4 - shift))
        };
        quads[j] = _mm512_or_si512(quads[j], _mm512_and_si512(bits, _mm512_set1_epi8(mask)));
    }
    quads
}

/// The quads of four registers of nibbles: low halves, then high halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub fn low_bits(both: &[__m512i; 4]) -> [__m512i; 8] {
    let nibble = _mm512_set1_epi8(0x0f);
    let mut quads = [_mm512_setzero_si512(); 8];
    for j in 0..4 {
        quads[j] = _mm512_and_si512(both[j], nibble);
        quads[j + 4] = _mm512_and_si512(_mm512_srli_epi16(both[j], 4), nibble);
    }
    quads
}

/// # Safety
/// As [`Panels::unpack`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack<F: Interleaved>(panel: *const u8, n_cols: usize, tile: &mut WeightTile) {
    tile.reset::<F>(n_cols);
    let zero = _mm512_set1_epi16(F::ZERO_BITS.map_or(0, |bits| 1 << bits));
    // Of each quad's bytes the first two, and the last two, as 16-bit integers.
    let first = _mm512_set1_epi32(0x8001_8000u32 as i32);
    let second = _mm512_set1_epi32(0x8003_8002u32 as i32);
    let in_lane = _mm512_broadcast_i32x4(_mm_set_epi32(0x000c_000c, 0x0008_0008, 0x0004_0004, 0));
    let (first, second) = (_mm512_add_epi8(first, in_lane), _mm512_add_epi8(second, in_lane));
    let words = tile.words.as_mut_ptr();
    for span in 0..n_cols / F::LEN {
        // SAFETY: the span lies inside the panel.
        let (head, chunks) = unsafe { parts_of_span::<F>(panel, span) };
        for c in 0..F::LEN / CHUNK {
            // SAFETY: the chunk lies inside the span; the tile has room for the row's words and scales.
            unsafe {
                let chunk = chunks.add(c * F::CHUNK_BYTES);
                let at = span * F::LEN + c * CHUNK;
                let quads = quads::<F>(chunk);
                let mut products = [_mm512_setzero_si512(); 2];
                for j in 0..8 {
                    let (quad, out) = (quads[j], words.add(at / 2 + 2 * j));
                    let pair = |which| _mm512_sub_epi16(_mm512_shuffle_epi8(quad, which), zero);
                    let (first, second) = (pair(first), pair(second));
                    _mm512_store_si512(out.cast(), first);
                    _mm512_store_si512(out.add(1).cast(), second);
                    let products = &mut products[4 * j / F::SHARE];
                    *products = _mm512_dpwssd_epi32(*products, first, second);
                }
                let scales = scales::<F>(head, chunk);
                for g in 0..CHUNK / F::SHARE {
                    let (scale, min) = scales[g];
                    let at = at / F::SHARE + g;
                    let cross = _mm512_sub_epi32(_mm512_setzero_si512(), products[g]);
                    _mm512_store_si512(tile.cross.as_mut_ptr().add(at).cast(), cross);
                    _mm512_store_ps(tile.scales.as_mut_ptr().add(at).cast(), scale);
                    if F::HAS_MIN {
                        _mm512_store_ps(tile.mins.as_mut_ptr().add(at).cast(), min);
                    }
                }
            }
        }
    }
}

/// With `CROSS` sums are multiplied (see [`crate::backend::cpu::operand::cross`]): half the multiplications for twice as
/// many additions, which pays where a processor adds faster than it multiplies.
///
/// # Safety
/// As [`super::super::kernels::Gemm`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub unsafe fn gemm<const CROSS: bool>(
    weights: &WeightTile,
    n: usize,
    x: &[WordRow],
    goes_on: bool,
    out: *mut f32,
    stride: usize,
) {
    macro_rules! by_tokens {
        ($($t:literal)*) => {
            match x.len() {
                // SAFETY: as the caller promises.
                $($t => unsafe {
                    let x = x.first_chunk().expect("so many");
                    match (weights.share, weights.has_min) {
                        (32, false) => gemm_tile::<$t, 32, false, CROSS>(weights, n, x, goes_on, out, stride),
                        (32, true) => gemm_tile::<$t, 32, true, CROSS>(weights, n, x, goes_on, out, stride),
                        (_, false) => gemm_tile::<$t, 16, false, CROSS>(weights, n, x, goes_on, out, stride),
                        (_, true) => gemm_tile::<$t, 16, true, CROSS>(weights, n, x, goes_on, out, stride),
                    }
                },)*
                n => unreachable!("a tile of {n} tokens"),
            }
        };
    }
    const { assert!(TOKEN_TILE == 12) };
    by_tokens!(1 2 3 4 5 6 7 8 9 10 11 12);
}

/// # Safety
/// As [`gemm`].
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn gemm_tile<const T: usize, const SHARE: usize, const MIN: bool, const CROSS: bool>(
    weights: &WeightTile,
    n: usize,
    x: &[WordRow; T],
    goes_on: bool,
    out: *mut f32,
    stride: usize,
) {
    let words = weights.words.as_ptr();
    let x_words: [*const i32; T] = x.map(|row| row.words.cast());
    let (x_cross, x_d, x_sum) = (x.map(|row| row.cross), x.map(|row| row.d), x.map(|row| row.sum));
    let mut sums = [_mm512_setzero_ps(); T];
    if goes_on {
        for t in 0..T {
            // SAFETY: the output has places for n rows of every token.
            sums[t] = unsafe { _mm512_maskz_loadu_ps(lanes(n), out.add(t * stride)) };
        }
    }
    for g in 0..weights.n_cols / SHARE {
        let mut dots = [_mm512_setzero_si512(); T];
        if CROSS {
            // SAFETY: there is a cross sum for each group, of the weights and of the activations.
            unsafe {
                let cross = _mm512_load_si512(weights.cross.as_ptr().add(g).cast());
                for t in 0..T {
                    dots[t] = _mm512_add_epi32(cross, _mm512_set1_epi32(*x_cross[t].add(g)));
                }
            }
        }
        for pair in (g * SHARE / 2..(g + 1) * SHARE / 2).step_by(2) {
            // SAFETY: the tile and the rows have n_cols / 2 pairs, an even number, and the processor has the instruction
            // set.
            unsafe {
                let w = [
                    _mm512_load_si512(words.add(pair).cast()),
                    _mm512_load_si512(words.add(pair + 1).cast()),
                ];
                for t in 0..T {
                    let x0 = _mm512_set1_epi32(x_words[t].add(pair).read_unaligned());
                    let x1 = _mm512_set1_epi32(x_words[t].add(pair + 1).read_unaligned());
                    if CROSS {
                        let (a, b) = (_mm512_add_epi16(w[0], x1), _mm512_add_epi16(w[1], x0));
                        dots[t] = _mm512_dpwssd_epi32(dots[t], a, b);
                    } else {
                        dots[t] = _mm512_dpwssd_epi32(dots[t], w[0], x0);
                        dots[t] = _mm512_dpwssd_epi32(dots[t], w[1], x1);
                    }
                }
            }
        }
        // SAFETY: there are a scale and an offset of the weights for each group, a sum of the activations too, and a scale
        // of theirs for every 64.
        unsafe {
            let scale = _mm512_load_ps(weights.scales.as_ptr().add(g).cast());
            for t in 0..T {
                let scale = _mm512_mul_ps(scale, _mm512_set1_ps(*x_d[t].add(g * SHARE / 64)));
                sums[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots[t]), scale, sums[t]);
            }
            if MIN {
                let min = _mm512_load_ps(weights.mins.as_ptr().add(g).cast());
                for t in 0..T {
                    sums[t] = _mm512_fmadd_ps(min, _mm512_set1_ps(*x_sum[t].add(g)), sums[t]);
                }
            }
        }
    }
    for (t, sums) in sums.iter().enumerate() {
        // SAFETY: the output has places for n rows of every token.
        unsafe { _mm512_mask_storeu_ps(out.add(t * stride), lanes(n), *sums) };
    }
}
