//! One layer of the forward pass, for any architecture and device.

use crate::backend::{Backend, Rotations};

/// A layer's weights but for its FFN's, where a device has them.
pub struct Block<L, N> {
    pub attn_norm: N,
    /// Where there is one, it feeds attention, and `attn_norm` the FFN alone.
    pub attn_norm_2: Option<N>,
    pub qkv: Qkv<L>,
    pub q_norm: Option<N>,
    pub k_norm: Option<N>,
    pub attn_output: L,
    /// None in a parallel block.
    pub ffn_norm: Option<N>,
}

pub struct Qkv<L> {
    pub q: L,
    pub k: L,
    pub v: L,
}

/// The pass's buffers, kept from one to the next.
#[derive(Default)]
pub struct Scratch<T> {
    /// The residual stream, (n_tokens, n_embd).
    pub x: T,
    pub normed: T,
    pub attn_in: T,
    pub q: T,
    pub k: T,
    pub v: T,
    pub turned: T,
    pub attended: T,
    /// What a sub-layer adds to the residual.
    pub update: T,
    pub ffn_update: T,
}

impl<L, N> Block<L, N> {
    /// Runs the layer, number `layer` in `cache`, on the tokens in `s.x`. `ffn` is given its normalised input, the residual
    /// and room for what it adds to it.
    pub fn run<B: Backend<Linear = L, Norm = N>>(
        &self,
        b: &mut B,
        layer: usize,
        rotations: Option<&Rotations>,
        cache: &mut B::Cache<'_>,
        s: &mut Scratch<B::Buffer>,
        ffn: impl FnOnce(&mut B, &B::Buffer, &B::Buffer, &mut B::Buffer),
    ) {
        b.norm(&self.attn_norm, &s.x, &mut s.normed);
        self.attention(b, layer, rotations, cache, s);
        match &self.ffn_norm {
            None => {
                // Side by side: the FFN reads the layer's input too.
                ffn(b, &s.normed, &s.x, &mut s.ffn_update);
                b.add(&mut s.x, &s.update);
            }
            Some(norm) => {
                b.add(&mut s.x, &s.update);
                b.norm(norm, &s.x, &mut s.normed);
                ffn(b, &s.normed, &s.x, &mut s.ffn_update);
            }
        }
        b.add(&mut s.x, &s.ffn_update);
    }

    /// Leaves what attention adds to the residual in `s.update`.
    fn attention<B: Backend<Linear = L, Norm = N>>(
        &self,
        b: &mut B,
        layer: usize,
        rotations: Option<&Rotations>,
        cache: &mut B::Cache<'_>,
        s: &mut Scratch<B::Buffer>,
    ) {
        let input = match &self.attn_norm_2 {
            Some(norm) => {
                b.norm(norm, &s.x, &mut s.attn_in);
                &s.attn_in
            }
            None => &s.normed,
        };
        let qkv = &self.qkv;
        b.matmul([&qkv.q, &qkv.k, &qkv.v], input, [&mut s.q, &mut s.k, &mut s.v]);
        for (norm, x) in [(&self.q_norm, &mut s.q), (&self.k_norm, &mut s.k)] {
            if let Some(norm) = norm {
                b.norm(norm, x, &mut s.turned); // (n_tokens, n_heads * head_dim)
                std::mem::swap(x, &mut s.turned);
            }
        }
        if let Some(rotations) = rotations {
            b.rope(rotations, &mut s.q);
            b.rope(rotations, &mut s.k);
        }
        b.store(cache, layer, &s.k, &s.v);
        b.attend(cache, layer, &s.q, &mut s.attended); // (n_tokens, n_heads * head_dim)
        b.matmul([&self.attn_output], &s.attended, [&mut s.update]); // (n_tokens, n_embd)
    }
}
