// A `libcuda.so` that runs kernels on the host, for tests alone. Work given to a stream is done by a thread of its own,
// some time later, so that a missing wait shows. Every copy is checked against the memory that was asked for.
//
// Set by the environment: EMULATOR_DEVICES (1), EMULATOR_MEMORY (bytes a device), EMULATOR_ORDER (forward, reversed: of
// a block's threads), EMULATOR_FAIL (see emulator_fail). The functions at the end are for tests.
#include "device.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

using emulator::Kernel;

typedef int Status;
typedef unsigned long long Address;
#define API extern "C" __attribute__((visibility("default"))) Status

enum : Status {
    OK = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    LAUNCH_FAILED = 719,
    CAPTURE_UNSUPPORTED = 900,
};

namespace {

// What a driver takes for an allocation.
constexpr size_t GRANULE = 512;
// How long work waits at least before it is done, where nobody waits for it.
constexpr auto DELAY = std::chrono::microseconds(20);

struct Device {
    int number;
    size_t memory, used = 0, peak = 0;
    int n_retained = 0;
};

struct Allocation {
    size_t size;
    Device *device; // null: the host's
};

std::mutex memory_lock;
std::map<uintptr_t, Allocation> allocations;
std::atomic<long> n_handles{0};
thread_local Device *current = nullptr;
thread_local int n_capturing = 0;

std::vector<Device> &devices() {
    static std::vector<Device> all = [] {
        const char *count = std::getenv("EMULATOR_DEVICES"), *memory = std::getenv("EMULATOR_MEMORY");
        const char *order = std::getenv("EMULATOR_ORDER");
        emulator::is_reversed = order && std::string(order) == "reversed";
        std::vector<Device> devices;
        for (int i = 0; i < (count ? std::atoi(count) : 1); i++) {
            devices.push_back({i, memory ? std::strtoull(memory, nullptr, 10) : 8ull << 30});
        }
        return devices;
    }();
    return all;
}

// Failures to order: the n-th call of a kind fails, and is then forgotten.
std::mutex fail_lock;
std::map<std::string, long> fail_at, n_calls;

bool is_to_fail(const char *kind) {
    std::lock_guard<std::mutex> hold(fail_lock);
    static bool is_read = false;
    if (!is_read) {
        is_read = true;
        if (const char *order = std::getenv("EMULATOR_FAIL")) {
            std::string text = order;
            size_t colon = text.find(':');
            fail_at[text.substr(0, colon)] = std::atol(text.c_str() + colon + 1);
        }
    }
    long call = ++n_calls[kind];
    auto found = fail_at.find(kind);
    if (found == fail_at.end() || found->second != call) return false;
    fail_at.erase(found);
    return true;
}

// Whether a range lies inside one allocation.
bool is_inside(uintptr_t start, size_t size) {
    std::lock_guard<std::mutex> hold(memory_lock);
    auto next = allocations.upper_bound(start);
    if (next == allocations.begin()) return false;
    auto &[base, allocation] = *std::prev(next);
    return start + size <= base + allocation.size;
}

bool is_known(uintptr_t start) {
    std::lock_guard<std::mutex> hold(memory_lock);
    auto next = allocations.upper_bound(start);
    return next != allocations.begin() && start < std::prev(next)->first + std::prev(next)->second.size;
}

Status allocate(uintptr_t *out, size_t size, Device *device) {
    if (!size) return INVALID_VALUE;
    if (n_capturing) return CAPTURE_UNSUPPORTED;
    size_t taken = (size + GRANULE - 1) / GRANULE * GRANULE;
    std::lock_guard<std::mutex> hold(memory_lock);
    if (device && device->used + taken > device->memory) return OUT_OF_MEMORY;
    // Exactly as long as asked for, so that a sanitizer sees what goes past the end.
    void *memory = nullptr;
    if (posix_memalign(&memory, 256, size)) return OUT_OF_MEMORY;
    std::memset(memory, 0xff, size);
    if (device) {
        device->used += taken;
        device->peak = std::max(device->peak, device->used);
    }
    allocations[(uintptr_t)memory] = {size, device};
    *out = (uintptr_t)memory;
    return OK;
}

Status release(uintptr_t at) {
    std::lock_guard<std::mutex> hold(memory_lock);
    auto found = allocations.find(at);
    if (found == allocations.end()) return INVALID_VALUE;
    if (Device *device = found->second.device) {
        device->used -= (found->second.size + GRANULE - 1) / GRANULE * GRANULE;
    }
    allocations.erase(found);
    std::free((void *)at);
    return OK;
}

struct Work {
    std::function<Status()> run;
    // An event is reached even where what was before it has failed: who waits for it must not wait for ever.
    bool is_event = false;
};

struct Stream {
    Device *device;
    std::mutex lock;
    std::condition_variable changed;
    std::deque<Work> queue;
    bool is_over = false, is_busy = false;
    int n_waiting = 0;
    Status status = OK;
    std::vector<Work> *captured = nullptr;
    std::thread worker;

