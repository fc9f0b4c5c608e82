//! What a device must be able to do, as a dozen verbs over rows of activations, and the devices that can.
//!
//! A layer's attention is written against [`Backend`] alone, its FFN against [`NeuronBackend`] where the host runs it; a
//! GPU has kernels for all of an FFN. `cpu` and `cuda` never see each other. Uses `error` and `quant`.

pub mod cpu;
pub mod cuda;

use crate::quant::{DType, Matrix};
use crate::{Error, Result};

/// A weight matrix with the bias that goes with it.
#[derive(Clone)]
pub struct Linear {
    /// `n_rows` outputs of `n_cols` inputs.
    pub weight: Matrix,
    pub bias: Option<Vec<f32>>,
}

/// A normalisation over rows of `weight.len()` values.
#[derive(Clone)]
pub struct Norm {
    pub kind: NormKind,
    pub weight: Vec<f32>,
    pub bias: Option<Vec<f32>>,
    pub eps: f32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    Rms,
    Layer,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    Relu,
    Silu,
    Gelu,
}

impl Activation {
    pub const fn name(self) -> &'static str {
        match self {
            Activation::Relu => "relu",
            Activation::Silu => "silu",
            Activation::Gelu => "gelu",
        }
    }

    pub fn parse(name: &str) -> Result<Self> {
        let all = [Activation::Relu, Activation::Silu, Activation::Gelu];
        let found = all.into_iter().find(|a| a.name() == name);
        found.ok_or_else(|| Error::argument("activation", format!("{name:?}"), "relu, silu or gelu"))
    }
}

/// Which values of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// (2i, 2i + 1)
    Adjacent,
    /// (i, i + n / 2)
    Halves,
}

/// The rotations of a batch: cosine and sine for every token and pair.
pub struct Rotations {
    pub pairs: RopePairs,
    /// (n_tokens, n_pairs), cosine and sine, attention scaling included.
    pub turns: Vec<(f32, f32)>,
    pub n_pairs: usize,
    pub head_dim: usize,
}

/// Tokens in a block of the KV cache.
pub const KV_BLOCK: usize = 32;

/// The first blocks of a sequence are float32 whatever the cache's type: the tokens that attention looks at most
/// (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023) are not rounded, and a short text
/// isn't at all. A neuron whose score lies at the predictor's threshold then falls on the side that exact arithmetic
/// puts it. The cost is bounded: 256 positions.
pub const FULL_BLOCKS: usize = 8;

/// What the blocks of the KV cache hold: keys and values of [`KV_BLOCK`] tokens for every layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    pub n_layers: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    /// F32, F16 or Q8_0: the type of all blocks but the first.
    pub dtype: DType,
}

impl KvShape {
    /// The type of block `index` of a sequence.
    pub fn dtype_of(&self, index: usize) -> DType {
        if index < FULL_BLOCKS { DType::F32 } else { self.dtype }
    }

    /// Bytes of block `index` of a sequence. Layout: (layer, key or value, head), and in each as the device likes it.
    pub fn block_bytes(&self, index: usize) -> usize {
        self.n_layers * 2 * self.n_kv_heads * KV_BLOCK * self.dtype_of(index).row_bytes(self.head_dim)
    }

    /// The place of a head's first row in a block, counted in rows.
    pub fn first_row(&self, layer: usize, is_value: bool, head: usize) -> usize {
        ((layer * 2 + is_value as usize) * self.n_kv_heads + head) * KV_BLOCK
    }
}

/// A block of a sequence's cache in the host's memory.
pub enum HostBlock<'a> {
    /// Of this sequence alone, to write into.
    Own(&'a mut [u8]),
    Shared(&'a [u8]),
}

impl HostBlock<'_> {
    pub fn bytes(&self) -> &[u8] {
        match self {
            HostBlock::Own(bytes) => bytes,
            HostBlock::Shared(bytes) => bytes,
        }
    }
}

/// The cache that a batch's tokens read and extend, where the host has it.
pub struct HostCache<'a> {
    /// Of the layers that are the host's.
    pub shape: KvShape,
    /// Blocks of each sequence.
    pub sequences: Vec<Vec<HostBlock<'a>>>,
    /// Of each token, the sequence and the position in it. Tokens of a sequence follow one another.
    pub tokens: Vec<(usize, usize)>,
}

