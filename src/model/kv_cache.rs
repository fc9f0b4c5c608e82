//! The tokens of a sequence and their cached keys and values, in shared blocks: sequences that have a prefix in common
//! hold the same blocks, and one that writes into a shared block first takes a copy.

use std::sync::Arc;

use crate::backend::KV_BLOCK;

pub struct Sequence<B> {
    tokens: Vec<u32>,
    blocks: Vec<Arc<B>>,
}

impl<B> Default for Sequence<B> {
    fn default() -> Self {
        Self { tokens: Vec::new(), blocks: Vec::new() }
    }
}

/// A fork: both go on from here, each for itself.
impl<B> Clone for Sequence<B> {
    fn clone(&self) -> Self {
        Self { tokens: self.tokens.clone(), blocks: self.blocks.clone() }
    }
}

impl<B: Clone> Sequence<B> {
    /// A sequence of known content; `blocks` cover `tokens`.
    pub fn restored(tokens: Vec<u32>, blocks: Vec<B>) -> Self {
        assert_eq!(blocks.len(), tokens.len().div_ceil(KV_BLOCK));
        Self { tokens, blocks: blocks.into_iter().map(Arc::new).collect() }
    }

    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    pub fn blocks(&self) -> &[Arc<B>] {
        &self.blocks
    }

    /// Cuts the sequence back to its first `n` tokens; longer than it is changes nothing.
    pub fn truncate(&mut self, n: usize) {
        self.tokens.truncate(n);
        self.blocks.truncate(self.tokens.len().div_ceil(KV_BLOCK));
    }

    /// Makes blocks for `n` more tokens; `new` is told a block's number.
    pub fn reserve(&mut self, n: usize, mut new: impl FnMut(usize) -> B) {
        let n_blocks = (self.tokens.len() + n).div_ceil(KV_BLOCK);
        while self.blocks.len() < n_blocks {
            self.blocks.push(Arc::new(new(self.blocks.len())));
        }
    }

    /// The block of `position`, to write into: this sequence's own from now on.
    pub fn block_mut(&mut self, position: usize) -> &mut B {
        Arc::make_mut(&mut self.blocks[position / KV_BLOCK])
    }

    /// Takes in tokens whose keys and values have been written.
    pub fn append(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        debug_assert!(self.blocks.len() >= self.tokens.len().div_ceil(KV_BLOCK));
    }
}
