//! The engine: sequences, batches, threads, saving.

use std::ops::ControlFlow;
use std::path::Path;

use powerinfer_rs::backend::KV_BLOCK;
use powerinfer_rs::engine::{Engine, EngineOptions, Request, SequenceId};
use powerinfer_rs::gguf::Gguf;
use powerinfer_rs::model::kv_cache::Sequence;
use powerinfer_rs::quant::DType;
use powerinfer_rs::sparse::Sparsity;
use powerinfer_rs::{Error, Result};

use crate::common::{N_VOCAB, tiny_model};

const ARCHS: [&str; 4] = ["llama", "bamboo", "falcon", "opt"];

fn engine(arch: &str, dtype: DType, change: impl FnOnce(&mut EngineOptions)) -> Engine {
    let gguf = Gguf::from_bytes(tiny_model(arch, dtype), Path::new("tiny.gguf")).unwrap();
    let mut options = EngineOptions { threads: Some(1), ..EngineOptions::default() };
    change(&mut options);
    Engine::new(gguf, &options, &mut |_, _| ControlFlow::Continue(())).unwrap()
}

fn tokens(n: usize) -> Vec<u32> {
    (0..n).map(|i| (i * 7 % N_VOCAB) as u32).collect()
}

fn step(engine: &mut Engine, sequence: SequenceId, tokens: &[u32]) -> Vec<f32> {
    engine.step(&[Request { sequence, tokens, n_logits: tokens.len() }], &mut || false).unwrap()
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn bits_do_not_depend_on_threads_or_batches() {
    for arch in ARCHS {
        for dtype in [DType::F16, DType::Q4_0] {
            let all = tokens(60);
            let mut reference = engine(arch, dtype, |_| ());
            let sequence = reference.new_sequence();
            let want = bits(&step(&mut reference, sequence, &all));
            for threads in [1, 2, 3, 8] {
                let mut e = engine(arch, dtype, |o| o.threads = Some(threads));
                let sequence = e.new_sequence();
                assert_eq!(bits(&step(&mut e, sequence, &all)), want, "{arch} {threads}");
                let one_by_one = e.new_sequence();
                let each: Vec<f32> = all.iter().flat_map(|t| step(&mut e, one_by_one, &[*t])).collect();
                assert_eq!(bits(&each), want, "{arch} {threads} one by one");
            }
        }
    }
}

/// Past one segment of attention, and past the part of the cache that is float32.
#[test]
fn bits_do_not_depend_on_them_in_a_long_text_either() {
    const LENGTH: usize = 600;
    const AT_ONCE: usize = 580;
    // OPT has learned 64 positions.
    for arch in ["llama", "bamboo", "falcon"] {
        for kv_type in [DType::F16, DType::F32] {
            let all = tokens(LENGTH);
            let long = |threads| {
                engine(arch, DType::Q4_0, |o| {
                    (o.threads, o.kv_type, o.n_ctx) = (Some(threads), Some(kv_type), Some(LENGTH));
                })
            };
            let mut reference = long(1);
            let sequence = reference.new_sequence();
            let want = bits(&step(&mut reference, sequence, &all));
            for threads in [1, 2, 8] {
                let mut e = long(threads);
                let sequence = e.new_sequence();
                let mut got = step(&mut e, sequence, &all[..AT_ONCE]);
                all[AT_ONCE..].iter().for_each(|t| got.extend(step(&mut e, sequence, &[*t])));
                assert_eq!(bits(&got), want, "{arch} {kv_type:?} {threads}");
            }
        }
    }
}

#[test]
fn sequences_side_by_side_are_as_alone() {
    for arch in ARCHS {
        let mut e = engine(arch, DType::Q8_0, |_| ());
        let (a, b) = (e.new_sequence(), e.new_sequence());
        let (first, second) = (tokens(5), tokens(9)[4..].to_vec());
        let alone_a = step(&mut e, a, &first);
        let alone_b = step(&mut e, b, &second);
        let (a, b) = (e.new_sequence(), e.new_sequence());
        let requests = [
            Request { sequence: a, tokens: &first, n_logits: 5 },
            Request { sequence: b, tokens: &second, n_logits: 5 },
        ];
        let together = e.step(&requests, &mut || false).unwrap();
        assert_eq!(bits(&together), bits(&[alone_a, alone_b].concat()), "{arch}");
    }
}

#[test]
fn forks_share_and_part() {
    let mut e = engine("llama", DType::F16, |_| ());
    let a = e.new_sequence();
    step(&mut e, a, &tokens(40));
    let one = e.kv_bytes();
    let b = e.fork(a).unwrap();
    assert_eq!(e.kv_bytes(), one);
    let from_b = step(&mut e, b, &[3]);
    // The full block is still shared; the one that both had begun is not.
    assert!(e.kv_bytes() > one && e.kv_bytes() < 2 * one);
    assert_eq!(bits(&step(&mut e, a, &[3])), bits(&from_b));
    e.truncate(b, 20).unwrap();
    assert_eq!(e.sequence(b).unwrap().tokens(), &tokens(40)[..20]);
    let again = step(&mut e, b, &tokens(40)[20..]);
    let fresh = e.new_sequence();
    let whole = step(&mut e, fresh, &tokens(40));
    assert_eq!(bits(&again), bits(&whole[20 * N_VOCAB..]));
}

#[test]
fn a_full_context_is_an_error_that_changes_nothing() {
    let mut e = engine("llama", DType::F16, |o| o.n_ctx = Some(8));
    let a = e.new_sequence();
    step(&mut e, a, &tokens(6));
    let too_much = e.step(&[Request { sequence: a, tokens: &tokens(3), n_logits: 1 }], &mut || false);
    assert!(matches!(too_much, Err(Error::ContextOverflow { requested: 9, n_ctx: 8 })));
    assert_eq!(e.sequence(a).unwrap().len(), 6);
    step(&mut e, a, &tokens(2));
}

#[test]
fn bad_requests_are_refused() {
    let mut e = engine("llama", DType::F16, |_| ());
    let a = e.new_sequence();
    let mut ask = |requests: &[Request]| e.step(requests, &mut || false).map(drop);
    let refused = |r: Result<()>| assert!(matches!(r, Err(Error::Argument { .. })));
    refused(ask(&[Request { sequence: 99, tokens: &[1], n_logits: 1 }]));
    refused(ask(&[Request { sequence: a, tokens: &[], n_logits: 0 }]));
    refused(ask(&[Request { sequence: a, tokens: &[N_VOCAB as u32], n_logits: 1 }]));
    let twice = || Request { sequence: a, tokens: &[1], n_logits: 1 };
    refused(ask(&[twice(), twice()]));
    assert!(ask(&[]).is_ok());
}

#[test]
fn an_interrupted_step_changes_nothing() {
    let mut e = engine("llama", DType::F16, |_| ());
    let a = e.new_sequence();
    step(&mut e, a, &tokens(3));
    let result = e.step(&[Request { sequence: a, tokens: &tokens(2), n_logits: 1 }], &mut || true);
    assert!(matches!(result, Err(Error::Interrupted)));
    assert_eq!(e.sequence(a).unwrap().len(), 3);
}

#[test]
fn a_saved_sequence_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.seq");
    for kv_type in [DType::F32, DType::F16] {
        let mut e = engine("llama", DType::F16, |o| o.kv_type = Some(kv_type));
        let a = e.new_sequence();
        step(&mut e, a, &tokens(37));
        e.save(a, &path).unwrap();
        let b = e.restore(&path).unwrap();
        assert_eq!(e.sequence(b).unwrap().tokens(), &tokens(37));
        assert_eq!(bits(&step(&mut e, a, &[1])), bits(&step(&mut e, b, &[1])));
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no partial file is left");
}

#[test]
fn a_broken_saved_sequence_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.seq");
    let mut e = engine("llama", DType::F16, |_| ());
    let a = e.new_sequence();
    step(&mut e, a, &tokens(3));
    e.save(a, &path).unwrap();
    let good = std::fs::read(&path).unwrap();
    let refused = |e: &mut Engine, bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        assert!(matches!(e.restore(&path), Err(Error::Format { .. })));
    };
    for at in (0..good.len()).step_by(good.len() / 50).chain(0..60) {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        refused(&mut e, &bad);
        refused(&mut e, &good[..at]);
    }
    std::fs::write(&path, &good).unwrap();
    let mut other = engine("llama", DType::Q8_0, |_| ());
    assert!(matches!(other.restore(&path), Err(Error::Format { field, .. }) if field == "model"));
    assert!(matches!(e.save(a, &dir.path().join("no/such/folder")), Err(Error::Io { .. })));
}

