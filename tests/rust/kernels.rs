//! Every instruction set's kernels against float64, against the scalar ones and against each other, for every type and many
//! shapes.

use powerinfer_rs::backend::KV_BLOCK;
use powerinfer_rs::backend::cpu::kernels::{AttentionKernels, Gemm, Kernels, Rows, available};
use powerinfer_rs::backend::cpu::operand::{Form, Operand, Quantized, TOKEN_TILE, WeightTile};
use powerinfer_rs::quant::{DType, LANES, decode, f16_to_f32, interleave, panel_bytes};

use crate::common::{Random, random_row};

fn types() -> impl Iterator<Item = DType> {
    DType::ALL.iter().copied().filter(|t| *t != DType::I32)
}

struct Case {
    dtype: DType,
    rows: Vec<Vec<u8>>,
    x: Vec<f32>,
    n_cols: usize,
    n_tokens: usize,
}

impl Case {
    fn new(dtype: DType, n_cols: usize, n_rows: usize, n_tokens: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let rows = (0..n_rows).map(|_| random_row(dtype, n_cols, &mut random)).collect();
        let x = (0..n_cols * n_tokens).map(|_| 3.0 * random.float()).collect();
        Self { dtype, rows, x, n_cols, n_tokens }
    }

    fn quantized(&self, kernels: &Kernels, form: Form) -> Quantized {
        let mut quantized = Quantized::default();
        quantized.resize(self.n_tokens, self.n_cols, form);
        let parts = quantized.parts();
        for (t, x) in self.x.chunks_exact(self.n_cols).enumerate() {
            // SAFETY: `available` hands out tables of this processor; each row is taken once.
            unsafe { (kernels.quantize)(x, &mut parts.row(t)) };
        }
        quantized
    }

    fn operand<'a>(&'a self, quantized: &'a Quantized) -> Operand<'a> {
        let (n_cols, n_tokens) = (self.n_cols, self.n_tokens);
        Operand { n_cols, first: 0, n_tokens, values: &self.x, quantized: Some(quantized) }
    }

    fn run(&self, kernels: &Kernels) -> Vec<f32> {
        let quantized = self.quantized(kernels, Form::Bytes);
        let operand = self.operand(&quantized);
        let pointers: Vec<_> = self.rows.iter().map(|r| r.as_ptr()).collect();
        let mut out = vec![f32::NAN; self.rows.len() * self.n_tokens];
        let rows = Rows { now: &pointers, next: &[] };
        // SAFETY: whole rows, an output for each row and token, a table of this processor.
        unsafe { (kernels.dot[self.dtype as usize])(rows, &operand, out.as_mut_ptr(), self.rows.len()) };
        out
    }

    /// The rows side by side, at most sixteen; none where the type's rows stay rows.
    fn panel(&self) -> Option<Vec<u8>> {
        let rows: Vec<&[u8]> = self.rows.iter().map(|r| &r[..]).collect();
        let mut panel = vec![0; panel_bytes(self.dtype, self.n_cols)?];
        interleave(self.dtype, &rows, &mut panel);
        Some(panel)
    }

    /// As `run`, from rows side by side.
    fn run_panel(&self, kernels: &Kernels) -> Option<Vec<f32>> {
        let (panel, panels) = (self.panel()?, kernels.panels[self.dtype as usize]?);
        let quantized = self.quantized(kernels, Form::Bytes);
        let operand = self.operand(&quantized);
        let n = self.rows.len();
        let mut out = vec![f32::NAN; n * self.n_tokens];
        // SAFETY: a whole panel, an output for each row and token, a table of this processor.
        unsafe { (panels.dot)(panel.as_ptr(), n, &operand, out.as_mut_ptr(), n) };
        Some(out)
    }

