//! IQ4_NL and IQ4_XS: four bits that index a fixed table of sixteen unevenly spaced values.

use super::{Block, Groups, f16_at};

pub const IQ4_VALUES: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// `f16 d; u8 qs[16]`, `w = d * IQ4_VALUES[q]`.
pub struct Iq4Nl;

impl Block for Iq4Nl {
    const LEN: usize = 32;
    const BYTES: usize = 18;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn unpack(block: &[u8], out: &mut Groups) {
        look_up(&block[2..18], &mut out.q[..32]);
        out.fill(0, 2, f16_at(block, 0), 0.0);
    }
}

/// `f16 d; u16 scales_h; u8 scales_l[4]; u8 qs[128]`: eight runs of 32 with a six-bit scale each.
pub struct Iq4Xs;

impl Block for Iq4Xs {
    const LEN: usize = 256;
    const BYTES: usize = 136;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn unpack(block: &[u8], out: &mut Groups) {
        let d = f16_at(block, 0);
        for run in 0..8 {
            look_up(&block[8 + run * 16..][..16], &mut out.q[run * 32..][..32]);
            out.fill(2 * run, 2 * run + 2, d * iq4_xs_scale(block, run) as f32, 0.0);
        }
    }
}

/// The scale of run `run` of 32 weights.
#[inline(always)]
pub fn iq4_xs_scale(block: &[u8], run: usize) -> i8 {
    let high = u16::from_le_bytes([block[2], block[3]]);
    let low = block[4 + run / 2] >> (4 * (run % 2)) & 0x0f;
    (low | ((high >> (2 * run) & 3) << 4) as u8) as i8 - 32
}

#[inline(always)]
fn look_up(qs: &[u8], q: &mut [i8]) {
    for i in 0..16 {
        q[i] = IQ4_VALUES[(qs[i] & 0x0f) as usize];
        q[i + 16] = IQ4_VALUES[(qs[i] >> 4) as usize];
    }
}
