// What a CUDA kernel needs of its language, for a host compiler: the threads of a block are fibers on one thread of the
// host, and barriers, shuffles and votes switch between them. A barrier that not all threads reach ends the program.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <functional>
#include <map>
#include <set>
#include <sched.h>
#include <string>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, size) (void)0
#define ASAN_UNPOISON_MEMORY_REGION(address, size) (void)0
#endif

struct dim3 { unsigned x, y, z; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

namespace emulator {

constexpr size_t STACK = 128 << 10;
// All that kernels declare with SHARED, of all of them together.
constexpr size_t ALL_SHARED = 4 << 20;
enum class Wait { None, Block, Warp };

struct Fiber {
    void *stack_pointer = nullptr;
    char *stack = nullptr;
    bool is_done = false;
    Wait wait = Wait::None;
    unsigned mask = 0;
    int number = 0;
    dim3 thread{};
    void *fake_stack = nullptr;
};

// Blocks run one after another on the thread that works for a stream.
struct Block {
    std::vector<Fiber> fibers;
    Fiber *current = nullptr;
    void *scheduler = nullptr;
    void *scheduler_fake = nullptr;
    const void *scheduler_bottom = nullptr;
    size_t scheduler_size = 0;
    dim3 block{}, block_size{}, grid{};
    std::vector<uint64_t> slots[2];
    // Of each warp, what its lanes' values came to, once a lane has made the sum.
    std::vector<std::pair<bool, float>> reduced[2];
    std::vector<int> phases;
    std::vector<char> shared;
    std::vector<char> declared;
    // What of it this block has met.
    std::set<size_t> is_fresh;
    char *dynamic_shared = nullptr;
    const std::function<void()> *body = nullptr;
    const char *kernel = "";
    ~Block() {
        ASAN_UNPOISON_MEMORY_REGION(declared.data(), declared.size());
        for (auto &f : fibers) std::free(f.stack);
    }
};

inline thread_local Block *working = nullptr;
inline Block &work() { return *working; }
// How fast a device's clock runs.
inline std::atomic<double> clock_rate{1};
// The order in which a block's threads run between barriers.
inline bool is_reversed = false;

[[noreturn]] inline void die(const char *what) {
    std::fprintf(stderr, "emulator: %s in kernel %s, block (%u, %u, %u)\n", what, work().kernel, work().block.x, work().block.y,
                 work().block.z);
    std::abort();
}

extern "C" void emulator_switch(void **save, void *to);
extern "C" void emulator_start();

inline void to_fiber(Fiber &f) {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&work().scheduler_fake, f.stack, STACK);
#endif
    emulator_switch(&work().scheduler, f.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(work().scheduler_fake, nullptr, nullptr);
#endif
}

inline void to_scheduler() {
    Fiber &f = *work().current;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(f.is_done ? nullptr : &f.fake_stack, work().scheduler_bottom, work().scheduler_size);
#endif
    emulator_switch(&f.stack_pointer, work().scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(f.fake_stack, nullptr, nullptr);
#endif
}

inline void pause_for(Wait wait, unsigned mask) {
    work().current->wait = wait;
    work().current->mask = mask;
    to_scheduler();
}

inline void prepare(Fiber &f) {
    if (!f.stack) f.stack = (char *)std::aligned_alloc(64, STACK);
    // A frame that emulator_switch returns from into emulator_start: six saved registers and an address.
    uintptr_t top = ((uintptr_t)f.stack + STACK) & ~(uintptr_t)63;
    void **sp = (void **)(top - 64);
    for (int i = 0; i < 6; i++) sp[i] = nullptr;
    sp[6] = (void *)emulator_start;
    f.stack_pointer = sp;
    f.is_done = false;
    f.wait = Wait::None;
    f.fake_stack = nullptr;
}

inline bool release_warps(int n) {
    bool is_any = false;
    auto &fs = work().fibers;
    for (int w = 0; w < n; w += 32) {
        for (int l = 0; l < 32 && w + l < n; l++) {
            Fiber &f = fs[w + l];
            if (f.is_done || f.wait != Wait::Warp) continue;
            bool is_complete = true;
            for (int j = 0; j < 32; j++) {
                if (!(f.mask >> j & 1)) continue;
                bool is_there = w + j < n && !fs[w + j].is_done && fs[w + j].wait == Wait::Warp &&
                                fs[w + j].mask == f.mask;
                is_complete = is_complete && is_there;
            }
            if (!is_complete) continue;
            unsigned mask = f.mask;
            for (int j = 0; j < 32; j++) {
                if (mask >> j & 1) fs[w + j].wait = Wait::None;
            }
            is_any = true;
        }
    }
    return is_any;
}

inline void run_block(const std::function<void()> &body) {
    int n = work().block_size.x * work().block_size.y * work().block_size.z;
    if ((int)work().fibers.size() < n) work().fibers.resize(n);
    work().body = &body;
    work().slots[0].assign(n, 0);
    work().slots[1].assign(n, 0);
    work().phases.assign(n, 0);
    work().reduced[0].assign(n / 32 + 1, {});
    work().reduced[1].assign(n / 32 + 1, {});
    for (int i = 0; i < n; i++) {
        Fiber &f = work().fibers[i];
        prepare(f);
        f.number = i;
        unsigned u = i, x = work().block_size.x, y = work().block_size.y;
        f.thread = {u % x, u / x % y, u / (x * y)};
    }
    for (;;) {
        int n_alive = 0, n_ran = 0, n_at_barrier = 0;
        for (int k = 0; k < n; k++) {
            Fiber &f = work().fibers[is_reversed ? n - 1 - k : k];
            if (f.is_done) continue;
            if (f.wait == Wait::None) {
                work().current = &f;
                to_fiber(f);
                n_ran++;
            }
            n_alive += !f.is_done;
            n_at_barrier += !f.is_done && f.wait == Wait::Block;
        }
        if (!n_alive) return;
        bool is_released = release_warps(n);
        if (n_at_barrier == n_alive) {
            for (int i = 0; i < n; i++) work().fibers[i].wait = Wait::None;
            is_released = true;
        }
        if (!n_ran && !is_released) die("a barrier or shuffle that not all threads reach");
    }
}

template <class T> T shuffle(T value, unsigned mask, int from) {
    int lane = work().current->number, warp = lane & ~31, phase = work().phases[lane]++ & 1;
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof value);
    work().slots[phase][lane] = bits;
    pause_for(Wait::Warp, mask);
    if (!(mask >> (from & 31) & 1)) die("a shuffle from a lane that takes no part");
    std::memcpy(&value, &work().slots[phase][warp + (from & 31)], sizeof value);
    return value;
}

inline unsigned vote(unsigned mask, int value) {
    int lane = work().current->number, warp = lane & ~31, phase = work().phases[lane]++ & 1;
    work().slots[phase][lane] = value != 0;
    pause_for(Wait::Warp, mask);
    unsigned votes = 0;
    for (int j = 0; j < 32; j++) {
        if (mask >> j & 1) votes |= (unsigned)work().slots[phase][warp + j] << j;
    }
    return votes;
}

// What all lanes' values come to: the butterfly of shuffles at once, in its order.
template <class F> float reduce(float value, F join) {
    int lane = work().current->number, warp = lane & ~31, phase = work().phases[lane]++ & 1;
    auto &slots = work().slots[phase];
    auto &[is_done, result] = work().reduced[phase][warp / 32];
    std::memcpy(&slots[lane], &value, sizeof value);
    is_done = false;
    pause_for(Wait::Warp, 0xffffffffu);
    if (is_done) return result;
    float values[32];
    for (int j = 0; j < 32; j++) std::memcpy(&values[j], &slots[warp + j], sizeof value);
    for (int step = 16; step; step /= 2) {
        for (int j = 0; j < step; j++) values[j] = join(values[j], values[j + step]);
    }
    is_done = true;
    return result = values[0];
}

// The place of a variable in shared memory, for a declaration that is met for the first time.
inline size_t declare(size_t size) {
    static std::atomic<size_t> used{64};
    size_t at = used.fetch_add((size + 127) / 64 * 64);
    if (at + size > ALL_SHARED) die("more shared memory declared than there is room for");
    return at;
}

// Where it is for the block at work; what nobody has written there reads as NaN.
template <class T> T &shared_at(size_t at) {
    Block &block = work();
    if (block.declared.empty()) {
        block.declared.assign(ALL_SHARED, (char)0xff);
        ASAN_POISON_MEMORY_REGION(block.declared.data(), ALL_SHARED);
    }
    char *memory = block.declared.data() + at;
    if (block.is_fresh.insert(at).second) {
        ASAN_UNPOISON_MEMORY_REGION(memory, sizeof(T));
        std::memset(memory, 0xff, sizeof(T));
    }
    return *(T *)memory;
}

// A kernel as the driver sees it: how long its arguments are, and how to run it on a copy of them.
struct Kernel {
    const char *name;
    std::vector<size_t> sizes;
    std::function<void(void **)> call;

