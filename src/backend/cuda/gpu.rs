//! A device at work: its kernels, the buffers of a step, and the verbs of [`Backend`].

use std::sync::Arc;

use crate::backend::{Backend, FULL_BLOCKS, KvShape, Linear, Norm, NormKind, RopePairs, Rotations};
use crate::quant::{DType, Matrix};
use crate::{Error, Result};

use super::cache::Pool;
use super::form::Form;
use super::launch::{Memory, Pinned, Stream};
use super::mailbox::Mailbox;
use super::module::{DeviceCache, Kernels, MAX_HEAD_DIM, Rows, Weights};
use super::workspace::{LOGIT_ROWS, Shape};

/// Bytes of weights that are gathered before they are copied.
const PIECE: usize = 4 << 20;

/// Rows of float32 in device memory.
#[derive(Default)]
pub struct Buffer {
    memory: Option<Memory>,
    /// Values in use.
    len: usize,
}

impl Buffer {
    pub fn address(&self) -> u64 {
        self.memory.as_ref().map_or(0, Memory::address)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn resize(&mut self, n: usize) {
        assert!(4 * n <= self.memory.as_ref().map_or(0, Memory::n_bytes), "a buffer made for the batch");
        self.len = n;
    }
}

/// A matrix, or rows of one, in device memory.
pub struct DeviceLinear {
    weights: Memory,
    bias: Option<Memory>,
    form: Form,
    n_rows: usize,
    n_cols: usize,
}

impl DeviceLinear {
    pub(super) fn weights(&self) -> Weights {
        Weights {
            form: self.form,
            address: self.weights.address(),
            bias: address(&self.bias),
            n_rows: self.n_rows,
            n_cols: self.n_cols,
        }
    }
}

pub(super) fn address(memory: &Option<Memory>) -> u64 {
    memory.as_ref().map_or(0, Memory::address)
}

pub struct DeviceNorm {
    is_layer: bool,
    weight: Memory,
    bias: Option<Memory>,
    eps: f32,
    width: usize,
}

/// What a step tells the device.
pub struct Step<'a> {
    /// Hand-overs are numbered from here on.
    pub base: u32,
    /// Of each token.
    pub positions: &'a [u32],
    /// Where each token's blocks begin in `table`.
    pub first: &'a [u32],
    /// Addresses of blocks.
    pub table: &'a [u64],
    /// Tokens that want logits.
    pub wanted: &'a [u32],
    pub rotations: Option<&'a Rotations>,
}

/// A buffer that the host fills before each step: the device's, and where the host writes.
struct Input {
    device: Memory,
    host: Pinned,
}

impl Input {
    fn new(stream: &Arc<Stream>, n_bytes: usize) -> Result<Self> {
        Ok(Self { device: stream.allocate(n_bytes)?, host: stream.pin(n_bytes)? })
    }

    fn copy(&self, stream: &Stream, n_bytes: usize) -> Result<()> {
        stream.copy_in(&self.device, &self.host, n_bytes)
    }
}

/// Rows as integers.
struct Integers {
    high: Memory,
    middle: Memory,
    low: Memory,
    d: Memory,
    sum: Memory,
}

pub struct Gpu {
    pub(super) stream: Arc<Stream>,
    pub(super) kernels: Kernels,
    pub(super) shape: Shape,
    pub(super) mailbox: Mailbox,
    integers: Integers,
    numbers: Input,
    turns: Input,
    table: Input,
    /// Parts of sums and of attention.
    pub(super) parts: Memory,
    pub(super) hidden: Buffer,
    pub(super) scores: Buffer,
    pub(super) h: Buffer,
    /// How many neurons are listed, and their places.
    pub(super) list: Memory,
    logits: Memory,
    logits_host: Pinned,
    /// (n_layers, 2): pairs selected, pairs active.
    pub(super) counters: Memory,
    /// (n_layers, n_ff), where neurons are counted.
    pub(super) fired: Option<Memory>,
    /// A hand-over's blocks that have finished.
    pub(super) ticket: Memory,
    pool: Arc<Pool>,
    /// The first failure of a launch; nothing is launched after it.
    error: Option<Error>,
}

