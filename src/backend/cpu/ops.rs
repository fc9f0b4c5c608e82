//! The verbs of [`Backend`] on the processor. Every result element is computed whole by one chunk of an operation and
//! in one order, so neither the number of threads nor the size of a batch changes a bit of it.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::backend::{
    Activation, Backend, HostBlock, HostCache, KV_BLOCK, Linear, NeuronBackend, Neurons, Norm, NormKind,
    RopePairs, Rotations,
};
use crate::quant::{LANES, Matrix};

use super::attention::{Attention, Place, store_key, store_value};
use super::kernels::{Kernels, Pick};
use super::matmul::{GEMM_TOKENS, Matmul};
use super::operand::{Form, Operand, Quantized};
use super::pool::{CHUNKS_A_THREAD, Parts, Team};
use super::row_sum::RowSum;

/// The least bytes of weights worth a chunk of their own.
const CHUNK_BYTES: usize = 16 << 10;
/// The least values worth a chunk of element-wise work.
const CHUNK_VALUES: usize = 4096;

/// The processor during one forward pass.
pub struct Cpu<'a> {
    kernels: &'static Kernels,
    team: &'a Team,
    quantized: Quantized,
    bytes_read: u64,
}

impl<'a> Cpu<'a> {
    pub fn new(kernels: &'static Kernels, team: &'a Team) -> Self {
        Self { kernels, team, quantized: Quantized::default(), bytes_read: 0 }
    }

    /// Calls `f` with every row number, a few to a chunk.
    pub fn for_rows(&self, n_rows: usize, width: usize, f: &(dyn Fn(usize) + Sync)) {
        let rows = (CHUNK_VALUES / width.max(1)).clamp(1, n_rows.max(1));
        self.team.run(n_rows.div_ceil(rows), &|c| (c * rows..((c + 1) * rows).min(n_rows)).for_each(f));
    }

    /// Calls `f` with runs of values of `x`.
    fn for_values(&self, x: &mut [f32], f: &(dyn Fn(usize, &mut [f32]) + Sync)) {
        let n = x.len();
        let parts = Parts::new(x);
        self.team.run(n.div_ceil(CHUNK_VALUES), &|c| {
            let start = c * CHUNK_VALUES;
            // SAFETY: each chunk takes its own run.
            f(start, unsafe { parts.part(start, CHUNK_VALUES.min(n - start)) });
        });
    }

    fn quantize(&mut self, x: &[f32], n_cols: usize) {
        let n_tokens = x.len() / n_cols;
        let many = n_tokens >= GEMM_TOKENS && !self.kernels.gemms.is_empty();
        let mut quantized = std::mem::take(&mut self.quantized);
        quantized.resize(n_tokens, n_cols, if many { Form::Words } else { Form::Bytes });
        let rows = quantized.parts();
        self.for_rows(n_tokens, n_cols, &|t| {
            // SAFETY: each token has its own row; the table is this processor's.
            unsafe { (self.kernels.quantize)(&x[t * n_cols..][..n_cols], &mut rows.row(t)) };
        });
        self.quantized = quantized;
    }

    /// Rows a chunk takes out of `n_rows` of `row_bytes`.
    fn rows_per_chunk(&self, n_rows: usize, row_bytes: usize, n_tokens: usize) -> usize {
        let fair = n_rows.div_ceil(CHUNKS_A_THREAD * self.team.n_threads());
        let worthwhile = CHUNK_BYTES.div_ceil(row_bytes * n_tokens.min(4));
        fair.max(worthwhile).next_multiple_of(LANES)
    }

    /// Rows `ids` of `table`.
    pub fn embed(&mut self, table: &Matrix, ids: &[u32], out: &mut Vec<f32>) {
        out.clear();
        out.resize(ids.len() * table.n_cols(), 0.0);
        self.add_embedding(table, ids, out);
    }

    /// Adds rows `ids` of `table` to `x`.
    pub fn add_embedding(&mut self, table: &Matrix, ids: &[u32], x: &mut [f32]) {
        for (id, x) in ids.iter().zip(x.chunks_exact_mut(table.n_cols())) {
            // SAFETY: the table is this processor's.
            unsafe { (self.kernels.add_rows)(table.dtype(), &[(table.row(*id as usize), 1.0)], &[], x) };
        }
        self.bytes_read += (ids.len() * table.row_bytes()) as u64;
    }

