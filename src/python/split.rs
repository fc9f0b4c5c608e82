//! Splits of neurons between devices: plans, and PowerInfer's files of them.

use std::path::PathBuf;

use numpy::{IntoPyArray, PyReadonlyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::Result;
use crate::backend::cuda;
use crate::gguf::Gguf;
use crate::model::BATCH;
use crate::model::demand::{Usage, demand};
use crate::sparse::Sparsity;
use crate::sparse::gpu_index::GpuIndex;
use crate::sparse::placement::{DevicePlan, add_contexts, place};

use super::engine::parse_kv_type;
use super::error::enter;

/// Numbers of any memory layout, as a vector.
fn vector<T: numpy::Element + Copy>(array: &PyReadonlyArray1<T>) -> Vec<T> {
    array.as_array().iter().copied().collect()
}

pub fn vectors<T: numpy::Element + Copy>(arrays: &[PyReadonlyArray1<T>]) -> Vec<Vec<T>> {
    arrays.iter().map(vector).collect()
}

fn hot_list<'py>(py: Python<'py>, hot: Vec<Vec<u32>>) -> PyResult<Bound<'py, PyList>> {
    PyList::new(py, hot.into_iter().map(|hot| hot.into_pyarray(py)))
}

pub fn plan_dict<'py>(
    py: Python<'py>,
    plan: DevicePlan,
    coverage: Option<f64>,
) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("layers", (plan.layers.start, plan.layers.end))?;
    out.set_item("n_attention", plan.n_attention)?;
    out.set_item("n_predictors", plan.n_predictors)?;
    out.set_item("head", plan.head)?;
    let bytes = PyDict::new(py);
    for (name, n) in [
        ("overhead", plan.bytes.overhead),
        ("attention", plan.bytes.attention),
        ("cache", plan.bytes.cache),
        ("predictors", plan.bytes.predictors),
        ("head", plan.bytes.head),
        ("neurons", plan.bytes.neurons),
    ] {
        bytes.set_item(name, n)?;
    }
    out.set_item("bytes", bytes)?;
    out.set_item("least", plan.least)?;
    if let Some(coverage) = coverage {
        out.set_item("coverage", coverage)?;
    }
    out.set_item("hot", hot_list(py, plan.hot)?)?;
    Ok(out)
}

/// How a file is run where nobody says: with predictors, or with what they would spare.
fn mode_of(gguf: &Gguf) -> Sparsity {
    if gguf.tensor("blk.0.fc1.weight").is_some() { Sparsity::Predicted } else { Sparsity::Exact }
}

/// Plans devices: see `_engine.pyi`.
#[pyfunction]
#[pyo3(signature = (path, counts, budgets, *, n_ctx, kv_type="f16", context_bytes=0, least=1))]
pub fn plan<'py>(
    py: Python<'py>,
    path: PathBuf,
    counts: Vec<PyReadonlyArray1<'py, u64>>,
    budgets: Vec<u64>,
    n_ctx: usize,
    kv_type: &str,
    context_bytes: u64,
    least: usize,
) -> PyResult<Bound<'py, PyList>> {
    let counts = vectors(&counts);
    let plans = enter(py, || -> Result<Vec<(DevicePlan, f64)>> {
        let gguf = Gguf::open(&path)?;
        let usage = Usage {
            n_ctx,
            n_cached: n_ctx,
            batch: BATCH,
            kv_type: parse_kv_type(kv_type)?,
            mode: mode_of(&gguf),
            feeds: true,
        };
        let demand = demand(&gguf, &usage, counts)?;
        let left: Vec<u64> = budgets.iter().map(|budget| budget.saturating_sub(context_bytes)).collect();
        let mut plans = place(&demand, &left, least)?;
        add_contexts(&mut plans, budgets.iter().map(|_| context_bytes));
        let with_coverage = |plan: DevicePlan| {
            let coverage = plan.coverage(&demand);
            (plan, coverage)
        };
        Ok(plans.into_iter().map(with_coverage).collect())
    })?;
    let dicts: Vec<_> = plans
        .into_iter()
        .map(|(plan, coverage)| plan_dict(py, plan, Some(coverage)))
        .collect::<PyResult<_>>()?;
    PyList::new(py, dicts)
}

/// The GPUs that the driver knows: see `_engine.pyi`.
#[pyfunction]
pub fn gpus(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let dicts = enter(py, cuda::devices)?.into_iter().map(|device| {
        let out = PyDict::new(py);
        out.set_item("number", device.number)?;
        out.set_item("name", device.name)?;
        out.set_item("total", device.total)?;
        out.set_item("free", device.free)?;
        Ok(out)
    });
    PyList::new(py, dicts.collect::<PyResult<Vec<_>>>()?)
}

/// Measures a GPU: see `_engine.pyi`.
#[pyfunction]
#[pyo3(signature = (number=0, n_bytes=67108864))]
pub fn measure_gpu(
    py: Python<'_>,
    number: usize,
    n_bytes: usize,
) -> PyResult<Vec<(String, f64, &'static str)>> {
    let measures = enter(py, || cuda::measure::measure(number, n_bytes))?;
    Ok(measures.into_iter().map(|m| (m.what, m.value, m.unit)).collect())
}

/// Reads a `.gpuidx`: see `_engine.pyi`.
#[pyfunction]
pub fn read_gpu_index(
    py: Python<'_>,
    path: PathBuf,
    n_layers: usize,
    n_ff: usize,
) -> PyResult<Bound<'_, PyDict>> {
    let index = enter(py, || GpuIndex::read(&path, n_layers, n_ff))?;
    let out = PyDict::new(py);
    out.set_item("capacity", index.capacity)?;
    out.set_item("hot", hot_list(py, index.hot)?)?;
    Ok(out)
}

/// Writes a `.gpuidx`: see `_engine.pyi`.
#[pyfunction]
pub fn write_gpu_index(
    py: Python<'_>,
    path: PathBuf,
    hot: Vec<PyReadonlyArray1<u32>>,
    n_ff: usize,
    capacity: u64,
) -> PyResult<()> {
    let hot = vectors(&hot);
    enter(py, || GpuIndex { capacity, n_ff, hot }.write(&path))
}