impl Gpu {
    /// Opens device `number` for up to `limit` bytes. `kv` is the cache of its layers; weights have `forms`.
    pub fn new(
        number: usize,
        limit: u64,
        shape: Shape,
        kv: KvShape,
        forms: &[Form],
        count_neurons: bool,
    ) -> Result<Self> {
        if shape.head_dim > MAX_HEAD_DIM {
            let reason = format!("heads of {} values; its kernels take up to {MAX_HEAD_DIM}", shape.head_dim);
            return Err(Error::gpu(number, reason));
        }
        let stream = Stream::new(number)?;
        stream.set_limit(limit);
        let kernels = Kernels::load(&stream, forms)?;
        let sizes = shape.sizes();
        let buffer =
            |n_bytes: usize| Ok::<_, Error>(Buffer { memory: Some(stream.allocate(n_bytes)?), len: 0 });
        let zeroed = |n_bytes: usize| -> Result<Memory> {
            let memory = stream.allocate(n_bytes)?;
            stream.zero(memory.address(), n_bytes.max(1))?;
            Ok(memory)
        };
        let n_layers = kv.n_layers;
        Ok(Self {
            kernels,
            mailbox: Mailbox::new(&stream, &shape)?,
            integers: Integers {
                high: stream.allocate(sizes.plane)?,
                middle: stream.allocate(sizes.plane)?,
                low: stream.allocate(sizes.plane)?,
                d: stream.allocate(sizes.plane / 8)?,
                sum: stream.allocate(sizes.plane / 4)?,
            },
            numbers: Input::new(&stream, sizes.numbers)?,
            turns: Input::new(&stream, sizes.turns)?,
            table: Input::new(&stream, sizes.table)?,
            parts: stream.allocate(sizes.parts)?,
            hidden: buffer(sizes.hidden)?,
            scores: buffer(sizes.scores)?,
            h: buffer(sizes.h)?,
            list: stream.allocate(sizes.list)?,
            logits: stream.allocate(sizes.logits)?,
            logits_host: stream.pin(sizes.logits)?,
            counters: zeroed(16 * n_layers)?,
            fired: if count_neurons { Some(zeroed(8 * n_layers * shape.n_ff)?) } else { None },
            ticket: zeroed(4)?,
            pool: Pool::new(&stream, kv, shape.n_cached)?,
            error: None,
            shape,
            stream,
        })
    }

    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The stream, to hold on to while this is at work.
    pub fn stream_handle(&self) -> Arc<Stream> {
        self.stream.clone()
    }

    pub fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    /// A buffer of a row of `width` values for each token of a batch.
    pub fn rows(&self, width: usize) -> Result<Buffer> {
        Ok(Buffer { memory: Some(self.stream.allocate(4 * self.shape.batch * width)?), len: 0 })
    }

    /// Does `work` unless something has failed before.
    pub(super) fn put(&mut self, work: impl FnOnce(&Self) -> Result<()>) {
        if self.error.is_none() {
            self.error = work(self).err();
        }
    }

    /// The first failure since the last call.
    pub fn check(&mut self) -> Result<()> {
        self.error.take().map_or(Ok(()), Err)
    }

    /// Rows `rows` of `matrix`, in their order, in device memory.
    fn matrix(
        &self,
        matrix: &Matrix,
        rows: impl ExactSizeIterator<Item = u32>,
        form: Form,
    ) -> Result<Memory> {
        let row_bytes = form.row_bytes(matrix.n_cols());
        let n = rows.len();
        let memory = self.stream.allocate(n * row_bytes)?;
        let at_once = (PIECE / row_bytes.max(1)).clamp(1, n.max(1));
        let mut piece = vec![0; at_once * row_bytes];
        for (i, row) in rows.enumerate() {
            let place = i % at_once * row_bytes;
            form.write_row(matrix, row as usize, &mut piece[place..place + row_bytes]);
            if place + row_bytes == piece.len() || i + 1 == n {
                self.stream.write(&memory, (i - i % at_once) * row_bytes, &piece[..place + row_bytes])?;
            }
        }
        Ok(memory)
    }

    /// All of `linear`.
    pub fn linear(&self, linear: &Linear) -> Result<DeviceLinear> {
        let n = linear.weight.n_rows() as u32;
        self.linear_rows(linear, 0..n, Form::of(linear.weight.dtype()))
    }

    /// Rows `rows` of `linear`, with their biases.
    pub(super) fn linear_rows(
        &self,
        linear: &Linear,
        rows: impl ExactSizeIterator<Item = u32> + Clone,
        form: Form,
    ) -> Result<DeviceLinear> {
        let w = &linear.weight;
        let bias =
            |b: &Vec<f32>| self.stream.upload(&rows.clone().map(|r| b[r as usize]).collect::<Vec<_>>());
        Ok(DeviceLinear {
            weights: self.matrix(w, rows.clone(), form)?,
            bias: linear.bias.as_ref().map(bias).transpose()?,
            form,
            n_rows: rows.len(),
            n_cols: w.n_cols(),
        })
    }

