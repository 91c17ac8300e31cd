//! Ranks that are child processes of this one.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use super::signals::Signals;
use crate::error::{Error, Problem};
use crate::launcher::OWN_JOB;
use crate::membership::packets::Packets;
use crate::membership::wire::{ToLauncher, ToRank};
use crate::process::is_stopped;

/// How often to look whether ranks are stopped.
const LOOKED_EVERY: Duration = Duration::from_millis(250);

/// What a process of a rank has said: rank, process, what.
type Word = (usize, u32, ToLauncher);

/// What a process of a rank has done.
#[derive(Debug, PartialEq)]
pub(super) enum RankNews {
    Said(ToLauncher),
    Ended(ExitStatus),
}

/// The ranks that this process has started and that run.
pub(super) struct Children {
    running: Vec<RunningRank>,
    sender: Sender<Word>,
    words: Receiver<Word>,
    /// When stopped ones were last looked for.
    looked: Duration,
    /// Whether they end with this process, also if it is killed.
    die_with_this: bool,
}

struct RunningRank {
    rank: usize,
    /// The number of its process in the job.
    process: u32,
    child: Child,
    is_stopped: bool,
    /// Through it they talk.
    socket: Arc<Packets>,
    /// Listens to it.
    listener: JoinHandle<()>,
}

impl Children {
    /// `die_with_this`: they end with this process, also if it is killed.
    pub(super) fn new(die_with_this: bool) -> Children {
        let (sender, words) = mpsc::channel();
        Children {
            running: Vec::new(),
            sender,
            words,
            looked: Duration::ZERO,
            die_with_this,
        }
    }

    /// Starts process `process` as `rank` of `size`. Returns its standard output if `command` has a
    /// pipe there.
    pub(super) fn start(
        &mut self,
        (rank, process, size): (usize, u32, usize),
        mut command: Command,
    ) -> Result<Option<ChildStdout>, Error> {
        let failed = |error| cannot_start(rank, size, &error);
        let (own, theirs) = Packets::pair().map_err(failed)?;
        let (own, sender) = (Arc::new(own), self.sender.clone());
        let socket = theirs.as_raw_fd();
        command.env(OWN_JOB, format!("{rank}/{size}:{socket}"));
        command.stdin(Stdio::null());
        Signals::prepare(&mut command, socket, self.die_with_this);
        let mut child = command.spawn().map_err(failed)?;
        let output = child.stdout.take();
        let heard = Arc::clone(&own);
        let listen = move || {
            while let Some(said) = heard.receive() {
                _ = sender.send((rank, process, said));
                Signals::wake();
            }
        };
        let listener = Builder::new().name("rank".into()).spawn(listen);
        let listener = listener.map_err(|error| {
            _ = child.kill();
            _ = child.wait();
            failed(error)
        })?;
        self.running.push(RunningRank {
            rank,
            process,
            child,
            is_stopped: false,
            socket: own,
            listener,
        });
        Ok(output)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty()
    }

    fn find(&mut self, rank: usize, process: u32) -> Option<&mut RunningRank> {
        let mut all = self.running.iter_mut();
        all.find(|it| (it.rank, it.process) == (rank, process))
    }

    /// Tells a process something, perhaps with sockets, if it still runs.
    pub(super) fn tell(&mut self, rank: usize, process: u32, message: &ToRank, fds: &[OwnedFd]) {
        let Some(it) = self.find(rank, process) else {
            return;
        };
        let is_sent = it.socket.send_with(message, fds, false);
        if !is_sent {
            // It has not listened for minutes.
            _ = it.child.kill();
        }
    }

    /// Tells all of them that the launcher works, as this process had asked so long ago.
    pub(super) fn show_life(&self, asked_before: Duration) {
        let sockets = self.running.iter().map(|it| &it.socket);
        sockets.for_each(|socket| _ = socket.send(&ToRank::Alive(asked_before), false));
    }

    /// Kills a process, if it still runs.
    pub(super) fn kill(&mut self, rank: usize, process: u32) {
        let found = self.find(rank, process).into_iter();
        found.for_each(|it| _ = it.child.kill());
    }

