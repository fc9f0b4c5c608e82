//! The activations that a kernel multiplies weights with: float32 rows, and the same rows as 16-bit integers.
//!
//! Eight bits are usual and cost a tenth of a logit on a small model; with sixteen the logits are those of float32 to a
//! thousandth. Where there are few tokens, a value is two signed bytes, which go through the byte instructions one after
//! the other: the weights, which cost more to fetch and unpack, are fetched and unpacked once. Where there are many,
//! weights become 16-bit integers too, once for all of them ([`WeightTile`]).

use std::marker::PhantomData;

use crate::quant::{Block, LANES};

use super::pool::Parts;

/// Values that share one scale.
pub const Q_BLOCK: usize = 64;
/// Values that share one sum: the least that has an offset of its own in any weight format.
pub const Q_GROUP: usize = 16;

/// What kernels will read of a [`Quantized`].
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub enum Form {
    /// Bytes: for few tokens.
    #[default]
    Bytes,
    /// Words: for a matrix-matrix kernel.
    Words,
}

/// Rows of activations as integers: `x = d * word`, `word = 256 * high + low`. Rows are padded with zeros to whole blocks.
#[derive(Default)]
pub struct Quantized {
    n_cols: usize,
    /// Row length in values.
    stride: usize,
    form: Form,
    /// (n_tokens, stride + PAD)
    words: Vec<i16>,
    /// (n_tokens, stride), of the form of bytes.
    high: Vec<i8>,
    /// (n_tokens, stride), of the form of bytes.
    low: Vec<i8>,
    /// (n_tokens, stride / Q_BLOCK)
    d: Vec<f32>,
    /// (n_tokens, stride / Q_GROUP): sums of the words.
    sum: Vec<i32>,
    /// Of the form of words: for weights of which 16 share a scale, and 32.
    groups: [WordGroups; 2],
}

/// What a [`Quantized`] has for each group of values whose weights share a scale.
#[derive(Default)]
struct WordGroups {
    /// (n_tokens, stride / group length + PAD): see [`cross`].
    cross: Vec<i32>,
    /// (n_tokens, stride / group length + PAD): sums of the values.
    sum: Vec<f32>,
}

/// Between rows of words, a cache line or more: as far apart as powers of two they would crowd each other out of the cache,
/// where a kernel reads several at once.
const PAD: usize = 32;

/// The length of groups number `i`.
const fn group_len(i: usize) -> usize {
    Q_GROUP << i
}

impl Quantized {
    /// Makes room for `n_tokens` rows of `n_cols`.
    pub fn resize(&mut self, n_tokens: usize, n_cols: usize, form: Form) {
        self.n_cols = n_cols;
        self.stride = n_cols.next_multiple_of(Q_BLOCK);
        self.form = form;
        let n = n_tokens * self.stride;
        self.words.resize(n + n_tokens * PAD, 0);
        for bytes in [&mut self.high, &mut self.low] {
            bytes.resize(if form == Form::Bytes { n } else { 0 }, 0);
        }
        self.d.resize(n / Q_BLOCK, 0.0);
        self.sum.resize(n / Q_GROUP, 0);
        for (i, groups) in self.groups.iter_mut().enumerate() {
            let n = if form == Form::Words { n / group_len(i) + n_tokens * PAD } else { 0 };
            groups.cross.resize(n, 0);
            groups.sum.resize(n, 0.0);
        }
    }

    pub fn form(&self) -> Form {
        self.form
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

    /// Columns `columns` of a row of the form of words, which begin at a multiple of [`Q_BLOCK`], for weights of which
    /// `share` have a scale.
    pub fn word_row(&self, token: usize, columns: std::ops::Range<usize>, share: usize) -> WordRow<'_> {
        assert!(
            self.form == Form::Words && columns.start.is_multiple_of(Q_BLOCK) && columns.end <= self.n_cols
        );
        let i = (share > Q_GROUP) as usize;
        let (groups, n_groups) = (&self.groups[i], self.stride / group_len(i));
        let from = token * (n_groups + PAD) + columns.start / group_len(i);
        WordRow {
            words: self.words[token * (self.stride + PAD) + columns.start..].as_ptr(),
            d: self.d[(token * self.stride + columns.start) / Q_BLOCK..].as_ptr(),
            cross: groups.cross[from..].as_ptr(),
            sum: groups.sum[from..].as_ptr(),
            _quantized: PhantomData,
        }
    }

