//! Dot products (of rows, of rows side by side, of many tokens) and row additions (by density) by format and instruction
//! set, in bytes of weights a second; beside them the plain streaming read that they can't beat.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use powerinfer_rs::backend::cpu::bandwidth::streaming_read;
use powerinfer_rs::backend::cpu::kernels::{Kernels, Rows, available};
use powerinfer_rs::backend::cpu::operand::{Form, Operand, Quantized, TOKEN_TILE, WeightTile};
use powerinfer_rs::backend::cpu::pool::Pool;
use powerinfer_rs::quant::{DType, LANES, panel_bytes};

const N_COLS: usize = 4096;
const N_ROWS: usize = 4096;

/// Bytes of half-precision ones: sound scales for every format.
fn weights(dtype: DType) -> Vec<u8> {
    [0x00, 0x3c].repeat(N_ROWS * dtype.row_bytes(N_COLS) / 2)
}

fn types() -> impl Iterator<Item = DType> {
    DType::ALL.iter().copied().filter(|t| *t != DType::I32)
}

fn dot(c: &mut Criterion) {
    for kernels in available() {
        let (x, quantized) = activations(kernels, 1, Form::Bytes);
        let operand =
            Operand { n_cols: N_COLS, first: 0, n_tokens: 1, values: &x, quantized: Some(&quantized) };
        for dtype in types() {
            let bytes = weights(dtype);
            let rows: Vec<*const u8> = bytes.chunks(dtype.row_bytes(N_COLS)).map(|r| r.as_ptr()).collect();
            let mut out = vec![0.0f32; N_ROWS];
            let mut group = c.benchmark_group(format!("dot/{}", kernels.name));
            group.throughput(Throughput::Bytes(bytes.len() as u64)).sample_size(10);
            group.bench_function(BenchmarkId::from_parameter(dtype.name()), |b| {
                b.iter(|| {
                    let rows = Rows { now: black_box(&rows), next: &[] };
                    // SAFETY: whole rows, an output for each, a table of this processor.
                    unsafe { (kernels.dot[dtype as usize])(rows, &operand, out.as_mut_ptr(), N_ROWS) }
                })
            });
        }
    }
}

/// `n_tokens` rows of activations, quantised.
fn activations(kernels: &Kernels, n_tokens: usize, form: Form) -> (Vec<f32>, Quantized) {
    let x: Vec<f32> = (0..n_tokens * N_COLS).map(|i| (i % 17) as f32 - 8.0).collect();
    let mut quantized = Quantized::default();
    quantized.resize(n_tokens, N_COLS, form);
    let rows = quantized.parts();
    for (t, x) in x.chunks(N_COLS).enumerate() {
        // SAFETY: `available` hands out tables of this processor; each row is taken once.
        unsafe { (kernels.quantize)(x, &mut rows.row(t)) };
    }
    (x, quantized)
}

/// Sixteen rows side by side, with one token, and unpacked for a tile of tokens.
fn panels(c: &mut Criterion) {
    for kernels in available() {
        for dtype in types() {
            let Some(panels) = kernels.panels[dtype as usize] else { continue };
            let size = panel_bytes(dtype, N_COLS).expect("a type with panels");
            let n_panels = N_ROWS / LANES;
            let bytes = [0x00, 0x3c].repeat(n_panels * size / 2);
            let mut out = vec![0.0f32; TOKEN_TILE * LANES];
            let (x, quantized) = activations(kernels, 1, Form::Bytes);
            let operand =
                Operand { n_cols: N_COLS, first: 0, n_tokens: 1, values: &x, quantized: Some(&quantized) };
            let mut group = c.benchmark_group(format!("panel/{}", kernels.name));
            group.throughput(Throughput::Bytes(bytes.len() as u64)).sample_size(10);
            group.bench_function(BenchmarkId::from_parameter(dtype.name()), |b| {
                b.iter(|| {
                    for panel in black_box(&bytes).chunks(size) {
                        // SAFETY: whole panels, an output for each row, a table of this processor.
                        unsafe { (panels.dot)(panel.as_ptr(), LANES, &operand, out.as_mut_ptr(), LANES) }
                    }
                })
            });
            group.finish();
            let (_, quantized) = activations(kernels, TOKEN_TILE, Form::Words);
            let mut tile = WeightTile::default();
            let Some(unpack) = panels.unpack else { continue };
            // SAFETY: a whole panel, a table of this processor.
            unsafe { unpack(bytes.as_ptr(), N_COLS, &mut tile) };
            let x: Vec<_> = (0..TOKEN_TILE).map(|t| quantized.word_row(t, 0..N_COLS, tile.share)).collect();
            let mut group = c.benchmark_group(format!("gemm/{}", kernels.name));
            // Multiplications, here.
            group.throughput(Throughput::Elements((LANES * N_COLS * TOKEN_TILE) as u64)).sample_size(10);
            for (i, gemm) in kernels.gemms.iter().enumerate() {
                group.bench_function(format!("{} form {i}", dtype.name()), |b| {
                    // SAFETY: rows of one length, an output for each row and token, a table of this processor.
                    b.iter(|| unsafe { gemm(black_box(&tile), LANES, &x, false, out.as_mut_ptr(), LANES) })
                });
            }
        }
    }
}

fn add_rows(c: &mut Criterion) {
    for kernels in available() {
        for dtype in types() {
            let bytes = weights(dtype);
            let mut out = vec![0.0f32; N_COLS];
            for one_in in [1, 3, 10] {
                // One row in so many is on, as neurons would be.
                let on: Vec<(&[u8], f32)> =
                    bytes.chunks(dtype.row_bytes(N_COLS)).step_by(one_in).map(|row| (row, 1e-3)).collect();
                let name = format!("add_rows/{}/1-in-{one_in}", kernels.name);
                let mut group = c.benchmark_group(name);
                group.throughput(Throughput::Bytes((on.len() * on[0].0.len()) as u64)).sample_size(10);
                group.bench_function(BenchmarkId::from_parameter(dtype.name()), |b| {
                    b.iter(|| {
                        for rows in on.chunks(8) {
                            // SAFETY: a table of this processor.
                            unsafe { (kernels.add_rows)(dtype, rows, &[], &mut out) }
                        }
                    })
                });
            }
        }
    }
}

fn memory(c: &mut Criterion) {
    let pool = Pool::new(1).expect("one thread");
    let n_bytes = 1 << 28;
    let mut group = c.benchmark_group("memory");
    group.throughput(Throughput::Bytes(n_bytes as u64)).sample_size(10);
    group.bench_function("streaming read, one thread", |b| {
        b.iter_custom(|n| {
            std::time::Duration::from_secs_f64(n as f64 * n_bytes as f64 / streaming_read(&pool, n_bytes, 3))
        })
    });
}

criterion_group!(benches, memory, dot, panels, add_rows);
criterion_main!(benches);
