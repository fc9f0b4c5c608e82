//! A model's numbers, read from a file's keys and checked against each other.

use std::path::Path;

use crate::backend::NormKind;
use crate::gguf::{Gguf, Value};
use crate::{Error, Result};

use super::arch::Arch;
use super::rope::{Rope, Scaling};

/// No model has more of anything; a claim beyond it is a broken file.
const MAX_COUNT: u64 = 1 << 24;
/// The longest head, likewise.
const MAX_HEAD: usize = 1 << 16;

pub struct Config {
    pub arch: &'static Arch,
    pub n_layers: usize,
    pub n_embd: usize,
    pub n_ff: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub n_vocab: usize,
    /// What the model was trained for.
    pub n_ctx_train: usize,
    pub eps: f32,
    /// None for learned positions.
    pub rope: Option<Rope>,
    /// `powerinfer.sparse_threshold`
    pub sparse_threshold: f32,
}

/// Reads the keys of one architecture.
pub struct Keys<'a> {
    gguf: &'a Gguf,
    arch: &'static Arch,
}

impl<'a> Keys<'a> {
    pub fn new(gguf: &'a Gguf) -> Result<Self> {
        const KEY: &str = "general.architecture";
        let file = gguf.path();
        let Some(name) = gguf.get_as(KEY, "a string", Value::as_str)? else {
            return Err(Error::format(file, format!("key {KEY}"), "nothing", "an architecture's name"));
        };
        let Some(arch) = Arch::find(name) else {
            return Err(Error::unsupported(file, format!("key {KEY}"), format!("{name:?}"), Arch::names()));
        };
        Ok(Self { gguf, arch })
    }

