//! A feed-forward layer's share on a device: the predictor, and the neurons that live here.

use crate::Result;
use crate::backend::{Activation, Backend, Linear, others};

use super::feed::{Feed, WriteRows};
use super::form::Form;
use super::gpu::{Buffer, DeviceLinear, Gpu, address};
use super::launch::Memory;
use super::module::{DeviceNeurons, Rows, Weights};
use super::piece::{PieceLayout, Rowwise, form_of};

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
    Neurons(DeviceLinear),
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
    /// Numbers of the host's, ascending, here and there.
    cold: Memory,
    cold_on_host: Vec<u32>,
    /// Where a neuron is a row of the down projection.
    down_bias: Option<Memory>,
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

/// What brings the host's neurons to a device.
pub struct Supply<'a> {
    pub source: Source<'a>,
    pub feed: &'a mut Feed,
    pub write_rows: &'a mut WriteRows<'a>,
    pub interrupted: &'a mut dyn FnMut() -> bool,
}

impl DeviceFfn {
    /// Puts the neurons `hot`, ascending, and the predictor on `gpu`.
    pub fn new(gpu: &Gpu, source: &Source, hot: &[u32], n_ff: usize) -> Result<Self> {
        let cold = others(hot, n_ff);
        let form = form_of(source.gate, source.up);
        let rows = |linear: &Linear| gpu.linear_rows(linear, hot.iter().copied(), form);
        let load = || -> Result<Hot> {
            Ok(Hot {
                gate: source.gate.map(rows).transpose()?,
                up: rows(source.up)?,
                down: match source.down {
                    DownSource::Outputs(down) => Down::Outputs(gpu.linear(down)?),
                    DownSource::Neurons(down) => {
                        let bare = Linear { weight: down.weight.clone(), bias: None };
                        let form = Form::of(down.weight.dtype());
                        Down::Neurons(gpu.linear_rows(&bare, hot.iter().copied(), form)?)
                    }
                },
            })
        };
        let down_bias = match source.down {
            DownSource::Neurons(down) => down.bias.as_ref(),
            DownSource::Outputs(_) => None,
        };
        let predictor = |(fc1, fc2)| Ok::<_, crate::Error>((gpu.linear(fc1)?, gpu.linear(fc2)?));
        Ok(Self {
            hot: if hot.is_empty() { None } else { Some(load()?) },
            n_hot: hot.len(),
            ids: gpu.stream.upload(hot)?,
            cold: gpu.stream.upload(&cold)?,
            cold_on_host: cold,
            down_bias: down_bias.map(|b| gpu.stream.upload(b)).transpose()?,
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

    /// Numbers of the host's neurons, ascending.
    pub fn cold(&self) -> &[u32] {
        &self.cold_on_host
    }

    /// Runs the layer: `x` is its input, `residual` what the predictor reads.
    pub fn run(&self, gpu: &mut Gpu, step: FfnStep, x: &Buffer, residual: &Buffer, out: &mut Buffer) {
        let FfnStep { n_tokens, is_predicted, exchange, .. } = step;
        let is_listed = self.select(gpu, step, residual, exchange.is_some());
        if let Some(number) = exchange {
            gpu.hand_over(number, x, Some(residual).filter(|_| is_predicted && !is_listed));
        }
        let mut parts = (0, 0);
        if let Some(hot) = &self.hot {
            let up = hot.up.weights();
            let operand = gpu.operand(x, up.n_cols, up.form.is_quantized());
            if let Down::Outputs(down) = &hot.down {
                let neurons = self.neurons(gpu, step, is_listed);
                self.activate(gpu, step, hot.gate.as_ref().map(DeviceLinear::weights), up, operand, neurons);
                let h = std::mem::take(&mut gpu.h);
                gpu.matmul([down], &h, [out]);
                gpu.h = h;
                return;
            }
            parts = self.sum_hot(gpu, step, hot, operand, is_listed);
        }
        if let Some(number) = exchange {
            gpu.wait(number);
        }
        out.resize(x.len());
        let bias = if self.hot.is_some() { address(&self.down_bias) } else { 0 };
        let cold = if exchange.is_some() { gpu.mailbox.y_address() } else { 0 };
        let n_cols = x.len() / n_tokens;
        gpu.put(|gpu| gpu.kernels.combine(parts, bias, cold, out.address(), n_cols, n_tokens));
    }

    /// As [`Self::run`], with the host's neurons brought here in place of the hand-over; where a predictor is, it is here.
    pub fn run_fed(
        &self,
        gpu: &mut Gpu,
        step: FfnStep,
        x: &Buffer,
        residual: &Buffer,
        out: &mut Buffer,
        supply: &mut Supply,
    ) -> Result<()> {
        let Supply { source, feed, write_rows, interrupted } = supply;
        let DownSource::Neurons(down) = source.down else { unreachable!("a fed FFN has a neuron a row") };
        let is_listed = self.select(gpu, step, residual, false);
        let (n_tokens, n_embd) = (step.n_tokens, down.weight.n_cols());
        out.resize(x.len());
        let layout = PieceLayout::of(source.gate, source.up, down);
        let operand = gpu.operand(x, n_embd, layout.form.is_quantized());
        let parts = self.hot.as_ref().map_or((0, 0), |hot| self.sum_hot(gpu, step, hot, operand, is_listed));
        let bias = address(&self.down_bias);
        gpu.put(|gpu| gpu.kernels.combine(parts, bias, 0, out.address(), n_embd, n_tokens));
        let each = layout.n_neurons(feed.n_bytes());
        for start in (0..self.cold_on_host.len()).step_by(each) {
            let ids = &self.cold_on_host[start..][..each.min(self.cold_on_host.len() - start)];
            let mut fill =
                |bytes: &mut [u8]| layout.fill(source.gate, source.up, down, ids, bytes, write_rows);
            let at = feed.send(&gpu.stream, layout.n_bytes(ids.len()), &mut fill, interrupted)?;
            let neurons = DeviceNeurons {
                list: 0,
                n_listed: 0,
                ids: self.cold.address() + 4 * start as u64,
                n: ids.len() as i32,
                ..self.neurons(gpu, step, is_listed)
            };
            let rows = layout.rows(ids.len(), at);
            let parts = self.sum(gpu, step, rows, operand, neurons);
            gpu.put(|gpu| gpu.kernels.combine(parts, 0, out.address(), out.address(), n_embd, n_tokens));
            gpu.check()?;
            feed.used(&gpu.stream)?;
        }
        Ok(())
    }

    fn sum_hot(
        &self,
        gpu: &mut Gpu,
        step: FfnStep,
        hot: &Hot,
        operand: Rows,
        is_listed: bool,
    ) -> (u64, usize) {
        let Down::Neurons(down) = &hot.down else { unreachable!("a sum of neurons") };
        let gate = hot.gate.as_ref().map(DeviceLinear::weights);
        let rows = Rowwise { gate, up: hot.up.weights(), down: down.weights() };
        let neurons = self.neurons(gpu, step, is_listed);
        self.sum(gpu, step, rows, operand, neurons)
    }

    /// Runs `neurons`; returns where the parts of their sum are, and how many.
    fn sum(
        &self,
        gpu: &mut Gpu,
        step: FfnStep,
        rows: Rowwise,
        operand: Rows,
        neurons: DeviceNeurons,
    ) -> (u64, usize) {
        self.activate(gpu, step, rows.gate, rows.up, operand, neurons);
        let parts = gpu.parts.address();
        let mut n_parts = 0;
        gpu.put(|gpu| {
            n_parts = gpu.kernels.down(rows.down, neurons, gpu.h.address(), parts, step.n_tokens)?;
            Ok(())
        });
        (parts, n_parts)
    }

    /// Leaves what `neurons` come to in `gpu.h`, (n_tokens, neurons.n).
    fn activate(
        &self,
        gpu: &mut Gpu,
        step: FfnStep,
        gate: Option<Weights>,
        up: Weights,
        operand: Rows,
        neurons: DeviceNeurons,
    ) {
        let active = gpu.counters.address() + 16 * step.layer as u64 + 8;
        let fired = gpu.fired.as_ref().map_or(0, |f| f.address() + 8 * (step.layer * gpu.shape.n_ff) as u64);
        gpu.h.resize(step.n_tokens * neurons.n as usize);
        gpu.put(|gpu| {
            gpu.kernels.ffn(gate, up, operand, neurons, gpu.h.address(), step.n_tokens, active, fired)
        });
    }

    /// The device's own neurons.
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

    /// Scores all neurons and lists those that are on, where the predictor is here: false where it isn't. `for_host` says
    /// whether the host is to know which token needs which of its own.
    fn select(&self, gpu: &mut Gpu, step: FfnStep, residual: &Buffer, for_host: bool) -> bool {
        let Some((fc1, fc2)) = self.predictor.as_ref().filter(|_| step.is_predicted) else { return false };
        let (mut hidden, mut scores) = (std::mem::take(&mut gpu.hidden), std::mem::take(&mut gpu.scores));
        gpu.matmul([fc1], residual, [&mut hidden]); // (n_tokens, rank)
        gpu.put(|gpu| gpu.kernels.relu(hidden.address(), hidden.len()));
        gpu.matmul([fc2], &hidden, [&mut scores]); // (n_tokens, n_ff)
        (gpu.hidden, gpu.scores) = (hidden, scores);
        gpu.put(|gpu| {
            let list = gpu.list.address();
            let (scores, n_ff) = (gpu.scores.address(), gpu.shape.n_ff);
            // What neurons come to has no use for its room yet.
            let calls = if step.n_tokens > 1 { gpu.h.address() } else { 0 };
            if calls != 0 {
                gpu.kernels.count_calls(scores, step.n_tokens, n_ff, step.threshold, calls)?;
            }
            let (cold_list, n_cold_listed, on) = gpu.mailbox.list_addresses();
            gpu.kernels.select(
                scores,
                step.n_tokens,
                n_ff,
                step.threshold,
                calls,
                (self.ids.address(), self.n_hot),
                (list + 4, list),
                (self.cold.address(), self.cold_on_host.len()),
                (cold_list, n_cold_listed, if for_host && step.n_tokens > 1 { on } else { 0 }),
                gpu.counters.address() + 16 * step.layer as u64,
            )
        });
        true
    }
}
