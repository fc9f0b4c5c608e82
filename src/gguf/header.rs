//! Parses the bytes of a GGUF header. Never panics, and allocates no more than the bytes at hand can fill:
//! every count is held against what is left of the file before anything is made for it.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use crate::quant::DType;
use crate::{Error, Result};

use super::value::{Array, Value, ValueKind};

/// Bytes that the shortest possible tensor info takes: empty name, one dimension.
const MIN_TENSOR_INFO: usize = 8 + 4 + 8 + 4 + 8;
/// Bytes that the shortest possible key takes: empty name, a type, one byte of value.
const MIN_KEY: usize = 8 + 4 + 1;
const MAX_RANK: u32 = 4;
/// GGUF's own limit.
const MAX_NAME: usize = 65_535;
const MAX_ARRAY_DEPTH: u32 = 3;

/// Which magic the file starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Magic {
    Gguf,
    /// A file of PowerInfer's: a sparse model, or a `.gpuidx`.
    PowerInfer,
}

/// One tensor, its place checked to lie inside the file.
#[derive(Clone, Debug)]
pub struct TensorInfo {
    pub name: String,
    pub dtype: DType,
    /// Innermost first, as GGUF has them; 1 to 4 of them, none zero but in indices, of which there may be none.
    pub dims: Vec<usize>,
    /// Where the data lies in the file.
    pub range: Range<usize>,
}

#[derive(Clone, Debug)]
pub struct Header {
    pub magic: Magic,
    pub version: u32,
    pub alignment: usize,
    /// In the file's order.
    pub keys: Vec<(String, Value)>,
    /// In the file's order.
    pub tensors: Vec<TensorInfo>,
}

struct Reader<'a> {
    file: &'a Path,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    fn bad<T>(&self, field: impl ToString, got: impl ToString, expected: impl ToString) -> Result<T> {
        Err(Error::format(self.file, field, got, expected))
    }

    fn take(&mut self, n: usize, field: &str) -> Result<&'a [u8]> {
        if n > self.left() {
            let got = format!("{n} bytes at offset {}", self.at);
            return self.bad(field, got, format!("at most the {} left in the file", self.left()));
        }
        self.at += n;
        Ok(&self.bytes[self.at - n..self.at])
    }

    fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N]> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, field)?);
        Ok(out)
    }

    fn u32(&mut self, field: &str) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array(field)?))
    }

    fn u64(&mut self, field: &str) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array(field)?))
    }

    /// A count of things that take at least `min` bytes each.
    fn count(&mut self, min: usize, field: &str) -> Result<usize> {
        let n = self.u64(field)?;
        let fit = self.left() / min;
        if n > fit as u64 {
            return self.bad(field, n, format!("at most {fit}, what the rest of the file can hold"));
        }
        Ok(n as usize)
    }

    fn string(&mut self, field: &str) -> Result<&'a [u8]> {
        let n = self.count(1, &format!("{field} (length)"))?;
        self.take(n, field)
    }

    fn name(&mut self, field: &str) -> Result<String> {
        let bytes = self.string(field)?;
        if bytes.len() > MAX_NAME {
            return self.bad(field, format!("{} bytes", bytes.len()), format!("at most {MAX_NAME}"));
        }
        match std::str::from_utf8(bytes) {
            Ok(s) => Ok(s.to_owned()),
            Err(_) => self.bad(field, String::from_utf8_lossy(bytes), "UTF-8"),
        }
    }

    fn value(&mut self, kind: ValueKind, field: &str) -> Result<Value> {
        match kind {
            ValueKind::String => Ok(Value::String(self.text(field)?)),
            ValueKind::Array => Ok(Value::Array(self.values(1, field)?)),
            _ => self.scalar(kind, field),
        }
    }

    fn text(&mut self, field: &str) -> Result<String> {
        Ok(String::from_utf8_lossy(self.string(field)?).into_owned())
    }

    fn scalar(&mut self, kind: ValueKind, field: &str) -> Result<Value> {
        let bytes = self.take(kind.min_bytes(), field)?;
        match Value::scalar(kind, bytes) {
            Some(value) => Ok(value),
            None => self.bad(field, format!("{bytes:?} as {kind:?}"), "0 or 1"),
        }
    }

    fn values(&mut self, depth: u32, field: &str) -> Result<Array> {
        let kind = self.kind(&format!("{field} (element type)"))?;
        let n = self.count(kind.min_bytes(), &format!("{field} (length)"))?;
        Ok(match kind {
            ValueKind::String => Array::Strings((0..n).map(|_| self.text(field)).collect::<Result<_>>()?),
            ValueKind::Array if depth >= MAX_ARRAY_DEPTH => {
                return self.bad(field, "arrays nested deeper", format!("at most {MAX_ARRAY_DEPTH} deep"));
            }
            ValueKind::Array => {
                Array::Arrays((0..n).map(|_| self.values(depth + 1, field)).collect::<Result<_>>()?)
            }
            _ => {
                let bytes = self.take(n * kind.min_bytes(), field)?.to_vec();
                if kind == ValueKind::Bool && bytes.iter().any(|b| *b > 1) {
                    return self.bad(field, "a bool that is neither 0 nor 1", "0 or 1");
                }
                Array::Scalars { kind, bytes }
            }
        })
    }

    fn kind(&mut self, field: &str) -> Result<ValueKind> {
        let id = self.u32(field)?;
        match ValueKind::from_id(id) {
            Some(kind) => Ok(kind),
            None => self.bad(field, format!("value type {id}"), "0 to 12"),
        }
    }
}

