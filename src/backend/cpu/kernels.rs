//! The table of kernels: one set of function pointers for each instruction set, chosen once, at run time.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use crate::quant::{DType, LANES, Q4_0};
use crate::{Error, Result};

use super::operand::{Form, Operand, QRowMut, Quantized, TOKEN_TILE, WeightTile, WordRow};

/// Dot products of weight rows with every token of an operand: `out[t * stride + r] = rows[r] · x[t]`.
/// The result for one row and token doesn't depend on the others in the call.
///
/// # Safety
/// Each row points to `x.n_cols` weights of the kernel's type, a whole number of blocks; `out` has a place for each
/// row and token; the processor has the kernel's instruction set.
pub type Dot = unsafe fn(rows: Rows, x: &Operand, out: *mut f32, stride: usize);

/// Rows to multiply, and rows that the next call will want: a kernel asks memory for those while it works. They need
/// not be valid.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub now: &'a [*const u8],
    pub next: &'a [*const u8],
}

/// A row's place and its weight in a sum.
pub type Pick = (u32, f32);

/// What an instruction set does with rows of blocks beyond [`Dot`]: the same sums, to the bit, from other layouts.
#[derive(Clone, Copy)]
pub struct Panels {
    /// Dot products of a panel's rows with every token; `n` is the number of rows that `out` has places for.
    ///
    /// # Safety
    /// `panel` points to a whole panel of the kernel's type of `x.n_cols` weights a row; `out` has places for `n` rows of
    /// every token; the operand is quantised; the processor has the kernel's instruction set.
    pub dot: unsafe fn(panel: *const u8, n: usize, x: &Operand, out: *mut f32, stride: usize),
    /// Fills a tile from a panel, where there is a [`Gemm`] to read it.
    ///
    /// # Safety
    /// `panel` points to a whole panel of the kernel's type of `n_cols` weights a row; the processor has the kernel's
    /// instruction set.
    pub unpack: Option<UnpackPanel>,
}

/// Dot products of a tile's first `n` rows with each row of activations, at most [`TOKEN_TILE`]:
/// `out[t * stride + r] = rows[r] · x[t]`; where `goes_on`, added to what is there, the sums of the columns before.
///
/// # Safety
/// Rows of activations have the tile's columns, and were taken with its `share`; `out` has places for `n` results of each;
/// the processor has the kernel's instruction set.
pub type Gemm =
    unsafe fn(weights: &WeightTile, n: usize, x: &[WordRow], goes_on: bool, out: *mut f32, stride: usize);

/// `out += Σ a · row`, in order, over whole blocks of each row. Memory is asked for the rows `next` meanwhile.
pub type AddRows = unsafe fn(dtype: DType, rows: &[(&[u8], f32)], next: &[(&[u8], f32)], out: &mut [f32]);

pub type UnpackPanel = unsafe fn(panel: *const u8, n_cols: usize, tile: &mut WeightTile);

pub type LayerNorm = unsafe fn(x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f32, out: &mut [f32]);

pub type Scores =
    unsafe fn(keys: &[u8], next: &[u8], queries: &[f32], dim: usize, out: &mut [f32], stride: usize);
pub type Mix =
    unsafe fn(values: &[u8], next: &[u8], weights: &[f32], stride: usize, dim: usize, out: &mut [f32]);

/// Attention over a block of the cache, whose keys lie by dimension, (dim, KV_BLOCK), its values by token, (KV_BLOCK, dim).
#[derive(Clone, Copy)]
pub struct AttentionKernels {
    /// Scores of each query, (n, dim), with the block's keys, at the beginning of rows `stride` apart. Memory is asked for
    /// `next` meanwhile, which will be wanted after this call; so in `mix`.
    ///
    /// # Safety
    /// The processor has the kernel's instruction set.
    pub scores: Scores,
    /// Adds to each row of `out`, (n, dim), the first tokens' values times the row's weights, which begin `stride` apart.
    ///
    /// # Safety
    /// The processor has the kernel's instruction set.
    pub mix: Mix,
}

