//! The threads of an engine, and how they share an operation.
//!
//! A forward pass is one entry into rayon's pool: [`Pool::enter`] wakes the helpers once, and until it returns they
//! wait, spinning, for the operations that the leader (the calling thread) gives out through [`Team::run`]. An
//! operation is cut into numbered chunks which leader and helpers claim one by one. What a chunk computes must not
//! depend on who computes it; then results don't depend on the number of threads.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::{Error, Result};

/// Spins before a waiting thread starts to give way to others, as it must where threads outnumber cores.
const SPINS: u32 = 4096;
/// Chunks a thread that make a fair share likely.
pub const CHUNKS_A_THREAD: usize = 4;

pub struct Pool {
    helpers: Option<rayon::ThreadPool>,
    n_threads: usize,
    /// Where the helpers live: a forked process has none.
    process: u32,
}

impl Pool {
    /// A pool of `n_threads`, the calling thread of [`Pool::enter`] being one of them.
    pub fn new(n_threads: usize) -> Result<Self> {
        if !(1..=1024).contains(&n_threads) {
            return Err(Error::argument("threads", n_threads, "1 to 1024"));
        }
        let helpers = if n_threads == 1 {
            None
        } else {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(n_threads - 1)
                .thread_name(|i| format!("powerinfer-{}", i + 1))
                .build()
                .map_err(|e| Error::device("cpu", e))?;
            Some(pool)
        };
        Ok(Self { helpers, n_threads, process: std::process::id() })
    }

    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Fails in a process that was forked from the one that made the pool: it would wait for helpers for ever.
    pub fn check_process(&self) -> Result<()> {
        if self.helpers.is_some() && std::process::id() != self.process {
            let reason = "the engine was made before this process was forked; make one here".to_owned();
            return Err(Error::device("cpu", reason));
        }
        Ok(())
    }

    /// Runs `body` on this thread with the helpers at its side.
    pub fn enter<R>(&self, body: impl FnOnce(&Team) -> R) -> R {
        let team = Team {
            n_threads: self.n_threads,
            job: UnsafeCell::new(None),
            ticket: AtomicU64::new(0),
            done: AtomicUsize::new(0),
            panic: Mutex::new(None),
            over: AtomicBool::new(false),
        };
        let Some(helpers) = &self.helpers else { return body(&team) };
        helpers.in_place_scope(|scope| {
            for _ in 1..self.n_threads {
                scope.spawn(|_| team.help());
            }
            // Helpers leave when this is dropped, also where `body` panics; the scope waits for them.
            let _over = Over(&team);
            body(&team)
        })
    }
}

struct Over<'a>(&'a Team);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.over.store(true, Ordering::Release);
    }
}

type Job = &'static (dyn Fn(usize) + Sync);

/// The threads inside one [`Pool::enter`].
pub struct Team {
    n_threads: usize,
    /// What the current operation does with a chunk; written by the leader before the ticket announces it.
    job: UnsafeCell<Option<Job>>,
    /// The operation's number (24 bits), its chunks (20 bits), the next chunk to claim (20 bits).
    ticket: AtomicU64,
    /// Chunks of the current operation that are finished.
    done: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    over: AtomicBool,
}

const CHUNK_BITS: u32 = 20;
const CHUNK_MASK: u64 = (1 << CHUNK_BITS) - 1;

// SAFETY: `job` is the only field that isn't Sync. The leader alone writes it, when no chunk of the operation before
// is left to claim or unfinished; others read it only after claiming a chunk with an acquiring exchange on `ticket`,
// which the leader stores with release after writing `job`.
unsafe impl Sync for Team {}

impl Team {
    pub fn n_threads(&self) -> usize {
        self.n_threads
    }

