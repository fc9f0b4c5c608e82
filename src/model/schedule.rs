//! A step over host and devices: who does what in which order, and how they hand over.
//!
//! The order of a step is fixed when a model is loaded: [`Op`] after [`Op`]. Devices are given their work ahead and wait
//! at flags for the host; the host walks through the same list, does its own and waits for them where it must.

use crate::backend::cpu::Cpu;
use crate::backend::cpu::pool::Parts;
use crate::backend::cuda::ffn::{FfnStep, Supply};
use crate::backend::cuda::form::Form;
use crate::backend::cuda::workspace::{FEW, LOGIT_ROWS};
use crate::backend::cuda::{Step, mailbox};
use crate::backend::{Backend, HostCache, KvShape, Rotations};
use crate::quant::Matrix;
use crate::sparse::ffn::{self, Down, Ffn};
use crate::sparse::{Counts, Sparsity};
use crate::{Error, Result};

use super::Model;
use super::cache::{Cache, KvBlock};
use super::devices::{Part, source};
use super::forward::Scratch;
use super::kv_cache::Sequence;
use super::order::{Op, order};

/// Operations that a device is given ahead of the one at hand, where they aren't launched all at once: enough that it
/// never waits for a launch, few enough that the driver's queue, which waits when it is full, never is.
const AHEAD: usize = 4;

/// Tokens that continue a sequence, and which of them want logits.
pub struct Request<'a> {
    pub sequence: &'a mut Sequence<KvBlock>,
    pub tokens: &'a [u32],
    /// Logits for the last `n_logits` tokens.
    pub n_logits: usize,
}

/// A layer's neurons that the host runs beside a device.
struct Share {
    ffn: Ffn,
    /// Whether the device's predictor does.
    is_listed: bool,
    /// Whether it is all of the layer.
    is_whole: bool,
}

/// Host and devices with their parts of a model.
pub struct Schedule {
    parts: Vec<Part>,
    ops: Vec<Op>,
    /// Of each layer, the host's share beside a device.
    shares: Vec<Option<Share>>,
    cache: Cache,
    host: Scratch<Vec<f32>>,
    ffn: ffn::Scratch<Vec<f32>>,
    y: Vec<f32>,
}

/// The settings of a step.
pub struct Pass<'a> {
    pub model: &'a Model,
    pub threshold: f32,
    /// Tokens of a step from which the host's neurons are brought to the devices.
    pub feed_from: Option<usize>,
    /// Asked before every layer and while a device is waited for; true gives up.
    pub interrupted: &'a mut dyn FnMut() -> bool,
}

/// What a step's tokens are, for host and devices alike.
struct Batch {
    n_tokens: usize,
    rotations: Option<Rotations>,
    /// Tokens that want logits.
    wanted: Vec<u32>,
}

impl Schedule {
    /// Puts the parts of `model` in order. `kv` is the cache of all layers.
    pub fn new(model: &Model, kv: KvShape, mut parts: Vec<Part>) -> Self {
        let owner = |number: usize| {
            let local = |part: &Part| part.layers.iter().position(|layer| layer.number == number);
            parts.iter().enumerate().find_map(|(device, part)| Some((device, local(part)?)))
        };
        let owners: Vec<_> = (0..model.layers.len()).map(owner).collect();
        let pools = parts.iter().map(|part| part.gpu.pool().clone()).collect();
        let cache = Cache::new(kv, &owners, pools);
        let shares: Vec<Option<Share>> = cache
            .owners()
            .iter()
            .zip(&model.layers)
            .map(|((owner, local), layer)| {
                let part = &parts[(*owner)?];
                share(&layer.ffn, &part.plan.hot[*local], part.layers[*local].ffn.has_predictor())
            })
            .collect();
        let is_shared: Vec<bool> = shares.iter().map(Option::is_some).collect();
        let head = parts.iter().position(|part| part.head.is_some());
        let order = order(cache.owners(), &is_shared, head, parts.len());
        for (part, n) in parts.iter_mut().zip(order.n_exchanges) {
            part.n_exchanges = n;
            part.layers.iter_mut().for_each(|layer| layer.exchange = order.exchanges[layer.number]);
        }
        Self {
            ops: order.ops,
            shares,
            cache,
            host: Scratch::default(),
            ffn: ffn::Scratch::default(),
            y: Vec::new(),
            parts,
        }
    }