/// Neurons that at least one token of a batch needs, and which token needs which.
#[derive(Default)]
pub struct Neurons {
    /// Ascending.
    pub list: Vec<u32>,
    /// (n_tokens, list.len())
    pub on: Vec<bool>,
}

impl Neurons {
    /// Those of `list`, on for each of `n_tokens`.
    pub fn these(&mut self, list: &[u32], n_tokens: usize) {
        self.list.clear();
        self.list.extend_from_slice(list);
        self.on.clear();
        self.on.resize(list.len() * n_tokens, true);
    }

    /// All of `n` neurons, on for each of `n_tokens`.
    pub fn all(&mut self, n: usize, n_tokens: usize) {
        self.list.clear();
        self.list.extend(0..n as u32);
        self.on.clear();
        self.on.resize(n * n_tokens, true);
    }
}

/// The numbers below `n` that aren't among `some`, ascending.
pub fn others(some: &[u32], n: usize) -> Vec<u32> {
    let mut is_one = vec![false; n];
    some.iter().for_each(|i| is_one[*i as usize] = true);
    (0..n as u32).filter(|i| !is_one[*i as usize]).collect()
}

/// A device at work on one forward pass. Buffers hold rows of float32, one a token; what a verb writes, it resizes.
pub trait Backend {
    type Buffer: Default;
    /// A [`Linear`] where the device has it.
    type Linear;
    /// A [`Norm`] where the device has it.
    type Norm;
    /// The cache that the batch's tokens read and extend.
    type Cache<'c>;

    /// Normalises every run of `norm.weight.len()` values.
    fn norm(&mut self, norm: &Self::Norm, x: &Self::Buffer, out: &mut Self::Buffer);

    /// Multiplies the rows of `x` with each of `linears`, adding its bias.
    fn matmul<const N: usize>(
        &mut self,
        linears: [&Self::Linear; N],
        x: &Self::Buffer,
        out: [&mut Self::Buffer; N],
    );

    /// `x += y`
    fn add(&mut self, x: &mut Self::Buffer, y: &Self::Buffer);

    /// Turns the heads of every token of `x`.
    fn rope(&mut self, rotations: &Rotations, x: &mut Self::Buffer);

    /// Writes the keys and values of every token; `layer` is its number in the cache.
    fn store(&mut self, cache: &mut Self::Cache<'_>, layer: usize, k: &Self::Buffer, v: &Self::Buffer);

    /// Causal attention of every token's query heads over its sequence, itself included.
    fn attend(&mut self, cache: &Self::Cache<'_>, layer: usize, q: &Self::Buffer, out: &mut Self::Buffer);
}

/// A device that runs an FFN verb by verb and says after each what came of it.
pub trait NeuronBackend: Backend<Linear = Linear> {
    /// As `matmul`, for the rows `neurons.list` of `linear` alone: `out` is (n_tokens, list.len()). Where a neuron is off for a
    /// token, zero may take the place of the product.
    fn matmul_rows(&mut self, linear: &Linear, neurons: &Neurons, x: &Self::Buffer, out: &mut Self::Buffer);

    /// `out = bias + Σ h[i] * row list[i]` of `linear` over the non-zero `h` of each token; `h` is
    /// (n_tokens, list.len()). Returns how many (token, neuron) pairs were not zero.
    fn axpy_rows(
        &mut self,
        linear: &Linear,
        neurons: &Neurons,
        h: &Self::Buffer,
        n_tokens: usize,
        out: &mut Self::Buffer,
    ) -> usize;

    /// The neurons whose score reaches `threshold` for some token; `scores` is (n_tokens, n_neurons). Returns how
    /// many (token, neuron) pairs are on.
    fn select(
        &mut self,
        scores: &Self::Buffer,
        n_neurons: usize,
        threshold: f32,
        neurons: &mut Neurons,
    ) -> usize;

    /// Zeroes the values (n_tokens, list.len()) that are off or not positive, which turns them off, and drops the neurons
    /// that are then zero for every token.
    fn keep_positive(&mut self, values: &mut Self::Buffer, neurons: &mut Neurons);

    /// Applies `activation` in place.
    fn activate(&mut self, activation: Activation, x: &mut Self::Buffer);

    /// `x *= y`, or `x *= max(y, 0)`; zeros stay, whatever `y` is: a neuron that is off adds nothing.
    fn multiply(&mut self, x: &mut Self::Buffer, y: &Self::Buffer, relu: bool);
}
