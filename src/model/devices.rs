//! What of a model lives on GPUs, put there by plan.

use std::collections::HashMap;

use crate::backend::cuda::feed::Feed;
use crate::backend::cuda::ffn::{DeviceFfn, DownSource, Source};
use crate::backend::cuda::form::Form;
use crate::backend::cuda::launch::Graph;
use crate::backend::cuda::piece::form_of;
use crate::backend::cuda::workspace::Shape;
use crate::backend::cuda::{Buffer, DeviceLinear, DeviceNorm, Gpu};
use crate::backend::{KvShape, Linear};
use crate::quant::Layout;
use crate::sparse::Sparsity;
use crate::sparse::ffn::{Down, Ffn};
use crate::sparse::placement::DevicePlan;
use crate::{Error, Result};

use super::forward::{Block, Qkv, Scratch};
use super::{Layer, Model, Progress};

/// What of a layer a device has in the host's place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Away {
    pub attention: bool,
    pub predictor: bool,
    /// So many of its neurons.
    pub n_hot: usize,
}

/// What `plans` take from each layer of `n_layers`.
pub fn away(plans: &[DevicePlan], n_layers: usize) -> Vec<Away> {
    let mut away = vec![Away::default(); n_layers];
    for plan in plans {
        for (i, hot) in plan.hot.iter().enumerate().take(plan.n_attention) {
            away[plan.layers.start + i] =
                Away { attention: true, predictor: i < plan.n_predictors, n_hot: hot.len() };
        }
    }
    away
}

/// A layer whose attention a device has.
pub struct DeviceLayer {
    pub block: Block<DeviceLinear, DeviceNorm>,
    pub ffn: DeviceFfn,
    /// The layer's number in the model.
    pub number: usize,
    /// The hand-over in which the host runs its neurons of the layer, where it has any.
    pub exchange: Option<u32>,
    /// Whether the host's neurons of it can be brought to the device.
    pub is_feedable: bool,
}

/// A GPU with its part of the model.
pub struct Part {
    pub gpu: Gpu,
    pub layers: Vec<DeviceLayer>,
    pub head: Option<(DeviceNorm, DeviceLinear)>,
    pub scratch: Scratch<Buffer>,
    pub plan: DevicePlan,
    /// The last hand-over of the steps before.
    pub base: u32,
    /// Hand-overs of a step.
    pub n_exchanges: u32,
    /// Steps of so many tokens and wanted rows, recorded; none once recording has failed.
    pub graphs: Option<HashMap<(usize, usize), Graph>>,
    /// Brings the host's neurons here where a step has many tokens.
    pub feed: Option<Feed>,
}

/// What all devices of an engine have in common.
pub struct Setup<'a> {
    pub model: &'a Model,
    pub shape: Shape,
    pub kv: KvShape,
    /// Bytes that a device's context takes, of its budget.
    pub context: u64,
    pub count_neurons: bool,
}

impl Part {
    /// Opens device `number` and puts there what `plan` says. `budget` is in bytes.
    pub fn load(
        setup: &Setup,
        number: usize,
        budget: u64,
        plan: DevicePlan,
        progress: &mut Progress,
    ) -> Result<Self> {
        let model = setup.model;
        let kv = KvShape { n_layers: plan.n_attention, ..setup.kv };
        let limit = budget.saturating_sub(setup.context);
        let numbers = plan.layers.start..plan.layers.start + plan.n_attention;
        let forms = needed_forms(model, &plan, setup.shape.piece > 0);
        let mut gpu = Gpu::new(number, limit, setup.shape, kv, &forms, setup.count_neurons)?;
        let c = &model.config;
        let heads = c.n_heads.max(c.n_kv_heads) * c.head_dim;
        let scratch = Scratch {
            x: gpu.rows(c.n_embd)?,
            normed: gpu.rows(c.n_embd)?,
            attn_in: gpu.rows(c.n_embd)?,
            q: gpu.rows(heads)?,
            k: gpu.rows(heads)?,
            v: gpu.rows(heads)?,
            turned: gpu.rows(heads)?,
            attended: gpu.rows(heads)?,
            update: gpu.rows(c.n_embd)?,
            ffn_update: gpu.rows(c.n_embd)?,
        };
        let piece = setup.shape.piece;
        let feed = if piece > 0 { Some(Feed::new(&gpu.stream_handle(), piece)?) } else { None };
        let mut layers = Vec::new();
        for (i, number) in numbers.clone().enumerate() {
            layers.push(load_layer(&gpu, model, number, i < plan.n_predictors, &plan.hot[i])?);
            if progress(i + 1, numbers.len()).is_break() {
                return Err(Error::Interrupted);
            }
        }
        let head = if plan.head {
            Some((gpu.norm_weights(&model.output_norm)?, gpu.linear(&model.output)?))
        } else {
            None
        };
        gpu.check()?;
        gpu.stream().finish()?;
        let graphs = Some(HashMap::new());
        Ok(Self { gpu, layers, head, scratch, plan, base: 0, n_exchanges: 0, graphs, feed })
    }
}