    explicit Stream(Device *device) : device(device), worker([this] { work(); }) { n_handles++; }

    ~Stream() {
        {
            std::lock_guard<std::mutex> hold(lock);
            is_over = true;
        }
        changed.notify_all();
        worker.join();
        n_handles--;
    }

    void work() {
        std::unique_lock<std::mutex> hold(lock);
        for (;;) {
            changed.wait(hold, [&] { return is_over || !queue.empty(); });
            if (queue.empty()) return;
            changed.wait_for(hold, DELAY, [&] { return is_over || n_waiting; });
            is_busy = true;
            while (!queue.empty()) {
                Work next = std::move(queue.front());
                queue.pop_front();
                hold.unlock();
                // After a failure nothing more is done, as on a device.
                Status done = status == OK || next.is_event ? next.run() : OK;
                hold.lock();
                if (done != OK) status = done;
            }
            is_busy = false;
            changed.notify_all();
        }
    }

    Status put(Work next) {
        if (captured) {
            captured->push_back(std::move(next));
            return OK;
        }
        std::lock_guard<std::mutex> hold(lock);
        if (status != OK) return status;
        queue.push_back(std::move(next));
        changed.notify_all();
        return OK;
    }

    Status wait() {
        if (captured) return CAPTURE_UNSUPPORTED;
        std::unique_lock<std::mutex> hold(lock);
        n_waiting++;
        changed.notify_all();
        changed.wait(hold, [&] { return queue.empty() && !is_busy; });
        n_waiting--;
        return status;
    }
};

std::mutex streams_lock;
std::vector<Stream *> streams;

struct Event {
    std::mutex lock;
    std::condition_variable changed;
    long n_recorded = 0, n_done = 0;
    std::chrono::steady_clock::time_point time;
};

struct Module {
    std::string text;
};

struct Graph {
    std::vector<Work> works;
};

Status copy(Stream *stream, uintptr_t to, uintptr_t from, size_t size, bool from_host, bool to_host) {
    if (is_to_fail("copy")) return LAUNCH_FAILED;
    if (!size) return OK;
    if ((!from_host && !is_inside(from, size)) || (!to_host && !is_inside(to, size)) ||
        (from_host && is_known(from) && !is_inside(from, size)) || (to_host && is_known(to) && !is_inside(to, size))) {
        std::fprintf(stderr, "emulator: a copy of %zu bytes outside of any allocation\n", size);
        return ILLEGAL_ADDRESS;
    }
    // Ordinary memory is read before the call returns, pinned memory when its turn comes.
    if (from_host && !is_known(from)) {
        auto bytes = std::make_shared<std::vector<char>>((char *)from, (char *)from + size);
        return stream->put({[=] {
            std::memcpy((void *)to, bytes->data(), size);
            return OK;
        }});
    }
    Status put = stream->put({[=] {
        std::memmove((void *)to, (void *)from, size);
        return OK;
    }});
    return put == OK && to_host && !is_known(to) ? stream->wait() : put;
}

// The stream of calls that name none.
Stream *default_stream() {
    static std::map<Device *, std::unique_ptr<Stream>> *all = new std::map<Device *, std::unique_ptr<Stream>>;
    static std::mutex lock;
    std::lock_guard<std::mutex> hold(lock);
    auto &stream = (*all)[current];
    if (!stream) {
        stream = std::make_unique<Stream>(current);
        n_handles--; // never asked for
    }
    return stream.get();
}

Stream *stream_of(void *handle) { return handle ? (Stream *)handle : default_stream(); }

} // namespace

