//! Operations that plain Rust says best. Each instruction set compiles them for itself (`instantiate!`), so that the
//! compiler vectorises them for it. Nothing here reorders sums. Weighted sums of rows fuse a multiplication with its
//! addition where the set has an instruction for it; all else gives the same bits on all sets.

use crate::backend::KV_BLOCK;
use crate::quant::{self, Block, DType, GROUP, Groups, decode_block};
use crate::with_block;

use super::fetch;
use super::kernels::Pick;
use super::operand::{Q_BLOCK, Q_GROUP, QRow, QRowMut, cross};

/// Sums in sixteen lanes, in a fixed order.
#[inline(always)]
fn sum(n: usize, term: impl Fn(usize) -> f32) -> f32 {
    const WIDTH: usize = 16;
    let mut lanes = [0.0f32; WIDTH];
    for i in 0..n / WIDTH {
        for (l, lane) in lanes.iter_mut().enumerate() {
            *lane += term(i * WIDTH + l);
        }
    }
    let tail: f32 = (n / WIDTH * WIDTH..n).map(&term).sum();
    lanes.iter().sum::<f32>() + tail
}

/// e^x to about one unit in the last place; 0 below -87, NaN for NaN.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Adding this leaves the nearest integer in the low bits of the mantissa.
    const ROUND: f32 = 12_582_912.0;
    let clamped = x.clamp(-87.0, 88.0);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * 0.693_359_4 - n * -2.121_944_4e-4;
    let p = 1.0
        + r * (1.0 + r * (0.5 + r * (0.166_666_67 + r * (0.041_666_65 + r * (0.008_333_6 + r * 0.001_39)))));
    let scale = f32::from_bits((shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127)) << 23);
    let value = p * scale;
    if x < -87.0 { 0.0 } else { value }
}

/// Quantises one row; what is beyond it becomes zeros.
#[inline(always)]
pub fn quantize(x: &[f32], out: &mut QRowMut) {
    let (blocks, rest) = x.as_chunks::<Q_BLOCK>();
    let (words, sums) = (out.words.as_chunks_mut::<Q_BLOCK>().0, out.sum.as_chunks_mut().0);
    for (((x, words), d), sums) in blocks.iter().zip(&mut *words).zip(&mut *out.d).zip(&mut *sums) {
        *d = quantize_block(x, words, sums);
    }
    if !rest.is_empty() {
        let (mut padded, last) = ([0.0; Q_BLOCK], blocks.len());
        padded[..rest.len()].copy_from_slice(rest);
        out.d[last] = quantize_block(&padded, &mut words[last], &mut sums[last]);
    }
    split(out);
    sum_groups(out);
}

/// Splits a row's words into bytes, where there is room for them.
#[inline(always)]
fn split(out: &mut QRowMut) {
    for ((w, h), l) in out.words.iter().zip(&mut *out.high).zip(&mut *out.low) {
        *h = ((*w + 128) >> 8) as i8;
        *l = *w as i8;
    }
}

/// Fills cross sums and sums of values, where there is room for them.
#[inline(always)]
fn sum_groups(out: &mut QRowMut) {
    let [(crosses, values), (long_crosses, long_values)] = &mut out.groups;
    for (cross_sum, words) in crosses.iter_mut().zip(out.words.as_chunks().0) {
        *cross_sum = cross(words);
    }
    for (long, pair) in long_crosses.iter_mut().zip(crosses.as_chunks::<2>().0) {
        *long = pair[0].wrapping_add(pair[1]);
    }
    sum_values::<4>(out.sum, out.d, values);
    sum_values::<2>(out.sum, out.d, long_values);
}

/// Sums of the values of groups, of which a block has `N`, from those of the words of its four sixteens.
#[inline(always)]
fn sum_values<const N: usize>(sums: &[i32], d: &[f32], out: &mut [f32]) {
    const SIXTEENS: usize = Q_BLOCK / Q_GROUP;
    for (out, (sums, d)) in
        out.as_chunks_mut::<N>().0.iter_mut().zip(sums.as_chunks::<SIXTEENS>().0.iter().zip(d))
    {
        for i in 0..N {
            out[i] = d * sums[i * SIXTEENS / N..(i + 1) * SIXTEENS / N].iter().sum::<i32>() as f32;
        }
    }
}

