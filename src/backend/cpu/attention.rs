//! Attention over the cache's blocks, for a few tokens of a sequence and the query heads of one key head at a time.
//!
//! In a block, a head's keys lie by dimension (dim, token), its values by token (token, dim): in both, what lies side by
//! side is what a register holds side by side, so scores need no sums across lanes. Q8_0 keys have, for every 32
//! dimensions, the tokens' scales before their bytes.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::backend::{HostBlock, KV_BLOCK, KvShape};
use crate::quant::{DType, encode_q8_0};

use super::kernels::{AttentionKernels, Kernels};
use super::pool::{CHUNKS_A_THREAD, Parts, Team};
use super::portable::exp;

/// The most tokens in a tile.
const TILE_TOKENS: usize = 16;

/// Writes one head's key of the token that is `slot` in its block, where `keys` is the head's part of the block.
pub fn store_key(dtype: DType, x: &[f32], slot: usize, keys: &mut [u8]) {
    match dtype {
        DType::F32 => {
            let column = keys.as_chunks_mut::<4>().0.iter_mut().skip(slot).step_by(KV_BLOCK);
            column.zip(x).for_each(|(o, v)| *o = v.to_le_bytes());
        }
        DType::Q8_0 => {
            let mut block = [0u8; 34];
            for (x, keys) in x.chunks_exact(32).zip(keys.chunks_exact_mut(34 * KV_BLOCK)) {
                encode_q8_0(x, &mut block);
                let (scales, bytes) = keys.split_at_mut(2 * KV_BLOCK);
                scales[2 * slot..][..2].copy_from_slice(&block[..2]);
                bytes[slot..].iter_mut().step_by(KV_BLOCK).zip(&block[2..]).for_each(|(o, v)| *o = *v);
            }
        }
        _ => {
            let column = keys.as_chunks_mut::<2>().0.iter_mut().skip(slot).step_by(KV_BLOCK);
            column.zip(x).for_each(|(o, v)| *o = f16::from_f32(*v).to_le_bytes());
        }
    }
}

/// Writes one head's value of the token that is `slot` in its block.
pub fn store_value(dtype: DType, x: &[f32], slot: usize, values: &mut [u8]) {
    let row_bytes = dtype.row_bytes(x.len());
    let out = &mut values[slot * row_bytes..][..row_bytes];
    match dtype {
        DType::F32 => out.as_chunks_mut::<4>().0.iter_mut().zip(x).for_each(|(o, v)| *o = v.to_le_bytes()),
        DType::Q8_0 => encode_q8_0(x, out),
        _ => {
            let mut halves = [f16::ZERO; 64];
            for (x, out) in x.chunks(64).zip(out.chunks_mut(128)) {
                let halves = &mut halves[..x.len()];
                halves.convert_from_f32_slice(x);
                for (h, out) in halves.iter().zip(out.as_chunks_mut::<2>().0) {
                    *out = h.to_le_bytes();
                }
            }
        }
    }
}

/// Blocks whose keys a segment has. A query's softmax and sum are made segment by segment and put together in order, so
/// that threads can share a long text, and how many there are changes no bit (Dao et al., "Flash-Decoding for long-context
/// inference", 2023).
const SEGMENT_BLOCKS: usize = 8;
const SEGMENT: usize = SEGMENT_BLOCKS * KV_BLOCK;
/// The most chunks that attention is cut into.
const MAX_CHUNKS: usize = 1 << 16;

/// Where a token of a batch stands: its sequence's cached blocks, and its position in them.
pub struct Place<'a> {
    pub blocks: &'a [HostBlock<'a>],
    pub position: usize,
}

/// Segments that a query at `position` sees.
fn n_segments(position: usize) -> usize {
    position / SEGMENT + 1
}

/// How many tokens from place `start` on can share a tile: those that follow one another in one sequence.
fn tile_len(places: &[Place], start: usize) -> usize {
    let first = &places[start];
    let follows =
        |(i, p): (usize, &Place)| std::ptr::eq(p.blocks, first.blocks) && p.position == first.position + i;
    places[start..].iter().enumerate().take(TILE_TOKENS).take_while(|(i, p)| follows((*i, p))).count()
}

/// A tile's queries: `n_tokens` from `places[0]` on that follow one another, with `n_heads` heads each.
struct Tile<'a> {
    kernels: &'static Kernels,
    shape: &'a KvShape,
    layer: usize,
    /// The key and value head they share.
    head: usize,
    places: &'a [Place<'a>],
    n_heads: usize,
}

/// Attention of a tile's queries over some segments: softmax without its division.
#[derive(Default)]
struct Partial {
    /// Of each query, (n_tokens, n_heads), the largest score and the sum of the exponentials below it.
    sums: Vec<(f32, f32)>,
    /// (n_tokens, n_heads, head_dim): sums of values times exponentials.
    values: Vec<f32>,
}

