//! `_engine.Writer`: GGUF files written a few rows at a time.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use pyo3::types::PyList;

use crate::backend::cpu::pool::default_threads;
use crate::gguf::write::TensorSpec;
use crate::gguf::{Array, Magic, Value, ValueKind, write};
use crate::quant::DType;
use crate::quant::encode::recode;
use crate::{Error, Result};

use super::error::{enter, to_python};
use super::files::Reader;

/// A key to write: its name, its kind and value; without these it is one to leave out.
type Key<'py> = (String, Option<(String, Bound<'py, PyAny>)>);

#[pyclass(frozen, module = "powerinfer_rs._engine")]
pub struct Writer {
    path: PathBuf,
    /// None once it is finished or given up.
    inner: Mutex<Option<write::Writer>>,
    threads: rayon::ThreadPool,
}

pub fn parse_dtype(name: &str) -> Result<DType> {
    DType::ALL.iter().copied().find(|t| t.name().eq_ignore_ascii_case(name)).ok_or_else(|| {
        let known = DType::ALL.iter().map(|t| t.name()).collect::<Vec<_>>().join(", ");
        Error::argument("dtype", format!("{name:?}"), format!("one of {known}"))
    })
}

/// A value of Python's as one of `kind`: a scalar's name, or `array:NAME`.
fn value(py: Python<'_>, name: &str, kind: &str, given: &Bound<'_, PyAny>) -> PyResult<Value> {
    let bad = |expected: &str| {
        let got = given.repr().map_or_else(|_| String::new(), |r| r.to_string().chars().take(80).collect());
        let expected = format!("{name}: a value of kind {expected}");
        to_python(py, Error::argument("keys", got, expected))
    };
    let unknown = || to_python(py, Error::argument("keys", format!("kind {kind:?}"), "one of GGUF's kinds"));
    if let Some(of) = kind.strip_prefix("array:") {
        let of_kind = ValueKind::from_name(of).ok_or_else(unknown)?;
        if of_kind == ValueKind::String {
            return Ok(Value::Array(Array::Strings(given.extract().map_err(|_| bad(kind))?)));
        }
        let list = given.cast::<PyList>().map_err(|_| bad(kind))?;
        let mut bytes = Vec::with_capacity(list.len() * of_kind.min_bytes());
        let mut scratch = Vec::new();
        for item in list {
            scratch.clear();
            value(py, name, of, &item)?.write(&mut scratch);
            // A scalar's kind, four bytes, stands before it.
            bytes.extend(&scratch[4..]);
        }
        return Ok(Value::Array(Array::Scalars { kind: of_kind, bytes }));
    }
    let wrong = |_: PyErr| bad(kind);
    Ok(match ValueKind::from_name(kind).ok_or_else(unknown)? {
        ValueKind::U8 => Value::U8(given.extract().map_err(wrong)?),
        ValueKind::I8 => Value::I8(given.extract().map_err(wrong)?),
        ValueKind::U16 => Value::U16(given.extract().map_err(wrong)?),
        ValueKind::I16 => Value::I16(given.extract().map_err(wrong)?),
        ValueKind::U32 => Value::U32(given.extract().map_err(wrong)?),
        ValueKind::I32 => Value::I32(given.extract().map_err(wrong)?),
        ValueKind::U64 => Value::U64(given.extract().map_err(wrong)?),
        ValueKind::I64 => Value::I64(given.extract().map_err(wrong)?),
        ValueKind::F32 => Value::F32(given.extract().map_err(wrong)?),
        ValueKind::F64 => Value::F64(given.extract().map_err(wrong)?),
        ValueKind::Bool => Value::Bool(given.extract().map_err(wrong)?),
        ValueKind::String => Value::String(given.extract().map_err(wrong)?),
        ValueKind::Array => return Err(unknown()),
    })
}

/// The source's keys in their order, each replaced or left out where `given` says so, then the others of `given`.
fn all_keys(source: Option<&Reader>, given: Vec<(String, Option<Value>)>) -> Vec<(String, Value)> {
    let of_source = source.map_or(&[][..], |reader| reader.gguf.keys());
    let mut out = Vec::new();
    let mut rest = given;
    for (name, value) in of_source {
        match rest.iter().position(|(other, _)| other == name) {
            Some(at) => out.extend(rest.remove(at).1.map(|value| (name.clone(), value))),
            None => out.push((name.clone(), value.clone())),
        }
    }
    out.extend(rest.into_iter().filter_map(|(name, value)| Some((name, value?))));
    out
}

