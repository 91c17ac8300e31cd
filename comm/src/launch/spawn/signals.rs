//! The signals that a process waits for while it looks after ranks.

use std::ffi::c_int;
use std::os::unix::process::{CommandExt, parent_id};
use std::process::Command;
use std::time::Duration;

use crate::launch::stop::{self, STOPS};
use crate::launcher::OWN_JOB;

/// If `DDP_PARENT` is the number of the process that started this one, the kernel asks this one to
/// stop when that ends. Python sets it, so that no run outlives a notebook. Ranks inherit the
/// variable, but their parent is the launcher.
pub fn stop_with_parent() {
    let parent = std::env::var("DDP_PARENT").ok();
    let Some(parent) = parent.and_then(|number| number.parse::<u32>().ok()) else {
        return;
    };
    if std::env::var_os(OWN_JOB).is_some() {
        return;
    }
    // SAFETY: sets an attribute of this process.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGTERM) };
    if parent_id() != parent {
        // It had ended before.
        // SAFETY: sends this process a signal.
        unsafe { libc::kill(libc::getpid(), libc::SIGTERM) };
    }
}

/// Signals that are blocked, so that one thread can wait for them.
#[derive(Clone, Copy)]
pub(super) struct Signals(libc::sigset_t);

impl Signals {
    /// Blocks the signals that ask to stop, and that of a child's end. Call it while the process
    /// has one thread.
    pub(super) fn block() -> Signals {
        // What is ignored, as under nohup, stays so.
        let stops = STOPS
            .into_iter()
            .filter(|&signal| !stop::is_ignored(signal));
        let awaited = stop::set_of(stops.chain([libc::SIGCHLD]));
        stop::mask(libc::SIG_BLOCK, &awaited);
        Signals(awaited)
    }

    /// The next of these signals, within `limit`.
    pub(super) fn next(&self, limit: Duration) -> Option<c_int> {
        let limit = libc::timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        // SAFETY: reads the set and the time, both of ours; null asks for no details.
        let signal = unsafe { libc::sigtimedwait(&self.0, std::ptr::null_mut(), &limit) };
        (signal > 0).then_some(signal)
    }

    /// Wakes the thread that waits, as the end of a child does.
    pub(super) fn wake() {
        // SAFETY: sends this process a signal, which it blocks.
        unsafe { libc::kill(libc::getpid(), libc::SIGCHLD) };
    }

    /// Lets `command` inherit this descriptor, and receive the signal of a child's end. Signals
    /// that ask to stop stay blocked: they wait until the rank can handle them (`stop::hear`).
    /// Its process is in no group with this one, so that Ctrl-C reaches only this one. One that
    /// `dies_with_this` thread is killed by the kernel when that ends.
    pub(super) fn prepare(command: &mut Command, inherited: c_int, dies_with_this: bool) {
        let ends = stop::set_of([libc::SIGCHLD]);
        command.process_group(0);
        // SAFETY: only fcntl, prctl and pthread_sigmask are called between fork and exec, which are
        // safe there; the caller keeps the descriptor open until the child is started.
        unsafe {
            command.pre_exec(move || {
                if libc::fcntl(inherited, libc::F_SETFD, 0) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                if dies_with_this && libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                stop::mask(libc::SIG_UNBLOCK, &ends);
                Ok(())
            });
        }
    }
}
