//! What the x86-64 instruction sets have in common.

use std::arch::x86_64::*;

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