/// Parses the header of `bytes`, the whole content of `file` (named in errors only).
pub fn parse(bytes: &[u8], file: &Path) -> Result<Header> {
    let mut r = Reader { file, bytes, at: 0 };
    let magic = match &r.array::<4>("magic")? {
        b"GGUF" => Magic::Gguf,
        b"PWRI" => Magic::PowerInfer,
        other => return r.bad("magic", format!("{:?}", String::from_utf8_lossy(other)), "GGUF or PWRI"),
    };
    let version = r.u32("version")?;
    if !(2..=3).contains(&version) {
        let big_endian = (1..=3).contains(&version.swap_bytes());
        let got = if big_endian { "a big-endian file".to_owned() } else { format!("version {version}") };
        return Err(Error::unsupported(file, "version", got, "a little-endian file of version 2 or 3"));
    }
    let n_tensors = r.count(MIN_TENSOR_INFO, "tensor count")?;
    let n_keys = r.count(MIN_KEY, "key count")?;
    let keys = parse_keys(&mut r, n_keys)?;
    let alignment = alignment(&keys, file)?;
    let infos = parse_infos(&mut r, n_tensors)?;
    let tensors = place(&r, infos, alignment)?;
    Ok(Header { magic, version, alignment, keys, tensors })
}

fn parse_keys(r: &mut Reader, n_keys: usize) -> Result<Vec<(String, Value)>> {
    let mut keys = Vec::new();
    let mut seen = HashSet::new();
    for i in 0..n_keys {
        let name = r.name(&format!("name of key {i}"))?;
        let field = format!("key {name}");
        let kind = r.kind(&format!("{field} (type)"))?;
        let value = r.value(kind, &field)?;
        if !seen.insert(name.clone()) {
            return r.bad(field, "the name twice", "each key once");
        }
        keys.push((name, value));
    }
    Ok(keys)
}

fn alignment(keys: &[(String, Value)], file: &Path) -> Result<usize> {
    const KEY: &str = "general.alignment";
    match keys.iter().find(|(name, _)| name == KEY) {
        None => Ok(32),
        Some((_, Value::U32(n))) if *n > 0 => Ok(*n as usize),
        Some((_, other)) => Err(Error::format(file, format!("key {KEY}"), other, "a u32 above 0")),
    }
}

/// A tensor info as the file has it: name, type, dims, offset into the data, bytes.
type RawInfo = (String, DType, Vec<usize>, u64, usize);

