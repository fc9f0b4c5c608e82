//! The architectures, one row each. The forward pass reads a row and knows no names: a new model is a new row.

use crate::backend::{Activation, NormKind, RopePairs};

pub struct Arch {
    /// `general.architecture`, and the prefix of its keys.
    pub name: &'static str,
    pub norm: NormKind,
    /// None where positions are learned.
    pub rope: Option<RopePairs>,
    /// Positions are rows of `position_embd`, from this row on.
    pub learned_positions: Option<usize>,
    /// Attention and FFN read the same input side by side; otherwise the FFN follows.
    pub parallel: bool,
    /// Queries, keys and values come in one tensor, `attn_qkv`.
    pub fused_qkv: bool,
    /// Query and key heads are normalised before they turn.
    pub qk_norm: bool,
    pub gated: bool,
    /// Of an ordinary file; one of PowerInfer's is ReLU.
    pub activation: Activation,
    /// `up · x` goes through a ReLU of its own.
    pub relu_up: bool,
}

const LLAMA: Arch = Arch {
    name: "llama",
    norm: NormKind::Rms,
    rope: Some(RopePairs::Adjacent),
    learned_positions: None,
    parallel: false,
    fused_qkv: false,
    qk_norm: false,
    gated: true,
    activation: Activation::Silu,
    relu_up: false,
};

pub const ARCHS: &[Arch] = &[
    LLAMA,
    Arch { name: "bamboo", activation: Activation::Relu, relu_up: true, ..LLAMA },
    Arch {
        name: "falcon",
        norm: NormKind::Layer,
        rope: Some(RopePairs::Halves),
        parallel: true,
        fused_qkv: true,
        gated: false,
        activation: Activation::Relu,
        ..LLAMA
    },
    Arch {
        name: "opt",
        norm: NormKind::Layer,
        rope: None,
        learned_positions: Some(2),
        gated: false,
        activation: Activation::Relu,
        ..LLAMA
    },
    Arch { name: "qwen2", rope: Some(RopePairs::Halves), ..LLAMA },
    Arch { name: "qwen3", rope: Some(RopePairs::Halves), qk_norm: true, ..LLAMA },
];

impl Arch {
    pub fn find(name: &str) -> Option<&'static Arch> {
        ARCHS.iter().find(|a| a.name == name)
    }

    /// The names, for an error message.
    pub fn names() -> String {
        ARCHS.iter().map(|a| a.name).collect::<Vec<_>>().join(", ")
    }
}
