//! The Python classes of the crate's errors, and the one way into the engine.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyFileNotFoundError, PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

use crate::Error;

create_exception!(powerinfer_rs, PowerInferError, PyException, "Base of all errors of this package.");
create_exception!(powerinfer_rs, ModelFormatError, PowerInferError, "A file that breaks its format.");
create_exception!(powerinfer_rs, UnsupportedModelError, PowerInferError, "A sound file of an unknown kind.");
create_exception!(
    powerinfer_rs,
    ContextOverflowError,
    PowerInferError,
    "More tokens than the context holds."
);
create_exception!(powerinfer_rs, DeviceError, PowerInferError, "A device that can't be used.");
create_exception!(powerinfer_rs, InternalError, PowerInferError, "A bug in this package.");

/// Classes that are also built-in ones, made when first asked for: `create_exception!` takes one base.
fn mixed<'py>(
    py: Python<'py>,
    cell: &'static PyOnceLock<Py<PyType>>,
    name: &str,
    doc: &str,
    builtin: Bound<'py, PyType>,
) -> PyResult<Bound<'py, PyType>> {
    let class = cell.get_or_try_init(py, || -> PyResult<Py<PyType>> {
        let bases = PyTuple::new(py, [py.get_type::<PowerInferError>(), builtin])?;
        let body = PyDict::new(py);
        body.set_item("__module__", "powerinfer_rs")?;
        body.set_item("__doc__", doc)?;
        let class = py.get_type::<PyType>().call1((name, bases, body))?;
        Ok(class.cast_into::<PyType>()?.unbind())
    })?;
    Ok(class.bind(py).clone())
}

fn argument_error(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let doc = "An argument that can't be; also a ValueError.";
    mixed(py, &CLASS, "InvalidArgumentError", doc, py.get_type::<PyValueError>())
}

fn not_found_error(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let doc = "A file that isn't there; also a FileNotFoundError.";
    mixed(py, &CLASS, "ModelNotFoundError", doc, py.get_type::<PyFileNotFoundError>())
}

fn file_error(py: Python<'_>) -> PyResult<Bound<'_, PyType>> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let doc = "A file that can't be read or written; also an OSError.";
    mixed(py, &CLASS, "ModelFileError", doc, py.get_type::<PyOSError>())
}

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    let py = m.py();
    m.add("PowerInferError", py.get_type::<PowerInferError>())?;
    m.add("ModelFormatError", py.get_type::<ModelFormatError>())?;
    m.add("UnsupportedModelError", py.get_type::<UnsupportedModelError>())?;
    m.add("ContextOverflowError", py.get_type::<ContextOverflowError>())?;
    m.add("DeviceError", py.get_type::<DeviceError>())?;
    m.add("InternalError", py.get_type::<InternalError>())?;
    m.add("InvalidArgumentError", argument_error(py)?)?;
    m.add("ModelNotFoundError", not_found_error(py)?)?;
    m.add("ModelFileError", file_error(py)?)
}

/// The Python error for one of the crate's.
pub fn to_python(py: Python<'_>, error: Error) -> PyErr {
    let message = error.to_string();
    let class = match &error {
        Error::Io { source, .. } if source.kind() == std::io::ErrorKind::NotFound => not_found_error(py),
        Error::Io { .. } => file_error(py),
        Error::Format { .. } | Error::MissingTensor { .. } => Ok(py.get_type::<ModelFormatError>()),
        Error::Unsupported { .. } => Ok(py.get_type::<UnsupportedModelError>()),
        Error::Argument { .. } => argument_error(py),
        Error::ContextOverflow { .. } => Ok(py.get_type::<ContextOverflowError>()),
        Error::Device { .. } => Ok(py.get_type::<DeviceError>()),
        Error::Interrupted => return pyo3::exceptions::PyKeyboardInterrupt::new_err(()),
    };
    match class {
        Ok(class) => PyErr::from_type(class, message),
        Err(error) => error,
    }
}

/// Runs `work` without the GIL. Its errors become Python's, and so does a panic, which is a bug.
pub fn enter<T: Send>(py: Python<'_>, work: impl FnOnce() -> crate::Result<T> + Send) -> PyResult<T> {
    match py.detach(|| catch_unwind(AssertUnwindSafe(work))) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(to_python(py, error)),
        Err(panic) => {
            let said = panic.downcast_ref::<String>().map(String::as_str);
            let said = said.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
            // The binding looks for the driver's functions as they are called.
            if said.starts_with("Missing symbol cu") {
                let reason = format!("the NVIDIA driver (libcuda.so) is too old or none: {said}");
                return Err(to_python(py, Error::device("cuda", reason)));
            }
            Err(InternalError::new_err(format!("internal error, please report it: {said}")))
        }
    }
}