#[test]
fn modes_are_checked_against_the_file() {
    let load = |sparsity, activation| {
        let gguf = Gguf::from_bytes(tiny_model("llama", DType::F16), Path::new("tiny.gguf")).unwrap();
        let options = EngineOptions { sparsity, activation, threads: Some(1), ..EngineOptions::default() };
        Engine::new(gguf, &options, &mut |_, _| ControlFlow::Continue(())).map(|e| e.info().sparsity)
    };
    use powerinfer_rs::backend::Activation::Silu;
    assert_eq!(load(None, None).unwrap(), Sparsity::Predicted);
    assert_eq!(load(None, Some(Silu)).unwrap(), Sparsity::Dense);
    assert!(load(Some(Sparsity::Exact), Some(Silu)).is_err());
}

#[test]
fn blocks_follow_tokens() {
    let mut s = Sequence::<Vec<u8>>::default();
    s.reserve(KV_BLOCK + 1, |i| Ok(vec![i as u8]), |block, _| Ok(block.clone())).unwrap();
    s.append(&tokens(KV_BLOCK + 1));
    assert_eq!(s.blocks().len(), 2);
    s.truncate(KV_BLOCK);
    assert_eq!(s.blocks().len(), 1);
    s.truncate(0);
    assert!(s.is_empty() && s.blocks().is_empty());
}
