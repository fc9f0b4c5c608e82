//! Products with many tokens: tiles of weights, sixteen rows of 16-bit integers, made from rows side by side, times words of
//! activations. As in `panels`, nothing here has an instruction set of its own.

use crate::quant::{CHUNK, Interleaved, LANES};

use super::operand::{Line, Q_BLOCK, WeightTile, WordRow};
use super::panels::{PARTS, Registers, Sums, parts, parts_of_span, quads, scales, store_sums, zero_bits};

/// What registers do besides for products with many tokens: lanes are pairs of words.
///
/// # Safety
/// As of [`Registers`].
pub trait Words: Registers {
    /// Tokens that such a product takes at a time, 1 to 12.
    const TILE_TOKENS: usize;

    /// The first two and the last two of every four bytes, as signed bytes or as unsigned ones as [`Registers::UNSIGNED`]
    /// says.
    unsafe fn widen(bytes: Self::Ints) -> [Self::Ints; 2];
    unsafe fn add_words(a: Self::Ints, b: Self::Ints) -> Self::Ints;
    unsafe fn subtract_words(a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// `sum` and the products of two words in each lane.
    unsafe fn dot_words(sum: Self::Ints, a: Self::Ints, b: Self::Ints) -> Self::Ints;
    unsafe fn subtract(a: Self::Ints, b: Self::Ints) -> Self::Ints;
    unsafe fn store(at: *mut u8, a: Self::Ints);
}

/// [`gemm_tile`] as a function of its own: all its forms inlined into one take the compiler's registers from each other.
///
/// # Safety
/// As of [`gemm_tile`].
pub trait GemmTile: Words {
    unsafe fn gemm_tile<const T: usize, const SHARE: usize, const MIN: bool, const CROSS: bool>(
        weights: &WeightTile,
        n: usize,
        x: &[WordRow; T],
        goes_on: bool,
        out: *mut f32,
        stride: usize,
    );
}

/// Reads the first `n` of sixteen values.
///
/// # Safety
/// There are so many at `from`; the processor has the instruction set.
#[inline(always)]
unsafe fn load_sums<R: Registers>(from: *const f32, n: usize) -> Sums<R> {
    let mut all = [0.0f32; LANES];
    // SAFETY: an array of sixteen; the caller's places.
    unsafe {
        if n < LANES {
            std::ptr::copy_nonoverlapping(from, all.as_mut_ptr(), n);
        }
        let at = if n == LANES { from } else { all.as_ptr() };
        let mut sums = [R::splat_float(0.0); PARTS];
        for part in 0..parts::<R>() {
            sums[part] = R::load_floats(at.add(part * R::WIDTH));
        }
        sums
    }
}

/// See [`super::kernels::Panels::unpack`].
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn unpack<R: Words, F: Interleaved>(panel: *const u8, n_cols: usize, tile: &mut WeightTile) {
    tile.reset::<F>(n_cols);
    let words: *mut Line<[i16; 2]> = tile.words.as_mut_ptr();
    // SAFETY: spans and chunks lie inside the panel, the tile has room for its words and scales; the rest is the caller's
    // promise.
    unsafe {
        let zero = zero_bits::<R, F>().map_or(0, |bits| 1i32 << bits);
        let zero = R::splat(zero << 16 | zero);
        for span in 0..n_cols / F::LEN {
            let (head, chunks) = parts_of_span::<F>(panel, span);
            for c in 0..F::LEN / CHUNK {
                let (chunk, at) = (chunks.add(c * F::CHUNK_BYTES), span * F::LEN + c * CHUNK);
                for part in 0..parts::<R>() {
                    let quads = quads::<R, F>(chunk, part);
                    let mut products = [R::splat(0); 2];
                    for j in 0..8 {
                        let [first, second] = R::widen(quads[j]);
                        let (first, second) =
                            (R::subtract_words(first, zero), R::subtract_words(second, zero));
                        let out = words.add(at / 2 + 2 * j);
                        R::store(out.cast::<[u8; 4]>().add(part * R::WIDTH).cast(), first);
                        R::store(out.add(1).cast::<[u8; 4]>().add(part * R::WIDTH).cast(), second);
                        let products = &mut products[4 * j / F::SHARE];
                        *products = R::dot_words(*products, first, second);
                    }
                    let scales = scales::<R, F>(head, chunk, part);
                    for g in 0..CHUNK / F::SHARE {
                        let (at, lane) = (at / F::SHARE + g, part * R::WIDTH);
                        let cross = R::subtract(R::splat(0), products[g]);
                        R::store(tile.cross.as_mut_ptr().add(at).cast::<i32>().add(lane).cast(), cross);
                        let scale = tile.scales.as_mut_ptr().add(at).cast::<f32>().add(lane);
                        R::store_floats(scale, scales[g].0);
                        if F::HAS_MIN {
                            let min = tile.mins.as_mut_ptr().add(at).cast::<f32>().add(lane);
                            R::store_floats(min, scales[g].1);
                        }
                    }
                }
            }
        }
    }
}

/// See [`super::kernels::Gemm`]. With `CROSS` sums are multiplied (see [`super::operand::cross`]): half the multiplications
/// for twice as many additions, which pays where a processor adds faster than it multiplies.
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn gemm<R: GemmTile, const CROSS: bool>(
    weights: &WeightTile,
    n: usize,
    x: &[WordRow],
    goes_on: bool,
    out: *mut f32,
    stride: usize,
) {
    macro_rules! by_tokens {
        ($x:ident, $out:ident, $($t:literal)*) => {
            match $x.len().min(R::TILE_TOKENS) {
                $($t => {
                    let x = $x.first_chunk().expect("so many");
                    match (weights.share, weights.has_min) {
                        (32, false) => R::gemm_tile::<$t, 32, false, CROSS>(weights, n, x, goes_on, $out, stride),
                        (32, true) => R::gemm_tile::<$t, 32, true, CROSS>(weights, n, x, goes_on, $out, stride),
                        (_, false) => R::gemm_tile::<$t, 16, false, CROSS>(weights, n, x, goes_on, $out, stride),
                        (_, true) => R::gemm_tile::<$t, 16, true, CROSS>(weights, n, x, goes_on, $out, stride),
                    }
                })*
                n => unreachable!("a tile of {n} tokens"),
            }
        };
    }
    for (i, x) in x.chunks(R::TILE_TOKENS).enumerate() {
        // SAFETY: as the caller promises, for these tokens.
        unsafe {
            let out = out.add(i * R::TILE_TOKENS * stride);
            by_tokens!(x, out, 1 2 3 4 5 6 7 8 9 10 11 12);
        }
    }
}

/// # Safety
/// As [`gemm`].
#[inline(always)]
pub unsafe fn gemm_tile<R: Words, const T: usize, const SHARE: usize, const MIN: bool, const CROSS: bool>(
    weights: &WeightTile,
    n: usize,
    x: &[WordRow; T],
    goes_on: bool,
    out: *mut f32,
    stride: usize,
) {
    let x_words: [*const i32; T] = x.map(|row| row.words.cast());
    let (x_cross, x_d, x_sum) = (x.map(|row| row.cross), x.map(|row| row.d), x.map(|row| row.sum));
    // SAFETY: the output has places for n rows of every token. The tile and the rows have n_cols / 2 pairs of words, an even
    // number, and for each group a cross sum; the tile has a scale and an offset for each, the rows a sum, and a scale for
    // every 64. The rest is the caller's promise.
    unsafe {
        let mut sums = [[R::splat_float(0.0); PARTS]; T];
        if goes_on {
            for t in 0..T {
                sums[t] = load_sums::<R>(out.add(t * stride), n);
            }
        }
        for g in 0..weights.n_cols / SHARE {
            let mut dots = [[R::splat(0); PARTS]; T];
            if CROSS {
                let cross = weights.cross.as_ptr().add(g).cast::<i32>();
                for part in 0..parts::<R>() {
                    let of_rows = R::load(cross.add(part * R::WIDTH).cast());
                    for t in 0..T {
                        dots[t][part] = R::add(of_rows, R::splat(*x_cross[t].add(g)));
                    }
                }
            }
            for pair in (g * SHARE / 2..(g + 1) * SHARE / 2).step_by(2) {
                let at = weights.words.as_ptr().add(pair).cast::<u8>();
                let mut w = [[R::splat(0); PARTS]; 2];
                for part in 0..parts::<R>() {
                    w[0][part] = R::load(at.add(4 * part * R::WIDTH));
                    w[1][part] = R::load(at.add(4 * (LANES + part * R::WIDTH)));
                }
                for t in 0..T {
                    let x0 = R::splat(x_words[t].add(pair).read_unaligned());
                    let x1 = R::splat(x_words[t].add(pair + 1).read_unaligned());
                    for part in 0..parts::<R>() {
                        let (w0, w1) = (w[0][part], w[1][part]);
                        if CROSS {
                            let (a, b) = (R::add_words(w0, x1), R::add_words(w1, x0));
                            dots[t][part] = R::dot_words(dots[t][part], a, b);
                        } else {
                            dots[t][part] = R::dot_words(dots[t][part], w0, x0);
                            dots[t][part] = R::dot_words(dots[t][part], w1, x1);
                        }
                    }
                }
            }
            for part in 0..parts::<R>() {
                let scale = weights.scales.as_ptr().add(g).cast::<f32>().add(part * R::WIDTH);
                let scale = R::load_floats(scale);
                for t in 0..T {
                    let scale = R::multiply(scale, R::splat_float(*x_d[t].add(g * SHARE / Q_BLOCK)));
                    sums[t][part] = R::multiply_add(R::to_floats(dots[t][part]), scale, sums[t][part]);
                }
                if MIN {
                    let min = weights.mins.as_ptr().add(g).cast::<f32>().add(part * R::WIDTH);
                    let min = R::load_floats(min);
                    for t in 0..T {
                        sums[t][part] = R::multiply_add(min, R::splat_float(*x_sum[t].add(g)), sums[t][part]);
                    }
                }
            }
        }
        for (t, sums) in sums.iter().enumerate() {
            store_sums::<R>(sums, n, out.add(t * stride));
        }
    }
}

/// Compiles panels and the functions above for an instruction set, as `instantiate_panels!` does: `panels_for` and `gemm`.
macro_rules! instantiate_tiles {
    ($registers:ty, #[$feature:meta]) => {
        $crate::backend::cpu::panels::instantiate_panels!(@dot $registers, #[$feature]);

        /// # Safety
        /// As [`Panels::unpack`].
        #[$feature]
        unsafe fn unpack_panel<F: Interleaved>(panel: *const u8, n_cols: usize, tile: &mut WeightTile) {
            // SAFETY: as the caller promises.
            unsafe { tiles::unpack::<$registers, F>(panel, n_cols, tile) }
        }

        impl GemmTile for $registers {
            #[inline(never)]
            #[$feature]
            unsafe fn gemm_tile<const T: usize, const SHARE: usize, const MIN: bool, const CROSS: bool>(
                weights: &WeightTile,
                n: usize,
                x: &[WordRow; T],
                goes_on: bool,
                out: *mut f32,
                stride: usize,
            ) {
                // SAFETY: as the caller promises.
                unsafe { tiles::gemm_tile::<$registers, T, SHARE, MIN, CROSS>(weights, n, x, goes_on, out, stride) }
            }
        }

        /// # Safety
        /// As [`super::super::kernels::Gemm`].
        #[$feature]
        unsafe fn gemm<const CROSS: bool>(
            weights: &WeightTile,
            n: usize,
            x: &[WordRow],
            goes_on: bool,
            out: *mut f32,
            stride: usize,
        ) {
            // SAFETY: as the caller promises.
            unsafe { tiles::gemm::<$registers, CROSS>(weights, n, x, goes_on, out, stride) }
        }

        const fn panels_for(dtype: DType) -> Option<Panels> {
            with_block!(dtype, B => Some(Panels { dot: dot_panel::<B>, unpack: Some(unpack_panel::<B>) }), _ => None)
        }
    };
}
pub(super) use instantiate_tiles;