    pub fn arch(&self) -> &'static Arch {
        self.arch
    }

    fn file(&self) -> &Path {
        self.gguf.path()
    }

    fn name(&self, key: &str) -> String {
        format!("{}.{key}", self.arch.name)
    }

    fn count(&self, key: &str) -> Result<Option<usize>> {
        let name = self.name(key);
        let value = self.gguf.get_as(&name, "a whole number", Value::as_u64)?;
        match value {
            Some(n) if n == 0 || n > MAX_COUNT => {
                Err(Error::format(self.file(), format!("key {name}"), n, format!("1 to {MAX_COUNT}")))
            }
            other => Ok(other.map(|n| n as usize)),
        }
    }

    fn need(&self, key: &str) -> Result<usize> {
        self.count(key)?.ok_or_else(|| self.missing(key, "a whole number"))
    }

    fn missing(&self, key: &str, expected: &str) -> Error {
        Error::format(self.file(), format!("key {}", self.name(key)), "nothing", expected)
    }

    fn float(&self, key: &str) -> Result<Option<f32>> {
        let name = self.name(key);
        match self.gguf.get_as(&name, "a float", Value::as_f32)? {
            Some(v) if !v.is_finite() => {
                Err(Error::format(self.file(), format!("key {name}"), v, "a finite number"))
            }
            other => Ok(other),
        }
    }

    /// A float that must lie above `low` and not above `high`.
    fn float_in(&self, key: &str, low: f32, high: f32) -> Result<Option<f32>> {
        match self.float(key)? {
            Some(v) if !(v > low && v <= high) => {
                let expected = format!("above {low}, at most {high}");
                Err(Error::format(self.file(), format!("key {}", self.name(key)), v, expected))
            }
            other => Ok(other),
        }
    }

    fn eps(&self) -> Result<f32> {
        for key in ["attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"] {
            if let Some(eps) = self.float(key)? {
                if !(0.0..1.0).contains(&eps) {
                    return Err(Error::format(self.file(), format!("key {}", self.name(key)), eps, "0 to 1"));
                }
                return Ok(eps);
            }
        }
        match self.arch.norm {
            NormKind::Rms => Err(self.missing("attention.layer_norm_rms_epsilon", "a float")),
            NormKind::Layer => Ok(1e-5),
        }
    }

    fn scaling(&self) -> Result<Scaling> {
        const TYPE: &str = "rope.scaling.type";
        let kind = self.gguf.get_as(&self.name(TYPE), "a string", Value::as_str)?;
        let factor = match self.float_in("rope.scaling.factor", 0.0, 1e6)? {
            Some(f) => Some(f),
            None => self.float_in("rope.scale_linear", 0.0, 1e6)?,
        };
        match (kind, factor) {
            (Some("none"), _) | (None, None) => Ok(Scaling::None),
            (Some("linear") | None, Some(factor)) => Ok(Scaling::Linear { factor }),
            (Some("yarn"), Some(factor)) => {
                let original = self.count("rope.scaling.original_context_length")?;
                Ok(Scaling::Yarn {
                    factor,
                    n_ctx_original: match original {
                        Some(n) => n,
                        None => self.need("context_length")?,
                    },
                    attn_factor: self.float_in("rope.scaling.attn_factor", 0.0, 1e6)?.unwrap_or(1.0),
                    ext_factor: self.float("rope.scaling.yarn_ext_factor")?.unwrap_or(1.0),
                    beta_fast: self.float_in("rope.scaling.yarn_beta_fast", 0.0, 1e6)?.unwrap_or(32.0),
                    beta_slow: self.float_in("rope.scaling.yarn_beta_slow", 0.0, 1e6)?.unwrap_or(1.0),
                })
            }
            (Some("linear" | "yarn"), None) => Err(self.missing("rope.scaling.factor", "a float")),
            (Some(other), _) => Err(Error::unsupported(
                self.file(),
                format!("key {}", self.name(TYPE)),
                format!("{other:?}"),
                "none, linear or yarn",
            )),
        }
    }

    /// Refuses what would be computed wrongly without a word.
    fn refuse_unknown_forms(&self) -> Result<()> {
        let name = self.name("expert_count");
        if let Some(n) = self.gguf.get(&name)
            && n.as_u64() != Some(0)
        {
            let got = format!("a mixture of {n} experts");
            return Err(Error::unsupported(
                self.file(),
                format!("key {name}"),
                got,
                "a model without experts",
            ));
        }
        Ok(())
    }

    pub fn config(&self, freq_factors: Option<Vec<f32>>) -> Result<Config> {
        self.refuse_unknown_forms()?;
        let n_vocab = self.gguf.tensor("token_embd.weight").map_or(1, |t| t.dims[1..].iter().product());
        let file = self.file();
        let field = |key: &str| format!("key {}", self.name(key));
        let n_embd = self.need("embedding_length")?;
        let n_heads = self.need("attention.head_count")?;
        let n_kv_heads = self.count("attention.head_count_kv")?.unwrap_or(n_heads);
        if !n_heads.is_multiple_of(n_kv_heads) {
            let expected = format!("a divisor of the {n_heads} heads");
            return Err(Error::format(file, field("attention.head_count_kv"), n_kv_heads, expected));
        }
        let head_dim = match self.count("attention.key_length")? {
            Some(n) => n,
            None if n_embd.is_multiple_of(n_heads) => n_embd / n_heads,
            None => {
                let expected = format!("a divisor of the {n_embd} of embedding_length");
                return Err(Error::format(file, field("attention.head_count"), n_heads, expected));
            }
        };
        if head_dim > MAX_HEAD {
            let expected = format!("heads of at most {MAX_HEAD}");
            return Err(Error::format(
                file,
                field("attention.head_count"),
                format!("heads of {head_dim}"),
                expected,
            ));
        }
        if let Some(n) = self.count("attention.value_length")?
            && n != head_dim
        {
            let expected = format!("{head_dim}, the length of a key");
            return Err(Error::unsupported(file, field("attention.value_length"), n, expected));
        }
        let rope = match self.arch.rope {
            None => None,
            Some(pairs) => {
                let n_dims = self.count("rope.dimension_count")?.unwrap_or(head_dim);
                if n_dims > head_dim || !n_dims.is_multiple_of(2) {
                    let expected = format!("an even number up to {head_dim}, the length of a head");
                    return Err(Error::format(file, field("rope.dimension_count"), n_dims, expected));
                }
                if let Some(factors) = &freq_factors {
                    let sound = factors.iter().all(|f| f.is_finite() && *f > 0.0);
                    if factors.len() != n_dims / 2 || !sound {
                        let got = format!(
                            "{} values{}",
                            factors.len(),
                            if sound { "" } else { ", not all positive" }
                        );
                        let expected = format!("{} positive values", n_dims / 2);
                        return Err(Error::format(file, "tensor rope_freqs.weight", got, expected));
                    }
                }
                let base = self.float_in("rope.freq_base", 0.0, 1e12)?.unwrap_or(10_000.0);
                Some(Rope::new(pairs, n_dims, head_dim, base, self.scaling()?, freq_factors.as_deref()))
            }
        };
        const THRESHOLD: &str = "powerinfer.sparse_threshold";
        let sparse_threshold = self.gguf.get_as(THRESHOLD, "a float", Value::as_f32)?.unwrap_or(0.0);
        if sparse_threshold.is_nan() {
            return Err(Error::format(file, format!("key {THRESHOLD}"), "NaN", "a number"));
        }
        Ok(Config {
            arch: self.arch,
            n_layers: self.need("block_count")?,
            n_embd,
            n_ff: self.need("feed_forward_length")?,
            n_heads,
            n_kv_heads,
            head_dim,
            n_vocab,
            n_ctx_train: self.count("context_length")?.unwrap_or(2048),
            eps: self.eps()?,
            rope,
            sparse_threshold,
        })
    }
}
