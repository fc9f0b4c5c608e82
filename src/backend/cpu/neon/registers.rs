//! A panel's sixteen rows in four registers: with plain NEON, with the dot product instructions, with the matrix product too.

use std::arch::aarch64::*;
use std::arch::asm;

use crate::backend::cpu::panels::{Registers, registers};

/// All sets' registers, which differ in how they multiply bytes.
macro_rules! four_lanes {
    ($type:ty, bytes ($sum:ident, $w:ident, $x:ident) $dot_bytes:expr $(, quads ($quads:ident, $high:ident, $low:ident) $dot_quads:expr)?) => {
        registers! {
            impl Registers for $type {
                const WIDTH: usize = 4;
                const TOKENS: usize = 4;
                const UNSIGNED: bool = false;
                type Ints = int32x4_t;
                type Floats = float32x4_t;
                fn prefetch(at: *const u8) { prefetch(at) }
                fn load(at: *const u8) -> int32x4_t { vreinterpretq_s32_u8(vld1q_u8(at)) }
                fn splat(value: i32) -> int32x4_t { vdupq_n_s32(value) }
                fn and(a: int32x4_t, b: int32x4_t) -> int32x4_t { vandq_s32(a, b) }
                fn or(a: int32x4_t, b: int32x4_t) -> int32x4_t { vorrq_s32(a, b) }
                fn xor(a: int32x4_t, b: int32x4_t) -> int32x4_t { veorq_s32(a, b) }
                fn add(a: int32x4_t, b: int32x4_t) -> int32x4_t { vaddq_s32(a, b) }
                fn times_256(a: int32x4_t) -> int32x4_t { vshlq_n_s32::<8>(a) }
                fn shift(a: int32x4_t, by: i32) -> int32x4_t {
                    vreinterpretq_s32_u16(vshlq_u16(vreinterpretq_u16_s32(a), vdupq_n_s16(-by as i16)))
                }
                fn look_up(table: &[i8; 16], a: int32x4_t) -> int32x4_t {
                    vreinterpretq_s32_s8(vqtbl1q_s8(vld1q_s8(table.as_ptr()), vreinterpretq_u8_s32(a)))
                }
                fn dot_bytes<const EIGHT: bool>($sum: int32x4_t, $w: int32x4_t, $x: int32x4_t) -> int32x4_t {
                    $dot_bytes
                }
                $(fn dot_quads<const EIGHT: bool>($quads: &[int32x4_t], $high: *const i32, $low: *const i32) -> (int32x4_t, int32x4_t) {
                    $dot_quads
                })?
                fn signed_bytes(at: *const u8) -> int32x4_t {
                    {
                        let four = vcreate_s8(at.cast::<u32>().read_unaligned() as u64);
                        vmovl_s16(vget_low_s16(vmovl_s8(four)))
                    }
                }
                fn unsigned_bytes(at: *const u8) -> int32x4_t {
                    {
                        let four = vcreate_u8(at.cast::<u32>().read_unaligned() as u64);
                        vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(four))))
                    }
                }
                fn load_floats(at: *const f32) -> float32x4_t { vld1q_f32(at) }
                fn store_floats(at: *mut f32, values: float32x4_t) { vst1q_f32(at, values) }
                fn splat_float(value: f32) -> float32x4_t { vdupq_n_f32(value) }
                fn to_floats(a: int32x4_t) -> float32x4_t { vcvtq_f32_s32(a) }
                fn halves(at: *const u8) -> float32x4_t { halves(at) }
                fn multiply(a: float32x4_t, b: float32x4_t) -> float32x4_t { vmulq_f32(a, b) }
                fn multiply_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
                    vfmaq_f32(c, a, b)
                }
            }
        }
    };
}

pub struct Neon;

four_lanes!(Neon, bytes (sum, weights, x) {
    let (w, x) = (vreinterpretq_s8_s32(weights), vreinterpretq_s8_s32(x));
    // A product of bytes of magnitudes up to 128 and 127 fits sixteen bits, a sum of two need not.
    let low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(x)));
    let high = vpaddlq_s16(vmull_high_s8(w, x));
    vaddq_s32(sum, vpaddq_s32(low, high))
});

/// The dot product extension, of Armv8.2 and later.
pub struct DotProduct;

four_lanes!(DotProduct, bytes (sum, weights, x) dot_product(sum, weights, x));

/// The matrix product extension, of Armv8.6 and later: two rows times an activation's upper bytes and its lower ones in one
/// instruction.
pub struct MatrixProduct;

four_lanes!(MatrixProduct, bytes (sum, weights, x) dot_product(sum, weights, x), quads (quads, high, low) {
    // Of rows 0 and 1, and of rows 2 and 3: (row's high, row's low) each.
    let mut sums = [vdupq_n_s32(0); 2];
    for j in (0..quads.len()).step_by(2) {
        let (high, low) = (vld1_s32(high.add(j)), vld1_s32(low.add(j)));
        let x = vcombine_s32(high, low);
        // Eight bytes of each row.
        sums[0] = matrix_product(sums[0], vzip1q_s32(quads[j], quads[j + 1]), x);
        sums[1] = matrix_product(sums[1], vzip2q_s32(quads[j], quads[j + 1]), x);
    }
    (vuzp1q_s32(sums[0], sums[1]), vuzp2q_s32(sums[0], sums[1]))
});

/// `sum` and the products of four bytes in each lane. The intrinsic isn't stable.
///
/// # Safety
/// The processor has the dot product extension.
#[inline(always)]
unsafe fn dot_product(sum: int32x4_t, a: int32x4_t, b: int32x4_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: as the caller promises.
    unsafe {
        asm!(".arch_extension dotprod", "sdot {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sum, in(vreg) a, in(vreg) b, options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// `sum`, two by two, and the products of two rows of eight bytes with two. The intrinsic isn't stable.
///
/// # Safety
/// The processor has the matrix product extension.
#[inline(always)]
unsafe fn matrix_product(sum: int32x4_t, a: int32x4_t, b: int32x4_t) -> int32x4_t {
    let mut sum = sum;
    // SAFETY: as the caller promises.
    unsafe {
        asm!(".arch_extension i8mm", "smmla {0:v}.4s, {1:v}.16b, {2:v}.16b",
            inout(vreg) sum, in(vreg) a, in(vreg) b, options(pure, nomem, nostack, preserves_flags));
    }
    sum
}

/// Asks memory for a line.
#[inline(always)]
pub fn prefetch(at: *const u8) {
    // SAFETY: a prefetch of any address is harmless.
    unsafe { asm!("prfm pldl1keep, [{0}]", in(reg) at, options(readonly, nostack, preserves_flags)) };
}

/// Four numbers from half precision. The intrinsic isn't stable.
///
/// # Safety
/// `at` points to four of them.
#[inline(always)]
pub unsafe fn halves(at: *const u8) -> float32x4_t {
    // SAFETY: as the caller promises; the instruction is part of the architecture.
    unsafe {
        let bits = vreinterpret_u16_u8(vld1_u8(at));
        let out: float32x4_t;
        asm!("fcvtl {0:v}.4s, {1:v}.4h", lateout(vreg) out, in(vreg) bits, options(pure, nomem, nostack));
        out
    }
}