/// Room that a tile works in.
#[derive(Default)]
struct Scratch {
    /// (n_tokens, n_heads, SEGMENT)
    scores: Vec<f32>,
    /// A block's keys or values as float32.
    decoded: Vec<f32>,
}

impl Tile<'_> {
    /// The part of block `b` that is this head's keys, or values.
    fn part(&self, b: usize, is_value: bool) -> (DType, &[u8]) {
        let dtype = self.shape.dtype_of(b);
        let row_bytes = dtype.row_bytes(self.shape.head_dim);
        let start = self.shape.first_row(self.layer, is_value, self.head) * row_bytes;
        (dtype, &self.places[0].blocks[b].bytes()[start..][..KV_BLOCK * row_bytes])
    }

    fn n_keys(&self) -> usize {
        self.places[0].position + self.places.len()
    }

    fn n_segments(&self) -> usize {
        n_segments(self.n_keys() - 1)
    }

    /// Attention of queries `q` (n_tokens, n_heads, head_dim) into `out`, of the same shape.
    fn attend(&self, q: &[f32], scratch: &mut Scratch, out: &mut [f32]) {
        let (mut all, mut next) = (Partial::default(), Partial::default());
        self.segment(0, q, scratch, &mut all);
        for segment in 1..self.n_segments() {
            self.segment(segment, q, scratch, &mut next);
            self.merge(&mut all, &next);
        }
        self.finish(&all, out);
    }

    /// What the segments' parts, in order, come to.
    fn put_together(&self, parts: &mut [Partial], out: &mut [f32]) {
        let (all, others) = parts.split_first_mut().expect("a query sees itself");
        others.iter().for_each(|next| self.merge(all, next));
        self.finish(all, out);
    }

    fn scale(&self) -> f32 {
        1.0 / (self.shape.head_dim as f32).sqrt()
    }

    /// Adds a later segment.
    fn merge(&self, all: &mut Partial, next: &Partial) {
        let dim = self.shape.head_dim;
        let values = all.values.chunks_exact_mut(dim).zip(next.values.chunks_exact(dim));
        for ((all, next), (to, from)) in all.sums.iter_mut().zip(&next.sums).zip(values) {
            if next.1 == 0.0 {
                continue; // It sees nothing of that segment.
            }
            let largest = if next.0 > all.0 { next.0 } else { all.0 };
            let [a, b] = [all.0, next.0].map(|of| exp((of - largest) * self.scale()));
            *all = (largest, all.1 * a + next.1 * b);
            to.iter_mut().zip(from).for_each(|(to, from)| *to = *to * a + from * b);
        }
    }

    fn finish(&self, all: &Partial, out: &mut [f32]) {
        let dim = self.shape.head_dim;
        let rows = out.chunks_exact_mut(dim).zip(all.values.chunks_exact(dim));
        for ((out, values), (_, sum)) in rows.zip(&all.sums) {
            let inverse = 1.0 / sum;
            out.iter_mut().zip(values).for_each(|(out, v)| *out = v * inverse);
        }
    }

    /// Attention of queries `q` over one segment.
    fn segment(&self, segment: usize, q: &[f32], scratch: &mut Scratch, out: &mut Partial) {
        let (dim, k) = (self.shape.head_dim, self.kernels);
        let (n_tokens, first, n_heads) = (self.places.len(), self.places[0].position, self.n_heads);
        let start = segment * SEGMENT;
        let n_keys = SEGMENT.min(self.n_keys() - start);
        let blocks = || (0..n_keys).step_by(KV_BLOCK);
        // The first token that sees something of what begins at key `at` of the segment.
        let first_token = |at: usize| (start + at).saturating_sub(first);
        let Scratch { scores, decoded } = scratch;
        scores.resize(n_tokens * n_heads * SEGMENT, 0.0);
        for at in blocks() {
            let b = (start + at) / KV_BLOCK;
            let is_last = at + KV_BLOCK >= n_keys;
            let next = self.next(if is_last { start / KV_BLOCK } else { b + 1 }, is_last);
            let from = first_token(at) * n_heads;
            let (q, scores) = (&q[from * dim..], &mut scores[from * SEGMENT + at..]);
            let (kernels, keys) = self.read(b, false, q.len() / dim, decoded);
            // SAFETY: the table is this processor's.
            unsafe { (kernels.scores)(keys, next, q, dim, scores, SEGMENT) };
        }
        out.sums.clear();
        for (i, scores) in scores.chunks_exact_mut(SEGMENT).enumerate() {
            let seen = (first + i / n_heads + 1).saturating_sub(start).min(n_keys);
            // SAFETY: the table is this processor's.
            out.sums.push(unsafe { (k.exponentials)(&mut scores[..seen], self.scale()) });
        }
        out.values.clear();
        out.values.resize(q.len(), 0.0);
        for at in blocks() {
            let b = (start + at) / KV_BLOCK;
            let next = self.next(b + 1, at + KV_BLOCK < n_keys);
            let n_queries = (n_tokens - first_token(at)) * n_heads;
            let (kernels, values) = self.read(b, true, n_queries, decoded);
            let row_bytes = values.len() / KV_BLOCK;
            let mut mix = |tokens: Range<usize>, n: usize| {
                let rows = tokens.start * n_heads..tokens.end * n_heads;
                let scores = &scores[rows.start * SEGMENT + at..];
                let out = &mut out.values[rows.start * dim..rows.end * dim];
                // SAFETY: the table is this processor's.
                unsafe { (kernels.mix)(&values[..n * row_bytes], next, scores, SEGMENT, dim, out) };
            };
            // Tokens that see all of the block, and those that see a part: each its own.
            let whole = (start + at + KV_BLOCK - 1).saturating_sub(first).min(n_tokens);
            for t in first_token(at)..whole {
                mix(t..t + 1, first + t + 1 - start - at);
            }
            if whole < n_tokens {
                mix(whole..n_tokens, KV_BLOCK);
            }
        }
    }

    /// A block's keys or values for `n_queries`, and the kernels that read them: as they lie, or, where those are lacking or
    /// many queries would each decode them, as float32 of the same layout in `decoded`.
    fn read<'a>(
        &'a self,
        b: usize,
        is_value: bool,
        n_queries: usize,
        decoded: &'a mut Vec<f32>,
    ) -> (&'a AttentionKernels, &'a [u8]) {
        const FEW: usize = 8;
        let k = self.kernels;
        let (dtype, bytes) = self.part(b, is_value);
        match (dtype, &k.half_attention) {
            (DType::F32, _) => return (&k.attention, bytes),
            (DType::F16, Some(kernels)) if n_queries <= FEW => return (kernels, bytes),
            _ => (),
        }
        decoded.resize(KV_BLOCK * self.shape.head_dim, 0.0);
        if dtype == DType::Q8_0 && !is_value {
            decode_q8_0_keys(k, bytes, decoded);
        } else {
            // SAFETY: the table is this processor's.
            unsafe { (k.decode)(dtype, bytes, decoded) };
        }
        // SAFETY: float32 in memory is its own encoding.
        (&k.attention, unsafe { std::slice::from_raw_parts(decoded.as_ptr().cast(), 4 * decoded.len()) })
    }

    /// The part that will be wanted next, for memory to be asked: it lies far from the one before.
    fn next(&self, b: usize, is_value: bool) -> &[u8] {
        if b * KV_BLOCK < self.n_keys() { self.part(b, is_value).1 } else { &[] }
    }
}