    /// Where sequences have their keys and values.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Runs `requests` side by side and appends their tokens to their sequences. Returns the wanted logits, (n, n_vocab),
    /// in order. Where it fails the sequences are as they were.
    pub fn run(
        &mut self,
        pass: &mut Pass,
        cpu: &mut Cpu,
        requests: &mut [Request],
        counts: &mut [Counts],
    ) -> Result<Vec<f32>> {
        let done = self.reserve(requests).and_then(|()| self.step(pass, cpu, requests, counts));
        for r in requests.iter_mut() {
            match done {
                Ok(_) => r.sequence.append(r.tokens),
                Err(_) => r.sequence.truncate(r.sequence.len()),
            }
        }
        done
    }

    fn reserve(&self, requests: &mut [Request]) -> Result<()> {
        requests.iter_mut().try_for_each(|r| {
            r.sequence.reserve(r.tokens.len(), |index| self.cache.block(index), KvBlock::copy)
        })
    }

    fn step(
        &mut self,
        pass: &mut Pass,
        cpu: &mut Cpu,
        requests: &mut [Request],
        counts: &mut [Counts],
    ) -> Result<Vec<f32>> {
        let tokens: Vec<u32> = requests.iter().flat_map(|r| r.tokens.iter().copied()).collect();
        let place = |(i, r): (usize, &Request)| {
            let start = r.sequence.len();
            (start..start + r.tokens.len()).map(move |position| (i, position)).collect::<Vec<_>>()
        };
        let places: Vec<(usize, usize)> = requests.iter().enumerate().flat_map(place).collect();
        let positions = || places.iter().map(|(_, position)| *position);
        let mut wanted = Vec::new();
        let mut end = 0;
        for r in requests.iter() {
            end += r.tokens.len();
            wanted.extend((end - r.n_logits..end).map(|i| i as u32));
        }
        let model = pass.model;
        let rotations = model.config.rope.as_ref().map(|r| r.rotations(positions()));
        let batch = Batch { n_tokens: tokens.len(), rotations, wanted };
        cpu.embed(&model.token_embd, &tokens, &mut self.host.x); // (n_tokens, n_embd)
        if let Some((table, first)) = &model.positions {
            let rows: Vec<u32> = positions().map(|p| (p + first) as u32).collect();
            cpu.add_embedding(table, &rows, &mut self.host.x);
        }
        self.begin(&batch, &places, requests)?;
        let sequences =
            requests.iter_mut().map(|r| r.sequence.blocks_mut().iter_mut().map(KvBlock::on_host).collect());
        let mut cache =
            HostCache { shape: *self.cache.on_host(), sequences: sequences.collect(), tokens: places };
        let walked = self.walk(pass, cpu, &batch, &mut cache, counts);
        drop(cache);
        let logits = walked.and_then(|logits| self.finish(pass, &batch, logits));
        if logits.is_err() {
            self.abandon();
        }
        for part in &mut self.parts {
            part.base = part.base.wrapping_add(part.n_exchanges);
        }
        logits
    }

    /// Tells the devices of a step.
    fn begin(&mut self, batch: &Batch, places: &[(usize, usize)], requests: &[Request]) -> Result<()> {
        let positions: Vec<u32> = places.iter().map(|(_, position)| *position as u32).collect();
        for (device, part) in self.parts.iter_mut().enumerate() {
            let mut table = Vec::new();
            let mut starts = Vec::new();
            for r in requests {
                starts.push(table.len() as u32);
                table.extend(r.sequence.blocks().iter().map(|b| b.address(device)));
            }
            let first: Vec<u32> = places.iter().map(|(sequence, _)| starts[*sequence]).collect();
            part.gpu.begin(&Step {
                base: part.base,
                positions: &positions,
                first: &first,
                table: &table,
                wanted: &batch.wanted,
                rotations: batch.rotations.as_ref(),
            })?;
        }
        Ok(())
    }

