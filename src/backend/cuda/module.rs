//! The kernels by name, each with a launcher that knows its parameters and the shape of its grid.

use std::ffi::c_void;
use std::sync::Arc;

use crate::Result;

use super::form::Form;
use super::launch::{Function, Module, Stream};
use super::workspace::{attention_parts, sum_parts};

const ROWS: &str = include_str!("kernels/rows.ptx");
const MATMUL: &str = include_str!("kernels/matmul.ptx");
const FFN: &str = include_str!("kernels/ffn.ptx");
const ATTENTION: &str = include_str!("kernels/attention.ptx");
const HANDOVER: &str = include_str!("kernels/handover.ptx");

const BLOCK: usize = 256;
const WARP: usize = 32;
const WARPS: usize = BLOCK / WARP;
/// Threads of a block of the `down` kernels.
const DOWN_BLOCK: usize = 64;
/// Tokens and rows of a tile, as the kernels have them, and tokens from which tiles are worth while.
const TILE_TOKENS: usize = 32;
const TILE_ROWS: usize = 64;
const MANY: usize = 16;
/// Tokens and columns of a tile of `down`.
const DOWN_TOKENS: usize = 32;
const DOWN_COLUMNS: usize = 128;
/// Blocks that copy to and from the host.
const COPY_BLOCKS: usize = 64;
/// Heads that stand in one block of `attend`.
const HEADS_A_BLOCK: usize = 4;
/// The longest head that `attend` has registers for.
pub const MAX_HEAD_DIM: usize = 256;

/// `struct Rows` of the kernels: addresses of rows of activations, as floats and as integers.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Rows {
    pub values: u64,
    pub high: u64,
    pub middle: u64,
    pub low: u64,
    pub d: u64,
    pub sum: u64,
}

/// `struct Neurons` of the kernels. Addresses may be 0 where the kernels say so.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct DeviceNeurons {
    pub list: u64,
    pub n_listed: u64,
    pub ids: u64,
    pub scores: u64,
    pub n: i32,
    pub n_ff: i32,
    pub threshold: f32,
    pub is_sparse: i32,
    pub activation: i32,
    pub relu_up: i32,
}

/// `struct Cache` of the kernels: where a batch's tokens stand.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct DeviceCache {
    pub blocks: u64,
    pub first: u64,
    pub positions: u64,
    pub n_kv_heads: i32,
    pub head_dim: i32,
    /// 0: F32, 1: F16, 2: Q8_0.
    pub kind: i32,
    pub n_full: i32,
}

/// What a matrix is to the kernels.
#[derive(Clone, Copy)]
pub struct Weights {
    pub form: Form,
    pub address: u64,
    pub bias: u64,
    pub n_rows: usize,
    pub n_cols: usize,
}

struct ByForm {
    // Each for one token, for few, and for many.
    matmul: [Function; 3],
    ffn: [Function; 3],
    down: [Function; 3],
}

pub struct Kernels {
    stream: Arc<Stream>,
    quantize: Function,
    normalize: Function,
    rope: Function,
    add: Function,
    relu: Function,
    take_rows: Function,
    count_calls: Function,
    select: Function,
    combine: Function,
    store: Function,
    attend: Function,
    attended: Function,
    hand_over: Function,
    wait: Function,
    take_over: Function,
    by_form: [Option<ByForm>; Form::ALL.len()],
    _modules: Vec<Module>,
}

/// PTX with no entries but `names`: the driver compiles what it is given, and a model has few of the forms.
fn only(ptx: &str, names: &[String]) -> String {
    let mut parts = ptx.split(".visible .entry ");
    let mut out = parts.next().unwrap_or_default().to_owned();
    for entry in parts.filter(|entry| names.iter().any(|name| entry.starts_with(&format!("{name}(")))) {
        out.push_str(".visible .entry ");
        out.push_str(entry);
    }
    out
}

macro_rules! launch {
    ($kernels:expr, $function:expr, $grid:expr, $block:expr, $shared:expr, $($arg:expr),* $(,)?) => {{
        let mut args = [$(&$arg as *const _ as *mut c_void),*];
        // SAFETY: the arguments are the kernel's parameters in order and of its types, as its source beside this file
        // says; buffers are as long as the workspace makes them for the batch.
        unsafe { $kernels.stream.launch($function, $grid, $block, $shared, &mut args) }
    }};
}