    /// Keeps the rows `tokens`, ascending.
    pub fn take_rows(&mut self, x: &mut Vec<f32>, width: usize, tokens: &[u32]) {
        for (to, from) in tokens.iter().enumerate() {
            let from = *from as usize;
            x.copy_within(from * width..(from + 1) * width, to * width);
        }
        x.truncate(tokens.len() * width);
    }

    /// Bytes of weights read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }
}

impl Backend for Cpu<'_> {
    type Buffer = Vec<f32>;
    type Linear = Linear;
    type Norm = Norm;
    type Cache<'c> = HostCache<'c>;

    fn norm(&mut self, norm: &Norm, x: &Vec<f32>, out: &mut Vec<f32>) {
        let width = norm.weight.len();
        out.resize(x.len(), 0.0);
        let out = Parts::new(out);
        self.for_rows(x.len() / width, width, &|t| {
            let x = &x[t * width..][..width];
            // SAFETY: each row is written once; the table is this processor's.
            unsafe {
                let out = out.part(t * width, width);
                match norm.kind {
                    NormKind::Rms => (self.kernels.rms_norm)(x, &norm.weight, norm.eps, out),
                    NormKind::Layer => {
                        (self.kernels.layer_norm)(x, &norm.weight, norm.bias.as_deref(), norm.eps, out)
                    }
                }
            }
        });
    }

    fn matmul<const N: usize>(&mut self, linears: [&Linear; N], x: &Vec<f32>, out: [&mut Vec<f32>; N]) {
        let n_cols = linears[0].weight.n_cols();
        let n_tokens = x.len() / n_cols;
        if linears.iter().any(|l| l.weight.dtype().is_quantized()) {
            self.quantize(x, n_cols);
        }
        let operand = Operand { n_cols, first: 0, n_tokens, values: x, quantized: Some(&self.quantized) };
        let mut starts = [0; N];
        let mut sizes = [0; N];
        let mut n_chunks = 0;
        for (i, linear) in linears.iter().enumerate() {
            let w = &linear.weight;
            starts[i] = n_chunks;
            sizes[i] = self.rows_per_chunk(w.n_rows(), w.row_bytes(), n_tokens);
            n_chunks += w.n_rows().div_ceil(sizes[i]);
            self.bytes_read += w.bytes().len() as u64;
        }
        let mut i = 0;
        let parts = out.map(|out| {
            out.resize(n_tokens * linears[i].weight.n_rows(), 0.0);
            i += 1;
            Parts::new(out)
        });
        self.team.run(n_chunks, &|c| {
            let i = starts.partition_point(|s| *s <= c) - 1;
            let n_rows = linears[i].weight.n_rows();
            let first = (c - starts[i]) * sizes[i];
            let (linear, out) = (linears[i], &parts[i]);
            let matmul =
                Matmul { kernels: self.kernels, linear, neurons: None, x: operand, out, width: n_rows };
            // SAFETY: chunks have columns of their own.
            unsafe { matmul.run(first..(first + sizes[i]).min(n_rows)) };
        });
    }

    fn add(&mut self, x: &mut Vec<f32>, y: &Vec<f32>) {
        let kernels = self.kernels;
        // SAFETY: the table is this processor's.
        self.for_values(x, &|start, x| unsafe { (kernels.axpy_f32)(1.0, &y[start..], x) });
    }

    fn rope(&mut self, rotations: &Rotations, x: &mut Vec<f32>) {
        let Rotations { pairs, turns, n_pairs, head_dim } = rotations;
        if *n_pairs == 0 {
            return;
        }
        let n_tokens = turns.len() / n_pairs;
        let width = x.len() / n_tokens;
        let x = Parts::new(x);
        self.for_rows(n_tokens, width, &|t| {
            // SAFETY: each token has its own row.
            let x = unsafe { x.part(t * width, width) };
            let turns = &turns[t * n_pairs..][..*n_pairs];
            for head in x.chunks_exact_mut(*head_dim) {
                for (i, (cos, sin)) in turns.iter().enumerate() {
                    let (a, b) = match pairs {
                        RopePairs::Adjacent => (2 * i, 2 * i + 1),
                        RopePairs::Halves => (i, i + n_pairs),
                    };
                    (head[a], head[b]) = (head[a] * cos - head[b] * sin, head[a] * sin + head[b] * cos);
                }
            }
        });
    }

    fn store(&mut self, cache: &mut HostCache<'_>, layer: usize, k: &Vec<f32>, v: &Vec<f32>) {
        let HostCache { shape, sequences, tokens } = cache;
        let dim = shape.head_dim;
        let width = shape.n_kv_heads * dim;
        for (token, (sequence, position)) in tokens.iter().enumerate() {
            let (index, slot) = (position / KV_BLOCK, position % KV_BLOCK);
            let dtype = shape.dtype_of(index);
            let row_bytes = dtype.row_bytes(dim);
            let HostBlock::Own(block) = &mut sequences[*sequence][index] else {
                unreachable!("a sequence writes into blocks of its own")
            };
            for (is_value, x) in [(false, k), (true, v)] {
                for (head, x) in x[token * width..][..width].chunks_exact(dim).enumerate() {
                    let start = shape.first_row(layer, is_value, head) * row_bytes;
                    let part = &mut block[start..][..KV_BLOCK * row_bytes];
                    if is_value { store_value(dtype, x, slot, part) } else { store_key(dtype, x, slot, part) }
                }
            }
        }
    }

    fn attend(&mut self, cache: &HostCache<'_>, layer: usize, q: &Vec<f32>, out: &mut Vec<f32>) {
        out.resize(q.len(), 0.0);
        let place = |(sequence, position): &(usize, usize)| Place {
            blocks: &cache.sequences[*sequence],
            position: *position,
        };
        let places: Vec<Place> = cache.tokens.iter().map(place).collect();
        Attention::new(self.kernels, &cache.shape, layer, q, &places).run(self.team, &Parts::new(out));
    }
}