    pub fn norm_weights(&self, norm: &Norm) -> Result<DeviceNorm> {
        Ok(DeviceNorm {
            is_layer: norm.kind == NormKind::Layer,
            weight: self.stream.upload(&norm.weight)?,
            bias: norm.bias.as_ref().map(|b| self.stream.upload(b)).transpose()?,
            eps: norm.eps,
            width: norm.weight.len(),
        })
    }

    /// Tells the device of a step, before anything of it is launched.
    pub fn begin(&mut self, step: &Step) -> Result<()> {
        if step.table.len() > self.shape.table_len() {
            let expected =
                format!("at most {} blocks of 32 tokens in one step on a GPU", self.shape.table_len());
            return Err(Error::argument(
                "batch",
                format!("{} blocks of the cache", step.table.len()),
                expected,
            ));
        }
        let batch = self.shape.batch;
        let host = &self.numbers.host;
        host.write(0, &[step.base]);
        host.write(1, step.positions);
        host.write(1 + batch, step.first);
        host.write(1 + 2 * batch, step.wanted);
        self.numbers.copy(&self.stream, 4 * (1 + 3 * batch))?;
        self.table.host.write(0, step.table);
        self.table.copy(&self.stream, 8 * step.table.len())?;
        if let Some(rotations) = step.rotations {
            let turns: Vec<f32> = rotations.turns.iter().flat_map(|(cos, sin)| [*cos, *sin]).collect();
            self.turns.host.write(0, &turns);
            self.turns.copy(&self.stream, 4 * turns.len())?;
        }
        Ok(())
    }

    fn number_address(&self, i: usize) -> u64 {
        self.numbers.device.address() + 4 * i as u64
    }

    pub(super) fn base_address(&self) -> u64 {
        self.number_address(0)
    }

    /// The cache as the kernels see it, for the tokens of the step that has begun.
    pub fn cache(&self) -> DeviceCache {
        let kv = self.pool.shape();
        let kind = match kv.dtype {
            DType::F32 => 0,
            DType::Q8_0 => 2,
            _ => 1,
        };
        DeviceCache {
            blocks: self.table.device.address(),
            first: self.number_address(1 + self.shape.batch),
            positions: self.number_address(1),
            n_kv_heads: kv.n_kv_heads as i32,
            head_dim: kv.head_dim as i32,
            kind,
            n_full: FULL_BLOCKS as i32,
        }
    }

    /// Rows `x` as kernels take them, as integers too where `form` wants that.
    pub(super) fn operand(&mut self, x: &Buffer, n_cols: usize, needs_integers: bool) -> Rows {
        let Integers { high, middle, low, d, sum } = &self.integers;
        let rows = Rows {
            values: x.address(),
            high: high.address(),
            middle: middle.address(),
            low: low.address(),
            d: d.address(),
            sum: sum.address(),
        };
        if needs_integers {
            self.put(|gpu| gpu.kernels.quantize(rows, n_cols, x.len() / n_cols));
        }
        rows
    }

    /// Takes `n` values over from the host, once it has answered `number`.
    pub fn take_over(&mut self, number: u32, x: &mut Buffer, n: usize) {
        x.resize(n);
        self.wait(number);
        self.put(|gpu| gpu.kernels.take_over(gpu.mailbox.y_address(), x.address(), n));
    }

    /// Lets the device wait for the host's answer `number`.
    pub(super) fn wait(&mut self, number: u32) {
        self.put(|gpu| gpu.mailbox.let_wait(&gpu.kernels, gpu.base_address(), number));
    }

    /// Hands `x` over to the host as `number`, and the residual where its predictor wants it.
    pub fn hand_over(&mut self, number: u32, x: &Buffer, residual: Option<&Buffer>) {
        self.put(|gpu| {
            let m = &gpu.mailbox;
            let more = residual.map_or((0, 0), |r| (r.address(), m.residual_address()));
            let (ticket, flag) = (gpu.ticket.address(), m.posted_address());
            gpu.kernels.hand_over(
                x.address(),
                m.x_address(),
                more,
                x.len(),
                ticket,
                flag,
                gpu.base_address(),
                number,
            )
        });
    }

    /// Logits of the step's wanted rows from number `first` on, `n` of them, no more than [`LOGIT_ROWS`]; `taken` and
    /// `normed` are room. [`Self::logits`] has them once the stream has finished.
    pub fn head(
        &mut self,
        norm: &DeviceNorm,
        output: &DeviceLinear,
        x: &Buffer,
        wanted: std::ops::Range<usize>,
        taken: &mut Buffer,
        normed: &mut Buffer,
    ) {
        let n = wanted.len();
        assert!(n <= LOGIT_ROWS);
        let width = norm.width;
        taken.resize(n * width);
        let rows = self.number_address(1 + 2 * self.shape.batch + wanted.start);
        self.put(|gpu| gpu.kernels.take_rows(x.address(), rows, taken.address(), width, n));
        self.norm(norm, taken, normed);
        let operand = self.operand(normed, width, output.form.is_quantized());
        self.put(|gpu| {
            gpu.kernels.matmul(output.weights(), operand, gpu.logits.address(), n)?;
            gpu.stream.copy_out(&gpu.logits_host, &gpu.logits, 4 * n * output.n_rows)
        });
    }

