//! What needs no engine: a look into a file, and the machine's figures.

use std::path::PathBuf;

use numpy::{IntoPyArray, PyArray1};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::Error;
use crate::backend::cpu::bandwidth;
use crate::backend::cpu::kernels;
use crate::backend::cpu::pool::{Pool, default_threads};
use crate::gguf::{Array, Gguf, Magic, Value};
use crate::quant::decode;

use super::error::enter;

fn scalar(py: Python<'_>, value: &Value) -> PyResult<Py<PyAny>> {
    Ok(match value {
        Value::U8(v) => v.into_pyobject(py)?.into_any().unbind(),
        Value::I8(v) => v.into_pyobject(py)?.into_any().unbind(),
        Value::U16(v) => v.into_pyobject(py)?.into_any().unbind(),
        Value::I16(v) => v.into_pyobject(py)?.into_any().unbind(),
        Value::U32(v) => v.into_pyobject(py)?.into_any().unbind(),
        Value::I32(v) => v.into_pyobject(py)?.into_any().unbind(),
        Value::U64(v) => v.into_pyobject(py)?.into_any().unbind(),
        Value::I64(v) => v.into_pyobject(py)?.into_any().unbind(),
        Value::F32(v) => v.into_pyobject(py)?.into_any().unbind(),
        Value::F64(v) => v.into_pyobject(py)?.into_any().unbind(),
        Value::Bool(v) => v.into_pyobject(py)?.to_owned().into_any().unbind(),
        Value::String(v) => v.into_pyobject(py)?.into_any().unbind(),
        Value::Array(v) => array(py, v)?,
    })
}

fn array(py: Python<'_>, array_of: &Array) -> PyResult<Py<PyAny>> {
    let list = match array_of {
        Array::Strings(v) => PyList::new(py, v)?,
        Array::Arrays(v) => {
            let items: Vec<_> = v.iter().map(|a| array(py, a)).collect::<PyResult<_>>()?;
            PyList::new(py, items)?
        }
        Array::Scalars { kind, bytes } => {
            let values = bytes.chunks_exact(kind.min_bytes()).filter_map(|b| Value::scalar(*kind, b));
            let items: Vec<_> = values.map(|v| scalar(py, &v)).collect::<PyResult<_>>()?;
            PyList::new(py, items)?
        }
    };
    Ok(list.into_any().unbind())
}

/// A file's keys as a dict.
pub fn metadata<'py>(py: Python<'py>, gguf: &Gguf) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    for (name, value) in gguf.keys() {
        out.set_item(name, scalar(py, value)?)?;
    }
    Ok(out)
}

/// The header of a file: see `_engine.pyi`.
#[pyfunction]
pub fn inspect(py: Python<'_>, path: PathBuf) -> PyResult<Bound<'_, PyDict>> {
    header(py, &enter(py, || Gguf::open(&path))?)
}

fn header<'py>(py: Python<'py>, gguf: &Gguf) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    out.set_item("magic", if gguf.magic() == Magic::Gguf { "GGUF" } else { "PWRI" })?;
    out.set_item("version", gguf.version())?;
    out.set_item("file_bytes", gguf.n_bytes())?;
    out.set_item("metadata", metadata(py, gguf)?)?;
    let tensors: Vec<_> =
        gguf.tensors().map(|t| (t.name.clone(), t.dtype.name(), t.dims.clone(), t.range.len())).collect();
    out.set_item("tensors", tensors)?;
    Ok(out)
}

/// A file, open for reading tensors as they are: see `_engine.pyi`.
#[pyclass(frozen, module = "powerinfer_rs._engine")]
pub struct Reader {
    pub gguf: Gguf,
}

#[pymethods]
impl Reader {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        Ok(Self { gguf: enter(py, || Gguf::open(&path))? })
    }

    fn header<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        header(py, &self.gguf)
    }

    fn rows<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        start: usize,
        end: usize,
    ) -> PyResult<Bound<'py, PyArray1<u8>>> {
        let rows = enter(py, || {
            let Some(matrix) = self.gguf.matrix(name) else {
                return Err(Error::argument("name", format!("{name:?}"), "a tensor of the file"));
            };
            if start > end || end > matrix.n_rows() {
                let expected = format!("rows from 0 to {}", matrix.n_rows());
                return Err(Error::argument("rows", format!("{start} to {end}"), expected));
            }
            let n = matrix.dtype().row_bytes(matrix.n_cols());
            Ok(matrix.bytes()[start * n..end * n].to_vec())
        })?;
        Ok(rows.into_pyarray(py))
    }
}

/// One tensor, decoded: see `_engine.pyi`.
#[pyfunction]
pub fn decode_tensor(py: Python<'_>, path: PathBuf, name: &str) -> PyResult<Py<PyArray1<f32>>> {
    let values = enter(py, || {
        let gguf = Gguf::open(&path)?;
        let Some(matrix) = gguf.matrix(name) else {
            return Err(Error::argument("name", format!("{name:?}"), "a tensor of the file"));
        };
        let mut values = vec![0.0; matrix.n_rows() * matrix.n_cols()];
        decode(matrix.dtype(), matrix.bytes(), &mut values);
        Ok(values)
    })?;
    Ok(values.into_pyarray(py).unbind())
}

/// Streaming read bandwidth in bytes a second: see `_engine.pyi`.
#[pyfunction]
#[pyo3(signature = (threads=None, n_bytes=536870912, repeats=5))]
pub fn streaming_read(
    py: Python<'_>,
    threads: Option<usize>,
    n_bytes: usize,
    repeats: usize,
) -> PyResult<f64> {
    enter(py, || {
        let pool = Pool::new(threads.unwrap_or_else(default_threads))?;
        Ok(bandwidth::streaming_read(&pool, n_bytes.min(1 << 33), repeats.min(1000)))
    })
}

/// The instruction sets that this processor has kernels for: see `_engine.pyi`.
#[pyfunction]
pub fn instruction_sets() -> Vec<&'static str> {
    kernels::available().iter().map(|k| k.name).collect()
}