impl NeuronBackend for Cpu<'_> {
    fn matmul_rows(&mut self, linear: &Linear, neurons: &Neurons, x: &Vec<f32>, out: &mut Vec<f32>) {
        let w = &linear.weight;
        let (n_cols, n_rows) = (w.n_cols(), neurons.list.len());
        let n_tokens = x.len() / n_cols;
        if w.dtype().is_quantized() {
            self.quantize(x, n_cols);
        }
        self.bytes_read += (n_rows * w.row_bytes()) as u64;
        out.resize(n_tokens * n_rows, 0.0);
        let operand = Operand { n_cols, first: 0, n_tokens, values: x, quantized: Some(&self.quantized) };
        let size = self.rows_per_chunk(n_rows, w.row_bytes(), n_tokens);
        let out = &Parts::new(out);
        let matmul =
            Matmul { kernels: self.kernels, linear, neurons: Some(neurons), x: operand, out, width: n_rows };
        self.team.run(n_rows.div_ceil(size), &|c| {
            // SAFETY: chunks have columns of their own.
            unsafe { matmul.run(c * size..((c + 1) * size).min(n_rows)) };
        });
    }

    fn axpy_rows(
        &mut self,
        linear: &Linear,
        neurons: &Neurons,
        h: &Vec<f32>,
        n_tokens: usize,
        out: &mut Vec<f32>,
    ) -> usize {
        let (width, n_active) = (linear.weight.n_cols(), neurons.list.len());
        out.resize(n_tokens * width, 0.0);
        // Of each token what isn't zero, by its place in the list.
        let mut picks: Vec<Vec<Pick>> = vec![Vec::new(); n_tokens];
        let parts = Parts::new(&mut picks);
        self.for_rows(n_tokens, n_active, &|t| {
            let h = h[t * n_active..][..n_active].iter().enumerate();
            // SAFETY: each token has its own list.
            let picks = unsafe { parts.part(t, 1) };
            picks[0].extend(h.filter(|(_, h)| **h != 0.0).map(|(i, h)| (i as u32, *h)));
        });
        let sum = RowSum { kernels: self.kernels, linear, list: &neurons.list, picks: &picks };
        self.bytes_read += (sum.n_needed() * linear.weight.row_bytes()) as u64;
        // A column's sum runs over the neurons in order wherever the columns are cut.
        let n_chunks = self.team.n_threads() * if n_tokens > 1 { CHUNKS_A_THREAD } else { 2 };
        let columns = width.div_ceil(n_chunks).next_multiple_of(sum.column_unit());
        let out = Parts::new(out);
        self.team.run(width.div_ceil(columns), &|c| {
            let (start, end) = (c * columns, ((c + 1) * columns).min(width));
            // SAFETY: each chunk has columns of its own.
            unsafe { sum.run(start..end, &out) };
        });
        picks.iter().map(Vec::len).sum()
    }

    fn select(
        &mut self,
        scores: &Vec<f32>,
        n_neurons: usize,
        threshold: f32,
        neurons: &mut Neurons,
    ) -> usize {
        neurons.list.clear();
        let n_tokens = scores.len() / n_neurons;
        let on = |t: usize, j: usize| scores[t * n_neurons + j] >= threshold;
        for j in 0..n_neurons {
            if (0..n_tokens).any(|t| on(t, j)) {
                neurons.list.push(j as u32);
            }
        }
        let n_listed = neurons.list.len();
        neurons.on.clear();
        neurons.on.resize(n_tokens * n_listed, false);
        let count = AtomicUsize::new(0);
        let flags = Parts::new(&mut neurons.on);
        let list = &neurons.list;
        self.for_rows(n_tokens, n_listed, &|t| {
            // SAFETY: each token has its own row.
            let flags = unsafe { flags.part(t * n_listed, n_listed) };
            for (flag, j) in flags.iter_mut().zip(list) {
                *flag = on(t, *j as usize);
            }
            count.fetch_add(flags.iter().filter(|f| **f).count(), Ordering::Relaxed);
        });
        count.into_inner()
    }

    fn keep_positive(&mut self, values: &mut Vec<f32>, neurons: &mut Neurons) {
        let n = neurons.list.len();
        if n == 0 {
            return;
        }
        let n_tokens = values.len() / n;
        let alive: Vec<AtomicBool> = (0..n).map(|_| AtomicBool::new(false)).collect();
        {
            let (values, flags) = (Parts::new(values), Parts::new(&mut neurons.on));
            self.for_rows(n_tokens, n, &|t| {
                // SAFETY: each token has its own row.
                let (values, flags) = unsafe { (values.part(t * n, n), flags.part(t * n, n)) };
                for ((v, on), alive) in values.iter_mut().zip(flags).zip(&alive) {
                    // NaN is not zeroed: a broken model must show.
                    *on = *on && (*v > 0.0 || v.is_nan());
                    if *on {
                        alive.store(true, Ordering::Relaxed);
                    } else {
                        *v = 0.0;
                    }
                }
            });
        }
        let kept: Vec<usize> = (0..n).filter(|i| alive[*i].load(Ordering::Relaxed)).collect();
        for t in 0..n_tokens {
            for (to, from) in kept.iter().enumerate() {
                values[t * kept.len() + to] = values[t * n + from];
                neurons.on[t * kept.len() + to] = neurons.on[t * n + from];
            }
        }
        for (to, from) in kept.iter().enumerate() {
            neurons.list[to] = neurons.list[*from];
        }
        neurons.list.truncate(kept.len());
        neurons.on.truncate(n_tokens * kept.len());
        values.truncate(n_tokens * kept.len());
    }

    fn activate(&mut self, activation: Activation, x: &mut Vec<f32>) {
        let kernels = self.kernels;
        self.for_values(x, &|_, x| match activation {
            // NaN is not zeroed: a broken model must show.
            Activation::Relu => x.iter_mut().filter(|v| **v <= 0.0).for_each(|v| *v = 0.0),
            // SAFETY: the table is this processor's.
            Activation::Silu => unsafe { (kernels.silu)(x) },
            // SAFETY: as above.
            Activation::Gelu => unsafe { (kernels.gelu)(x) },
        });
    }

    fn multiply(&mut self, x: &mut Vec<f32>, y: &Vec<f32>, relu: bool) {
        self.for_values(x, &|start, x| {
            for (x, y) in x.iter_mut().zip(&y[start..]) {
                let product = *x * if relu && *y <= 0.0 { 0.0 } else { *y };
                *x = if *x == 0.0 { *x } else { product };
            }
        });
    }
}
