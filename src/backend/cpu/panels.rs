//! Rows side by side, a row in each lane of a register, for whatever [`Registers`] an instruction set has. Of weights that
//! share a scale the integer sum is exact, and such groups are added one after another, so that one token, a few and many
//! give the same bits.
//!
//! Nothing here has an instruction set of its own: all is inlined into functions that have (`instantiate_panels!`).
//! Products with many tokens are in `tiles`.

use crate::quant::{CHUNK, Interleaved, LANES};

use super::operand::{Operand, Q_BLOCK, Q_GROUP, QRow};

/// What an instruction set's registers do for panels. Every operation goes lane by lane of 32 bits, but for those that
/// say otherwise.
///
/// # Safety
/// Of all functions: the processor has the instruction set, and a pointer points to a register's worth of what it is said
/// to point to.
pub trait Registers {
    /// Lanes of a register, a row each.
    const WIDTH: usize;
    /// Tokens that a panel's product takes at a time, 1 to 4: as many as the registers hold.
    const TOKENS: usize;
    /// Whether [`Registers::dot_bytes`] takes weights of eight bits as unsigned bytes; otherwise they are signed.
    const UNSIGNED: bool;
    /// WIDTH integers of 32 bits, or four bytes or two words in the place of each.
    type Ints: Copy;
    /// WIDTH float32 numbers.
    type Floats: Copy;

    unsafe fn prefetch(at: *const u8);
    unsafe fn load(at: *const u8) -> Self::Ints;
    unsafe fn splat(value: i32) -> Self::Ints;
    unsafe fn and(a: Self::Ints, b: Self::Ints) -> Self::Ints;
    unsafe fn or(a: Self::Ints, b: Self::Ints) -> Self::Ints;
    unsafe fn xor(a: Self::Ints, b: Self::Ints) -> Self::Ints;
    unsafe fn add(a: Self::Ints, b: Self::Ints) -> Self::Ints;
    /// `256 * a`
    unsafe fn times_256(a: Self::Ints) -> Self::Ints;
    /// Moves bits to the right by `by`, or to the left where that is negative; they may cross bytes.
    unsafe fn shift(a: Self::Ints, by: i32) -> Self::Ints;
    /// Of every byte, below 16, the entry of the table.
    unsafe fn look_up(table: &[i8; 16], a: Self::Ints) -> Self::Ints;
    /// `sum` and the products of four bytes in each lane. Weights without all `EIGHT` bits are not negative; `x` is signed,
    /// its magnitude at most 127.
    unsafe fn dot_bytes<const EIGHT: bool>(sum: Self::Ints, weights: Self::Ints, x: Self::Ints)
    -> Self::Ints;
    /// Products of a group's quads with the activations' upper bytes, and with the lower ones, both summed.
    #[inline(always)]
    unsafe fn dot_quads<const EIGHT: bool>(
        quads: &[Self::Ints],
        high: *const i32,
        low: *const i32,
    ) -> (Self::Ints, Self::Ints) {
        // SAFETY: as the caller promises; there is an integer of four bytes for each quad.
        unsafe {
            let (mut highs, mut lows) = (Self::splat(0), Self::splat(0));
            for j in 0..quads.len() {
                let (high, low) = (high.add(j).read_unaligned(), low.add(j).read_unaligned());
                highs = Self::dot_bytes::<EIGHT>(highs, quads[j], Self::splat(high));
                lows = Self::dot_bytes::<EIGHT>(lows, quads[j], Self::splat(low));
            }
            (highs, lows)
        }
    }

    /// Integers from bytes, one in each lane.
    unsafe fn signed_bytes(at: *const u8) -> Self::Ints;
    unsafe fn unsigned_bytes(at: *const u8) -> Self::Ints;