    /// Appends the `n` logits that the last step left.
    pub fn logits(&self, n: usize, out: &mut Vec<f32>) {
        let start = out.len();
        out.resize(start + n, 0.0);
        self.logits_host.read(0, &mut out[start..]);
    }

    /// What each layer's neurons came to: pairs selected, pairs active.
    pub fn counts(&self) -> Result<Vec<(u64, u64)>> {
        let numbers = self.read_numbers(&self.counters)?;
        Ok(numbers.chunks_exact(2).map(|n| (n[0], n[1])).collect())
    }

    /// How often each neuron of each layer fired here, (n_layers, n_ff), where that is counted.
    pub fn fired(&self) -> Result<Option<Vec<u64>>> {
        self.fired.as_ref().map(|memory| self.read_numbers(memory)).transpose()
    }

    pub fn reset_counts(&self) -> Result<()> {
        self.stream.zero(self.counters.address(), self.counters.n_bytes())?;
        self.fired.as_ref().map_or(Ok(()), |f| self.stream.zero(f.address(), f.n_bytes()))
    }

    fn read_numbers(&self, memory: &Memory) -> Result<Vec<u64>> {
        let mut bytes = vec![0; memory.n_bytes()];
        self.stream.read(memory.address(), &mut bytes)?;
        Ok(bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect())
    }
}

impl Backend for Gpu {
    type Buffer = Buffer;
    type Linear = DeviceLinear;
    type Norm = DeviceNorm;
    type Cache<'c> = DeviceCache;

    fn norm(&mut self, norm: &DeviceNorm, x: &Buffer, out: &mut Buffer) {
        out.resize(x.len());
        let DeviceNorm { is_layer, weight, bias, eps, width } = norm;
        let (weight, bias, n) = (weight.address(), address(bias), x.len() / width);
        self.put(|gpu| {
            gpu.kernels.normalize(x.address(), weight, bias, out.address(), *width, n, *eps, *is_layer)
        });
    }

    fn matmul<const N: usize>(&mut self, linears: [&DeviceLinear; N], x: &Buffer, out: [&mut Buffer; N]) {
        let n_cols = linears[0].n_cols;
        let n_tokens = x.len() / n_cols;
        let operand = self.operand(x, n_cols, linears.iter().any(|l| l.form.is_quantized()));
        for (linear, out) in linears.into_iter().zip(out) {
            out.resize(n_tokens * linear.n_rows);
            self.put(|gpu| gpu.kernels.matmul(linear.weights(), operand, out.address(), n_tokens));
        }
    }

    fn add(&mut self, x: &mut Buffer, y: &Buffer) {
        self.put(|gpu| gpu.kernels.add(x.address(), y.address(), x.len()));
    }

    fn rope(&mut self, rotations: &Rotations, x: &mut Buffer) {
        let Rotations { pairs, turns, n_pairs, head_dim } = rotations;
        if *n_pairs == 0 {
            return;
        }
        let n_tokens = turns.len() / n_pairs;
        let n_heads = x.len() / n_tokens / head_dim;
        let is_halves = *pairs == RopePairs::Halves;
        self.put(|gpu| {
            let turns = gpu.turns.device.address();
            gpu.kernels.rope(x.address(), turns, n_tokens, n_heads, *head_dim, *n_pairs, is_halves)
        });
    }

    fn store(&mut self, cache: &mut DeviceCache, layer: usize, k: &Buffer, v: &Buffer) {
        let n_tokens = k.len() / (cache.n_kv_heads * cache.head_dim) as usize;
        self.put(|gpu| gpu.kernels.store(k.address(), v.address(), *cache, layer, n_tokens));
    }

    fn attend(&mut self, cache: &DeviceCache, layer: usize, q: &Buffer, out: &mut Buffer) {
        out.resize(q.len());
        let n_heads = self.shape.n_heads;
        let n_tokens = q.len() / (n_heads * self.shape.head_dim);
        self.put(|gpu| {
            let parts = gpu.parts.address();
            gpu.kernels.attend(q.address(), *cache, layer, n_heads, n_tokens, parts, out.address())
        });
    }
}
