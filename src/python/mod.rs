//! The Python module `powerinfer_rs._engine`: conversions only.

mod engine;
mod error;
mod files;
mod split;
mod writer;

use pyo3::prelude::*;

#[pymodule]
fn _engine(m: &Bound<'_, PyModule>) -> PyResult<()> {
    // Where NumPy can't be had, or Ctrl-C stops its being loaded, this is an error; later, in `numpy`, a panic.
    for name in ["numpy", "numpy.lib"] {
        m.py().import(name)?;
    }
    numpy::PyArray1::<u8>::zeros(m.py(), 0, false);
    m.add_class::<engine::Engine>()?;
    m.add_class::<files::Reader>()?;
    m.add_class::<writer::Writer>()?;
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
