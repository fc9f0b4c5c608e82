//! What a model's parts weigh, from a file's header alone: nothing is loaded.

use crate::gguf::Gguf;
use crate::quant::DType;
use crate::sparse::placement::{Demand, LayerDemand};
use crate::{Error, Result};

use super::BATCH;
use super::config::Keys;
use super::layout::turned_type;

/// Rows of activations, as wide as the residual, that a layer has at once.
const RESIDUAL_ROWS: u64 = 8;
/// And rows as wide as the FFN.
const FFN_ROWS: u64 = 3;

/// The bytes of each part of `gguf`, with a cache of `n_ctx` positions of `kv_type`, on a device whose own context takes
/// `context` bytes. `counts` says how often each neuron of each layer fired.
pub fn demand(
    gguf: &Gguf,
    n_ctx: usize,
    kv_type: DType,
    context: u64,
    counts: Vec<Vec<u64>>,
) -> Result<Demand> {
    let config = Keys::new(gguf)?.config(None)?;
    if counts.len() != config.n_layers {
        let expected = format!("{}, one a layer", config.n_layers);
        return Err(Error::argument("counts", format!("{} layers", counts.len()), expected));
    }
    if let Some((layer, counts)) = counts.iter().enumerate().find(|(_, c)| c.len() != config.n_ff) {
        let got = format!("{} counts for layer {layer}", counts.len());
        return Err(Error::argument("counts", got, format!("{}, one a neuron", config.n_ff)));
    }
    let kv_row = config.n_kv_heads * config.head_dim;
    let cache = 2 * n_ctx as u64 * kv_type.row_bytes(kv_row) as u64;
    let empty = |counts| LayerDemand { attention: 0, cache, predictor: 0, neuron: 0, counts };
    let rows = RESIDUAL_ROWS * config.n_embd as u64 + FFN_ROWS * config.n_ff as u64;
    let overhead = context + 4 * (BATCH as u64 * rows + config.n_vocab as u64);
    let mut demand = Demand { layers: counts.into_iter().map(empty).collect(), head: 0, overhead };
    let is_tied = gguf.tensor("output.weight").is_none();
    for tensor in gguf.tensors() {
        let n_bytes = tensor.range.len() as u64;
        let of_layer = tensor.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
        let Some((number, part)) = of_layer else {
            if tensor.name.starts_with("output") || is_tied && tensor.name == "token_embd.weight" {
                demand.head += n_bytes;
            }
            continue;
        };
        let Some(layer) = number.parse().ok().and_then(|n: usize| demand.layers.get_mut(n)) else { continue };
        let n_ff = config.n_ff as u64;
        match part {
            "fc1.weight" | "fc2.weight" => layer.predictor += n_bytes,
            "ffn_gate.weight" | "ffn_up.weight" | "ffn_down_t.weight" | "ffn_up.bias" => {
                layer.neuron += n_bytes / n_ff
            }
            // Turned at load, where a neuron's outputs become a row.
            "ffn_down.weight" => {
                layer.neuron += turned_type(tensor.dtype, config.n_embd).row_bytes(config.n_embd) as u64
            }
            _ => layer.attention += n_bytes,
        }
    }
    Ok(demand)
}
