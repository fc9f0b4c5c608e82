//! The forward pass: from token ids to logits, for any architecture, mode and device.

use crate::backend::{Backend, KvShape, Place};
use crate::sparse::{Counts, ffn};
use crate::{Error, Result};

use super::kv_cache::Sequence;
use super::{Layer, Model};

/// Tokens that continue a sequence, and which of them want logits.
pub struct Part<'a, B> {
    pub sequence: &'a mut Sequence<B>,
    pub tokens: &'a [u32],
    /// Logits for the last `n_logits` tokens.
    pub n_logits: usize,
}

/// The pass's buffers, kept from one to the next.
#[derive(Default)]
pub struct Scratch<T> {
    /// The residual stream, (n_tokens, n_embd).
    x: T,
    normed: T,
    attn_in: T,
    q: T,
    k: T,
    v: T,
    turned: T,
    attended: T,
    /// What a sub-layer adds to the residual.
    update: T,
    ffn_update: T,
    ffn: ffn::Scratch<T>,
    logits: T,
}

/// How a pass is to be done.
pub struct Pass<'a> {
    pub model: &'a Model,
    pub kv: &'a KvShape,
    pub threshold: f32,
    /// Asked before every layer; true gives up.
    pub interrupted: &'a mut dyn FnMut() -> bool,
}

impl Pass<'_> {
    /// Runs `parts` side by side and appends their tokens to their sequences. Returns the wanted logits, (n, n_vocab),
    /// in order. After an interruption the sequences are as they were.
    pub fn run<'s, B: Backend>(
        &mut self,
        b: &mut B,
        parts: &mut [Part<B::KvBlock>],
        scratch: &'s mut Scratch<B::Buffer>,
        counts: &mut [Counts],
    ) -> Result<&'s [f32]> {
        for part in parts.iter_mut() {
            part.sequence.reserve(part.tokens.len(), |index| b.kv_block(self.kv, index));
        }
        let done = self.layers(b, parts, scratch, counts);
        for part in parts.iter_mut() {
            match done {
                Ok(()) => part.sequence.append(part.tokens),
                Err(_) => part.sequence.truncate(part.sequence.len()),
            }
        }
        done?;
        Ok(self.head(b, parts, scratch))
    }

    fn layers<B: Backend>(
        &mut self,
        b: &mut B,
        parts: &mut [Part<B::KvBlock>],
        s: &mut Scratch<B::Buffer>,
        counts: &mut [Counts],
    ) -> Result<()> {
        let model = self.model;
        let tokens: Vec<u32> = parts.iter().flat_map(|p| p.tokens.iter().copied()).collect();
        let positions: Vec<usize> =
            parts.iter().flat_map(|p| p.sequence.len()..p.sequence.len() + p.tokens.len()).collect();
        b.embed(&model.token_embd, &tokens, &mut s.x); // (n_tokens, n_embd)
        if let Some((table, first)) = &model.positions {
            let rows: Vec<u32> = positions.iter().map(|p| (p + first) as u32).collect();
            b.add_embedding(table, &rows, &mut s.x);
        }
        let rotations = model.config.rope.as_ref().map(|r| r.rotations(positions.iter().copied()));
        for (i, (layer, counts)) in model.layers.iter().zip(counts).enumerate() {
            if (self.interrupted)() {
                return Err(Error::Interrupted);
            }
            b.norm(&layer.attn_norm, &s.x, &mut s.normed);
            self.attention(b, i, layer, rotations.as_ref(), parts, s);
            match &layer.ffn_norm {
                None => {
                    // Side by side: the FFN reads the layer's input too.
                    self.ffn(b, layer, tokens.len(), s, counts);
                    b.add(&mut s.x, &s.update);
                }
                Some(norm) => {
                    b.add(&mut s.x, &s.update);
                    b.norm(norm, &s.x, &mut s.normed);
                    self.ffn(b, layer, tokens.len(), s, counts);
                }
            }
            b.add(&mut s.x, &s.ffn_update);
        }
        Ok(())
    }

    /// Leaves what attention adds to the residual in `s.update`.
    fn attention<B: Backend>(
        &self,
        b: &mut B,
        i: usize,
        layer: &Layer,
        rotations: Option<&crate::backend::Rotations>,
        parts: &mut [Part<B::KvBlock>],
        s: &mut Scratch<B::Buffer>,
    ) {
        let input = match &layer.attn_norm_2 {
            Some(norm) => {
                b.norm(norm, &s.x, &mut s.attn_in);
                &s.attn_in
            }
            None => &s.normed,
        };
        let qkv = &layer.qkv;
        b.matmul([&qkv.q, &qkv.k, &qkv.v], input, [&mut s.q, &mut s.k, &mut s.v]);
        for (norm, x) in [(&layer.q_norm, &mut s.q), (&layer.k_norm, &mut s.k)] {
            if let Some(norm) = norm {
                b.norm(norm, x, &mut s.turned); // (n_tokens, n_heads * head_dim)
                std::mem::swap(x, &mut s.turned);
            }
        }
        if let Some(rotations) = rotations {
            b.rope(rotations, &mut s.q);
            b.rope(rotations, &mut s.k);
        }
        let mut row = 0;
        for part in parts.iter_mut() {
            for j in 0..part.tokens.len() {
                let position = part.sequence.len() + j;
                b.store(self.kv, i, &s.k, &s.v, row, part.sequence.block_mut(position), position);
                row += 1;
            }
        }
        let places: Vec<Place<B::KvBlock>> = parts
            .iter()
            .flat_map(|p| {
                let (blocks, start) = (p.sequence.blocks(), p.sequence.len());
                (0..p.tokens.len()).map(move |j| Place { blocks, position: start + j })
            })
            .collect();
        b.attend(self.kv, i, &s.q, &places, &mut s.attended); // (n_tokens, n_heads * head_dim)
        b.matmul([&layer.attn_output], &s.attended, [&mut s.update]); // (n_tokens, n_embd)
    }

    fn ffn<B: Backend>(
        &self,
        b: &mut B,
        layer: &Layer,
        n_tokens: usize,
        s: &mut Scratch<B::Buffer>,
        counts: &mut Counts,
    ) {
        let mode = self.model.sparsity;
        let (x, residual) = (&s.normed, &s.x);
        layer.ffn.run(b, mode, self.threshold, n_tokens, x, residual, &mut s.ffn, &mut s.ffn_update, counts);
    }

    fn head<'s, B: Backend>(
        &self,
        b: &mut B,
        parts: &[Part<B::KvBlock>],
        s: &'s mut Scratch<B::Buffer>,
    ) -> &'s [f32] {
        let mut wanted = Vec::new();
        let mut end = 0;
        for part in parts {
            end += part.tokens.len();
            wanted.extend(end - part.n_logits..end);
        }
        if wanted.is_empty() {
            return &[];
        }
        b.take_rows(&mut s.x, self.model.config.n_embd, &wanted);
        b.norm(&self.model.output_norm, &s.x, &mut s.normed);
        b.matmul([&self.model.output], &s.normed, [&mut s.logits]); // (n, n_vocab)
        b.read(&s.logits)
    }
}