    /// As `run`, by the matrix-matrix kernel, from rows side by side or from rows, the columns in two parts of which the
    /// first is `split` long.
    fn run_gemm(&self, kernels: &Kernels, gemm: Gemm, from_panel: bool, split: usize) -> Option<Vec<f32>> {
        let quantized = self.quantized(kernels, Form::Words);
        let n = self.rows.len();
        let mut out = vec![f32::NAN; n * self.n_tokens];
        let mut tile = WeightTile::default();
        for columns in [0..split.min(self.n_cols), split..self.n_cols] {
            if columns.is_empty() {
                continue;
            }
            let unpack = kernels.panels[self.dtype as usize]?.unpack?;
            let part = if from_panel {
                self.panel()?[panel_bytes(self.dtype, columns.start)?..].to_vec()
            } else {
                let bytes = self.dtype.row_bytes(columns.start)..self.dtype.row_bytes(columns.end);
                let rows: Vec<&[u8]> = self.rows.iter().map(|r| &r[bytes.clone()]).collect();
                let mut panel = vec![0; panel_bytes(self.dtype, columns.len())?];
                // SAFETY: a table of this processor.
                unsafe { (kernels.interleave)(self.dtype, &rows, &mut panel) };
                panel
            };
            // SAFETY: a whole panel's part, a table of this processor.
            unsafe { unpack(part.as_ptr(), columns.len(), &mut tile) };
            let x: Vec<_> =
                (0..self.n_tokens).map(|t| quantized.word_row(t, columns.clone(), tile.share)).collect();
            for (x, out) in x.chunks(TOKEN_TILE).zip(out.chunks_mut(TOKEN_TILE * n)) {
                // SAFETY: rows of one length, an output for each row and token, a table of this processor.
                unsafe { gemm(&tile, n, x, columns.start > 0, out.as_mut_ptr(), n) };
            }
        }
        Some(out)
    }

    /// In float64, with weights decoded: what the kernels mean.
    fn exact(&self) -> Vec<f64> {
        let mut out = Vec::new();
        for x in self.x.chunks_exact(self.n_cols) {
            for row in &self.rows {
                let mut w = vec![0.0; self.n_cols];
                decode(self.dtype, row, &mut w);
                out.push(w.iter().zip(x).map(|(w, x)| *w as f64 * *x as f64).sum());
            }
        }
        out
    }

    fn scale(&self) -> f64 {
        let mut w = vec![0.0; self.n_cols];
        decode(self.dtype, &self.rows[0], &mut w);
        let norm = |v: &[f32]| v.iter().map(|v| (*v as f64).powi(2)).sum::<f64>().sqrt();
        norm(&w) * norm(&self.x[..self.n_cols])
    }
}

#[test]
fn dot_products_are_right() {
    for dtype in types() {
        let block = dtype.block_len();
        for (i, blocks) in [1, 2, 3, 5, 8, 17].into_iter().enumerate() {
            // Float types have no blocks: lengths that leave every kind of tail.
            let n_cols = if block == 1 { blocks * 7 + 1 } else { blocks * block };
            for (n_rows, n_tokens) in [(1, 1), (4, 1), (7, 1), (4, 4), (5, 6), (9, 3)] {
                let case = Case::new(dtype, n_cols, n_rows, n_tokens, i as u64);
                let (exact, scale) = (case.exact(), case.scale().max(1e-6));
                for kernels in available() {
                    for (got, want) in case.run(kernels).iter().zip(&exact) {
                        let error = (*got as f64 - want).abs() / scale;
                        assert!(error < 5e-4, "{} {dtype:?} {n_cols}: {got} for {want}", kernels.name);
                    }
                }
            }
        }
    }
}

#[test]
fn a_tile_does_not_change_its_parts() {
    for dtype in types() {
        let n_cols = 3 * dtype.block_len().max(32);
        let whole = Case::new(dtype, n_cols, 9, 7, 5);
        for kernels in available() {
            let together = whole.run(kernels);
            for (t, x) in whole.x.chunks_exact(n_cols).enumerate() {
                for (r, row) in whole.rows.iter().enumerate() {
                    let one = Case { dtype, rows: vec![row.clone()], x: x.to_vec(), n_cols, n_tokens: 1 };
                    let (alone, beside) = (one.run(kernels)[0], together[t * 9 + r]);
                    assert_eq!(alone.to_bits(), beside.to_bits(), "{} {dtype:?}", kernels.name);
                }
            }
        }
    }
}

