//! A model: its numbers, its weights, its one forward pass, and the sequences it continues.
//!
//! `arch` is the table of architectures, `config` reads keys, `weights` binds tensors, `layout` says how they lie in
//! memory, `demand` what they weigh, `rope` and `kv_cache` are what they say. `forward` is one layer on any device, `devices`
//! what GPUs hold of a model, `cache` where their keys and values are, `order` who does what in which order, `schedule` a
//! step over host and devices. Uses every room below it: `gguf`, `quant`, `backend`, `sparse`.

pub mod arch;
pub mod cache;
pub mod config;
pub mod demand;
pub mod devices;
pub mod forward;
pub mod kv_cache;
mod layout;
mod order;
mod rope;
pub mod schedule;
mod weights;

use std::ops::ControlFlow;

use crate::backend::{Activation, Linear, Norm};
use crate::quant::Matrix;
use crate::sparse::Sparsity;
use crate::sparse::ffn::Ffn;

pub use config::Config;

/// The most tokens that go through the model side by side.
pub const BATCH: usize = 512;

/// Told of layers loaded and layers in all; says whether to go on.
pub type Progress<'a> = dyn FnMut(usize, usize) -> ControlFlow<()> + 'a;

/// What the caller may decide about a model.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// None: by the file.
    pub activation: Option<Activation>,
    /// None: by the file.
    pub sparsity: Option<Sparsity>,
    /// Whether weights are copied into large pages, rows side by side where all are read; none: where that is known to
    /// take no more than half of the free memory.
    pub interleave: Option<bool>,
}

pub struct Model {
    pub config: Config,
    /// (n_vocab, n_embd)
    pub token_embd: Matrix,
    /// Learned positions, (n_positions, n_embd), and the row of the first.
    pub positions: Option<(Matrix, usize)>,
    pub layers: Vec<Layer>,
    pub output_norm: Norm,
    /// (n_vocab, n_embd)
    pub output: Linear,
    pub activation: Activation,
    pub sparsity: Sparsity,
    pub has_predictors: bool,
    /// Memory that weights take beside the mapped file.
    pub converted_bytes: usize,
    /// Whether matrices that are read in full have their rows side by side.
    pub is_interleaved: bool,
}

pub struct Layer {
    pub block: forward::Block<Linear, Norm>,
    pub ffn: Ffn,
}

impl Model {
    /// The most positions the model can have: bounded where they are learned.
    pub fn max_positions(&self) -> Option<usize> {
        self.positions.as_ref().map(|(table, first)| table.n_rows() - first)
    }
}
