//! Writes GGUF files, header first and then tensor by tensor: nothing is kept in memory, and nothing half-written is left.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use crate::quant::DType;
use crate::{Error, Result};

use super::header::Magic;
use super::value::Value;

/// Where tensors begin: a multiple of this from the first one on.
const ALIGNMENT: usize = 32;
const VERSION: u32 = 3;

/// A tensor to come.
pub struct TensorSpec {
    pub name: String,
    pub dtype: DType,
    /// Innermost first.
    pub dims: Vec<usize>,
}

impl TensorSpec {
    fn n_bytes(&self) -> usize {
        self.dtype.row_bytes(self.dims.iter().product())
    }
}

/// A file on its way: it lies beside its place under another name until it is whole.
pub struct Writer {
    path: PathBuf,
    partial: PathBuf,
    out: Option<BufWriter<File>>,
    /// Bytes of the tensors to come, the next one last.
    to_come: Vec<usize>,
}

impl Writer {
    /// Writes the header of a file with these keys and tensors, in this order.
    pub fn create(path: &Path, magic: Magic, keys: &[(&str, Value)], tensors: &[TensorSpec]) -> Result<Self> {
        let Some(name) = path.file_name() else {
            return Err(Error::argument("path", path.display(), "the name of a file to write"));
        };
        let partial = path.with_file_name(format!(".{}.{}.partial", name.display(), std::process::id()));
        let file = OpenOptions::new().write(true).create_new(true).open(&partial);
        let out = Some(BufWriter::new(file.map_err(Error::io(path))?));
        let to_come = tensors.iter().rev().map(TensorSpec::n_bytes).collect();
        let mut writer = Self { path: path.to_owned(), partial, out, to_come };
        writer.put(&header(magic, keys, tensors))?;
        Ok(writer)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let out = self.out.as_mut().expect("there until the end");
        out.write_all(bytes).map_err(Error::io(&self.path))
    }

    /// Writes the next tensor. Panics where there is none, or one of another length.
    pub fn tensor(&mut self, bytes: &[u8]) -> Result<()> {
        assert_eq!(self.to_come.pop(), Some(bytes.len()), "the tensors that the header says");
        self.put(bytes)?;
        self.put(&[0; ALIGNMENT][..padding(bytes.len())])
    }

    /// Puts the file in its place, instead of what may be there. Panics where a tensor lacks.
    pub fn finish(mut self) -> Result<()> {
        assert!(self.to_come.is_empty(), "the tensors that the header says");
        let out = self.out.take().expect("there until the end");
        let file = out.into_inner().map_err(|e| Error::io(&self.path)(e.into_error()))?;
        file.sync_all().map_err(Error::io(&self.path))?;
        std::fs::rename(&self.partial, &self.path).map_err(Error::io(&self.path))
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // After a rename there is nothing of that name; where removing fails there is nobody to tell.
        let _ = std::fs::remove_file(&self.partial);
    }
}

fn padding(n: usize) -> usize {
    n.next_multiple_of(ALIGNMENT) - n
}

fn header(magic: Magic, keys: &[(&str, Value)], tensors: &[TensorSpec]) -> Vec<u8> {
    let mut out = match magic {
        Magic::Gguf => b"GGUF".to_vec(),
        Magic::PowerInfer => b"PWRI".to_vec(),
    };
    let put_name = |out: &mut Vec<u8>, name: &str| {
        out.extend((name.len() as u64).to_le_bytes());
        out.extend(name.as_bytes());
    };
    out.extend(VERSION.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((keys.len() as u64).to_le_bytes());
    for (name, value) in keys {
        put_name(&mut out, name);
        value.write(&mut out);
    }
    let mut offset = 0;
    for tensor in tensors {
        put_name(&mut out, &tensor.name);
        out.extend((tensor.dims.len() as u32).to_le_bytes());
        out.extend(tensor.dims.iter().flat_map(|dim| (*dim as u64).to_le_bytes()));
        out.extend(tensor.dtype.id().to_le_bytes());
        out.extend((offset as u64).to_le_bytes());
        offset += tensor.n_bytes().next_multiple_of(ALIGNMENT);
    }
    out.resize(out.len() + padding(out.len()), 0);
    out
}
