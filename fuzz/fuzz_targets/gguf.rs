//! Any bytes as a model file: `mkdir -p fuzz/corpus/gguf; cargo +nightly fuzz run gguf fuzz/corpus/gguf fuzz/seeds`.

#![no_main]

use std::ops::ControlFlow;
use std::path::Path;

use libfuzzer_sys::fuzz_target;
use powerinfer_rs::engine::{Engine, EngineOptions, Request};
use powerinfer_rs::gguf::Gguf;

fuzz_target!(|data: &[u8]| {
    let Ok(gguf) = Gguf::from_bytes(data.to_vec(), Path::new("fuzz.gguf")) else { return };
    let options = EngineOptions { threads: Some(1), n_ctx: Some(8), ..EngineOptions::default() };
    let Ok(mut engine) = Engine::new(gguf, &options, &mut |_, _| ControlFlow::Continue(())) else { return };
    let sequence = engine.new_sequence();
    let _ = engine.step(&[Request { sequence, tokens: &[0], n_logits: 1 }], &mut || false);
});
