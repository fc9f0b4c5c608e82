//! Products with many tokens: rows of weights are unpacked to 16-bit integers once for all of them.

use std::cell::RefCell;
use std::ops::Range;

use crate::backend::Neurons;
use crate::quant::{LANES, Layout, panel_bytes};

use super::kernels::Gemm;
use super::matmul::Matmul;
use super::operand::{Quantized, TOKEN_TILE, WeightTile, WordRow};
use super::pool::Parts;

/// Weights of a row, and tiles of rows, that are unpacked and multiplied with all tokens before the next: half a megabyte
/// of them, which stays in the second-level cache.
const DEPTH: usize = 2048;
const TILES_AT_A_TIME: usize = 8;
/// Tokens that go with all of these before the next, where tiles choose among them: less than half a megabyte of their words.
/// Where all are wanted it is one tile of tokens, which measures a little faster.
const TOKENS_TO_CHOOSE_FROM: usize = 96;

/// What each thread keeps from one product to the next.
#[derive(Default)]
struct Scratch {
    /// Unpacked weights.
    weights: Vec<WeightTile>,
    /// A panel on the way to them.
    panel: Vec<u8>,
    /// Results of columns that aren't in order.
    results: Vec<f32>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Sixteen columns of a product, or as many as are left, and the tokens that want them.
struct Tile<'a> {
    columns: &'a [usize],
    tokens: &'a [usize],
    /// Results for the first of these tokens; those for the next lie `stride` behind.
    out: *mut f32,
    stride: usize,
}

impl Tile<'_> {
    /// Multiplies with those of its tokens that are among `tokens`.
    ///
    /// # Safety
    /// Nobody else has the results meanwhile; `rows`, a row for every token, have the columns of the weights; the processor
    /// has the kernel's instruction set.
    unsafe fn multiply(
        &self,
        gemm: Gemm,
        weights: &WeightTile,
        rows: &[WordRow],
        tokens: Range<usize>,
        goes_on: bool,
    ) {
        let place = |t| self.tokens.partition_point(|token| *token < t);
        for places in nearly_equal(place(tokens.start)..place(tokens.end), TOKEN_TILE) {
            let tokens = &self.tokens[places.clone()];
            let (first, last) = (tokens[0], tokens[tokens.len() - 1]);
            let mut gathered;
            let x = if last - first < tokens.len() {
                &rows[first..=last]
            } else {
                gathered = [rows[first]; TOKEN_TILE];
                gathered.iter_mut().zip(tokens).for_each(|(x, t)| *x = rows[*t]);
                &gathered[..tokens.len()]
            };
            // SAFETY: there are places for all of the tile's tokens; the rest is the caller's promise.
            unsafe {
                let out = self.out.add(places.start * self.stride);
                gemm(weights, self.columns.len(), x, goes_on, out, self.stride);
            }
        }
    }
}

