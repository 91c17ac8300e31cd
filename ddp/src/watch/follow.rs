//! A run whose metrics log is read as it grows.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::error::{Error, Result};
use crate::metrics::Run;
use crate::metrics_log::EVENTS_FILE;

/// A run whose log is read as it grows. A run that resumes cuts it: then it is read again.
pub(super) struct Followed {
    pub(super) folder: PathBuf,
    pub(super) run: Run,
    /// Why the log cannot be read at the moment.
    pub(super) problem: Option<String>,
}

impl Followed {
    /// Reads what was added. A log that cannot be read leaves what is known.
    pub(super) fn refresh(&mut self) {
        self.problem = self.run.refresh().err().map(|error| error.to_string());
    }

    /// How long ago the log was written to.
    pub(super) fn age(&self) -> Option<Duration> {
        let written = fs::metadata(self.folder.join(EVENTS_FILE)).and_then(|file| file.modified());
        SystemTime::now().duration_since(written.ok()?).ok()
    }
}

/// The run in `folder`. Its log must be there and have a start.
pub(super) fn open(folder: &Path) -> Result<Followed> {
    if !folder.join(EVENTS_FILE).exists() {
        return Err(Error::Usage(format!(
            "watch {}: expected the folder of a run, which has {EVENTS_FILE}, got none; help: give \
             what its --out was, once it has begun",
            folder.display()
        )));
    }
    Ok(Followed {
        folder: folder.to_path_buf(),
        run: Run::read(folder)?,
        problem: None,
    })
}
