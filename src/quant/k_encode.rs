//! Q2_K to Q6_K from float32: each group of 16 or 32 weights gets a scale (and an offset) by a search, these get a
//! scale of their own, and weights are rounded once more by what was stored. The inverse of `k_quants.rs`.

use super::encode::{Encode, in_f16, mean_square, weigh};
use super::fit::{self, FINE, Search, nearest, positive, signed_by_descent, with_offset};
use super::{Block, Q2K, Q3K, Q4K, Q5K, Q6K};

/// Scales and offsets of a block's groups, found and stored.
struct Found<const GROUPS: usize> {
    d: [u8; 2],
    dmin: [u8; 2],
    scales: [u8; GROUPS],
    mins: [u8; GROUPS],
    levels: [u8; 256],
}

/// A format of `GROUPS` groups of `N` weights with levels from 0 to `top`, whose scales and offsets go up to `most`.
struct Kind {
    top: f32,
    most: f32,
    /// The search without importances.
    search: Search,
}

/// Searches scale and offset of each group, quantises both and rounds weights by them.
fn find<const GROUPS: usize, const N: usize>(
    kind: &Kind,
    block: &[f32; 256],
    importance: Option<&[f32]>,
    plain_weights: impl Fn(&[f32; N]) -> [f32; N],
    around: f32,
) -> Found<GROUPS> {
    let (mut scales, mut mins, mut sums) = ([0.0; GROUPS], [0.0; GROUPS], [0.0; GROUPS]);
    let mut levels = [0.0; 256];
    for (g, (x, levels)) in
        block.as_chunks::<N>().0.iter().zip(levels.as_chunks_mut::<N>().0.iter_mut()).enumerate()
    {
        let (weights, search) = match importance {
            Some(importance) => (weigh(x, &importance[g * N..], around), FINE),
            None => (plain_weights(x), kind.search),
        };
        sums[g] = weights.iter().sum();
        (scales[g], mins[g]) = with_offset(x, &weights, kind.top, search, levels);
    }
    let (mut scale_levels, mut min_levels) = ([0.0; GROUPS], [0.0; GROUPS]);
    let (d, dmin) = if importance.is_some() {
        (
            positive(&scales, &sums, kind.most, &mut scale_levels),
            positive(&mins, &sums, kind.most, &mut min_levels),
        )
    } else {
        (by_largest(&scales, kind.most, &mut scale_levels), by_largest(&mins, kind.most, &mut min_levels))
    };
    let (d, scale) = in_f16(d);
    let (dmin, min) = in_f16(dmin);
    for (g, (x, levels)) in
        block.as_chunks::<N>().0.iter().zip(levels.as_chunks_mut::<N>().0.iter_mut()).enumerate()
    {
        let (scale, min) = (scale * scale_levels[g], min * min_levels[g]);
        if scale != 0.0 {
            for i in 0..N {
                levels[i] = nearest((x[i] + min) / scale).clamp(0.0, kind.top);
            }
        }
    }
    Found {
        d,
        dmin,
        scales: scale_levels.map(|l| l as u8),
        mins: min_levels.map(|l| l as u8),
        levels: levels.map(|l| l as u8),
    }
}

/// Levels from 0 to `n` by the largest value; returns their scale.
fn by_largest<const N: usize>(x: &[f32; N], n: f32, levels: &mut [f32; N]) -> f32 {
    let most = x.iter().fold(0.0f32, |m, v| m.max(*v));
    let inverse = if most > 0.0 { n / most } else { 0.0 };
    *levels = x.map(|v| nearest(inverse * v).clamp(0.0, n));
    most / n
}

impl Encode for Q2K {
    fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        let search = Search { first: -0.5, step: 0.1, n_steps: 15, absolute: true };
        let kind = Kind { top: 3.0, most: 15.0, search };
        for (i, (x, out)) in blocks::<Q2K>(row, out) {
            let importance = importance.map(|all| &all[i * 256..]);
            let found = find::<16, 16>(&kind, x, importance, |x| x.map(f32::abs), mean_square(x));
            for g in 0..16 {
                out[g] = found.scales[g] | found.mins[g] << 4;
            }
            pack_two_bits(&found.levels, &mut out[16..80]);
            out[80..82].copy_from_slice(&found.d);
            out[82..84].copy_from_slice(&found.dmin);
        }
    }
}

