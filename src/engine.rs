//! The engine in plain Rust: a loaded model, the sequences it is at work on, and one step for all of them.

mod saved;

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use crate::backend::cpu::Cpu;
use crate::backend::cpu::kernels::{self, Kernels};
use crate::backend::cpu::pool::{Pool, default_threads};
use crate::backend::cuda::workspace::FEW;
use crate::backend::{Activation, FULL_BLOCKS, KV_BLOCK, KvShape};
use crate::gguf::Gguf;
use crate::model::cache::KvBlock;
use crate::model::demand::{Usage, demand, device_shape};
use crate::model::devices::{Part, Setup, away};
use crate::model::kv_cache::Sequence;
use crate::model::schedule::{self, Pass, Schedule};
use crate::model::{BATCH, Config, Model, Options, Progress};
use crate::quant::DType;
use crate::sparse::ffn::Down;
use crate::sparse::placement::{DevicePlan, add_contexts, place, place_given};
use crate::sparse::{Counts, Sparsity};
use crate::{Error, Result};

#[derive(Clone, Debug, Default)]
pub struct EngineOptions {
    /// None: the physical cores this process may use.
    pub threads: Option<usize>,
    /// None: what the model was trained for.
    pub n_ctx: Option<usize>,
    /// None: by the file.
    pub sparsity: Option<Sparsity>,
    /// None: the file's.
    pub sparse_threshold: Option<f32>,
    /// None: by the file.
    pub activation: Option<Activation>,
    /// F16 (None), Q8_0 or F32.
    pub kv_type: Option<DType>,
    /// None: where memory allows. See [`Options::interleave`].
    pub interleave: Option<bool>,
    /// Whether to count how often each neuron fires.
    pub count_neurons: bool,
    /// GPUs to use; none for the processor alone.
    pub gpus: Vec<GpuOptions>,
    /// Tokens side by side; none for [`BATCH`], which is the most.
    pub batch: Option<usize>,
    /// Positions whose cache GPUs have room for; none: the context. What is longer lies in the host's memory.
    pub gpu_context: Option<usize>,
    /// Tokens of a step from which neurons that lie in the host's memory are brought to GPUs in place of being run by the
    /// host; none for what the weights' type suggests, 0 for never.
    pub feed_from: Option<usize>,
    /// How often each neuron of each layer fired, by which GPUs are given neurons; none where nobody knows.
    pub neuron_counts: Option<Vec<Vec<u64>>>,
    /// The neurons of each layer that GPUs are to have, in place of a choice by counts.
    pub hot_neurons: Option<Vec<Vec<u32>>>,
}

/// A GPU that an engine may use.
#[derive(Clone, Copy, Debug)]
pub struct GpuOptions {
    pub number: usize,
    /// Bytes of its memory.
    pub budget: u64,
    /// Bytes of those that its context takes before anything is placed there.
    pub context: u64,
    /// The fewest neurons of a layer that are worth handing over.
    pub least: usize,
}

/// Bringing a weight to a GPU takes less time than multiplying it on the host from so many tokens on for each of its
/// bits: 32 tokens for Q4_0. By calculation; `benches/README.md` has it.
const FEED_FROM_PER_BIT: usize = 7;

/// Names a sequence of one engine.
pub type SequenceId = u64;

/// Tokens that continue a sequence.
pub struct Request<'a> {
    pub sequence: SequenceId,
    pub tokens: &'a [u32],
    /// Logits wanted, for the last so many tokens.
    pub n_logits: usize,
}

/// What an engine has done so far.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    pub tokens: u64,
    pub bytes_read: u64,
    pub layers: Vec<Counts>,
}

