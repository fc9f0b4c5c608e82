//! Small models made in memory, and numbers to fill them with.

use powerinfer_rs::quant::DType;

/// A small generator of numbers, the same on every machine (Steele et al., "Fast Splittable Pseudorandom Number
/// Generators", 2014).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// -1 to 1.
    pub fn float(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}

/// A row of `n` random weights of any type, its scales small and finite.
pub fn random_row(dtype: DType, n: usize, random: &mut Random) -> Vec<u8> {
    let mut bytes: Vec<u8> = (0..dtype.row_bytes(n)).map(|_| random.next() as u8).collect();
    let half = |v: f32| half::f16::from_f32(v).to_le_bytes();
    // Where each type has its half-precision scales.
    let halves: &[usize] = match dtype {
        DType::F32 => {
            bytes.as_chunks_mut::<4>().0.iter_mut().for_each(|b| *b = random.float().to_le_bytes());
            &[]
        }
        DType::F16 => {
            bytes.as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = half(random.float()));
            &[]
        }
        DType::BF16 => {
            let short = |v: f32| ((v.to_bits() >> 16) as u16).to_le_bytes();
            bytes.as_chunks_mut::<2>().0.iter_mut().for_each(|b| *b = short(random.float()));
            &[]
        }
        DType::Q4_1 | DType::Q5_1 | DType::Q4K | DType::Q5K => &[0, 2],
        DType::Q2K => &[80, 82],
        DType::Q3K => &[108],
        DType::Q6K => &[208],
        _ => &[0],
    };
    for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
        for at in halves {
            block[*at..at + 2].copy_from_slice(&half(0.02 * random.float()));
        }
    }
    bytes
}

/// Writes GGUF bytes.
#[derive(Default)]
pub struct Writer {
    keys: Vec<u8>,
    n_keys: u64,
    infos: Vec<u8>,
    n_tensors: u64,
    data: Vec<u8>,
}

fn put_string(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

impl Writer {
    fn key(&mut self, name: &str, kind: u32, value: &[u8]) {
        put_string(&mut self.keys, name);
        self.keys.extend(kind.to_le_bytes());
        self.keys.extend(value);
        self.n_keys += 1;
    }

    pub fn string(&mut self, name: &str, value: &str) {
        let mut bytes = Vec::new();
        put_string(&mut bytes, value);
        self.key(name, 8, &bytes);
    }

    pub fn u32(&mut self, name: &str, value: u32) {
        self.key(name, 4, &value.to_le_bytes());
    }

    pub fn f32(&mut self, name: &str, value: f32) {
        self.key(name, 6, &value.to_le_bytes());
    }

    pub fn strings(&mut self, name: &str, values: &[&str]) {
        let mut bytes = 8u32.to_le_bytes().to_vec();
        bytes.extend((values.len() as u64).to_le_bytes());
        values.iter().for_each(|v| put_string(&mut bytes, v));
        self.key(name, 9, &bytes);
    }

    pub fn tensor(&mut self, name: &str, dims: &[usize], dtype: DType, data: &[u8]) {
        put_string(&mut self.infos, name);
        self.infos.extend((dims.len() as u32).to_le_bytes());
        dims.iter().for_each(|d| self.infos.extend((*d as u64).to_le_bytes()));
        self.infos.extend(dtype.id().to_le_bytes());
        self.infos.extend((self.data.len() as u64).to_le_bytes());
        self.data.extend(data);
        self.data.resize(self.data.len().next_multiple_of(32), 0);
        self.n_tensors += 1;
    }

    pub fn finish(self, magic: &[u8; 4]) -> Vec<u8> {
        let mut out = magic.to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend(self.n_tensors.to_le_bytes());
        out.extend(self.n_keys.to_le_bytes());
        out.extend(self.keys);
        out.extend(self.infos);
        out.resize(out.len().next_multiple_of(32), 0);
        out.extend(self.data);
        out
    }
}

pub const N_VOCAB: usize = 16;

/// A one-layer model of `arch` with predictors, embedding and FFN 32 wide.
pub fn tiny_model(arch: &str, dtype: DType) -> Vec<u8> {
    // As narrow as the type's blocks allow.
    let d = dtype.block_len().max(32);
    let mut w = Writer::default();
    let mut random = Random(1);
    w.string("general.architecture", arch);
    for (name, value) in [
        ("context_length", 64),
        ("embedding_length", d),
        ("block_count", 1),
        ("feed_forward_length", d),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 2),
    ] {
        w.u32(&format!("{arch}.{name}"), value as u32);
    }
    w.f32(&format!("{arch}.attention.layer_norm_rms_epsilon"), 1e-5);
    w.f32("powerinfer.sparse_threshold", 0.0);
    w.strings("tokenizer.ggml.tokens", &["a"; N_VOCAB]);
    let mut matrix = |w: &mut Writer, name: &str, n_in: usize, n_out: usize| {
        let data: Vec<u8> = (0..n_out).flat_map(|_| random_row(dtype, n_in, &mut random)).collect();
        w.tensor(&format!("{name}.weight"), &[n_in, n_out], dtype, &data);
    };
    let vector = |w: &mut Writer, name: &str, n: usize| {
        w.tensor(name, &[n], DType::F32, &1.0f32.to_le_bytes().repeat(n));
    };
    matrix(&mut w, "token_embd", d, N_VOCAB);
    vector(&mut w, "output_norm.weight", d);
    vector(&mut w, "blk.0.attn_norm.weight", d);
    if arch == "falcon" {
        matrix(&mut w, "blk.0.attn_qkv", d, 3 * d);
        vector(&mut w, "output_norm.bias", d);
        vector(&mut w, "blk.0.attn_norm.bias", d);
    } else {
        vector(&mut w, "blk.0.ffn_norm.weight", d);
        for name in ["attn_q", "attn_k", "attn_v"] {
            matrix(&mut w, &format!("blk.0.{name}"), d, d);
        }
    }
    if arch == "opt" {
        matrix(&mut w, "position_embd", d, 66);
        vector(&mut w, "blk.0.ffn_up.bias", d);
    }
    if matches!(arch, "llama" | "bamboo") {
        matrix(&mut w, "blk.0.ffn_gate", d, d);
    }
    for name in ["attn_output", "ffn_up", "ffn_down_t", "fc1", "fc2"] {
        matrix(&mut w, &format!("blk.0.{name}"), d, d);
    }
    w.finish(b"PWRI")
}
