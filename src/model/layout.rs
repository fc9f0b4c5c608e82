//! How weights lie in memory once a model is loaded: as in the file, turned, or with rows side by side.

use crate::backend::Linear;
use crate::backend::cpu::kernels::Kernels;
use crate::backend::cpu::pool::{Parts, Pool, Team};
use crate::quant::{DType, Layout, Matrix, Pages, encode_q8_0};
use crate::sparse::Sparsity;
use crate::sparse::ffn::{Down, Ffn};
use crate::{Error, Result};

use super::devices::Away;
use super::forward;
use super::{Layer, Model, Options, Progress};

/// Of the memory that is free, rows side by side may take one part in so many when nobody says.
const SHARE_OF_FREE: usize = 2;
/// Panels or neurons that a thread takes at a time.
const AT_A_TIME: usize = 8;

impl Model {
    /// Turns down projections for the sparse modes and for layers that host and devices share, and puts the rows of
    /// matrices that are read in full side by side, where the kernels have use for it. `pool` does that. What is `away`, of
    /// each layer and (`is_head_away`) the head, stays as it is. `progress` is told of layers done and all, and says whether to go on.
    pub fn lay_out(
        &mut self,
        options: &Options,
        away: &[Away],
        is_head_away: bool,
        kernels: &Kernels,
        pool: &Pool,
        progress: &mut Progress,
    ) -> Result<()> {
        let wanted = |m: &Matrix| m.layout() == Layout::Rows && kernels.panels[m.dtype() as usize].is_some();
        let mut n_bytes = 0;
        self.each_whole(away, is_head_away, &mut |linear| {
            if wanted(&linear.weight) {
                n_bytes += panel_bytes(&linear.weight);
            }
            Ok(())
        })?;
        let has_panels = n_bytes > 0;
        for (layer, away) in self.layers.iter_mut().zip(away) {
            n_bytes +=
                layer.by_need(self.sparsity, away).map(|linear| linear.weight.bytes().len()).sum::<usize>();
        }
        let fits = available_memory().is_some_and(|free| n_bytes <= free / SHARE_OF_FREE);
        self.is_interleaved = has_panels && options.interleave.unwrap_or(fits);
        let (sparsity, is_interleaved) = (self.sparsity, self.is_interleaved);
        let n_layers = self.layers.len();
        let mut converted = 0;
        let mut interleave = |linear: &mut Linear| -> Result<()> {
            if is_interleaved && wanted(&linear.weight) {
                converted += panel_bytes(&linear.weight);
                linear.weight = pool.enter(|team| side_by_side(&linear.weight, kernels, team))?;
            }
            Ok(())
        };
        if !is_head_away {
            interleave(&mut self.output)?;
        }
        let mut turned = 0;
        for (i, (layer, away)) in self.layers.iter_mut().zip(away).enumerate() {
            let is_shared = away.n_hot > 0 && away.n_hot < layer.ffn.n_neurons();
            if let (true, Down::Outputs(down)) = (sparsity != Sparsity::Dense || is_shared, &layer.ffn.down) {
                let neurons = pool.enter(|team| turn(down, team))?;
                down.weight.release();
                turned += neurons.weight.bytes().len();
                layer.ffn.down = Down::Neurons(neurons);
            }
            layer.each_whole(sparsity, away, &mut interleave)?;
            if is_interleaved {
                for linear in layer.by_need(sparsity, away) {
                    turned += linear.weight.bytes().len();
                    linear.weight = pool.enter(|team| copied(&linear.weight, team))?;
                }
            }
            if progress(i + 1, n_layers).is_break() {
                return Err(Error::Interrupted);
            }
        }
        self.converted_bytes = converted + turned;
        Ok(())
    }

    /// Calls `f` with every matrix that is read in full for each token.
    fn each_whole(
        &mut self,
        away: &[Away],
        is_head_away: bool,
        f: &mut dyn FnMut(&mut Linear) -> Result<()>,
    ) -> Result<()> {
        if !is_head_away {
            f(&mut self.output)?;
        }
        let mut layers = self.layers.iter_mut().zip(away);
        layers.try_for_each(|(layer, away)| layer.each_whole(self.sparsity, away, f))
    }
}