/// What an engine is; it doesn't change.
#[derive(Clone, Debug)]
pub struct Info {
    pub architecture: &'static str,
    pub n_vocab: usize,
    pub n_ctx: usize,
    pub n_ctx_train: usize,
    pub n_layers: usize,
    pub has_predictors: bool,
    pub activation: Activation,
    pub sparsity: Sparsity,
    pub sparse_threshold: f32,
    pub instruction_set: &'static str,
    pub threads: usize,
    pub kv_type: DType,
    pub kv_bytes_per_token: usize,
    /// Memory that weights take beside the mapped file.
    pub converted_bytes: usize,
    pub is_interleaved: bool,
    pub gpus: Vec<GpuInfo>,
    /// GPUs whose budgets hold nothing: number, budget, and the bytes that would.
    pub unused_gpus: Vec<(usize, u64, u64)>,
}

/// What an engine has on a GPU.
#[derive(Clone, Debug)]
pub struct GpuInfo {
    pub number: usize,
    pub name: String,
    pub budget: u64,
    pub plan: DevicePlan,
    /// Bytes allocated, without the context's.
    pub used: u64,
}

pub struct Engine {
    gguf: Arc<Gguf>,
    model: Model,
    kernels: &'static Kernels,
    pool: Pool,
    kv: KvShape,
    n_ctx: usize,
    batch: usize,
    feed_from: Option<usize>,
    threshold: f32,
    sequences: HashMap<SequenceId, Sequence<KvBlock>>,
    next_id: SequenceId,
    schedule: Schedule,
    gpus: Vec<GpuInfo>,
    unused_gpus: Vec<(usize, u64, u64)>,
    stats: Stats,
}

impl Engine {
    /// Maps the file at `path` and binds it; `progress` is told of layers done and all, and says whether
    /// to go on.
    pub fn open(path: &Path, options: &EngineOptions, progress: &mut Progress) -> Result<Self> {
        Self::new(Gguf::open(path)?, options, progress)
    }

    pub fn new(gguf: Gguf, options: &EngineOptions, progress: &mut Progress) -> Result<Self> {
        let kernels = kernels::select()?;
        let pool = Pool::new(options.threads.unwrap_or_else(default_threads))?;
        let model_options = Options {
            activation: options.activation,
            sparsity: options.sparsity,
            interleave: options.interleave,
        };
        let mut model = Model::bind(&gguf, &model_options)?;
        let c = &model.config;
        let n_ctx = n_ctx(options.n_ctx, &model)?;
        let threshold = options.sparse_threshold.unwrap_or(c.sparse_threshold);
        if threshold.is_nan() {
            return Err(Error::argument("sparse_threshold", "NaN", "a number"));
        }
        let dtype = options.kv_type.unwrap_or(DType::F16);
        if !c.head_dim.is_multiple_of(dtype.block_len()) {
            let expected = format!("f16, since heads of {} don't divide into blocks of 32", c.head_dim);
            return Err(Error::argument("kv_type", "q8_0", expected));
        }
        let kv = KvShape { n_layers: c.n_layers, n_kv_heads: c.n_kv_heads, head_dim: c.head_dim, dtype };
        let counts = match options.count_neurons {
            true if model.sparsity == Sparsity::Dense => {
                let expected = "a model that runs predicted or exact: in dense mode no neuron is off";
                return Err(Error::argument("count_neurons", "dense mode", expected));
            }
            true => Counts::one_by_one(c.n_ff),
            false => Counts::default(),
        };
        let stats = Stats { layers: vec![counts; c.n_layers], ..Stats::default() };
        let batch = options.batch.unwrap_or(BATCH);
        if !(1..=BATCH).contains(&batch) {
            return Err(Error::argument("batch", batch, format!("1 to {BATCH}")));
        }
        let up = &model.layers[0].ffn.up.weight;
        let suggested = FEED_FROM_PER_BIT * 8 * up.row_bytes() / up.n_cols();
        let feed_from = options.feed_from.unwrap_or(suggested.max(FEW + 1));
        if (1..=FEW).contains(&feed_from) {
            let expected =
                format!("0, for never, or more than {FEW} tokens, whose steps are recorded as graphs");
            return Err(Error::argument("feed_from", feed_from, expected));
        }
        let feed_from = Some(feed_from).filter(|n| *n > 0);
        let n_cached = options.gpu_context.unwrap_or(n_ctx).min(n_ctx);
        let mode = model.sparsity;
        // An FFN that is run in full and has an output a row isn't worth turning: all of it goes, or none.
        let is_whole = mode == Sparsity::Dense
            && model.layers.iter().any(|layer| matches!(layer.ffn.down, Down::Outputs(_)));
        let feeds = feed_from.is_some_and(|n| n <= batch) && !is_whole;
        let usage = Usage { n_ctx, n_cached, batch, kv_type: dtype, mode, feeds };
        let plans = plan(&gguf, &model.config, options, &usage, is_whole)?;
        let is_head_away = plans.iter().any(|plan| plan.head);
        let away = away(&plans, model.config.n_layers);
        // A layer is done once whoever has its attention has it.
        let (mut done, n_layers) = (0, model.config.n_layers);
        let mut layer_done = |_, _| {
            done += 1;
            progress(done, n_layers)
        };
        model.lay_out(&model_options, &away, is_head_away, kernels, &pool, &mut |i, n| {
            if away[i - 1].attention { ControlFlow::Continue(()) } else { layer_done(i, n) }
        })?;
        let shape = device_shape(&model.config, &gguf, &usage);
        let mut parts = Vec::new();
        let (mut gpus, mut unused_gpus) = (Vec::new(), Vec::new());
        for (gpu, plan) in options.gpus.iter().zip(plans) {
            // Nothing of the model: the device is left alone.
            if plan.n_attention == 0 {
                unused_gpus.push((gpu.number, gpu.budget, plan.least));
                continue;
            }
            let context = gpu.context;
            let setup = Setup { model: &model, shape, kv, context, count_neurons: options.count_neurons };
            let part = Part::load(&setup, gpu.number, gpu.budget, plan, &mut layer_done)?;
            let used = part.gpu.stream().used();
            gpus.push(GpuInfo {
                number: gpu.number,
                name: part.gpu.stream().name()?,
                budget: gpu.budget,
                plan: part.plan.clone(),
                used,
            });
            parts.push(part);
        }
        let schedule = Schedule::new(&model, kv, parts);
        Ok(Self {
            gguf: Arc::new(gguf),
            model,
            kernels,
            pool,
            kv,
            n_ctx,
            batch,
            feed_from,
            threshold,
            sequences: HashMap::new(),
            next_id: 0,
            schedule,
            gpus,
            unused_gpus,
            stats,
        })
    }

