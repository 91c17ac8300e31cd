//! How a rank stops and fails: signals, deadlines, panics, and the end of the world. In an elastic
//! job a panic or a lost rank ends only a rank, and the others continue.

use std::fmt::Display;
use std::process::ExitCode;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use ddp_kernels::panics;

use super::World;
use super::options::Options;
use crate::background::Background;
use crate::error::{Error, Result};
use crate::launch::stop::{self, Signal, StopSignals};
use crate::launcher;
use crate::say::print_line;
use crate::transport::failure::{self, EXIT_PANIC};
use crate::transport::nccl::environment;
use crate::world::allocation;
use crate::world::watch;

/// How often to check whether a signal has come.
const PERIOD: Duration = Duration::from_millis(50);

/// How long a rank that has finished its work waits for those of other hosts.
const FAREWELL_MAX: Duration = Duration::from_secs(10);

/// What Ctrl-C prints while ranks connect.
const ON_INTERRUPT: [&str; 2] = [
    "\nCtrl-C: ending once the ranks are connected. Ctrl-C again ends at once.\n",
    "\nCtrl-C again: ended\n",
];

/// An error with the exit code of a process that ends because of it.
pub trait HasExitCode: Display {
    /// The exit code.
    fn exit_code(&self) -> u8;

    /// The rank that reports the error, if all ranks have it or it happened on another rank.
    fn reporter(&self) -> Option<usize> {
        None
    }
}

impl HasExitCode for Error {
    fn exit_code(&self) -> u8 {
        Error::exit_code(self)
    }

    fn reporter(&self) -> Option<usize> {
        Error::reporter(self)
    }
}

impl World {
    /// Brings the ranks together, runs `body` as one of them, and ends the process well. If `body`
    /// returns an error or panics on any rank, all ranks end, the first cause is printed once, and
    /// its exit code is that of all. Call it first in `main`, and return what it returns.
    ///
    /// A program that calls [`World::connect`] itself has to give errors to [`World::fail`]: one
    /// that returns with `?` drops the world, which waits for the other ranks.
    pub fn run<E: HasExitCode + From<Error>>(
        options: &Options,
        body: impl FnOnce(&World) -> Result<(), E>,
    ) -> ExitCode {
        // After a failed allocation a backtrace would hide the error. Panics keep theirs.
        if let Ok(style) = std::env::var("RUST_BACKTRACE") {
            let of_panics = std::env::var("RUST_LIB_BACKTRACE").unwrap_or(style);
            let none = ("RUST_BACKTRACE", "0".to_string());
            environment::apply([("RUST_LIB_BACKTRACE", of_panics), none]);
        }
        // Ranks that a signal ended while they connect would leave the others without a reason.
        let early = options.catches_stop.then(StopSignals::catch);
        if let (Some(early), 0) = (&early, launcher::likely_rank()) {
            early.say_on_interrupt(&ON_INTERRUPT);
        }
        let world = match World::connect(options) {
            Ok(world) => world,
            Err(error) => {
                // The rank that failed first has printed why.
                if !matches!(error, Error::PeerFailed(_)) {
                    let text = failure::text_with_remedy(&error, options.remedy_text);
                    let of_rank = launcher::rank_on_host();
                    print_line(&format!("{}: {of_rank}{text}\n", options.program));
                }
                return ExitCode::from(error.exit_code());
            }
        };
        world.install_panic_hook();
        allocation::report_failures_to(&world.failure);
        let outcome = world.watch().map_err(E::from).and_then(|()| body(&world));
        // A finished run is not undone by a late signal; the second Ctrl-C ends the process.
        std::mem::forget(early);
        match outcome {
            Ok(()) => {
                // The count of lines that were dropped, if some were.
                print_line("");
                ExitCode::SUCCESS
            }
            Err(error) => {
                let failure = world.latest_failure();
                let (text, exit_code) = (error.to_string(), error.exit_code());
                let reporter = error.reporter();
                match reporter.filter(|&rank| rank != failure.identity.rank) {
                    None => failure.fail(text, exit_code),
                    Some(rank) => failure.fail_for(rank, text, exit_code),
                }
            }
        }
    }

    /// For an error that a rank finds before it joins the others, and that all ranks find: rank 0
    /// prints it. Returns the exit code.
    pub fn refuse(program: &str, error: &dyn HasExitCode) -> ExitCode {
        match launcher::likely_rank() {
            0 => print_line(&format!("{program}: {error}\n")),
            // A launcher would end rank 0 before it has printed.
            rank => std::thread::sleep(launcher::patience(rank)),
        }
        ExitCode::from(error.exit_code())
    }

    /// Ends this process because of an error, and with it the job. The first cause of a job is
    /// printed once, by its rank, as `ddp-train: rank 2 on node7: …` (with
    /// [`Options::program`] in front), and every rank ends with its exit code. An error that only
    /// says that another rank failed prints nothing.
    ///
    /// This is how `main` ends after an error. Dropping a world waits for the other ranks instead.
    pub fn fail(&self, error: &dyn Display, exit_code: u8) -> ! {
        self.failure.fail(error.to_string(), exit_code)
    }