impl Kernels {
    /// Loads what weights of `forms` need.
    pub fn load(stream: &Arc<Stream>, forms: &[Form]) -> Result<Self> {
        let mut modules = Vec::new();
        let mut load = |ptx: &str, names: Vec<String>| -> Result<std::vec::IntoIter<Function>> {
            let (module, functions) = stream.load(&only(ptx, &names), &names)?;
            modules.push(module);
            Ok(functions.into_iter())
        };
        let named = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<Vec<_>>();
        let mut rows = load(ROWS, named(&["quantize", "normalize", "rope", "add", "relu", "take_rows"]))?;
        let mut ffn = load(FFN, named(&["count_calls", "select", "combine"]))?;
        let mut attention = load(ATTENTION, named(&["store", "attend", "attended"]))?;
        let mut handover = load(HANDOVER, named(&["hand_over", "await", "take_over"]))?;
        let mut by_form = [const { None }; Form::ALL.len()];
        for form in forms {
            let name = form.name();
            let mut three = |ptx: &str, kinds: [&str; 3]| -> Result<[Function; 3]> {
                let mut functions = load(ptx, kinds.map(|kind| format!("{kind}_{name}")).to_vec())?;
                Ok([0, 1, 2].map(|_| next(&mut functions)))
            };
            by_form[*form as usize] = Some(ByForm {
                matmul: three(MATMUL, ["matmul_1", "matmul_4", "matmul_many"])?,
                ffn: three(FFN, ["ffn_1", "ffn_4", "ffn_many"])?,
                down: three(FFN, ["down_1", "down_2", "down_many"])?,
            });
        }
        Ok(Self {
            stream: stream.clone(),
            quantize: next(&mut rows),
            normalize: next(&mut rows),
            rope: next(&mut rows),
            add: next(&mut rows),
            relu: next(&mut rows),
            take_rows: next(&mut rows),
            count_calls: next(&mut ffn),
            select: next(&mut ffn),
            combine: next(&mut ffn),
            store: next(&mut attention),
            attend: next(&mut attention),
            attended: next(&mut attention),
            hand_over: next(&mut handover),
            wait: next(&mut handover),
            take_over: next(&mut handover),
            by_form,
            _modules: modules,
        })
    }

    fn of(&self, form: Form) -> &ByForm {
        self.by_form[form as usize].as_ref().expect("the forms of all weights were loaded")
    }

    /// Integers of `n_tokens` rows of `n_cols`, a multiple of 32.
    pub fn quantize(&self, rows: Rows, n_cols: usize, n_tokens: usize) -> Result<()> {
        let n = n_cols / 32 * n_tokens;
        let Rows { values, high, middle, low, d, sum } = rows;
        launch!(
            self,
            self.quantize,
            (n.div_ceil(WARPS), 1, 1),
            BLOCK,
            0,
            values,
            high,
            middle,
            low,
            d,
            sum,
            n as i32
        )
    }

    /// Normalises `n` runs of `width` values; layer norm where `is_layer`.
    pub fn normalize(
        &self,
        x: u64,
        weight: u64,
        bias: u64,
        out: u64,
        width: usize,
        n: usize,
        eps: f32,
        is_layer: bool,
    ) -> Result<()> {
        let (grid, width, is_layer) = ((n, 1, 1), width as i32, is_layer as i32);
        launch!(self, self.normalize, grid, BLOCK, 0, x, weight, bias, out, width, eps, is_layer)
    }

    pub fn rope(
        &self,
        x: u64,
        turns: u64,
        n_tokens: usize,
        n_heads: usize,
        head_dim: usize,
        n_pairs: usize,
        is_halves: bool,
    ) -> Result<()> {
        let n = n_tokens * n_heads * n_pairs;
        let (n_tokens, n_heads, head_dim) = (n_tokens as i32, n_heads as i32, head_dim as i32);
        let (n_pairs, is_halves) = (n_pairs as i32, is_halves as i32);
        let grid = (n.div_ceil(BLOCK), 1, 1);
        launch!(self, self.rope, grid, BLOCK, 0, x, turns, n_tokens, n_heads, head_dim, n_pairs, is_halves)
    }

    /// `x += y`, `n` values.
    pub fn add(&self, x: u64, y: u64, n: usize) -> Result<()> {
        let n = n as u64;
        launch!(self, self.add, ((n as usize).div_ceil(BLOCK), 1, 1), BLOCK, 0, x, y, n)
    }

