//! Which files an array may be read from or written over.

use std::fs::Metadata;
use std::path::Path;

use crate::error::{Error, Result};

/// Refuses what is not a regular file.
pub(super) fn check_regular(path: &Path, metadata: &Metadata) -> Result<()> {
    crate::mapped::refusal(metadata).map_or(Ok(()), |refusal| Err(bad(path, refusal)))
}

pub(super) fn bad(path: &Path, problem: String) -> Error {
    Error::BadFile {
        path: path.to_path_buf(),
        format: ".npy",
        problem,
    }
}
