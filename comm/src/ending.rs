//! Ends that do not wait for what this process is doing: for a deadline that it may miss, and for a signal that comes where nothing looks for one.

use std::fmt::Display;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::failure::{Failure, GRACE};
use crate::stop::{self, Signal, Stops};
use crate::world::World;

/// How often it is looked whether a signal has come.
const PERIOD: Duration = Duration::from_millis(50);

/// While it lives a thread may end this process, and with it the job. Once it is dropped it does not.
#[derive(Debug)]
pub struct Ending {
    /// Gone when this is dropped, which ends the thread.
    lives: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Ending {
    fn start(body: impl FnOnce(&mpsc::Receiver<()>) + Send + 'static) -> Result<Ending> {
        let (lives, dropped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("ending".into()).spawn(move || body(&dropped));
        let thread = thread.map_err(|error| Error::Setup {
            action: "start the thread that sees to the end".into(),
            reason: error.to_string(),
            way_out: "Raise the limit on threads (ulimit -u).".into(),
        })?;
        Ok(Ending { lives: Some(lives), thread: Some(thread) })
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.lives = None;
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

impl World {
    /// Ends this process as [`World::fail`] does, unless the value is dropped within `limit`: for what is still to be done after an error, and may
    /// hang for the same reason.
    pub fn fail_after(&self, limit: Duration, error: &dyn Display, exit_code: u8) -> Result<Ending> {
        let (failure, text) = (Arc::clone(self.failure()), error.to_string());
        Ending::start(move |dropped| {
            if dropped.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                failure.fail(text, exit_code);
            }
        })
    }

    /// Ends this process as [`World::fail`] does, with the text that `say` has for the signal, as soon as one asks it to stop: while nothing is done
    /// that would be lost.
    pub fn fail_when_asked(&self, _: &Stops, exit_code: u8, say: fn(Signal) -> String) -> Result<Ending> {
        let failure = Arc::clone(self.failure());
        Ending::start(move |dropped| {
            while dropped.recv_timeout(PERIOD) == Err(RecvTimeoutError::Timeout) {
                if let Some(signal) = stop::asked() {
                    return fail_unless_another_has(&failure, say(signal), exit_code);
                }
            }
        })
    }
}

/// Also `mpirun` sends SIGTERM, to all others, when a rank has died: news of that may still be on its way, and is the cause then.
fn fail_unless_another_has(failure: &Failure, text: String, exit_code: u8) {
    let started = Instant::now();
    while started.elapsed() < GRACE {
        if let Some(cause) = failure.cause() {
            failure.end(cause.exit_code);
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    failure.fail(text, exit_code)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signals;

    #[test]
    fn what_is_dropped_in_time_ends_nothing() {
        let world = World::single().unwrap();
        let ending = world.fail_after(Duration::from_secs(600), &"too late", 70).unwrap();
        drop(ending);
        let _alone = signals::testing::alone();
        let stops = world.catch_stop();
        drop(world.fail_when_asked(&stops, 75, |signal| signal.to_string()).unwrap());
    }
}
