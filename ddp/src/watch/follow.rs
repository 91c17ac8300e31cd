//! A record that is read as it grows. A run that resumes cuts it: then it is read again.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use crate::error::Result;
use crate::record::EVENTS_FILE;
use crate::report::read::{Run, RunReader};

/// A run whose record is followed.
pub(super) struct Followed {
    pub(super) folder: PathBuf,
    reader: RunReader,
    /// Why the record cannot be read at the moment.
    pub(super) problem: Option<String>,
}

impl Followed {
    /// The run in `folder`.
    pub(super) fn open(folder: &Path) -> Result<Followed> {
        // Refuses what is no record, and says how to fix it.
        Run::read(folder)?;
        let mut followed = Followed {
            folder: folder.to_path_buf(),
            reader: RunReader::new(&folder.join(EVENTS_FILE)),
            problem: None,
        };
        followed.refresh();
        Ok(followed)
    }

    /// Reads what was added. A record that cannot be read leaves what is known.
    pub(super) fn refresh(&mut self) {
        self.problem = self.reader.refresh().err().map(|error| error.to_string());
    }

    pub(super) fn run(&self) -> &Run {
        self.reader.run()
    }

    /// How long ago the record was written to.
    pub(super) fn age(&self) -> Option<Duration> {
        let written = fs::metadata(self.folder.join(EVENTS_FILE)).and_then(|file| file.modified());
        SystemTime::now().duration_since(written.ok()?).ok()
    }
}