impl Encode for Q3K {
    fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        for (i, (x, out)) in blocks::<Q3K>(row, out) {
            let around = 2.0 * mean_square(x);
            let (mut scales, mut sums) = ([0.0; 16], [0.0; 16]);
            let mut levels = [0.0; 256];
            for (g, (x, levels)) in
                x.as_chunks::<16>().0.iter().zip(levels.as_chunks_mut::<16>().0.iter_mut()).enumerate()
            {
                scales[g] = match importance {
                    Some(all) => {
                        let weights = weigh(x, &all[i * 256 + g * 16..], around);
                        sums[g] = weights.iter().sum();
                        fit::signed(x, &weights, 4.0, levels)
                    }
                    None => signed_by_descent(x, 4.0, levels),
                };
            }
            let mut scale_levels = [32.0; 16];
            let d = match importance {
                Some(_) => fit::signed(&scales, &sums, 32.0, &mut scale_levels),
                None => {
                    let inverse = by_extreme(&scales, 32.0);
                    scale_levels = scales.map(|s| nearest(inverse * s).clamp(-32.0, 31.0) + 32.0);
                    if inverse == 0.0 { 0.0 } else { 1.0 / inverse }
                }
            };
            let (bytes, d) = in_f16(d);
            round_signed(x, &scale_levels.map(|l| d * (l - 32.0)), 4.0, &mut levels);
            let levels = levels.map(|l| l as u8);
            let (hmask, rest) = out.split_at_mut(32);
            hmask.fill(0);
            for (j, level) in levels.iter().enumerate() {
                hmask[j % 32] |= (level >> 2) << (j / 32);
            }
            pack_two_bits(&levels, &mut rest[..64]);
            let scales = &mut rest[64..76];
            scales.fill(0);
            for (g, level) in scale_levels.iter().enumerate() {
                let level = *level as u8;
                scales[g % 8] |= (level & 0x0f) << (4 * (g / 8));
                scales[8 + g % 4] |= (level >> 4) << (2 * (g / 4));
            }
            rest[76..78].copy_from_slice(&bytes);
        }
    }
}

impl Encode for Q4K {
    fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        let search = Search { first: -1.0, step: 0.1, n_steps: 20, absolute: false };
        for (i, (x, out)) in blocks::<Q4K>(row, out) {
            let found = find_in_32(15.0, search, x, importance.map(|all| &all[i * 256..]));
            put_header(&found, out);
            pack_four_bits(&found.levels, &mut out[16..144]);
        }
    }
}

impl Encode for Q5K {
    fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        let search = Search { first: -0.5, step: 0.1, n_steps: 15, absolute: false };
        for (i, (x, out)) in blocks::<Q5K>(row, out) {
            let found = find_in_32(31.0, search, x, importance.map(|all| &all[i * 256..]));
            put_header(&found, out);
            out[16..48].fill(0);
            for (j, level) in found.levels.iter().enumerate() {
                out[16 + j % 32] |= (level >> 4) << (j / 32);
            }
            pack_four_bits(&found.levels, &mut out[48..176]);
        }
    }
}

