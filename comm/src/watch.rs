//! One thread a rank that notices when the job fails while the others compute: it sleeps on the processes of the other ranks
//! of this host and on the launcher's, and looks at the board and for news of other hosts ten times a second.
//!
//! What it covers: on a host, every way in which a rank or the launcher can end. Between hosts, every failure that a rank
//! of the other host lives to report; a host that falls silent as a whole is noticed by the launcher, or by the deadline
//! of the next collective.

#![cfg_attr(not(feature = "mpi"), allow(dead_code, reason = "only MPI brings processes together"))]

mod sigterm;

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use self::sigterm::Caught;
use crate::error::Cause;
use crate::failure::{Failure, GRACE, Peer};
use crate::stop::is_catching;

/// How often the watch looks up by itself.
const PERIOD: Duration = Duration::from_millis(100);
/// The exit code of a job that lost a rank.
const EXIT_PEER_LOST: u8 = 77;

/// Another process, for as long as this value lives: its number is not taken for that of a later process.
#[derive(Debug)]
pub(crate) struct Process {
    pid: u32,
    /// None where the kernel or a sandbox does not give one; then its number is all there is.
    handle: Option<OwnedFd>,
    /// It had ended before it could be opened.
    was_gone: bool,
}

impl Process {
    pub(crate) fn open(pid: u32) -> Process {
        // SAFETY: the call takes two numbers.
        let handle = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let was_gone = handle < 0 && io::Error::last_os_error().raw_os_error() == Some(libc::ESRCH);
        // SAFETY: the kernel has just given this descriptor to us alone.
        let handle = (handle >= 0).then(|| unsafe { OwnedFd::from_raw_fd(handle as i32) });
        Process { pid, handle, was_gone }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.pid
    }

    pub(crate) fn has_ended(&self) -> bool {
        if self.was_gone {
            return true;
        }
        match &self.handle {
            Some(handle) => ready(&[handle.as_raw_fd()], Duration::ZERO)[0],
            // SAFETY: signal 0 is none: the call only says whether the process is there.
            None => unsafe { libc::kill(self.pid as libc::pid_t, 0) != 0 && errno() == libc::ESRCH },
        }
    }

    /// Ends it. Without a handle it is left alone, for its number may be another's by now.
    pub(crate) fn kill(&self) {
        if let Some(handle) = &self.handle {
            let (fd, none) = (handle.as_raw_fd(), std::ptr::null::<libc::siginfo_t>());
            // SAFETY: a descriptor of ours, and no further information to read.
            unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, libc::SIGKILL, none, 0) };
        }
    }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// Sleeps until one of `descriptors` is ready, or `timeout` has passed. Which are.
fn ready(descriptors: &[i32], timeout: Duration) -> Vec<bool> {
    let mut polled: Vec<libc::pollfd> =
        descriptors.iter().map(|&fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 }).collect();
    let timeout = libc::c_int::try_from(timeout.as_millis()).unwrap_or(libc::c_int::MAX);
    // SAFETY: the call reads and writes as many entries as the vector has. Interrupted, it leaves all as not ready.
    unsafe { libc::poll(polled.as_mut_ptr(), polled.len() as libc::nfds_t, timeout) };
    polled.iter().map(|entry| entry.revents != 0).collect()
}

