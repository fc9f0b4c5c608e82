//! A panel's sixteen rows in two registers: with plain AVX2, and with AVX-VNNI's products.

use std::arch::x86_64::*;

use crate::backend::cpu::panels::{Registers, registers};
use crate::backend::cpu::tiles::Words;

/// Both sets' registers, which differ in how they multiply.
macro_rules! eight_lanes {
    ($type:ty, unsigned $unsigned:literal, bytes ($eight:ident, $sum:ident, $w:ident, $x:ident) $dot_bytes:expr, widen ($quad:ident) $widen:expr, words ($s:ident, $a:ident, $b:ident) $dot_words:expr) => {
registers! {
    impl Registers for $type {
        const WIDTH: usize = 8;
        const TOKENS: usize = 2;
        const UNSIGNED: bool = $unsigned;
        type Ints = __m256i;
        type Floats = __m256;
        fn prefetch(at: *const u8) { _mm_prefetch::<_MM_HINT_T0>(at.cast()) }
        fn load(at: *const u8) -> __m256i { _mm256_loadu_si256(at.cast()) }
        fn splat(value: i32) -> __m256i { _mm256_set1_epi32(value) }
        fn and(a: __m256i, b: __m256i) -> __m256i { _mm256_and_si256(a, b) }
        fn or(a: __m256i, b: __m256i) -> __m256i { _mm256_or_si256(a, b) }
        fn xor(a: __m256i, b: __m256i) -> __m256i { _mm256_xor_si256(a, b) }
        fn add(a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi32(a, b) }
        fn times_256(a: __m256i) -> __m256i { _mm256_slli_epi32(a, 8) }
        fn shift(a: __m256i, by: i32) -> __m256i {
            if by >= 0 {
                _mm256_srl_epi16(a, _mm_cvtsi32_si128(by))
            } else {
                _mm256_sll_epi16(a, _mm_cvtsi32_si128(-by))
            }
        }
        fn look_up(table: &[i8; 16], a: __m256i) -> __m256i {
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), a)
        }
        fn dot_bytes<const $eight: bool>($sum: __m256i, $w: __m256i, $x: __m256i) -> __m256i { $dot_bytes }
        fn signed_bytes(at: *const u8) -> __m256i { _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.cast())) }
        fn unsigned_bytes(at: *const u8) -> __m256i { _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())) }
        fn load_floats(at: *const f32) -> __m256 { _mm256_loadu_ps(at) }
        fn store_floats(at: *mut f32, values: __m256) { _mm256_storeu_ps(at, values) }
        fn splat_float(value: f32) -> __m256 { _mm256_set1_ps(value) }
        fn to_floats(a: __m256i) -> __m256 { _mm256_cvtepi32_ps(a) }
        fn halves(at: *const u8) -> __m256 { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
        fn multiply(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        fn multiply_add(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
    }
}

registers! {
    impl Words for $type {
        const TILE_TOKENS: usize = 3;
        fn widen($quad: __m256i) -> [__m256i; 2] { $widen }
        fn add_words(a: __m256i, b: __m256i) -> __m256i { _mm256_add_epi16(a, b) }
        fn subtract_words(a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi16(a, b) }
        fn dot_words($s: __m256i, $a: __m256i, $b: __m256i) -> __m256i { $dot_words }
        fn subtract(a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi32(a, b) }
        fn store(at: *mut u8, a: __m256i) { _mm256_storeu_si256(at.cast(), a) }
    }
}
    };
}

pub struct Avx2;

eight_lanes!(
    Avx2,
    unsigned false,
    bytes (EIGHT, sum, weights, x) {
        // No 16-bit sum saturates: weights of six bits unsigned, or of magnitude up to 128, meet bytes of magnitude up to
        // 127.
        let pairs = if EIGHT {
            _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights))
        } else {
            _mm256_maddubs_epi16(weights, x)
        };
        _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
    },
    widen (quad) {
        let low = _mm256_srai_epi16(_mm256_slli_epi16(quad, 8), 8);
        let high = _mm256_srai_epi16(quad, 8);
        // low: bytes 0 and 2 of a quad, high: 1 and 3; wanted are (0, 1) and (2, 3).
        let first = _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
        [first, _mm256_blend_epi16(_mm256_srli_epi32(low, 16), high, 0xaa)]
    },
    words (sum, a, b) _mm256_add_epi32(sum, _mm256_madd_epi16(a, b))
);

/// AVX-VNNI: AVX-512's products of bytes and words in short registers.
pub struct AvxVnni;

eight_lanes!(
    AvxVnni,
    unsigned true,
    bytes (EIGHT, sum, weights, x) _mm256_dpbusd_avx_epi32(sum, weights, x),
    widen (quad) {
        let low = _mm256_and_si256(quad, _mm256_set1_epi16(0xff));
        let high = _mm256_srli_epi16(quad, 8);
        let first = _mm256_blend_epi16(low, _mm256_slli_epi32(high, 16), 0xaa);
        [first, _mm256_blend_epi16(_mm256_srli_epi32(low, 16), high, 0xaa)]
    },
    words (sum, a, b) _mm256_dpwssd_avx_epi32(sum, a, b)
);
