//! Starts the ranks of a job on this host, and stays with them: passes signals on, ends ranks that
//! stay when another has failed, and returns the job's exit code. What `mpirun` does, without MPI.
//!
//! Rank 0 gets a socket to every other rank, by which they meet. Ranks are not in this process's
//! group, so that Ctrl-C reaches them once: through this process.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::error::{Error, Problem, Ranks, Result, Seconds};
use crate::launcher::{Launch, Launcher, OWN_JOB};
use crate::say::print_line;
use crate::stop;

/// How long ranks have to end after another has failed: only a stopped one needs more than one.
const ENDING: Duration = Duration::from_secs(3);
/// The exit code of ranks that were asked to stop and saved.
const EXIT_STOPPED: u8 = 75;
/// The exit code of a job that lost a rank.
const EXIT_LOST: u8 = 77;
/// How often to look at the clock. Signals and the end of a rank wake this process earlier.
const PERIOD: Duration = Duration::from_millis(200);
/// Signals that ask a job to stop.
const STOPS: [c_int; 5] = [
    libc::SIGINT,
    libc::SIGTERM,
    libc::SIGUSR1,
    libc::SIGHUP,
    libc::SIGQUIT,
];

/// Starts ranks, and stays with them until they end.
pub struct Spawner {
    /// The program's name, for messages.
    program: String,
    /// How long ranks have to save after a signal.
    grace: Duration,
    /// How long ranks have to end after one has ended well.
    timeout: Duration,
    /// Signals that this process waits for.
    awaited: libc::sigset_t,
    /// Signals that were blocked before.
    blocked: libc::sigset_t,
    /// The first signal that asked the job to stop.
    stopped_by: Option<c_int>,
}

/// Who started this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartedBy {
    /// No launcher, or one that started a single rank.
    NoLauncher,
    /// A [`Spawner`]: this process is a rank.
    Spawner,
    /// Another launcher, which started several ranks.
    Launcher,
}

/// Who started this process.
///
/// # Errors
/// If the variable of a [`Spawner`] is damaged.
pub fn started_by() -> Result<StartedBy> {
    let lookup = |name: &str| std::env::var(name).ok();
    let launch = Launch::detect(&lookup)?;
    Ok(match launch.or_else(|| Launch::of_mpi(&lookup)) {
        Some(launch) if launch.launcher == Launcher::Own => StartedBy::Spawner,
        Some(launch) if !launch.is_of_one() => StartedBy::Launcher,
        _ => StartedBy::NoLauncher,
    })
}

impl Spawner {
    /// From now on this thread waits for signals, also between two jobs. Call it while the process
    /// has one thread.
    pub fn new(program: &str, grace: Duration, timeout: Duration) -> Spawner {
        // What is ignored, as under nohup, stays so.
        let stops = STOPS
            .into_iter()
            .filter(|&signal| !stop::is_ignored(signal));
        let mut blocked = MaybeUninit::<libc::sigset_t>::zeroed();
        // SAFETY: sets of signals are plain data, of which all zeros is a value, and ours.
        let (awaited, blocked) = unsafe {
            let mut awaited = MaybeUninit::<libc::sigset_t>::zeroed().assume_init();
            libc::sigemptyset(&mut awaited);
            for signal in stops.chain([libc::SIGCHLD]) {
                libc::sigaddset(&mut awaited, signal);
            }
            libc::pthread_sigmask(libc::SIG_BLOCK, &awaited, blocked.as_mut_ptr());
            (awaited, blocked.assume_init())
        };
        Spawner {
            program: program.to_string(),
            grace,
            timeout,
            awaited,
            blocked,
            stopped_by: None,
        }
    }

    /// Whether a signal has asked the job to stop.
    pub fn was_stopped(&self) -> bool {
        self.stopped_by.is_some()
    }

    /// Waits for `duration`, or until a signal asks the job to stop.
    pub fn pause(&mut self, duration: Duration) {
        let end = Instant::now() + duration;
        while self.stopped_by.is_none() && Instant::now() < end {
            let signal = self.next_signal(end - Instant::now());
            self.stopped_by = signal.filter(|signal| STOPS.contains(signal));
        }
    }

    /// Runs `command` as `size` ranks until all have ended. Returns the exit code of the first that
    /// failed (128 and the signal's number if a signal ended it), or 0.
    pub fn run(&mut self, size: usize, command: &dyn Fn() -> Command) -> Result<u8> {
        let mut job = self.start(size, command)?;
        while job.collect() {
            if let Some((_, limit)) = job.end_by.filter(|&(by, _)| Instant::now() >= by) {
                self.kill(&mut job, limit);
            }
            match self.next_signal(PERIOD) {
                Some(signal) if STOPS.contains(&signal) => self.pass_on(signal, &mut job),
                _ => {}
            }
        }
        Ok(job.first_failure.unwrap_or(0))
    }

    /// Starts the ranks, each with its sockets.
    fn start(&self, size: usize, command: &dyn Fn() -> Command) -> Result<Running> {
        let mut job = Running {
            ranks: Vec::new(),
            first_failure: None,
            end_by: None,
            has_killed: false,
            grace: self.grace,
            timeout: self.timeout,
        };
        let mut sockets: Vec<Vec<OwnedFd>> = vec![Vec::new()];
        for rank in 1..size {
            let (hub, own) =
                UnixStream::pair().map_err(|error| cannot_start(rank, size, &error))?;
            sockets[0].push(hub.into());
            sockets.push(vec![own.into()]);
        }
        for (rank, sockets) in sockets.into_iter().enumerate() {
            let numbers: Vec<c_int> = sockets.iter().map(AsRawFd::as_raw_fd).collect();
            let texts: Vec<String> = numbers.iter().map(c_int::to_string).collect();
            let mut command = command();
            command.env(OWN_JOB, format!("{rank}/{size}:{}", texts.join(",")));
            command.stdin(Stdio::null()).process_group(0);
            let blocked = self.blocked;
            // SAFETY: between fork and exec only fcntl and sigprocmask are called, which are safe
            // there; the descriptors live until the child is started.
            unsafe {
                command.pre_exec(move || {
                    for &number in &numbers {
                        if libc::fcntl(number, libc::F_SETFD, 0) < 0 {
                            return Err(std::io::Error::last_os_error());
                        }
                    }
                    libc::sigprocmask(libc::SIG_SETMASK, &blocked, std::ptr::null_mut());
                    Ok(())
                });
            }
            let child = command.spawn();
            let child = child.map_err(|error| cannot_start(rank, size, &error))?;
            job.ranks.push(Some(child));
        }
        Ok(job)
    }

