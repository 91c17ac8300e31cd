//! Starts the ranks of a job, on this host or on several, and stays until they end: passes signals
//! on, ends the other ranks when one has failed, and returns the job's exit code. It does what
//! `mpirun` does, without MPI.
//!
//! Each rank has a socket to the process that started it, through which it says that it waits for
//! the others. On one host the launcher then connects the first rank to every other by sockets. On
//! several hosts an agent on each starts the ranks (`agent.rs`), which connect over TCP. Ranks are
//! not in this process's group, so that Ctrl-C reaches them once: through this process. They start
//! with the signals to stop blocked, and unblock them when they can handle them (`stop::hear`).

use std::ffi::c_int;
use std::sync::mpsc;
use std::time::{Duration, Instant};

pub use self::agent::serve;
pub use self::hosts::{HostList, ListedHost};
use self::job::{Job, JobLimits};
pub use self::listener::serve_at;
pub use self::place::JobPlace;
use self::signals::Signals;
pub use self::signals::stop_with_parent;
use self::task::PERIOD;
pub use self::task::{Losses, RankCommand};
use crate::error::Result;
use crate::launch::stop::{self, STOPS};
use crate::launcher::{Launch, Launcher};
use crate::membership::decide::{EXIT_STOPPED, JobEvent, of_signal};

mod agent;
mod children;
mod hosts;
mod job;
mod lease;
mod listener;
mod place;
mod remote;
mod signals;
mod task;

/// Starts ranks, and looks after them until they end.
pub struct Spawner {
    /// The program's name, for messages.
    program: String,
    limits: JobLimits,
    signals: Signals,
    /// The first signal that asked the job to stop.
    stopped_by: Option<c_int>,
    /// Whether ranks were started before: what they did can be resumed.
    has_run: bool,
    /// Whether all ranks of the last job were killed.
    lost_all: bool,
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
    /// From now on this thread waits for signals, between jobs too. Call it while the process has
    /// only one thread.
    pub fn new(program: &str, grace: Duration, timeout: Duration) -> Spawner {
        Spawner {
            program: program.to_string(),
            limits: JobLimits { grace, timeout },
            signals: Signals::block(),
            stopped_by: None,
            has_run: false,
            lost_all: false,
        }
    }

    /// Whether a signal has asked the job to stop.
    pub fn was_stopped(&self) -> bool {
        self.stopped_by.is_some()
    }

    /// Whether all ranks of the last job were killed, so that none said what is saved.
    pub fn lost_all(&self) -> bool {
        self.lost_all
    }

    /// Waits for `duration`. If a signal has asked the job to stop by then, returns the exit code.
    pub fn pause(&mut self, duration: Duration) -> Option<u8> {
        let end = Instant::now() + duration;
        while self.stopped_by.is_none() && Instant::now() < end {
            let signal = self.signals.next(end - Instant::now());
            self.stopped_by = signal.filter(|signal| STOPS.contains(signal));
        }
        let of_first = |signal| {
            if self.has_run {
                EXIT_STOPPED
            } else {
                of_signal(signal)
            }
        };
        self.stopped_by.map(of_first)
    }

    /// Runs `task` as ranks on `hosts` until all have ended. Returns the exit code of the first
    /// that failed (128 plus the signal's number if a signal ended it), or 0.
    pub fn run(&mut self, hosts: &[ListedHost], task: &RankCommand) -> Result<u8> {
        let is_here = |number: usize| match &task.place {
            Some(_) => number == 0,
            None => hosts[number].is_here(),
        };
        let news = mpsc::channel();
        let mut job = Job::new(&self.program, hosts, is_here, self.limits, task, news);
        if job.has_others() {
            if task.losses.is_some() {
                // Agents would count a launcher that is suspended as lost, and kill their ranks.
                stop::ignore_suspension();
            }
            job.connect()?;
            if let Some(code) = self.wait_for_answers(&mut job)? {
                return Ok(code);
            }
        }
        job.start()?;
        self.has_run = true;
        while job.poll() {
            if let Some(signal) = self.signals.next(PERIOD)
                && STOPS.contains(&signal)
            {
                job.handle(JobEvent::Signal(signal))?;
            }
        }
        self.stopped_by = job.state.stop;
        self.lost_all = job.state.ranks.iter().all(|it| it.killed_by.is_some());
        Ok(job.state.exit_code())
    }

    /// Waits until all other hosts are ready. Returns the exit code if a signal asks the job to
    /// stop.
    fn wait_for_answers(&mut self, job: &mut Job) -> Result<Option<u8>> {
        let started = Instant::now();
        while !job.are_all_ready(started.elapsed())? {
            self.stopped_by = self.stopped_by.or(job.asked);
            if let Some(code) = self.pause(Duration::from_millis(20)) {
                return Ok(Some(code));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests;
