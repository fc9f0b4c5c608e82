//! How neurons lie in memory where they go through a device.

use crate::backend::Linear;

use super::feed::WriteRows;
use super::form::{Form, write_floats};
use super::module::Weights;

/// Sections of a piece begin at multiples of it.
const SECTION: usize = 16;
/// The most bytes of a piece: a millisecond or two of a bus, as long as its neurons take with a few hundred tokens.
const LARGEST: usize = 16 << 20;

/// Bytes of a piece of a layer of `n_ff` neurons of `neuron` bytes each, with two biases.
pub fn piece_bytes(n_ff: usize, neuron: usize) -> usize {
    let all = n_ff.saturating_mul(neuron + 8).saturating_add(5 * SECTION);
    all.min(LARGEST.max(neuron + 8 + 5 * SECTION))
}

/// Neurons with a row each of gate, up and down, wherever on the device those lie.
#[derive(Clone, Copy)]
pub struct Rowwise {
    pub gate: Option<Weights>,
    pub up: Weights,
    pub down: Weights,
}

/// The form of the weights of gate and up.
pub fn form_of(gate: Option<&Linear>, up: &Linear) -> Form {
    let up = up.weight.dtype();
    gate.map_or(Form::of(up), |gate| Form::shared(gate.weight.dtype(), up))
}

/// How a piece of the host's neurons lies in memory: rows of gate, of up, of down, then the biases of gate and up.
pub struct PieceLayout {
    pub form: Form,
    down: Form,
    has_gate: bool,
    biases: [bool; 2],
    n_embd: usize,
}

impl PieceLayout {
    pub fn of(gate: Option<&Linear>, up: &Linear, down: &Linear) -> Self {
        Self {
            form: form_of(gate, up),
            down: Form::of(down.weight.dtype()),
            has_gate: gate.is_some(),
            biases: [gate.is_some_and(|gate| gate.bias.is_some()), up.bias.is_some()],
            n_embd: down.weight.n_cols(),
        }
    }

    /// Where each section begins for `n` neurons, and where the last one ends.
    fn sections(&self, n: usize) -> [usize; 6] {
        let row = self.form.row_bytes(self.n_embd);
        let gate = if self.has_gate { row } else { 0 };
        let [gate_bias, up_bias] = self.biases.map(|there| if there { 4 } else { 0 });
        let mut starts = [0; 6];
        for (i, each) in
            [gate, row, self.down.row_bytes(self.n_embd), gate_bias, up_bias].into_iter().enumerate()
        {
            starts[i + 1] = starts[i] + (n * each).next_multiple_of(SECTION);
        }
        starts
    }

    pub fn n_bytes(&self, n: usize) -> usize {
        self.sections(n)[5]
    }

    /// Neurons that fit into `n_bytes`, which hold one at least.
    pub fn n_neurons(&self, n_bytes: usize) -> usize {
        let each = (self.n_bytes(SECTION) / SECTION).max(1);
        (n_bytes.saturating_sub(5 * SECTION) / each).max(1)
    }

    pub fn fill(
        &self,
        gate: Option<&Linear>,
        up: &Linear,
        down: &Linear,
        ids: &[u32],
        bytes: &mut [u8],
        write_rows: &mut WriteRows,
    ) {
        let starts = self.sections(ids.len());
        let sections = [gate.map(|l| (l, self.form)), Some((up, self.form)), Some((down, self.down))];
        for (i, (linear, form)) in sections.into_iter().enumerate().filter_map(|(i, s)| Some((i, s?))) {
            let n = ids.len() * form.row_bytes(self.n_embd);
            write_rows(&linear.weight, form, ids, &mut bytes[starts[i]..starts[i] + n]);
        }
        for (i, linear) in [gate, Some(up)].into_iter().enumerate() {
            if let Some(bias) = linear.and_then(|l| l.bias.as_ref()) {
                let values: Vec<f32> = ids.iter().map(|id| bias[*id as usize]).collect();
                write_floats(&values, &mut bytes[starts[3 + i]..starts[4 + i]]);
            }
        }
    }

    /// The piece of `n` neurons at `address`.
    pub fn rows(&self, n: usize, address: u64) -> Rowwise {
        let starts = self.sections(n);
        let weights = |i: usize, form: Form, bias: Option<usize>| Weights {
            form,
            address: address + starts[i] as u64,
            bias: bias.filter(|b| self.biases[*b]).map_or(0, |b| address + starts[3 + b] as u64),
            n_rows: n,
            n_cols: self.n_embd,
        };
        Rowwise {
            gate: self.has_gate.then(|| weights(0, self.form, Some(0))),
            up: weights(1, self.form, Some(1)),
            down: weights(2, self.down, None),
        }
    }
}
