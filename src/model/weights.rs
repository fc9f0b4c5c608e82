//! Binds a file's tensors to their places in a model: every name and shape is checked here, once.

use std::collections::HashSet;

use crate::backend::{Activation, Linear, Norm, NormKind};
use crate::gguf::{Gguf, Magic};
use crate::quant::{DType, Matrix};
use crate::sparse::Sparsity;
use crate::sparse::ffn::{Down, Ffn};
use crate::sparse::predictor::Predictor;
use crate::{Error, Result};

use super::config::{Config, Keys};
use super::forward::{Block, Qkv};
use super::{Layer, Model, Options};

/// Tensors of a layer that an old converter leaves and nobody needs.
const IGNORED: &[&str] = &["attn_rot_embd.weight"];

struct Binder<'a> {
    gguf: &'a Gguf,
    bound: HashSet<String>,
}

impl Binder<'_> {
    fn has(&self, name: &str) -> bool {
        self.gguf.tensor(name).is_some()
    }

    /// The matrix `name` of `n_rows` rows and `n_cols` columns; none where the file hasn't got it.
    fn matrix(&mut self, name: &str, n_rows: usize, n_cols: usize) -> Result<Option<Matrix>> {
        let Some(info) = self.gguf.tensor(name) else { return Ok(None) };
        let rows: usize = info.dims[1..].iter().product();
        if info.dims[0] != n_cols || rows != n_rows || info.dims.len() > 2 {
            let expected = format!("shape [{n_cols}, {n_rows}]");
            return Err(self.wrong(name, format!("shape {:?}", info.dims), expected));
        }
        if info.dtype == DType::I32 {
            return Err(self.wrong(name, "type I32", "a type of weights"));
        }
        self.bound.insert(name.to_owned());
        Ok(self.gguf.matrix(name))
    }

    fn wrong(&self, name: &str, got: impl ToString, expected: impl ToString) -> Error {
        Error::format(self.gguf.path(), format!("tensor {name}"), got, expected)
    }

    fn need(&mut self, name: &str, n_rows: usize, n_cols: usize) -> Result<Matrix> {
        self.matrix(name, n_rows, n_cols)?.ok_or_else(|| Error::MissingTensor {
            file: self.gguf.path().to_owned(),
            name: name.to_owned(),
            expected: if n_rows == 1 { format!("[{n_cols}]") } else { format!("[{n_cols}, {n_rows}]") },
        })
    }

    /// The vector `name`, decoded; every value must be a finite number.
    fn vector(&mut self, name: &str, n: usize) -> Result<Option<Vec<f32>>> {
        let Some(matrix) = self.matrix(name, 1, n)? else { return Ok(None) };
        let mut values = vec![0.0; n];
        matrix.decode_row(0, &mut values);
        match values.iter().position(|v| !v.is_finite()) {
            Some(i) => Err(self.wrong(name, format!("{} at {i}", values[i]), "finite numbers")),
            None => Ok(Some(values)),
        }
    }

    fn linear(&mut self, stem: &str, n_out: usize, n_in: usize) -> Result<Linear> {
        let weight = self.need(&format!("{stem}.weight"), n_out, n_in)?;
        Ok(Linear { weight, bias: self.vector(&format!("{stem}.bias"), n_out)? })
    }

    fn norm(&mut self, stem: &str, n: usize, config: &Config) -> Result<Norm> {
        let name = format!("{stem}.weight");
        self.need(&name, 1, n)?;
        let weight = self.vector(&name, n)?.expect("needed above");
        let bias = match config.arch.norm {
            NormKind::Rms => None,
            NormKind::Layer => self.vector(&format!("{stem}.bias"), n)?,
        };
        Ok(Norm { kind: config.arch.norm, weight, bias, eps: config.eps })
    }

    fn norm_if_there(&mut self, stem: &str, n: usize, config: &Config) -> Result<Option<Norm>> {
        if self.has(&format!("{stem}.weight")) { self.norm(stem, n, config).map(Some) } else { Ok(None) }
    }

    fn qkv(&mut self, layer: &str, c: &Config) -> Result<Qkv<Linear>> {
        let (n_q, n_kv) = (c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim);
        if !c.arch.fused_qkv {
            return Ok(Qkv {
                q: self.linear(&format!("{layer}attn_q"), n_q, c.n_embd)?,
                k: self.linear(&format!("{layer}attn_k"), n_kv, c.n_embd)?,
                v: self.linear(&format!("{layer}attn_v"), n_kv, c.n_embd)?,
            });
        }
        let all = self.linear(&format!("{layer}attn_qkv"), n_q + 2 * n_kv, c.n_embd)?;
        let part = |rows: std::ops::Range<usize>| Linear {
            weight: all.weight.rows(rows.clone()),
            bias: all.bias.as_ref().map(|b| b[rows].to_vec()),
        };
        Ok(Qkv { q: part(0..n_q), k: part(n_q..n_q + n_kv), v: part(n_q + n_kv..n_q + 2 * n_kv) })
    }

    fn down(&mut self, layer: &str, c: &Config) -> Result<Down> {
        let transposed = format!("{layer}ffn_down_t");
        if self.has(&format!("{transposed}.weight")) {
            let weight = self.need(&format!("{transposed}.weight"), c.n_ff, c.n_embd)?;
            return Ok(Down::Neurons(Linear {
                weight,
                bias: self.vector(&format!("{transposed}.bias"), c.n_embd)?,
            }));
        }
        Ok(Down::Outputs(self.linear(&format!("{layer}ffn_down"), c.n_embd, c.n_ff)?))
    }

    fn predictor(&mut self, layer: &str, c: &Config) -> Result<Option<Predictor>> {
        // The rank differs from layer to layer: the tensor says it.
        let rank = |name: String, dim: usize| self.gguf.tensor(&name).and_then(|t| t.dims.get(dim).copied());
        let rank1 = rank(format!("{layer}fc1.weight"), 1);
        let Some(rank) = rank1.or(rank(format!("{layer}fc2.weight"), 0)) else { return Ok(None) };
        Ok(Some(Predictor {
            fc1: self.linear(&format!("{layer}fc1"), rank, c.n_embd)?,
            fc2: self.linear(&format!("{layer}fc2"), c.n_ff, rank)?,
        }))
    }

    /// Refuses tensors that nothing would read: the file means a model this crate doesn't know.
    fn refuse_unknown(&self) -> Result<()> {
        for t in self.gguf.tensors() {
            let ignored = IGNORED.iter().any(|name| t.name.ends_with(name));
            if !ignored && !self.bound.contains(&t.name) {
                let field = format!("tensor {}", t.name);
                let expected = "only tensors that the architecture has";
                return Err(Error::unsupported(self.gguf.path(), field, "a tensor of unknown use", expected));
            }
        }
        Ok(())
    }
}