    static std::map<std::string, Kernel *> &all() {
        static std::map<std::string, Kernel *> kernels;
        return kernels;
    }

    template <class... A> Kernel(const char *name, void (*f)(A...)) : name(name), sizes{sizeof(A)...} {
        call = [f](void **args) { apply(f, args, std::index_sequence_for<A...>{}); };
        all()[name] = this;
    }

    template <class... A, size_t... I> static void apply(void (*f)(A...), void **args, std::index_sequence<I...>) {
        f(*(A *)args[I]...);
    }

    void run(void **args, dim3 grid, dim3 block, unsigned n_shared) {
        static thread_local Block own;
        working = &own;
        // Fresh memory reads as NaN.
        work().shared.assign(n_shared + 64, (char)0xff);
        work().dynamic_shared = (char *)(((uintptr_t)work().shared.data() + 63) & ~(uintptr_t)63);
        work().grid = grid;
        work().block_size = block;
        work().kernel = name;
        std::function<void()> body = [&] { call(args); };
        for (unsigned z = 0; z < grid.z; z++) {
            for (unsigned y = 0; y < grid.y; y++) {
                for (unsigned x = 0; x < grid.x; x++) {
                    work().block = {x, y, z};
                    std::memset(work().dynamic_shared, 0xff, n_shared);
                    work().is_fresh.clear();
                    run_block(body);
                }
            }
        }
    }
};

} // namespace emulator

#define EMULATOR
#define KERNEL(name, ...)                                                                                              \
    static void name(__VA_ARGS__);                                                                                     \
    static emulator::Kernel kernel_##name(#name, name);                                                                \
    static void name(__VA_ARGS__)
#define DYNAMIC_SHARED(name) float *name = (float *)emulator::work().dynamic_shared
#define SHARED(type, name)                                                                                             \
    static const size_t name##_at = emulator::declare(sizeof(type));                                                   \
    type &name = emulator::shared_at<type>(name##_at)
#define __device__
#define __forceinline__ inline
#define __shared__ static thread_local
#define threadIdx (emulator::work().current->thread)
#define blockIdx (emulator::work().block)
#define blockDim (emulator::work().block_size)
#define gridDim (emulator::work().grid)
#define __syncthreads() emulator::pause_for(emulator::Wait::Block, 0)
#define __syncwarp() emulator::pause_for(emulator::Wait::Warp, 0xffffffffu)
#define __shfl_xor_sync(mask, value, step) emulator::shuffle(value, mask, emulator::work().current->number ^ (step))
#define __ballot_sync(mask, value) emulator::vote(mask, value)
#define __popc(x) __builtin_popcount(x)
#define __threadfence_block() __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define __threadfence_system() __atomic_thread_fence(__ATOMIC_SEQ_CST)

inline float __int_as_float(int bits) {
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

template <class T> T atomicAdd(T *to, T value) { return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST); }

inline int dot4(int a, int b, int sum) {
    for (int i = 0; i < 32; i += 8) sum += (int8_t)(a >> i) * (int8_t)(b >> i);
    return sum;
}

inline void multiply_tile(int *sums, int a, int b) {
    using namespace emulator;
    int lane = work().current->number, warp = lane & ~31, phase = work().phases[lane]++ & 1;
    auto &slots = work().slots[phase];
    slots[lane] = (uint64_t)(unsigned)a << 32 | (unsigned)b;
    pause_for(Wait::Warp, 0xffffffffu);
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < 4; k++) {
            uint64_t row = slots[warp + lane % 32 / 4 * 4 + k], column = slots[warp + (lane % 4 * 2 + i) * 4 + k];
            sums[i] = dot4((int)(row >> 32), (int)column, sums[i]);
        }
    }
}

inline float warp_sum(float v) { return emulator::reduce(v, [](float a, float b) { return a + b; }); }
inline float warp_max(float v) { return emulator::reduce(v, [](float a, float b) { return fmaxf(a, b); }); }

inline float half_to_float(unsigned short bits) {
    _Float16 h;
    std::memcpy(&h, &bits, 2);
    return (float)h;
}

inline unsigned short float_to_half(float value) {
    _Float16 h = (_Float16)value;
    unsigned short bits;
    std::memcpy(&bits, &h, 2);
    return bits;
}

inline unsigned long long nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    static const time_t start = now.tv_sec; // so that a fast clock doesn't overflow
    return (unsigned long long)(emulator::clock_rate * ((now.tv_sec - start) * 1e9 + now.tv_nsec));
}

inline void pause() { sched_yield(); }
inline unsigned load_acquire(const unsigned *from) { return __atomic_load_n(from, __ATOMIC_ACQUIRE); }
inline void store_release(unsigned *to, unsigned value) { __atomic_store_n(to, value, __ATOMIC_RELEASE); }
