//! The processor: kernels for each instruction set behind one table, a pool of threads, and the verbs of
//! [`Backend`](super::Backend) made of both.
//!
//! `kernels` picks an instruction set; `scalar`, `avx2`, `avx512` and `neon` repeat the same names; `portable` is what
//! plain Rust says best for all of them. `pool` shares an operation among threads; `ops`, `matmul`, `gemm`, `row_sum`
//! and `attention` are the verbs.

mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod bandwidth;
mod gemm;
pub mod kernels;
mod matmul;
#[cfg(target_arch = "aarch64")]
mod neon;
pub mod operand;
mod ops;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod panels;
pub mod pool;
mod portable;
mod row_sum;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use ops::Cpu;

/// Asks memory for bytes that will be wanted soon, where the processor can be asked.
pub(crate) fn fetch(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    x86::fetch(&[bytes.as_ptr()], 0, bytes.len());
    #[cfg(target_arch = "aarch64")]
    neon::fetch(&[bytes.as_ptr()], 0, bytes.len());
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = bytes;
}