API cuInit(unsigned) { return is_to_fail("init") ? 100 : OK; }
API cuDriverGetVersion(int *version) {
    *version = 12040;
    return OK;
}
API cuDeviceGetCount(int *n) {
    *n = (int)devices().size();
    return OK;
}
API cuDeviceGet(int *device, int number) {
    if (number < 0 || number >= (int)devices().size()) return INVALID_DEVICE;
    *device = number;
    return OK;
}
API cuDeviceGetName(char *out, int n, int device) {
    std::snprintf(out, n, "emulated GPU %d", device);
    return OK;
}
API cuDeviceTotalMem_v2(size_t *bytes, int device) {
    *bytes = devices()[device].memory;
    return OK;
}
API cuDeviceGetAttribute(int *value, int attribute, int) {
    // 75, 76: compute capability; 115: memory pools; 16: multiprocessors.
    *value = attribute == 75 ? 7 : attribute == 76 ? 5 : attribute == 115 ? 0 : attribute == 16 ? 4 : 1;
    return OK;
}
API cuDevicePrimaryCtxRetain(void **context, int device) {
    if (is_to_fail("context")) return OUT_OF_MEMORY;
    devices()[device].n_retained++;
    n_handles++;
    *context = &devices()[device];
    return OK;
}
API cuDevicePrimaryCtxRelease_v2(int device) {
    devices()[device].n_retained--;
    n_handles--;
    return OK;
}
API cuCtxSetCurrent(void *context) {
    current = (Device *)context;
    return OK;
}
API cuCtxGetCurrent(void **context) {
    *context = current;
    return OK;
}
API cuCtxSynchronize() {
    if (!current) return INVALID_CONTEXT;
    if (n_capturing) return CAPTURE_UNSUPPORTED;
    std::vector<Stream *> mine;
    {
        std::lock_guard<std::mutex> hold(streams_lock);
        for (Stream *s : streams) {
            if (s->device == current) mine.push_back(s);
        }
    }
    Status status = OK;
    for (Stream *s : mine) status = std::max(status, s->wait());
    return status;
}
API cuMemGetInfo_v2(size_t *free, size_t *total) {
    if (!current) return INVALID_CONTEXT;
    std::lock_guard<std::mutex> hold(memory_lock);
    *total = current->memory;
    *free = current->memory - current->used;
    return OK;
}
API cuMemAlloc_v2(Address *out, size_t size) {
    if (!current) return INVALID_CONTEXT;
    if (is_to_fail("alloc")) return OUT_OF_MEMORY;
    uintptr_t at;
    Status status = allocate(&at, size, current);
    if (status == OK) *out = at;
    return status;
}
API cuMemFree_v2(Address at) { return release(at); }
API cuMemHostAlloc(void **out, size_t size, unsigned) {
    if (!current) return INVALID_CONTEXT;
    if (is_to_fail("host_alloc")) return OUT_OF_MEMORY;
    return allocate((uintptr_t *)out, size, nullptr);
}
API cuMemFreeHost(void *at) { return release((uintptr_t)at); }
API cuMemHostGetDevicePointer_v2(Address *out, void *host, unsigned) {
    if (!is_known((uintptr_t)host)) return INVALID_VALUE;
    *out = (uintptr_t)host;
    return OK;
}
API cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t n, void *stream) {
    if (!current) return INVALID_CONTEXT;
    return copy(stream_of(stream), to, (uintptr_t)from, n, true, false);
}
API cuMemcpyDtoHAsync_v2(void *to, Address from, size_t n, void *stream) {
    if (!current) return INVALID_CONTEXT;
    return copy(stream_of(stream), (uintptr_t)to, from, n, false, true);
}
API cuMemcpyDtoDAsync_v2(Address to, Address from, size_t n, void *stream) {
    if (!current) return INVALID_CONTEXT;
    return copy(stream_of(stream), to, from, n, false, false);
}
API cuMemcpyHtoD_v2(Address to, const void *from, size_t n) {
    if (!current) return INVALID_CONTEXT;
    Status status = copy(default_stream(), to, (uintptr_t)from, n, true, false);
    return status == OK ? default_stream()->wait() : status;
}
API cuMemcpyDtoH_v2(void *to, Address from, size_t n) {
    if (!current) return INVALID_CONTEXT;
    Status status = copy(default_stream(), (uintptr_t)to, from, n, false, true);
    return status == OK ? default_stream()->wait() : status;
}
API cuMemsetD8Async(Address at, unsigned char value, size_t n, void *stream) {
    if (!current) return INVALID_CONTEXT;
    if (is_to_fail("copy")) return LAUNCH_FAILED;
    if (!is_inside(at, n)) return ILLEGAL_ADDRESS;
    return stream_of(stream)->put({[=] {
        std::memset((void *)at, value, n);
        return OK;
    }});
}