fn load_layer(
    gpu: &Gpu,
    model: &Model,
    number: usize,
    has_predictor: bool,
    hot: &[u32],
) -> Result<DeviceLayer> {
    let Layer { block, ffn } = &model.layers[number];
    let norm = |n| gpu.norm_weights(n);
    let block = Block {
        attn_norm: norm(&block.attn_norm)?,
        attn_norm_2: block.attn_norm_2.as_ref().map(norm).transpose()?,
        qkv: Qkv { q: gpu.linear(&block.qkv.q)?, k: gpu.linear(&block.qkv.k)?, v: gpu.linear(&block.qkv.v)? },
        q_norm: block.q_norm.as_ref().map(norm).transpose()?,
        k_norm: block.k_norm.as_ref().map(norm).transpose()?,
        attn_output: gpu.linear(&block.attn_output)?,
        ffn_norm: block.ffn_norm.as_ref().map(norm).transpose()?,
    };
    let predictor = ffn.predictor.as_ref().filter(|_| has_predictor && model.sparsity == Sparsity::Predicted);
    let source = Source { predictor: predictor.map(|p| (&p.fc1, &p.fc2)), ..source(ffn) };
    let on_device = DeviceFfn::new(gpu, &source, hot, ffn.n_neurons())?;
    let is_feedable = match &ffn.down {
        Down::Neurons(down) => {
            let has_rows = |linear: &Linear| linear.weight.layout() == Layout::Rows;
            let is_predicted_here = model.sparsity != Sparsity::Predicted || on_device.has_predictor();
            is_predicted_here && has_rows(down) && has_rows(&ffn.up) && ffn.gate.as_ref().is_none_or(has_rows)
        }
        Down::Outputs(_) => false,
    };
    Ok(DeviceLayer { block, ffn: on_device, number, exchange: None, is_feedable })
}

/// What a layer's FFN is made of, without its predictor.
pub fn source(ffn: &Ffn) -> Source<'_> {
    Source {
        gate: ffn.gate.as_ref(),
        up: &ffn.up,
        down: match &ffn.down {
            Down::Outputs(down) => DownSource::Outputs(down),
            Down::Neurons(down) => DownSource::Neurons(down),
        },
        predictor: None,
        activation: ffn.activation,
        relu_up: ffn.relu_up,
    }
}

/// The forms of all weights that `plan` puts on a device, and (`feeds`) of those that go through it.
fn needed_forms(model: &Model, plan: &DevicePlan, feeds: bool) -> Vec<Form> {
    let mut needed = Vec::new();
    let mut need = |form: Form| {
        if !needed.contains(&form) {
            needed.push(form);
        }
    };
    let of = |linear: &Linear| Form::of(linear.weight.dtype());
    let start = plan.layers.start;
    for (layer, hot) in model.layers[start..start + plan.n_attention].iter().zip(&plan.hot) {
        let qkv = &layer.block.qkv;
        [&qkv.q, &qkv.k, &qkv.v, &layer.block.attn_output].into_iter().for_each(|l| need(of(l)));
        if let Some(p) = &layer.ffn.predictor {
            [&p.fc1, &p.fc2].into_iter().for_each(|l| need(of(l)));
        }
        if !hot.is_empty() || feeds && matches!(layer.ffn.down, Down::Neurons(_)) {
            need(form_of(layer.ffn.gate.as_ref(), &layer.ffn.up));
            let (Down::Outputs(down) | Down::Neurons(down)) = &layer.ffn.down;
            need(of(down));
        }
    }
    if plan.head {
        need(of(&model.output));
    }
    needed
}
