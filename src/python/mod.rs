//! The Python module `powerinfer_rs._engine`: conversions only.

mod engine;
mod error;
mod files;

use pyo3::prelude::*;

#[pymodule]
fn _engine(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<engine::Engine>()?;
    m.add_function(wrap_pyfunction!(files::inspect, m)?)?;
    m.add_function(wrap_pyfunction!(files::decode_tensor, m)?)?;
    m.add_function(wrap_pyfunction!(files::streaming_read, m)?)?;
    m.add_function(wrap_pyfunction!(files::instruction_sets, m)?)?;
    error::register(m)
}
