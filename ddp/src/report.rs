//! `OUT/report.html`: one file that shows a run, made from its record.

use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// Makes the report of the run in `folder`, from what its record says. Returns the file.
pub fn make(_folder: &Path) -> Result<PathBuf> {
    Err(Error::Internal("report is not there yet".into()))
}
