//! The crate's error type. Every variant says which file or argument, what was found and what would be right.

use std::path::PathBuf;

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused: a missing file, no permission, a full disk.
    #[error("{}: {source}", file.display())]
    Io { file: PathBuf, source: std::io::Error },

    /// The file's bytes contradict the format, or each other.
    #[error("{}: {field}: got {got}, expected {expected}", file.display())]
    Format { file: PathBuf, field: String, got: String, expected: String },

    /// The file is sound, but asks for something this crate does not do.
    #[error("{}: {field}: {got} is not supported; expected {expected}", file.display())]
    Unsupported { file: PathBuf, field: String, got: String, expected: String },

    /// A tensor that the architecture needs is not in the file.
    #[error("{}: tensor {name}: missing, expected shape {expected}", file.display())]
    MissingTensor { file: PathBuf, name: String, expected: String },

    /// The caller asked for something that can't be.
    #[error("{name}: got {got}, expected {expected}")]
    Argument { name: &'static str, got: String, expected: String },

    /// More positions than the context has.
    #[error(
        "context full: {requested} tokens don't fit in n_ctx, {n_ctx}; a larger n_ctx (-c), or overflow=\"slide\" (--slide), goes on"
    )]
    ContextOverflow { requested: usize, n_ctx: usize },

    /// A device that isn't there, or can't be used.
    #[error("device {device}: {reason}")]
    Device { device: String, reason: String },

    /// The caller's interrupt check asked to stop; nothing was changed.
    #[error("interrupted")]
    Interrupted,
}

impl Error {
    /// Wraps an operating system error for `file`.
    pub fn io(file: impl Into<PathBuf>) -> impl FnOnce(std::io::Error) -> Self {
        let file = file.into();
        move |source| Self::Io { file, source }
    }

    pub fn device(device: impl ToString, reason: impl ToString) -> Self {
        Self::Device { device: device.to_string(), reason: reason.to_string() }
    }

    /// What went wrong on GPU `number`.
    pub fn gpu(number: usize, reason: impl ToString) -> Self {
        Self::device(format_args!("cuda:{number}"), reason)
    }

    pub fn argument(name: &'static str, got: impl ToString, expected: impl ToString) -> Self {
        Self::Argument { name, got: got.to_string(), expected: expected.to_string() }
    }

    pub fn format(
        file: impl Into<PathBuf>,
        field: impl ToString,
        got: impl ToString,
        expected: impl ToString,
    ) -> Self {
        Self::Format {
            file: file.into(),
            field: field.to_string(),
            got: got.to_string(),
            expected: expected.to_string(),
        }
    }

    pub fn unsupported(
        file: impl Into<PathBuf>,
        field: impl ToString,
        got: impl ToString,
        expected: impl ToString,
    ) -> Self {
        Self::Unsupported {
            file: file.into(),
            field: field.to_string(),
            got: got.to_string(),
            expected: expected.to_string(),
        }
    }
}
