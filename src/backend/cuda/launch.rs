//! The floor that touches the driver: contexts, memory, launches, graphs. The only room of `cuda` with unsafe code.
//!
//! All but copies of weights that go by waits for its turn on one stream, and memory is given back only when that has finished. Memory that both
//! sides see is reached through atomics, or read and written while the other side waits at a flag.

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use cudarc::driver::sys::{self, CUstreamCaptureMode};
use cudarc::driver::{CudaContext, CudaEvent, CudaGraph, CudaStream, DriverError, result};

use crate::{Error, Result};

use super::workspace::GRANULE;

/// The error of this crate for one of the driver's.
fn failed(number: usize, doing: &str) -> impl FnOnce(DriverError) -> Error + use<> {
    let doing = doing.to_owned();
    move |e| Error::gpu(number, format_args!("{doing}: {}", message(&e)))
}

fn message(e: &DriverError) -> String {
    let text = |s: std::result::Result<&std::ffi::CStr, DriverError>| {
        s.map_or_else(|_| "unknown error".to_owned(), |s| s.to_string_lossy().into_owned())
    };
    format!("{} ({})", text(e.error_string()), text(e.error_name()))
}

/// Whether there is a driver to ask.
pub fn has_driver() -> bool {
    // SAFETY: it loads a library and looks no further.
    unsafe { sys::is_culib_present() }
}

/// How many devices the driver knows.
pub fn device_count() -> Result<usize> {
    match CudaContext::device_count() {
        Ok(n) => Ok(n.max(0) as usize),
        // A driver without a device, or with all of them hidden.
        Err(DriverError(sys::cudaError_enum::CUDA_ERROR_NO_DEVICE)) => Ok(0),
        Err(e) => Err(failed(0, "starting the driver")(e)),
    }
}

/// A device's context and the stream that all its work goes through.
pub struct Stream {
    number: usize,
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
    /// Bytes of device memory in use through this.
    used: AtomicU64,
    /// The most that may be.
    limit: AtomicU64,
}

impl Stream {
    pub fn new(number: usize) -> Result<Arc<Self>> {
        if !has_driver() {
            return Err(Error::gpu(number, "no NVIDIA driver (libcuda.so) on this machine"));
        }
        let n = device_count()?;
        if number >= n {
            return Err(Error::gpu(number, format_args!("this machine has {n}, counted from 0")));
        }
        let context = CudaContext::new(number).map_err(failed(number, "opening the device"))?;
        // SAFETY: nothing has been allocated yet; this module orders streams itself.
        unsafe { context.disable_event_tracking() };
        let stream = context.new_stream().map_err(failed(number, "making a stream"))?;
        Ok(Arc::new(Self {
            number,
            context,
            stream,
            used: AtomicU64::new(0),
            limit: AtomicU64::new(u64::MAX),
        }))
    }

    pub fn number(&self) -> usize {
        self.number
    }

    /// The device's name.
    pub fn name(&self) -> Result<String> {
        self.context.name().map_err(failed(self.number, "asking its name"))
    }