API cuStreamCreate(void **out, unsigned) {
    if (!current) return INVALID_CONTEXT;
    if (is_to_fail("stream")) return OUT_OF_MEMORY;
    Stream *stream = new Stream(current);
    std::lock_guard<std::mutex> hold(streams_lock);
    streams.push_back(stream);
    *out = stream;
    return OK;
}
API cuStreamCreateWithPriority(void **out, unsigned flags, int) { return cuStreamCreate(out, flags); }
API cuStreamDestroy_v2(void *handle) {
    Stream *stream = (Stream *)handle;
    stream->wait();
    {
        std::lock_guard<std::mutex> hold(streams_lock);
        streams.erase(std::find(streams.begin(), streams.end(), stream));
    }
    delete stream;
    return OK;
}
API cuStreamSynchronize(void *stream) { return stream_of(stream)->wait(); }
API cuStreamQuery(void *handle) {
    Stream *stream = stream_of(handle);
    std::lock_guard<std::mutex> hold(stream->lock);
    if (stream->status != OK) return stream->status;
    return stream->queue.empty() && !stream->is_busy ? OK : NOT_READY;
}
API cuStreamWaitEvent(void *stream, void *handle, unsigned) {
    Event *event = (Event *)handle;
    long number;
    {
        std::lock_guard<std::mutex> hold(event->lock);
        number = event->n_recorded;
    }
    return stream_of(stream)->put({[=] {
        std::unique_lock<std::mutex> hold(event->lock);
        event->changed.wait(hold, [&] { return event->n_done >= number; });
        return OK;
    }});
}
API cuLaunchHostFunc(void *stream, void (*f)(void *), void *data) {
    return stream_of(stream)->put({[=] {
        f(data);
        return OK;
    }});
}

