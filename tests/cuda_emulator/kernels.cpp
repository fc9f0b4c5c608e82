// The kernels' own sources, compiled for the host.
#include "device.h"

// From one stack to another: what a function must keep, and the stack pointer.
#if defined(__x86_64__)
__asm__(R"(
.globl emulator_switch
.type emulator_switch, @function
emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.globl emulator_start
.type emulator_start, @function
emulator_start:
    andq $-16, %rsp
    call emulator_body
    ud2
)");
#else
#error "the emulator's fibers know x86-64 alone"
#endif

extern "C" __attribute__((used)) void emulator_body() {
    using namespace emulator;
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &work().scheduler_bottom, &work().scheduler_size);
#endif
    (*work().body)();
    work().current->is_done = true;
    to_scheduler();
}

namespace kernels {
using std::min;
#include "../../src/backend/cuda/kernels/rows.cu"
#include "../../src/backend/cuda/kernels/matmul.cu"
#include "../../src/backend/cuda/kernels/ffn.cu"
#include "../../src/backend/cuda/kernels/attention.cu"
#include "../../src/backend/cuda/kernels/handover.cu"
} // namespace kernels