impl Matmul<'_> {
    /// Computes columns `columns` from words. What a token doesn't want is zero, or the product where others of its tile want
    /// it, before the bias.
    ///
    /// # Safety
    /// As [`Matmul::run`].
    pub(super) unsafe fn many(&self, x: &Quantized, columns: Range<usize>) {
        SCRATCH.with_borrow_mut(|scratch| {
            match self.neurons.and_then(|neurons| Wanted::new(neurons, self.width, columns.clone())) {
                // SAFETY: as the caller promises.
                None => unsafe { self.all(x, columns.clone(), scratch) },
                // SAFETY: as above.
                Some(wanted) => unsafe { self.wanted(x, &wanted, scratch) },
            }
        });
        // SAFETY: as the caller promises.
        unsafe { self.add_bias(0..self.x.n_tokens, columns.start, columns.len()) };
    }

    /// For every token.
    ///
    /// # Safety
    /// As [`Matmul::run`].
    unsafe fn all(&self, x: &Quantized, columns: Range<usize>, scratch: &mut Scratch) {
        let n_tokens = self.x.n_tokens;
        let (columns, tokens): (Vec<usize>, Vec<usize>) = (columns.collect(), (0..n_tokens).collect());
        let tiles = columns.chunks(LANES).map(|columns| {
            let out = self.out.pointer(columns[0], (n_tokens - 1) * self.width + columns.len());
            Tile { columns, tokens: &tokens, out, stride: self.width }
        });
        // SAFETY: the tiles' results are these columns, each in one tile, and nobody else has them.
        unsafe {
            self.tiles(x, &tiles.collect::<Vec<_>>(), TOKEN_TILE, &mut scratch.weights, &mut scratch.panel);
        }
    }

    /// For the tokens that want them: columns that are wanted as often share a tile, which takes those tokens that want
    /// one of its columns.
    ///
    /// # Safety
    /// As [`Matmul::run`].
    unsafe fn wanted(&self, x: &Quantized, wanted: &Wanted, scratch: &mut Scratch) {
        let order = wanted.order();
        let tokens: Vec<Vec<usize>> =
            order.chunks(LANES).map(|columns| wanted.tokens(columns).collect()).collect();
        scratch.results.resize(LANES * tokens.iter().map(Vec::len).sum::<usize>(), 0.0);
        let (results, mut start) = (Parts::new(&mut scratch.results), 0);
        let tiles = order.chunks(LANES).zip(&tokens).map(|(columns, tokens)| {
            let n = LANES * tokens.len();
            start += n;
            Tile { columns, tokens, out: results.pointer(start - n, n), stride: LANES }
        });
        let tiles: Vec<_> = tiles.collect();
        // SAFETY: the tiles' results are parts of the scratch.
        unsafe { self.tiles(x, &tiles, TOKENS_TO_CHOOSE_FROM, &mut scratch.weights, &mut scratch.panel) };
        let columns = &wanted.columns;
        let mut done = vec![0; tiles.len()];
        for t in 0..self.x.n_tokens {
            // SAFETY: as the caller promises.
            let out = unsafe { self.out.part(t * self.width + columns.start, columns.len()) };
            for (tile, done) in tiles.iter().zip(&mut done) {
                let mut results = [0.0f32; LANES];
                if tile.tokens.get(*done) == Some(&t) {
                    // SAFETY: the tile has sixteen results for each of its tokens.
                    unsafe { results.as_mut_ptr().copy_from(tile.out.add(*done * LANES), LANES) };
                    *done += 1;
                }
                for (column, result) in tile.columns.iter().zip(results) {
                    out[column - columns.start] = result;
                }
            }
        }
    }

    /// # Safety
    /// Nobody else has the tiles' results, and no two tiles have the same.
    unsafe fn tiles(
        &self,
        x: &Quantized,
        tiles: &[Tile],
        tokens_at_a_time: usize,
        weights: &mut Vec<WeightTile>,
        panel: &mut Vec<u8>,
    ) {
        let gemm = self.kernels.gemm().expect("activations are words where there are kernels");
        let (n_cols, n_tokens) = (self.x.n_cols, self.x.n_tokens);
        weights.resize_with(TILES_AT_A_TIME, WeightTile::default);
        for tiles in tiles.chunks(TILES_AT_A_TIME) {
            for depth in (0..n_cols).step_by(DEPTH) {
                let depths = depth..(depth + DEPTH).min(n_cols);
                for (weights, tile) in weights.iter_mut().zip(tiles) {
                    self.unpack(tile.columns, depths.clone(), weights, panel);
                }
                let row = |t| x.word_row(self.x.first + t, depths.clone(), weights[0].share);
                let rows: Vec<_> = (0..n_tokens).map(row).collect();
                for start in (0..n_tokens).step_by(tokens_at_a_time) {
                    for (weights, tile) in weights.iter().zip(tiles) {
                        let tokens = start..start + tokens_at_a_time;
                        // SAFETY: as the caller promises; weights and rows have columns `depths`, and the same share of
                        // scales; the table is this processor's.
                        unsafe { tile.multiply(gemm, weights, &rows, tokens, depth > 0) };
                    }
                }
            }
        }
    }

    /// Fills `tile` with columns `depths` of the rows whose results are `columns`.
    fn unpack(&self, columns: &[usize], depths: Range<usize>, tile: &mut WeightTile, scratch: &mut Vec<u8>) {
        let (weight, dtype) = (&self.linear.weight, self.linear.weight.dtype());
        let panels = self.kernels.panels[dtype as usize];
        let unpack = panels.and_then(|panels| panels.unpack).expect("a panel's form of every quantised type");
        match weight.layout() {
            Layout::Panels => {
                let before = panel_bytes(dtype, depths.start).expect("a type that interleaves");
                let panel = self.panel(columns[0] / LANES)[before..].as_ptr();
                // SAFETY: the panel is whole, and so its part; the table is this processor's.
                unsafe { unpack(panel, depths.len(), tile) };
            }
            Layout::Rows => {
                let part = dtype.row_bytes(depths.start)..dtype.row_bytes(depths.end);
                let mut rows: [&[u8]; LANES] = [&[]; LANES];
                for (row, column) in rows.iter_mut().zip(columns) {
                    *row = &weight.row(self.row_of(*column))[part.clone()];
                }
                // Side by side first: from there, unpacking needs no steps across a register.
                scratch.clear();
                scratch.resize(panel_bytes(dtype, depths.len()).expect("a type with panels"), 0);
                // SAFETY: a whole panel of zeros; the table is this processor's.
                unsafe {
                    (self.kernels.interleave)(dtype, &rows[..columns.len()], scratch);
                    unpack(scratch.as_ptr(), depths.len(), tile);
                }
            }
        }
    }
}

/// Columns of a product that some tokens don't want.
struct Wanted<'a> {
    columns: Range<usize>,
    /// By how many tokens each column is wanted.
    counts: Vec<u32>,
    /// (n_tokens, width)
    on: &'a [bool],
    width: usize,
}

impl<'a> Wanted<'a> {
    /// None where so much is wanted that choosing isn't worth while.
    fn new(neurons: &'a Neurons, width: usize, columns: Range<usize>) -> Option<Self> {
        let mut counts = vec![0u32; columns.len()];
        for on in neurons.on.chunks_exact(width) {
            counts.iter_mut().zip(&on[columns.clone()]).for_each(|(count, on)| *count += *on as u32);
        }
        let n_pairs = columns.len() * (neurons.on.len() / width);
        let n_wanted: usize = counts.iter().map(|count| *count as usize).sum();
        (4 * n_wanted < 3 * n_pairs).then_some(Self { columns, counts, on: &neurons.on, width })
    }

    /// The columns, by how often they are wanted.
    fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = self.columns.clone().collect();
        order.sort_by_key(|column| self.counts[column - self.columns.start]);
        order
    }

    /// The tokens that want one of `columns`.
    fn tokens(&self, columns: &[usize]) -> impl Iterator<Item = usize> {
        let rows = self.on.chunks_exact(self.width).enumerate();
        rows.filter(|(_, on)| columns.iter().any(|column| on[*column])).map(|(t, _)| t)
    }
}

/// Cuts a range into as few parts as `most` allows, of nearly equal size.
fn nearly_equal(range: Range<usize>, most: usize) -> impl Iterator<Item = Range<usize>> {
    let (n, n_parts) = (range.len(), range.len().div_ceil(most));
    (0..n_parts).map(move |i| range.start + i * n / n_parts..range.start + (i + 1) * n / n_parts)
}
