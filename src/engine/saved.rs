//! A sequence in a file: a header that says what model and layout it is of, the tokens, the cache, a checksum.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::backend::{Activation, FULL_BLOCKS, KV_BLOCK, KvShape};
use crate::files::WholeFile;
use crate::gguf::Gguf;
use crate::{Error, Result};

const MAGIC: &[u8; 8] = b"PIRSSEQ2";
const HEADER: usize = 8 + 8 + 6 * 4 + 8;

/// Pieces of a tensor that its content is known by, and bytes of each: all of a large one would take seconds.
const PIECES: usize = 64;
const PIECE: usize = 64;

/// A number for a model's identity: its keys but for the vocabulary's, its activation, its tensors' names, types and
/// shapes, and pieces of each from beginning to end.
pub fn fingerprint(gguf: &Gguf, activation: Activation) -> u64 {
    let mut form = crc32fast::Hasher::new();
    let mut content = crc32fast::Hasher::new();
    form.update(activation.name().as_bytes());
    for (name, value) in gguf.keys().iter().filter(|(name, _)| !name.starts_with("tokenizer.")) {
        let mut bytes = name.as_bytes().to_vec();
        value.write(&mut bytes);
        form.update(&bytes);
    }
    for t in gguf.tensors() {
        form.update(format!("{} {} {:?};", t.name, t.dtype.name(), t.dims).as_bytes());
        let bytes = gguf.bytes(&t.name).unwrap_or_default();
        let step = (bytes.len() / PIECES).max(PIECE);
        for piece in bytes.chunks(step) {
            content.update(&piece[..piece.len().min(PIECE)]);
        }
    }
    (form.finalize() as u64) << 32 | content.finalize() as u64
}

fn header(kv: &KvShape, fingerprint: u64, n_tokens: usize) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend(fingerprint.to_le_bytes());
    for n in [kv.n_layers, kv.n_kv_heads, kv.head_dim, kv.dtype.id() as usize, KV_BLOCK, FULL_BLOCKS] {
        out.extend((n as u32).to_le_bytes());
    }
    out.extend((n_tokens as u64).to_le_bytes());
    out
}

/// Writes `tokens` with their cache: `block` has the bytes of each.
pub fn save(
    tokens: &[u32],
    n_blocks: usize,
    mut block: impl FnMut(usize) -> Result<Vec<u8>>,
    kv: &KvShape,
    fingerprint: u64,
    path: &Path,
) -> Result<()> {
    let mut file = WholeFile::create(path)?;
    let mut sum = crc32fast::Hasher::new();
    let mut put = |bytes: &[u8]| {
        sum.update(bytes);
        file.put(bytes)
    };
    put(&header(kv, fingerprint, tokens.len()))?;
    let tokens: Vec<u8> = tokens.iter().flat_map(|t| t.to_le_bytes()).collect();
    put(&tokens)?;
    for index in 0..n_blocks {
        put(&block(index)?)?;
    }
    file.put(&sum.finalize().to_le_bytes())?;
    file.finish()
}

/// What `path` holds: tokens, and the bytes of their cache's blocks.
pub fn restore(
    kv: &KvShape,
    fingerprint: u64,
    n_ctx: usize,
    n_vocab: usize,
    path: &Path,
) -> Result<(Vec<u32>, Vec<Vec<u8>>)> {
    // Before it is opened: opening a pipe would wait for its other end.
    let meta = std::fs::metadata(path).map_err(Error::io(path))?;
    if !meta.is_file() {
        return Err(Error::format(path, "file", "not a regular file", "a saved sequence"));
    }
    let size = meta.len();
    let mut file = File::open(path).map_err(Error::io(path))?;
    let mut sum = crc32fast::Hasher::new();
    let mut take = |n: usize| -> Result<Vec<u8>> {
        let mut bytes = vec![0; n];
        file.read_exact(&mut bytes).map_err(Error::io(path))?;
        sum.update(&bytes);
        Ok(bytes)
    };
    let bad = |field: &str, got: String, expected: String| Err(Error::format(path, field, got, expected));
    if size < HEADER as u64 {
        return bad("size", format!("{size} bytes"), format!("at least {HEADER}, a saved sequence's header"));
    }
    let head = take(HEADER)?;
    if &head[..8] != MAGIC {
        return bad(
            "magic",
            format!("{:?}", String::from_utf8_lossy(&head[..8])),
            "a saved sequence".to_owned(),
        );
    }
    let n_tokens = u64::from_le_bytes(head[HEADER - 8..].try_into().expect("eight bytes"));
    if n_tokens > n_ctx as u64 {
        return bad("tokens", n_tokens.to_string(), format!("at most n_ctx, {n_ctx}"));
    }
    let n_tokens = n_tokens as usize;
    let expected = header(kv, fingerprint, n_tokens);
    if head[8..16] != expected[8..16] {
        return bad("model", "another model's sequence".to_owned(), "one that this model wrote".to_owned());
    }
    if head != expected {
        let expected = format!("{kv:?} in blocks of {KV_BLOCK}");
        return bad("KV cache layout", "another one".to_owned(), expected);
    }
    let n_blocks = n_tokens.div_ceil(KV_BLOCK);
    let cache: u64 = (0..n_blocks).map(|i| kv.block_bytes(i) as u64).sum();
    let whole = (HEADER + 4 * n_tokens + 4) as u64 + cache;
    if size != whole {
        return bad("size", format!("{size} bytes"), format!("{whole}"));
    }
    let tokens: Vec<u32> =
        take(4 * n_tokens)?.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    if let Some(id) = tokens.iter().find(|t| **t as usize >= n_vocab) {
        return bad("tokens", format!("id {id}"), format!("ids below {n_vocab}"));
    }
    let blocks = (0..n_blocks).map(|i| take(kv.block_bytes(i))).collect::<Result<Vec<_>>>()?;
    let computed = sum.finalize();
    let mut stored = [0; 4];
    file.read_exact(&mut stored).map_err(Error::io(path))?;
    if u32::from_le_bytes(stored) != computed {
        return bad("checksum", format!("{:08x}", u32::from_le_bytes(stored)), format!("{computed:08x}"));
    }
    Ok((tokens, blocks))
}
