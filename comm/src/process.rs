//! Other processes: finding out whether they have ended, and ending them.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::time::Duration;

/// Another process. While this value lives its number is not mistaken for a later process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) pid: u32,
    /// None where the kernel or a sandbox has no pidfd; then only the number is known.
    handle: Option<OwnedFd>,
    /// It had already ended when it was opened.
    was_gone: bool,
}

/// When a process started, in ticks since the boot.
pub(crate) fn started_ticks(pid: u32) -> Option<u64> {
    field_of_stat(pid, 20)?.parse().ok()
}

/// Whether a process is stopped, by a signal or a debugger.
pub(crate) fn is_stopped(pid: u32) -> bool {
    let state = field_of_stat(pid, 1).unwrap_or_default();
    matches!(&*state, "T" | "t")
}

/// A field of a process's `stat`, counted from its name.
fn field_of_stat(pid: u32, index: usize) -> Option<String> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = stat.rsplit(')').next()?.split(' ');
    fields.nth(index).map(String::from)
}

/// For how long the process has run that started this one.
pub(crate) fn age_of_parent() -> Option<Duration> {
    let parent = started_ticks(Process::parent()?.pid)?;
    let uptime = std::fs::read_to_string("/proc/uptime").ok()?;
    let uptime: f64 = uptime.split(' ').next()?.parse().ok()?;
    // SAFETY: the call takes a number and touches nothing.
    let ticks_per_s = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
    Duration::try_from_secs_f64(uptime - parent as f64 / ticks_per_s as f64).ok()
}

/// Another rank of this host, which is another process.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) rank: usize,
    pub(crate) local_rank: usize,
    pub(crate) process: Process,
}

impl Process {
    pub(crate) fn open(pid: u32) -> Process {
        // SAFETY: the call takes two numbers.
        let handle = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let was_gone = handle < 0 && errno() == libc::ESRCH;
        // SAFETY: the kernel has just given this descriptor to this call alone.
        let handle = (handle >= 0).then(|| unsafe { OwnedFd::from_raw_fd(handle as i32) });
        Process {
            pid,
            handle,
            was_gone,
        }
    }

    /// The process that started this one; None if that is outside of this PID namespace.
    pub(crate) fn parent() -> Option<Process> {
        // SAFETY: getppid takes nothing, touches nothing and cannot fail.
        let pid = unsafe { libc::getppid() } as u32;
        (pid != 0).then(|| Process::open(pid))
    }

    pub(crate) fn has_ended(&self) -> bool {
        wait_for_end(&[self], Duration::ZERO).is_some()
    }

    fn has_ended_by_number(&self) -> bool {
        // SAFETY: signal 0 sends nothing: the call only says whether the process exists.
        self.was_gone
            || (self.handle.is_none()
                && unsafe { libc::kill(self.pid as libc::pid_t, 0) != 0 && errno() == libc::ESRCH })
    }

    /// Kills it. Without a handle it is left alone: its number may be another process by now.
    pub(crate) fn kill(&self) {
        if let Some(handle) = &self.handle {
            let (fd, none) = (handle.as_raw_fd(), std::ptr::null::<libc::siginfo_t>());
            // SAFETY: a descriptor of ours, and no further information to read.
            unsafe { libc::syscall(libc::SYS_pidfd_send_signal, fd, libc::SIGKILL, none, 0) };
        }
    }
}

/// Sleeps until one of `processes` has ended, at most `timeout`. Returns its index.
pub(crate) fn wait_for_end(processes: &[&Process], timeout: Duration) -> Option<usize> {
    let entry = |process: &&Process| libc::pollfd {
        // poll ignores negative descriptors.
        fd: process.handle.as_ref().map_or(-1, AsRawFd::as_raw_fd),
        events: libc::POLLIN,
        revents: 0,
    };
    let mut polled: Vec<libc::pollfd> = processes.iter().map(entry).collect();
    let timeout_ms = libc::c_int::try_from(timeout.as_millis()).unwrap_or(libc::c_int::MAX);
    let count = polled.len() as libc::nfds_t;
    // SAFETY: the call reads and writes `count` entries. If interrupted it leaves all not ready.
    unsafe { libc::poll(polled.as_mut_ptr(), count, timeout_ms) };
    let has_ended =
        |index: &usize| polled[*index].revents != 0 || processes[*index].has_ended_by_number();
    (0..processes.len()).find(has_ended)
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};
    use std::time::Instant;

    use super::*;

    fn sleeper() -> std::process::Child {
        let mut command = Command::new("sleep");
        command.arg("600").stdin(Stdio::null()).spawn().unwrap()
    }

    #[test]
    fn the_end_of_a_process_wakes_the_waiter() {
        let (mut child, mut other) = (sleeper(), sleeper());
        let [process, running] = [Process::open(child.id()), Process::open(other.id())];
        assert!(!process.has_ended());
        assert!(process.handle.is_some(), "this kernel has pidfd_open");
        process.kill();
        let started = Instant::now();
        let ended = wait_for_end(&[&running, &process], Duration::from_secs(3600));
        assert_eq!(ended, Some(1));
        assert!(process.has_ended() && started.elapsed() < Duration::from_secs(60));
        child.wait().unwrap();
        running.kill();
        other.wait().unwrap();
        // A process that had ended before it was opened.
        assert!(Process::open(u32::MAX >> 2).has_ended());
    }

    #[test]
    fn without_a_handle_a_process_is_watched_by_number_and_never_killed() {
        let mut child = sleeper();
        let process = Process {
            pid: child.id(),
            handle: None,
            was_gone: false,
        };
        assert!(!process.has_ended());
        process.kill();
        assert!(!process.has_ended());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.has_ended());
    }
}
