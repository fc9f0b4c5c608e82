//! `_engine.Engine`: the Rust engine behind a lock.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use numpy::{PyArray2, PyArrayMethods, PyReadonlyArray1, ToPyArray};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::backend::Activation;
use crate::engine::{self, EngineOptions, Request};
use crate::gguf::Gguf;
use crate::quant::DType;
use crate::sparse::Sparsity;
use crate::{Error, Result};

use super::error::enter;
use super::files::metadata;

/// How often a long step looks for signals: far below what a person notices, far above what it costs.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(20);

#[pyclass(frozen, module = "powerinfer_rs._engine")]
pub struct Engine {
    inner: Mutex<engine::Engine>,
    gguf: Arc<Gguf>,
    info: engine::Info,
}

impl Engine {
    /// A panic in another thread leaves the engine whole: sequences are put back before a step returns, and a step
    /// that panicked has lost its own only.
    fn lock(&self) -> MutexGuard<'_, engine::Engine> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn parse_kv_type(name: &str) -> Result<DType> {
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
    #[pyo3(signature = (path, *, threads=None, n_ctx=None, sparsity="auto", sparse_threshold=None, activation=None, kv_type="f16", progress=None))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        threads: Option<usize>,
        n_ctx: Option<usize>,
        sparsity: &str,
        sparse_threshold: Option<f32>,
        activation: Option<&str>,
        kv_type: &str,
        progress: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let mut stopped = None;
        let inner = enter(py, || {
            let options = EngineOptions {
                threads,
                n_ctx,
                sparsity: Sparsity::parse(sparsity)?,
                sparse_threshold,
                activation: activation.map(Activation::parse).transpose()?,
                kv_type: Some(parse_kv_type(kv_type)?),
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
        Ok(Self { gguf: inner.gguf().clone(), info: inner.info(), inner: Mutex::new(inner) })
    }

    fn metadata<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        metadata(py, &self.gguf)
    }

    fn info<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let i = &self.info;
        let out = PyDict::new(py);
        out.set_item("path", self.gguf.path())?;
        out.set_item("weight_bytes", self.gguf.n_bytes())?;
        out.set_item("architecture", i.architecture)?;
        out.set_item("n_vocab", i.n_vocab)?;
        out.set_item("n_ctx", i.n_ctx)?;
        out.set_item("n_ctx_train", i.n_ctx_train)?;
        out.set_item("n_layers", i.n_layers)?;
        out.set_item("has_predictors", i.has_predictors)?;
        out.set_item("activation", i.activation.name())?;
        out.set_item("sparsity", i.sparsity.name())?;
        out.set_item("sparse_threshold", i.sparse_threshold)?;
        out.set_item("device", "cpu")?;
        out.set_item("instruction_set", i.instruction_set)?;
        out.set_item("threads", i.threads)?;
        out.set_item("kv_type", i.kv_type.name().to_lowercase())?;
        out.set_item("kv_bytes_per_token", i.kv_bytes_per_token)?;
        Ok(out)
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (stats, kv_bytes) = py.detach(|| {
            let engine = self.lock();
            (engine.stats().clone(), engine.kv_bytes())
        });
        let out = PyDict::new(py);
        out.set_item("tokens", stats.tokens)?;
        out.set_item("bytes_read", stats.bytes_read)?;
        out.set_item("density", stats.layers.iter().map(|c| c.density()).collect::<Vec<_>>())?;
        let active = stats.layers.iter().map(|c| c.active as f64 / c.possible.max(1) as f64);
        out.set_item("active", active.collect::<Vec<_>>())?;
        out.set_item("kv_bytes", kv_bytes)?;
        Ok(out)
    }

    fn reset_stats(&self, py: Python<'_>) {
        py.detach(|| self.lock().reset_stats());
    }

    fn new_sequence(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.lock().new_sequence())
    }

    fn fork(&self, py: Python<'_>, sequence: u64) -> PyResult<u64> {
        enter(py, || self.lock().fork(sequence))
    }

    fn truncate(&self, py: Python<'_>, sequence: u64, length: usize) -> PyResult<()> {
        enter(py, || self.lock().truncate(sequence, length))
    }

    fn free(&self, py: Python<'_>, sequence: u64) {
        py.detach(|| self.lock().free(sequence));
    }

    fn tokens(&self, py: Python<'_>, sequence: u64) -> PyResult<Vec<u32>> {
        enter(py, || Ok(self.lock().sequence(sequence)?.tokens().to_vec()))
    }

    fn save(&self, py: Python<'_>, sequence: u64, path: PathBuf) -> PyResult<()> {
        enter(py, || self.lock().save(sequence, &path))
    }

    fn restore(&self, py: Python<'_>, path: PathBuf) -> PyResult<u64> {
        enter(py, || self.lock().restore(&path))
    }

    fn step<'py>(
        &self,
        py: Python<'py>,
        batch: Vec<(u64, PyReadonlyArray1<'py, u32>, usize)>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let batch: Vec<(u64, Vec<u32>, usize)> = batch
            .into_iter()
            .map(|(sequence, tokens, n_logits)| Ok((sequence, tokens.as_array().to_vec(), n_logits)))
            .collect::<PyResult<_>>()?;
        let mut signal = None;
        let logits = enter(py, || {
            let requests: Vec<Request> = batch
                .iter()
                .map(|(sequence, tokens, n)| Request { sequence: *sequence, tokens, n_logits: *n })
                .collect();
            let mut engine = self.lock();
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
        logits.to_pyarray(py).reshape([logits.len() / n_vocab, n_vocab])
    }
}
