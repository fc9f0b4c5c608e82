//! Where sequences have their keys and values: of each layer with whoever runs its attention, host or device.

use std::sync::Arc;

use crate::Result;
use crate::backend::cuda::cache::{Block, Pool};
use crate::backend::{HostBlock, KvShape};

/// A block of a sequence's cache: the host's layers and each device's.
pub struct KvBlock {
    host: Vec<u8>,
    devices: Vec<Block>,
}

pub struct Cache {
    /// Of all layers.
    kv: KvShape,
    /// Of the host's.
    host: KvShape,
    /// Of each layer, the device that has it, if one does, and its number there.
    owners: Vec<(Option<usize>, usize)>,
    pools: Vec<Arc<Pool>>,
}

impl Cache {
    /// `kv` is the cache of all layers; `owners` says of each the device that has it and its number there.
    pub fn new(kv: KvShape, owners: &[Option<(usize, usize)>], pools: Vec<Arc<Pool>>) -> Self {
        let mut n_host = 0;
        let owners = owners.iter().map(|owner| match owner {
            Some((device, local)) => (Some(*device), *local),
            None => {
                n_host += 1;
                (None, n_host - 1)
            }
        });
        let owners = owners.collect();
        Self { kv, host: KvShape { n_layers: n_host, ..kv }, owners, pools }
    }

    /// The cache of the host's layers.
    pub fn on_host(&self) -> &KvShape {
        &self.host
    }

    /// Of each layer, the device that has it, if one does, and its number there or on the host.
    pub fn owners(&self) -> &[(Option<usize>, usize)] {
        &self.owners
    }

    /// An empty block, number `index` of a sequence.
    pub fn block(&self, index: usize) -> Result<KvBlock> {
        let devices = self.pools.iter().map(|pool| pool.block(index)).collect::<Result<_>>()?;
        Ok(KvBlock { host: vec![0; self.host.block_bytes(index)], devices })
    }

    /// Bytes of a layer in block `index`.
    fn layer_bytes(&self, index: usize) -> usize {
        KvShape { n_layers: 1, ..self.kv }.block_bytes(index)
    }

    /// The bytes of block `index`, layer after layer, wherever they are.
    pub fn read(&self, block: &KvBlock, index: usize) -> Result<Vec<u8>> {
        let devices = block.devices.iter().map(|b| {
            let mut bytes = vec![0; b.n_bytes()];
            b.read(&mut bytes).map(|()| bytes)
        });
        let devices = devices.collect::<Result<Vec<_>>>()?;
        let n = self.layer_bytes(index);
        let mut out = Vec::with_capacity(n * self.owners.len());
        for (device, local) in &self.owners {
            let bytes = device.map_or(&block.host, |device| &devices[device]);
            out.extend_from_slice(&bytes[local * n..][..n]);
        }
        Ok(out)
    }

    /// Block `index` of the bytes that [`Self::read`] gave.
    pub fn write(&self, bytes: &[u8], index: usize) -> Result<KvBlock> {
        let mut block = self.block(index)?;
        let n = self.layer_bytes(index);
        let mut devices: Vec<Vec<u8>> = block.devices.iter().map(|b| vec![0; b.n_bytes()]).collect();
        for ((device, local), layer) in self.owners.iter().zip(bytes.chunks_exact(n)) {
            let to = match device {
                Some(device) => &mut devices[*device],
                None => &mut block.host,
            };
            to[local * n..][..n].copy_from_slice(layer);
        }
        for (block, bytes) in block.devices.iter().zip(&devices) {
            block.write(bytes)?;
        }
        Ok(block)
    }
}

impl KvBlock {
    /// A block of its own with the same content, number `index` of a sequence.
    pub fn copy(&self, index: usize) -> Result<Self> {
        let devices = self.devices.iter().map(|b| b.copy(index)).collect::<Result<_>>()?;
        Ok(Self { host: self.host.clone(), devices })
    }

    /// What it takes, wherever it is.
    pub fn n_bytes(&self) -> usize {
        self.host.len() + self.devices.iter().map(Block::n_bytes).sum::<usize>()
    }

    /// Where `device` has it.
    pub fn address(&self, device: usize) -> u64 {
        self.devices[device].address()
    }

    /// The host's part of a sequence's block.
    pub fn on_host(this: &mut Arc<Self>) -> HostBlock<'_> {
        if Arc::strong_count(this) == 1 {
            HostBlock::Own(&mut Arc::get_mut(this).expect("nobody else has it").host)
        } else {
            HostBlock::Shared(&this.host)
        }
    }
}
