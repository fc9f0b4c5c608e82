//! `_engine.Engine`: the Rust engine behind a lock.

use std::mem::ManuallyDrop;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use numpy::{IntoPyArray, PyArray2, PyArrayMethods, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::backend::Activation;
use crate::engine::{self, EngineOptions, GpuOptions, Request};
use crate::gguf::Gguf;
use crate::quant::DType;
use crate::sparse::Sparsity;
use crate::{Error, Result};

use super::error::enter;
use super::files::metadata;
use super::split::{plan_dict, vectors};

/// How often a long step looks for signals: far below what a person notices, far above what it costs.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(20);

#[pyclass(frozen, module = "powerinfer_rs._engine")]
pub struct Engine {
    /// Not dropped where `has_foreign_gpus`.
    inner: ManuallyDrop<Mutex<engine::Engine>>,
    /// The thread that holds `inner`.
    owner: Mutex<Option<ThreadId>>,
    /// Told when there is no owner any more.
    freed: Condvar,
    /// The process that made it.
    process: u32,
    /// Sequences to forget as soon as `inner` is free: a finaliser may run while this thread holds it.
    to_free: Mutex<Vec<u64>>,
    gguf: Arc<Gguf>,
    info: engine::Info,
}

/// The engine, for as long as this lives.
struct Held<'a> {
    engine: MutexGuard<'a, engine::Engine>,
    of: &'a Engine,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        *lock(&self.of.owner) = None;
        self.of.freed.notify_one();
    }
}

/// A panic in another thread leaves what these locks hold whole: sequences are put back before a step returns, and a
/// step that panicked has lost its own only.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Engine {
    /// Runs `work` with the engine, once it is free, without the GIL.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut engine::Engine) -> Result<T> + Send,
    ) -> PyResult<T> {
        let mut signal = None;
        let result = enter(py, || work(&mut self.hold(&mut signal)?.engine));
        signal.map_or(result, Err)
    }

    fn is_forked(&self) -> bool {
        std::process::id() != self.process
    }

    /// Whether this is another process's, with GPUs in it: the driver's handles are that one's alone.
    fn has_foreign_gpus(&self) -> bool {
        self.is_forked() && !self.info.gpus.is_empty()
    }

    /// Waits for the engine, and looks for signals meanwhile. Python code that runs while this thread holds it, a signal
    /// handler, must not ask again.
    fn hold(&self, signal: &mut Option<PyErr>) -> Result<Held<'_>> {
        let is_forked = self.is_forked();
        if is_forked && self.info.threads > 1 || self.has_foreign_gpus() {
            return Err(forked("the engine was made before this process was forked"));
        }
        let me = std::thread::current().id();
        let mut owner = lock(&self.owner);
        while let Some(other) = *owner {
            if other == me {
                return Err(Error::argument(
                    "engine",
                    "a call while a step of this thread runs",
                    "one after it",
                ));
            }
            if is_forked {
                return Err(forked("the engine was at work when this process was forked"));
            }
            let (waited, timeout) =
                self.freed.wait_timeout(owner, SIGNAL_INTERVAL).unwrap_or_else(PoisonError::into_inner);
            owner = waited;
            if timeout.timed_out() {
                drop(owner);
                *signal = Python::attach(|py| py.check_signals()).err();
                if signal.is_some() {
                    return Err(Error::Interrupted);
                }
                owner = lock(&self.owner);
            }
        }
        *owner = Some(me);
        drop(owner);
        let mut held = Held { engine: lock(&self.inner), of: self };
        for sequence in lock(&self.to_free).drain(..) {
            held.engine.free(sequence);
        }
        Ok(held)
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if self.has_foreign_gpus() {
            return;
        }
        // SAFETY: taken once, and nobody uses it any more.
        let mut inner = Some(unsafe { ManuallyDrop::take(&mut self.inner) });
        // Memory of a device is given back when all of it is at rest: other engines' steps too, whose host may want the GIL.
        Python::try_attach(|py| py.detach(|| drop(inner.take())));
    }
}

fn forked(what: &str) -> Error {
    Error::device("cpu", format_args!("{what}; make one here"))
}

