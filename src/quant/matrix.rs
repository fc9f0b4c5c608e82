//! A matrix of weights: rows of one type, in a mapped file or in memory of its own.

use std::ops::Range;
use std::sync::Arc;

use memmap2::Mmap;

use super::{DType, decode};

/// What holds the bytes of one file or one converted matrix.
pub enum Source {
    Mapped(Mmap),
    Memory(Vec<u8>),
}

impl Source {
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Source::Mapped(map) => map,
            Source::Memory(bytes) => bytes,
        }
    }
}

/// A range of a shared source.
#[derive(Clone)]
pub struct Bytes {
    source: Arc<Source>,
    range: Range<usize>,
}

impl Bytes {
    /// Panics where `range` isn't inside `source`: the caller has checked a file's claims before.
    pub fn new(source: Arc<Source>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= source.as_slice().len());
        Self { source, range }
    }

    pub fn owned(bytes: Vec<u8>) -> Self {
        let range = 0..bytes.len();
        Self { source: Arc::new(Source::Memory(bytes)), range }
    }

    pub fn as_slice(&self) -> &[u8] {
        &self.source.as_slice()[self.range.clone()]
    }

    fn slice(&self, range: Range<usize>) -> Self {
        Self::new(self.source.clone(), self.range.start + range.start..self.range.start + range.end)
    }
}

/// `n_rows` rows of `n_cols` weights, each row a whole number of blocks.
#[derive(Clone)]
pub struct Matrix {
    dtype: DType,
    n_rows: usize,
    n_cols: usize,
    bytes: Bytes,
}

impl Matrix {
    /// Panics where the bytes aren't exactly the rows': the caller has checked a file's claims before.
    pub fn new(dtype: DType, n_rows: usize, n_cols: usize, bytes: Bytes) -> Self {
        assert_eq!(bytes.as_slice().len(), n_rows * dtype.row_bytes(n_cols));
        assert!(n_cols.is_multiple_of(dtype.block_len()));
        Self { dtype, n_rows, n_cols, bytes }
    }

    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub fn n_rows(&self) -> usize {
        self.n_rows
    }

    pub fn n_cols(&self) -> usize {
        self.n_cols
    }

    pub fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.n_cols)
    }

    pub fn bytes(&self) -> &[u8] {
        self.bytes.as_slice()
    }

    pub fn row(&self, i: usize) -> &[u8] {
        let n = self.row_bytes();
        &self.bytes()[i * n..][..n]
    }

    /// Decodes row `i` into `out`, `n_cols` values.
    pub fn decode_row(&self, i: usize, out: &mut [f32]) {
        decode(self.dtype, self.row(i), out);
    }

    /// The rows `range` as a matrix over the same bytes.
    pub fn rows(&self, range: Range<usize>) -> Matrix {
        let n = self.row_bytes();
        let bytes = self.bytes.slice(range.start * n..range.end * n);
        Matrix { dtype: self.dtype, n_rows: range.len(), n_cols: self.n_cols, bytes }
    }
}