    /// Asks the ranks to save and end.
    fn pass_on(&mut self, signal: c_int, job: &mut Running) {
        let passed = match signal {
            libc::SIGINT | libc::SIGUSR1 | libc::SIGHUP => signal,
            _ => libc::SIGTERM,
        };
        match self.stopped_by {
            None => job.end_within(self.grace),
            // A second Ctrl-C ends all but stopped ranks at once.
            Some(libc::SIGINT) if signal == libc::SIGINT => job.end_within(ENDING),
            Some(_) => {}
        }
        self.stopped_by = self.stopped_by.or(Some(signal));
        for (_, child) in job.running() {
            // SAFETY: sends a signal to a child that has not been waited for, so its number is its
            // own.
            unsafe { libc::kill(child.id() as libc::pid_t, passed) };
        }
    }

    /// Ends the ranks that are left after `limit`.
    fn kill(&self, job: &mut Running, limit: Duration) {
        (job.end_by, job.has_killed) = (None, true);
        // Of a rank that failed the others have said who is missing.
        if job.first_failure.is_none() {
            let left: Vec<usize> = job.running().map(|(rank, _)| rank).collect();
            let (program, ranks, limit) = (&self.program, Ranks(&left), Seconds(limit));
            let note = match self.stopped_by {
                Some(_) => ": killed",
                None => {
                    " of another's end: killed; help: find out what stopped it (SIGSTOP, a debugger, \
                     a stuck disk or GPU)"
                }
            };
            print_line(&format!(
                "{program}: {ranks} did not end within {limit}{note}\n"
            ));
            job.first_failure = Some(self.stopped_by.map_or(EXIT_LOST, of_signal));
        }
        for (_, child) in job.running() {
            _ = child.kill();
        }
    }

    /// The next signal of those that this process waits for, within `limit`.
    fn next_signal(&self, limit: Duration) -> Option<c_int> {
        let limit = libc::timespec {
            tv_sec: limit.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: limit.subsec_nanos().into(),
        };
        // SAFETY: reads the set and the time, both of ours; null asks for no details.
        let signal = unsafe { libc::sigtimedwait(&self.awaited, std::ptr::null_mut(), &limit) };
        (signal > 0).then_some(signal)
    }
}

/// A job that runs.
struct Running {
    /// Each rank, None when it has ended.
    ranks: Vec<Option<Child>>,
    /// The exit code of the first rank that failed.
    first_failure: Option<u8>,
    /// When ranks that are left are killed, and how long they had by then.
    end_by: Option<(Instant, Duration)>,
    /// Whether they were.
    has_killed: bool,
    /// How long ranks have to save.
    grace: Duration,
    /// How long ranks have to end after one has ended well.
    timeout: Duration,
}

impl Running {
    fn running(&mut self) -> impl Iterator<Item = (usize, &mut Child)> {
        let all = self.ranks.iter_mut().enumerate();
        all.filter_map(|(rank, child)| Some((rank, child.as_mut()?)))
    }

    /// Ranks that are left after `limit` are killed.
    fn end_within(&mut self, limit: Duration) {
        let end_by = Instant::now() + limit;
        if self.end_by.is_none_or(|(earlier, _)| end_by < earlier) {
            self.end_by = Some((end_by, limit));
        }
    }

    /// Takes note of the ranks that have ended. Whether any are left.
    fn collect(&mut self) -> bool {
        let mut ended: Vec<ExitStatus> = Vec::new();
        for rank in &mut self.ranks {
            if let Some(Ok(Some(status))) = rank.as_mut().map(Child::try_wait) {
                *rank = None;
                ended.push(status);
            }
        }
        // Those that this process kills are no cause.
        ended.retain(|_| !self.has_killed);
        for status in ended {
            let signal = status.signal().map(of_signal);
            let code = signal.or(status.code().map(|code| code as u8));
            self.end_within(match code {
                Some(0) => self.timeout,
                // Another rank may still save.
                Some(EXIT_STOPPED) => self.grace,
                _ => ENDING,
            });
            let is_cause = match self.first_failure {
                None => code != Some(0),
                // Others may see the end of a killed rank before this process does.
                Some(EXIT_LOST) => signal.is_some(),
                Some(_) => false,
            };
            if is_cause {
                self.first_failure = code;
            }
        }
        self.ranks.iter().any(Option::is_some)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        for (_, child) in self.running() {
            _ = child.kill();
            _ = child.wait();
        }
    }
}

/// The exit code that shells give to the end by a signal.
fn of_signal(signal: c_int) -> u8 {
    128 + signal as u8
}

fn cannot_start(rank: usize, size: usize, error: &std::io::Error) -> Error {
    let action = format!("start rank {rank} of {size}");
    let help = "raise the limits on processes and open files (ulimit -u, -n), or start fewer ranks";
    Error::Limit(Problem::new(action, error, help))
}

#[cfg(test)]
mod tests;
