//! PowerInfer's activation predictor: a two-layer perceptron that says which neurons will fire
//! (Song et al., "PowerInfer: Fast Large Language Model Serving with a Consumer-grade GPU", SOSP 2024).

use crate::backend::{Activation, Linear, NeuronBackend, Neurons};

/// `score = fc2 · relu(fc1 · p)`, p being the residual that the FFN adds to.
#[derive(Clone)]
pub struct Predictor {
    /// (rank, n_embd)
    pub fc1: Linear,
    /// (n_ff, rank)
    pub fc2: Linear,
}

/// Buffers of [`Predictor::select`].
#[derive(Default)]
pub struct Scratch<T> {
    hidden: T,
    scores: T,
}

impl Predictor {
    /// Fills `neurons` with those that score `threshold` or more; returns how many (token, neuron) pairs do.
    pub fn select<B: NeuronBackend>(
        &self,
        b: &mut B,
        p: &B::Buffer,
        threshold: f32,
        scratch: &mut Scratch<B::Buffer>,
        neurons: &mut Neurons,
    ) -> usize {
        let Scratch { hidden, scores } = scratch;
        b.matmul([&self.fc1], p, [hidden]); // (n_tokens, rank)
        b.activate(Activation::Relu, hidden);
        b.matmul([&self.fc2], hidden, [scores]); // (n_tokens, n_ff)
        b.select(scores, self.fc2.weight.n_rows(), threshold, neurons)
    }
}
