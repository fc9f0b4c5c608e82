//! What the x86-64 instruction sets have in common.

use std::arch::x86_64::*;

use crate::quant::{Interleaved, LANES};

/// Asks memory for the bytes `at..at + n` of rows that will be wanted soon: with every row's stretch a stream of its
/// own, the processor's own guesses begin too late.
#[inline(always)]
pub fn fetch<const R: usize>(rows: &[*const u8; R], at: usize, n: usize) {
    for row in rows {
        for line in (0..n).step_by(64) {
            // SAFETY: a prefetch of any address is harmless, and SSE is part of x86-64.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(at + line).cast()) };
        }
    }
}

/// How far ahead memory is asked for a panel.
pub const PANEL_AHEAD: usize = 2048;

/// Head and first chunk of a panel's span.
///
/// # Safety
/// The panel has that span.
#[inline(always)]
pub unsafe fn parts_of_span<F: Interleaved>(panel: *const u8, span: usize) -> (*const u8, *const u8) {
    // SAFETY: as the caller promises.
    unsafe {
        let head = panel.add(span * F::SPAN_BYTES);
        (head, head.add(LANES * 2 * F::HEAD))
    }
}

/// Where quad `j` of a chunk has the bits that its nibbles lack: the plane, counted with the nibbles' four, the place of
/// the lowest bit in its bytes, and what masks them once that is the fifth. None where nibbles are all.
#[inline(always)]
pub fn upper_bits<F: Interleaved>(j: usize) -> Option<(usize, i32, i8)> {
    match F::BITS {
        5 => Some((4, j as i32, 0x10)),
        6 => Some((4 + j / 4, 2 * (j % 4) as i32, 0x30)),
        _ => None,
    }
}