impl Layer {
    /// The matrices of which a token reads some rows here, still where the file has them.
    fn by_need(&mut self, mode: Sparsity, away: &Away) -> impl Iterator<Item = &mut Linear> {
        let is_here = away.n_hot < self.ffn.n_neurons();
        let Ffn { gate, up, down, .. } = &mut self.ffn;
        let is_whole = mode == Sparsity::Exact && gate.is_none();
        let up = (mode != Sparsity::Dense && !is_whole).then_some(up);
        let gate = gate.as_mut().filter(|_| mode == Sparsity::Predicted);
        let down = match down {
            Down::Neurons(down) if mode != Sparsity::Dense => Some(down),
            _ => None,
        };
        gate.into_iter().chain(up).chain(down).filter(move |l| is_here && l.weight.is_mapped())
    }

    fn each_whole(
        &mut self,
        mode: Sparsity,
        away: &Away,
        f: &mut dyn FnMut(&mut Linear) -> Result<()>,
    ) -> Result<()> {
        let forward::Block { qkv, attn_output, .. } = &mut self.block;
        if !away.attention {
            [&mut qkv.q, &mut qkv.k, &mut qkv.v, attn_output].into_iter().try_for_each(&mut *f)?;
        }
        let ffn = &mut self.ffn;
        match mode {
            Sparsity::Predicted if away.predictor => {}
            // A host that has some of the neurons reads them by number.
            Sparsity::Exact | Sparsity::Dense if away.n_hot > 0 => {}
            Sparsity::Predicted => {
                if let Some(predictor) = &mut ffn.predictor {
                    f(&mut predictor.fc1)?;
                    f(&mut predictor.fc2)?;
                }
            }
            Sparsity::Exact => f(ffn.gate.as_mut().unwrap_or(&mut ffn.up))?,
            Sparsity::Dense => {
                ffn.gate.as_mut().map_or(Ok(()), &mut *f)?;
                f(&mut ffn.up)?;
                if let Down::Outputs(down) = &mut ffn.down {
                    f(down)?;
                }
            }
        }
        Ok(())
    }
}