    pub fn gguf(&self) -> &Arc<Gguf> {
        &self.gguf
    }

    pub fn model(&self) -> &Model {
        &self.model
    }

    pub fn info(&self) -> Info {
        let c = &self.model.config;
        Info {
            architecture: c.arch.name,
            n_vocab: c.n_vocab,
            n_ctx: self.n_ctx,
            n_ctx_train: c.n_ctx_train,
            n_layers: c.n_layers,
            has_predictors: self.model.has_predictors,
            activation: self.model.activation,
            sparsity: self.model.sparsity,
            sparse_threshold: self.threshold,
            instruction_set: self.kernels.name,
            threads: self.pool.n_threads(),
            kv_type: self.kv.dtype,
            converted_bytes: self.model.converted_bytes,
            is_interleaved: self.model.is_interleaved,
            gpus: self.gpus.clone(),
            unused_gpus: self.unused_gpus.clone(),
            kv_bytes_per_token: self.kv.block_bytes(FULL_BLOCKS) / KV_BLOCK,
        }
    }

    pub fn stats(&self) -> Result<Stats> {
        let mut stats = self.stats.clone();
        self.schedule.add_counts(self.model.sparsity, &mut stats.layers)?;
        Ok(stats)
    }

    pub fn reset_stats(&mut self) -> Result<()> {
        let counts = |layer: &Counts| match &layer.fired {
            Some(fired) => Counts::one_by_one(fired.len()),
            None => Counts::default(),
        };
        self.stats = Stats { layers: self.stats.layers.iter().map(counts).collect(), ..Stats::default() };
        self.schedule.reset_counts()
    }