pub fn parse_kv_type(name: &str) -> Result<DType> {
    match name {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "q8_0" => Ok(DType::Q8_0),
        _ => Err(Error::argument("kv_type", format!("{name:?}"), "f32, f16 or q8_0")),
    }
}

#[pymethods]
impl Engine {
    #[new]
    #[pyo3(signature = (path, *, threads=None, n_ctx=None, sparsity="auto", sparse_threshold=None, activation=None, kv_type="f16", interleave=None, count_neurons=false, batch=None, gpus=None, gpu_context=None, feed_from=None, neuron_counts=None, hot_neurons=None, progress=None))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        threads: Option<usize>,
        n_ctx: Option<usize>,
        sparsity: &str,
        sparse_threshold: Option<f32>,
        activation: Option<&str>,
        kv_type: &str,
        interleave: Option<bool>,
        count_neurons: bool,
        batch: Option<usize>,
        gpus: Option<Vec<(usize, u64, u64, usize)>>,
        gpu_context: Option<usize>,
        feed_from: Option<usize>,
        neuron_counts: Option<Vec<PyReadonlyArray1<'_, u64>>>,
        hot_neurons: Option<Vec<PyReadonlyArray1<'_, u32>>>,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let mut stopped = None;
        let gpu = |(number, budget, context, least)| GpuOptions { number, budget, context, least };
        let gpus = gpus.unwrap_or_default().into_iter().map(gpu).collect();
        let neuron_counts = neuron_counts.map(|arrays| vectors(&arrays));
        let hot_neurons = hot_neurons.map(|arrays| vectors(&arrays));
        let inner = enter(py, || {
            let options = EngineOptions {
                threads,
                n_ctx,
                sparsity: Sparsity::parse(sparsity)?,
                sparse_threshold,
                activation: activation.map(Activation::parse).transpose()?,
                kv_type: Some(parse_kv_type(kv_type)?),
                interleave,
                count_neurons,
                batch,
                gpus,
                gpu_context,
                feed_from,
                neuron_counts,
                hot_neurons,
            };
            engine::Engine::open(&path, &options, &mut |done, all| {
                stopped = Python::attach(|py| {
                    let told = progress.as_ref().map_or(Ok(()), |p| p.call1(py, (done, all)).map(drop));
                    told.and_then(|()| py.check_signals()).err()
                });
                if stopped.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })
        });
        if let Some(error) = stopped {
            return Err(error);
        }
        let inner = inner?;
        Ok(Self {
            gguf: inner.gguf().clone(),
            info: inner.info(),
            inner: ManuallyDrop::new(Mutex::new(inner)),
            owner: Mutex::new(None),
            freed: Condvar::new(),
            process: std::process::id(),
            to_free: Mutex::new(Vec::new()),
        })
    }

    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        metadata(py, &self.gguf)
    }

    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let i = &self.info;
        let out = PyDict::new(py);
        out.set_item("path", self.gguf.path())?;
        out.set_item("weight_bytes", self.gguf.n_bytes())?;
        out.set_item("converted_bytes", i.converted_bytes)?;
        out.set_item("interleaved", i.is_interleaved)?;
        out.set_item("architecture", i.architecture)?;
        out.set_item("n_vocab", i.n_vocab)?;
        out.set_item("n_ctx", i.n_ctx)?;
        out.set_item("n_ctx_train", i.n_ctx_train)?;
        out.set_item("n_layers", i.n_layers)?;
        out.set_item("has_predictors", i.has_predictors)?;
        out.set_item("activation", i.activation.name())?;
        out.set_item("sparsity", i.sparsity.name())?;
        out.set_item("sparse_threshold", i.sparse_threshold)?;
        let gpus = i.gpus.iter().map(|gpu| {
            let out = PyDict::new(py);
            out.set_item("number", gpu.number)?;
            out.set_item("name", &gpu.name)?;
            out.set_item("budget", gpu.budget)?;
            out.set_item("used", gpu.used)?;
            out.set_item("plan", plan_dict(py, gpu.plan.clone(), None)?)?;
            Ok(out)
        });
        let names = i.gpus.iter().map(|gpu| format!("cuda:{}", gpu.number));
        let device: Vec<String> = names.collect();
        out.set_item("device", if device.is_empty() { "cpu".to_owned() } else { device.join(",") })?;
        out.set_item("gpus", gpus.collect::<PyResult<Vec<_>>>()?)?;
        out.set_item("unused_gpus", i.unused_gpus.clone())?;
        out.set_item("instruction_set", i.instruction_set)?;
        out.set_item("threads", i.threads)?;
        out.set_item("kv_type", i.kv_type.name().to_lowercase())?;
        out.set_item("kv_bytes_per_token", i.kv_bytes_per_token)?;
        Ok(out)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, kv_bytes) = self.with(py, |engine| Ok((engine.stats()?, engine.kv_bytes())))?;
        let out = PyDict::new(py);
        out.set_item("tokens", stats.tokens)?;
        out.set_item("bytes_read", stats.bytes_read)?;
        out.set_item("density", stats.layers.iter().map(|c| c.density()).collect::<Vec<_>>())?;
        let active = stats.layers.iter().map(|c| c.active as f64 / c.possible.max(1) as f64);
        out.set_item("active", active.collect::<Vec<_>>())?;
        out.set_item("kv_bytes", kv_bytes)?;
        Ok(out)
    }

    fn fired<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let fired = self.with(py, |engine| {
            let layers = engine.stats()?.layers.into_iter();
            layers.map(|counts| counts.fired).collect::<Option<Vec<_>>>().ok_or_else(|| {
                Error::argument("count_neurons", "false when the engine was made", "true, to count neurons")
            })
        })?;
        PyList::new(py, fired.into_iter().map(|counts| counts.into_pyarray(py)))
    }

    fn reset_stats(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, engine::Engine::reset_stats)
    }

    fn new_sequence(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |engine| Ok(engine.new_sequence()))
    }

    fn fork(&self, py: Python<'_>, sequence: u64) -> PyResult<u64> {
        self.with(py, |engine| engine.fork(sequence))
    }

    fn truncate(&self, py: Python<'_>, sequence: u64, length: usize) -> PyResult<()> {
        self.with(py, |engine| engine.truncate(sequence, length))
    }

    fn free(&self, sequence: u64) {
        lock(&self.to_free).push(sequence);
        // At once where nobody is at work; otherwise the next to hold the engine does it.
        if self.has_foreign_gpus() {
            return;
        }
        if let Ok(mut engine) = self.inner.try_lock() {
            lock(&self.to_free).drain(..).for_each(|sequence| engine.free(sequence));
        }
    }

    fn tokens(&self, py: Python<'_>, sequence: u64) -> PyResult<Vec<u32>> {
        self.with(py, |engine| Ok(engine.sequence(sequence)?.tokens().to_vec()))
    }

    fn save(&self, py: Python<'_>, sequence: u64, path: PathBuf) -> PyResult<()> {
        self.with(py, |engine| engine.save(sequence, &path))
    }

    fn restore(&self, py: Python<'_>, path: PathBuf) -> PyResult<u64> {
        self.with(py, |engine| engine.restore(&path))
    }

    fn step<'py>(
        &self,
        py: Python<'py>,
        batch: Vec<(u64, PyReadonlyArray1<'py, u32>, usize)>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let batch: Vec<(u64, Vec<u32>, usize)> = batch
            .into_iter()
            .map(|(sequence, tokens, n)| (sequence, tokens.as_array().to_vec(), n))
            .collect();
        let mut signal = None;
        let logits = self.with(py, |engine| {
            let requests: Vec<Request> = batch
                .iter()
                .map(|(sequence, tokens, n)| Request { sequence: *sequence, tokens, n_logits: *n })
                .collect();
            let mut last = Instant::now();
            let n_vocab = engine.model().config.n_vocab;
            let logits = engine.step(&requests, &mut || {
                if last.elapsed() >= SIGNAL_INTERVAL {
                    last = Instant::now();
                    signal = Python::attach(|py| py.check_signals()).err();
                }
                signal.is_some()
            })?;
            Ok((logits, n_vocab))
        });
        if let Some(signal) = signal {
            return Err(signal);
        }
        let (logits, n_vocab) = logits?;
        let shape = [logits.len() / n_vocab, n_vocab];
        logits.into_pyarray(py).reshape(shape)
    }
}