/// Fills a block's words and the sums of its groups; returns its scale. Lengths are fixed, or nothing here would vectorise.
#[inline(always)]
fn quantize_block(
    x: &[f32; Q_BLOCK],
    words: &mut [i16; Q_BLOCK],
    sums: &mut [i32; Q_BLOCK / Q_GROUP],
) -> f32 {
    // The largest that leaves both bytes in range once the low one is rounded off.
    const LARGEST: f32 = 32_512.0;
    // Adding this leaves the nearest integer in the low bits of the mantissa; the conversion then vectorises.
    const ROUND: f32 = 12_582_912.0;
    // Without their signs floats are in the order of their bits, and a maximum of integers vectorises.
    let largest = f32::from_bits(x.iter().map(|v| v.to_bits() & !(1 << 31)).max().unwrap_or(0));
    let inverse = if largest > 0.0 { LARGEST / largest } else { 0.0 };
    let groups = x.as_chunks::<Q_GROUP>().0.iter().zip(words.as_chunks_mut::<Q_GROUP>().0);
    for ((x, words), sum) in groups.zip(sums) {
        let mut whole = [0i32; Q_GROUP];
        for i in 0..Q_GROUP {
            let q = ((x[i] * inverse + ROUND).to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
            let q = q.clamp(-LARGEST as i32, LARGEST as i32);
            // A low byte of -128 has no negative, which AVX2's kernels need; a unit of 32512 is no loss.
            whole[i] = q + (q & 0xff == 0x80) as i32;
        }
        *sum = whole.iter().sum();
        for i in 0..Q_GROUP {
            words[i] = whole[i] as i16;
        }
    }
    // NaN for NaN and infinity: a broken model must show.
    if largest.is_finite() { largest / LARGEST } else { f32::NAN }
}

/// See [`super::kernels::AddRows`].
#[inline(always)]
pub fn add_rows<const FUSED: bool>(
    dtype: DType,
    rows: &[(&[u8], f32)],
    next: &[(&[u8], f32)],
    out: &mut [f32],
) {
    next.iter().for_each(|(row, _)| fetch(row));
    rows.iter().for_each(|(row, a)| axpy::<FUSED>(dtype, *a, row, out));
}

/// `out += a * row`, over whole blocks of the row.
#[inline(always)]
fn axpy<const FUSED: bool>(dtype: DType, a: f32, row: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(row.as_chunks::<4>().0) {
                *o = multiply_add::<FUSED>(a, f32::from_le_bytes(*b), *o);
            }
        }
        DType::F16 => {
            for (o, b) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *o = multiply_add::<FUSED>(a, quant::f16_to_f32(u16::from_le_bytes(*b)), *o);
            }
        }
        DType::BF16 => {
            for (o, b) in out.iter_mut().zip(row.as_chunks::<2>().0) {
                *o = multiply_add::<FUSED>(a, quant::bf16_to_f32(u16::from_le_bytes(*b)), *o);
            }
        }
        _ => {
            with_block!(dtype, B => axpy_blocks::<B, FUSED>(a, row, out), _ => unreachable!("no weights have this type"))
        }
    }
}

#[inline(always)]
fn axpy_blocks<B: Block, const FUSED: bool>(a: f32, row: &[u8], out: &mut [f32]) {
    let mut groups = Groups::new();
    let mut values = [0.0f32; 256];
    for (block, out) in row.chunks_exact(B::BYTES).zip(out.chunks_exact_mut(B::LEN)) {
        decode_block::<B>(block, &mut groups, &mut values);
        for (o, v) in out.iter_mut().zip(&values[..B::LEN]) {
            *o = multiply_add::<FUSED>(a, *v, *o);
        }
    }
}

#[inline(always)]
pub fn axpy_f32<const FUSED: bool>(a: f32, x: &[f32], out: &mut [f32]) {
    for (o, v) in out.iter_mut().zip(x) {
        *o = multiply_add::<FUSED>(a, *v, *o);
    }
}

#[inline(always)]
pub fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    quant::decode(dtype, bytes, out);
}

