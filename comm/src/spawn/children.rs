//! Ranks that are children of this process.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::time::Duration;

use super::signals::Signals;
use super::task::ENDING;
use crate::error::{Error, Problem, Ranks, Seconds};
use crate::launcher::OWN_JOB;
use crate::process::{Process, is_stopped};
use crate::roster::Roster;
use crate::say::print_line;

/// How often to look whether ranks are stopped.
const LOOKED_EVERY: Duration = Duration::from_millis(250);

/// The ranks that this process has started and that run.
#[derive(Default)]
pub(super) struct Children {
    running: Vec<(usize, Child)>,
    /// Ranks that are stopped, each with its process and when that was first seen.
    stopped: Vec<(usize, u32, Duration)>,
    /// When they were last looked for.
    looked: Duration,
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

    /// Kills ranks that have been stopped (SIGSTOP, a debugger) for three timeouts without a break,
    /// or, once the job ends, for a moment. Also those that have not joined the others yet. Returns
    /// whether it has killed any.
    pub(super) fn kill_stopped(
        &mut self,
        program: &str,
        now: Duration,
        timeout: Duration,
        roster: Option<&Roster>,
    ) -> bool {
        if now >= self.looked + LOOKED_EVERY {
            self.looked = now;
            let all = self.running.iter().map(|(rank, child)| (*rank, child.id()));
            let since = |(rank, pid)| {
                let before = self.stopped.iter().find(|it| it.1 == pid);
                (rank, pid, before.map_or(now, |it| it.2))
            };
            let stopped = all.filter(|&(_, pid)| is_stopped(pid)).map(since);
            self.stopped = stopped.collect();
        }
        let limit = match roster.and_then(Roster::over) {
            Some(_) => ENDING,
            _ => timeout.saturating_mul(3),
        };
        let late = self.stopped.extract_if(.., |it| now - it.2 >= limit);
        let late: Vec<(usize, u32)> = late.map(|(rank, pid, _)| (rank, pid)).collect();
        if late.is_empty() {
            return false;
        }
        let mut ranks: Vec<usize> = late.iter().map(|it| it.0).collect();
        ranks.sort_unstable();
        print_line(&format!(
            "{program}: killed {}, stopped for {} or longer; help: look for a debugger, or for what \
             sends SIGSTOP\n",
            Ranks(&ranks),
            Seconds(limit),
        ));
        roster.iter().for_each(|it| it.leave_out(&late, false));
        // They are children that have not been waited for, so the numbers are theirs.
        late.iter().for_each(|it| Process::open(it.1).kill());
        true
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

#[cfg(test)]
mod tests;
