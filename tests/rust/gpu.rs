//! Engines on GPUs against engines on the processor: every weight type. Wants a driver; `make test-gpu` gives it the
//! emulator's.

#[allow(dead_code)] // What these tests leave, others use.
mod common;

use std::ops::ControlFlow;
use std::path::Path;

use powerinfer_rs::engine::{Engine, EngineOptions, GpuOptions, Request};
use powerinfer_rs::gguf::Gguf;
use powerinfer_rs::quant::DType;
use powerinfer_rs::sparse::Sparsity;

use common::{N_VOCAB, tiny_model};

const GPU: GpuOptions = GpuOptions { number: 0, budget: 1 << 30, context: 0, least: 1 };

/// Logits of all tokens, which go in steps of so many of `steps`.
fn logits(
    arch: &str,
    dtype: DType,
    gpus: Vec<GpuOptions>,
    sparsity: Option<Sparsity>,
    steps: &[usize],
) -> Vec<f32> {
    let gguf = Gguf::from_bytes(tiny_model(arch, dtype), Path::new("tiny.gguf")).unwrap();
    let is_on_gpu = !gpus.is_empty();
    let options = EngineOptions { threads: Some(1), gpus, sparsity, ..EngineOptions::default() };
    let mut engine = Engine::new(gguf, &options, &mut |_, _| ControlFlow::Continue(())).unwrap();
    assert_eq!(engine.info().gpus.len(), is_on_gpu as usize);
    let sequence = engine.new_sequence();
    let tokens: Vec<u32> = (0..steps.iter().sum()).map(|i| (i * 7 % N_VOCAB) as u32).collect();
    let mut out = Vec::new();
    let mut left = &tokens[..];
    for n in steps {
        let (tokens, rest) = left.split_at(*n);
        left = rest;
        let request = Request { sequence, tokens, n_logits: tokens.len() };
        out.extend(engine.step(&[request], &mut || false).unwrap());
    }
    out
}

#[test]
fn every_weight_type() {
    for dtype in DType::ALL.iter().copied().filter(|dtype| *dtype != DType::I32) {
        for arch in ["llama", "falcon"] {
            for mode in [None, Some(Sparsity::Dense)] {
                let want = logits(arch, dtype, Vec::new(), mode, &[7, 1, 1]);
                let got = logits(arch, dtype, vec![GPU], mode, &[7, 1, 1]);
                let mean = want.iter().sum::<f32>() / want.len() as f32;
                let spread = want.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / want.len() as f32;
                let far = want.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                let near = if dtype.is_quantized() { 5e-3 } else { 1e-4 };
                assert!(far < near * spread.sqrt(), "{arch} {dtype:?} {mode:?}: {far} of {}", spread.sqrt());
            }
        }
    }
}

/// Tiles of many tokens, a few tokens, and one at a time: the same to the bit.
#[test]
fn bits_are_the_same_for_any_number_of_tokens() {
    for dtype in DType::ALL.iter().copied().filter(|dtype| *dtype != DType::I32) {
        for (arch, mode) in [("llama", None), ("falcon", None), ("llama", Some(Sparsity::Dense))] {
            let bits = |steps: &[usize]| -> Vec<u32> {
                logits(arch, dtype, vec![GPU], mode, steps).iter().map(|v| v.to_bits()).collect()
            };
            let one_by_one = bits(&[1; 37]);
            assert_eq!(one_by_one, bits(&[37]), "{arch} {dtype:?} {mode:?}");
            assert_eq!(one_by_one, bits(&[16, 8, 9, 4]), "{arch} {dtype:?} {mode:?}");
        }
    }
}
