//! `MODEL.gpuidx`: which neurons live on the GPU, in PowerInfer's own file.

use std::path::Path;

use crate::gguf::header::Magic;
use crate::gguf::write::{TensorSpec, Writer};
use crate::gguf::{Gguf, Value};
use crate::quant::DType;
use crate::{Error, Result};

const ARCHITECTURE: &str = "generic.gpu_index";
/// More than any model has in a layer.
const MOST_NEURONS: usize = 1 << 24;
const ARCHITECTURE_KEY: &str = "general.architecture";
const BLOCK_COUNT_KEY: &str = "generic.gpu_index.block_count";
const CAPACITY_KEY: &str = "split.vram_capacity";

/// A split of every layer's neurons.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuIndex {
    /// Bytes of GPU memory that the split was made for.
    pub capacity: u64,
    pub n_ff: usize,
    /// Of each layer the hot neurons' numbers, ascending.
    pub hot: Vec<Vec<u32>>,
}

impl GpuIndex {
    /// Reads the file at `path`, made for a model of `n_layers` layers of `n_ff` neurons.
    pub fn read(path: &Path, n_layers: usize, n_ff: usize) -> Result<Self> {
        let gguf = Gguf::open(path)?;
        let bad = |field: String, got: String, expected: String| Error::format(path, field, got, expected);
        let architecture = gguf.get_as(ARCHITECTURE_KEY, "a string", Value::as_str)?.unwrap_or("none");
        if architecture != ARCHITECTURE {
            let expected = format!("{ARCHITECTURE}, what a GPU index has");
            return Err(bad(format!("key {ARCHITECTURE_KEY}"), architecture.to_owned(), expected));
        }
        let n = gguf.get_as(BLOCK_COUNT_KEY, "a whole number", Value::as_u64)?;
        if n != Some(n_layers as u64) {
            let got = n.map_or("none".to_owned(), |n| n.to_string());
            return Err(bad(format!("key {BLOCK_COUNT_KEY}"), got, format!("the model's {n_layers} layers")));
        }
        let Some(capacity) = gguf.get_as(CAPACITY_KEY, "a whole number of bytes", Value::as_u64)? else {
            let expected = "the bytes that the split was made for".to_owned();
            return Err(bad(format!("key {CAPACITY_KEY}"), "none".to_owned(), expected));
        };
        let hot = (0..n_layers).map(|layer| read_layer(&gguf, layer, n_ff)).collect::<Result<_>>()?;
        Ok(Self { capacity, n_ff, hot })
    }

    /// Writes the file at `path`, with the tensors and keys of the original's writer in its order.
    pub fn write(&self, path: &Path) -> Result<()> {
        if self.n_ff > MOST_NEURONS {
            return Err(Error::argument(
                "n_ff",
                self.n_ff,
                format!("neurons of a layer, up to {MOST_NEURONS}"),
            ));
        }
        let is_sound = |hot: &Vec<u32>| {
            hot.is_sorted_by(|a, b| a < b) && hot.last().is_none_or(|n| (*n as usize) < self.n_ff)
        };
        if let Some(layer) = self.hot.iter().position(|hot| !is_sound(hot)) {
            let expected = format!("numbers below {}, ascending, each once", self.n_ff);
            return Err(Error::argument("hot", format!("layer {layer}"), expected));
        }
        let keys = [
            (ARCHITECTURE_KEY, Value::String(ARCHITECTURE.to_owned())),
            (BLOCK_COUNT_KEY, Value::U32(self.hot.len() as u32)),
            (CAPACITY_KEY, Value::U64(self.capacity)),
        ];
        let spec = |name: String, n: usize| TensorSpec { name, dtype: DType::I32, dims: vec![n] };
        let keys: Vec<(&str, &Value)> = keys.iter().map(|(name, value)| (*name, value)).collect();
        let tensors = self.hot.iter().enumerate().flat_map(|(layer, hot)| {
            let [index, bucket] = names(layer);
            [spec(index, self.n_ff), spec(bucket, hot.len())]
        });
        let mut writer = Writer::create(path, Magic::PowerInfer, &keys, tensors.collect())?;
        for hot in &self.hot {
            let mut index = vec![0; self.n_ff];
            hot.iter().for_each(|neuron| index[*neuron as usize] = 1);
            writer.put(&bytes(&index))?;
            writer.put(&bytes(hot))?;
        }
        writer.finish()
    }
}

/// A layer's two tensors: a mark for each neuron, and the marked ones' numbers.
fn names(layer: usize) -> [String; 2] {
    [format!("blk.{layer}.gpu_idx"), format!("blk.{layer}.gpu_bucket")]
}

fn bytes(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn read_layer(gguf: &Gguf, layer: usize, n_ff: usize) -> Result<Vec<u32>> {
    let [index_name, bucket_name] = names(layer);
    let index = integers(gguf, &index_name, &format!("[{n_ff}]"))?;
    let bad = |name: &str, got: String, expected: String| {
        Error::format(gguf.path(), format!("tensor {name}"), got, expected)
    };
    if index.len() != n_ff {
        return Err(bad(&index_name, format!("{} values", index.len()), format!("{n_ff}, one a neuron")));
    }
    if let Some(value) = index.iter().find(|v| !(0..=1).contains(*v)) {
        return Err(bad(&index_name, value.to_string(), "0 or 1".to_owned()));
    }
    let marked = index.iter().filter(|v| **v == 1).count();
    let bucket = integers(gguf, &bucket_name, "[hot neurons]")?;
    if bucket.len() != marked {
        let expected = format!("the {marked} that {index_name} marks");
        return Err(bad(&bucket_name, format!("{} neurons", bucket.len()), expected));
    }
    let mut hot = Vec::new();
    for value in bucket {
        let number = usize::try_from(value).ok().filter(|n| *n < n_ff);
        let Some(number) = number else {
            return Err(bad(&bucket_name, format!("neuron {value}"), format!("0 to {}", n_ff - 1)));
        };
        if index[number] != 1 {
            let expected = format!("a neuron that {index_name} marks");
            return Err(bad(&bucket_name, format!("neuron {value}"), expected));
        }
        if hot.last().is_some_and(|last| *last >= value as u32) {
            let got = format!("neuron {value} after {}", hot[hot.len() - 1]);
            return Err(bad(&bucket_name, got, "each neuron once, ascending".to_owned()));
        }
        hot.push(value as u32);
    }
    Ok(hot)
}

fn integers(gguf: &Gguf, name: &str, shape: &str) -> Result<Vec<i32>> {
    let Some(info) = gguf.tensor(name) else {
        let (file, name) = (gguf.path().to_owned(), name.to_owned());
        return Err(Error::MissingTensor { file, name, expected: shape.to_owned() });
    };
    if info.dtype != DType::I32 || info.dims.len() != 1 {
        let got = format!("{} {:?}", info.dtype.name(), info.dims);
        return Err(Error::format(gguf.path(), format!("tensor {name}"), got, format!("I32 {shape}")));
    }
    let bytes = gguf.bytes(name).expect("the tensor is there");
    Ok(bytes.as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)).collect())
}
