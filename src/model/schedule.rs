//! A step over host and devices: who does what in which order, and how they hand over.
//!
//! The order of a step is fixed when a model is loaded: [`Op`] after [`Op`]. Devices are given their work ahead and wait
//! at flags for the host; the host walks through the same list, does its own and waits for them where it must.

use crate::backend::cpu::Cpu;
use crate::backend::cuda::ffn::FfnStep;
use crate::backend::cuda::workspace::{FEW, LOGIT_ROWS};
use crate::backend::cuda::{Step, mailbox};
use crate::backend::{Backend, HostCache, KvShape, Rotations};
use crate::sparse::ffn::{self, Down, Ffn};
use crate::sparse::{Counts, Sparsity};
use crate::{Error, Result};

use super::Model;
use super::cache::{Cache, KvBlock};
use super::devices::Part;
use super::forward::Scratch;
use super::kv_cache::Sequence;

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

/// One thing to do in a step. Numbers of hand-overs count from 1 on each device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    /// The host runs layer `number`, the `local`-th of its own.
    HostLayer {
        number: usize,
        local: usize,
    },
    /// The residual goes to a device ...
    Give {
        device: usize,
        exchange: u32,
    },
    /// ... whose layer `local` is run ...
    DeviceLayer {
        device: usize,
        local: usize,
    },
    /// ... and comes back.
    Take {
        device: usize,
        exchange: u32,
    },
    HostHead,
    DeviceHead {
        device: usize,
    },
}

impl Op {
    fn device(self) -> Option<usize> {
        match self {
            Op::Give { device, .. }
            | Op::DeviceLayer { device, .. }
            | Op::Take { device, .. }
            | Op::DeviceHead { device } => Some(device),
            Op::HostLayer { .. } | Op::HostHead => None,
        }
    }
}

/// A layer's neurons that the host runs beside a device.
struct Share {
    ffn: Ffn,
    /// Where nobody lists those that are on.
    neurons: Vec<u32>,
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
        let mut schedule = Self {
            ops: Vec::new(),
            shares: owners.iter().map(|_| None).collect(),
            cache: Cache::new(kv, &owners, pools),
            host: Scratch::default(),
            ffn: ffn::Scratch::default(),
            y: Vec::new(),
            parts: Vec::new(),
        };
        schedule.order(model, &mut parts);
        schedule.parts = parts;
        schedule
    }

    /// Lists what is to be done, numbers the hand-overs and finds the host's shares.
    fn order(&mut self, model: &Model, parts: &mut [Part]) {
        // Where the residual is.
        let mut at = None;
        let go = |ops: &mut Vec<Op>, parts: &mut [Part], at: &mut Option<usize>, to: Option<usize>| {
            if *at == to {
                return;
            }
            let mut next = |device: usize| {
                parts[device].n_exchanges += 1;
                parts[device].n_exchanges
            };
            if let Some(device) = *at {
                ops.push(Op::Take { device, exchange: next(device) });
            }
            if let Some(device) = to {
                ops.push(Op::Give { device, exchange: next(device) });
            }
            *at = to;
        };
        for (number, (owner, local)) in self.cache.owners().to_vec().into_iter().enumerate() {
            go(&mut self.ops, parts, &mut at, owner);
            let Some(device) = owner else {
                self.ops.push(Op::HostLayer { number, local });
                continue;
            };
            self.ops.push(Op::DeviceLayer { device, local });
            let part = &mut parts[device];
            let hot = &part.plan.hot[local];
            let layer = &mut part.layers[local];
            self.shares[number] = share(&model.layers[number].ffn, hot, layer.ffn.has_predictor());
            if self.shares[number].is_some() {
                part.n_exchanges += 1;
                layer.exchange = Some(part.n_exchanges);
            }
        }
        let head = parts.iter().position(|part| part.head.is_some());
        go(&mut self.ops, parts, &mut at, head);
        self.ops.push(head.map_or(Op::HostHead, |device| Op::DeviceHead { device }));
    }

    /// Where sequences have their keys and values.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    pub fn parts(&self) -> &[Part] {
        &self.parts
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
        let mut n_given = 0;
        for i in 0..self.ops.len() {
            while n_given < self.ops.len().min(i + 1 + AHEAD) {
                let op = self.ops[n_given];
                if let Some(device) = op.device().filter(|d| !is_launched[*d]) {
                    put(&mut self.parts[device], op, pass, batch);
                    self.parts[device].gpu.check()?;
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
                    if let Some(exchange) = exchange {
                        self.parts[device].wait(exchange, pass.interrupted)?;
                        self.host_share(pass, cpu, batch, device, number, &mut counts[number]);
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
        device: usize,
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
            scratch.neurons.these(&share.neurons, n_tokens);
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
            let step = FfnStep {
                layer: local,
                n_tokens: batch.n_tokens,
                is_sparse: model.sparsity != Sparsity::Dense,
                is_predicted: model.sparsity == Sparsity::Predicted,
                threshold: pass.threshold,
                exchange: layer.exchange,
            };
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

/// The host's neurons of a layer of which a device has `hot`.
fn share(ffn: &Ffn, hot: &[u32], is_listed: bool) -> Option<Share> {
    let n_ff = ffn.n_neurons();
    if hot.len() == n_ff {
        return None;
    }
    let mut is_hot = vec![false; n_ff];
    hot.iter().for_each(|i| is_hot[*i as usize] = true);
    let neurons = (0..n_ff as u32).filter(|i| !is_hot[*i as usize]).collect();
    let mut ffn = ffn.clone();
    // A device that has neurons of the layer adds the bias.
    if let (false, Down::Neurons(down)) = (hot.is_empty(), &mut ffn.down) {
        down.bias = None;
    }
    Some(Share { ffn, neurons, is_listed, is_whole: hot.is_empty() })
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
