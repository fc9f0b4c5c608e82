//! The activations that a kernel multiplies weights with: float32 rows, and the same rows as 16-bit integers.
//!
//! Eight bits are usual and cost a tenth of a logit on a small model; sixteen cost nothing that can be measured. Held
//! as two signed bytes each, they go through the byte instructions twice: the weights, which a kernel spends most of
//! its time fetching and unpacking, are fetched and unpacked once.

use super::pool::Parts;

/// Values that share one scale.
pub const Q_BLOCK: usize = 64;
/// Values that share one sum: the least that has an offset of its own in any weight format.
pub const Q_GROUP: usize = 16;

/// Rows of activations as integers: `x = d * (256 * high + low)`. Rows are padded with zeros to whole blocks.
#[derive(Default)]
pub struct Quantized {
    n_cols: usize,
    /// Row length in `high` and `low`.
    stride: usize,
    /// (n_tokens, stride)
    pub high: Vec<i8>,
    /// (n_tokens, stride)
    pub low: Vec<i8>,
    /// (n_tokens, stride / Q_BLOCK)
    pub d: Vec<f32>,
    /// (n_tokens, stride / Q_GROUP): a quarter of the sum of a group's values. A kernel adds it in each of the four
    /// lanes that hold them, times the weights' offset, and dividing by four loses nothing.
    pub quarter_sum: Vec<f32>,
}

impl Quantized {
    /// Makes room for `n_tokens` rows of `n_cols`.
    pub fn resize(&mut self, n_tokens: usize, n_cols: usize) {
        self.n_cols = n_cols;
        self.stride = n_cols.next_multiple_of(Q_BLOCK);
        let n = n_tokens * self.stride;
        for bytes in [&mut self.high, &mut self.low] {
            bytes.clear();
            bytes.resize(n, 0);
        }
        self.d.resize(n / Q_BLOCK, 0.0);
        self.quarter_sum.resize(n / Q_GROUP, 0.0);
    }

    pub fn row(&self, token: usize) -> QRow<'_> {
        let s = self.stride;
        QRow {
            high: &self.high[token * s..][..s],
            low: &self.low[token * s..][..s],
            d: &self.d[token * s / Q_BLOCK..][..s / Q_BLOCK],
            quarter_sum: &self.quarter_sum[token * s / Q_GROUP..][..s / Q_GROUP],
        }
    }

    /// The rows for writing, by parts.
    pub fn parts(&mut self) -> QuantizedParts<'_> {
        QuantizedParts {
            stride: self.stride,
            high: Parts::new(&mut self.high),
            low: Parts::new(&mut self.low),
            d: Parts::new(&mut self.d),
            quarter_sum: Parts::new(&mut self.quarter_sum),
        }
    }
}

/// A [`Quantized`] whose rows are written by several threads.
pub struct QuantizedParts<'a> {
    stride: usize,
    high: Parts<'a, i8>,
    low: Parts<'a, i8>,
    d: Parts<'a, f32>,
    quarter_sum: Parts<'a, f32>,
}

impl QuantizedParts<'_> {
    /// # Safety
    /// No row may be alive twice at a time.
    pub unsafe fn row(&self, token: usize) -> QRowMut<'_> {
        let s = self.stride;
        // SAFETY: rows don't overlap, and the caller has each once.
        unsafe {
            QRowMut {
                high: self.high.part(token * s, s),
                low: self.low.part(token * s, s),
                d: self.d.part(token * s / Q_BLOCK, s / Q_BLOCK),
                quarter_sum: self.quarter_sum.part(token * s / Q_GROUP, s / Q_GROUP),
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
    pub quarter_sum: &'a [f32],
}

/// As [`QRow`], to be written.
pub struct QRowMut<'a> {
    pub high: &'a mut [i8],
    pub low: &'a mut [i8],
    pub d: &'a mut [f32],
    pub quarter_sum: &'a mut [f32],
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

    /// Panics where the operand isn't quantised, or not to this width: the kernels' pointer arithmetic relies on it.
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