API cuEventCreate(void **out, unsigned) {
    if (is_to_fail("event")) return OUT_OF_MEMORY;
    *out = new Event;
    n_handles++;
    return OK;
}
API cuEventDestroy_v2(void *event) {
    delete (Event *)event;
    n_handles--;
    return OK;
}
API cuEventRecord(void *handle, void *stream) {
    Event *event = (Event *)handle;
    if (is_to_fail("event")) return LAUNCH_FAILED;
    {
        std::lock_guard<std::mutex> hold(event->lock);
        event->n_recorded++;
    }
    Work mark{[=] {
        std::lock_guard<std::mutex> hold(event->lock);
        event->n_done++;
        event->time = std::chrono::steady_clock::now();
        event->changed.notify_all();
        return OK;
    }};
    mark.is_event = true;
    Status put = stream_of(stream)->put(mark);
    if (put != OK) mark.run();
    return put;
}
API cuEventSynchronize(void *handle) {
    Event *event = (Event *)handle;
    std::unique_lock<std::mutex> hold(event->lock);
    event->changed.wait(hold, [&] { return event->n_done >= event->n_recorded; });
    return OK;
}
API cuEventQuery(void *handle) {
    Event *event = (Event *)handle;
    std::lock_guard<std::mutex> hold(event->lock);
    return event->n_done >= event->n_recorded ? OK : NOT_READY;
}
API cuEventElapsedTime_v2(float *ms, void *start, void *end) {
    *ms = std::chrono::duration<float, std::milli>(((Event *)end)->time - ((Event *)start)->time).count();
    return OK;
}
API cuEventElapsedTime(float *ms, void *start, void *end) { return cuEventElapsedTime_v2(ms, start, end); }

API cuModuleLoadData(void **out, const void *image) {
    if (!current) return INVALID_CONTEXT;
    if (is_to_fail("module")) return 218; // invalid PTX
    *out = new Module{(const char *)image};
    n_handles++;
    return OK;
}
API cuModuleUnload(void *module) {
    delete (Module *)module;
    n_handles--;
    return OK;
}
API cuModuleGetFunction(void **out, void *module, const char *name) {
    // The kernel must be in the PTX too: there a device would look for it.
    bool is_there = ((Module *)module)->text.find(".entry " + std::string(name) + "(") != std::string::npos;
    auto found = Kernel::all().find(name);
    if (!is_there || found == Kernel::all().end()) return NOT_FOUND;
    *out = found->second;
    return OK;
}
API cuFuncGetAttribute(int *value, int, void *) {
    *value = 0;
    return OK;
}
API cuFuncSetAttribute(void *, int, int) { return OK; }

API cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned n_shared, void *handle, void **args, void **) {
    if (is_to_fail("launch")) return LAUNCH_FAILED;
    Stream *stream = stream_of(handle);
    if (!current) return INVALID_CONTEXT;
    if (stream->device != current) return INVALID_HANDLE;
    bool is_sound = gx && gy && gz && gy < 65536 && gz < 65536 && bx && by && bz && bx * by * bz <= 256 &&
                    n_shared <= 48 << 10;
    Kernel *kernel = (Kernel *)function;
    if (!is_sound) {
        std::fprintf(stderr, "emulator: %s launched with grid (%u, %u, %u), block (%u, %u, %u), %u shared bytes\n",
                     kernel->name, gx, gy, gz, bx, by, bz, n_shared);
        return INVALID_VALUE;
    }
    // Arguments are copied when the kernel is launched.
    auto copies = std::make_shared<std::vector<std::vector<char>>>();
    for (size_t i = 0; i < kernel->sizes.size(); i++) {
        copies->emplace_back((char *)args[i], (char *)args[i] + kernel->sizes[i]);
    }
    return stream->put({[=] {
        std::vector<void *> pointers;
        for (auto &copy : *copies) pointers.push_back(copy.data());
        kernel->run(pointers.data(), {gx, gy, gz}, {bx, by, bz}, n_shared);
        return is_to_fail("kernel") ? ILLEGAL_ADDRESS : OK;
    }});
}

