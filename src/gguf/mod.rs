//! GGUF files: keys, and tensors as views into the mapped bytes.
//!
//! [`header`] parses bytes and trusts nothing; this module maps files, follows split ones to their other parts and
//! hands out matrices; [`write`] makes files. It uses `error` and `quant` only.

pub mod header;
mod value;
pub mod write;

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::Mmap;

use crate::quant::{Bytes, Matrix, Source};
use crate::{Error, Result};

pub use header::{Magic, TensorInfo};
pub use value::{Array, Value, ValueKind};

/// A model file, or all parts of a split one.
pub struct Gguf {
    path: PathBuf,
    parts: Vec<Part>,
    keys: HashMap<String, usize>,
    /// Part and position in it, by tensor name.
    tensors: HashMap<String, (usize, usize)>,
}

struct Part {
    source: Arc<Source>,
    header: header::Header,
}

impl Part {
    fn parse(source: Source, path: &Path) -> Result<Self> {
        let header = header::parse(source.as_slice(), path)?;
        Ok(Self { source: Arc::new(source), header })
    }

    fn open(path: &Path) -> Result<Self> {
        // Before it is opened: opening a pipe would wait for its other end.
        let meta = std::fs::metadata(path).map_err(Error::io(path))?;
        if !meta.is_file() {
            return Err(Error::format(path, "file", "not a regular file", "a GGUF file"));
        }
        let file = File::open(path).map_err(Error::io(path))?;
        if meta.len() == 0 {
            return Err(Error::format(path, "file", "0 bytes", "a GGUF file"));
        }
        // SAFETY: the map is read only. Another process that truncates the file while it is mapped can fault this
        // one, as with every mapped file; the README says so.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        Self::parse(Source::File(map), path)
    }
}

impl Gguf {
    /// Maps the file at `path`; of a split model (`NAME-00001-of-00003.gguf`) any part may be named.
    pub fn open(path: &Path) -> Result<Self> {
        let part = Part::open(path)?;
        let n_parts = part.header.keys.iter().find(|(name, _)| name == "split.count");
        match n_parts.map(|(_, value)| value.as_u64()) {
            None | Some(Some(0 | 1)) => Self::new(path.to_owned(), vec![part]),
            Some(Some(n)) => Self::open_split(path, part, n),
            Some(None) => {
                Err(Error::format(path, "key split.count", "not an integer", "the number of parts"))
            }
        }
    }

    /// A file's content that is already in memory; `path` is its name in errors.
    pub fn from_bytes(bytes: Vec<u8>, path: &Path) -> Result<Self> {
        Self::new(path.to_owned(), vec![Part::parse(Source::Memory(bytes), path)?])
    }

    fn open_split(path: &Path, opened: Part, n_parts: u64) -> Result<Self> {
        let Some((stem, number, total)) = split_name(path) else {
            let expected =
                "a name that ends in -NNNNN-of-NNNNN.gguf, since the file is one part of a split model";
            return Err(Error::format(path, "file name", path.display(), expected));
        };
        if total as u64 != n_parts || number == 0 || number > total {
            let expected = format!("the {n_parts} that key split.count says");
            return Err(Error::format(path, "file name", format!("part {number} of {total}"), expected));
        }
        let mut opened = Some(opened);
        let mut parts = Vec::new();
        let mut first_path = path.to_owned();
        for i in 1..=total {
            let name = format!("{stem}-{i:05}-of-{total:05}.gguf");
            let part_path = path.with_file_name(name);
            let part = match opened.take_if(|_| i == number) {
                Some(part) => part,
                None => Part::open(&part_path)?,
            };
            let key = part.header.keys.iter().find(|(name, _)| name == "split.no");
            let no = key.and_then(|(_, value)| value.as_u64());
            if no != Some(i as u64 - 1) {
                let got = no.map_or("none".to_owned(), |n| n.to_string());
                return Err(Error::format(part_path, "key split.no", got, i - 1));
            }
            if i == 1 {
                first_path = part_path;
            }
            parts.push(part);
        }
        let all = Self::new(first_path, parts)?;
        if let Some(n) = all.get("split.tensors.count").and_then(Value::as_u64)
            && n != all.tensors.len() as u64
        {
            let got = format!("{} tensors in all parts", all.tensors.len());
            return Err(Error::format(&all.path, "key split.tensors.count", got, n));
        }
        Ok(all)
    }

    fn new(path: PathBuf, parts: Vec<Part>) -> Result<Self> {
        let keys = header::index(&parts[0].header.keys);
        let mut tensors = HashMap::new();
        for (p, part) in parts.iter().enumerate() {
            for (i, t) in part.header.tensors.iter().enumerate() {
                if tensors.insert(t.name.clone(), (p, i)).is_some() {
                    return Err(Error::format(path, format!("tensor {}", t.name), "in two parts", "in one"));
                }
            }
        }
        Ok(Self { path, parts, keys, tensors })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn magic(&self) -> Magic {
        self.parts[0].header.magic
    }

    pub fn version(&self) -> u32 {
        self.parts[0].header.version
    }

    /// Bytes of all parts.
    pub fn n_bytes(&self) -> usize {
        self.parts.iter().map(|p| p.source.as_slice().len()).sum()
    }

    /// Keys and values in the file's order.
    pub fn keys(&self) -> &[(String, Value)] {
        &self.parts[0].header.keys
    }

    /// All tensors, in the files' order.
    pub fn tensors(&self) -> impl Iterator<Item = &TensorInfo> {
        self.parts.iter().flat_map(|p| &p.header.tensors)
    }

    pub fn get(&self, key: &str) -> Option<&Value> {
        self.keys.get(key).map(|i| &self.keys()[*i].1)
    }

    /// The value of `key` through `read`; a value of another kind is an error that says what was `expected`.
    pub fn get_as<'a, T>(
        &'a self,
        key: &str,
        expected: &str,
        read: impl Fn(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match read(value) {
            Some(v) => Ok(Some(v)),
            None => Err(Error::format(&self.path, format!("key {key}"), value, expected)),
        }
    }

    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name).map(|(p, i)| &self.parts[*p].header.tensors[*i])
    }

    /// The bytes of the tensor `name`.
    pub fn bytes(&self, name: &str) -> Option<&[u8]> {
        let (p, i) = *self.tensors.get(name)?;
        let part = &self.parts[p];
        Some(&part.source.as_slice()[part.header.tensors[i].range.clone()])
    }

    /// The tensor `name` as a matrix: its first dimension is a row, all others count rows.
    pub fn matrix(&self, name: &str) -> Option<Matrix> {
        let (p, i) = *self.tensors.get(name)?;
        let info = &self.parts[p].header.tensors[i];
        let bytes = Bytes::new(self.parts[p].source.clone(), info.range.clone());
        Some(Matrix::new(info.dtype, info.dims[1..].iter().product(), info.dims[0], bytes))
    }
}

/// `NAME-00002-of-00003.gguf` as (NAME, 2, 3).
fn split_name(path: &Path) -> Option<(&str, u32, u32)> {
    let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (rest, total) = stem.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five = |s: &str| (s.len() == 5).then(|| s.parse().ok()).flatten();
    Some((stem, five(number)?, five(total)?))
}