    /// The rows for writing, by parts.
    pub fn parts(&mut self) -> QuantizedParts<'_> {
        QuantizedParts {
            stride: self.stride,
            form: self.form,
            words: Parts::new(&mut self.words),
            high: Parts::new(&mut self.high),
            low: Parts::new(&mut self.low),
            d: Parts::new(&mut self.d),
            sum: Parts::new(&mut self.sum),
            groups: self.groups.each_mut().map(|g| (Parts::new(&mut g.cross), Parts::new(&mut g.sum))),
        }
    }
}

/// A [`Quantized`] whose rows are written by several threads.
pub struct QuantizedParts<'a> {
    stride: usize,
    form: Form,
    words: Parts<'a, i16>,
    high: Parts<'a, i8>,
    low: Parts<'a, i8>,
    d: Parts<'a, f32>,
    sum: Parts<'a, i32>,
    groups: [(Parts<'a, i32>, Parts<'a, f32>); 2],
}

impl QuantizedParts<'_> {
    /// # Safety
    /// No row may be alive twice at a time.
    pub unsafe fn row(&self, token: usize) -> QRowMut<'_> {
        let s = self.stride;
        let n_bytes = if self.form == Form::Bytes { s } else { 0 };
        let group = |i: usize| {
            let (n, (cross, sum)) = (s / group_len(i), &self.groups[i]);
            let (at, n) = if self.form == Form::Words { (token * (n + PAD), n) } else { (0, 0) };
            // SAFETY: rows don't overlap, and the caller has each once.
            unsafe { (cross.part(at, n), sum.part(at, n)) }
        };
        // SAFETY: as above.
        unsafe {
            QRowMut {
                words: self.words.part(token * (s + PAD), s),
                high: self.high.part(token * n_bytes, n_bytes),
                low: self.low.part(token * n_bytes, n_bytes),
                d: self.d.part(token * s / Q_BLOCK, s / Q_BLOCK),
                sum: self.sum.part(token * s / Q_GROUP, s / Q_GROUP),
                groups: [group(0), group(1)],
            }
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

/// Columns of one row as a matrix-matrix kernel reads them. Kernels take a dozen at a time, hence pointers.
#[derive(Clone, Copy)]
pub struct WordRow<'a> {
    pub words: *const i16,
    /// Of every [`Q_BLOCK`] values.
    pub d: *const f32,
    /// Of every group whose weights share a scale: see [`cross`].
    pub cross: *const i32,
    /// Of every such group, the sum of the values.
    pub sum: *const f32,
    _quantized: PhantomData<&'a Quantized>,
}

/// One row to be quantised; the slices are padded, and empty where the form has none.
pub struct QRowMut<'a> {
    pub words: &'a mut [i16],
    pub high: &'a mut [i8],
    pub low: &'a mut [i8],
    pub d: &'a mut [f32],
    pub sum: &'a mut [i32],
    /// For groups of 16 and of 32: cross sums, and sums of the values.
    pub groups: [(&'a mut [i32], &'a mut [f32]); 2],
}

/// What a matrix-matrix kernel takes off: minus the products of words two places apart in every four, summed modulo 2^32.
///
/// Such a kernel multiplies sums: `(w0 + x2)(w2 + x0) = w0 x0 + w2 x2 + w0 w2 + x2 x0`, which is half the multiplications
/// once the last two, which belong to one row and one token alone, are known (Winograd, "A New Algorithm for Inner
/// Product", 1968). In whole numbers nothing is lost, also where they wrap on the way.
#[inline(always)]
pub fn cross(words: &[i16; Q_GROUP]) -> i32 {
    // Each word times its partner, or times nothing where it is one: products of neighbours added vectorise.
    const HAS_PARTNER: [i16; Q_GROUP] = [-1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0];
    let mut partners = [0; Q_GROUP];
    for i in 0..Q_GROUP - 2 {
        partners[i] = words[i + 2] & HAS_PARTNER[i];
    }
    let products = words.iter().zip(&partners).map(|(a, b)| *a as i32 * *b as i32);
    products.fold(0i32, i32::wrapping_add).wrapping_neg()
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

    /// Panics where the operand isn't quantised, to bytes and to this width: the kernels' pointer arithmetic relies on it.
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
