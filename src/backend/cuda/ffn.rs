//! A feed-forward layer's share on a device: the predictor, and the neurons that live here.

use crate::Result;
use crate::backend::{Activation, Linear};

use super::form::Form;
use super::gpu::{Buffer, DeviceLinear, Gpu, address};
use super::launch::Memory;
use super::module::DeviceNeurons;
use crate::backend::Backend;

/// What a layer's FFN is made of, where the host has it.
pub struct Source<'a> {
    pub gate: Option<&'a Linear>,
    pub up: &'a Linear,
    pub down: DownSource<'a>,
    /// fc1 and fc2, where they go to the device.
    pub predictor: Option<(&'a Linear, &'a Linear)>,
    pub activation: Activation,
    pub relu_up: bool,
}

/// The down projection, as the host has it.
pub enum DownSource<'a> {
    /// An output a row; then all neurons go to the device, or none.
    Outputs(&'a Linear),
    /// A neuron a row.
    Neurons(&'a Linear),
}

enum Down {
    Outputs(DeviceLinear),
    Neurons { weights: DeviceLinear, bias: Option<Memory> },
}

/// The neurons on the device, in the order of `ids`.
struct Hot {
    gate: Option<DeviceLinear>,
    up: DeviceLinear,
    down: Down,
}

pub struct DeviceFfn {
    hot: Option<Hot>,
    n_hot: usize,
    /// Numbers of the neurons here.
    ids: Memory,
    /// Numbers of the host's.
    cold: Memory,
    n_cold: usize,
    predictor: Option<(DeviceLinear, DeviceLinear)>,
    activation: i32,
    relu_up: bool,
}

/// How a layer is to be run.
#[derive(Clone, Copy)]
pub struct FfnStep {
    /// Its number on this device.
    pub layer: usize,
    pub n_tokens: usize,
    /// Whether neurons that aren't positive are off.
    pub is_sparse: bool,
    /// Whether a predictor says which neurons to run, here or on the host.
    pub is_predicted: bool,
    pub threshold: f32,
    /// The hand-over in which the host runs its neurons, where it has any.
    pub exchange: Option<u32>,
}

/// Forms of the weights of `source`, where neurons of it go to a device.
pub fn forms(gate: Option<&Linear>, up: &Linear) -> Form {
    let up = up.weight.dtype();
    gate.map_or(Form::of(up), |gate| Form::shared(gate.weight.dtype(), up))
}

impl DeviceFfn {
    /// Puts the neurons `hot`, ascending, and the predictor on `gpu`.
    pub fn new(gpu: &Gpu, source: &Source, hot: &[u32], n_ff: usize) -> Result<Self> {
        let mut is_hot = vec![false; n_ff];
        hot.iter().for_each(|i| is_hot[*i as usize] = true);
        let cold: Vec<u32> = (0..n_ff as u32).filter(|i| !is_hot[*i as usize]).collect();
        let form = forms(source.gate, source.up);
        let rows = |linear: &Linear| gpu.some_rows(linear, hot, form);
        let load = || -> Result<Hot> {
            Ok(Hot {
                gate: source.gate.map(rows).transpose()?,
                up: rows(source.up)?,
                down: match source.down {
                    DownSource::Outputs(down) => Down::Outputs(gpu.linear(down)?),
                    DownSource::Neurons(down) => {
                        let bare = Linear { weight: down.weight.clone(), bias: None };
                        Down::Neurons {
                            weights: gpu.some_rows(&bare, hot, Form::of(down.weight.dtype()))?,
                            bias: down.bias.as_ref().map(|b| gpu.floats(b)).transpose()?,
                        }
                    }
                },
            })
        };
        let predictor = |(fc1, fc2)| Ok::<_, crate::Error>((gpu.linear(fc1)?, gpu.linear(fc2)?));
        Ok(Self {
            hot: if hot.is_empty() { None } else { Some(load()?) },
            n_hot: hot.len(),
            ids: gpu.numbers(hot)?,
            cold: gpu.numbers(&cold)?,
            n_cold: cold.len(),
            predictor: source.predictor.map(predictor).transpose()?,
            activation: match source.activation {
                Activation::Relu => 0,
                Activation::Silu => 1,
                Activation::Gelu => 2,
            },
            relu_up: source.relu_up,
        })
    }

    /// Whether the device lists the neurons that are on, the host's too.
    pub fn has_predictor(&self) -> bool {
        self.predictor.is_some()
    }

    /// Runs the layer: `x` is its input, `residual` what the predictor reads.
    pub fn run(&self, gpu: &mut Gpu, step: FfnStep, x: &Buffer, residual: &Buffer, out: &mut Buffer) {
        let FfnStep { n_tokens, is_predicted, exchange, .. } = step;
        let counters = gpu.counters.address() + 16 * step.layer as u64;
        let is_listed = is_predicted && self.predictor.is_some();
        if let Some((fc1, fc2)) = self.predictor.as_ref().filter(|_| is_predicted) {
            self.select(gpu, step, fc1, fc2, residual, counters);
        }
        if let Some(number) = exchange {
            gpu.hand_over(number, x, Some(residual).filter(|_| is_predicted && !is_listed));
        }
        let mut parts = (0, 0);
        let mut bias = 0;
        if let Some(hot) = &self.hot {
            let up = hot.up.weights();
            let neurons = self.neurons(gpu, step, is_listed);
            let operand = gpu.operand(x, up.n_cols, up.form.is_quantized());
            let fired =
                gpu.fired.as_ref().map_or(0, |f| f.address() + 8 * (step.layer * gpu.shape.n_ff) as u64);
            let mut h = std::mem::take(&mut gpu.h);
            h.resize(n_tokens * self.n_hot);
            gpu.put(|gpu| {
                let gate = hot.gate.as_ref().map(DeviceLinear::weights);
                gpu.kernels.ffn(gate, up, operand, neurons, h.address(), n_tokens, counters + 8, fired)
            });
            match &hot.down {
                Down::Outputs(down) => gpu.matmul([down], &h, [&mut *out]),
                Down::Neurons { weights, bias: of_down } => {
                    bias = address(of_down);
                    parts.0 = gpu.parts.address();
                    let n_parts = &mut parts.1;
                    gpu.put(|gpu| {
                        let (h, to) = (h.address(), gpu.parts.address());
                        *n_parts = gpu.kernels.down(weights.weights(), neurons, h, to, n_tokens)?;
                        Ok(())
                    });
                }
            }
            gpu.h = h;
        }
        if matches!(&self.hot, Some(Hot { down: Down::Outputs(_), .. })) {
            return;
        }
        if let Some(number) = exchange {
            gpu.wait(number);
        }
        out.resize(x.len());
        let cold = if exchange.is_some() { gpu.mailbox.y_address() } else { 0 };
        let n_cols = x.len() / n_tokens;
        gpu.put(|gpu| gpu.kernels.combine(parts, bias, cold, out.address(), n_cols, n_tokens));
    }

    fn neurons(&self, gpu: &Gpu, step: FfnStep, is_listed: bool) -> DeviceNeurons {
        let or_none = |address: u64| if is_listed { address } else { 0 };
        DeviceNeurons {
            list: or_none(gpu.list.address() + 4),
            n_listed: or_none(gpu.list.address()),
            ids: self.ids.address(),
            scores: or_none(gpu.scores.address()),
            n: self.n_hot as i32,
            n_ff: gpu.shape.n_ff as i32,
            threshold: step.threshold,
            is_sparse: step.is_sparse as i32,
            activation: self.activation,
            relu_up: self.relu_up as i32,
        }
    }

    /// Scores all neurons and lists those that are on.
    fn select(
        &self,
        gpu: &mut Gpu,
        step: FfnStep,
        fc1: &DeviceLinear,
        fc2: &DeviceLinear,
        residual: &Buffer,
        counters: u64,
    ) {
        let (mut hidden, mut scores) = (std::mem::take(&mut gpu.hidden), std::mem::take(&mut gpu.scores));
        gpu.matmul([fc1], residual, [&mut hidden]); // (n_tokens, rank)
        gpu.put(|gpu| gpu.kernels.gate(hidden.address(), 0, hidden.len(), 0, false));
        gpu.matmul([fc2], &hidden, [&mut scores]); // (n_tokens, n_ff)
        (gpu.hidden, gpu.scores) = (hidden, scores);
        gpu.put(|gpu| {
            let list = gpu.list.address();
            gpu.kernels.select(
                gpu.scores.address(),
                step.n_tokens,
                gpu.shape.n_ff,
                step.threshold,
                (self.ids.address(), self.n_hot),
                (list + 4, list),
                (self.cold.address(), self.n_cold),
                gpu.mailbox.list_addresses(),
                counters,
            )
        });
    }
}