    /// Gives the devices their work and does the host's. Returns the logits where the host makes them.
    fn walk(
        &mut self,
        pass: &mut Pass,
        cpu: &mut Cpu,
        batch: &Batch,
        cache: &mut HostCache,
        counts: &mut [Counts],
    ) -> Result<Vec<f32>> {
        // Devices whose step is launched at once; the others are given an operation at a time.
        let mut is_launched = Vec::new();
        for device in 0..self.parts.len() {
            is_launched.push(self.launch_graph(pass, batch, device)?);
        }
        let feeds = pass.feed_from.is_some_and(|least| batch.n_tokens >= least);
        // Who brings neurons to a device waits for what it was given before, which may wait for answers from here.
        let ahead = if feeds { 0 } else { AHEAD };
        let mut n_given = 0;
        for i in 0..self.ops.len() {
            while n_given < self.ops.len().min(i + 1 + ahead) {
                let op = self.ops[n_given];
                if let Some(device) = op.device().filter(|d| !is_launched[*d]) {
                    let part = &mut self.parts[device];
                    match op {
                        Op::DeviceLayer { local, .. } if part.is_fed(local, feeds) => {
                            put_fed(part, local, pass, cpu, batch)?
                        }
                        _ => put(part, op, pass, batch),
                    }
                    part.gpu.check()?;
                }
                n_given += 1;
            }
            if (pass.interrupted)() {
                return Err(Error::Interrupted);
            }
            match self.ops[i] {
                Op::HostLayer { number, local } => {
                    self.host_layer(pass, cpu, batch, number, local, cache, counts)
                }
                Op::Give { device, exchange } => {
                    let part = &self.parts[device];
                    part.gpu.mailbox().answer(part.base.wrapping_add(exchange), &self.host.x);
                }
                Op::Take { device, exchange } => {
                    self.parts[device].wait(exchange, pass.interrupted)?;
                    let n = batch.n_tokens * pass.model.config.n_embd;
                    self.parts[device].gpu.mailbox().take(n, &mut self.host.x, None);
                }
                Op::DeviceLayer { device, local } => {
                    let layer = &self.parts[device].layers[local];
                    let (number, exchange) = (layer.number, layer.exchange);
                    count_device(&mut counts[number], pass.model, batch.n_tokens);
                    if let Some(exchange) = exchange.filter(|_| !self.parts[device].is_fed(local, feeds)) {
                        self.parts[device].wait(exchange, pass.interrupted)?;
                        self.host_share(pass, cpu, batch, (device, local), number, &mut counts[number]);
                        let part = &self.parts[device];
                        part.gpu.mailbox().answer(part.base.wrapping_add(exchange), &self.y);
                    }
                }
                Op::DeviceHead { .. } => {}
                Op::HostHead => return Ok(self.host_head(pass, cpu, batch)),
            }
        }
        Ok(Vec::new())
    }

    /// Launches a device's step as one graph, recorded when it is first wanted. False where it isn't to be one.
    fn launch_graph(&mut self, pass: &Pass, batch: &Batch, device: usize) -> Result<bool> {
        let part = &mut self.parts[device];
        let key = (batch.n_tokens, batch.wanted.len());
        if key.0 > FEW || key.1 > LOGIT_ROWS {
            return Ok(false);
        }
        let Some(mut graphs) = part.graphs.take() else { return Ok(false) };
        let graph = match graphs.remove(&key) {
            Some(graph) => graph,
            None => {
                let ops = &self.ops;
                let stream = part.gpu.stream_handle();
                let recorded = stream.record(|| {
                    ops.iter()
                        .filter(|op| op.device() == Some(device))
                        .for_each(|op| put(part, *op, pass, batch));
                    part.gpu.check()
                });
                // Without graphs from now on; what is wrong for good, a launch will say again.
                let Ok(graph) = recorded else { return Ok(false) };
                graph
            }
        };
        let launched = part.gpu.stream().launch_graph(&graph);
        graphs.insert(key, graph);
        part.graphs = Some(graphs);
        launched.map(|()| true)
    }

    fn host_layer(
        &mut self,
        pass: &Pass,
        cpu: &mut Cpu,
        batch: &Batch,
        number: usize,
        local: usize,
        cache: &mut HostCache,
        counts: &mut [Counts],
    ) {
        let model = pass.model;
        let layer = &model.layers[number];
        let (scratch, counts) = (&mut self.ffn, &mut counts[number]);
        layer.block.run(
            cpu,
            local,
            batch.rotations.as_ref(),
            cache,
            &mut self.host,
            |b, x, residual, out| {
                let n = batch.n_tokens;
                layer.ffn.run(b, model.sparsity, pass.threshold, n, x, residual, scratch, out, counts)
            },
        );
    }

