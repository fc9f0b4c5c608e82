//! What a model's parts weigh on a device, from a file's header alone: nothing is loaded.

use crate::backend::cuda::cache::cache_bytes;
use crate::backend::cuda::form::Form;
use crate::backend::cuda::piece::piece_bytes;
use crate::backend::cuda::workspace::Shape;
use crate::backend::{KV_BLOCK, KvShape};
use crate::gguf::{Gguf, TensorInfo};
use crate::quant::DType;
use crate::sparse::Sparsity;
use crate::sparse::placement::{Demand, LayerDemand};
use crate::{Error, Result};

use super::config::{Config, Keys};
use super::layout::turned_type;

/// Columns of a tensor, and rows.
fn n_cols(tensor: &TensorInfo) -> usize {
    tensor.dims[0]
}

fn n_rows(tensor: &TensorInfo) -> usize {
    tensor.dims[1..].iter().product()
}

/// Bytes of a tensor in the form that a device has it in.
fn device_bytes(tensor: &TensorInfo) -> u64 {
    // Vectors are decoded.
    let form = if tensor.dims.len() == 1 { Form::F32 } else { Form::of(tensor.dtype) };
    (n_rows(tensor) * form.row_bytes(n_cols(tensor))) as u64
}

/// How an engine will be used.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// The longest text, in tokens.
    pub n_ctx: usize,
    /// Positions whose cache devices have room for.
    pub n_cached: usize,
    /// Tokens side by side.
    pub batch: usize,
    pub kv_type: DType,
    pub mode: Sparsity,
    /// Whether the host's neurons may go through a device in prefill.
    pub feeds: bool,
}

/// The sizes of a device's buffers.
pub fn device_shape(config: &Config, gguf: &Gguf, usage: &Usage) -> Shape {
    let Usage { n_ctx, n_cached, batch, mode, feeds, .. } = *usage;
    let is_fc1 = |t: &TensorInfo| mode == Sparsity::Predicted && t.name.ends_with(".fc1.weight");
    let rank = |t: &TensorInfo| if is_fc1(t) { n_rows(t) } else { 0 };
    Shape {
        n_embd: config.n_embd,
        n_ff: config.n_ff,
        n_heads: config.n_heads,
        n_kv_heads: config.n_kv_heads,
        head_dim: config.head_dim,
        rank: gguf.tensors().map(rank).max().unwrap_or(0),
        n_vocab: config.n_vocab,
        n_pairs: config.rope.as_ref().map_or(0, |_| config.head_dim / 2),
        batch: batch.min(n_ctx),
        n_blocks: n_ctx.div_ceil(KV_BLOCK),
        n_cached: n_cached.div_ceil(KV_BLOCK),
        piece: if feeds {
            let largest = neuron_bytes(gguf, config, mode).into_iter().max().unwrap_or(0);
            piece_bytes(config.n_ff, usize::try_from(largest).unwrap_or(usize::MAX / 2))
        } else {
            0
        },
    }
}

/// The number of a layer's tensor, and what follows it in the name.
fn of_layer(tensor: &TensorInfo) -> Option<(usize, &str)> {
    let (number, part) = tensor.name.strip_prefix("blk.")?.split_once('.')?;
    Some((number.parse().ok()?, part))
}

/// Bytes of one neuron of each layer: its rows of gate, up and down, and biases.
fn neuron_bytes(gguf: &Gguf, config: &Config, mode: Sparsity) -> Vec<u64> {
    let mut bytes = vec![0; config.n_layers];
    for tensor in gguf.tensors() {
        let Some((number, part)) = of_layer(tensor) else { continue };
        let Some(layer) = bytes.get_mut(number) else { continue };
        *layer += match part {
            "ffn_gate.weight" | "ffn_up.weight" => {
                let form = gate_and_up(gguf, number).unwrap_or(Form::of(tensor.dtype));
                form.row_bytes(n_cols(tensor)) as u64
            }
            "ffn_down_t.weight" | "ffn_gate.bias" | "ffn_up.bias" => {
                device_bytes(tensor).div_ceil(config.n_ff as u64)
            }
            // All of a layer's neurons or none: it stays as it is.
            "ffn_down.weight" if mode == Sparsity::Dense => device_bytes(tensor).div_ceil(config.n_ff as u64),
            // Turned at load, where a neuron's outputs become a row.
            "ffn_down.weight" => turned_type(tensor.dtype, config.n_embd).row_bytes(config.n_embd) as u64,
            _ => 0,
        };
    }
    bytes
}

/// The bytes of each part of `gguf` on a device. `counts` says how often each neuron of each layer fired.
pub fn demand(gguf: &Gguf, usage: &Usage, counts: Vec<Vec<u64>>) -> Result<Demand> {
    let mode = usage.mode;
    let config = Keys::new(gguf)?.config(None)?;
    if counts.len() != config.n_layers {
        let expected = format!("{}, one a layer", config.n_layers);
        return Err(Error::argument("counts", format!("{} layers", counts.len()), expected));
    }
    if let Some((layer, counts)) = counts.iter().enumerate().find(|(_, c)| c.len() != config.n_ff) {
        let got = format!("{} counts for layer {layer}", counts.len());
        return Err(Error::argument("counts", got, format!("{}, one a neuron", config.n_ff)));
    }
    let kv = KvShape {
        n_layers: 1,
        n_kv_heads: config.n_kv_heads,
        head_dim: config.head_dim,
        dtype: usage.kv_type,
    };
    let shape = device_shape(&config, gguf, usage);
    let cache = cache_bytes(&kv, shape.n_cached) as u64;
    let neurons = neuron_bytes(gguf, &config, mode);
    let empty = |(counts, neuron)| LayerDemand { attention: 0, cache, predictor: 0, neuron, counts };
    let overhead = shape.bytes(config.n_layers);
    let mut demand =
        Demand { layers: counts.into_iter().zip(neurons).map(empty).collect(), head: 0, overhead };
    let is_tied = gguf.tensor("output.weight").is_none();
    for tensor in gguf.tensors() {
        let n_bytes = device_bytes(tensor);
        let Some((number, part)) = of_layer(tensor) else {
            if tensor.name.starts_with("output") || is_tied && tensor.name == "token_embd.weight" {
                demand.head += n_bytes;
            }
            continue;
        };
        let Some(layer) = demand.layers.get_mut(number) else { continue };
        match part {
            "fc1.weight" | "fc2.weight" if mode == Sparsity::Predicted => layer.predictor += n_bytes,
            "fc1.weight" | "fc2.weight" => {}
            "ffn_gate.weight" | "ffn_up.weight" | "ffn_down.weight" | "ffn_down_t.weight" => {}
            "ffn_gate.bias" | "ffn_up.bias" => {}
            _ => layer.attention += n_bytes,
        }
    }
    Ok(demand)
}

/// The form that a layer's gate and up share, where it has both.
fn gate_and_up(gguf: &Gguf, layer: usize) -> Option<Form> {
    let dtype = |name: &str| gguf.tensor(&format!("blk.{layer}.{name}.weight")).map(|t| t.dtype);
    Some(Form::shared(dtype("ffn_gate")?, dtype("ffn_up")?))
}
