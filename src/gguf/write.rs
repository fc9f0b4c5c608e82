//! Writes GGUF files, header first and then tensor by tensor: nothing is kept in memory, and nothing half-written is left.

use std::path::Path;

use crate::Result;
use crate::files::WholeFile;
use crate::quant::DType;

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
    pub fn n_bytes(&self) -> usize {
        self.dtype.row_bytes(self.dims.iter().product())
    }
}

/// A file on its way.
pub struct Writer {
    file: WholeFile,
    /// The tensors that aren't whole yet, the current one last.
    to_come: Vec<TensorSpec>,
    /// Bytes of the current tensor that are written.
    written: usize,
}

impl Writer {
    /// Writes the header of a file with these keys and tensors, in this order.
    pub fn create(
        path: &Path,
        magic: Magic,
        keys: &[(&str, &Value)],
        mut tensors: Vec<TensorSpec>,
    ) -> Result<Self> {
        let mut file = WholeFile::create(path)?;
        file.put(&header(magic, keys, &tensors))?;
        tensors.reverse();
        Ok(Self { file, to_come: tensors, written: 0 })
    }

    /// The tensor that what comes next belongs to, and its bytes that are still to come.
    pub fn current(&self) -> Option<(&TensorSpec, usize)> {
        self.to_come.last().map(|spec| (spec, spec.n_bytes() - self.written))
    }

    /// Writes more of the current tensor, or all of it. Panics where there is none, or less of it to come.
    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let (spec, left) = self.current().expect("a tensor that the header says");
        let (all, left) =
            (spec.n_bytes(), left.checked_sub(bytes.len()).expect("no more than the header says"));
        self.file.put(bytes)?;
        self.written += bytes.len();
        if left == 0 {
            self.file.put(&[0; ALIGNMENT][..padding(all)])?;
            self.to_come.pop();
            self.written = 0;
        }
        Ok(())
    }

    /// Puts the file in its place, instead of what may be there. Panics where a tensor lacks.
    pub fn finish(self) -> Result<()> {
        assert!(self.to_come.is_empty(), "the tensors that the header says");
        self.file.finish()
    }
}

fn padding(n: usize) -> usize {
    n.next_multiple_of(ALIGNMENT) - n
}

fn header(magic: Magic, keys: &[(&str, &Value)], tensors: &[TensorSpec]) -> Vec<u8> {
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
