//! Broken files: whatever is wrong with one, the answer is an error, at once and in little memory.

use std::ops::ControlFlow;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use powerinfer_rs::engine::{Engine, EngineOptions, Request};
use powerinfer_rs::gguf::Gguf;
use powerinfer_rs::quant::DType;
use powerinfer_rs::{Error, Result};

use crate::allocation::peak_of;
use crate::common::{Random, tiny_model};

const MAX_BYTES: usize = 64 << 20;
/// Far above what any file takes, so that a busy machine is no failure; the README has the measured figure.
const MAX_TIME: Duration = Duration::from_secs(2);

/// Loads a file's bytes and runs two tokens.
fn load_and_step(bytes: Vec<u8>) -> Result<()> {
    let gguf = Gguf::from_bytes(bytes, Path::new("mutant.gguf"))?;
    let options = EngineOptions { threads: Some(1), n_ctx: Some(8), ..EngineOptions::default() };
    let mut engine = Engine::new(gguf, &options, &mut |_, _| ControlFlow::Continue(()))?;
    let sequence = engine.new_sequence();
    let request = Request { sequence, tokens: &[0, 1], n_logits: 1 };
    engine.step(&[request], &mut || false).map(drop)
}

fn seeds() -> Vec<Vec<u8>> {
    let mut all: Vec<_> = ["llama", "bamboo", "falcon", "opt"].map(|a| tiny_model(a, DType::Q8_0)).into();
    all.push(tiny_model("llama", DType::F16));
    all
}

/// One to four small damages, most of them in the header.
fn mutate(bytes: &mut Vec<u8>, random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        if bytes.is_empty() {
            return;
        }
        let reach = if random.below(8) == 0 { bytes.len() } else { bytes.len().min(2600) };
        let at = random.below(reach);
        match random.below(8) {
            0 => bytes[at] ^= 1 << random.below(8),
            1 => bytes[at] = random.next() as u8,
            2 => bytes.truncate(at),
            3 => drop(bytes.remove(at)),
            4 => bytes.insert(at, random.next() as u8),
            5 | 6 => {
                const VALUES: [u64; 10] =
                    [0, 1, 2, 31, 0x7f, 0xff, 0xffff, 0x7fff_ffff, 0xffff_ffff, u64::MAX >> 1];
                let value =
                    VALUES[random.below(VALUES.len())].wrapping_add(random.below(3) as u64).to_le_bytes();
                let n = [1, 2, 4, 8][random.below(4)].min(bytes.len() - at);
                bytes[at..at + n].copy_from_slice(&value[..n]);
            }
            _ => {
                let (from, n) = (random.below(reach), random.below(64));
                let copy: Vec<u8> = bytes[from..].iter().take(n).copied().collect();
                for (to, b) in bytes[at..].iter_mut().zip(copy) {
                    *to = b;
                }
            }
        }
    }
}

#[test]
fn the_seeds_are_sound() {
    for (i, seed) in seeds().into_iter().enumerate() {
        // The fuzz target starts from the same files: they are checked in, and this keeps them so.
        let stored = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("fuzz/seeds/{i}.gguf"));
        if std::env::var_os("WRITE_SEEDS").is_some() {
            std::fs::write(&stored, &seed).expect("a place for seeds");
        }
        assert!(std::fs::read(&stored).expect("a seed") == seed, "stale seeds: run with WRITE_SEEDS=1");
        load_and_step(seed).expect("a sound model");
    }
}

#[test]
fn a_mutated_file_is_an_error_or_a_model() {
    let n: u64 = std::env::var("MUTATIONS").map_or(100_000, |n| n.parse().expect("a number"));
    let seeds = seeds();
    let (mut errors, mut most, mut slowest) = (0, 0, Duration::ZERO);
    for i in 0..n {
        let mut random = Random(i);
        let mut bytes = seeds[random.below(seeds.len())].clone();
        mutate(&mut bytes, &mut random);
        let start = Instant::now();
        let (result, peak) = peak_of(|| catch_unwind(AssertUnwindSafe(|| load_and_step(bytes))));
        let time = start.elapsed();
        let result = result.unwrap_or_else(|_| panic!("mutation {i} panicked"));
        assert!(peak <= MAX_BYTES, "mutation {i} took {peak} bytes");
        assert!(time <= MAX_TIME, "mutation {i} took {time:?}");
        errors += result.is_err() as u64;
        (most, slowest) = (most.max(peak), slowest.max(time));
    }
    println!("{n} mutated files: {errors} errors, at most {most} bytes and {slowest:?} for one");
    assert!(errors > n / 10, "the mutations must break something");
}

#[test]
fn a_file_cut_short_anywhere_is_an_error() {
    for seed in seeds() {
        // The last tensor's padding may go without harm.
        for n in (0..3000.min(seed.len() - 64)).chain((3000..seed.len() - 64).step_by(997)) {
            let error = load_and_step(seed[..n].to_vec()).expect_err("a file cut short");
            assert!(matches!(error, Error::Format { .. }), "cut at {n}: {error}");
        }
    }
}
