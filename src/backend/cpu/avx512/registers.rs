//! A panel's sixteen rows in one register.

use std::arch::x86_64::*;

use crate::backend::cpu::panels::{Registers, registers};
use crate::backend::cpu::tiles::Words;

pub struct Avx512;

registers! {
    impl Registers for Avx512 {
        const WIDTH: usize = 16;
        const TOKENS: usize = 4;
        const UNSIGNED: bool = true;
        type Ints = __m512i;
        type Floats = __m512;
        fn prefetch(at: *const u8) { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        fn load(at: *const u8) -> __m512i { _mm512_loadu_si512(at.cast()) }
        fn splat(value: i32) -> __m512i { _mm512_set1_epi32(value) }
        fn and(a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        fn or(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn xor(a: __m512i, b: __m512i) -> __m512i { _mm512_xor_si512(a, b) }
        fn add(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi32(a, b) }
        fn times_256(a: __m512i) -> __m512i { _mm512_slli_epi32(a, 8) }
        fn shift(a: __m512i, by: i32) -> __m512i {
            if by >= 0 {
                _mm512_srl_epi16(a, _mm_cvtsi32_si128(by))
            } else {
                _mm512_sll_epi16(a, _mm_cvtsi32_si128(-by))
            }
        }
        fn look_up(table: &[i8; 16], a: __m512i) -> __m512i {
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128(table.as_ptr().cast())), a)
        }
        fn dot_bytes<const EIGHT: bool>(sum: __m512i, weights: __m512i, x: __m512i) -> __m512i {
            _mm512_dpbusd_epi32(sum, weights, x)
        }
        fn signed_bytes(at: *const u8) -> __m512i { _mm512_cvtepi8_epi32(_mm_loadu_si128(at.cast())) }
        fn unsigned_bytes(at: *const u8) -> __m512i { _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())) }
        fn load_floats(at: *const f32) -> __m512 { _mm512_loadu_ps(at) }
        fn store_floats(at: *mut f32, values: __m512) { _mm512_storeu_ps(at, values) }
        fn splat_float(value: f32) -> __m512 { _mm512_set1_ps(value) }
        fn to_floats(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
        fn halves(at: *const u8) -> __m512 { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
        fn multiply(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn multiply_add(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
    }
}

registers! {
    impl Words for Avx512 {
        const TILE_TOKENS: usize = 12;
        fn widen(bytes: __m512i) -> [__m512i; 2] {
            {
                // Of each quad's bytes the first two, and the last two; 0x80 makes a zero.
                let in_lane = _mm512_broadcast_i32x4(_mm_set_epi32(0x000c_000c, 0x0008_0008, 0x0004_0004, 0));
                let first = _mm512_add_epi8(_mm512_set1_epi32(0x8001_8000u32 as i32), in_lane);
                let second = _mm512_add_epi8(_mm512_set1_epi32(0x8003_8002u32 as i32), in_lane);
                [_mm512_shuffle_epi8(bytes, first), _mm512_shuffle_epi8(bytes, second)]
            }
        }
        fn add_words(a: __m512i, b: __m512i) -> __m512i { _mm512_add_epi16(a, b) }
        fn subtract_words(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi16(a, b) }
        fn dot_words(sum: __m512i, a: __m512i, b: __m512i) -> __m512i { _mm512_dpwssd_epi32(sum, a, b) }
        fn subtract(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
        fn store(at: *mut u8, a: __m512i) { _mm512_storeu_si512(at.cast(), a) }
    }
}