/// Bytes of memory that can be had without swapping, where Linux says: the machine's, or what the container leaves.
fn available_memory() -> Option<usize> {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<usize>().ok();
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let machine = line.split_whitespace().next()?.parse::<usize>().ok()? * 1024;
    let group = |most: &str, used: &str| Some(number(most)?.saturating_sub(number(used)?));
    let groups = [
        group("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        group("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ];
    Some(groups.into_iter().flatten().fold(machine, usize::min))
}

fn panel_bytes(m: &Matrix) -> usize {
    m.panel_bytes().expect("a type that interleaves") * m.n_panels()
}

/// The weights with rows side by side; the file's pages are given back.
fn side_by_side(weight: &Matrix, kernels: &Kernels, team: &Team) -> Result<Matrix> {
    let size = weight.panel_bytes().expect("a type that interleaves");
    let mut pages = pages(panel_bytes(weight))?;
    let parts = Parts::new(pages.as_mut_slice());
    let n = weight.n_panels();
    team.run(n.div_ceil(AT_A_TIME), &|c| {
        for i in c * AT_A_TIME..((c + 1) * AT_A_TIME).min(n) {
            // SAFETY: each panel is written once; the table is this processor's.
            unsafe {
                (kernels.interleave)(weight.dtype(), &weight.panel_rows(i), parts.part(i * size, size))
            };
        }
    });
    weight.release();
    Ok(weight.with_panels(pages.freeze().map_err(out_of_memory)?))
}

/// The weights as they are, in large pages; the file's are given back.
fn copied(weight: &Matrix, team: &Team) -> Result<Matrix> {
    let mut pages = pages(weight.bytes().len())?;
    let parts = Parts::new(pages.as_mut_slice());
    let size = AT_A_TIME * weight.row_bytes();
    team.run(weight.bytes().len().div_ceil(size), &|c| {
        let bytes = &weight.bytes()[c * size..];
        let bytes = &bytes[..size.min(bytes.len())];
        // SAFETY: each part is written once.
        unsafe { parts.part(c * size, bytes.len()) }.copy_from_slice(bytes);
    });
    weight.release();
    Ok(Matrix::new(weight.dtype(), weight.n_rows(), weight.n_cols(), pages.freeze().map_err(out_of_memory)?))
}

fn pages(n_bytes: usize) -> Result<Pages> {
    Pages::zeroed(n_bytes).map_err(out_of_memory)
}

fn out_of_memory(e: std::io::Error) -> Error {
    Error::device("cpu", format_args!("no memory for the weights: {e}"))
}

/// The type of a down projection's rows, `n_embd` long, once a neuron is one. Float types stay what they are; quantised ones,
/// whose blocks run along the other side, become Q8_0, whose error is far below theirs.
pub fn turned_type(dtype: DType, n_embd: usize) -> DType {
    match dtype {
        float @ (DType::F32 | DType::F16 | DType::BF16) => float,
        _ if n_embd.is_multiple_of(DType::Q8_0.block_len()) => DType::Q8_0,
        _ => DType::F32,
    }
}

/// A down projection that has an output a row as one that has a neuron a row.
fn turn(down: &Linear, team: &Team) -> Result<Linear> {
    let w = &down.weight;
    let (n_embd, n_ff) = (w.n_rows(), w.n_cols());
    let dtype = turned_type(w.dtype(), n_embd);
    let row_bytes = dtype.row_bytes(n_embd);
    let mut pages = pages(n_ff * row_bytes)?;
    let parts = Parts::new(pages.as_mut_slice());
    // A band of neurons at a time: of each row only what holds them is read.
    let band = if w.dtype().is_quantized() { w.dtype().block_len() } else { AT_A_TIME };
    team.run(n_ff.div_ceil(band), &|c| {
        let neurons = c * band..((c + 1) * band).min(n_ff);
        // SAFETY: each band is written once.
        let out = unsafe { parts.part(neurons.start * row_bytes, neurons.len() * row_bytes) };
        let bytes = w.dtype().row_bytes(neurons.start)..w.dtype().row_bytes(neurons.end);
        let strips = (0..n_embd).map(|i| &w.row(i)[bytes.clone()]);
        if w.dtype().is_quantized() {
            turn_blocks(w.dtype(), dtype, strips, out)
        } else {
            turn_values(dtype, strips, out)
        }
    });
    let weight = Matrix::new(dtype, n_ff, n_embd, pages.freeze().map_err(out_of_memory)?);
    Ok(Linear { weight, bias: down.bias.clone() })
}

/// Turns strips of float values: value j of strip i becomes value i of row j.
fn turn_values<'a>(dtype: DType, strips: impl ExactSizeIterator<Item = &'a [u8]>, out: &mut [u8]) {
    let (size, n) = (dtype.block_bytes(), strips.len());
    for (i, strip) in strips.enumerate() {
        for (j, value) in strip.chunks_exact(size).enumerate() {
            out[(j * n + i) * size..][..size].copy_from_slice(value);
        }
    }
}

/// Turns strips of one block each.
fn turn_blocks<'a>(from: DType, to: DType, strips: impl ExactSizeIterator<Item = &'a [u8]>, out: &mut [u8]) {
    let n = strips.len();
    let mut decoded = vec![0.0f32; from.block_len()];
    let mut values = vec![0.0f32; from.block_len() * n]; // (neuron, n_embd)
    for (i, strip) in strips.enumerate() {
        crate::quant::decode(from, strip, &mut decoded);
        for (j, v) in decoded.iter().enumerate() {
            values[j * n + i] = *v;
        }
    }
    for (row, values) in out.chunks_exact_mut(to.row_bytes(n)).zip(values.chunks_exact(n)) {
        match to {
            DType::Q8_0 => encode_q8_0(values, row),
            _ => row.as_chunks_mut::<4>().0.iter_mut().zip(values).for_each(|(b, v)| *b = v.to_le_bytes()),
        }
    }
}