impl Model {
    /// Binds the tensors of `gguf`, where the file has them.
    pub fn bind(gguf: &Gguf, options: &Options) -> Result<Self> {
        let keys = Keys::new(gguf)?;
        let mut binder = Binder { gguf, bound: HashSet::new() };
        let freq_factors = match gguf.tensor("rope_freqs.weight") {
            Some(info) => binder.vector("rope_freqs.weight", info.dims[0])?,
            None => None,
        };
        let config = keys.config(freq_factors)?;
        let c = &config;
        let token_embd = binder.need("token_embd.weight", c.n_vocab, c.n_embd)?;
        let positions = match c.arch.learned_positions {
            None => None,
            Some(offset) => {
                let name = "position_embd.weight";
                let n =
                    gguf.tensor(name).and_then(|t| t.dims.get(1).copied()).unwrap_or(c.n_ctx_train + offset);
                if n <= offset {
                    return Err(binder.wrong(
                        name,
                        format!("{n} rows"),
                        format!("more than the first {offset}"),
                    ));
                }
                Some((binder.need(name, n, c.n_embd)?, offset))
            }
        };
        let has_predictors = binder.has("blk.0.fc1.weight");
        let is_powerinfer = has_predictors || gguf.magic() == Magic::PowerInfer;
        let activation =
            options.activation.unwrap_or(if is_powerinfer { Activation::Relu } else { c.arch.activation });
        let sparsity = sparsity(options, gguf, has_predictors, activation)?;
        let mut layers = Vec::new();
        for i in 0..c.n_layers {
            let layer = binder.layer(&format!("blk.{i}."), c, activation)?;
            if has_predictors && layer.ffn.predictor.is_none() {
                let name = format!("blk.{i}.fc1.weight");
                let expected = format!("[{}, rank]", c.n_embd);
                return Err(Error::MissingTensor { file: gguf.path().to_owned(), name, expected });
            }
            layers.push(layer);
        }
        let output_norm = binder.norm("output_norm", c.n_embd, c)?;
        let output = match binder.matrix("output.weight", c.n_vocab, c.n_embd)? {
            Some(weight) => weight,
            None => token_embd.clone(),
        };
        let output = Linear { weight: output, bias: binder.vector("output.bias", c.n_vocab)? };
        binder.refuse_unknown()?;
        Ok(Self {
            config,
            token_embd,
            positions,
            layers,
            output_norm,
            output,
            activation,
            sparsity,
            has_predictors,
            converted_bytes: 0,
            is_interleaved: false,
        })
    }
}