    /// What the host's neurons of a device's layer add to the residual, into `self.y`.
    fn host_share(
        &mut self,
        pass: &Pass,
        cpu: &mut Cpu,
        batch: &Batch,
        (device, local): (usize, usize),
        number: usize,
        counts: &mut Counts,
    ) {
        let share = self.shares[number].as_ref().expect("an exchange has a share");
        let (mode, n_tokens) = (pass.model.sparsity, batch.n_tokens);
        let mailbox: &mailbox::Mailbox = self.parts[device].gpu.mailbox();
        let (x, residual) = (&mut self.host.normed, &mut self.host.attn_in);
        let own_predictor = share.is_whole && mode == Sparsity::Predicted && !share.is_listed;
        mailbox.take(n_tokens * pass.model.config.n_embd, x, Some(residual).filter(|_| own_predictor));
        let (scratch, out) = (&mut self.ffn, &mut self.y);
        if share.is_whole && !share.is_listed {
            let residual = &self.host.attn_in;
            let mut own = Counts { fired: counts.fired.take(), ..Counts::default() };
            share.ffn.run(cpu, mode, pass.threshold, n_tokens, x, residual, scratch, out, &mut own);
            counts.fired = own.fired;
            if mode != Sparsity::Dense {
                counts.selected += own.selected;
                counts.active += own.active;
            }
            return;
        }
        if share.is_listed {
            mailbox.take_list(n_tokens, &mut scratch.neurons.list, &mut scratch.neurons.on);
        } else {
            let cold = self.parts[device].layers[local].ffn.cold();
            scratch.neurons.these(cold, n_tokens);
        }
        let before = counts.active;
        share.ffn.run_share(cpu, mode, n_tokens, x, scratch, out, counts);
        if mode == Sparsity::Exact {
            counts.selected += counts.active - before;
        }
    }

    fn host_head(&mut self, pass: &Pass, cpu: &mut Cpu, batch: &Batch) -> Vec<f32> {
        let mut logits = Vec::new();
        if !batch.wanted.is_empty() {
            let (model, s) = (pass.model, &mut self.host);
            cpu.take_rows(&mut s.x, model.config.n_embd, &batch.wanted);
            cpu.norm(&model.output_norm, &s.x, &mut s.normed);
            cpu.matmul([&model.output], &s.normed, [&mut logits]); // (n, n_vocab)
        }
        logits
    }

    /// Waits for the devices, and makes the logits where one of them does.
    fn finish(&mut self, pass: &mut Pass, batch: &Batch, mut logits: Vec<f32>) -> Result<Vec<f32>> {
        for part in &mut self.parts {
            part.settle(pass.interrupted)?;
        }
        let Some(part) = self.parts.iter_mut().find(|part| part.head.is_some()) else { return Ok(logits) };
        let (n, n_vocab) = (batch.wanted.len(), pass.model.config.n_vocab);
        for start in (0..n).step_by(LOGIT_ROWS) {
            let end = n.min(start + LOGIT_ROWS);
            if start > 0 {
                part.head(start..end);
                part.gpu.check()?;
                part.settle(pass.interrupted)?;
            }
            part.gpu.logits((end - start) * n_vocab, &mut logits);
        }
        Ok(logits)
    }

    /// After a failure: no device waits for the host any more, and all are ready for another step.
    fn abandon(&mut self) {
        self.parts.iter().for_each(|part| part.gpu.mailbox().give_up());
        for part in &mut self.parts {
            // What went wrong is known already.
            let _ = part.gpu.stream().finish();
            let _ = part.gpu.mailbox().settle(part.gpu.stream());
            let _ = part.gpu.check();
        }
    }

    /// Adds what the devices have counted to `counts`.
    pub fn add_counts(&self, mode: Sparsity, counts: &mut [Counts]) -> Result<()> {
        for part in &self.parts {
            let fired = part.gpu.fired()?;
            for (i, (layer, (selected, active))) in part.layers.iter().zip(part.gpu.counts()?).enumerate() {
                let counts = &mut counts[layer.number];
                if mode != Sparsity::Dense {
                    counts.selected += if mode == Sparsity::Exact { active } else { selected };
                    counts.active += active;
                }
                if let (Some(all), Some(fired)) = (&mut counts.fired, &fired) {
                    let n = all.len();
                    all.iter_mut().zip(&fired[i * n..]).for_each(|(all, more)| *all += more);
                }
            }
        }
        Ok(())
    }

    pub fn reset_counts(&self) -> Result<()> {
        self.parts.iter().try_for_each(|part| part.gpu.reset_counts())
    }
}

impl Part {
    /// Whether the host's neurons of layer `local` come here, where the step `feeds`.
    fn is_fed(&self, local: usize, feeds: bool) -> bool {
        let layer = &self.layers[local];
        feeds && self.feed.is_some() && layer.exchange.is_some() && layer.is_feedable
    }

    fn wait(&self, exchange: u32, interrupted: &mut dyn FnMut() -> bool) -> Result<()> {
        self.gpu.mailbox().wait(self.base.wrapping_add(exchange), self.gpu.stream(), interrupted)
    }

