//! Waits, numbered over the life of the process in call order, so that one can be ignored and all
//! can be listed: a wait whose absence goes unnoticed is redundant or untested.

use std::fs::File;
use std::io::Write;

use crate::config::Config;
use crate::report::Stack;

/// How many waits there were, and where they are listed.
#[derive(Debug, Default)]
pub(super) struct Waits {
    counted: u64,
    list: Option<File>,
}

impl Waits {
    /// Counts a wait, and says whether it is the ignored one.
    pub(super) fn is_ignored(&mut self, config: &Config, function: &'static str) -> bool {
        self.counted += 1;
        let number = self.counted;
        if let Some(path) = &config.count_waits {
            if number == 1 {
                // One file a process: ranks on one host would overwrite each other's.
                let path = path
                    .to_string_lossy()
                    .replace("%p", &std::process::id().to_string());
                match File::create(&path) {
                    Ok(file) => self.list = Some(file),
                    Err(error) => {
                        eprintln!("simcuda: SIMCUDA_COUNT_WAITS={path}: cannot be written: {error}")
                    }
                }
            }
            if let Some(file) = &mut self.list {
                let stack = Stack::capture();
                // Written at once: the list must survive a kill or a finding.
                let line = format!("{number} {function} {}\n", stack.frames().join(" < "));
                if let Err(error) = file.write_all(line.as_bytes()) {
                    eprintln!("simcuda: SIMCUDA_COUNT_WAITS: cannot be written: {error}");
                    self.list = None;
                }
            }
        }
        let ignored = config.ignore_wait == Some(number);
        if ignored {
            eprintln!("simcuda: ignoring wait {number}, {function}");
        }
        ignored
    }
}
