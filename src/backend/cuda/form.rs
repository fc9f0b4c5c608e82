//! The forms that weights have on a GPU, as kernels are named after them.

use crate::quant::{DType, GROUP, Groups, Matrix, decode};
use crate::with_block;

/// Weights that a kernel takes at a time.
const UNIT: usize = 32;
/// Bytes of [`Form::Groups`] for each of them: signed bytes, two scales, two offsets.
const UNIT_BYTES: usize = UNIT + 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q8_0,
    Q4K,
    Q6K,
    /// Any other quantised type: signed bytes, each 16 with a scale and an offset in float32; the same values.
    Groups,
}

impl Form {
    pub const ALL: [Form; 9] = [
        Form::F32,
        Form::F16,
        Form::Bf16,
        Form::Q4_0,
        Form::Q4_1,
        Form::Q8_0,
        Form::Q4K,
        Form::Q6K,
        Form::Groups,
    ];

    pub fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Form::F32,
            DType::F16 => Form::F16,
            DType::BF16 => Form::Bf16,
            DType::Q4_0 => Form::Q4_0,
            DType::Q4_1 => Form::Q4_1,
            DType::Q8_0 => Form::Q8_0,
            DType::Q4K => Form::Q4K,
            DType::Q6K => Form::Q6K,
            _ => Form::Groups,
        }
    }

    /// The form that two types can share without loss: one kernel runs gate and up.
    pub fn shared(a: DType, b: DType) -> Self {
        match (a.is_quantized(), b.is_quantized()) {
            _ if Form::of(a) == Form::of(b) => Form::of(a),
            (true, true) => Form::Groups,
            _ => Form::F32,
        }
    }

    /// As the kernels' names end.
    pub const fn name(self) -> &'static str {
        match self {
            Form::F32 => "f32",
            Form::F16 => "f16",
            Form::Bf16 => "bf16",
            Form::Q4_0 => "q4_0",
            Form::Q4_1 => "q4_1",
            Form::Q8_0 => "q8_0",
            Form::Q4K => "q4_k",
            Form::Q6K => "q6_k",
            Form::Groups => "groups",
        }
    }

    pub const fn is_quantized(self) -> bool {
        !matches!(self, Form::F32 | Form::F16 | Form::Bf16)
    }

    pub fn row_bytes(self, n_cols: usize) -> usize {
        match self {
            Form::F32 => 4 * n_cols,
            Form::F16 | Form::Bf16 => 2 * n_cols,
            Form::Q4_0 => DType::Q4_0.row_bytes(n_cols),
            Form::Q4_1 => DType::Q4_1.row_bytes(n_cols),
            Form::Q8_0 => DType::Q8_0.row_bytes(n_cols),
            Form::Q4K => DType::Q4K.row_bytes(n_cols),
            Form::Q6K => DType::Q6K.row_bytes(n_cols),
            Form::Groups => n_cols / UNIT * UNIT_BYTES,
        }
    }

    /// Columns that a thread of the `down` kernels has.
    pub const fn columns_a_thread(self) -> usize {
        if self.is_quantized() { UNIT } else { 8 }
    }

    /// Writes row `i` of `matrix` in this form to `out`, as long as that.
    pub fn write_row(self, matrix: &Matrix, i: usize, out: &mut [u8]) {
        let row = matrix.row(i);
        if self == Form::of(matrix.dtype()) && self != Form::Groups {
            return out.copy_from_slice(row);
        }
        if self != Form::Groups {
            let mut values = vec![0.0; matrix.n_cols()];
            decode(matrix.dtype(), row, &mut values);
            return write_floats(&values, out);
        }
        with_block!(matrix.dtype(), B => write_groups::<B>(row, out), _ => unreachable!("floats have forms of their own"));
    }
}

pub(super) fn write_floats(values: &[f32], out: &mut [u8]) {
    out.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(bytes, v)| *bytes = v.to_le_bytes());
}

fn write_groups<B: crate::quant::Block>(row: &[u8], out: &mut [u8]) {
    let mut groups = Groups::new();
    let blocks = out.chunks_exact_mut(B::LEN / UNIT * UNIT_BYTES);
    for (block, out) in row.chunks_exact(B::BYTES).zip(blocks) {
        B::unpack(block, &mut groups);
        for (unit, out) in out.chunks_exact_mut(UNIT_BYTES).enumerate() {
            let (weights, rest) = out.split_at_mut(UNIT);
            weights.iter_mut().zip(&groups.q[unit * UNIT..]).for_each(|(byte, q)| *byte = *q as u8);
            let at = unit * UNIT / GROUP;
            write_floats(&groups.scale[at..at + 2], &mut rest[..8]);
            // A format without offsets leaves them as they were: zero.
            write_floats(&groups.min[at..at + 2], &mut rest[8..]);
        }
    }
}