/// The watch of one rank. Ends when dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    /// Wakes the thread, which then ends.
    stop: OwnedFd,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Watches over the processes that `failure` knows.
    pub(crate) fn start(failure: Arc<Failure>) -> io::Result<Watch> {
        // SAFETY: two numbers.
        let stop = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        if stop < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel has just given this descriptor to us alone.
        let stop = unsafe { OwnedFd::from_raw_fd(stop) };
        let stopped = stop.try_clone()?;
        let thread = std::thread::Builder::new().name("watch".into()).spawn(move || watch(&failure, &stopped))?;
        Ok(Watch { stop, thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let one = 1u64.to_ne_bytes();
        // SAFETY: a descriptor of ours, and the eight bytes that are there.
        unsafe { libc::write(self.stop.as_raw_fd(), one.as_ptr().cast(), one.len()) };
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

fn watch(failure: &Failure, stop: &OwnedFd) {
    let mut sigterm = Caught::new();
    let mut watched: Vec<&Peer> = failure.peers.iter().collect();
    loop {
        let processes = watched.iter().map(|peer| &peer.process).chain(&failure.launcher);
        let handles = processes.filter_map(|process| process.handle.as_ref());
        let own = std::iter::once(stop.as_raw_fd()).chain(sigterm.as_ref().map(|caught| caught.wake.as_raw_fd()));
        let descriptors: Vec<i32> = own.chain(handles.map(AsRawFd::as_raw_fd)).collect();
        if ready(&descriptors, PERIOD)[0] {
            return;
        }
        if let Some(cause) = news(failure) {
            return leave(failure, &cause, stop);
        }
        if let Some(lost) = lost(failure, &mut watched) {
            // At once: mpirun, which sees it too, is about to end this rank.
            failure.report(&lost);
        } else if let Some(caught) = sigterm.take_if(|caught| has_come(caught)) {
            return asked_to_end(failure, caught, stop);
        }
    }
}

/// Whether SIGTERM has come and nobody stops because of it, in order, when there is time.
fn has_come(caught: &Caught) -> bool {
    let has_come = ready(&[caught.wake.as_raw_fd()], Duration::ZERO)[0];
    if has_come && is_catching() {
        caught.forget();
        return false;
    }
    has_come
}

/// Why the job ends, if it does, as this host or another says.
fn news(failure: &Failure) -> Option<Cause> {
    #[cfg(feature = "mpi")]
    if let Some(lifeline) = &failure.lifeline {
        lifeline.listen(&failure.board);
    }
    failure.cause()
}

/// SIGTERM has come, and no rank of this host has ended. If one of another host has, news of it is on its way; else all were
/// asked to end, and those who end first have not failed.
fn asked_to_end(failure: &Failure, caught: Caught, stop: &OwnedFd) {
    let started = Instant::now();
    while started.elapsed() < GRACE {
        if ready(&[stop.as_raw_fd()], Duration::from_millis(20))[0] {
            return;
        }
        if let Some(cause) = news(failure) {
            return leave(failure, &cause, stop);
        }
    }
    caught.obey();
}

/// Why the job fails if a process has ended that should not have.
fn lost(failure: &Failure, watched: &mut Vec<&Peer>) -> Option<Cause> {
    let cause = |rank: usize, text: String| Cause { rank, host: failure.host.clone(), exit_code: EXIT_PEER_LOST, text };
    let ended = watched.iter().position(|peer| peer.process.has_ended());
    if let Some(index) = ended {
        let peer = watched.swap_remove(index);
        // It has ended: whether it left in order will not change any more.
        let text = format!(
            "process {} ended without a word: killed from outside (kill -9, out of memory), crashed, or left before the \
             others. The kernel's log (dmesg) tells of kills for lack of memory and of crashes, not of a kill -9.",
            peer.process.pid()
        );
        return (!failure.board.has_left(peer.local_rank)).then(|| cause(peer.rank, text));
    }
    let launcher = failure.launcher.as_ref().filter(|launcher| launcher.has_ended())?;
    Some(cause(failure.rank, format!("the launcher of this job (process {}) has ended", launcher.pid())))
}

/// The job has failed: gives this rank a moment to leave by itself, then ends it.
fn leave(failure: &Failure, cause: &Cause, stop: &OwnedFd) {
    if !ready(&[stop.as_raw_fd()], GRACE)[0] {
        failure.end(cause.exit_code);
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn sleeper() -> std::process::Child {
        Command::new("sleep").arg("600").stdin(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn the_end_of_a_process_is_seen_at_once() {
        let mut child = sleeper();
        let process = Process::open(child.id());
        assert!(!process.has_ended());
        let descriptor = process.handle.as_ref().expect("this kernel has pidfd_open").as_raw_fd();
        process.kill();
        let started = Instant::now();
        assert_eq!(ready(&[descriptor], Duration::from_secs(60)), [true]);
        assert!(process.has_ended() && started.elapsed() < Duration::from_secs(10));
        child.wait().unwrap();
        // Its number may now be another's: a handle opened too late says that it is gone.
        assert!(Process::open(u32::MAX >> 2).has_ended());
    }

    #[test]
    fn without_a_handle_the_number_must_do() {
        let mut child = sleeper();
        let process = Process { pid: child.id(), handle: None, was_gone: false };
        assert!(!process.has_ended());
        process.kill();
        assert!(!process.has_ended(), "a number alone is not enough to kill by");
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.has_ended());
    }
}
