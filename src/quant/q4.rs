//! Q4_0 and Q4_1: 32 weights of four bits. Byte i holds weight i in its low half and weight i + 16 in its high half.

use super::encode::{Encode, in_f16, mean_square, plain_offset, plain_signed, weigh};
use super::fit::{self, FINE};
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

impl Encode for Q4_0 {
    fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        for (i, levels, d) in signed_blocks(row, importance, 8.0) {
            let block = &mut out[i * 18..][..18];
            block[..2].copy_from_slice(&in_f16(d).0);
            pack(&levels, &mut block[2..]);
        }
    }
}

impl Encode for Q4_1 {
    fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        for (i, levels, d, m) in offset_blocks(row, importance, 15.0) {
            let block = &mut out[i * 20..][..20];
            block[..2].copy_from_slice(&in_f16(d).0);
            block[2..4].copy_from_slice(&in_f16(m).0);
            pack(&levels, &mut block[4..]);
        }
    }
}

/// Number, levels and scale of a row's blocks of 32 whose levels are from `-n` to `n - 1`, plus `n`.
pub(super) fn signed_blocks(
    row: &[f32],
    importance: Option<&[f32]>,
    n: f32,
) -> impl Iterator<Item = (usize, [u8; 32], f32)> {
    let around = importance.map_or(0.0, |_| mean_square(row));
    row.as_chunks::<32>().0.iter().enumerate().map(move |(i, x)| {
        let Some(importance) = importance else {
            let (d, levels) = plain_signed(x, n);
            return (i, levels, d);
        };
        let mut levels = [0.0; 32];
        let d = fit::signed(x, &weigh(x, &importance[i * 32..], around), n, &mut levels);
        (i, levels.map(|l| l as u8), d)
    })
}

/// Number, levels, scale and offset of a row's blocks of 32 whose levels are from 0 to `n`.
pub(super) fn offset_blocks(
    row: &[f32],
    importance: Option<&[f32]>,
    n: f32,
) -> impl Iterator<Item = (usize, [u8; 32], f32, f32)> {
    let around = importance.map_or(0.0, |_| mean_square(row));
    row.as_chunks::<32>().0.iter().enumerate().map(move |(i, x)| {
        let Some(importance) = importance else {
            let (d, m, levels) = plain_offset(x, n);
            return (i, levels, d, m);
        };
        let mut levels = [0.0; 32];
        let (d, min) = fit::with_offset(x, &weigh(x, &importance[i * 32..], around), n, FINE, &mut levels);
        (i, levels.map(|l| l as u8), d, -min)
    })
}

/// The low four bits of 32 levels.
pub(super) fn pack(levels: &[u8; 32], qs: &mut [u8]) {
    for i in 0..16 {
        qs[i] = levels[i] & 0x0f | (levels[i + 16] & 0x0f) << 4;
    }
}

#[inline(always)]
fn nibbles(qs: &[u8], q: &mut [i8; 256], zero: i8) {
    for i in 0..16 {
        q[i] = (qs[i] & 0x0f) as i8 - zero;
        q[i + 16] = (qs[i] >> 4) as i8 - zero;
    }
}