/// `x / sqrt(mean(x²) + eps) * weight`
#[inline(always)]
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (sum(x.len(), |i| x[i] * x[i]) / x.len() as f32 + eps).sqrt();
    for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
        *o = x * scale * w;
    }
}

/// `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`
#[inline(always)]
pub fn layer_norm(x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let mean = sum(x.len(), |i| x[i]) / x.len() as f32;
    let variance = sum(x.len(), |i| (x[i] - mean) * (x[i] - mean)) / x.len() as f32;
    let scale = 1.0 / (variance + eps).sqrt();
    for ((o, x), w) in out.iter_mut().zip(x).zip(weight) {
        *o = (x - mean) * scale * w;
    }
    if let Some(bias) = bias {
        for (o, b) in out.iter_mut().zip(bias) {
            *o += b;
        }
    }
}

/// `exp(scale * (x - largest))` in place; returns the largest and the sum. A softmax lacks the division.
#[inline(always)]
pub fn exponentials(x: &mut [f32], scale: f32) -> (f32, f32) {
    let mut lanes = [f32::NEG_INFINITY; 16];
    for x in x.chunks(16) {
        for (m, v) in lanes.iter_mut().zip(x) {
            *m = if *v > *m { *v } else { *m };
        }
    }
    let largest = lanes.iter().fold(f32::NEG_INFINITY, |m, v| if *v > m { *v } else { m });
    for v in x.iter_mut() {
        *v = exp((*v - largest) * scale);
    }
    (largest, sum(x.len(), |i| x[i]))
}

/// `a * b + c`, in one rounding where the processor has an instruction for it.
#[inline(always)]
fn multiply_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// Values that lie as little-endian bytes.
#[inline(always)]
fn floats<const N: usize>(bytes: &[u8]) -> [f32; N] {
    let mut out = [0.0; N];
    for (o, b) in out.iter_mut().zip(bytes[..4 * N].as_chunks::<4>().0) {
        *o = f32::from_le_bytes(*b);
    }
    out
}

/// Calls `f::<N>(row, ...)` for `n` rows from 0 on, four at a time and the rest at once.
macro_rules! by_fours {
    ($n:expr, $f:ident::<$fused:ident>($($arg:expr),*)) => {
        for row in (0..$n).step_by(4) {
            match $n - row {
                1 => $f::<$fused, 1>(row, $($arg),*),
                2 => $f::<$fused, 2>(row, $($arg),*),
                3 => $f::<$fused, 3>(row, $($arg),*),
                _ => $f::<$fused, 4>(row, $($arg),*),
            }
        }
    };
}

/// See [`super::kernels::AttentionKernels::scores`].
#[inline(always)]
pub fn scores<const FUSED: bool>(
    keys: &[u8],
    next: &[u8],
    queries: &[f32],
    dim: usize,
    out: &mut [f32],
    stride: usize,
) {
    fetch(next);
    by_fours!(queries.len() / dim, score_rows::<FUSED>(keys, queries, dim, out, stride));
}

#[inline(always)]
fn score_rows<const FUSED: bool, const N: usize>(
    row: usize,
    keys: &[u8],
    queries: &[f32],
    dim: usize,
    out: &mut [f32],
    stride: usize,
) {
    let q: [&[f32]; N] = std::array::from_fn(|n| &queries[(row + n) * dim..][..dim]);
    let mut sums = [[0.0f32; KV_BLOCK]; N];
    for (d, keys) in keys.chunks_exact(4 * KV_BLOCK).enumerate() {
        let keys = floats::<KV_BLOCK>(keys);
        for n in 0..N {
            let q = q[n][d];
            for (s, k) in sums[n].iter_mut().zip(&keys) {
                *s = multiply_add::<FUSED>(q, *k, *s);
            }
        }
    }
    for n in 0..N {
        out[(row + n) * stride..][..KV_BLOCK].copy_from_slice(&sums[n]);
    }
}

/// See [`super::kernels::AttentionKernels::mix`].
#[inline(always)]
pub fn mix<const FUSED: bool>(
    values: &[u8],
    next: &[u8],
    weights: &[f32],
    stride: usize,
    dim: usize,
    out: &mut [f32],
) {
    fetch(next);
    by_fours!(out.len() / dim, mix_rows::<FUSED>(values, weights, stride, dim, out));
}

