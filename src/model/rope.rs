//! Rotary positions: how far each pair of a head's values turns at a position
//! (Su et al., "RoFormer", 2021; scaling: Peng et al., "YaRN", 2023).

use std::f64::consts::PI;

use crate::backend::{RopePairs, Rotations};

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    None,
    /// Positions divided by `factor`.
    Linear {
        factor: f32,
    },
    /// Slow pairs divided by `factor`, fast ones left, a ramp between.
    Yarn {
        factor: f32,
        n_ctx_original: usize,
        attn_factor: f32,
        ext_factor: f32,
        beta_fast: f32,
        beta_slow: f32,
    },
}

pub struct Rope {
    pairs: RopePairs,
    head_dim: usize,
    /// Radians a position, for each pair.
    speeds: Vec<f64>,
    /// What cosine and sine are multiplied with.
    magnitude: f64,
}

impl Rope {
    /// `freq_factors` divide each pair's speed (Llama 3 carries its scaling that way).
    pub fn new(
        pairs: RopePairs,
        n_dims: usize,
        head_dim: usize,
        base: f32,
        scaling: Scaling,
        freq_factors: Option<&[f32]>,
    ) -> Self {
        let n = n_dims as f64;
        let base = base as f64;
        let mut speeds: Vec<f64> = (0..n_dims / 2).map(|i| base.powf(-2.0 * i as f64 / n)).collect();
        if let Some(factors) = freq_factors {
            speeds.iter_mut().zip(factors).for_each(|(s, f)| *s /= *f as f64);
        }
        let mut magnitude = 1.0;
        match scaling {
            Scaling::None => {}
            Scaling::Linear { factor } => speeds.iter_mut().for_each(|s| *s /= factor as f64),
            Scaling::Yarn { factor, n_ctx_original, attn_factor, ext_factor, beta_fast, beta_slow } => {
                let factor = factor as f64;
                // The pair that turns `beta` times over the original context.
                let pair = |beta: f32| {
                    n * (n_ctx_original as f64 / (beta as f64 * 2.0 * PI)).ln() / (2.0 * base.ln())
                };
                let low = pair(beta_fast).floor().max(0.0);
                let high = pair(beta_slow).ceil().min(n - 1.0);
                for (i, s) in speeds.iter_mut().enumerate() {
                    let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    let keep = (1.0 - ramp) * ext_factor as f64;
                    *s = *s / factor * (1.0 - keep) + *s * keep;
                }
                magnitude = attn_factor as f64;
                if ext_factor != 0.0 {
                    magnitude *= 1.0 + 0.1 * factor.ln();
                }
            }
        }
        Self { pairs, head_dim, speeds, magnitude }
    }

    /// The turns of tokens at `positions`.
    pub fn rotations(&self, positions: impl Iterator<Item = usize>) -> Rotations {
        let turns = positions
            .flat_map(|p| {
                self.speeds.iter().map(move |speed| {
                    let (sin, cos) = (p as f64 * speed).sin_cos();
                    ((cos * self.magnitude) as f32, (sin * self.magnitude) as f32)
                })
            })
            .collect();
        Rotations { pairs: self.pairs, turns, n_pairs: self.speeds.len(), head_dim: self.head_dim }
    }
}
