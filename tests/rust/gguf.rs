//! The reader's answers to files that are wrong in one known way.

use std::ops::ControlFlow;
use std::path::Path;

use powerinfer_rs::engine::{Engine, EngineOptions};
use powerinfer_rs::gguf::Gguf;
use powerinfer_rs::quant::DType;
use powerinfer_rs::{Error, Result};

use crate::common::{Writer, tiny_model};

fn open(bytes: Vec<u8>) -> Result<Gguf> {
    Gguf::from_bytes(bytes, Path::new("broken.gguf"))
}

fn message(result: Result<impl Sized>) -> String {
    match result {
        Ok(_) => panic!("the file is broken"),
        Err(e) => e.to_string(),
    }
}

#[track_caller]
fn says(result: Result<impl Sized>, words: &[&str]) {
    let message = message(result);
    for word in ["broken.gguf"].iter().chain(words) {
        assert!(message.contains(word), "{word:?} is not in {message:?}");
    }
}

fn header(version: u32, n_tensors: u64, n_keys: u64) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(version.to_le_bytes());
    out.extend(n_tensors.to_le_bytes());
    out.extend(n_keys.to_le_bytes());
    out
}

#[test]
fn a_wrong_start_is_named() {
    says(open(b"GGML1234".to_vec()), &["magic", "GGML", "GGUF or PWRI"]);
    says(open(header(1, 0, 0)), &["version", "1"]);
    says(open(header(3u32.swap_bytes(), 0, 0)), &["big-endian"]);
    says(open(header(3, u64::MAX, 0)), &["tensor count", "at most"]);
    says(open(header(3, 0, 1 << 40)), &["key count", "at most"]);
    says(open(b"GG".to_vec()), &["magic", "2 left"]);
}

#[test]
fn a_wrong_tensor_is_named() {
    let with = |dims: &[usize], dtype, n| {
        let mut w = Writer::default();
        w.tensor("x.weight", dims, dtype, &vec![0; n]);
        w.finish(b"GGUF")
    };
    assert!(open(with(&[32, 2], DType::Q4_0, 36)).is_ok());
    says(open(with(&[32, 0], DType::Q4_0, 0)), &["tensor x.weight", "dimension 0"]);
    says(open(with(&[33], DType::Q4_0, 36)), &["tensor x.weight", "rows of 33", "multiple of 32"]);
    says(open(with(&[1 << 62, 8], DType::F32, 4)), &["tensor x.weight", "fits memory"]);
    says(open(with(&[4096], DType::F32, 16)), &["tensor x.weight", "16384 bytes"]);
    says(open(with(&[1; 5], DType::F32, 4)), &["tensor x.weight", "rank 5"]);
    let mut twice = Writer::default();
    twice.tensor("x", &[1], DType::F32, &[0; 4]);
    twice.tensor("x", &[1], DType::F32, &[0; 4]);
    says(open(twice.finish(b"GGUF")), &["tensor x", "twice"]);
}

#[test]
fn an_unknown_type_is_refused_by_name() {
    let mut w = Writer::default();
    w.tensor("x", &[256], DType::Q2K, &[0; 84]);
    let mut bytes = w.finish(b"GGUF");
    // The type follows header, name length, name, rank and one dimension.
    let at = 24 + 8 + 1 + 4 + 8;
    bytes[at] = 16;
    says(open(bytes.clone()), &["tensor x", "IQ2_XXS", "Q4_0"]);
    bytes[at] = 99;
    says(open(bytes), &["tensor x", "type 99"]);
}

#[test]
fn overlapping_tensors_are_refused() {
    let mut w = Writer::default();
    w.tensor("a", &[16], DType::F32, &[0; 64]);
    w.tensor("b", &[16], DType::F32, &[0; 64]);
    let mut bytes = w.finish(b"GGUF");
    // b's offset is the last field before the data: header, two infos of 33 bytes.
    let at = 24 + 2 * 33 - 8;
    assert_eq!(bytes[at], 64);
    bytes[at] = 32;
    says(open(bytes), &["tensor b", "after a"]);
}

#[test]
fn alignment_is_any_number_above_zero() {
    for (value, good) in [(0u32, false), (1, true), (8, true), (48, true), (4096, true)] {
        let mut w = Writer::default();
        w.u32("general.alignment", value);
        let result = open(w.finish(b"GGUF"));
        assert_eq!(result.is_ok(), good, "{value}");
    }
    let mut w = Writer::default();
    w.string("general.alignment", "32");
    says(open(w.finish(b"GGUF")), &["general.alignment", "u32 above 0"]);
}

#[test]
fn keys_are_told_apart() {
    let mut w = Writer::default();
    w.u32("a", 1);
    w.u32("a", 2);
    says(open(w.finish(b"GGUF")), &["key a", "twice"]);
}

fn load(bytes: Vec<u8>) -> Result<Engine> {
    let options = EngineOptions { threads: Some(1), ..EngineOptions::default() };
    Engine::new(open(bytes)?, &options, &mut |_, _| ControlFlow::Continue(()))
}

/// The tiny model with `from` overwritten by `to`, of the same length, where it first stands.
fn edited(from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut bytes = tiny_model("llama", DType::F16);
    let at = bytes.windows(from.len()).position(|w| w == from).expect("in the file");
    bytes[at..at + to.len()].copy_from_slice(to);
    bytes
}

#[test]
fn a_model_that_contradicts_itself_is_refused() {
    assert!(load(tiny_model("llama", DType::F16)).is_ok());
    says(
        load(edited(b"blk.0.attn_q.weight", b"blk.9.attn_q.weight")),
        &["blk.0.attn_q.weight", "missing", "[32, 32]"],
    );
    says(
        load(edited(b"general.architecture", b"general.architecturX")),
        &["general.architecture", "nothing"],
    );
    says(load(edited(b"blk.0.fc1.weight", b"blk.0.fcX.weight")), &["blk.0.fc1.weight"]);
    says(load(tiny_model("mamba", DType::F16)), &["mamba", "llama, bamboo, falcon, opt, qwen2, qwen3"]);
    let mut bytes = tiny_model("llama", DType::F16);
    // Of the norms only; the first float of output_norm's ones.
    let ones = 1.0f32.to_le_bytes().repeat(32);
    let at = bytes.windows(ones.len()).position(|w| w == ones).expect("a norm");
    bytes[at..at + 4].copy_from_slice(&f32::NAN.to_le_bytes());
    says(load(bytes), &["output_norm.weight", "NaN", "finite"]);
}

#[test]
fn errors_are_of_their_kind() {
    assert!(matches!(load(tiny_model("mamba", DType::F16)), Err(Error::Unsupported { .. })));
    let missing = load(edited(b"blk.0.attn_q.weight", b"blk.9.attn_q.weight"));
    assert!(matches!(missing, Err(Error::MissingTensor { .. })));
    let nowhere = Gguf::open(Path::new("/nowhere/model.gguf"));
    assert!(matches!(nowhere, Err(Error::Io { .. })));
}