    /// Ends this process as [`World::fail`] does, unless the value is dropped within `limit`: for
    /// work that remains after an error and may hang for the same reason.
    pub fn fail_after(
        &self,
        limit: Duration,
        error: &dyn Display,
        exit_code: u8,
    ) -> Result<Background> {
        let (failure, text) = (Arc::clone(&self.failure), error.to_string());
        Background::deadline(limit, move || failure.fail(text, exit_code))
    }

    /// Ends this process as [`World::fail`] does, with the text that `text` has for the signal, as
    /// soon as one asks it to stop: while there is no work that would be lost.
    pub fn fail_when_asked(
        &self,
        _: &StopSignals,
        exit_code: u8,
        text: fn(Signal) -> String,
    ) -> Result<Background> {
        let failure = Arc::clone(&self.failure);
        when_asked(move |signal| failure.fail_unless_another_has(text(signal), exit_code))
    }

    /// Ends this process with `exit_code`, and without a word, as soon as a signal asks it to stop:
    /// while the other ranks of the job need not know.
    pub fn leave_when_asked(&self, _: &StopSignals, exit_code: u8) -> Result<Background> {
        when_asked(move |_| failure::leave_at_once(exit_code))
    }

    /// From now on SIGUSR1, SIGTERM, SIGHUP, SIGQUIT and Ctrl-C ask this process to stop instead of
    /// ending it, until the value is dropped. The second Ctrl-C ends it at once.
    pub fn catch_stop(&self) -> StopSignals {
        StopSignals::catch()
    }

    /// From now on a panic on any thread ends this process at once with exit code 70, and with it
    /// a job that is not elastic; its message and source line are the cause. Also one that
    /// `catch_unwind` would catch, unless `ddp_kernels::panics` handles it.
    pub fn install_panic_hook(&self) {
        let failure = Arc::clone(&self.failure);
        std::panic::set_hook(Box::new(move |panic| {
            if !panics::are_handled() {
                failure.panicked(panic)
            }
        }));
    }

    /// From now on this process ends within a second after any rank of its host has ended without
    /// reporting an error, or any rank of the job has failed, whatever it is doing; in an elastic
    /// job the launcher ends the generation's calls. It also tells other hosts that this one works:
    /// without it, a rank that works longer than the timeout is missing to them. Does nothing for
    /// ranks of one process.
    pub fn watch(&self) -> Result<()> {
        let mut watch = panics::lock(&self.watch);
        if watch.is_none() && self.of_processes {
            *watch = Some(watch::start(Arc::clone(&self.failure))?);
        }
        Ok(())
    }
}

/// Does this as soon as a signal has asked this process to stop.
fn when_asked(end: impl Fn(Signal) + Send + 'static) -> Result<Background> {
    Background::start("stop", move |cancelled| {
        while !cancelled.within(PERIOD) {
            stop::requested().into_iter().for_each(&end);
        }
    })
}

impl Drop for World {
    fn drop(&mut self) {
        panics::lock(&self.made).clear();
        if !self.of_processes {
            if std::thread::panicking() {
                self.failure
                    .fail_others("ended by a panic".into(), EXIT_PANIC);
            }
            self.gpu_watches.stop();
            return;
        }
        if let Some(cause) = self.failure.cause() {
            self.failure.end(cause.exit_code);
        }
        if self.failure.ended().is_some() {
            // The ranks continue in another generation.
            self.gpu_watches.stop();
            return;
        }
        if std::thread::panicking() {
            self.failure.fail("ended by a panic".into(), EXIT_PANIC);
        }
        match self.barrier() {
            // The work is done.
            Err(error) if error.is_rank_lost() => {}
            Err(error) => self.failure.fail_with(&error),
            Ok(()) => {}
        }
        self.finish();
        // They use messages between hosts, which end below.
        self.gpu_watches.stop();
        self.failure.board.leave(self.failure.identity.local_rank);
        let watch = self.watch.get_mut().unwrap_or_else(PoisonError::into_inner);
        drop(watch.take());
        if let Some(mesh) = &self.mesh {
            mesh.leave(self.timeout.min(FAREWELL_MAX));
        }
        #[cfg(feature = "mpi")]
        if let Some(job) = self.job.take() {
            super::over_mpi::end(job, &self.failure, self.timeout);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ending_that_is_dropped_in_time_ends_nothing() {
        let world = World::single().unwrap();
        let limit = Duration::from_secs(600);
        drop(world.fail_after(limit, &"too late", 70).unwrap());
        let _alone = stop::tests::alone();
        let stops = world.catch_stop();
        let ending = world.fail_when_asked(&stops, 75, |signal| signal.to_string());
        drop(ending.unwrap());
    }
}
