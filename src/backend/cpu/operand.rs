//! The activations that a kernel multiplies weights with: float32 rows, and the same rows as 16-bit integers.
//!
//! Eight bits are usual and cost a tenth of a logit on a small model; with sixteen the logits are those of float32 to a
//! thousandth. Where there are few tokens, a value is two signed bytes, which go through the byte instructions one after
//! the other: the weights, which cost more to fetch and unpack, are fetched and unpacked once. Where there are many,
//! weights become 16-bit integers too, once for all of them ([`Packed`]).

use crate::quant::{Block, LANES};

use super::pool::Parts;

/// Values that share one scale.
pub const Q_BLOCK: usize = 64;
/// Values that share one sum: the least that has an offset of its own in any weight format.
pub const Q_GROUP: usize = 16;

/// Rows of activations as integers: `x = d * word`, `word = 256 * high + low`. Rows are padded with zeros to whole blocks.
#[derive(Default)]
pub struct Quantized {
    n_cols: usize,
    /// Row length in `words`, `high` and `low`.
    stride: usize,
    /// (n_tokens, stride)
    words: Vec<i16>,
    /// (n_tokens, stride), where rows have been split.
    high: Vec<i8>,
    /// (n_tokens, stride), where rows have been split.
    low: Vec<i8>,
    /// (n_tokens, stride / Q_BLOCK)
    d: Vec<f32>,
    /// (n_tokens, stride / Q_GROUP): sums of the words.
    sum: Vec<i32>,
}

impl Quantized {
    /// Makes room for `n_tokens` rows of `n_cols`, and for their bytes where they will be split.
    pub fn resize(&mut self, n_tokens: usize, n_cols: usize, split: bool) {
        self.n_cols = n_cols;
        self.stride = n_cols.next_multiple_of(Q_BLOCK);
        let n = n_tokens * self.stride;
        self.words.resize(n, 0);
        for bytes in [&mut self.high, &mut self.low] {
            bytes.resize(if split { n } else { 0 }, 0);
        }
        self.d.resize(n / Q_BLOCK, 0.0);
        self.sum.resize(n / Q_GROUP, 0);
    }

    pub fn row(&self, token: usize) -> QRow<'_> {
        let s = self.stride;
        QRow {
            high: &self.high[token * s..][..s],
            low: &self.low[token * s..][..s],
            d: &self.d[token * s / Q_BLOCK..][..s / Q_BLOCK],
            sum: &self.sum[token * s / Q_GROUP..][..s / Q_GROUP],
        }
    }

    /// The rows for writing, by parts.
    pub fn parts(&mut self) -> QuantizedParts<'_> {
        QuantizedParts {
            stride: self.stride,
            words: Parts::new(&mut self.words),
            high: Parts::new(&mut self.high),
            low: Parts::new(&mut self.low),
            d: Parts::new(&mut self.d),
            sum: Parts::new(&mut self.sum),
        }
    }
}

/// A [`Quantized`] whose rows are written by several threads.
pub struct QuantizedParts<'a> {
    stride: usize,
    words: Parts<'a, i16>,
    high: Parts<'a, i8>,
    low: Parts<'a, i8>,
    d: Parts<'a, f32>,
    sum: Parts<'a, i32>,
}

impl QuantizedParts<'_> {
    /// # Safety
    /// No row may be alive twice at a time.
    pub unsafe fn row(&self, token: usize) -> QRowMut<'_> {
        let s = self.stride;
        // SAFETY: rows don't overlap, and the caller has each once.
        unsafe {
            QRowMut {
                words: self.words.part(token * s, s),
                d: self.d.part(token * s / Q_BLOCK, s / Q_BLOCK),
                sum: self.sum.part(token * s / Q_GROUP, s / Q_GROUP),
            }
        }
    }

    /// Splits a row's words into bytes.
    ///
    /// # Safety
    /// No row may be alive twice at a time.
    pub unsafe fn split(&self, token: usize) {
        let s = self.stride;
        // SAFETY: rows don't overlap, and the caller has each once.
        let (words, high, low) = unsafe {
            (self.words.part(token * s, s), self.high.part(token * s, s), self.low.part(token * s, s))
        };
        for ((w, h), l) in words.iter().zip(high).zip(low) {
            *h = ((*w + 128) >> 8) as i8;
            *l = *w as i8;
        }
    }
}

/// One quantised row; the slices are padded.
#[derive(Clone, Copy)]
pub struct QRow<'a> {
    pub high: &'a [i8],
    pub low: &'a [i8],
    pub d: &'a [f32],
    pub sum: &'a [i32],
}

/// One row to be quantised; the slices are padded.
pub struct QRowMut<'a> {
    pub words: &'a mut [i16],
    pub d: &'a mut [f32],
    pub sum: &'a mut [i32],
}

