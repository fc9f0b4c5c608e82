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

fn logits(arch: &str, dtype: DType, gpus: Vec<GpuOptions>, sparsity: Option<Sparsity>) -> Vec<f32> {
    let gguf = Gguf::from_bytes(tiny_model(arch, dtype), Path::new("tiny.gguf")).unwrap();
    let is_on_gpu = !gpus.is_empty();
    let options = EngineOptions { threads: Some(1), gpus, sparsity, ..EngineOptions::default() };
    let mut engine = Engine::new(gguf, &options, &mut |_, _| ControlFlow::Continue(())).unwrap();
    assert_eq!(engine.info().gpus.len(), is_on_gpu as usize);
    let sequence = engine.new_sequence();
    let tokens: Vec<u32> = (0..9).map(|i| (i * 7 % N_VOCAB) as u32).collect();
    let mut out = Vec::new();
    for tokens in [&tokens[..7], &tokens[7..8], &tokens[8..]] {
        let request = Request { sequence, tokens, n_logits: tokens.len() };
        out.extend(engine.step(&[request], &mut || false).unwrap());
    }
    out
}

#[test]
fn every_weight_type() {
    let gpu = GpuOptions { number: 0, budget: 1 << 30, context: 0, least: 1 };
    for dtype in DType::ALL.iter().copied().filter(|dtype| *dtype != DType::I32) {
        for arch in ["llama", "falcon"] {
            for mode in [None, Some(Sparsity::Dense)] {
                let want = logits(arch, dtype, Vec::new(), mode);
                let got = logits(arch, dtype, vec![gpu], mode);
                let mean = want.iter().sum::<f32>() / want.len() as f32;
                let spread = want.iter().map(|v| (v - mean).powi(2)).sum::<f32>() / want.len() as f32;
                let far = want.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                let near = if dtype.is_quantized() { 5e-3 } else { 1e-4 };
                assert!(far < near * spread.sqrt(), "{arch} {dtype:?} {mode:?}: {far} of {}", spread.sqrt());
            }
        }
    }
}