    /// Calls `f` with every number below `n_chunks`, on all threads, and returns when all calls have returned.
    /// Leader only; not to be nested. Panics where a chunk did, with its payload.
    pub fn run(&self, n_chunks: usize, f: &(dyn Fn(usize) + Sync)) {
        if self.n_threads == 1 || n_chunks <= 1 {
            (0..n_chunks).for_each(f);
            return;
        }
        let most = CHUNK_MASK as usize - 1;
        if n_chunks > most {
            let each = n_chunks.div_ceil(most);
            let several = |c: usize| (c * each..((c + 1) * each).min(n_chunks)).for_each(f);
            return self.run(n_chunks.div_ceil(each), &several);
        }
        // SAFETY: only the lifetime changes. Nobody calls the job after this function has returned: a thread calls
        // it only for a chunk it has claimed, and all claimed chunks are waited for below.
        let job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(f) };
        // SAFETY: see `Sync` above: all chunks of the last operation are done, so nobody reads `job` now.
        unsafe { *self.job.get() = Some(job) };
        self.done.store(0, Ordering::Relaxed);
        let number = (self.ticket.load(Ordering::Relaxed) >> (2 * CHUNK_BITS)) + 1;
        self.ticket.store(number << (2 * CHUNK_BITS) | (n_chunks as u64) << CHUNK_BITS, Ordering::Release);
        while self.claim_and_run() {}
        let mut spins = 0;
        while self.done.load(Ordering::Acquire) < n_chunks {
            wait(&mut spins);
        }
        if let Some(payload) = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
            resume_unwind(payload);
        }
    }

    /// Claims a chunk of the current operation and runs it; false where none is left.
    fn claim_and_run(&self) -> bool {
        let mut ticket = self.ticket.load(Ordering::Acquire);
        let chunk = loop {
            let next = ticket & CHUNK_MASK;
            if next >= ticket >> CHUNK_BITS & CHUNK_MASK {
                return false;
            }
            match self.ticket.compare_exchange_weak(ticket, ticket + 1, Ordering::Acquire, Ordering::Acquire)
            {
                Ok(_) => break next as usize,
                Err(now) => ticket = now,
            }
        };
        // SAFETY: a chunk is claimed, so the job was announced and stays until that chunk is done.
        let job = unsafe { (*self.job.get()).expect("an announced job") };
        if let Err(payload) = catch_unwind(AssertUnwindSafe(|| job(chunk))) {
            *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(payload);
        }
        self.done.fetch_add(1, Ordering::Release);
        true
    }

    fn help(&self) {
        let mut spins = 0;
        while !self.over.load(Ordering::Acquire) {
            if self.claim_and_run() {
                spins = 0;
            } else {
                wait(&mut spins);
            }
        }
    }
}

fn wait(spins: &mut u32) {
    if *spins < SPINS {
        *spins += 1;
        std::hint::spin_loop();
    } else {
        std::thread::yield_now();
    }
}

/// A slice whose parts the chunks of one operation write, each its own.
pub struct Parts<'a, T> {
    data: *mut T,
    len: usize,
    _borrow: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it only hands out parts, and `Parts::part` makes its caller promise that they don't overlap.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub fn new(slice: &'a mut [T]) -> Self {
        Self { data: slice.as_mut_ptr(), len: slice.len(), _borrow: std::marker::PhantomData }
    }

    /// Where the part from `start` begins, `len` long; writing there is for the caller to keep apart. Panics where it
    /// isn't inside the slice.
    pub fn pointer(&self, start: usize, len: usize) -> *mut T {
        assert!(start <= self.len && len <= self.len - start);
        self.data.wrapping_add(start)
    }

    /// The part from `start`, `len` long. Panics where it isn't inside the slice.
    ///
    /// # Safety
    /// No two parts that overlap may be alive at a time.
    #[allow(clippy::mut_from_ref)] // That is what this type is for; the caller keeps parts apart.
    pub unsafe fn part(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: inside the slice, which is borrowed for 'a; alone, as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.data.add(start), len) }
    }
}

/// How many threads to use when nobody says: the physical cores that this process may run on, no more than its
/// cgroup's share of processor time.
pub fn default_threads() -> usize {
    let share = std::thread::available_parallelism().map_or(1, |n| n.get());
    physical_cores().map_or(share, |cores| cores.min(share)).max(1)
}

/// Counts the cores behind the processors that this process may run on, where Linux says.
fn physical_cores() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let allowed = status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:"))?;
    let mut cores = std::collections::HashSet::new();
    for range in allowed.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        for cpu in first.parse::<u32>().ok()?..=last.parse().ok()? {
            let path = format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list");
            cores.insert(std::fs::read_to_string(path).ok()?);
        }
    }
    Some(cores.len()).filter(|n| *n > 0)
}