/// What a matrix-matrix kernel takes off: minus the products of words two places apart in every four, summed modulo 2^32.
///
/// Such a kernel multiplies sums: `(w0 + x2)(w2 + x0) = w0 x0 + w2 x2 + w0 w2 + x2 x0`, which is half the multiplications
/// once the last two, which belong to one row and one token alone, are known (Winograd, "A New Algorithm for Inner
/// Product", 1968). In whole numbers nothing is lost, also where they wrap on the way.
#[inline(always)]
pub fn cross(words: &[i16]) -> i32 {
    let product = |a: i16, b: i16| a as i32 * b as i32;
    words
        .as_chunks::<4>()
        .0
        .iter()
        .fold(0, |sum: i32, w| sum.wrapping_sub(product(w[0], w[2])).wrapping_sub(product(w[1], w[3])))
}

/// `n_tokens` rows of `n_cols` activations, from row `first` on. Kernels for quantised weights read `quantized`,
/// those for float weights read `values`.
#[derive(Clone, Copy)]
pub struct Operand<'a> {
    pub n_cols: usize,
    pub first: usize,
    pub n_tokens: usize,
    /// (all tokens, n_cols)
    pub values: &'a [f32],
    pub quantized: Option<&'a Quantized>,
}

impl<'a> Operand<'a> {
    pub fn float_row(&self, token: usize) -> &'a [f32] {
        &self.values[(self.first + token) * self.n_cols..][..self.n_cols]
    }

    /// Panics where the operand isn't quantised and split, or not to this width: the kernels' pointer arithmetic relies on it.
    pub fn q_row(&self, token: usize) -> QRow<'a> {
        let quantized = self.quantized.expect("a quantised operand for quantised weights");
        assert_eq!(quantized.n_cols, self.n_cols);
        quantized.row(self.first + token)
    }

    /// The tokens from `start` on, `n` of them.
    pub fn tokens(&self, start: usize, n: usize) -> Self {
        assert!(start + n <= self.n_tokens);
        Self { first: self.first + start, n_tokens: n, ..*self }
    }
}

/// Tokens that a matrix-matrix kernel takes at most at a time.
pub const TOKEN_TILE: usize = 12;

/// Quantised rows as a matrix-matrix kernel reads them: tokens in tiles of nearly equal size, in a tile the same two
/// values of each token after one another.
#[derive(Default)]
pub struct Packed {
    n_cols: usize,
    n_tokens: usize,
    /// By tile (n_cols / 2, tokens of the tile): two 16-bit values.
    words: Vec<[i16; 2]>,
    /// By tile (stride / Q_BLOCK, tokens of the tile).
    d: Vec<f32>,
    /// For weights of which 16 share a scale, and 32.
    groups: [PackedGroups; 2],
}

/// What a [`Packed`] has for each group of values whose weights share a scale.
#[derive(Default)]
struct PackedGroups {
    /// By tile (stride / group length, tokens of the tile): see [`cross`].
    cross: Vec<i32>,
    /// By tile (stride / group length, tokens of the tile): sums of the values.
    sum: Vec<f32>,
}

/// The length of groups number `i`.
const fn group_len(i: usize) -> usize {
    Q_GROUP << i
}

/// One tile of a [`Packed`].
#[derive(Clone, Copy)]
pub struct PackedTile<'a> {
    pub n_cols: usize,
    pub first: usize,
    pub n_tokens: usize,
    pub words: &'a [[i16; 2]],
    pub d: &'a [f32],
    groups: [(&'a [i32], &'a [f32]); 2],
}

impl<'a> PackedTile<'a> {
    /// The tile's columns `columns`, which begin at a multiple of [`Q_BLOCK`].
    pub fn columns(&self, columns: std::ops::Range<usize>) -> PackedTile<'a> {
        assert!(columns.start.is_multiple_of(Q_BLOCK) && columns.end <= self.n_cols);
        let n = self.n_tokens;
        PackedTile {
            n_cols: columns.len(),
            words: &self.words[columns.start / 2 * n..columns.end / 2 * n],
            d: &self.d[columns.start / Q_BLOCK * n..],
            groups: std::array::from_fn(|i| {
                let (from, (cross, sum)) = (columns.start / group_len(i) * n, self.groups[i]);
                (&cross[from..], &sum[from..])
            }),
            ..*self
        }
    }

    /// Cross sums and sums of values, for weights of which `share` have a scale.
    pub fn groups(&self, share: usize) -> (&'a [i32], &'a [f32]) {
        self.groups[(share > Q_GROUP) as usize]
    }
}

impl Packed {
    pub fn resize(&mut self, n_tokens: usize, n_cols: usize) {
        (self.n_cols, self.n_tokens) = (n_cols, n_tokens);
        let stride = n_cols.next_multiple_of(Q_BLOCK);
        self.words.resize(n_tokens * n_cols / 2, [0; 2]);
        self.d.resize(n_tokens * stride / Q_BLOCK, 0.0);
        for (i, groups) in self.groups.iter_mut().enumerate() {
            groups.cross.resize(n_tokens * stride / group_len(i), 0);
            groups.sum.resize(n_tokens * stride / group_len(i), 0.0);
        }
    }

