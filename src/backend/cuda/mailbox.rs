//! Memory and flags through which a device and the host hand a step's work to each other.
//!
//! The hand-overs of a step are numbered, in an order that both sides know. A flag holds the number of the last one done,
//! counted on from step to step, so that nobody has to put it back.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::{Error, Result};

use super::launch::{Pinned, Stream};
use super::module::Kernels;
use super::workspace::Shape;

/// Flags stand a cache line apart.
const LINE: usize = 16;
const POSTED: usize = 0;
const ANSWERED: usize = LINE;
const GIVEN_UP: usize = 2 * LINE;
const FAILED: usize = 3 * LINE;
const N_FLAGS: usize = 4 * LINE;

/// How long one side waits for the other before it gives up.
const PATIENCE: Duration = Duration::from_secs(60);
/// Spins between looks at the clock, the stream and the caller.
const SPINS: u32 = 256;

pub struct Mailbox {
    flags: Pinned,
    /// (batch, n_embd): what the device hands over.
    x: Pinned,
    /// (batch, n_embd): the residual, where the host's predictor reads it.
    residual: Pinned,
    /// (batch, n_embd): what the host hands over.
    y: Pinned,
    /// How many of the host's neurons are listed, and from place 16 on which.
    list: Pinned,
    /// (n_tokens, listed): which token needs which.
    on: Pinned,
}

impl Mailbox {
    pub fn new(stream: &Arc<Stream>, shape: &Shape) -> Result<Self> {
        let residual = shape.sizes().residual;
        Ok(Self {
            flags: stream.pin(4 * N_FLAGS)?,
            x: stream.pin(residual)?,
            residual: stream.pin(residual)?,
            y: stream.pin(residual)?,
            list: stream.pin(4 * (LINE + shape.n_ff))?,
            on: stream.pin(shape.batch * shape.n_ff)?,
        })
    }

    pub fn x_address(&self) -> u64 {
        self.x.address()
    }

    pub fn residual_address(&self) -> u64 {
        self.residual.address()
    }

    pub fn y_address(&self) -> u64 {
        self.y.address()
    }

    /// Addresses of the list, its length, and who needs which.
    pub fn list_addresses(&self) -> (u64, u64, u64) {
        (self.list.address() + 4 * LINE as u64, self.list.address(), self.on.address())
    }

    fn flag_address(&self, flag: usize) -> u64 {
        self.flags.address() + 4 * flag as u64
    }

    pub fn posted_address(&self) -> u64 {
        self.flag_address(POSTED)
    }

    /// Waits for the device to hand over `number`; `interrupted` is asked meanwhile.
    pub fn wait(&self, number: u32, stream: &Stream, interrupted: &mut dyn FnMut() -> bool) -> Result<()> {
        let posted = self.flags.flag(POSTED);
        let mut start = None;
        let mut spins = 0u32;
        while (posted.load(Ordering::Acquire).wrapping_sub(number) as i32) < 0 {
            spins += 1;
            std::hint::spin_loop();
            if !spins.is_multiple_of(SPINS) {
                continue;
            }
            if interrupted() {
                return Err(Error::Interrupted);
            }
            let is_done = stream.is_done()?;
            let waited = start.get_or_insert_with(Instant::now).elapsed();
            let is_missing = is_done && (posted.load(Ordering::Acquire).wrapping_sub(number) as i32) < 0;
            if is_missing || waited > PATIENCE {
                let what = if is_missing { "ended without its answer" } else { "gave no answer" };
                let reason = format!("{what} after {:.1} s", waited.as_secs_f64());
                return Err(Error::gpu(stream.number(), reason));
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Lets the device wait for the host's answer `number`, counted from what is at `base`.
    pub fn let_wait(&self, kernels: &Kernels, base: u64, number: u32) -> Result<()> {
        let [answered, given_up, failed] = [ANSWERED, GIVEN_UP, FAILED].map(|flag| self.flag_address(flag));
        kernels.wait(answered, base, number, given_up, failed, PATIENCE.as_nanos() as u64)
    }

    /// What the device has handed over, `n` values of each.
    pub fn take(&self, n: usize, x: &mut Vec<f32>, residual: Option<&mut Vec<f32>>) {
        x.resize(n, 0.0);
        self.x.read(0, x);
        if let Some(residual) = residual {
            residual.resize(n, 0.0);
            self.residual.read(0, residual);
        }
    }

    /// The host's neurons that the device's predictor called on, and which of `n_tokens` needs which.
    pub fn take_list(&self, n_tokens: usize, list: &mut Vec<u32>, on: &mut Vec<bool>) {
        let mut n = [0u32];
        self.list.read(0, &mut n);
        list.resize(n[0] as usize, 0);
        self.list.read(LINE, list);
        let mut bytes = vec![1u8; n_tokens * list.len()];
        if n_tokens > 1 {
            self.on.read(0, &mut bytes);
        }
        on.clear();
        on.extend(bytes.iter().map(|b| *b != 0));
    }

    /// Hands `y` over as `number`.
    pub fn answer(&self, number: u32, y: &[f32]) {
        self.y.write(0, y);
        self.flags.flag(ANSWERED).store(number, Ordering::Release);
    }

    /// Lets the device run on without answers, to the step's end.
    pub fn give_up(&self) {
        self.flags.flag(GIVEN_UP).store(1, Ordering::Release);
    }

    /// Ready for a step again; an error where the device has waited in vain since the last call.
    pub fn settle(&self, stream: &Stream) -> Result<()> {
        self.flags.flag(GIVEN_UP).store(0, Ordering::Release);
        match self.flags.flag(FAILED).swap(0, Ordering::AcqRel) {
            0 => Ok(()),
            number => {
                let reason = format!("waited {PATIENCE:?} for the host's answer {}", number - 1);
                Err(Error::gpu(stream.number(), reason))
            }
        }
    }
}
