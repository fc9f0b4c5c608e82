//! The KV cache on a device: one piece of memory for a full context, from which blocks are taken and given back. Past
//! it, blocks lie in the host's memory, which the device reads over the bus: slower, but nothing is refused.

use std::sync::{Arc, Mutex, PoisonError};

use crate::Result;
use crate::backend::{FULL_BLOCKS, KvShape};

use super::launch::{Memory, Pinned, Stream};

/// What blocks are aligned to.
const ALIGN: usize = 256;

/// Free ranges of a piece of memory, ascending and apart.
struct Free(Vec<std::ops::Range<usize>>);

impl Free {
    /// Takes `n` bytes from the first range that has them.
    fn take(&mut self, n: usize) -> Option<usize> {
        let i = self.0.iter().position(|r| r.len() >= n)?;
        let start = self.0[i].start;
        self.0[i].start += n;
        if self.0[i].is_empty() {
            self.0.remove(i);
        }
        Some(start)
    }

    fn give(&mut self, start: usize, n: usize) {
        let i = self.0.partition_point(|r| r.start < start);
        self.0.insert(i, start..start + n);
        if i + 1 < self.0.len() && self.0[i].end == self.0[i + 1].start {
            self.0[i].end = self.0[i + 1].end;
            self.0.remove(i + 1);
        }
        if i > 0 && self.0[i - 1].end == self.0[i].start {
            self.0[i - 1].end = self.0[i].end;
            self.0.remove(i);
        }
    }
}

/// A device's cache.
pub struct Pool {
    stream: Arc<Stream>,
    shape: KvShape,
    memory: Option<Memory>,
    free: Mutex<Free>,
}

/// Bytes of a cache of `n_blocks` blocks.
pub fn cache_bytes(shape: &KvShape, n_blocks: usize) -> usize {
    let bytes = |i: usize| shape.block_bytes(i).next_multiple_of(ALIGN);
    let full: usize = (0..n_blocks.min(FULL_BLOCKS)).map(bytes).sum();
    n_blocks.saturating_sub(FULL_BLOCKS).saturating_mul(bytes(FULL_BLOCKS)).saturating_add(full)
}

impl Pool {
    pub fn new(stream: &Arc<Stream>, shape: KvShape, n_blocks: usize) -> Result<Arc<Self>> {
        let n_bytes = cache_bytes(&shape, n_blocks);
        let memory = if n_bytes > 0 { Some(stream.allocate(n_bytes)?) } else { None };
        let free = Mutex::new(Free(std::iter::once(0..n_bytes).filter(|r| !r.is_empty()).collect()));
        Ok(Arc::new(Self { stream: stream.clone(), shape, memory, free }))
    }

    pub fn shape(&self) -> &KvShape {
        &self.shape
    }

    /// An empty block, number `index` of a sequence.
    pub fn block(self: &Arc<Self>, index: usize) -> Result<Block> {
        let n_bytes = self.shape.block_bytes(index);
        let taken = n_bytes.next_multiple_of(ALIGN);
        let place = self.free.lock().unwrap_or_else(PoisonError::into_inner).take(taken);
        let place = match (place, &self.memory) {
            (Some(start), Some(memory)) => {
                let address = memory.address() + start as u64;
                self.stream.zero(address, n_bytes).inspect_err(|_| self.give(start, taken))?;
                Place::Device { start, address }
            }
            _ => Place::Host(self.stream.pin(n_bytes)?),
        };
        Ok(Block { pool: self.clone(), n_bytes, place })
    }

    fn give(&self, start: usize, n: usize) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).give(start, n);
    }
}

enum Place {
    Device { start: usize, address: u64 },
    Host(Pinned),
}

/// Keys and values of some tokens on a device.
pub struct Block {
    pool: Arc<Pool>,
    n_bytes: usize,
    place: Place,
}

impl Block {
    pub fn address(&self) -> u64 {
        match &self.place {
            Place::Device { address, .. } => *address,
            Place::Host(pinned) => pinned.address(),
        }
    }

    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// A block of its own with the same content, number `index` of a sequence.
    pub fn copy(&self, index: usize) -> Result<Self> {
        let copy = self.pool.block(index)?;
        self.pool.stream.copy(copy.address(), self.address(), self.n_bytes)?;
        Ok(copy)
    }

    pub fn read(&self, out: &mut [u8]) -> Result<()> {
        assert_eq!(out.len(), self.n_bytes);
        self.pool.stream.read(self.address(), out)
    }

    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        assert_eq!(bytes.len(), self.n_bytes);
        self.pool.stream.write_at(self.address(), bytes)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if let Place::Device { start, .. } = self.place {
            self.pool.give(start, self.n_bytes.next_multiple_of(ALIGN));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use super::Free;

    #[test]
    fn ranges_are_taken_and_grow_together_again() {
        let mut free = Free(Vec::from([Range { start: 0, end: 100 }]));
        let (a, b, c) = (free.take(30).unwrap(), free.take(30).unwrap(), free.take(40).unwrap());
        assert_eq!((a, b, c, free.take(1)), (0, 30, 60, None));
        free.give(a, 30);
        free.give(c, 40);
        assert_eq!(free.take(50), None);
        free.give(b, 30);
        assert_eq!((free.0.len(), free.0[0].clone()), (1, 0..100));
    }
}
