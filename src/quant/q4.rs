//! Q4_0 and Q4_1: 32 weights of four bits. Byte i holds weight i in its low half and weight i + 16 in its high half.

use super::{Block, Groups, f16_at};

/// `f16 d; u8 qs[16]`, `w = d * (q - 8)`.
pub struct Q4_0;

impl Block for Q4_0 {
    const LEN: usize = 32;
    const BYTES: usize = 18;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn unpack(block: &[u8], out: &mut Groups) {
        nibbles(&block[2..18], &mut out.q, 8);
        out.fill(0, 2, f16_at(block, 0), 0.0);
    }
}

/// `f16 d; f16 m; u8 qs[16]`, `w = d * q + m`.
pub struct Q4_1;

impl Block for Q4_1 {
    const LEN: usize = 32;
    const BYTES: usize = 20;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn unpack(block: &[u8], out: &mut Groups) {
        nibbles(&block[4..20], &mut out.q, 0);
        out.fill(0, 2, f16_at(block, 0), f16_at(block, 2));
    }
}

#[inline(always)]
fn nibbles(qs: &[u8], q: &mut [i8; 256], zero: i8) {
    for i in 0..16 {
        q[i] = (qs[i] & 0x0f) as i8 - zero;
        q[i + 16] = (qs[i] >> 4) as i8 - zero;
    }
}
