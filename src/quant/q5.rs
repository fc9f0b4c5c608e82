//! Q5_0 and Q5_1: as Q4_0 and Q4_1, with each weight's fifth bit in a word of 32.

use super::encode::{Encode, in_f16};
use super::q4::{offset_blocks, pack, signed_blocks};
use super::{Block, Groups, f16_at};

/// `f16 d; u32 qh; u8 qs[16]`, `w = d * (q - 16)`.
pub struct Q5_0;

impl Block for Q5_0 {
    const LEN: usize = 32;
    const BYTES: usize = 22;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn unpack(block: &[u8], out: &mut Groups) {
        five_bits(&block[2..22], &mut out.q, 16);
        out.fill(0, 2, f16_at(block, 0), 0.0);
    }
}

/// `f16 d; f16 m; u32 qh; u8 qs[16]`, `w = d * q + m`.
pub struct Q5_1;

impl Block for Q5_1 {
    const LEN: usize = 32;
    const BYTES: usize = 24;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn unpack(block: &[u8], out: &mut Groups) {
        five_bits(&block[4..24], &mut out.q, 0);
        out.fill(0, 2, f16_at(block, 0), f16_at(block, 2));
    }
}

impl Encode for Q5_0 {
    fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        for (i, levels, d) in signed_blocks(row, importance, 16.0) {
            let block = &mut out[i * 22..][..22];
            block[..2].copy_from_slice(&in_f16(d).0);
            pack_five(&levels, &mut block[2..]);
        }
    }
}

impl Encode for Q5_1 {
    fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        for (i, levels, d, m) in offset_blocks(row, importance, 31.0) {
            let block = &mut out[i * 24..][..24];
            block[..2].copy_from_slice(&in_f16(d).0);
            block[2..4].copy_from_slice(&in_f16(m).0);
            pack_five(&levels, &mut block[4..]);
        }
    }
}

/// The inverse of [`five_bits`].
fn pack_five(levels: &[u8; 32], out: &mut [u8]) {
    let qh = levels.iter().enumerate().fold(0u32, |bits, (i, level)| bits | u32::from(level >> 4) << i);
    out[..4].copy_from_slice(&qh.to_le_bytes());
    pack(levels, &mut out[4..]);
}

#[inline(always)]
fn five_bits(bytes: &[u8], q: &mut [i8; 256], zero: i8) {
    let qh = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let qs = &bytes[4..20];
    for i in 0..16 {
        let low = (qs[i] & 0x0f) | ((qh >> i & 1) << 4) as u8;
        let high = (qs[i] >> 4) | ((qh >> (i + 16) & 1) << 4) as u8;
        q[i] = low as i8 - zero;
        q[i + 16] = high as i8 - zero;
    }
}
