//! The tokens of a sequence and their cached keys and values, in shared blocks: sequences that have a prefix in common
//! hold the same blocks, and one that writes into a shared block first takes a copy.

use std::sync::Arc;

use crate::Result;
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

impl<B> Sequence<B> {
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

    /// Makes blocks for `n` more tokens, and those that they are written into this sequence's own. `new` is told a block's
    /// number, `copy` a shared block too. Where that fails the tokens are as they were.
    pub fn reserve(
        &mut self,
        n: usize,
        mut new: impl FnMut(usize) -> Result<B>,
        mut copy: impl FnMut(&B, usize) -> Result<B>,
    ) -> Result<()> {
        let n_blocks = (self.tokens.len() + n).div_ceil(KV_BLOCK);
        let first = self.tokens.len() / KV_BLOCK;
        if let Some(block) = self.blocks.get_mut(first)
            && Arc::get_mut(block).is_none()
        {
            *block = Arc::new(copy(block, first)?);
        }
        while self.blocks.len() < n_blocks {
            self.blocks.push(Arc::new(new(self.blocks.len())?));
        }
        Ok(())
    }

    /// The blocks, to write into where they are this sequence's own.
    pub fn blocks_mut(&mut self) -> &mut [Arc<B>] {
        &mut self.blocks
    }

    /// Takes in tokens whose keys and values have been written.
    pub fn append(&mut self, tokens: &[u32]) {
        self.tokens.extend_from_slice(tokens);
        debug_assert!(self.blocks.len() >= self.tokens.len().div_ceil(KV_BLOCK));
    }
}