impl Binder<'_> {
    fn layer(&mut self, at: &str, c: &Config, activation: Activation) -> Result<Layer> {
        let heads = c.n_heads * c.head_dim;
        let qk = |b: &mut Self, name: &str| {
            if c.arch.qk_norm { b.norm(&format!("{at}{name}"), c.head_dim, c).map(Some) } else { Ok(None) }
        };
        let block = Block {
            attn_norm: self.norm(&format!("{at}attn_norm"), c.n_embd, c)?,
            attn_norm_2: if c.arch.parallel {
                self.norm_if_there(&format!("{at}attn_norm_2"), c.n_embd, c)?
            } else {
                None
            },
            qkv: self.qkv(at, c)?,
            q_norm: qk(self, "attn_q_norm")?,
            k_norm: qk(self, "attn_k_norm")?,
            attn_output: self.linear(&format!("{at}attn_output"), c.n_embd, heads)?,
            ffn_norm: if c.arch.parallel {
                None
            } else {
                Some(self.norm(&format!("{at}ffn_norm"), c.n_embd, c)?)
            },
        };
        Ok(Layer {
            block,
            ffn: Ffn {
                gate: if c.arch.gated {
                    Some(self.linear(&format!("{at}ffn_gate"), c.n_ff, c.n_embd)?)
                } else {
                    None
                },
                up: self.linear(&format!("{at}ffn_up"), c.n_ff, c.n_embd)?,
                down: self.down(at, c)?,
                predictor: self.predictor(at, c)?,
                activation,
                relu_up: c.arch.relu_up,
            },
        })
    }
}

/// The mode asked for, or the best that the file allows.
fn sparsity(
    options: &Options,
    gguf: &Gguf,
    has_predictors: bool,
    activation: Activation,
) -> Result<Sparsity> {
    let is_relu = activation == Activation::Relu;
    let refuse = |mode: &str, why: &str| {
        let got = format!("{mode:?} for {}", gguf.path().display());
        Err(Error::argument("sparsity", got, why))
    };
    match options.sparsity {
        None if has_predictors && is_relu => Ok(Sparsity::Predicted),
        None if is_relu => Ok(Sparsity::Exact),
        None => Ok(Sparsity::Dense),
        Some(Sparsity::Predicted) if !has_predictors => {
            refuse("predicted", "a file with predictors (fc1, fc2), or another mode")
        }
        Some(mode @ (Sparsity::Predicted | Sparsity::Exact)) if !is_relu => {
            refuse(mode.name(), "a model whose activation is ReLU, or dense")
        }
        Some(mode) => Ok(mode),
    }
}
