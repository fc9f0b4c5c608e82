//! Weights of the host's that go through a device piece by piece: while one is at work, the next is on its way.

use std::sync::Arc;

use crate::quant::Matrix;
use crate::{Error, Result};

use super::form::Form;
use super::launch::{Copies, Event, Memory, Pinned, Stream};

/// Writes rows of a matrix in a form, one after the other.
pub type WriteRows<'a> = dyn FnMut(&Matrix, Form, &[u32], &mut [u8]) + 'a;

struct Slot {
    host: Pinned,
    device: Memory,
    /// The host's memory is free again.
    copied: Event,
    /// The device's is.
    used: Event,
}

pub struct Feed {
    // Before the slots: it is dropped first, once it has finished with them.
    copies: Copies,
    slots: [Slot; 2],
    /// The slot of the piece sent last.
    last: usize,
    n_bytes: usize,
}

impl Feed {
    /// For pieces of up to `n_bytes`.
    pub fn new(stream: &Arc<Stream>, n_bytes: usize) -> Result<Self> {
        let slot = || -> Result<Slot> {
            Ok(Slot {
                host: stream.pin(n_bytes)?,
                device: stream.allocate(n_bytes)?,
                copied: Event::new(stream)?,
                used: Event::new(stream)?,
            })
        };
        Ok(Self { copies: Copies::new(stream)?, slots: [slot()?, slot()?], last: 0, n_bytes })
    }

    /// Bytes of the largest piece.
    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    /// Sends what `fill` writes into `n_bytes`; what `stream` is given from now on finds it at the address returned.
    pub fn send(
        &mut self,
        stream: &Stream,
        n_bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]),
        interrupted: &mut dyn FnMut() -> bool,
    ) -> Result<u64> {
        self.last = 1 - self.last;
        let slot = &mut self.slots[self.last];
        while !slot.copied.is_passed(stream)? {
            if interrupted() {
                return Err(Error::Interrupted);
            }
            std::thread::yield_now();
        }
        fill(slot.host.bytes_mut(n_bytes));
        self.copies.copy_in(&slot.device, &slot.host, n_bytes, &slot.used, &slot.copied)?;
        stream.wait_for(&slot.copied)?;
        Ok(slot.device.address())
    }

    /// What `stream` has been given so far is all that needs the piece sent last.
    pub fn used(&self, stream: &Stream) -> Result<()> {
        stream.mark(&self.slots[self.last].used)
    }
}
