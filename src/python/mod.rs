//! The Python module `powerinfer_rs._engine`: conversions only.

mod engine;
mod error;
mod files;
mod split;

use pyo3::prelude::*;

#[pymodule]
fn _engine(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<engine::Engine>()?;
    m.add_function(wrap_pyfunction!(files::inspect, m)?)?;
    m.add_function(wrap_pyfunction!(files::decode_tensor, m)?)?;
    m.add_function(wrap_pyfunction!(files::streaming_read, m)?)?;
    m.add_function(wrap_pyfunction!(files::instruction_sets, m)?)?;
    m.add_function(wrap_pyfunction!(split::plan, m)?)?;
    m.add_function(wrap_pyfunction!(split::gpus, m)?)?;
    m.add_function(wrap_pyfunction!(split::measure_gpu, m)?)?;
    m.add_function(wrap_pyfunction!(split::read_gpu_index, m)?)?;
    m.add_function(wrap_pyfunction!(split::write_gpu_index, m)?)?;
    error::register(m)
}