    pub fn n_tiles(&self) -> usize {
        self.n_tokens.div_ceil(TOKEN_TILE)
    }

    /// The tokens of tile `i`.
    fn tokens(&self, i: usize) -> std::ops::Range<usize> {
        let n = self.n_tiles();
        i * self.n_tokens / n..(i + 1) * self.n_tokens / n
    }

    pub fn tile(&self, i: usize) -> PackedTile<'_> {
        let tokens = self.tokens(i);
        let stride = self.n_cols.next_multiple_of(Q_BLOCK);
        let part = |per_token: usize| tokens.start * per_token..tokens.end * per_token;
        PackedTile {
            n_cols: self.n_cols,
            first: tokens.start,
            n_tokens: tokens.len(),
            words: &self.words[part(self.n_cols / 2)],
            d: &self.d[part(stride / Q_BLOCK)],
            groups: std::array::from_fn(|i| {
                let (part, groups) = (part(stride / group_len(i)), &self.groups[i]);
                (&groups.cross[part.clone()], &groups.sum[part])
            }),
        }
    }

    /// Fills every tile from `from`.
    ///
    /// # Safety
    /// `run` calls the function with every number below its first argument, each once.
    pub unsafe fn fill(&mut self, from: &Quantized, run: impl FnOnce(usize, &(dyn Fn(usize) + Sync))) {
        let (n_cols, stride) = (self.n_cols, self.n_cols.next_multiple_of(Q_BLOCK));
        let ranges: Vec<_> = (0..self.n_tiles()).map(|i| self.tokens(i)).collect();
        let (words, d) = (Parts::new(&mut self.words), Parts::new(&mut self.d));
        let groups = self.groups.each_mut().map(|g| (Parts::new(&mut g.cross), Parts::new(&mut g.sum)));
        run(ranges.len(), &|i| {
            let (start, n) = (ranges[i].start, ranges[i].len());
            // SAFETY: tiles don't overlap, and each is filled once, as the caller promises.
            let (words, d) = unsafe {
                (
                    words.part(start * n_cols / 2, n * n_cols / 2),
                    d.part(start * stride / Q_BLOCK, n * stride / Q_BLOCK),
                )
            };
            for t in 0..n {
                let row = from.words[(start + t) * stride..].as_chunks::<2>().0;
                words[t..].iter_mut().step_by(n).zip(row).for_each(|(out, pair)| *out = *pair);
                let row = &from.d[(start + t) * stride / Q_BLOCK..];
                d[t..].iter_mut().step_by(n).zip(row).for_each(|(out, d)| *out = *d);
            }
            for (i, (crosses, sums)) in groups.iter().enumerate() {
                let (len, n_groups) = (group_len(i), stride / group_len(i));
                // SAFETY: as above.
                let (crosses, sums) = unsafe {
                    (crosses.part(start * n_groups, n * n_groups), sums.part(start * n_groups, n * n_groups))
                };
                for (g, t) in (0..n_groups).flat_map(|g| (0..n).map(move |t| (g, t))) {
                    let at = (start + t) * stride + g * len;
                    crosses[g * n + t] = cross(&from.words[at..at + len]);
                    let sum: i32 = from.sum[at / Q_GROUP..(at + len) / Q_GROUP].iter().sum();
                    sums[g * n + t] = from.d[at / Q_BLOCK] * sum as f32;
                }
            }
        });
    }
}

/// Sixteen values, a row of weights each, where a register's load never crosses a cache line.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
pub struct Line<T>(pub [T; LANES]);

/// Sixteen rows of weights as a matrix-matrix kernel reads them: signed 16-bit integers, in pairs by row.
#[derive(Default)]
pub struct WeightTile {
    pub n_cols: usize,
    /// Weights that share a scale: 16 or 32.
    pub share: usize,
    pub has_min: bool,
    /// (n_cols / 2): two weights of each row.
    pub words: Vec<Line<[i16; 2]>>,
    /// (n_cols / share)
    pub scales: Vec<Line<f32>>,
    /// (n_cols / share), where there are offsets.
    pub mins: Vec<Line<f32>>,
    /// (n_cols / share): see [`cross`].
    pub cross: Vec<Line<i32>>,
}

impl WeightTile {
    /// Makes room for rows of `n_cols` of blocks `B`.
    pub fn reset<B: Block>(&mut self, n_cols: usize) {
        (self.n_cols, self.share, self.has_min) = (n_cols, B::SHARE, B::HAS_MIN);
        self.words.resize(n_cols / 2, Line::default());
        self.scales.resize(n_cols / B::SHARE, Line::default());
        self.cross.resize(n_cols / B::SHARE, Line::default());
        self.mins.resize(if B::HAS_MIN { n_cols / B::SHARE } else { 0 }, Line::default());
    }
}
