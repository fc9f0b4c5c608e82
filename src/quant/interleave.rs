//! Sixteen rows side by side: the layout in which a kernel keeps a row in each lane of its registers.
//!
//! A panel holds [`LANES`] rows, block after block: the blocks' heads, then for every 32 weights their scales and the
//! weights. Weights are unsigned, `q + 2^ZERO_BITS`, or indices of a table of `q`, and lie by quads: four of one row, then
//! the same four of the next. The low four bits of quads j and j + 4 share a byte, or the low two of quads j, j + 2, j + 4
//! and j + 6; a bit more, or two, lie in planes of their own. A panel is as long as its rows were, except in Q3_K, Q4_K,
//! Q5_K and IQ4_XS, whose six-bit scales become bytes.

use crate::with_block;

use super::{
    Block, DType, Groups, IQ4_VALUES, Iq4Nl, Iq4Xs, Q2K, Q3K, Q4_0, Q4_1, Q4K, Q5_0, Q5_1, Q5K, Q6K, Q8_0,
    iq4_xs_scale, k_scale_min, q3_k_scale,
};

/// Rows in a panel.
pub const LANES: usize = 16;
/// Weights in a chunk of a panel.
pub const CHUNK: usize = 32;

/// How a format's rows lie side by side.
pub trait Interleaved: Block {
    /// What makes a weight unsigned is two to this power.
    const ZERO_BITS: Option<u32>;
    /// Bits of a weight: 2 to 6, or 8.
    const BITS: usize;
    /// Where weights are indices, what they stand for.
    const TABLE: Option<[i8; 16]>;
    /// Half precision numbers of a whole block.
    const HEAD: usize;
    /// Numbers of a chunk's scales and offsets ...
    const SIDE: usize;
    /// ... and the bytes of each: half precision, or integers that multiply the head's numbers.
    const SIDE_BYTES: usize;

    /// Whether a weight, unsigned, takes all bits of a byte.
    const EIGHT_BITS: bool = Self::BITS == 8 || Self::TABLE.is_some();
    /// Bytes of a panel's part of one block.
    const SPAN_BYTES: usize = LANES * 2 * Self::HEAD + Self::LEN / CHUNK * Self::CHUNK_BYTES;
    /// Bytes of one chunk.
    const CHUNK_BYTES: usize = LANES * Self::SIDE * Self::SIDE_BYTES + LANES * CHUNK / 8 * Self::BITS;

    fn head(block: &[u8]) -> [u16; 2];
    fn side(block: &[u8], chunk: usize) -> [u16; 2];
}

fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

macro_rules! interleaved {
    ($($block:ty: zero $zero:expr, bits $bits:literal $(of $table:expr)?, head $n_head:literal $head:expr, side $n_side:literal x $side_bytes:literal $side:expr;)*) => {
        $(impl Interleaved for $block {
            const ZERO_BITS: Option<u32> = $zero;
            const BITS: usize = $bits;
            const TABLE: Option<[i8; 16]> = interleaved!(@table $($table)?);
            const HEAD: usize = $n_head;
            const SIDE: usize = $n_side;
            const SIDE_BYTES: usize = $side_bytes;

            #[inline(always)]
            fn head(block: &[u8]) -> [u16; 2] {
                let head: fn(&[u8]) -> [u16; 2] = $head;
                head(block)
            }

            #[inline(always)]
            fn side(block: &[u8], chunk: usize) -> [u16; 2] {
                let side: fn(&[u8], usize) -> [u16; 2] = $side;
                side(block, chunk)
            }
        })*
    };
    (@table) => { None };
    (@table $table:expr) => { Some($table) };
}

fn no_head(_: &[u8]) -> [u16; 2] {
    [0; 2]
}

fn two_halves(block: &[u8]) -> [u16; 2] {
    [u16_at(block, 0), u16_at(block, 2)]
}

fn k_side(block: &[u8], chunk: usize) -> [u16; 2] {
    let (scale, min) = k_scale_min(&block[4..16], chunk);
    [scale as u16, min as u16]
}

interleaved! {
    Q4_0: zero Some(3), bits 4, head 0 no_head, side 1 x 2 |b, _| [u16_at(b, 0), 0];
    Q4_1: zero None, bits 4, head 0 no_head, side 2 x 2 |b, _| two_halves(b);
    Q5_0: zero Some(4), bits 5, head 0 no_head, side 1 x 2 |b, _| [u16_at(b, 0), 0];
    Q5_1: zero None, bits 5, head 0 no_head, side 2 x 2 |b, _| two_halves(b);
    Q8_0: zero Some(7), bits 8, head 0 no_head, side 1 x 2 |b, _| [u16_at(b, 0), 0];
    Q2K: zero None, bits 2, head 2 |b| [u16_at(b, 80), u16_at(b, 82)], side 2 x 1
        |b, chunk| [b[2 * chunk] as u16, b[2 * chunk + 1] as u16];
    Q3K: zero Some(2), bits 3, head 1 |b| [u16_at(b, 108), 0], side 2 x 1
        |b, chunk| [0, 1].map(|g| q3_k_scale(&b[96..108], 2 * chunk + g) as u8 as u16);
    Q4K: zero None, bits 4, head 2 two_halves, side 2 x 1 k_side;
    Q5K: zero None, bits 5, head 2 two_halves, side 2 x 1 k_side;
    Q6K: zero Some(5), bits 6, head 1 |b| [u16_at(b, 208), 0], side 2 x 1
        |b, chunk| [b[192 + 2 * chunk] as u16, b[193 + 2 * chunk] as u16];
    Iq4Nl: zero Some(7), bits 4 of IQ4_VALUES, head 0 no_head, side 1 x 2 |b, _| [u16_at(b, 0), 0];
    Iq4Xs: zero Some(7), bits 4 of IQ4_VALUES, head 1 |b| [u16_at(b, 0), 0], side 1 x 1
        |b, chunk| [iq4_xs_scale(b, chunk) as u8 as u16, 0];
}