fn parse_infos(r: &mut Reader, n_tensors: usize) -> Result<Vec<RawInfo>> {
    let mut infos = Vec::new();
    let mut seen = HashSet::new();
    for i in 0..n_tensors {
        let name = r.name(&format!("name of tensor {i}"))?;
        let field = format!("tensor {name}");
        let rank = r.u32(&format!("{field} (rank)"))?;
        if !(1..=MAX_RANK).contains(&rank) {
            return r.bad(field, format!("rank {rank}"), format!("1 to {MAX_RANK}"));
        }
        let mut dims = Vec::new();
        let mut n_values = 1usize;
        for _ in 0..rank {
            let dim = r.u64(&format!("{field} (dims)"))?;
            let product = usize::try_from(dim).ok().and_then(|d| n_values.checked_mul(d));
            match product {
                Some(p) => n_values = p,
                None => {
                    return r.bad(field, format!("dimension {dim}"), "a product that fits memory");
                }
            }
            dims.push(dim as usize);
        }
        let id = r.u32(&format!("{field} (type)"))?;
        let dtype = DType::from_id(id).map_err(|got| {
            let known: Vec<_> = DType::ALL.iter().map(|t| t.name()).collect();
            Error::unsupported(r.file, &field, got, format!("one of {}", known.join(", ")))
        })?;
        if n_values == 0 && dtype != DType::I32 {
            return r.bad(field, "dimension 0", "dimensions above 0");
        }
        let block = dtype.block_len();
        if !dims[0].is_multiple_of(block) {
            return r.bad(
                field,
                format!("rows of {}", dims[0]),
                format!("a multiple of {block} for {}", dtype.name()),
            );
        }
        let Some(n_bytes) = (n_values / block).checked_mul(dtype.block_bytes()) else {
            return r.bad(field, format!("{n_values} values"), "a size that fits memory");
        };
        let offset = r.u64(&format!("{field} (offset)"))?;
        if !seen.insert(name.clone()) {
            return r.bad(field, "the name twice", "each tensor once");
        }
        infos.push((name, dtype, dims, offset, n_bytes));
    }
    Ok(infos)
}

/// Turns offsets into ranges of the file, checked to lie inside it, aligned and apart from each other.
fn place(r: &Reader, infos: Vec<RawInfo>, alignment: usize) -> Result<Vec<TensorInfo>> {
    if infos.is_empty() {
        return Ok(Vec::new());
    }
    let Some(base) = r.at.checked_next_multiple_of(alignment).filter(|base| *base <= r.bytes.len()) else {
        return r.bad(
            "tensor data",
            format!("a start beyond the file's {} bytes", r.bytes.len()),
            format!("data from offset {} on, aligned to {alignment}", r.at),
        );
    };
    let room = r.bytes.len() - base;
    let mut tensors = Vec::new();
    for (name, dtype, dims, offset, n_bytes) in infos {
        let field = format!("tensor {name} (offset)");
        if offset % alignment as u64 != 0 {
            return r.bad(field, offset, format!("a multiple of the alignment, {alignment}"));
        }
        let end =
            usize::try_from(offset).ok().and_then(|o| o.checked_add(n_bytes)).filter(|end| *end <= room);
        let Some(end) = end else {
            let got = format!("{n_bytes} bytes at {offset}");
            return r.bad(field, got, format!("data inside the {room} bytes that the file has"));
        };
        tensors.push(TensorInfo { name, dtype, dims, range: base + offset as usize..base + end });
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().collect();
    order.sort_by_key(|t| t.range.start);
    for pair in order.windows(2) {
        if pair[1].range.start < pair[0].range.end {
            let field = format!("tensor {} (offset)", pair[1].name);
            let expected = format!("data after {}, which ends at {}", pair[0].name, pair[0].range.end);
            return r.bad(field, format!("a start at {}", pair[1].range.start), expected);
        }
    }
    Ok(tensors)
}

/// Looks keys up by name.
pub fn index(keys: &[(String, Value)]) -> HashMap<String, usize> {
    keys.iter().enumerate().map(|(i, (name, _))| (name.clone(), i)).collect()
}
