//! A job that has ended: its exit code, and what it said.

use std::fmt;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

/// A job that has ended.
pub(crate) struct Ended {
    pub(super) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Ended {
    /// As the program, or `mpirun`, gave it; none if a signal ended it.
    pub(crate) fn exit_code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The signal that ended it.
    pub(crate) fn signal(&self) -> Option<i32> {
        self.status.signal()
    }

    /// The lines in which the job says why it ended.
    pub(crate) fn causes(&self) -> Vec<&str> {
        self.stderr
            .lines()
            .filter(|line| line.starts_with("ddp-train:"))
            .collect()
    }

    /// It did what it should.
    #[track_caller]
    pub(crate) fn assert_well(&self) {
        assert_eq!(self.exit_code(), Some(0), "{self}");
        assert!(self.causes().is_empty(), "{self}");
    }

    /// It ended with this code and said why in one line. That line.
    #[track_caller]
    pub(crate) fn assert_fails(&self, exit_code: i32) -> &str {
        assert_eq!(self.exit_code(), Some(exit_code), "{self}");
        assert_eq!(self.stdout, "", "{self}");
        let [cause] = self.causes()[..] else {
            panic!("one line says why: {self}")
        };
        cause
    }
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}\n{}\n{}",
            self.status,
            self.stdout.trim(),
            self.stderr.trim()
        )
    }
}
