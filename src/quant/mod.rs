//! The weight formats: what a block of each holds and the float32 values it stands for.
//!
//! Every quantised format is seen the same way: a block of [`Block::LEN`] weights in groups of 16, each group with
//! a scale and (in some formats) an offset, each weight a signed byte: `w = scale * q + min`. [`Block::unpack`] is
//! that view, [`decode`] turns it into float32, and the CPU kernels take their dot products from it.
//! This room uses nothing else of the crate.

pub mod encode;
mod fit;
mod interleave;
mod iq4;
mod k_encode;
mod k_quants;
mod q4;
mod q5;
mod q8_0;

pub use interleave::{CHUNK, Interleaved, LANES, interleave, panel_bytes};
pub use iq4::{IQ4_VALUES, Iq4Nl, Iq4Xs, iq4_xs_scale};
pub use k_quants::{Q2K, Q3K, Q4K, Q5K, Q6K, k_scale_min, q3_k_scale};
pub use q4::{Q4_0, Q4_1};
pub use q5::{Q5_0, Q5_1};
pub use q8_0::{Q8_0, encode_q8_0};

mod matrix;
pub use matrix::{Bytes, Layout, Matrix, Pages, Source};

/// Weights that share one scale in [`Groups`].
pub const GROUP: usize = 16;

/// One block seen as signed bytes with a scale and an offset for every 16 of them.
#[derive(Clone)]
pub struct Groups {
    pub q: [i8; 256],
    pub scale: [f32; 16],
    pub min: [f32; 16],
}

impl Groups {
    pub const fn new() -> Self {
        Self { q: [0; 256], scale: [0.0; 16], min: [0.0; 16] }
    }

    /// Scale and offset of the `share`-th weights of `B` that share them.
    #[inline(always)]
    pub fn of_share<B: Block>(&self, share: usize) -> (f32, f32) {
        let at = share * B::SHARE / GROUP;
        (self.scale[at], if B::HAS_MIN { self.min[at] } else { 0.0 })
    }

    /// Sets scale and offset of every group from `from` up to `to`.
    #[inline(always)]
    fn fill(&mut self, from: usize, to: usize, scale: f32, min: f32) {
        self.scale[from..to].fill(scale);
        self.min[from..to].fill(min);
    }
}

impl Default for Groups {
    fn default() -> Self {
        Self::new()
    }
}

/// A quantised format: its layout and its scalar reference.
pub trait Block {
    /// Weights in a block.
    const LEN: usize;
    /// Bytes in a block.
    const BYTES: usize;
    /// Whether groups have an offset; where they don't, `Groups::min` stays as it was.
    const HAS_MIN: bool;
    /// Weights that share a scale and an offset: 16 or 32.
    const SHARE: usize = 32;

    /// Fills the first `LEN` weights and `LEN / 16` groups of `out` from one block of `BYTES` bytes.
    fn unpack(block: &[u8], out: &mut Groups);
}

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $id:literal, $name:literal, $len:expr, $bytes:expr;)*) => {
        /// A tensor's element type, with GGUF's numbers.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum DType { $($(#[$doc])* $variant,)* }

        impl DType {
            pub const ALL: &[DType] = &[$(DType::$variant,)*];

            /// GGUF's number for the type.
            pub const fn id(self) -> u32 { match self { $(DType::$variant => $id,)* } }

            /// The name as GGUF tools print it.
            pub const fn name(self) -> &'static str { match self { $(DType::$variant => $name,)* } }

            /// Weights in a block: a row's length is a multiple of it.
            pub const fn block_len(self) -> usize { match self { $(DType::$variant => $len,)* } }

            /// Bytes in a block.
            pub const fn block_bytes(self) -> usize { match self { $(DType::$variant => $bytes,)* } }
        }
    };
}

dtypes! {
    F32 = 0, "F32", 1, 4;
    F16 = 1, "F16", 1, 2;
    BF16 = 30, "BF16", 1, 2;
    Q4_0 = 2, "Q4_0", Q4_0::LEN, Q4_0::BYTES;
    Q4_1 = 3, "Q4_1", Q4_1::LEN, Q4_1::BYTES;
    Q5_0 = 6, "Q5_0", Q5_0::LEN, Q5_0::BYTES;
    Q5_1 = 7, "Q5_1", Q5_1::LEN, Q5_1::BYTES;
    Q8_0 = 8, "Q8_0", Q8_0::LEN, Q8_0::BYTES;
    Q2K = 10, "Q2_K", Q2K::LEN, Q2K::BYTES;
    Q3K = 11, "Q3_K", Q3K::LEN, Q3K::BYTES;
    Q4K = 12, "Q4_K", Q4K::LEN, Q4K::BYTES;
    Q5K = 13, "Q5_K", Q5K::LEN, Q5K::BYTES;
    Q6K = 14, "Q6_K", Q6K::LEN, Q6K::BYTES;
    Iq4Nl = 20, "IQ4_NL", Iq4Nl::LEN, Iq4Nl::BYTES;
    Iq4Xs = 23, "IQ4_XS", Iq4Xs::LEN, Iq4Xs::BYTES;
    /// Only for the index tensors of a `.gpuidx` file; no weight has it.
    I32 = 26, "I32", 1, 4;
}