    /// Bytes of the KV cache blocks in use; shared ones count once.
    pub fn kv_bytes(&self) -> usize {
        let blocks = self.sequences.values().flat_map(|s| s.blocks());
        let distinct: HashMap<_, _> = blocks.map(|b| (Arc::as_ptr(b), b.n_bytes())).collect();
        distinct.values().sum()
    }

    /// An empty sequence.
    pub fn new_sequence(&mut self) -> SequenceId {
        self.insert(Sequence::default())
    }

    fn insert(&mut self, sequence: Sequence<KvBlock>) -> SequenceId {
        self.next_id += 1;
        self.sequences.insert(self.next_id, sequence);
        self.next_id
    }

    pub fn sequence(&self, id: SequenceId) -> Result<&Sequence<KvBlock>> {
        self.sequences.get(&id).ok_or_else(|| unknown(id))
    }

    fn sequence_mut(&mut self, id: SequenceId) -> Result<&mut Sequence<KvBlock>> {
        self.sequences.get_mut(&id).ok_or_else(|| unknown(id))
    }

    /// A second sequence of the same content; they share their cache until one writes.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let copy = self.sequence(id)?.clone();
        Ok(self.insert(copy))
    }

    /// Cuts a sequence back to its first `n` tokens.
    pub fn truncate(&mut self, id: SequenceId, n: usize) -> Result<()> {
        self.sequence_mut(id)?.truncate(n);
        Ok(())
    }

    /// Forgets a sequence; one that isn't there is none to forget.
    pub fn free(&mut self, id: SequenceId) {
        self.sequences.remove(&id);
    }

    fn fingerprint(&self) -> u64 {
        saved::fingerprint(&self.gguf, self.model.activation)
    }

    /// Writes a sequence with its cache to `path`; a file that is there is replaced when all is written.
    pub fn save(&self, id: SequenceId, path: &Path) -> Result<()> {
        let sequence = self.sequence(id)?;
        let blocks = sequence.blocks();
        let block = |index: usize| self.schedule.cache().read(&blocks[index], index);
        saved::save(sequence.tokens(), blocks.len(), block, &self.kv, self.fingerprint(), path)
    }

    /// A new sequence of what `path` holds, which the same model must have written.
    pub fn restore(&mut self, path: &Path) -> Result<SequenceId> {
        let n_vocab = self.model.config.n_vocab;
        let (tokens, blocks) = saved::restore(&self.kv, self.fingerprint(), self.n_ctx, n_vocab, path)?;
        let block = |(index, bytes): (usize, &Vec<u8>)| self.schedule.cache().write(bytes, index);
        let blocks = blocks.iter().enumerate().map(block).collect::<Result<_>>()?;
        Ok(self.insert(Sequence::restored(tokens, blocks)))
    }

    /// Continues sequences side by side. Returns the wanted logits, (n, n_vocab), in the requests' order.
    /// `interrupted` is asked before every layer; whenever this fails, the sequences are as they were before.
    pub fn step(&mut self, requests: &[Request], interrupted: &mut dyn FnMut() -> bool) -> Result<Vec<f32>> {
        self.pool.check_process()?;
        self.check(requests)?;
        let mut sequences: Vec<Sequence<KvBlock>> =
            requests.iter().map(|r| self.sequences.remove(&r.sequence).expect("checked")).collect();
        let lengths: Vec<usize> = sequences.iter().map(Sequence::len).collect();
        let result = self.run(requests, &mut sequences, interrupted);
        for ((request, mut sequence), length) in requests.iter().zip(sequences).zip(lengths) {
            if result.is_err() {
                sequence.truncate(length);
            }
            self.sequences.insert(request.sequence, sequence);
        }
        result
    }

    fn check(&self, requests: &[Request]) -> Result<()> {
        for (i, r) in requests.iter().enumerate() {
            let sequence = self.sequence(r.sequence)?;
            if requests[..i].iter().any(|other| other.sequence == r.sequence) {
                return Err(Error::argument(
                    "sequence",
                    format!("{} twice", r.sequence),
                    "each once in a step",
                ));
            }
            if r.tokens.is_empty() {
                return Err(Error::argument("tokens", "none", "at least one"));
            }
            if let Some(bad) = r.tokens.iter().find(|t| **t as usize >= self.model.config.n_vocab) {
                let expected = format!("ids below {}", self.model.config.n_vocab);
                return Err(Error::argument("tokens", format!("id {bad}"), expected));
            }
            let requested = sequence.len() + r.tokens.len();
            if requested > self.n_ctx {
                return Err(Error::ContextOverflow { requested, n_ctx: self.n_ctx });
            }
        }
        Ok(())
    }

    fn run(
        &mut self,
        requests: &[Request],
        sequences: &mut [Sequence<KvBlock>],
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<Vec<f32>> {
        let mut logits = Vec::new();
        let mut done = vec![0; requests.len()];
        loop {
            let mut room = self.batch;
            let mut parts = Vec::new();
            for ((r, sequence), done) in requests.iter().zip(sequences.iter_mut()).zip(&mut done) {
                let n = room.min(r.tokens.len() - *done);
                if n == 0 {
                    continue;
                }
                let (start, end) = (*done, *done + n);
                let first_wanted = r.tokens.len() - r.n_logits.min(r.tokens.len());
                let n_logits = end.saturating_sub(first_wanted.max(start));
                let tokens = &r.tokens[start..end];
                parts.push(schedule::Request { sequence, tokens, n_logits });
                *done = end;
                room -= n;
            }
            if parts.is_empty() {
                return Ok(logits);
            }
            let n_tokens: usize = parts.iter().map(|p| p.tokens.len()).sum();
            let threshold = self.threshold;
            let feed_from = self.feed_from;
            let mut pass = Pass { model: &self.model, threshold, feed_from, interrupted: &mut *interrupted };
            let (schedule, stats) = (&mut self.schedule, &mut self.stats);
            self.pool.enter(|team| -> Result<()> {
                let mut cpu = Cpu::new(self.kernels, team);
                logits.extend(schedule.run(&mut pass, &mut cpu, &mut parts, &mut stats.layers)?);
                stats.bytes_read += cpu.bytes_read();
                stats.tokens += n_tokens as u64;
                Ok(())
            })?;
        }
    }
}