/// Bytes of a panel of rows of `n_cols`; none for float types, whose rows stay rows.
pub fn panel_bytes(dtype: DType, n_cols: usize) -> Option<usize> {
    with_block!(dtype, B => Some(n_cols / B::LEN * B::SPAN_BYTES), _ => None)
}

/// Writes a panel of `rows`, at most [`LANES`], into `out`, which must be zero: lanes without a row stay zeros.
/// Panics where the type is a float type or a length is wrong.
#[inline(always)]
pub fn interleave(dtype: DType, rows: &[&[u8]], out: &mut [u8]) {
    with_block!(dtype, B => interleave_blocks::<B>(rows, out), _ => unreachable!("float types don't interleave"));
}

#[inline(always)]
fn interleave_blocks<B: Interleaved>(rows: &[&[u8]], out: &mut [u8]) {
    assert!(rows.len() <= LANES);
    let n_blocks = out.len() / B::SPAN_BYTES;
    assert!(out.len() == n_blocks * B::SPAN_BYTES && rows.iter().all(|r| r.len() == n_blocks * B::BYTES));
    let mut groups = Groups::new();
    // Block by block: what is written to stays in the first-level cache, and the rows are streams.
    for (b, out) in out.chunks_exact_mut(B::SPAN_BYTES).enumerate() {
        let (head, chunks) = out.split_at_mut(LANES * 2 * B::HEAD);
        for (lane, row) in rows.iter().enumerate() {
            let block = &row[b * B::BYTES..][..B::BYTES];
            for (i, value) in B::head(block).iter().enumerate().take(B::HEAD) {
                head[2 * (i * LANES + lane)..][..2].copy_from_slice(&value.to_le_bytes());
            }
            B::unpack(block, &mut groups);
            for (c, chunk) in chunks.chunks_exact_mut(B::CHUNK_BYTES).enumerate() {
                let (side, weights) = chunk.split_at_mut(LANES * B::SIDE * B::SIDE_BYTES);
                for (i, value) in B::side(block, c).iter().enumerate().take(B::SIDE) {
                    side[B::SIDE_BYTES * (i * LANES + lane)..][..B::SIDE_BYTES]
                        .copy_from_slice(&value.to_le_bytes()[..B::SIDE_BYTES]);
                }
                let zero = B::ZERO_BITS.map_or(0, |bits| 1u8 << bits);
                let mut u = [0u8; CHUNK];
                for (u, q) in u.iter_mut().zip(&groups.q[c * CHUNK..]) {
                    *u = match &B::TABLE {
                        // Tables rise: as many entries as are below.
                        Some(table) => table.iter().map(|value| (value < q) as u8).sum(),
                        None => (*q as u8).wrapping_add(zero),
                    };
                }
                put_weights(B::BITS, &u, lane, weights);
            }
        }
    }
}

/// Puts a row's 32 weights into their lane of a chunk.
#[inline(always)]
fn put_weights(bits: usize, u: &[u8; CHUNK], lane: usize, out: &mut [u8]) {
    let quads: &[[u8; 4]] = u.as_chunks().0;
    let (out, _) = out.as_chunks_mut::<4>();
    if bits == 8 {
        for (j, quad) in quads.iter().enumerate() {
            out[j * LANES + lane] = *quad;
        }
        return;
    }
    // The low bits of quads j, j + n, ...
    let (low, n) = if bits < 4 { (2, 2) } else { (4, 4) };
    for j in 0..n {
        out[j * LANES + lane] = std::array::from_fn(|b| {
            let shared = quads[j..].iter().step_by(n).enumerate();
            shared.fold(0, |byte, (i, quad)| byte | (quad[b] & ((1 << low) - 1)) << (i * low))
        });
    }
    let planes = &mut out[n * LANES..];
    if bits == low + 1 {
        planes[lane] = std::array::from_fn(|b| {
            quads.iter().enumerate().fold(0, |byte, (j, quad)| byte | (quad[b] >> low) << j)
        });
    }
    if bits == 6 {
        for (p, quads) in quads.chunks_exact(4).enumerate() {
            planes[p * LANES + lane] = std::array::from_fn(|b| {
                quads.iter().enumerate().fold(0, |byte, (j, quad)| byte | (quad[b] >> 4) << (2 * j))
            });
        }
    }
}
