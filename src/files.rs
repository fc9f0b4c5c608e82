//! Files that take their place once they are whole: nothing half-written is left.

use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::{Error, Result};

/// A file on its way: it lies beside its place under another name.
pub struct WholeFile {
    path: PathBuf,
    partial: PathBuf,
    out: BufWriter<File>,
}

impl WholeFile {
    pub fn create(path: &Path) -> Result<Self> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let Some(name) = path.file_name() else {
            return Err(Error::argument("path", path.display(), "the name of a file to write"));
        };
        if std::fs::metadata(path).is_ok_and(|there| !there.is_file()) {
            return Err(Error::argument(
                "path",
                format!("{}, no regular file", path.display()),
                "a file to write",
            ));
        }
        let mut partial = name.to_owned();
        // Other processes and other threads may be writing the same file.
        partial.push(format!(".{}-{}.partial", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
        let partial = path.with_file_name(partial);
        let file = OpenOptions::new().write(true).create_new(true).open(&partial);
        let out = BufWriter::new(file.map_err(Error::io(path))?);
        Ok(Self { path: path.to_owned(), partial, out })
    }

    pub fn put(&mut self, bytes: &[u8]) -> Result<()> {
        self.out.write_all(bytes).map_err(Error::io(&self.path))
    }

    /// Puts the file in its place, instead of what may be there.
    pub fn finish(mut self) -> Result<()> {
        self.out.flush().map_err(Error::io(&self.path))?;
        self.out.get_ref().sync_all().map_err(Error::io(&self.path))?;
        std::fs::rename(&self.partial, &self.path).map_err(Error::io(&self.path))
    }
}

impl Drop for WholeFile {
    fn drop(&mut self) {
        // After `finish` nothing has that name; where removing fails there is nobody to tell.
        let _ = std::fs::remove_file(&self.partial);
    }
}