fn unknown(id: SequenceId) -> Error {
    Error::argument(
        "sequence",
        id,
        "one that new_sequence, fork or restore gave out and free hasn't taken back",
    )
}

fn n_ctx(asked: Option<usize>, model: &Model) -> Result<usize> {
    let most = model.max_positions();
    match (asked, most) {
        (Some(0), _) => Err(Error::argument("n_ctx", 0, "at least 1")),
        (Some(n), Some(most)) if n > most => Err(Error::argument(
            "n_ctx",
            n,
            format!("at most {most}, the positions that the model has learned"),
        )),
        (Some(n), _) => Ok(n),
        (None, most) => Ok(model.config.n_ctx_train.min(most.unwrap_or(usize::MAX))),
    }
}

/// What goes to each of the GPUs asked for.
fn plan(
    gguf: &Gguf,
    c: &Config,
    options: &EngineOptions,
    usage: &Usage,
    is_whole: bool,
) -> Result<Vec<DevicePlan>> {
    let Some(first) = options.gpus.first() else { return Ok(Vec::new()) };
    // Where nobody knows what fires, all neurons are alike.
    let alike = || vec![vec![1; c.n_ff]; c.n_layers];
    let counts = options.neuron_counts.clone().unwrap_or_else(alike);
    let demand = demand(gguf, usage, counts)?;
    let budgets: Vec<u64> = options.gpus.iter().map(|gpu| gpu.budget.saturating_sub(gpu.context)).collect();
    let least = if is_whole { c.n_ff } else { first.least };
    let mut plans = match &options.hot_neurons {
        Some(hot) => place_given(&demand, &budgets, hot)?,
        None => place(&demand, &budgets, least)?,
    };
    add_contexts(&mut plans, options.gpus.iter().map(|gpu| gpu.context));
    Ok(plans)
}
