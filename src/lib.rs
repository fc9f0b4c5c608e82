//! Inference of ReLU-sparse language models, from a PowerInfer or ordinary GGUF file to logits.
//!
//! The rooms depend on each other in one direction:
//! `error <- {files, quant} <- {gguf, backend} <- sparse <- model <- engine <- python`.

pub mod backend;
pub mod engine;
pub mod error;
mod files;
pub mod gguf;
pub mod model;
pub mod quant;
pub mod sparse;

#[cfg(feature = "python")]
mod python;

pub use engine::{Engine, EngineOptions};
pub use error::{Error, Result};