fn spec(name: String, dtype: &str, dims: Vec<usize>) -> Result<TensorSpec> {
    let dtype = parse_dtype(dtype)?;
    let n = dims.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim)).unwrap_or(0);
    if dims.is_empty()
        || dims.len() > 4
        || n == 0
        || n > 1 << 48
        || !dims[0].is_multiple_of(dtype.block_len())
    {
        let expected =
            format!("1 to 4 of them, rows of {} a multiple of {}", dtype.name(), dtype.block_len());
        return Err(Error::argument("dims", format!("{dims:?} of {name}"), expected));
    }
    Ok(TensorSpec { name, dtype, dims })
}

#[pymethods]
impl Writer {
    #[new]
    #[pyo3(signature = (path, keys, tensors, *, source=None, power_infer=false, threads=None))]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        keys: Vec<Key<'_>>,
        tensors: Vec<(String, String, Vec<usize>)>,
        source: Option<PyRef<'_, Reader>>,
        power_infer: bool,
        threads: Option<usize>,
    ) -> PyResult<Self> {
        let given = keys.into_iter().map(|(name, given)| {
            let value = given.map(|(kind, given)| value(py, &name, &kind, &given)).transpose()?;
            Ok((name, value))
        });
        let keys = all_keys(source.as_deref(), given.collect::<PyResult<Vec<_>>>()?);
        let (inner, threads) = enter(py, || {
            let specs = tensors.into_iter().map(|(name, dtype, dims)| spec(name, &dtype, dims));
            let specs = specs.collect::<Result<Vec<_>>>()?;
            let keys: Vec<(&str, &Value)> = keys.iter().map(|(name, value)| (name.as_str(), value)).collect();
            let threads = rayon::ThreadPoolBuilder::new()
                .num_threads(threads.unwrap_or_else(default_threads).clamp(1, 1024))
                .build()
                .map_err(|error| Error::device("cpu", error))?;
            let magic = if power_infer { Magic::PowerInfer } else { Magic::Gguf };
            Ok((write::Writer::create(&path, magic, &keys, specs)?, threads))
        })?;
        Ok(Self { path, inner: Mutex::new(Some(inner)), threads })
    }

    #[pyo3(signature = (rows, dtype, importance=None))]
    fn write(
        &self,
        py: Python<'_>,
        rows: PyReadonlyArray1<'_, u8>,
        dtype: &str,
        importance: Option<PyReadonlyArray1<'_, f32>>,
    ) -> PyResult<()> {
        let (Ok(rows), Ok(importance)) =
            (rows.as_slice(), importance.as_ref().map(|i| i.as_slice()).transpose())
        else {
            return Err(to_python(py, Error::argument("rows", "an array with gaps", "one without")));
        };
        enter(py, || self.put(rows, parse_dtype(dtype)?, importance))
    }

    fn finish(&self, py: Python<'_>) -> PyResult<()> {
        enter(py, || {
            let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some((spec, left)) = inner.as_ref().and_then(|writer| writer.current()) {
                let got = format!("{left} bytes of {} still to come", spec.name);
                return Err(Error::argument("finish", got, "all tensors written"));
            }
            inner.take().map_or(Ok(()), write::Writer::finish)
        })
    }

    fn abandon(&self) {
        drop(self.inner.lock().unwrap_or_else(PoisonError::into_inner).take());
    }
}

impl Writer {
    fn put(&self, rows: &[u8], dtype: DType, importance: Option<&[f32]>) -> Result<()> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(writer) = inner.as_mut() else {
            return Err(Error::argument("rows", "some for a file that is finished", "none"));
        };
        let Some((spec, left)) = writer.current() else {
            return Err(Error::argument("rows", "more", "none: all tensors are written"));
        };
        let (to, n_cols) = (spec.dtype, spec.dims[0]);
        let row = dtype.row_bytes(n_cols);
        let n_rows = rows.len() / row.max(1);
        let is_whole = n_cols.is_multiple_of(dtype.block_len()) && rows.len() == n_rows * row;
        if !is_whole || n_rows * to.row_bytes(n_cols) > left {
            let got = format!("{} bytes of {} for {}", rows.len(), dtype.name(), spec.name);
            let expected = format!("whole rows of {n_cols} values, no more than are still to come");
            return Err(Error::argument("rows", got, expected));
        }
        if importance.is_some_and(|importance| importance.len() != n_cols) {
            let expected = format!("{n_cols}, one for each value of a row of {}", spec.name);
            return Err(Error::argument("importance", "another number of values", expected));
        }
        if dtype == to {
            return writer.put(rows);
        }
        if !to.can_encode() {
            return Err(Error::argument("dtype", to.name(), "a type that can be written"));
        }
        let encoded = self.threads.install(|| recode(rows, dtype, to, n_cols, importance));
        let encoded = encoded.map_err(|value| {
            let expected = format!("numbers that {} can hold", to.name());
            Error::format(&self.path, format!("tensor {}", spec.name), value, expected)
        })?;
        writer.put(&encoded)
    }
}