/// Decodes a head's keys into (dim, token).
fn decode_q8_0_keys(kernels: &Kernels, keys: &[u8], out: &mut [f32]) {
    let mut scales = [0.0f32; KV_BLOCK];
    for (keys, out) in keys.chunks_exact(34 * KV_BLOCK).zip(out.chunks_exact_mut(32 * KV_BLOCK)) {
        let (halves, bytes) = keys.split_at(2 * KV_BLOCK);
        // SAFETY: the table is this processor's.
        unsafe { (kernels.decode)(DType::F16, halves, &mut scales) };
        for (bytes, out) in bytes.chunks_exact(KV_BLOCK).zip(out.chunks_exact_mut(KV_BLOCK)) {
            for ((o, b), scale) in out.iter_mut().zip(bytes).zip(&scales) {
                *o = *b as i8 as f32 * scale;
            }
        }
    }
}

/// Attention of all tokens, cut into parts: a tile of tokens with some heads of one group each.
pub struct Attention<'a> {
    kernels: &'static Kernels,
    shape: &'a KvShape,
    layer: usize,
    places: &'a [Place<'a>],
    q: &'a [f32],
    tiles: Vec<Range<usize>>,
    /// Query heads that share a key head, and how many of them a part has.
    group: usize,
    n_heads: usize,
}