    /// Sends all of them a signal.
    pub(super) fn signal(&self, signal: c_int) {
        for it in &self.running {
            // SAFETY: sends a signal to a child that has not been waited for, so its number is its
            // own.
            unsafe { libc::kill(it.child.id() as libc::pid_t, signal) };
        }
    }

    /// Those that are stopped (SIGSTOP, a debugger) since the last call, or go on: rank, process
    /// and which of the two.
    pub(super) fn stopped(&mut self, now: Duration) -> Vec<(usize, u32, bool)> {
        if now < self.looked + LOOKED_EVERY {
            return Vec::new();
        }
        self.looked = now;
        let look = |it: &mut RunningRank| {
            let is_stopped = is_stopped(it.child.id());
            let before = std::mem::replace(&mut it.is_stopped, is_stopped);
            (before != is_stopped).then_some((it.rank, it.process, is_stopped))
        };
        self.running.iter_mut().filter_map(look).collect()
    }

    /// What they have said, and which have ended, since the last call.
    pub(super) fn news(&mut self) -> Vec<(usize, u32, RankNews)> {
        let ended = self.collect();
        in_order(self.words.try_iter().collect(), ended)
    }

    /// Those that have ended since the last call, and how. `words` then has all that they have
    /// said.
    fn collect(&mut self) -> Vec<(usize, u32, ExitStatus)> {
        let has_ended = |it: &mut RunningRank| matches!(it.child.try_wait(), Ok(Some(_)));
        let ended = self.running.extract_if(.., |it| has_ended(it));
        let ended = ended.filter_map(|mut it| {
            let status = it.child.try_wait().ok().flatten()?;
            it.socket.stop_listening();
            _ = it.listener.join();
            Some((it.rank, it.process, status))
        });
        ended.collect()
    }
}

impl Drop for Children {
    fn drop(&mut self) {
        for it in &mut self.running {
            _ = it.child.kill();
            _ = it.child.wait();
        }
    }
}

/// Orders news of one moment. A rank may miss one that has ended: the launcher must hear of the end
/// first. What an ended rank has said comes before its own end, and what it misses after other
/// ends.
fn in_order(words: Vec<Word>, ended: Vec<(usize, u32, ExitStatus)>) -> Vec<(usize, u32, RankNews)> {
    let has_ended = |word: &Word| ended.iter().any(|it| (it.0, it.1) == (word.0, word.1));
    let (of_ended, others): (Vec<Word>, Vec<Word>) = words.into_iter().partition(has_ended);
    let is_miss = |word: &Word| matches!(word.2, ToLauncher::Misses { .. });
    let (misses, first): (Vec<Word>, Vec<Word>) = of_ended.into_iter().partition(is_miss);
    let misses_some = |end: &(usize, u32, ExitStatus)| misses.iter().any(|it| it.1 == end.1);
    let (late, early): (Vec<_>, Vec<_>) = ended.into_iter().partition(misses_some);
    let said = |(rank, process, said)| (rank, process, RankNews::Said(said));
    let end = |(rank, process, status)| (rank, process, RankNews::Ended(status));
    let first = first
        .into_iter()
        .map(said)
        .chain(early.into_iter().map(end));
    let then = misses
        .into_iter()
        .map(said)
        .chain(late.into_iter().map(end));
    first
        .chain(then)
        .chain(others.into_iter().map(said))
        .collect()
}

pub(super) fn cannot_start(rank: usize, size: usize, error: &io::Error) -> Error {
    let action = format!("start rank {rank} of {size}");
    let help = match error.raw_os_error() {
        Some(libc::ENOMEM) => "free memory, or raise the limit on virtual memory (ulimit -v)",
        Some(libc::EMFILE) => "raise the limit on open files (ulimit -n), or start fewer ranks",
        // Also of a thread without memory for its stack.
        Some(libc::EAGAIN) => {
            "raise the limits on processes (ulimit -u) and on virtual memory (ulimit -v), or start \
             fewer ranks"
        }
        _ => "check that the program and its folder can still be read",
    };
    Error::Limit(Problem::new(action, error, help))
}

#[cfg(test)]
mod tests;
