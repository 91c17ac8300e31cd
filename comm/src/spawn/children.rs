//! Ranks that are children of this process.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

use super::signals::Signals;
use crate::error::{Error, Problem};
use crate::launcher::OWN_JOB;
use crate::roster::Roster;

/// The ranks that this process has started and that run.
#[derive(Default)]
pub(super) struct Children {
    running: Vec<(usize, Child)>,
}

impl Children {
    /// Starts `rank` of `size`. By `mark` (`launcher::OWN_JOB`), `sockets` has its sockets to the
    /// others, rank 0's listener, or the roster. Returns its standard output if `command` has a
    /// pipe there.
    pub(super) fn start(
        &mut self,
        rank: usize,
        size: usize,
        mark: char,
        sockets: &[OwnedFd],
        mut command: Command,
    ) -> Result<Option<ChildStdout>, Error> {
        let numbers: Vec<c_int> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
        let texts: Vec<String> = numbers.iter().map(c_int::to_string).collect();
        command.env(OWN_JOB, format!("{rank}/{size}{mark}{}", texts.join(",")));
        command.stdin(Stdio::null());
        Signals::prepare(&mut command, numbers);
        let child = command.spawn();
        let mut child = child.map_err(|error| cannot_start(rank, size, &error))?;
        let output = child.stdout.take();
        self.running.push((rank, child));
        Ok(output)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    /// As `start`, for a rank of this roster.
    pub(super) fn start_at(
        &mut self,
        roster: &Roster,
        [rank, size]: [usize; 2],
        command: Command,
    ) -> Result<Option<ChildStdout>, Error> {
        let page = roster.duplicate();
        let page = page.map_err(|error| cannot_start(rank, size, &error))?;
        roster.clear(rank);
        let output = self.start(rank, size, '%', &[page], command)?;
        let started = self.running.last().map(|(_, child)| child.id());
        started.inspect(|pid| roster.take(rank, *pid));
        Ok(output)
    }

    /// Sends all of them a signal.
    pub(super) fn signal(&self, signal: c_int) {
        for (_, child) in &self.running {
            // SAFETY: sends a signal to a child that has not been waited for, so its number is its
            // own.
            unsafe { libc::kill(child.id() as libc::pid_t, signal) };
        }
    }

    /// Those that have ended since the last call, and how.
    pub(super) fn collect(&mut self) -> Vec<(usize, ExitStatus)> {
        let mut ended = Vec::new();
        self.running.retain_mut(|(rank, child)| {
            let status = child.try_wait().ok().flatten();
            ended.extend(status.map(|status| (*rank, status)));
            status.is_none()
        });
        ended
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for (_, child) in &mut self.running {
            _ = child.kill();
            _ = child.wait();
        }
    }
}

pub(super) fn cannot_start(rank: usize, size: usize, error: &io::Error) -> Error {
    let action = format!("start rank {rank} of {size}");
    let help = "raise the limits on processes and open files (ulimit -u, -n), or start fewer ranks";
    Error::Limit(Problem::new(action, error, help))
}
