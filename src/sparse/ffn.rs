//! One feed-forward layer, dense or sparse.

use crate::backend::{Activation, Linear, NeuronBackend, Neurons};

use super::predictor::{self, Predictor};
use super::{Counts, Sparsity};

/// The down projection, as it lies in memory.
#[derive(Clone)]
pub enum Down {
    /// An output a row, (n_embd, n_ff): GGUF's `ffn_down`.
    Outputs(Linear),
    /// A neuron a row, (n_ff, n_embd): PowerInfer's `ffn_down_t`.
    Neurons(Linear),
}

/// `out = down · h`, where h is `act(gate · x) * up · x`, or `act(up · x)` without a gate.
#[derive(Clone)]
pub struct Ffn {
    /// (n_ff, n_embd)
    pub gate: Option<Linear>,
    /// (n_ff, n_embd)
    pub up: Linear,
    pub down: Down,
    pub predictor: Option<Predictor>,
    pub activation: Activation,
    /// Whether `up · x` goes through a ReLU of its own.
    pub relu_up: bool,
}

/// Buffers of [`Ffn::run`].
#[derive(Default)]
pub struct Scratch<T> {
    predictor: predictor::Scratch<T>,
    h: T,
    up: T,
    /// The neurons at work.
    pub neurons: Neurons,
}

impl Ffn {
    pub fn n_neurons(&self) -> usize {
        self.up.weight.n_rows()
    }

    /// The matrix whose outputs go through the activation: a neuron it leaves at zero is off.
    fn first(&self) -> &Linear {
        self.gate.as_ref().unwrap_or(&self.up)
    }

    /// Runs the layer for `n_tokens`. `x` is the normalised input, `residual` what the predictor reads.
    pub fn run<B: NeuronBackend>(
        &self,
        b: &mut B,
        mode: Sparsity,
        threshold: f32,
        n_tokens: usize,
        x: &B::Buffer,
        residual: &B::Buffer,
        scratch: &mut Scratch<B::Buffer>,
        out: &mut B::Buffer,
        counts: &mut Counts,
    ) {
        let possible = n_tokens * self.n_neurons();
        let (selected, active) = match (mode, &self.down) {
            (Sparsity::Dense, _) | (_, Down::Outputs(_)) => {
                self.run_dense(b, n_tokens, x, scratch, out);
                (possible, possible)
            }
            (_, Down::Neurons(down)) => {
                let Scratch { predictor, h, neurons, .. } = scratch;
                let predicted = match &self.predictor {
                    Some(p) if mode == Sparsity::Predicted => {
                        let n = p.select(b, residual, threshold, predictor, neurons);
                        b.matmul_rows(self.first(), neurons, x, h); // (n_tokens, list.len())
                        Some(n)
                    }
                    _ => {
                        neurons.all(self.n_neurons(), n_tokens);
                        b.matmul([self.first()], x, [h]); // (n_tokens, n_ff)
                        None
                    }
                };
                let active = self.run_active(b, down, n_tokens, x, scratch, out);
                counts.add_fired(&scratch.neurons);
                (predicted.unwrap_or(active), active)
            }
        };
        counts.possible += possible as u64;
        counts.selected += selected as u64;
        counts.active += active as u64;
    }

    /// Runs the neurons in `scratch.neurons` for `n_tokens`, of which others run the rest: what they add to the output, without
    /// more bias than `down` has. In predicted mode they are those called on.
    pub fn run_share<B: NeuronBackend>(
        &self,
        b: &mut B,
        mode: Sparsity,
        n_tokens: usize,
        x: &B::Buffer,
        scratch: &mut Scratch<B::Buffer>,
        out: &mut B::Buffer,
        counts: &mut Counts,
    ) {
        let Down::Neurons(down) = &self.down else { unreachable!("a shared FFN has a neuron a row") };
        let Scratch { h, up, neurons, .. } = &mut *scratch;
        b.matmul_rows(self.first(), neurons, x, h); // (n_tokens, list.len())
        if mode != Sparsity::Dense {
            counts.active += self.run_active(b, down, n_tokens, x, scratch, out) as u64;
            counts.add_fired(&scratch.neurons);
            return;
        }
        b.activate(self.activation, h);
        if self.gate.is_some() {
            b.matmul_rows(&self.up, neurons, x, up); // (n_tokens, list.len())
            b.multiply(h, up, self.relu_up);
        }
        b.axpy_rows(down, neurons, h, n_tokens, out); // (n_tokens, n_embd)
    }

    fn run_dense<B: NeuronBackend>(
        &self,
        b: &mut B,
        n_tokens: usize,
        x: &B::Buffer,
        scratch: &mut Scratch<B::Buffer>,
        out: &mut B::Buffer,
    ) {
        let Scratch { h, up, neurons, .. } = scratch;
        if let Some(gate) = &self.gate {
            b.matmul([gate, &self.up], x, [h, up]); // (n_tokens, n_ff) each
            b.activate(self.activation, h);
            b.multiply(h, up, self.relu_up);
        } else {
            b.matmul([&self.up], x, [h]); // (n_tokens, n_ff)
            b.activate(self.activation, h);
        }
        match &self.down {
            Down::Outputs(down) => b.matmul([down], h, [out]), // (n_tokens, n_embd)
            Down::Neurons(down) => {
                neurons.all(self.n_neurons(), n_tokens);
                b.axpy_rows(down, neurons, h, n_tokens, out);
            }
        }
    }

    /// From the first matrix's outputs in `scratch.h` for `scratch.neurons` on. Returns the active pairs.
    fn run_active<B: NeuronBackend>(
        &self,
        b: &mut B,
        down: &Linear,
        n_tokens: usize,
        x: &B::Buffer,
        scratch: &mut Scratch<B::Buffer>,
        out: &mut B::Buffer,
    ) -> usize {
        let Scratch { h, up, neurons, .. } = scratch;
        b.keep_positive(h, neurons);
        if self.gate.is_some() {
            b.matmul_rows(&self.up, neurons, x, up); // (n_tokens, list.len())
            b.multiply(h, up, self.relu_up);
        }
        b.axpy_rows(down, neurons, h, n_tokens, out) // (n_tokens, n_embd)
    }
}