impl Encode for Q6K {
    fn encode(row: &[f32], importance: Option<&[f32]>, out: &mut [u8]) {
        for (i, (x, out)) in blocks::<Q6K>(row, out) {
            let mut scales = [0.0; 16];
            let mut levels = [0.0; 256];
            for (g, (x, levels)) in
                x.as_chunks::<16>().0.iter().zip(levels.as_chunks_mut::<16>().0.iter_mut()).enumerate()
            {
                let mut weights = x.map(|v| v * v);
                if let Some(all) = importance {
                    weights.copy_from_slice(&all[i * 256 + g * 16..][..16]);
                }
                scales[g] = fit::signed(x, &weights, 32.0, levels);
            }
            let inverse = by_extreme(&scales, 128.0);
            let scale_levels = scales.map(|s| nearest(inverse * s).clamp(-128.0, 127.0));
            let (bytes, d) = in_f16(if inverse == 0.0 { 0.0 } else { 1.0 / inverse });
            round_signed(x, &scale_levels.map(|l| d * l), 32.0, &mut levels);
            let levels = levels.map(|l| l as u8);
            for half in 0..2 {
                let l = &levels[half * 128..][..128];
                for i in 0..32 {
                    out[half * 64 + i] = l[i] & 0x0f | (l[i + 64] & 0x0f) << 4;
                    out[half * 64 + 32 + i] = l[i + 32] & 0x0f | (l[i + 96] & 0x0f) << 4;
                    out[128 + half * 32 + i] =
                        l[i] >> 4 | l[i + 32] >> 4 << 2 | l[i + 64] >> 4 << 4 | l[i + 96] >> 4 << 6;
                }
            }
            for g in 0..16 {
                out[192 + g] = scale_levels[g] as i8 as u8;
            }
            out[208..210].copy_from_slice(&bytes);
        }
    }
}

/// A row's blocks, each with its number and its place in `out`.
fn blocks<'a, B: Block>(
    row: &'a [f32],
    out: &'a mut [u8],
) -> impl Iterator<Item = (usize, (&'a [f32; 256], &'a mut [u8]))> {
    row.as_chunks::<256>().0.iter().zip(out.chunks_exact_mut(B::BYTES)).enumerate()
}

/// Q4_K's and Q5_K's: groups of 32, six bits for scale and offset.
fn find_in_32(top: f32, search: Search, block: &[f32; 256], importance: Option<&[f32]>) -> Found<8> {
    let kind = Kind { top, most: 63.0, search };
    let plain = |x: &[f32; 32]| {
        let around = mean_square(x).sqrt();
        x.map(|v| around + v.abs())
    };
    find::<8, 32>(&kind, block, importance, plain, 2.0 * mean_square(block))
}

/// What makes the value of largest magnitude `-n`; 0 where all are.
fn by_extreme(x: &[f32; 16], n: f32) -> f32 {
    let most = fit::extreme(x);
    if most == 0.0 { 0.0 } else { -n / most }
}

/// Rounds groups of 16 by their scales to levels from `-n` to `n - 1`, plus `n`.
fn round_signed(x: &[f32; 256], scales: &[f32; 16], n: f32, levels: &mut [f32; 256]) {
    for (i, level) in levels.iter_mut().enumerate() {
        let scale = scales[i / 16];
        if scale != 0.0 {
            *level = nearest(x[i] / scale).clamp(-n, n - 1.0) + n;
        }
    }
}

/// The first sixteen bytes of a Q4_K or Q5_K block.
fn put_header(found: &Found<8>, out: &mut [u8]) {
    out[..2].copy_from_slice(&found.d);
    out[2..4].copy_from_slice(&found.dmin);
    let (scales, mins) = (&found.scales, &found.mins);
    for i in 0..4 {
        out[4 + i] = scales[i] | scales[i + 4] >> 4 << 6;
        out[8 + i] = mins[i] | mins[i + 4] >> 4 << 6;
        out[12 + i] = scales[i + 4] & 0x0f | (mins[i + 4] & 0x0f) << 4;
    }
}

/// The low two bits of 256 levels.
fn pack_two_bits(levels: &[u8; 256], qs: &mut [u8]) {
    for (half, qs) in qs.chunks_exact_mut(32).enumerate() {
        let l = &levels[half * 128..][..128];
        for i in 0..32 {
            qs[i] = l[i] & 3 | (l[i + 32] & 3) << 2 | (l[i + 64] & 3) << 4 | (l[i + 96] & 3) << 6;
        }
    }
}

/// The low four bits of 256 levels.
fn pack_four_bits(levels: &[u8; 256], qs: &mut [u8]) {
    for (pair, qs) in qs.chunks_exact_mut(32).enumerate() {
        let l = &levels[pair * 64..][..64];
        for i in 0..32 {
            qs[i] = l[i] & 0x0f | (l[i + 32] & 0x0f) << 4;
        }
    }
}
