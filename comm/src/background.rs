//! Threads that run until they are cancelled: deadlines and watches.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::waited::Waited;

/// How often a deadline looks at the clock. It counts only time in which this process could run.
const PERIOD: Duration = Duration::from_millis(50);

/// A thread in the background. Dropping this value cancels the thread and waits for it to end.
#[derive(Debug)]
pub struct Background {
    cancel: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// The thread's side: says when it is cancelled.
pub(crate) struct Cancelled(Receiver<()>);

impl Cancelled {
    /// Sleeps for `time`, or until the thread is cancelled. Whether it is.
    pub(crate) fn within(&self, time: Duration) -> bool {
        self.0.recv_timeout(time) != Err(RecvTimeoutError::Timeout)
    }
}

impl Background {
    /// Runs `body` on a thread with this name.
    pub(crate) fn start(
        name: &str,
        body: impl FnOnce(&Cancelled) + Send + 'static,
    ) -> Result<Background> {
        let (cancel, cancelled) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name(name.into())
            .spawn(move || body(&Cancelled(cancelled)))
            .map_err(|error| Error::no_thread(name, &error))?;
        Ok(Background {
            cancel: Some(cancel),
            thread: Some(thread),
        })
    }

    /// Runs `action` once `limit` has passed, unless cancelled before.
    pub(crate) fn deadline(
        limit: Duration,
        action: impl FnOnce() + Send + 'static,
    ) -> Result<Background> {
        Background::start("deadline", move |cancelled| {
            let (mut waited, mut total) = (Waited::new(), Duration::ZERO);
            while total < limit {
                let slice = PERIOD.min(limit - total);
                if cancelled.within(slice) {
                    return;
                }
                total = waited.after(slice);
            }
            action();
        })
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.cancel = None;
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_deadline_acts_when_its_time_has_passed() {
        let (send, receive) = mpsc::channel();
        let (started, limit) = (Instant::now(), Duration::from_millis(80));
        let _deadline = Background::deadline(limit, move || send.send(()).unwrap()).unwrap();
        receive.recv_timeout(Duration::from_secs(60)).unwrap();
        assert!(started.elapsed() >= limit);
    }

    #[test]
    fn a_deadline_that_is_dropped_in_time_does_nothing() {
        let (send, receive) = mpsc::channel();
        let limit = Duration::from_secs(3600);
        drop(Background::deadline(limit, move || send.send(()).unwrap()).unwrap());
        // The thread has ended, and with it the sender.
        let ended = receive.recv_timeout(Duration::from_secs(60));
        assert_eq!(ended, Err(mpsc::RecvTimeoutError::Disconnected));
    }
}
