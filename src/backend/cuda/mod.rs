//! NVIDIA GPUs, through the driver alone: PTX comes with this crate and the library is looked for at run time.
//!
//! `launch` touches the driver, and nothing else does; `module` knows the kernels by name; `gpu` is a device at work with
//! the verbs of [`Backend`](super::Backend), `ffn` what it does with a feed-forward layer's neurons; `mailbox` hands over
//! to the host and back; `cache` has the blocks of the KV cache. `form` and `workspace` are plain arithmetic: what
//! weights and buffers weigh. Uses `error`, `quant` and what `backend` says a device must do.

pub mod cache;
pub mod ffn;
pub mod form;
mod gpu;
pub mod launch;
pub mod mailbox;
mod module;
pub mod workspace;

pub use gpu::{Buffer, DeviceLinear, DeviceNorm, Gpu, Step};

use crate::{Error, Result};

use launch::Stream;

/// A device that the driver knows.
#[derive(Clone, Debug)]
pub struct Device {
    pub number: usize,
    pub name: String,
    /// Bytes of its memory.
    pub total: u64,
    /// Bytes that nobody has taken.
    pub free: u64,
}

/// The devices there are; none where there is no driver.
pub fn devices() -> Result<Vec<Device>> {
    if !launch::has_driver() {
        return Ok(Vec::new());
    }
    (0..launch::device_count()?).map(device).collect()
}

/// Device `number`; an error where there is none.
pub fn device(number: usize) -> Result<Device> {
    if !launch::has_driver() {
        let reason = "no NVIDIA driver (libcuda.so) on this machine".to_owned();
        return Err(Error::Device { device: format!("cuda:{number}"), reason });
    }
    let stream = Stream::new(number)?;
    let context = stream.context();
    let failed = |doing: &str| launch::failed(number, doing);
    let name = context.name().map_err(failed("asking its name"))?;
    let (free, total) = context.mem_get_info().map_err(failed("asking for its memory"))?;
    Ok(Device { number, name, total: total as u64, free: free as u64 })
}