#[inline(always)]
fn mix_rows<const FUSED: bool, const N: usize>(
    row: usize,
    values: &[u8],
    weights: &[f32],
    stride: usize,
    dim: usize,
    out: &mut [f32],
) {
    const COLUMNS: usize = 32;
    let weights: [&[f32]; N] = std::array::from_fn(|n| &weights[(row + n) * stride..]);
    let out = &mut out[row * dim..][..N * dim];
    let mut column = 0;
    while column + COLUMNS <= dim {
        let mut sums = [[0.0f32; COLUMNS]; N];
        for n in 0..N {
            sums[n].copy_from_slice(&out[n * dim + column..][..COLUMNS]);
        }
        for (k, row) in values.chunks_exact(4 * dim).enumerate() {
            let row = floats::<COLUMNS>(&row[4 * column..]);
            for n in 0..N {
                let w = weights[n][k];
                for (s, v) in sums[n].iter_mut().zip(&row) {
                    *s = multiply_add::<FUSED>(w, *v, *s);
                }
            }
        }
        for n in 0..N {
            out[n * dim + column..][..COLUMNS].copy_from_slice(&sums[n]);
        }
        column += COLUMNS;
    }
    for (k, row) in values.chunks_exact(4 * dim).enumerate() {
        for n in 0..N {
            for (s, v) in out[n * dim..][column..dim].iter_mut().zip(row[4 * column..].as_chunks::<4>().0) {
                *s = multiply_add::<FUSED>(weights[n][k], f32::from_le_bytes(*v), *s);
            }
        }
    }
}

/// Adds to `out` the rows of `values`, (n, out.len()), that `picks` name, counted from `first`, times their weights.
#[inline(always)]
pub fn mix_picks<const FUSED: bool>(values: &[f32], first: u32, picks: &[Pick], out: &mut [f32]) {
    const COLUMNS: usize = 64;
    let dim = out.len();
    let row = |k: u32| &values[(k - first) as usize * dim..][..dim];
    let (tiles, rest) = out.as_chunks_mut::<COLUMNS>();
    for (i, out) in tiles.iter_mut().enumerate() {
        let mut sums = *out;
        for (k, w) in picks {
            let row: &[f32; COLUMNS] = row(*k)[i * COLUMNS..].first_chunk().expect("as many columns");
            for (s, v) in sums.iter_mut().zip(row) {
                *s = multiply_add::<FUSED>(*w, *v, *s);
            }
        }
        *out = sums;
    }
    for (k, w) in picks {
        for (s, v) in rest.iter_mut().zip(&row(*k)[dim / COLUMNS * COLUMNS..]) {
            *s = multiply_add::<FUSED>(*w, *v, *s);
        }
    }
}

/// `x * sigmoid(x)`
#[inline(always)]
pub fn silu(x: &mut [f32]) {
    for v in x.iter_mut() {
        *v /= 1.0 + exp(-*v);
    }
}

/// The tanh form of GELU: `x * sigmoid(2 * sqrt(2/π) * (x + 0.044715 x³))`.
#[inline(always)]
pub fn gelu(x: &mut [f32]) {
    const TWICE_ROOT: f32 = 1.595_769;
    for v in x.iter_mut() {
        let inner = TWICE_ROOT * *v * (1.0 + 0.044_715 * *v * *v);
        *v /= 1.0 + exp(-inner);
    }
}

/// The reference of a dot product with float weights of `N` bytes each.
#[inline(always)]
pub fn dot<const N: usize>(weights: &[[u8; N]], x: &[f32], load: impl Fn([u8; N]) -> f32) -> f32 {
    sum(x.len(), |i| load(weights[i]) * x[i])
}

/// The reference of a dot product with quantised weights, block by block.
#[inline(always)]
pub fn dot_block<B: Block>(row: &[u8], x: &QRow) -> f32 {
    let mut groups = Groups::new();
    let mut total = 0.0f32;
    for (b, block) in row.chunks_exact(B::BYTES).enumerate() {
        B::unpack(block, &mut groups);
        for g in 0..B::LEN / GROUP {
            let at = b * B::LEN + g * GROUP;
            let weight = |i: usize| groups.q[g * GROUP + i] as i32;
            let activation = |i: usize| 256 * x.high[at + i] as i32 + x.low[at + i] as i32;
            let products: i32 = (0..GROUP).map(|i| weight(i) * activation(i)).sum();
            total += groups.scale[g] * x.d[at / Q_BLOCK] * products as f32;
            if B::HAS_MIN {
                total += groups.min[g] * (x.d[at / Q_BLOCK] * x.sum[at / Q_GROUP] as f32);
            }
        }
    }
    total
}