impl<'a> Attention<'a> {
    /// Of queries `q`, (n_tokens, n_heads * head_dim).
    pub fn new(
        kernels: &'static Kernels,
        shape: &'a KvShape,
        layer: usize,
        q: &'a [f32],
        places: &'a [Place<'a>],
    ) -> Self {
        let group = q.len() / places.len() / shape.head_dim / shape.n_kv_heads;
        let mut tiles = Vec::new();
        let mut start = 0;
        while start < places.len() {
            let n = tile_len(places, start);
            tiles.push(start..start + n);
            start += n;
        }
        Self { kernels, shape, layer, places, q, tiles, group, n_heads: group }
    }

    /// Writes every token's attention, as wide as its queries.
    pub fn run(mut self, team: &Team, out: &Parts<f32>) {
        let n_segments = self.places.iter().map(|p| n_segments(p.position)).max().unwrap_or(0);
        if self.n_parts() < CHUNKS_A_THREAD * team.n_threads() && n_segments > 1 {
            return self.by_segments(n_segments, team, out);
        }
        // The heads of a group share decoding keys and values, unless that leaves threads without work.
        if self.n_parts() < team.n_threads() {
            self.n_heads = 1;
        }
        self.whole(team, out);
    }

    /// Parts of a tile.
    fn parts_a_tile(&self) -> usize {
        self.shape.n_kv_heads * self.group / self.n_heads
    }

    fn n_parts(&self) -> usize {
        self.tiles.len() * self.parts_a_tile()
    }

    /// Where a token's values of a part begin, among queries and results.
    fn at(&self, token: usize, part: usize) -> usize {
        let dim = self.shape.head_dim;
        token * self.shape.n_kv_heads * self.group * dim + part % self.parts_a_tile() * self.n_heads * dim
    }

    fn tokens(&self, part: usize) -> Range<usize> {
        self.tiles[part / self.parts_a_tile()].clone()
    }

    fn tile(&self, part: usize) -> Tile<'_> {
        let Self { kernels, shape, layer, n_heads, .. } = *self;
        let head = part % self.parts_a_tile() * n_heads / self.group;
        Tile { kernels, shape, layer, head, places: &self.places[self.tokens(part)], n_heads }
    }

    /// A part's queries, side by side.
    fn queries(&self, part: usize) -> Vec<f32> {
        let width = self.n_heads * self.shape.head_dim;
        let mut queries = Vec::with_capacity(self.tokens(part).len() * width);
        self.tokens(part).for_each(|t| queries.extend_from_slice(&self.q[self.at(t, part)..][..width]));
        queries
    }

    /// # Safety
    /// Nobody else has the part's results.
    unsafe fn put(&self, part: usize, results: &[f32], out: &Parts<f32>) {
        let width = self.n_heads * self.shape.head_dim;
        for (t, results) in self.tokens(part).zip(results.chunks_exact(width)) {
            // SAFETY: each token and group of heads has its own values.
            unsafe { out.part(self.at(t, part), width) }.copy_from_slice(results);
        }
    }

    /// A thread takes whole parts.
    fn whole(&self, team: &Team, out: &Parts<f32>) {
        in_chunks(team, self.n_parts(), &|part, scratch| {
            let queries = self.queries(part);
            let mut results = vec![0.0; queries.len()];
            self.tile(part).attend(&queries, scratch, &mut results);
            // SAFETY: each part is one thread's.
            unsafe { self.put(part, &results, out) };
        });
    }

    /// A thread takes a part's segment: with few parts, over a long text.
    fn by_segments(&self, n_segments: usize, team: &Team, out: &Parts<f32>) {
        let n = self.n_parts();
        let mut partials: Vec<Partial> = Vec::new();
        partials.resize_with(n * n_segments, Partial::default);
        let partials = Parts::new(&mut partials);
        in_chunks(team, n * n_segments, &|i, scratch| {
            let (part, segment) = (i / n_segments, i % n_segments);
            let tile = self.tile(part);
            if segment < tile.n_segments() {
                // SAFETY: each number has its own.
                let partial = &mut unsafe { partials.part(i, 1) }[0];
                tile.segment(segment, &self.queries(part), scratch, partial);
            }
        });
        in_chunks(team, n, &|part, _| {
            let tile = self.tile(part);
            // SAFETY: each part has its own.
            let partials = unsafe { partials.part(part * n_segments, tile.n_segments()) };
            let mut results = vec![0.0; tile.places.len() * self.n_heads * self.shape.head_dim];
            tile.put_together(partials, &mut results);
            // SAFETY: each part is one thread's.
            unsafe { self.put(part, &results, out) };
        });
    }
}

/// Calls `f` with every number below `n`, in as many chunks as a team takes, each with room of its own.
fn in_chunks(team: &Team, n: usize, f: &(dyn Fn(usize, &mut Scratch) + Sync)) {
    let size = n.div_ceil(MAX_CHUNKS);
    team.run(n.div_ceil(size), &|chunk| {
        let mut scratch = Scratch::default();
        (chunk * size..((chunk + 1) * size).min(n)).for_each(|i| f(i, &mut scratch));
    });
}
