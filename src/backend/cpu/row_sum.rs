//! Weighted sums of rows: the down projection of a sparse FFN, whose rows are neurons.

use std::ops::Range;

use crate::backend::Linear;

use super::kernels::{Kernels, Pick};
use super::pool::Parts;

/// Neurons that are added at a time, while memory is asked for as many.
const NEURONS: usize = 8;
/// Columns that a unit of work has at least: a page boundary is then rarely crossed for few bytes.
const COLUMN_UNIT: usize = 256;
/// Columns of decoded rows ...
const COLUMNS: usize = 256;
/// ... and rows, that are used for all tokens before the next: they stay in the second-level cache.
const ROWS: usize = 256;

/// `out = bias + Σ weight · row` for every token, over its picks in ascending order.
pub struct RowSum<'a> {
    pub kernels: &'static Kernels,
    pub linear: &'a Linear,
    /// The rows that picks count in.
    pub list: &'a [u32],
    /// Of each token, places in `list` and weights.
    pub picks: &'a [Vec<Pick>],
}

impl RowSum<'_> {
    /// Chunks of columns begin at a multiple of this.
    pub fn column_unit(&self) -> usize {
        COLUMN_UNIT.max(self.linear.weight.dtype().block_len())
    }

    /// How many rows some token needs.
    pub fn n_needed(&self) -> usize {
        match self.picks {
            [one] => one.len(),
            _ => self.needed().len(),
        }
    }

    /// The places in the list that some token needs, ascending.
    fn needed(&self) -> Vec<u32> {
        let mut is_needed = vec![false; self.list.len()];
        self.picks.iter().flatten().for_each(|(i, _)| is_needed[*i as usize] = true);
        (0..self.list.len() as u32).filter(|i| is_needed[*i as usize]).collect()
    }

    /// Computes `columns` of `out`, (n_tokens, row length).
    ///
    /// # Safety
    /// Nobody else has these columns meanwhile.
    pub unsafe fn run(&self, columns: Range<usize>, out: &Parts<f32>) {
        let width = self.linear.weight.n_cols();
        // SAFETY: the caller's columns; below, one part is alive at a time.
        let of = |t: usize, c: Range<usize>| unsafe { out.part(t * width + c.start, c.len()) };
        for t in 0..self.picks.len() {
            match &self.linear.bias {
                Some(bias) => of(t, columns.clone()).copy_from_slice(&bias[columns.clone()]),
                None => of(t, columns.clone()).fill(0.0),
            }
        }
        match self.picks {
            [picks] => self.one(picks, columns.clone(), of(0, columns)),
            _ => self.many(columns, &of),
        }
    }

    fn row(&self, place: u32, columns: &Range<usize>) -> &[u8] {
        let (w, dtype) = (&self.linear.weight, self.linear.weight.dtype());
        &w.row(self.list[place as usize] as usize)
            [dtype.row_bytes(columns.start)..dtype.row_bytes(columns.end)]
    }

    /// Straight from the rows.
    fn one(&self, picks: &[Pick], columns: Range<usize>, out: &mut [f32]) {
        let rows: Vec<(&[u8], f32)> = picks.iter().map(|(i, a)| (self.row(*i, &columns), *a)).collect();
        for start in (0..rows.len()).step_by(NEURONS) {
            let (now, next) = rows[start..].split_at(NEURONS.min(rows.len() - start));
            let next = &next[..NEURONS.min(next.len())];
            // SAFETY: the table is this processor's.
            unsafe { (self.kernels.add_rows)(self.linear.weight.dtype(), now, next, out) };
        }
    }

    /// Rows are decoded once for all tokens.
    fn many<'o>(&self, columns: Range<usize>, of: &dyn Fn(usize, Range<usize>) -> &'o mut [f32]) {
        let needed = self.needed();
        let dtype = self.linear.weight.dtype();
        let mut values = vec![0.0f32; ROWS * COLUMNS];
        for start in columns.clone().step_by(COLUMNS) {
            let columns = start..(start + COLUMNS).min(columns.end);
            let n = columns.len();
            for places in needed.chunk_by(|a, b| a / ROWS as u32 == b / ROWS as u32) {
                let first = places[0] / ROWS as u32 * ROWS as u32;
                for place in places {
                    let values = &mut values[(place - first) as usize * n..][..n];
                    // SAFETY: the table is this processor's.
                    unsafe { (self.kernels.decode)(dtype, self.row(*place, &columns), values) };
                }
                for (t, picks) in self.picks.iter().enumerate() {
                    let from = picks.partition_point(|(place, _)| *place < first);
                    let to = picks.partition_point(|(place, _)| *place < first + ROWS as u32);
                    let out = of(t, columns.clone());
                    // SAFETY: the table is this processor's.
                    unsafe { (self.kernels.mix_picks)(&values, first, &picks[from..to], out) };
                }
            }
        }
    }
}