/// Writes rows side by side.
#[inline(always)]
pub fn interleave(dtype: DType, rows: &[&[u8]], out: &mut [u8]) {
    quant::interleave(dtype, rows, out);
}

/// Compiles operations above for an instruction set: `instantiate!(#[target_feature(enable = "avx2")])` makes modules
/// `instance`, `along` and `attention` of the same names. The plain processor has no attribute. A set with some of its own
/// asks for the others: `instance`, `attention`.
macro_rules! instantiate {
    (instance $(#[$feature:meta])?) => {
        mod instance {
            use crate::backend::cpu::kernels::Pick;
            use crate::backend::cpu::operand::QRowMut;
            use crate::backend::cpu::portable as p;
            use crate::quant::DType;
            $crate::backend::cpu::portable::instantiate!(@each [$(#[$feature])?];
                interleave(dtype: DType, rows: &[&[u8]], out: &mut [u8]);
                quantize(x: &[f32], out: &mut QRowMut);
                rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]);
                layer_norm(x: &[f32], weight: &[f32], bias: Option<&[f32]>, eps: f32, out: &mut [f32]);
                exponentials(x: &mut [f32], scale: f32) -> (f32, f32);
                silu(x: &mut [f32]);
                gelu(x: &mut [f32]);
            );
            $crate::backend::cpu::portable::instantiate!(@fused [$(#[$feature])?];
                mix_picks(values: &[f32], first: u32, picks: &[Pick], out: &mut [f32]);
            );
        }
    };
    (attention $(#[$feature:meta])?) => {
        mod attention {
            use crate::backend::cpu::kernels::AttentionKernels;
            use crate::backend::cpu::portable as p;
            pub const ATTENTION: AttentionKernels = AttentionKernels { scores, mix };
            pub const HALF_ATTENTION: Option<AttentionKernels> = None;
            $crate::backend::cpu::portable::instantiate!(@fused [$(#[$feature])?];
                scores(keys: &[u8], next: &[u8], queries: &[f32], dim: usize, out: &mut [f32], stride: usize);
                mix(values: &[u8], next: &[u8], weights: &[f32], stride: usize, dim: usize, out: &mut [f32]);
            );
        }
    };
    ($(#[$feature:meta])?) => {
        $crate::backend::cpu::portable::instantiate!(instance $(#[$feature])?);
        $crate::backend::cpu::portable::instantiate!(attention $(#[$feature])?);
        mod along {
            use crate::backend::cpu::portable as p;
            use crate::quant::DType;
            $crate::backend::cpu::portable::instantiate!(@fused [$(#[$feature])?];
                add_rows(dtype: DType, rows: &[(&[u8], f32)], next: &[(&[u8], f32)], out: &mut [f32]);
                axpy_f32(a: f32, x: &[f32], out: &mut [f32]);
            );
            $crate::backend::cpu::portable::instantiate!(@each [$(#[$feature])?];
                decode(dtype: DType, bytes: &[u8], out: &mut [f32]);
            );
        }
    };
    (@fused [] ; $($name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(pub unsafe fn $name($($arg: $type),*) $(-> $result)? { p::$name::<false>($($arg),*) })*
    };
    (@fused [#[$feature:meta]] ; $($name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(#[$feature] pub unsafe fn $name($($arg: $type),*) $(-> $result)? { p::$name::<true>($($arg),*) })*
    };
    (@each [] ; $($name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(pub unsafe fn $name($($arg: $type),*) $(-> $result)? { p::$name($($arg),*) })*
    };
    (@each [#[$feature:meta]] ; $($name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)*) => {
        $(#[$feature] pub unsafe fn $name($($arg: $type),*) $(-> $result)? { p::$name($($arg),*) })*
    };
}
pub(super) use instantiate;