    /// Bytes of its memory that nobody has taken, and all.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let (free, total) =
            self.context.mem_get_info().map_err(failed(self.number, "asking for its memory"))?;
        Ok((free as u64, total as u64))
    }

    /// The most bytes that allocations may take together from now on.
    pub fn set_limit(&self, bytes: u64) {
        self.limit.store(bytes, Ordering::Relaxed);
    }

    pub fn used(&self) -> u64 {
        self.used.load(Ordering::Relaxed)
    }

    fn bind(&self) -> Result<()> {
        self.context.bind_to_thread().map_err(failed(self.number, "using the device"))
    }

    /// Waits until all work is done.
    pub fn finish(&self) -> Result<()> {
        self.stream.synchronize().map_err(failed(self.number, "computing"))
    }

    /// Whether all work is done; an error where some failed.
    pub fn is_done(&self) -> Result<bool> {
        self.bind()?;
        // SAFETY: the stream lives as long as this.
        match unsafe { sys::cuStreamQuery(self.stream.cu_stream()) }.result() {
            Ok(()) => Ok(true),
            Err(DriverError(sys::cudaError_enum::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(e) => Err(failed(self.number, "computing")(e)),
        }
    }

    /// `n_bytes` of device memory, which hold anything.
    pub fn allocate(self: &Arc<Self>, n_bytes: usize) -> Result<Memory> {
        let taken = (n_bytes.max(1) as u64).next_multiple_of(GRANULE);
        let (used, limit) = (self.used(), self.limit.load(Ordering::Relaxed));
        if used + taken > limit {
            let reason = format!("{taken} bytes more than the {used} in use are over the budget of {limit}");
            return Err(Error::gpu(self.number, reason));
        }
        self.bind()?;
        // SAFETY: a context is bound.
        let address = unsafe { result::malloc_sync(n_bytes.max(1)) };
        let doing = format!("allocating {n_bytes} bytes of device memory");
        let address = address.map_err(failed(self.number, &doing))?;
        self.used.fetch_add(taken, Ordering::Relaxed);
        Ok(Memory { stream: self.clone(), address, n_bytes, taken })
    }

    /// Device memory that holds `values`.
    pub fn upload<T: Plain>(self: &Arc<Self>, values: &[T]) -> Result<Memory> {
        // SAFETY: plain values have no bytes that are nobody's.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr() as *const u8, size_of_val(values)) };
        let memory = self.allocate(bytes.len())?;
        self.write(&memory, 0, bytes)?;
        Ok(memory)
    }

    /// Writes `bytes` at `offset`; they are read before this returns.
    pub fn write(&self, to: &Memory, offset: usize, bytes: &[u8]) -> Result<()> {
        assert!(offset + bytes.len() <= to.n_bytes);
        if bytes.is_empty() {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: inside the allocation; the driver copies ordinary memory before it returns.
        let done =
            unsafe { result::memcpy_htod_async(to.address + offset as u64, bytes, self.stream.cu_stream()) };
        done.map_err(failed(self.number, "copying to the device"))
    }

    /// Copies from pinned memory, later: the caller leaves `from` alone until the stream has got there.
    pub fn copy_in(&self, to: &Memory, from: &Pinned, n_bytes: usize) -> Result<()> {
        self.copy_in_on(&self.stream, to, from, n_bytes)
    }

    fn copy_in_on(&self, stream: &CudaStream, to: &Memory, from: &Pinned, n_bytes: usize) -> Result<()> {
        assert!(n_bytes <= to.n_bytes && n_bytes <= from.n_bytes);
        if n_bytes == 0 {
            return Ok(());
        }
        self.bind()?;
        // SAFETY: inside both allocations; pinned memory stays where it is.
        let done = unsafe {
            let bytes = std::slice::from_raw_parts(from.host as *const u8, n_bytes);
            result::memcpy_htod_async(to.address, bytes, stream.cu_stream())
        };
        done.map_err(failed(self.number, "copying to the device"))
    }

    /// Marks where the work given so far ends.
    pub fn mark(&self, event: &Event) -> Result<()> {
        event.0.record(&self.stream).map_err(failed(self.number, "marking a place in a stream"))
    }

    /// What is given from now on waits for `event`.
    pub fn wait_for(&self, event: &Event) -> Result<()> {
        self.stream.wait(&event.0).map_err(failed(self.number, "waiting for another stream"))
    }

    /// Copies to pinned memory, later: it holds the bytes once the stream has got there.
    pub fn copy_out(&self, to: &Pinned, from: &Memory, n_bytes: usize) -> Result<()> {
        assert!(n_bytes <= from.n_bytes && n_bytes <= to.n_bytes);
        self.bind()?;
        // SAFETY: inside both allocations; nobody reads the pinned memory before the stream has got there.
        let done = unsafe {
            let bytes = std::slice::from_raw_parts_mut(to.host as *mut u8, n_bytes);
            result::memcpy_dtoh_async(bytes, from.address, self.stream.cu_stream())
        };
        done.map_err(failed(self.number, "copying from the device"))
    }

    /// Device memory from `address` on, once all work is done.
    pub fn read(&self, address: u64, out: &mut [u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's address lies in device memory of this length; `finish` waits for the copy.
        let done = unsafe { result::memcpy_dtoh_async(out, address, self.stream.cu_stream()) };
        done.map_err(failed(self.number, "copying from the device"))?;
        self.finish()
    }

    /// Copies `n_bytes` on the device.
    pub fn copy(&self, to: u64, from: u64, n_bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's addresses lie in device memory of this length.
        let done = unsafe { result::memcpy_dtod_async(to, from, n_bytes, self.stream.cu_stream()) };
        done.map_err(failed(self.number, "copying on the device"))
    }

    /// Writes `bytes` to an address in device memory; they are read before this returns.
    pub fn write_at(&self, address: u64, bytes: &[u8]) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's address lies in device memory of this length.
        let done = unsafe { result::memcpy_htod_async(address, bytes, self.stream.cu_stream()) };
        done.map_err(failed(self.number, "copying to the device"))
    }

    /// Zeroes `n_bytes` from `address` on.
    pub fn zero(&self, address: u64, n_bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller's address lies in device memory of this length.
        let done = unsafe { result::memset_d8_async(address, 0, n_bytes, self.stream.cu_stream()) };
        done.map_err(failed(self.number, "clearing device memory"))
    }

    /// Host memory that the device sees too.
    pub fn pin(self: &Arc<Self>, n_bytes: usize) -> Result<Pinned> {
        self.bind()?;
        let n_bytes = n_bytes.max(1);
        let doing = format!("allocating {n_bytes} bytes of pinned memory");
        let flags = sys::CU_MEMHOSTALLOC_DEVICEMAP | sys::CU_MEMHOSTALLOC_PORTABLE;
        // SAFETY: a context is bound. Not write-combined: the host reads it.
        let host = unsafe { result::malloc_host(n_bytes, flags) }.map_err(failed(self.number, &doing))?;
        let mut pinned = Pinned { stream: self.clone(), host, address: 0, n_bytes };
        // SAFETY: `host` is pinned and mapped.
        let done = unsafe { sys::cuMemHostGetDevicePointer_v2(&mut pinned.address, host, 0) }.result();
        done.map_err(failed(self.number, "mapping pinned memory"))?;
        // SAFETY: just allocated, and the device knows nothing of it yet.
        unsafe { std::ptr::write_bytes(host as *mut u8, 0, n_bytes) };
        Ok(pinned)
    }

    /// The functions `names` of a module's PTX.
    pub fn load(&self, ptx: &str, names: &[String]) -> Result<(Module, Vec<Function>)> {
        self.bind()?;
        let text = CString::new(ptx).expect("PTX has no zero bytes");
        // SAFETY: a text that ends with zero, as the driver wants PTX.
        let module = unsafe { result::module::load_data(text.as_ptr() as *const c_void) };
        let doing = "loading kernels (they need a driver of CUDA 12.0, 525, or later)";
        let handle = module.map_err(failed(self.number, doing))?;
        let module = Module { context: self.context.clone(), handle };
        let functions = names.iter().map(|name| {
            let c_name = CString::new(name.as_str()).expect("a kernel's name");
            // SAFETY: the module is loaded.
            let function = unsafe { result::module::get_function(handle, c_name) };
            function.map(Function).map_err(failed(self.number, &format!("finding kernel {name}")))
        });
        let functions = functions.collect::<Result<_>>()?;
        Ok((module, functions))
    }

    /// Launches `function` on blocks of `block` threads.
    ///
    /// # Safety
    /// `args` are the kernel's parameters in order, each of its C type, and what they point to is as long as the
    /// kernel takes it to be.
    pub unsafe fn launch(
        &self,
        function: Function,
        grid: (usize, usize, usize),
        block: usize,
        n_shared: usize,
        args: &mut [*mut c_void],
    ) -> Result<()> {
        self.bind()?;
        let grid = (grid.0 as u32, grid.1 as u32, grid.2 as u32);
        let stream = self.stream.cu_stream();
        // SAFETY: the caller's promise; the driver copies arguments before it returns.
        let done = unsafe {
            result::launch_kernel(function.0, grid, (block as u32, 1, 1), n_shared as u32, stream, args)
        };
        done.map_err(failed(self.number, "launching a kernel"))
    }

    /// Counts up the first number of `to` from a thread of the driver's once the work so far is done. `to` outlives that:
    /// it waits for the stream.
    pub fn notify(&self, to: &Pinned) -> Result<()> {
        unsafe extern "C" fn count_up(flag: *mut c_void) {
            // SAFETY: pinned memory, which is given back once the stream has finished; flags are reached through atomics.
            unsafe { &*(flag as *const AtomicU32) }.fetch_add(1, Ordering::AcqRel);
        }
        self.bind()?;
        // SAFETY: the function touches nothing but the flag, and calls no driver.
        let done =
            unsafe { sys::cuLaunchHostFunc(self.stream.cu_stream(), Some(count_up), to.host) }.result();
        done.map_err(failed(self.number, "launching a host function"))
    }

    /// Records what `work` puts on the stream as a graph, in place of doing it.
    pub fn record(&self, work: impl FnOnce() -> Result<()>) -> Result<Graph> {
        let doing = "recording a graph";
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode).map_err(failed(self.number, doing))?;
        let worked = work();
        let graph = self.stream.end_capture(sys::CUgraphInstantiate_flags(0));
        worked?;
        let nothing = || Error::gpu(self.number, "recording a graph: nothing was recorded");
        Ok(Graph(graph.map_err(failed(self.number, doing))?.ok_or_else(nothing)?))
    }

    pub fn launch_graph(&self, graph: &Graph) -> Result<()> {
        graph.0.launch().map_err(failed(self.number, "launching a graph"))
    }
}

/// A place in the work of a stream; one that nobody has marked is passed.
pub struct Event(CudaEvent);

impl Event {
    pub fn new(stream: &Stream) -> Result<Self> {
        stream.context.new_event(None).map(Self).map_err(failed(stream.number, "making an event"))
    }

    /// Whether the work up to here is done; an error where some failed.
    pub fn is_passed(&self, stream: &Stream) -> Result<bool> {
        stream.bind()?;
        self.0.try_is_complete().map_err(failed(stream.number, "computing"))
    }
}

/// A second stream of a device, for copies that go on while the first computes.
pub struct Copies {
    beside: Arc<Stream>,
    stream: Arc<CudaStream>,
}

impl Copies {
    pub fn new(beside: &Arc<Stream>) -> Result<Self> {
        let stream = beside.context.new_stream().map_err(failed(beside.number, "making a stream"))?;
        Ok(Self { beside: beside.clone(), stream })
    }

    /// Copies from pinned memory once `free` is passed, and marks `copied` when that is done.
    pub fn copy_in(
        &self,
        to: &Memory,
        from: &Pinned,
        n_bytes: usize,
        free: &Event,
        copied: &Event,
    ) -> Result<()> {
        let number = self.beside.number;
        self.stream.wait(&free.0).map_err(failed(number, "waiting for another stream"))?;
        self.beside.copy_in_on(&self.stream, to, from, n_bytes)?;
        copied.0.record(&self.stream).map_err(failed(number, "marking a place in a stream"))
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        // Whoever has this may have the memory too.
        let _ = self.stream.synchronize();
    }
}

/// The work of a step, launched at once.
pub struct Graph(CudaGraph);

// SAFETY: a graph is used through the engine that owns it, by one thread at a time.
unsafe impl Send for Graph {}

#[derive(Clone, Copy)]
pub struct Function(sys::CUfunction);

// SAFETY: a handle; the driver takes it from any thread.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// Keeps functions loaded.
pub struct Module {
    context: Arc<CudaContext>,
    handle: sys::CUmodule,
}

// SAFETY: a handle; the driver takes it from any thread.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}

impl Drop for Module {
    fn drop(&mut self) {
        let _ = self.context.bind_to_thread();
        // SAFETY: loaded once, unloaded once; functions are gone with the engine that had them.
        let _ = unsafe { result::module::unload(self.handle) };
    }
}

/// Memory of a device.
pub struct Memory {
    stream: Arc<Stream>,
    address: u64,
    n_bytes: usize,
    taken: u64,
}

impl Memory {
    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        self.stream.used.fetch_sub(self.taken, Ordering::Relaxed);
        // Work that uses it may be under way where something failed after it was launched.
        let _ = self.stream.finish();
        // SAFETY: allocated once, freed once; `finish` has bound the context.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Memory of the host that stays where it is and that the device sees.
pub struct Pinned {
    stream: Arc<Stream>,
    host: *mut c_void,
    address: u64,
    n_bytes: usize,
}

// SAFETY: plain memory; who reads and writes it when is told by flags, or by waiting for the stream.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

/// What memory may be seen as.
///
/// # Safety
/// Any bytes must be a value, and a value nothing but bytes.
pub unsafe trait Plain: Copy {}
// SAFETY: any bytes are a value.
unsafe impl Plain for u8 {}
// SAFETY: any bytes are a value.
unsafe impl Plain for u32 {}
// SAFETY: any bytes are a value.
unsafe impl Plain for u64 {}
// SAFETY: any bytes are a value.
unsafe impl Plain for f32 {}

impl Pinned {
    /// Where the device sees it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Copies `out.len()` values from place `start` on. Nobody may be writing them: a flag has said so.
    pub fn read<T: Plain>(&self, start: usize, out: &mut [T]) {
        assert!((start + out.len()) * size_of::<T>() <= self.n_bytes);
        // SAFETY: inside the allocation, which is aligned for any value.
        unsafe {
            std::ptr::copy_nonoverlapping((self.host as *const T).add(start), out.as_mut_ptr(), out.len())
        };
    }

    /// Writes `values` from place `start` on. Nobody may be reading them: a flag has said so.
    pub fn write<T: Plain>(&self, start: usize, values: &[T]) {
        assert!((start + values.len()) * size_of::<T>() <= self.n_bytes);
        // SAFETY: inside the allocation, which is aligned for any value.
        unsafe {
            std::ptr::copy_nonoverlapping(values.as_ptr(), (self.host as *mut T).add(start), values.len())
        };
    }

    /// The first `n_bytes`, to write into. Nobody may be reading them: an event has said so.
    pub fn bytes_mut(&mut self, n_bytes: usize) -> &mut [u8] {
        assert!(n_bytes <= self.n_bytes);
        // SAFETY: inside the allocation, which was zeroed; no one else has it here.
        unsafe { std::slice::from_raw_parts_mut(self.host as *mut u8, n_bytes) }
    }

    /// The number at place `i`, as a flag that both sides see.
    pub fn flag(&self, i: usize) -> &AtomicU32 {
        assert!((i + 1) * 4 <= self.n_bytes);
        // SAFETY: inside the allocation and aligned; flags are reached through atomics alone.
        unsafe { &*(self.host as *const AtomicU32).add(i) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.stream.finish();
        // SAFETY: allocated once, freed once, after the stream has finished with it.
        let _ = unsafe { result::free_host(self.host) };
    }
}