/// However rows lie, and however many tokens there are, the same sums: a token's logits don't depend on its company.
#[test]
fn every_layout_gives_the_same_bits() {
    for dtype in types().filter(|t| t.is_quantized()) {
        for (n_rows, n_tokens, blocks) in
            [(1, 1, 1), (16, 1, 3), (5, 2, 2), (16, 3, 5), (13, 7, 4), (16, 40, 9)]
        {
            let case = Case::new(dtype, blocks * dtype.block_len(), n_rows, n_tokens, blocks as u64);
            for kernels in available() {
                let want: Vec<u32> = case.run(kernels).iter().map(|v| v.to_bits()).collect();
                let mut others = vec![("panel", case.run_panel(kernels))];
                for gemm in kernels.gemms {
                    others.push(("gemm of a panel", case.run_gemm(kernels, *gemm, true, usize::MAX)));
                    others.push(("gemm of rows", case.run_gemm(kernels, *gemm, false, usize::MAX)));
                    others.push(("gemm of a panel in parts", case.run_gemm(kernels, *gemm, true, 256)));
                    others.push(("gemm of rows in parts", case.run_gemm(kernels, *gemm, false, 256)));
                }
                for (what, got) in others {
                    let got = got.map(|got| got.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
                    let wanted = (kernels.name != "scalar").then_some(&want);
                    assert_eq!(got.as_ref(), wanted, "{} {dtype:?} {what}, {n_tokens}", kernels.name);
                }
            }
        }
    }
    const { assert!(TOKEN_TILE < 40 && LANES == 16) };
}

/// One token's weighted sum comes straight from rows, several tokens' from decoded ones.
#[test]
fn picks_add_up_as_rows_do() {
    for dtype in types() {
        let n = if dtype.block_len() == 1 { 77 } else { 5 * dtype.block_len() };
        let mut random = Random(3);
        let rows: Vec<Vec<u8>> = (0..6).map(|_| random_row(dtype, n, &mut random)).collect();
        let picks = [(4, 0.7), (5, -1.3), (7, 2.1), (9, 0.1)];
        for kernels in available() {
            let (mut straight, mut picked) = (vec![0.5f32; n], vec![0.5f32; n]);
            let mut decoded = vec![0.0f32; 6 * n];
            // SAFETY: tables of this processor.
            unsafe {
                for (row, out) in rows.iter().zip(decoded.chunks_exact_mut(n)) {
                    (kernels.decode)(dtype, row, out);
                }
                let picked_rows = picks.map(|(k, a)| (&rows[k as usize - 4][..], a));
                (kernels.add_rows)(dtype, &picked_rows[..1], &picked_rows[1..], &mut straight);
                (kernels.add_rows)(dtype, &picked_rows[1..], &[], &mut straight);
                (kernels.mix_picks)(&decoded, 4, &picks, &mut picked);
            }
            for (a, b) in straight.iter().zip(&picked) {
                assert_eq!(a.to_bits(), b.to_bits(), "{} {dtype:?}", kernels.name);
            }
        }
    }
}

#[test]
fn rows_decode_and_add() {
    for dtype in types() {
        for blocks in [1, 2, 5] {
            let n = if dtype.block_len() == 1 { 13 * blocks } else { blocks * dtype.block_len() };
            let mut random = Random(9);
            let row = random_row(dtype, n, &mut random);
            let start: Vec<f32> = (0..n).map(|_| random.float()).collect();
            let mut want = vec![0.0; n];
            decode(dtype, &row, &mut want);
            for kernels in available() {
                let mut decoded = vec![f32::NAN; n];
                let (mut added, mut added_decoded) = (start.clone(), start.clone());
                // SAFETY: tables of this processor.
                unsafe {
                    (kernels.decode)(dtype, &row, &mut decoded);
                    (kernels.add_rows)(dtype, &[(&row, 0.7)], &[], &mut added);
                    (kernels.axpy_f32)(0.7, &decoded, &mut added_decoded);
                }
                for i in 0..n {
                    let close = |a: f32, b: f32| (a - b).abs() <= 1e-5 * (1.0 + b.abs());
                    assert!(close(decoded[i], want[i]), "{} {dtype:?}", kernels.name);
                    assert!(close(added[i], start[i] + 0.7 * want[i]), "{} {dtype:?}", kernels.name);
                    assert_eq!(added[i].to_bits(), added_decoded[i].to_bits(), "{} {dtype:?}", kernels.name);
                }
            }
        }
    }
}

#[test]
fn norms_and_activations_are_right() {
    let mut random = Random(3);
    let x: Vec<f32> = (0..77).map(|_| 4.0 * random.float()).collect();
    let weight: Vec<f32> = (0..77).map(|_| 1.0 + random.float()).collect();
    let n = x.len() as f64;
    let wide = |f: &dyn Fn(f64) -> f64| x.iter().map(|v| f(*v as f64)).collect::<Vec<_>>();
    let mean = x.iter().map(|v| *v as f64).sum::<f64>() / n;
    let squares = wide(&|v| v * v).iter().sum::<f64>() / n;
    let variance = wide(&|v| (v - mean).powi(2)).iter().sum::<f64>() / n;
    let exps = wide(&|v| (v * 0.5).exp());
    let total: f64 = exps.iter().sum();
    let near = |got: &[f32], want: &[f64]| {
        for (g, w) in got.iter().zip(want) {
            assert!((*g as f64 - w).abs() < 2e-6 * (1.0 + w.abs()), "{g} for {w}");
        }
    };
    for kernels in available() {
        let mut out = vec![0.0; x.len()];
        // SAFETY: tables of this processor, here and below.
        unsafe { (kernels.rms_norm)(&x, &weight, 1e-5, &mut out) };
        let want: Vec<f64> =
            x.iter().zip(&weight).map(|(x, w)| *x as f64 / (squares + 1e-5).sqrt() * *w as f64).collect();
        near(&out, &want);
        // SAFETY: as above.
        unsafe { (kernels.layer_norm)(&x, &weight, Some(&weight), 1e-5, &mut out) };
        let scale = (variance + 1e-5).sqrt();
        let want: Vec<f64> =
            x.iter().zip(&weight).map(|(x, w)| (*x as f64 - mean) / scale * *w as f64 + *w as f64).collect();
        near(&out, &want);
        let mut soft = x.clone();
        // SAFETY: as above.
        let (largest, sum) = unsafe { (kernels.exponentials)(&mut soft, 0.5) };
        assert!(x.iter().all(|v| *v <= largest) && x.contains(&largest));
        soft.iter_mut().for_each(|v| *v /= sum);
        near(&soft, &exps.iter().map(|e| e / total).collect::<Vec<_>>());
        let mut silu = x.clone();
        // SAFETY: as above.
        unsafe { (kernels.silu)(&mut silu) };
        near(&silu, &wide(&|v| v / (1.0 + (-v).exp())));
        let mut gelu = x.clone();
        // SAFETY: as above.
        unsafe { (kernels.gelu)(&mut gelu) };
        near(&gelu, &wide(&|v| 0.5 * v * (1.0 + (0.797_884_560_8 * (v + 0.044_715 * v * v * v)).tanh())));
    }
}

/// Every set's attention against the scalar one, from float32 and, where there is a form for it, from half precision.
#[test]
fn attention_is_right() {
    let mut random = Random(11);
    let scalar = available()[0].attention;
    for (dim, n) in [(64, 1), (80, 3), (128, 4), (24, 5), (96, 9)] {
        let halves: Vec<u16> = (0..dim * KV_BLOCK).map(|_| half(random.float())).collect();
        let half_bytes: Vec<u8> = halves.iter().flat_map(|h| h.to_le_bytes()).collect();
        let bytes: Vec<u8> = halves.iter().flat_map(|h| f16_to_f32(*h).to_le_bytes()).collect();
        let queries: Vec<f32> = (0..n * dim).map(|_| random.float()).collect();
        let weights: Vec<f32> = (0..n * 2 * KV_BLOCK).map(|_| random.float()).collect();
        let run = |attention: AttentionKernels, bytes: &[u8]| {
            let (mut scores, mut mixed) = (vec![0.0f32; n * 2 * KV_BLOCK], vec![0.25f32; n * dim]);
            // SAFETY: tables of this processor.
            unsafe {
                (attention.scores)(bytes, &[], &queries, dim, &mut scores, 2 * KV_BLOCK);
                (attention.mix)(bytes, &[], &weights, 2 * KV_BLOCK, dim, &mut mixed);
            }
            (scores, mixed)
        };
        let want = run(scalar, &bytes);
        for kernels in available() {
            let mut got = vec![run(kernels.attention, &bytes)];
            got.extend(kernels.half_attention.map(|attention| run(attention, &half_bytes)));
            for (scores, mixed) in got {
                for (got, want) in scores.iter().zip(&want.0).chain(mixed.iter().zip(&want.1)) {
                    assert!((got - want).abs() < 1e-4, "{} {dim} {n}: {got} for {want}", kernels.name);
                }
            }
        }
    }
}

/// A half precision number of the sign of `v` and of magnitude 1/2 to 1.
fn half(v: f32) -> u16 {
    ((v < 0.0) as u16) << 15 | 0x3800 | (v.abs() * 1024.0).min(1023.0) as u16
}

#[test]
fn extreme_values_stay_what_they_are() {
    for kernels in available() {
        let mut x = vec![f32::NEG_INFINITY, -10.0, 80.0, -1e30];
        // SAFETY: a table of this processor.
        assert_eq!(unsafe { (kernels.exponentials)(&mut x, 1.0) }, (80.0, 1.0));
        assert_eq!(x, [0.0, 0.0, 1.0, 0.0]);
        for broken in [f32::NAN, f32::INFINITY] {
            let mut case = Case::new(DType::Q8_0, 64, 1, 1, 0);
            case.x[40] = broken;
            assert!(case.run(kernels)[0].is_nan(), "{} hides {broken}", kernels.name);
        }
        let mut x = vec![f32::NAN, 1.0];
        // SAFETY: as above.
        unsafe { (kernels.silu)(&mut x) };
        assert!(x[0].is_nan() && x[1].is_finite());
    }
}
