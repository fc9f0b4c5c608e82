//! What the x86-64 instruction sets have in common.

use std::arch::x86_64::*;

/// Asks memory for the bytes `at..at + n` of rows that will be wanted soon: with every row's stretch a stream of its
/// own, the processor's own guesses begin too late.
#[inline(always)]
pub fn fetch(rows: &[*const u8], at: usize, n: usize) {
    for row in rows {
        for line in (0..n).step_by(64) {
            // SAFETY: a prefetch of any address is harmless, and SSE is part of x86-64.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(row.wrapping_add(at + line).cast()) };
        }
    }
}

/// The half precision value at `at`.
///
/// # Safety
/// `at` points to two bytes; the processor has the instruction set.
#[inline]
#[target_feature(enable = "f16c")]
pub unsafe fn half(at: *const u8) -> f32 {
    // SAFETY: as the caller promises.
    let bits = unsafe { at.cast::<u16>().read_unaligned() };
    _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(bits as i32)))
}

/// Names the type that reads a format, and goes on: `with_reader!(dtype, Short, Long, floats F => a, blocks F => b)`, where the
/// set has types of its own for some formats, and wraps those that it reads through their scalar reference: blocks of 32
/// weights in `Short`, of 256 in `Long`.
macro_rules! with_reader {
    ($dtype:expr, $short:ident, $long:ident, floats $f:ident => $float:expr, blocks $b:ident => $block:expr) => {
        with_reader!(@ $dtype,
            $f => $float, [DType::F32 | DType::I32 => F32, DType::F16 => F16, DType::BF16 => BF16],
            $b => $block, [
                DType::Q4_0 => Q4_0,
                DType::Q4_1 => Q4_1,
                DType::Q5_0 => $short<$crate::quant::Q5_0>,
                DType::Q5_1 => $short<$crate::quant::Q5_1>,
                DType::Q8_0 => Q8_0,
                DType::Q2K => $long<$crate::quant::Q2K>,
                DType::Q3K => $long<$crate::quant::Q3K>,
                DType::Q4K => Q4K,
                DType::Q5K => $long<$crate::quant::Q5K>,
                DType::Q6K => Q6K,
                DType::Iq4Nl => $short<$crate::quant::Iq4Nl>,
                DType::Iq4Xs => $long<$crate::quant::Iq4Xs>
            ])
    };
    (@ $dtype:expr, $f:ident => $float:expr, [$($float_type:pat => $float_reader:ty),*],
        $b:ident => $block:expr, [$($block_type:pat => $block_reader:ty),*]) => {
        match $dtype {
            $($float_type => { type $f = $float_reader; $float })*
            $($block_type => { type $b = $block_reader; $block })*
        }
    };
}
pub(super) use with_reader;