    /// `x = max(x, 0)`, `n` values.
    pub fn relu(&self, x: u64, n: usize) -> Result<()> {
        let (grid, n) = ((n.div_ceil(BLOCK), 1, 1), n as u64);
        launch!(self, self.relu, grid, BLOCK, 0, x, n)
    }

    pub fn take_rows(&self, x: u64, rows: u64, out: u64, width: usize, n: usize) -> Result<()> {
        let width = width as i32;
        launch!(self, self.take_rows, (n, 1, 1), BLOCK, 0, x, rows, out, width)
    }

    /// `out = weights · x + bias`, (n_tokens, n_rows).
    pub fn matmul(&self, w: Weights, x: Rows, out: u64, n_tokens: usize) -> Result<()> {
        let (kind, grid) = products(w.n_rows, n_tokens);
        let function = self.of(w.form).matmul[kind];
        let (n_rows, n_cols, n_tokens) = (w.n_rows as i32, w.n_cols as i32, n_tokens as i32);
        launch!(self, function, grid, BLOCK, 0, w.address, w.bias, x, out, n_rows, n_cols, n_tokens)
    }

    /// How many tokens call on each of `n_ff` neurons, into `calls`.
    pub fn count_calls(
        &self,
        scores: u64,
        n_tokens: usize,
        n_ff: usize,
        threshold: f32,
        calls: u64,
    ) -> Result<()> {
        let (grid, n_tokens, n_ff) = ((n_ff.div_ceil(BLOCK), 1, 1), n_tokens as i32, n_ff as i32);
        launch!(self, self.count_calls, grid, BLOCK, 0, scores, n_tokens, n_ff, threshold, calls)
    }

    /// Lists the neurons called on, by `calls` where that isn't 0: this device's `hot` and the host's `cold`, which may be none.
    pub fn select(
        &self,
        scores: u64,
        n_tokens: usize,
        n_ff: usize,
        threshold: f32,
        calls: u64,
        hot: (u64, usize),
        list: (u64, u64),
        cold: (u64, usize),
        cold_list: (u64, u64, u64),
        selected: u64,
    ) -> Result<()> {
        let (n_tokens, n_ff) = (n_tokens as i32, n_ff as i32);
        let (n_hot, n_cold) = (hot.1 as i32, cold.1 as i32);
        let grid = (if n_cold > 0 { 2 } else { 1 }, 1, 1);
        launch!(
            self,
            self.select,
            grid,
            BLOCK,
            0,
            scores,
            n_tokens,
            n_ff,
            threshold,
            calls,
            hot.0,
            n_hot,
            list.0,
            list.1,
            cold.0,
            n_cold,
            cold_list.0,
            cold_list.1,
            cold_list.2,
            selected,
        )
    }

    /// Gate, up and activation of the listed neurons into `h`, (n_tokens, of.n).
    pub fn ffn(
        &self,
        gate: Option<Weights>,
        up: Weights,
        x: Rows,
        of: DeviceNeurons,
        h: u64,
        n_tokens: usize,
        active: u64,
        fired: u64,
    ) -> Result<()> {
        let (kind, grid) = products(of.n as usize, n_tokens);
        let function = self.of(up.form).ffn[kind];
        let (gate, gate_bias) = gate.map_or((0, 0), |g| (g.address, g.bias));
        let (n_cols, n_tokens) = (up.n_cols as i32, n_tokens as i32);
        launch!(
            self, function, grid, BLOCK, 0, gate, gate_bias, up.address, up.bias, x, of, h, n_cols, n_tokens,
            active, fired,
        )
    }

    /// Sums of the listed rows of `down`, each times its h, in parts; returns how many.
    pub fn down(&self, w: Weights, of: DeviceNeurons, h: u64, parts: u64, n_tokens: usize) -> Result<usize> {
        let n_parts = sum_parts(n_tokens);
        let blocks = w.n_cols.div_ceil(w.form.columns_a_thread()).div_ceil(DOWN_BLOCK);
        let (kind, grid, block) = match (n_tokens, n_parts) {
            (1, _) => (0, (blocks, n_parts, 1), DOWN_BLOCK),
            (_, 1) => (2, (n_tokens.div_ceil(DOWN_TOKENS), w.n_cols.div_ceil(DOWN_COLUMNS), 1), BLOCK),
            _ => (1, (blocks, n_parts, n_tokens.div_ceil(2)), DOWN_BLOCK),
        };
        let function = self.of(w.form).down[kind];
        let (n_cols, n_tokens) = (w.n_cols as i32, n_tokens as i32);
        launch!(self, function, grid, block, 0, w.address, of, h, parts, n_cols, n_tokens)?;
        Ok(n_parts)
    }