/// What an instruction set offers. The functions' safety: the processor has it. [`select`] hands out no other.
pub struct Kernels {
    pub name: &'static str,
    /// By `DType as usize`. For a quantised type the operand must be quantised.
    pub dot: [Dot; DType::ALL.len()],
    /// By `DType as usize`: what there is for rows side by side.
    pub panels: [Option<Panels>; DType::ALL.len()],
    /// For many tokens, where the instruction set has it: forms that give the same bits.
    pub gemms: &'static [Gemm],
    /// The one of them that this processor likes best.
    pub fastest_gemm: OnceLock<Gemm>,
    pub interleave: unsafe fn(dtype: DType, rows: &[&[u8]], out: &mut [u8]),
    pub quantize: unsafe fn(x: &[f32], out: &mut QRowMut),
    pub add_rows: AddRows,
    pub axpy_f32: unsafe fn(a: f32, x: &[f32], out: &mut [f32]),
    pub decode: unsafe fn(dtype: DType, bytes: &[u8], out: &mut [f32]),
    pub rms_norm: unsafe fn(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]),
    pub layer_norm: LayerNorm,
    /// For float32 keys and values.
    pub attention: AttentionKernels,
    /// For half precision, where the instruction set reads it.
    pub half_attention: Option<AttentionKernels>,
    /// See `portable::mix_picks`.
    pub mix_picks: unsafe fn(values: &[f32], first: u32, picks: &[Pick], out: &mut [f32]),
    /// See `portable::exponentials`.
    pub exponentials: unsafe fn(x: &mut [f32], scale: f32) -> (f32, f32),
    pub silu: unsafe fn(x: &mut [f32]),
    pub gelu: unsafe fn(x: &mut [f32]),
}

impl Kernels {
    /// The fastest matrix-matrix kernel, measured when first asked for.
    pub fn gemm(&self) -> Option<Gemm> {
        match self.gemms {
            [] => None,
            [one] => Some(*one),
            all => Some(*self.fastest_gemm.get_or_init(|| fastest(all))),
        }
    }
}

/// The kernel that took least for a small product, the best of a few turns each: a tenth of a millisecond in all.
fn fastest(gemms: &[Gemm]) -> Gemm {
    const COLUMNS: usize = 2048;
    const TURNS: usize = 8;
    let mut weights = WeightTile::default();
    weights.reset::<Q4_0>(COLUMNS);
    let mut x = Quantized::default();
    x.resize(TOKEN_TILE, COLUMNS, Form::Words);
    let x: Vec<_> = (0..TOKEN_TILE).map(|t| x.word_row(t, 0..COLUMNS, weights.share)).collect();
    let mut out = [0.0f32; TOKEN_TILE * LANES];
    let mut best = vec![Duration::MAX; gemms.len()];
    for _ in 0..TURNS {
        for (gemm, best) in gemms.iter().zip(&mut best) {
            let start = Instant::now();
            // SAFETY: rows of one length, an output for each row and token, a table of this processor.
            unsafe { gemm(&weights, LANES, &x, false, out.as_mut_ptr(), LANES) };
            *best = start.elapsed().min(*best);
        }
    }
    let (fastest, _) = gemms.iter().zip(best).min_by_key(|(_, time)| *time).expect("several kernels");
    *fastest
}

/// Of a set without panels.
pub const fn no_panels(_: DType) -> Option<Panels> {
    None
}

