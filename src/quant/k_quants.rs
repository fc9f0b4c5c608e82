//! Q2_K to Q6_K: 256 weights a block, with a scale (and in some an offset) for every 16 or 32 of them, itself
//! quantised against the block's own.

use super::{Block, Groups, f16_at};

/// `u8 scales[16]; u8 qs[64]; f16 d; f16 dmin`: two bits a weight, four-bit scales and offsets for each 16.
pub struct Q2K;

impl Block for Q2K {
    const LEN: usize = 256;
    const BYTES: usize = 84;
    const HAS_MIN: bool = true;
    const SHARE: usize = 16;

    #[inline(always)]
    fn unpack(block: &[u8], out: &mut Groups) {
        let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
        for g in 0..16 {
            out.scale[g] = d * (block[g] & 0x0f) as f32;
            out.min[g] = -(dmin * (block[g] >> 4) as f32);
        }
        two_bits(&block[16..80], &mut out.q);
    }
}

/// `u8 hmask[32]; u8 qs[64]; u8 scales[12]; f16 d`: three bits a weight, six-bit signed scales for each 16.
pub struct Q3K;

impl Block for Q3K {
    const LEN: usize = 256;
    const BYTES: usize = 110;
    const HAS_MIN: bool = false;
    const SHARE: usize = 16;

    #[inline(always)]
    fn unpack(block: &[u8], out: &mut Groups) {
        let (hmask, scales, d) = (&block[..32], &block[96..108], f16_at(block, 108));
        for g in 0..16 {
            out.scale[g] = d * q3_k_scale(scales, g) as f32;
        }
        two_bits(&block[32..96], &mut out.q);
        for run in 0..8 {
            for i in 0..32 {
                // The third bit says that nothing is to be subtracted.
                out.q[run * 32 + i] -= 4 * (1 - (hmask[i] >> run & 1) as i8);
            }
        }
    }
}

/// `f16 d; f16 dmin; u8 scales[12]; u8 qs[128]`: four bits a weight, six-bit scales and offsets for each 32.
pub struct Q4K;

impl Block for Q4K {
    const LEN: usize = 256;
    const BYTES: usize = 144;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn unpack(block: &[u8], out: &mut Groups) {
        scales_and_mins(block, out);
        four_bits(&block[16..144], &mut out.q);
    }
}

/// As Q4_K with a fifth bit a weight: `f16 d; f16 dmin; u8 scales[12]; u8 qh[32]; u8 qs[128]`.
pub struct Q5K;

impl Block for Q5K {
    const LEN: usize = 256;
    const BYTES: usize = 176;
    const HAS_MIN: bool = true;

    #[inline(always)]
    fn unpack(block: &[u8], out: &mut Groups) {
        scales_and_mins(block, out);
        four_bits(&block[48..176], &mut out.q);
        let qh = &block[16..48];
        for run in 0..8 {
            for i in 0..32 {
                out.q[run * 32 + i] |= ((qh[i] >> run & 1) << 4) as i8;
            }
        }
    }
}

/// `u8 ql[128]; u8 qh[64]; i8 scales[16]; f16 d`: six bits a weight, signed byte scales for each 16.
pub struct Q6K;

impl Block for Q6K {
    const LEN: usize = 256;
    const BYTES: usize = 210;
    const HAS_MIN: bool = false;
    const SHARE: usize = 16;

    #[inline(always)]
    fn unpack(block: &[u8], out: &mut Groups) {
        let d = f16_at(block, 208);
        for g in 0..16 {
            out.scale[g] = d * (block[192 + g] as i8) as f32;
        }
        for half in 0..2 {
            let (ql, qh) = (&block[half * 64..][..64], &block[128 + half * 32..][..32]);
            let q = &mut out.q[half * 128..][..128];
            for i in 0..32 {
                q[i] = (ql[i] & 0x0f | (qh[i] & 3) << 4) as i8 - 32;
                q[i + 32] = (ql[i + 32] & 0x0f | (qh[i] >> 2 & 3) << 4) as i8 - 32;
                q[i + 64] = (ql[i] >> 4 | (qh[i] >> 4 & 3) << 4) as i8 - 32;
                q[i + 96] = (ql[i + 32] >> 4 | (qh[i] >> 6) << 4) as i8 - 32;
            }
        }
    }
}

/// The scale of group `g` of sixteen weights in the twelve bytes of a Q3_K block.
#[inline(always)]
pub fn q3_k_scale(scales: &[u8], g: usize) -> i8 {
    let low = scales[g % 8] >> (4 * (g / 8)) & 0x0f;
    let high = scales[8 + g % 4] >> (2 * (g / 4)) & 3;
    (low | high << 4) as i8 - 32
}

/// The six-bit scale and offset of run `run` of 32 weights in the twelve bytes of a Q4_K or Q5_K block.
#[inline(always)]
pub fn k_scale_min(scales: &[u8], run: usize) -> (u8, u8) {
    let i = run % 4;
    if run < 4 {
        (scales[i] & 0x3f, scales[4 + i] & 0x3f)
    } else {
        let low = scales[8 + i];
        (low & 0x0f | scales[i] >> 6 << 4, low >> 4 | scales[4 + i] >> 6 << 4)
    }
}

#[inline(always)]
fn scales_and_mins(block: &[u8], out: &mut Groups) {
    let (d, dmin) = (f16_at(block, 0), f16_at(block, 2));
    for run in 0..8 {
        let (scale, min) = k_scale_min(&block[4..16], run);
        out.fill(2 * run, 2 * run + 2, d * scale as f32, -(dmin * min as f32));
    }
}

/// 64 bytes of two-bit weights: each run of 32 bytes holds four runs of 32 weights, one in each pair of bits.
#[inline(always)]
fn two_bits(qs: &[u8], q: &mut [i8; 256]) {
    for run in 0..8 {
        for i in 0..32 {
            q[run * 32 + i] = (qs[run / 4 * 32 + i] >> (2 * (run % 4)) & 3) as i8;
        }
    }
}

/// 128 bytes of four-bit weights: each run of 32 bytes holds two runs of 32 weights, low halves first.
#[inline(always)]
fn four_bits(qs: &[u8], q: &mut [i8; 256]) {
    for pair in 0..4 {
        for i in 0..32 {
            q[pair * 64 + i] = (qs[pair * 32 + i] & 0x0f) as i8;
            q[pair * 64 + 32 + i] = (qs[pair * 32 + i] >> 4) as i8;
        }
    }
}
