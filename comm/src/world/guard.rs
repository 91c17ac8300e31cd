//! A bound on what MPI does: its start and its end wait for all ranks, for ever if need be, and cannot be called off. A
//! thread that sleeps ends the process instead when time is up.

use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::waited::Waited;

/// How often the guard looks up. It counts the time in which it could.
const PERIOD: Duration = Duration::from_millis(50);

/// Ranks run out of time together. Rank 0 says so, and `mpirun`, which takes a second, ends the others; if rank 0 is the one
/// that is missing, the first of each host says it.
const TURN: Duration = Duration::from_millis(1500);

/// How much longer `rank` waits than rank 0, where both would say the same.
pub(crate) fn turn(rank: usize) -> Duration {
    if rank == 0 { Duration::ZERO } else { TURN }
}

/// Whether this rank is the first of its host that asks: by a file in the launcher's folder, which ranks share and the
/// launcher removes. Without such a folder every rank is. A job ends soon after, so it is asked once.
pub(crate) fn is_first_of_host(launcher_folder: Option<&Path>) -> bool {
    let Some(folder) = launcher_folder else { return true };
    let made = OpenOptions::new().write(true).create_new(true).open(folder.join("ddp-late"));
    !made.is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists)
}

/// The folder that Open MPI's launcher, or another that speaks PMIx, shares with the ranks it started on this host.
pub(crate) fn launcher_folder() -> Option<PathBuf> {
    std::env::var_os("PMIX_SERVER_TMPDIR").map(PathBuf::from)
}

/// What ends the process when its time is up.
type Last = Box<dyn FnOnce() + Send>;

/// A thread that ends this process in time. Dropped, it does not.
pub(super) struct Guard {
    steps: Option<Sender<(Duration, Last)>>,
    thread: Option<JoinHandle<()>>,
}

impl Guard {
    /// Runs `last`, which ends the process, if `limit` passes before the next step, or before this value is dropped.
    pub(super) fn start(limit: Duration, last: impl FnOnce() + Send + 'static) -> io::Result<Guard> {
        let (steps, received) = mpsc::channel::<(Duration, Last)>();
        let mut step: (Duration, Last) = (limit, Box::new(last));
        let watch = move || {
            let mut waited = Waited::new();
            let mut total = Duration::ZERO;
            loop {
                let slice = PERIOD.min(step.0.saturating_sub(total));
                match received.recv_timeout(slice) {
                    Ok(next) => (step, waited, total) = (next, Waited::new(), Duration::ZERO),
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => total = waited.after(slice),
                }
                if total >= step.0 {
                    return (step.1)();
                }
            }
        };
        let thread = std::thread::Builder::new().name("guard".into()).spawn(watch)?;
        Ok(Guard { steps: Some(steps), thread: Some(thread) })
    }

    /// Another step: the clock begins anew.
    pub(super) fn next(&self, limit: Duration, last: impl FnOnce() + Send + 'static) {
        // Nobody listens any more only when the process is at its end.
        if let Some(steps) = &self.steps {
            _ = steps.send((limit, Box::new(last)));
        }
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.steps = None;
        if let Some(thread) = self.thread.take() {
            _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Instant;

    use super::*;

    fn flag() -> (Arc<AtomicBool>, impl FnOnce() + Send + 'static) {
        let flag = Arc::new(AtomicBool::new(false));
        let raised = Arc::clone(&flag);
        (flag, move || raised.store(true, Ordering::SeqCst))
    }

    #[test]
    fn time_that_is_up_is_seen_in_time() {
        let ((is_up, last), started) = (flag(), Instant::now());
        let _guard = Guard::start(Duration::from_millis(80), last).unwrap();
        while !is_up.load(Ordering::SeqCst) {
            assert!(started.elapsed() < Duration::from_secs(10));
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(started.elapsed() >= Duration::from_millis(80));
    }

    #[test]
    fn who_is_done_is_left_alone_and_a_step_begins_the_clock_anew() {
        let ((first, first_last), (second, second_last)) = (flag(), flag());
        let guard = Guard::start(Duration::from_secs(1), first_last).unwrap();
        guard.next(Duration::from_secs(600), second_last);
        std::thread::sleep(Duration::from_millis(1200));
        drop(guard);
        assert!(!first.load(Ordering::SeqCst) && !second.load(Ordering::SeqCst));
    }

    #[test]
    fn one_rank_of_a_host_is_the_first() {
        let folder = std::env::temp_dir().join(format!("ddp-guard-test-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let asked: Vec<bool> = (0..3).map(|_| is_first_of_host(Some(&folder))).collect();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(asked, [true, false, false]);
        // Better said twice than never.
        assert!(is_first_of_host(Some(&folder)) && is_first_of_host(None));
    }
}
