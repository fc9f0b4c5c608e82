//! What sparsity is to a feed-forward layer: which neurons a token needs, and an FFN that touches no others.
//!
//! A neuron is one row each of gate, up and the transposed down projection. Uses `error`, `quant`,
//! `gguf` (for `gpu_index`) and `backend`.

pub mod ffn;
pub mod gpu_index;
pub mod placement;
pub mod predictor;

use crate::backend::Neurons;
use crate::{Error, Result};

/// How much of an FFN is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sparsity {
    /// The neurons that the predictor calls on, less those whose gate isn't positive.
    Predicted,
    /// The gate in full, the rest for neurons whose gate is positive: what the others would add is zero.
    Exact,
    Dense,
}

impl Sparsity {
    pub const fn name(self) -> &'static str {
        match self {
            Sparsity::Predicted => "predicted",
            Sparsity::Exact => "exact",
            Sparsity::Dense => "dense",
        }
    }

    /// Reads a mode's name; `auto` is none.
    pub fn parse(name: &str) -> Result<Option<Self>> {
        match name {
            "auto" => Ok(None),
            "predicted" => Ok(Some(Sparsity::Predicted)),
            "exact" => Ok(Some(Sparsity::Exact)),
            "dense" => Ok(Some(Sparsity::Dense)),
            _ => Err(Error::argument("sparsity", format!("{name:?}"), "auto, predicted, exact or dense")),
        }
    }
}

/// What one layer's FFN has computed so far, counted in (token, neuron) pairs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// All pairs.
    pub possible: u64,
    /// Called on: by the predictor, or (in exact mode) by the gate.
    pub selected: u64,
    /// Contributed to the output.
    pub active: u64,
    /// How often each neuron did, where that is counted.
    pub fired: Option<Vec<u64>>,
}

impl Counts {
    /// Nothing yet; `n_neurons` are counted one by one.
    pub fn one_by_one(n_neurons: usize) -> Self {
        Self { fired: Some(vec![0; n_neurons]), ..Self::default() }
    }

    /// Counts the neurons on, one by one where that is asked for.
    fn add_fired(&mut self, neurons: &Neurons) {
        let Some(fired) = &mut self.fired else { return };
        for on in neurons.on.chunks_exact(neurons.list.len().max(1)) {
            neurons.list.iter().zip(on).for_each(|(neuron, on)| fired[*neuron as usize] += *on as u64);
        }
    }

    /// The share of neurons selected, for the average token.
    pub fn density(&self) -> f64 {
        if self.possible == 0 { 0.0 } else { self.selected as f64 / self.possible as f64 }
    }
}