    /// Waits until the device has done all it was given.
    fn settle(&mut self, interrupted: &mut dyn FnMut() -> bool) -> Result<()> {
        while !self.gpu.stream().is_done()? {
            if interrupted() {
                return Err(Error::Interrupted);
            }
            std::thread::yield_now();
        }
        self.gpu.mailbox().settle(self.gpu.stream())
    }

    /// The head over the step's wanted rows `rows`.
    fn head(&mut self, rows: std::ops::Range<usize>) {
        let (norm, output) = self.head.as_ref().expect("the head is here");
        let s = &mut self.scratch;
        self.gpu.head(norm, output, &s.x, rows, &mut s.attn_in, &mut s.normed);
    }
}

/// Puts a device's share of `op` on its stream.
fn put(part: &mut Part, op: Op, pass: &Pass, batch: &Batch) {
    let model = pass.model;
    match op {
        Op::Give { exchange, .. } => {
            let n = batch.n_tokens * model.config.n_embd;
            part.gpu.take_over(exchange, &mut part.scratch.x, n);
        }
        Op::Take { exchange, .. } => part.gpu.hand_over(exchange, &part.scratch.x, None),
        Op::DeviceLayer { local, .. } => {
            let layer = &part.layers[local];
            let step = FfnStep { exchange: layer.exchange, ..ffn_step(local, pass, batch) };
            let (rotations, mut cache) = (batch.rotations.as_ref(), part.gpu.cache());
            let s = &mut part.scratch;
            layer.block.run(&mut part.gpu, local, rotations, &mut cache, s, |gpu, x, residual, out| {
                layer.ffn.run(gpu, step, x, residual, out)
            });
        }
        Op::DeviceHead { .. } if !batch.wanted.is_empty() => part.head(0..batch.wanted.len().min(LOGIT_ROWS)),
        Op::DeviceHead { .. } | Op::HostLayer { .. } | Op::HostHead => {}
    }
}

fn ffn_step(local: usize, pass: &Pass, batch: &Batch) -> FfnStep {
    FfnStep {
        layer: local,
        n_tokens: batch.n_tokens,
        is_sparse: pass.model.sparsity != Sparsity::Dense,
        is_predicted: pass.model.sparsity == Sparsity::Predicted,
        threshold: pass.threshold,
        exchange: None,
    }
}

/// Puts layer `local` on a device's stream and brings it the host's neurons.
fn put_fed(part: &mut Part, local: usize, pass: &mut Pass, cpu: &Cpu, batch: &Batch) -> Result<()> {
    let (layer, feed) = (&part.layers[local], part.feed.as_mut().expect("a fed layer"));
    let step = ffn_step(local, pass, batch);
    let (rotations, mut cache) = (batch.rotations.as_ref(), part.gpu.cache());
    let mut fed = Ok(());
    layer.block.run(
        &mut part.gpu,
        local,
        rotations,
        &mut cache,
        &mut part.scratch,
        |gpu, x, residual, out| {
            let mut supply = Supply {
                source: source(&pass.model.layers[layer.number].ffn),
                feed,
                write_rows: &mut |matrix, form, rows, out| write_rows(cpu, matrix, form, rows, out),
                interrupted: &mut *pass.interrupted,
            };
            fed = layer.ffn.run_fed(gpu, step, x, residual, out, &mut supply);
        },
    );
    fed
}

/// Writes rows of `matrix` in `form` one after the other, all threads at it.
fn write_rows(cpu: &Cpu, matrix: &Matrix, form: Form, rows: &[u32], out: &mut [u8]) {
    let n_bytes = form.row_bytes(matrix.n_cols());
    let parts = Parts::new(out);
    cpu.for_rows(rows.len(), matrix.n_cols(), &|i| {
        // SAFETY: each row is written once.
        form.write_row(matrix, rows[i] as usize, unsafe { parts.part(i * n_bytes, n_bytes) });
    });
}

/// The host's neurons of a layer of which a device has `hot`.
fn share(ffn: &Ffn, hot: &[u32], is_listed: bool) -> Option<Share> {
    if hot.len() == ffn.n_neurons() {
        return None;
    }
    let mut ffn = ffn.clone();
    // A device that has neurons of the layer adds the bias.
    if let (false, Down::Neurons(down)) = (hot.is_empty(), &mut ffn.down) {
        down.bias = None;
    }
    Some(Share { ffn, is_listed, is_whole: hot.is_empty() })
}

/// What is known of a device's layer before it is run.
fn count_device(counts: &mut Counts, model: &Model, n_tokens: usize) {
    let n = (n_tokens * model.config.n_ff) as u64;
    counts.possible += n;
    if model.sparsity == Sparsity::Dense {
        counts.selected += n;
        counts.active += n;
    }
}