    unsafe fn load_floats(at: *const f32) -> Self::Floats;
    unsafe fn store_floats(at: *mut f32, values: Self::Floats);
    unsafe fn splat_float(value: f32) -> Self::Floats;
    unsafe fn to_floats(a: Self::Ints) -> Self::Floats;
    /// Numbers from half precision.
    unsafe fn halves(at: *const u8) -> Self::Floats;
    unsafe fn multiply(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a * b + c` in one rounding.
    unsafe fn multiply_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
}

/// Registers that hold a panel's rows, at most.
pub(super) const PARTS: usize = 4;

pub(super) const fn parts<R: Registers>() -> usize {
    const { assert!(LANES.is_multiple_of(R::WIDTH) && LANES / R::WIDTH <= PARTS) };
    LANES / R::WIDTH
}

/// A panel's results for one token.
pub(super) type Sums<R> = [<R as Registers>::Floats; PARTS];

/// How far ahead memory is asked for a panel.
const AHEAD: usize = 2048;

/// See [`super::kernels::Panels::dot`].
///
/// # Safety
/// As there.
#[inline(always)]
pub unsafe fn dot<R: Registers, F: Interleaved>(
    panel: *const u8,
    n: usize,
    x: &Operand,
    out: *mut f32,
    stride: usize,
) {
    let mut t = 0;
    while t < x.n_tokens {
        // SAFETY: as the caller promises, for these tokens.
        unsafe {
            let out = out.add(t * stride);
            t += match (x.n_tokens - t).min(R::TOKENS) {
                1 => dot_tokens::<R, F, 1>(panel, n, x, t, out, stride),
                2 => dot_tokens::<R, F, 2>(panel, n, x, t, out, stride),
                3 => dot_tokens::<R, F, 3>(panel, n, x, t, out, stride),
                _ => dot_tokens::<R, F, 4>(panel, n, x, t, out, stride),
            }
        }
    }
}

/// # Safety
/// As [`dot`].
#[inline(always)]
unsafe fn dot_tokens<R: Registers, F: Interleaved, const T: usize>(
    panel: *const u8,
    n: usize,
    x: &Operand,
    first: usize,
    out: *mut f32,
    stride: usize,
) -> usize {
    let x_rows: [QRow; T] = std::array::from_fn(|t| x.q_row(first + t));
    // SAFETY: spans and chunks lie inside the panel, and there are as many activations as weights; the rest is the caller's
    // promise.
    unsafe {
        let mut sums = [[R::splat_float(0.0); PARTS]; T];
        for span in 0..x.n_cols / F::LEN {
            let (head, chunks) = parts_of_span::<F>(panel, span);
            for c in 0..F::LEN / CHUNK {
                let chunk = chunks.add(c * F::CHUNK_BYTES);
                for line in (0..F::CHUNK_BYTES).step_by(64) {
                    R::prefetch(chunk.wrapping_add(AHEAD + line));
                }
                let at = span * F::LEN + c * CHUNK;
                for part in 0..parts::<R>() {
                    let scales = scales::<R, F>(head, chunk, part);
                    let quads = quads::<R, F>(chunk, part);
                    for t in 0..T {
                        add_chunk::<R, F>(&quads, &scales, &x_rows[t], at, &mut sums[t][part]);
                    }
                }
            }
        }
        for (t, sums) in sums.iter().enumerate() {
            store_sums::<R>(sums, n, out.add(t * stride));
        }
    }
    T
}

/// Head and first chunk of a panel's span.
///
/// # Safety
/// The panel has that span.
#[inline(always)]
pub(super) unsafe fn parts_of_span<F: Interleaved>(panel: *const u8, span: usize) -> (*const u8, *const u8) {
    // SAFETY: as the caller promises.
    unsafe {
        let head = panel.add(span * F::SPAN_BYTES);
        (head, head.add(LANES * 2 * F::HEAD))
    }
}

/// Adds the products of a chunk of rows with one token's activations from `at` on: the integer sum of each group, then the
/// groups one after another.
///
/// # Safety
/// The activations reach to the chunk's end; the processor has the instruction set.
#[inline(always)]
pub unsafe fn add_chunk<R: Registers, F: Interleaved>(
    quads: &[R::Ints; 8],
    scales: &[(R::Floats, R::Floats); 2],
    x: &QRow,
    at: usize,
    total: &mut R::Floats,
) {
    debug_assert!(at + CHUNK <= x.high.len());
    // SAFETY: there are as many activations as weights, a scale for every 64 and a sum for every 16; a chunk has eight
    // quads.
    unsafe {
        let (high, low) = (x.high.as_ptr().add(at).cast::<i32>(), x.low.as_ptr().add(at).cast::<i32>());
        let d = *x.d.as_ptr().add(at / Q_BLOCK);
        let sum = [*x.sum.as_ptr().add(at / Q_GROUP), *x.sum.as_ptr().add(at / Q_GROUP + 1)];
        let per_group = 8 * F::SHARE / CHUNK;
        for g in 0..CHUNK / F::SHARE {
            let x_sum = if F::SHARE == CHUNK { sum[0] + sum[1] } else { sum[g] };
            let quads = &quads[g * per_group..(g + 1) * per_group];
            let (high, low) = (high.add(g * per_group), low.add(g * per_group));
            let (highs, mut lows) = if F::EIGHT_BITS {
                R::dot_quads::<true>(quads, high, low)
            } else {
                R::dot_quads::<false>(quads, high, low)
            };
            if let Some(bits) = zero_bits::<R, F>() {
                lows = R::add(lows, R::splat(-(x_sum << bits)));
            }
            let dots = R::add(R::times_256(highs), lows);
            let (scale, min) = scales[g];
            *total = R::multiply_add(R::to_floats(dots), R::multiply(scale, R::splat_float(d)), *total);
            if F::HAS_MIN {
                *total = R::multiply_add(min, R::splat_float(d * x_sum as f32), *total);
            }
        }
    }
}

/// What was added to weights as [`quads`] gives them: bytes of eight bits may be signed again.
pub(super) const fn zero_bits<R: Registers, F: Interleaved>() -> Option<u32> {
    if F::EIGHT_BITS && !R::UNSIGNED { None } else { F::ZERO_BITS }
}

/// Writes the first `n` of sixteen values.
///
/// # Safety
/// There are places for them; the processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn store_sums<R: Registers>(sums: &Sums<R>, n: usize, to: *mut f32) {
    let mut all = [0.0f32; LANES];
    // SAFETY: an array of sixteen; the caller's places.
    unsafe {
        // Without a copy of unknown length wherever there is room.
        let at = if n == LANES { to } else { all.as_mut_ptr() };
        for part in 0..parts::<R>() {
            R::store_floats(at.add(part * R::WIDTH), sums[part]);
        }
        if n < LANES {
            std::ptr::copy_nonoverlapping(all.as_ptr(), to, n);
        }
    }
}

/// Scales and offsets of a chunk's one or two groups, for one part of the lanes.
///
/// # Safety
/// Head and chunk are whole; the processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn scales<R: Registers, F: Interleaved>(
    head: *const u8,
    chunk: *const u8,
    part: usize,
) -> [(R::Floats, R::Floats); 2] {
    // SAFETY: the loads stay inside head and chunk.
    unsafe {
        let mut scales = [(R::splat_float(0.0), R::splat_float(0.0)); 2];
        if F::SIDE_BYTES == 2 {
            let at = chunk.add(2 * part * R::WIDTH);
            scales[0].0 = R::halves(at);
            if F::HAS_MIN {
                scales[0].1 = R::halves(at.add(2 * LANES));
            }
            return scales;
        }
        let (head, side) = (head.add(2 * part * R::WIDTH), chunk.add(part * R::WIDTH));
        let d = R::halves(head);
        if !F::HAS_MIN {
            for g in 0..F::SIDE {
                scales[g].0 = R::multiply(d, R::to_floats(R::signed_bytes(side.add(g * LANES))));
            }
            return scales;
        }
        let minus_dmin = R::multiply(R::splat_float(-1.0), R::halves(head.add(2 * LANES)));
        for g in 0..CHUNK / F::SHARE {
            let (scale, min) = if F::SHARE == CHUNK {
                (R::unsigned_bytes(side), R::unsigned_bytes(side.add(LANES)))
            } else {
                // Both in one byte, a nibble each.
                let both = R::unsigned_bytes(side.add(g * LANES));
                (R::and(both, R::splat(0x0f)), R::shift(both, 4))
            };
            scales[g] = (R::multiply(d, R::to_floats(scale)), R::multiply(minus_dmin, R::to_floats(min)));
        }
        scales
    }
}

/// The eight quads of a chunk's weights, for one part of the lanes.
///
/// # Safety
/// The chunk is whole; the processor has the instruction set.
#[inline(always)]
pub(super) unsafe fn quads<R: Registers, F: Interleaved>(chunk: *const u8, part: usize) -> [R::Ints; 8] {
    // SAFETY: the loads stay inside the chunk.
    unsafe {
        let weights = chunk.add(LANES * F::SIDE * F::SIDE_BYTES + 4 * part * R::WIDTH);
        let mut quads = [R::splat(0); 8];
        if F::BITS == 8 {
            for j in 0..8 {
                quads[j] = load_line::<R>(weights, j);
                if !R::UNSIGNED {
                    quads[j] = R::xor(quads[j], R::splat(BYTES_0X80));
                }
            }
            return quads;
        }
        if F::BITS < 4 {
            let both = [load_line::<R>(weights, 0), load_line::<R>(weights, 1)];
            for j in 0..8 {
                let bits = R::shift(both[j % 2], 2 * (j / 2) as i32);
                quads[j] = R::and(bits, R::splat(bytes(0x03)));
            }
        } else {
            let mut both = [R::splat(0); 4];
            for j in 0..4 {
                both[j] = load_line::<R>(weights, j);
            }
            quads = nibbles::<R>(&both);
        }
        for j in 0..8 {
            if let Some(upper) = upper_bits::<F>(j) {
                let bits = R::shift(load_line::<R>(weights, upper.plane), upper.shift);
                quads[j] = R::or(quads[j], R::and(bits, R::splat(bytes(upper.mask))));
            }
            if let Some(table) = &F::TABLE {
                quads[j] = R::look_up(table, quads[j]);
                if R::UNSIGNED {
                    quads[j] = R::xor(quads[j], R::splat(BYTES_0X80));
                }
            }
        }
        quads
    }
}

/// Four bytes of 0x80: what makes signed bytes unsigned, and back.
const BYTES_0X80: i32 = bytes(0x80);

/// Four times the same byte.
const fn bytes(byte: u8) -> i32 {
    i32::from_ne_bytes([byte; 4])
}

/// One part of a chunk's line number `i`, counted from where its weights begin.
///
/// # Safety
/// The chunk has that line; the processor has the instruction set.
#[inline(always)]
unsafe fn load_line<R: Registers>(weights: *const u8, i: usize) -> R::Ints {
    // SAFETY: as the caller promises.
    unsafe { R::load(weights.add(4 * LANES * i)) }
}

/// The quads of four registers of nibbles: low halves, then high halves.
///
/// # Safety
/// The processor has the instruction set.
#[inline(always)]
pub unsafe fn nibbles<R: Registers>(both: &[R::Ints; 4]) -> [R::Ints; 8] {
    // SAFETY: as the caller promises.
    unsafe {
        let mask = R::splat(bytes(0x0f));
        let mut quads = [R::splat(0); 8];
        for j in 0..4 {
            quads[j] = R::and(both[j], mask);
            quads[j + 4] = R::and(R::shift(both[j], 4), mask);
        }
        quads
    }
}

/// Where a quad has the bits that its first two or four lack.
struct UpperBits {
    /// The line, counted from where the chunk's weights begin.
    plane: usize,
    /// What moves them to their place in a weight, to the right.
    shift: i32,
    /// That place.
    mask: u8,
}

/// Of quad `j`; none where the first bits are all.
#[inline(always)]
fn upper_bits<F: Interleaved>(j: usize) -> Option<UpperBits> {
    let j_shift = j as i32;
    match F::BITS {
        3 => Some(UpperBits { plane: 2, shift: j_shift - 2, mask: 0x04 }),
        5 => Some(UpperBits { plane: 4, shift: j_shift - 4, mask: 0x10 }),
        6 => Some(UpperBits { plane: 4 + j / 4, shift: 2 * (j_shift % 4) - 4, mask: 0x30 }),
        _ => None,
    }
}

/// Implements a trait of registers for a type, each function as one expression.
macro_rules! registers {
    (impl $trait:ident for $type:ty { $($(const $const:ident: $const_type:ty = $value:expr;)+)? $(type $name:ident = $is:ty;)* $(fn $f:ident $(<const $generic:ident: bool>)? ($($arg:ident: $arg_type:ty),*) $(-> $result:ty)? { $body:expr })* }) => {
        impl $trait for $type {
            $($(const $const: $const_type = $value;)+)?
            $(type $name = $is;)*
            $(
                #[inline(always)]
                unsafe fn $f $(<const $generic: bool>)? ($($arg: $arg_type),*) $(-> $result)? {
                    // SAFETY: as the caller promises.
                    #[allow(unused_unsafe)]
                    unsafe { $body }
                }
            )*
        }
    };
}
pub(super) use registers;

/// Compiles [`dot`] for an instruction set: `instantiate_panels!(Type, #[target_feature(enable = "…")])` makes
/// `panels_for`.
macro_rules! instantiate_panels {
    (@dot $registers:ty, #[$feature:meta]) => {
        /// # Safety
        /// As [`Panels::dot`].
        #[$feature]
        unsafe fn dot_panel<F: Interleaved>(panel: *const u8, n: usize, x: &Operand, out: *mut f32, stride: usize) {
            // SAFETY: as the caller promises.
            unsafe { panels::dot::<$registers, F>(panel, n, x, out, stride) }
        }
    };
    ($registers:ty, #[$feature:meta]) => {
        $crate::backend::cpu::panels::instantiate_panels!(@dot $registers, #[$feature]);

        const fn panels_for(dtype: DType) -> Option<Panels> {
            with_block!(dtype, B => Some(Panels { dot: dot_panel::<B>, unpack: None }), _ => None)
        }
    };
}
pub(super) use instantiate_panels;
