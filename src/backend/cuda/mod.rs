//! NVIDIA GPUs, through the driver alone: PTX comes with this crate and the library is looked for at run time.
//!
//! `launch` touches the driver, and nothing else does; `module` knows the kernels by name; `gpu` is a device at work with
//! the verbs of [`Backend`](super::Backend), `ffn` what it does with a feed-forward layer's neurons; `mailbox` hands over
//! to the host and back, `feed` brings the host's neurons here in pieces, laid out by `piece`; `cache` has the blocks of the KV cache. `form` and `workspace` are plain arithmetic: what
//! weights and buffers weigh; `measure` times a device. Uses `error`, `quant` and what `backend` says a device must do.

pub mod cache;
pub mod feed;
pub mod ffn;
pub mod form;
mod gpu;
pub mod launch;
pub mod mailbox;
pub mod measure;
mod module;
pub mod piece;
pub mod workspace;

pub use gpu::{Buffer, DeviceLinear, DeviceNorm, Gpu, Step};

use crate::Result;

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

/// The devices that can be used; none where there is no driver. One that can't is no reason to leave others alone.
pub fn devices() -> Result<Vec<Device>> {
    if !launch::has_driver() {
        return Ok(Vec::new());
    }
    let asked: Vec<Result<Device>> = (0..launch::device_count()?).map(device).collect();
    if asked.iter().any(Result::is_ok) {
        return Ok(asked.into_iter().flatten().collect());
    }
    asked.into_iter().collect()
}

/// Device `number`; an error where there is none.
pub fn device(number: usize) -> Result<Device> {
    let stream = Stream::new(number)?;
    let (free, total) = stream.memory()?;
    Ok(Device { number, name: stream.name()?, total, free })
}
