//! The kernels in plain Rust: what every instruction set is tested against, and what runs on a processor with none
//! of the others.

use crate::quant::{Block, DType};
use crate::with_block;

use super::kernels::{Kernels, Rows, table};
use super::operand::Operand;
use super::portable;

portable::instantiate!();

pub static KERNELS: Kernels = table!("scalar", dot_for);

const fn dot_for(dtype: DType) -> super::kernels::Dot {
    with_block!(dtype, B => dot_q::<B>, _ => match dtype {
        DType::F16 => dot_f16,
        DType::BF16 => dot_bf16,
        _ => dot_f32,
    })
}

/// # Safety
/// As [`super::kernels::Dot`].
unsafe fn dot_q<B: Block>(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
    let n_bytes = x.n_cols / B::LEN * B::BYTES;
    for t in 0..x.n_tokens {
        let x = x.q_row(t);
        for (r, row) in rows.now.iter().enumerate() {
            // SAFETY: the caller's rows are that long.
            let row = unsafe { std::slice::from_raw_parts(*row, n_bytes) };
            // SAFETY: the caller's output has a place for every row and token.
            unsafe { *out.add(t * stride + r) = portable::dot_block::<B>(row, &x) };
        }
    }
}

macro_rules! dot_float {
    ($name:ident, $bytes:literal, $load:expr) => {
        /// # Safety
        /// As [`super::kernels::Dot`].
        unsafe fn $name(rows: Rows, x: &Operand, out: *mut f32, stride: usize) {
            for t in 0..x.n_tokens {
                let x = x.float_row(t);
                for (r, row) in rows.now.iter().enumerate() {
                    // SAFETY: the caller's rows are that long.
                    let row = unsafe { std::slice::from_raw_parts(*row, x.len() * $bytes) };
                    let (weights, _) = row.as_chunks::<$bytes>();
                    let value = portable::dot(weights, x, $load);
                    // SAFETY: the caller's output has a place for every row and token.
                    unsafe { *out.add(t * stride + r) = value };
                }
            }
        }
    };
}

dot_float!(dot_f32, 4, f32::from_le_bytes);
dot_float!(dot_f16, 2, |b| crate::quant::f16_to_f32(u16::from_le_bytes(b)));
dot_float!(dot_bf16, 2, |b| crate::quant::bf16_to_f32(u16::from_le_bytes(b)));