API cuStreamBeginCapture_v2(void *handle, int) {
    if (is_to_fail("capture")) return CAPTURE_UNSUPPORTED;
    ((Stream *)handle)->captured = new std::vector<Work>;
    n_capturing++;
    return OK;
}
API cuStreamEndCapture(void *handle, void **graph) {
    Stream *stream = (Stream *)handle;
    if (!stream->captured) return INVALID_VALUE;
    *graph = new Graph{std::move(*stream->captured)};
    n_handles++;
    delete stream->captured;
    stream->captured = nullptr;
    n_capturing--;
    return OK;
}
API cuStreamIsCapturing(void *handle, int *status) {
    *status = ((Stream *)handle)->captured ? 1 : 0;
    return OK;
}
API cuGraphInstantiateWithFlags(void **out, void *graph, unsigned long long) {
    if (is_to_fail("graph")) return OUT_OF_MEMORY;
    *out = new Graph(*(Graph *)graph);
    n_handles++;
    return OK;
}
API cuGraphLaunch(void *graph, void *stream) {
    if (is_to_fail("launch")) return LAUNCH_FAILED;
    for (auto &work : ((Graph *)graph)->works) {
        if (Status status = stream_of(stream)->put(work)) return status;
    }
    return OK;
}
API cuGraphUpload(void *, void *) { return OK; }
API cuGraphExecDestroy(void *graph) {
    delete (Graph *)graph;
    n_handles--;
    return OK;
}
API cuGraphDestroy(void *graph) {
    delete (Graph *)graph;
    n_handles--;
    return OK;
}

API cuGetErrorName(Status status, const char **out) {
    *out = status == OUT_OF_MEMORY     ? "CUDA_ERROR_OUT_OF_MEMORY"
           : status == ILLEGAL_ADDRESS ? "CUDA_ERROR_ILLEGAL_ADDRESS"
           : status == LAUNCH_FAILED   ? "CUDA_ERROR_LAUNCH_FAILED"
                                       : "CUDA_ERROR_UNKNOWN";
    return OK;
}
API cuGetErrorString(Status status, const char **out) {
    *out = status == OUT_OF_MEMORY     ? "out of memory"
           : status == ILLEGAL_ADDRESS ? "an illegal memory access was encountered"
           : status == LAUNCH_FAILED   ? "unspecified launch failure"
                                       : "an error of the emulator";
    return OK;
}

// The `n`-th call of `kind` from now on fails: alloc, host_alloc, launch, kernel (it ends with an error), copy, module,
// stream, context, event, capture, graph, init.
API emulator_fail(const char *kind, long n) {
    is_to_fail("");
    std::lock_guard<std::mutex> hold(fail_lock);
    n_calls[kind] = 0;
    fail_at.erase(kind);
    if (n > 0) fail_at[kind] = n;
    return OK;
}

// Calls of `kind` since emulator_fail was last told of it.
extern "C" __attribute__((visibility("default"))) long emulator_calls(const char *kind) {
    std::lock_guard<std::mutex> hold(fail_lock);
    return n_calls[kind];
}

// Allocations, streams, graphs, modules, events and contexts that have not been given back.
extern "C" __attribute__((visibility("default"))) long emulator_alive() {
    std::lock_guard<std::mutex> hold(memory_lock);
    return n_handles + (long)allocations.size();
}

// The most bytes of a device that were in use at once since the last call.
extern "C" __attribute__((visibility("default"))) size_t emulator_peak(int device) {
    std::lock_guard<std::mutex> hold(memory_lock);
    size_t peak = devices()[device].peak;
    devices()[device].peak = devices()[device].used;
    return peak;
}

// How much memory each device has from now on.
API emulator_memory(size_t bytes) {
    std::lock_guard<std::mutex> hold(memory_lock);
    for (Device &device : devices()) device.memory = bytes;
    return OK;
}

// The order of a block's threads.
API emulator_order(int is_reversed) {
    emulator::is_reversed = is_reversed;
    return OK;
}

// How fast clocks of devices run from now on, as a multiple of the host's.
API emulator_clock(double rate) {
    emulator::clock_rate = rate;
    return OK;
}