/// Builds a [`Kernels`] from a `const fn(DType) -> Dot` and the modules `instance`, `along` and `attention` beside it, and
/// where the set has them a `const fn(DType) -> Option<Panels>` and [`Gemm`]s.
macro_rules! table {
    ($name:expr, $dot_for:ident) => {
        table!($name, $dot_for, $crate::backend::cpu::kernels::no_panels, &[])
    };
    ($name:expr, $dot_for:ident, $panels_for:path, $gemms:expr) => {{
        Kernels {
            name: $name,
            dot: {
                let mut dot = [$dot_for(DType::F32); DType::ALL.len()];
                let mut i = 0;
                while i < dot.len() {
                    dot[i] = $dot_for(DType::ALL[i]);
                    i += 1;
                }
                dot
            },
            panels: {
                let mut panels = [None; DType::ALL.len()];
                let mut i = 0;
                while i < panels.len() {
                    panels[i] = $panels_for(DType::ALL[i]);
                    i += 1;
                }
                panels
            },
            gemms: $gemms,
            fastest_gemm: std::sync::OnceLock::new(),
            interleave: instance::interleave,
            quantize: instance::quantize,
            add_rows: along::add_rows,
            axpy_f32: along::axpy_f32,
            decode: along::decode,
            rms_norm: instance::rms_norm,
            layer_norm: instance::layer_norm,
            attention: attention::ATTENTION,
            half_attention: attention::HALF_ATTENTION,
            mix_picks: instance::mix_picks,
            exponentials: instance::exponentials,
            silu: instance::silu,
            gelu: instance::gelu,
        }
    }};
}
pub(super) use table;

/// Cuts rows and tokens into tiles of four rows by as many tokens as one of the numbers given, the largest first, says,
/// and calls `tile::<F, T>(rows, rows that follow, rows to keep, x, first token, out, stride)` for each. For the body of
/// a [`Dot`], whose promises are the tiles' too.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! over_tiles {
    ($tile:ident::<$f:ty>($rows:expr, $x:expr, $out:expr, $stride:expr) by $($tokens:literal)*) => {{
        let (fours, rest) = $rows.now.as_chunks::<4>();
        // Rows left over have the last one beside them as often as it takes, for nothing.
        let filled: Option<[*const u8; 4]> = rest.last().map(|l| std::array::from_fn(|i| *rest.get(i).unwrap_or(l)));
        let mut t = 0;
        $(while $x.n_tokens - t >= $tokens {
            for (i, rows) in fours.iter().chain(&filled).enumerate() {
                let next = fours.get(i + 1).or($rows.next.first_chunk::<4>()).unwrap_or(rows);
                let keep = if i < fours.len() { 4 } else { rest.len() };
                // SAFETY: as the caller promises; the output's places are those of these rows and tokens.
                unsafe {
                    let out = $out.add(t * $stride + 4 * i);
                    $tile::<$f, $tokens>(rows, next, keep, $x, t, out, $stride);
                }
            }
            t += $tokens;
        })*
    }};
}
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
pub(super) use over_tiles;

/// Forces an instruction set: `scalar`, `avx2`, `avxvnni`, `avx512`, `neon`, `dotprod` or `i8mm`.
pub const ISA_VARIABLE: &str = "POWERINFER_ISA";

/// The tables that this processor can run, the fastest last.
pub fn available() -> Vec<&'static Kernels> {
    let mut all = vec![&super::scalar::KERNELS];
    #[cfg(target_arch = "x86_64")]
    {
        if super::avx2::is_available() {
            all.push(&super::avx2::KERNELS);
        }
        if super::avx2::vnni::is_available() {
            all.push(&super::avx2::vnni::KERNELS);
        }
        if super::avx512::is_available() {
            all.push(&super::avx512::KERNELS);
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        all.push(&super::neon::KERNELS);
        if super::neon::dotprod::is_available() {
            all.push(&super::neon::dotprod::KERNELS);
        }
        if super::neon::i8mm::is_available() {
            all.push(&super::neon::i8mm::KERNELS);
        }
    }
    all
}

/// The fastest table this processor can run, or the one that the environment variable names.
pub fn select() -> Result<&'static Kernels> {
    static FASTEST: OnceLock<&'static Kernels> = OnceLock::new();
    match std::env::var(ISA_VARIABLE) {
        Ok(name) if !name.is_empty() => {
            let all = available();
            let names: Vec<_> = all.iter().map(|k| k.name).collect();
            let found = all.iter().find(|k| k.name.eq_ignore_ascii_case(&name)).copied();
            found.ok_or_else(|| {
                Error::argument(ISA_VARIABLE, name, format!("one of {} on this machine", names.join(", ")))
            })
        }
        _ => Ok(FASTEST.get_or_init(|| available().pop().expect("scalar is always there"))),
    }
}