/// Names of the GGUF types this crate refuses, so that the refusal can name them.
const REFUSED: &[(u32, &str)] = &[
    (4, "Q4_2"),
    (5, "Q4_3"),
    (9, "Q8_1"),
    (15, "Q8_K"),
    (16, "IQ2_XXS"),
    (17, "IQ2_XS"),
    (18, "IQ3_XXS"),
    (19, "IQ1_S"),
    (21, "IQ3_S"),
    (22, "IQ2_S"),
    (24, "I8"),
    (25, "I16"),
    (27, "I64"),
    (28, "F64"),
    (29, "IQ1_M"),
    (31, "Q4_0_4_4"),
    (32, "Q4_0_4_8"),
    (33, "Q4_0_8_8"),
    (34, "TQ1_0"),
    (35, "TQ2_0"),
    (36, "IQ4_NL_4_4"),
    (37, "IQ4_NL_4_8"),
    (38, "IQ4_NL_8_8"),
    (39, "MXFP4"),
    (40, "NVFP4"),
];

impl DType {
    /// The type with GGUF's number `id`, or the name of what it is instead.
    pub fn from_id(id: u32) -> Result<Self, String> {
        Self::ALL.iter().copied().find(|t| t.id() == id).ok_or_else(|| {
            match REFUSED.iter().find(|(known, _)| *known == id) {
                Some((_, name)) => format!("type {id} ({name})"),
                None => format!("type {id}"),
            }
        })
    }

    /// Whether dot products with it go through integer activations.
    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// Bytes of `n` weights in a row; `n` is a multiple of the block length.
    pub const fn row_bytes(self, n: usize) -> usize {
        n / self.block_len() * self.block_bytes()
    }
}

/// Calls `$body` with `$block` bound to the block type of a quantised [`DType`]; other types take `$other`.
#[macro_export]
macro_rules! with_block {
    ($dtype:expr, $block:ident => $body:expr, _ => $other:expr) => {
        $crate::with_block!(@ $dtype, $block, $body, $other,
            Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2K Q3K Q4K Q5K Q6K Iq4Nl Iq4Xs)
    };
    (@ $dtype:expr, $block:ident, $body:expr, $other:expr, $($name:ident)*) => {
        match $dtype {
            $($crate::quant::DType::$name => { type $block = $crate::quant::$name; $body })*
            _ => $other,
        }
    };
}

/// Half precision to single, exactly, without a branch on the processor: loops over it vectorise.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    const TWO_POW_112: f32 = f32::from_bits(0x7780_0000);
    let magnitude = (bits as u32 & 0x7fff) << 13;
    let finite = (f32::from_bits(magnitude) * TWO_POW_112).to_bits();
    let special = magnitude | 0x7f80_0000;
    let value = if magnitude >= 0x0f80_0000 { special } else { finite };
    f32::from_bits(value | (bits as u32 & 0x8000) << 16)
}

/// bfloat16 to single.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits((bits as u32) << 16)
}

#[inline(always)]
fn f16_at(block: &[u8], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}

/// Decodes one quantised block into `out`, `Block::LEN` values.
#[inline(always)]
pub fn decode_block<B: Block>(block: &[u8], groups: &mut Groups, out: &mut [f32]) {
    B::unpack(block, groups);
    for (g, out) in out[..B::LEN].chunks_exact_mut(GROUP).enumerate() {
        let (scale, min) = (groups.scale[g], groups.min[g]);
        for (o, q) in out.iter_mut().zip(&groups.q[g * GROUP..]) {
            *o = if B::HAS_MIN { scale * *q as f32 + min } else { scale * *q as f32 };
        }
    }
}

/// Decodes a row, or whole blocks of one, into `out`. Panics where `bytes` is shorter than `out` needs.
#[inline(always)]
pub fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = f32::from_le_bytes(*b);
            }
        }
        DType::F16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = f16_to_f32(u16::from_le_bytes(*b));
            }
        }
        DType::BF16 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *o = bf16_to_f32(u16::from_le_bytes(*b));
            }
        }
        DType::I32 => {
            for (o, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *o = i32::from_le_bytes(*b) as f32;
            }
        }
        _ => with_block!(dtype, B => {
            let mut groups = Groups::new();
            for (block, out) in bytes.chunks_exact(B::BYTES).zip(out.chunks_exact_mut(B::LEN)) {
                decode_block::<B>(block, &mut groups, out);
            }
        }, _ => unreachable!("the float types are above")),
    }
}