    /// `out = bias + parts in order + cold`; bias and cold where they aren't 0.
    pub fn combine(
        &self,
        parts: (u64, usize),
        bias: u64,
        cold: u64,
        out: u64,
        n_cols: usize,
        n_tokens: usize,
    ) -> Result<()> {
        let grid = ((n_cols * n_tokens).div_ceil(BLOCK), 1, 1);
        let (n_parts, n_cols, n_tokens) = (parts.1 as i32, n_cols as i32, n_tokens as i32);
        launch!(self, self.combine, grid, BLOCK, 0, parts.0, n_parts, bias, cold, out, n_cols, n_tokens)
    }

    pub fn store(&self, k: u64, v: u64, cache: DeviceCache, layer: usize, n_tokens: usize) -> Result<()> {
        let layer = layer as i32;
        launch!(self, self.store, (n_tokens, 1, 1), BLOCK, 0, k, v, cache, layer)
    }

    /// Attention of every token's heads; `parts` is room to work in.
    pub fn attend(
        &self,
        q: u64,
        cache: DeviceCache,
        layer: usize,
        n_heads: usize,
        n_tokens: usize,
        parts: u64,
        out: u64,
    ) -> Result<()> {
        let dim = cache.head_dim as usize;
        let heads = (1..=HEADS_A_BLOCK).rev().find(|n| n_heads.is_multiple_of(*n)).unwrap_or(1);
        let n_parts = attention_parts(n_tokens);
        let n_shared = 4 * heads * (dim + WARP);
        let grid = (n_heads / heads, n_tokens, n_parts);
        let (scale, layer) = (1.0 / (dim as f32).sqrt(), layer as i32);
        let n_rows = (n_tokens * n_heads) as i32;
        let n_heads = n_heads as i32;
        launch!(self, self.attend, grid, heads * WARP, n_shared, q, cache, layer, n_heads, scale, parts)?;
        let grid = ((n_rows as usize).div_ceil(WARPS), 1, 1);
        let (n_parts, dim) = (n_parts as i32, cache.head_dim);
        launch!(self, self.attended, grid, BLOCK, 0, parts, n_parts, out, n_rows, dim)
    }

    /// Copies `n` values to the host, and `more` where it isn't 0, and raises `flag` to hand-over `number` of the step.
    pub fn hand_over(
        &self,
        from: u64,
        to: u64,
        more: (u64, u64),
        n: usize,
        ticket: u64,
        flag: u64,
        base: u64,
        number: u32,
    ) -> Result<()> {
        let (grid, n) = ((n.div_ceil(BLOCK).min(COPY_BLOCKS), 1, 1), n as u64);
        launch!(self, self.hand_over, grid, BLOCK, 0, from, to, more.0, more.1, n, ticket, flag, base, number)
    }

    /// Waits for the host to raise `flag` to hand-over `number`, `patience` nanoseconds at most.
    pub fn wait(
        &self,
        flag: u64,
        base: u64,
        number: u32,
        given_up: u64,
        failed: u64,
        patience: u64,
    ) -> Result<()> {
        launch!(self, self.wait, (1, 1, 1), 1, 0, flag, base, number, given_up, failed, patience)
    }

    /// Copies `n` values from the host.
    pub fn take_over(&self, from: u64, to: u64, n: usize) -> Result<()> {
        let (grid, n) = ((n.div_ceil(BLOCK).min(COPY_BLOCKS), 1, 1), n as u64);
        launch!(self, self.take_over, grid, BLOCK, 0, from, to, n)
    }
}

/// Which of three kernels multiplies so many rows with so many tokens, and its grid.
fn products(n_rows: usize, n_tokens: usize) -> (usize, (usize, usize, usize)) {
    match n_tokens {
        1 => (0, (n_rows.div_ceil(WARPS), 1, 1)),
        n if n < MANY => (1, (n_rows.div_ceil(WARPS), n.div_ceil(4), 1)),
        n => (2, (n.div_ceil(TILE_TOKENS), n_rows.div_ceil(TILE_ROWS), 1)),
    }
}

fn next(functions: &mut std::vec::IntoIter<Function>) -> Function {
    functions.next().expect("as many functions as names")
}
