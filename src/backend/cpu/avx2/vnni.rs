//! AVX2 with AVX-VNNI: what lies side by side, and many tokens, through its products; the rest as without.

use super::*;

pub fn is_available() -> bool {
    super::is_available() && is_x86_feature_detected!("avxvnni")
}

instantiate_tiles!(registers::AvxVnni, #[target_feature(enable = "avxvnni,avx2,fma,f16c")]);

pub static KERNELS: Kernels = table!("avxvnni", dot_for, panels_for, &[gemm::<true>, gemm::<false>]);
