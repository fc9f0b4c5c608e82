//! Sixteen rows of Q4_0 with one token: rows that lie apart, as those of a sparse FFN do, are turned side by side on the way.

use std::arch::x86_64::*;

use crate::quant::LANES;

use super::registers::Avx512;
use super::*;

/// Blocks whose bytes lie in one cache line at least.
const BLOCKS_A_LINE: usize = 3;

/// As `dot_quantized`, to the bit.
///
/// # Safety
/// As [`Dot`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub unsafe fn dot_q4_0(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
    let (mut now, mut out) = (rows.now, out);
    if x.n_tokens == 1 {
        while let Some((sixteen, rest)) = now.split_first_chunk::<LANES>() {
            let next = if rest.is_empty() { rows.next } else { rest };
            // SAFETY: as the caller promises, for these rows.
            unsafe {
                dot_sixteen(sixteen, &next[..LANES.min(next.len())], x, out);
                out = out.add(LANES);
            }
            now = rest;
        }
    }
    // SAFETY: as the caller promises, for the rows left.
    unsafe { dot_quantized::<Q4_0>(Rows { now, next: rows.next }, x, out, stride) };
}

/// # Safety
/// As [`Dot`], for one token; `next` need not be valid.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn dot_sixteen(rows: &[*const u8; LANES], next: &[*const u8], x: &Operand, out: *mut f32) {
    const BYTES: usize = quant::Q4_0::BYTES;
    let x_row = x.q_row(0);
    let mut sums = _mm512_setzero_ps();
    for b in 0..x.n_cols / quant::Q4_0::LEN {
        if b % BLOCKS_A_LINE == 0 {
            fetch(next, b * BYTES, 1);
        }
        // SAFETY: the block lies inside the rows; there are as many activations as weights.
        unsafe {
            // Of every fourth row a quarter each.
            let fours = |first: usize| {
                let quarter = |i: usize| _mm_loadu_si128(rows[first + 4 * i].add(b * BYTES + 2).cast());
                let low = _mm256_set_m128i(quarter(1), quarter(0));
                let high = _mm256_set_m128i(quarter(3), quarter(2));
                _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1)
            };
            let (r0, r1, r2, r3) = (fours(0), fours(1), fours(2), fours(3));
            let (low_01, high_01) = (_mm512_unpacklo_epi32(r0, r1), _mm512_unpackhi_epi32(r0, r1));
            let (low_23, high_23) = (_mm512_unpacklo_epi32(r2, r3), _mm512_unpackhi_epi32(r2, r3));
            // Four bytes of each row: quads j and j + 4 of its weights.
            let both = [
                _mm512_unpacklo_epi64(low_01, low_23),
                _mm512_unpackhi_epi64(low_01, low_23),
                _mm512_unpacklo_epi64(high_01, high_23),
                _mm512_unpackhi_epi64(high_01, high_23),
            ];
            let mut halves = [0u16; LANES];
            for r in 0..LANES {
                halves[r] = rows[r].add(b * BYTES).cast::<u16>().read_unaligned();
            }
            let scale = _mm512_cvtph_ps(_mm256_loadu_si256(halves.as_ptr().cast()));
            let scales = [(scale, _mm512_setzero_ps()); 2];
            let quads = panels::nibbles::<Avx512>(&both);
            let at = b * quant::Q4_0::LEN;
            panels::add_chunk::<Avx512, quant::Q4_0>(&quads, &scales, &x_row, at, &mut sums);
        }
    }
    // SAFETY: the output has a place for every row.
    unsafe { _mm512_storeu_ps(out, sums) };
}
