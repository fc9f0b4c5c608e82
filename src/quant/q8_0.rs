//! Q8_0: 32 signed bytes and a scale; also the format of a compressed KV cache.

use half::f16;

use super::encode::Encode;
use super::{Block, Groups, f16_at};

/// `f16 d; i8 qs[32]`, `w = d * q`.
pub struct Q8_0;

impl Block for Q8_0 {
    const LEN: usize = 32;
    const BYTES: usize = 34;
    const HAS_MIN: bool = false;

    #[inline(always)]
    fn unpack(block: &[u8], out: &mut Groups) {
        for i in 0..32 {
            out.q[i] = block[2 + i] as i8;
        }
        out.fill(0, 2, f16_at(block, 0), 0.0);
    }
}

impl Encode for Q8_0 {
    /// With eight bits there is nothing to choose by importance.
    fn encode(row: &[f32], _: Option<&[f32]>, out: &mut [u8]) {
        encode_q8_0(row, out);
    }
}

/// Encodes `x`, a multiple of 32 values, into `out`: the same bytes as the `gguf` package and ggml's reference.
pub fn encode_q8_0(x: &[f32], out: &mut [u8]) {
    for (x, out) in x.chunks_exact(Q8_0::LEN).zip(out.chunks_exact_mut(Q8_0::BYTES)) {
        let d = x.iter().fold(0.0f32, |m, v| m.max(v.abs())) / 127.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        out[..2].copy_from_slice(&f16::from_f32(d).to_bits().to_le_bytes());
        for (o, v) in out[2..].iter_mut().zip(x) {
            *o = (v * inverse).round() as i8 as u8;
        }
    }
}
