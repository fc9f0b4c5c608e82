//! Rows of weights times rows of activations: which kernel takes them, by layout and number of tokens. Whatever it is,
//! the bits are the same, of what is wanted.

use std::ops::Range;

use crate::backend::{Linear, Neurons};
use crate::quant::{DType, LANES, Layout};

use super::kernels::{Kernels, Rows};
use super::operand::{Form, Operand, TOKEN_TILE};
use super::pool::Parts;

/// From how many tokens on it pays to unpack weights into 16-bit integers first.
pub const GEMM_TOKENS: usize = 12;
/// Rows that a kernel sees at a time when there are several tokens: their weights stay in the second-level cache.
const ROW_TILE: usize = 32;
/// Rows of the next tile that memory is asked for while a kernel works on one.
const AHEAD: usize = LANES;

/// The products of one linear layer's rows, or of some of them, with all tokens.
pub struct Matmul<'a> {
    pub kernels: &'static Kernels,
    pub linear: &'a Linear,
    /// The rows wanted, and for which tokens; none means all.
    pub neurons: Option<&'a Neurons>,
    pub x: Operand<'a>,
    /// (n_tokens, width)
    pub out: &'a Parts<'a, f32>,
    pub width: usize,
}

impl Matmul<'_> {
    /// Computes columns `columns` of the output; the first is a multiple of [`LANES`].
    ///
    /// # Safety
    /// Nobody else has these columns meanwhile.
    pub unsafe fn run(&self, columns: Range<usize>) {
        let weight = &self.linear.weight;
        assert_eq!(weight.n_cols(), self.x.n_cols);
        assert!(self.neurons.is_none() || weight.layout() == Layout::Rows);
        assert!(columns.start.is_multiple_of(LANES) && columns.end <= self.width);
        match (self.x.quantized, weight.layout()) {
            (Some(x), _) if weight.dtype().is_quantized() && x.form() == Form::Words => {
                // SAFETY: as the caller promises.
                unsafe { self.many(x, columns) }
            }
            // SAFETY: as above.
            (_, Layout::Panels) => unsafe { self.panels(columns) },
            // SAFETY: as above.
            _ => unsafe { self.rows(columns) },
        }
    }

    pub(super) fn row_of(&self, column: usize) -> usize {
        self.neurons.map_or(column, |neurons| neurons.list[column] as usize)
    }

    /// Takes `n` results of each of `n_tokens` tokens from `first` on, `stride` apart, to columns `column ..`.
    ///
    /// # Safety
    /// As [`Matmul::run`].
    unsafe fn put(
        &self,
        results: &[f32],
        stride: usize,
        n: usize,
        first: usize,
        n_tokens: usize,
        column: usize,
    ) {
        for (t, results) in results.chunks(stride).take(n_tokens).enumerate() {
            // SAFETY: as the caller promises.
            unsafe { self.out.part((first + t) * self.width + column, n) }.copy_from_slice(&results[..n]);
        }
        // SAFETY: as the caller promises.
        unsafe { self.add_bias(first..first + n_tokens, column, n) };
    }

    /// # Safety
    /// As [`Matmul::run`].
    pub(super) unsafe fn add_bias(&self, tokens: Range<usize>, column: usize, n: usize) {
        let Some(bias) = &self.linear.bias else { return };
        for t in tokens {
            // SAFETY: as the caller promises.
            for (i, v) in unsafe { self.out.part(t * self.width + column, n) }.iter_mut().enumerate() {
                *v += bias[self.row_of(column + i)];
            }
        }
    }

    /// # Safety
    /// As [`Matmul::run`].
    unsafe fn rows(&self, columns: Range<usize>) {
        let (matrix, n_tokens) = (&self.linear.weight, self.x.n_tokens);
        let (bytes, row_bytes) = (matrix.bytes(), matrix.row_bytes());
        let dtype = matrix.dtype();
        // Where there are many tokens, float types are decoded once for all.
        let is_decoded = n_tokens >= GEMM_TOKENS && matches!(dtype, DType::F16 | DType::BF16);
        let mut decoded = vec![0.0f32; if is_decoded { ROW_TILE * matrix.n_cols() } else { 0 }];
        let dot = self.kernels.dot[if is_decoded { DType::F32 } else { dtype } as usize];
        let mut pointers = [std::ptr::null(); ROW_TILE + AHEAD];
        let mut one = [0.0f32; ROW_TILE];
        let mut many = vec![0.0f32; if n_tokens > 1 { ROW_TILE * n_tokens } else { 0 }];
        let results = if n_tokens > 1 { &mut many[..] } else { &mut one[..] };
        for first in columns.clone().step_by(ROW_TILE) {
            let n = ROW_TILE.min(columns.end - first);
            let with_next = (n + AHEAD).min(columns.end - first);
            for (i, p) in pointers[..with_next].iter_mut().enumerate() {
                *p = bytes[self.row_of(first + i) * row_bytes..][..row_bytes].as_ptr();
            }
            if is_decoded {
                for (i, (out, p)) in
                    decoded.chunks_exact_mut(matrix.n_cols()).zip(&mut pointers[..n]).enumerate()
                {
                    // SAFETY: the table is this processor's.
                    unsafe { (self.kernels.decode)(dtype, matrix.row(self.row_of(first + i)), out) };
                    *p = out.as_ptr().cast();
                }
            }
            let next = if is_decoded { &[] } else { &pointers[n..with_next] };
            let rows = Rows { now: &pointers[..n], next };
            // SAFETY: the pointers are whole rows of the matrix, `results` holds n_tokens rows of ROW_TILE, and the
            // table is this processor's.
            unsafe { dot(rows, &self.x, results.as_mut_ptr(), ROW_TILE) };
            // SAFETY: as the caller promises.
            unsafe { self.put(results, ROW_TILE, n, 0, n_tokens, first) };
        }
    }

    /// The bytes of panel `i`.
    pub(super) fn panel(&self, i: usize) -> &[u8] {
        let n = self.linear.weight.panel_bytes().expect("a type that interleaves");
        &self.linear.weight.bytes()[i * n..][..n]
    }

    /// # Safety
    /// As [`Matmul::run`].
    unsafe fn panels(&self, columns: Range<usize>) {
        let dtype = self.linear.weight.dtype();
        let panels = self.kernels.panels[dtype as usize].expect("panels are made where there are kernels");
        let mut results = [0.0f32; TOKEN_TILE * LANES];
        for column in columns.clone().step_by(LANES) {
            let (panel, n) = (self.panel(column / LANES), LANES.min(columns.end - column));
            for first in (0..self.x.n_tokens).step_by(TOKEN_TILE) {
                let n_tokens = TOKEN_TILE.min(self.x.n_tokens - first);
                let x = self.x.tokens(first, n_tokens);
                // SAFETY: the panel is whole, `results` has places for a tile, the operand is quantised as the type
                // is, and the table is this processor's.
                unsafe { (panels.dot)(panel.as_ptr(), n, &x, results.as_mut_ptr(), LANES) };
                // SAFETY: as the caller promises.
                unsafe { self.put(&results, LANES, n, first, n_tokens, column) };
            }
        }
    }
}
