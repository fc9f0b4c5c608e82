//! A matrix of weights: rows of one type, in a mapped file or in memory of its own.

use std::ops::Range;
use std::sync::Arc;

use memmap2::{Mmap, MmapMut};

use super::{DType, LANES, decode, panel_bytes};

/// What holds the bytes of one file or one converted matrix.
pub enum Source {
    File(Mmap),
    Pages(Mmap),
    Memory(Vec<u8>),
}

impl Source {
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Source::File(map) | Source::Pages(map) => map,
            Source::Memory(bytes) => bytes,
        }
    }
}

/// Memory for a converted matrix, in large pages where the system gives them: a token reads all of it, and every small
/// page would cost a look-up.
pub struct Pages(MmapMut);

impl Pages {
    /// `n_bytes` zeros, more than none.
    pub fn zeroed(n_bytes: usize) -> std::io::Result<Self> {
        let map = MmapMut::map_anon(n_bytes)?;
        #[cfg(target_os = "linux")]
        // Only a wish: a system without large pages refuses, and nothing is lost.
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self(map))
    }

    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        &mut self.0
    }

    pub fn freeze(self) -> std::io::Result<Bytes> {
        let range = 0..self.0.len();
        Ok(Bytes::new(Arc::new(Source::Pages(self.0.make_read_only()?)), range))
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

    /// Tells the system that a file's bytes won't be wanted for now; reading them again brings them back.
    fn release(&self) {
        #[cfg(target_os = "linux")]
        if let Source::File(map) = &*self.source {
            let dont_need = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the pages of a file's mapping that nobody writes to come back as they were. Failing, the pages stay.
            let _ = unsafe { map.unchecked_advise_range(dont_need, self.range.start, self.range.len()) };
        }
    }

    fn slice(&self, range: Range<usize>) -> Self {
        Self::new(self.source.clone(), self.range.start + range.start..self.range.start + range.end)
    }
}

/// How a matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Row after row, as in a file.
    Rows,
    /// Panel after panel of [`LANES`] rows side by side; the last one is filled up with zeros.
    Panels,
}

/// `n_rows` rows of `n_cols` weights, each row a whole number of blocks.
#[derive(Clone)]
pub struct Matrix {
    dtype: DType,
    layout: Layout,
    n_rows: usize,
    n_cols: usize,
    bytes: Bytes,
}

impl Matrix {
    /// Panics where the bytes aren't exactly the rows': the caller has checked a file's claims before.
    pub fn new(dtype: DType, n_rows: usize, n_cols: usize, bytes: Bytes) -> Self {
        assert_eq!(bytes.as_slice().len(), n_rows * dtype.row_bytes(n_cols));
        assert!(n_cols.is_multiple_of(dtype.block_len()));
        Self { dtype, layout: Layout::Rows, n_rows, n_cols, bytes }
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

    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Row `i`. Panics where rows lie side by side.
    pub fn row(&self, i: usize) -> &[u8] {
        assert_eq!(self.layout, Layout::Rows);
        let n = self.row_bytes();
        &self.bytes()[i * n..][..n]
    }

    /// Decodes row `i` into `out`, `n_cols` values.
    pub fn decode_row(&self, i: usize, out: &mut [f32]) {
        decode(self.dtype, self.row(i), out);
    }

    /// Whether the bytes are a file's.
    pub fn is_mapped(&self) -> bool {
        matches!(&*self.bytes.source, Source::File(_))
    }

    /// Tells the system that these bytes won't be wanted for now, where they are a file's.
    pub fn release(&self) {
        self.bytes.release();
    }

    /// The rows `range` as a matrix over the same bytes. Panics where rows lie side by side.
    pub fn rows(&self, range: Range<usize>) -> Matrix {
        assert_eq!(self.layout, Layout::Rows);
        let n = self.row_bytes();
        let bytes = self.bytes.slice(range.start * n..range.end * n);
        Matrix { dtype: self.dtype, layout: Layout::Rows, n_rows: range.len(), n_cols: self.n_cols, bytes }
    }

    pub fn n_panels(&self) -> usize {
        self.n_rows.div_ceil(LANES)
    }

    /// Bytes of a panel; none where the type's rows don't lie side by side.
    pub fn panel_bytes(&self) -> Option<usize> {
        panel_bytes(self.dtype, self.n_cols)
    }

    /// The rows of panel `i`.
    pub fn panel_rows(&self, i: usize) -> Vec<&[u8]> {
        (i * LANES..self.n_rows.min((i + 1) * LANES)).map(|r| self.row(r)).collect()
    }

    /// The same weights, their panels being `bytes`. Panics where those aren't as long as all panels.
    pub fn with_panels(&self, bytes: Bytes) -> Matrix {
        let n = self.panel_bytes().expect("a type that interleaves") * self.n_panels();
        assert_eq!(bytes.as_slice().len(), n);
        Matrix { layout: Layout::Panels, bytes, ..*self }
    }
}
