//! Being asked to stop: SIGUSR1 (a scheduler whose time is nearly up), SIGTERM and Ctrl-C, caught and remembered until the program
//! looks. What it does then is its own affair: this crate only sees to it that the process lives long enough.
//!
//! The second Ctrl-C ends the process at once, as a Ctrl-C does by itself. SIGTERM is also what `mpirun` sends to all other ranks when one
//! has died: the watch (`watch.rs`) goes on looking for that, and ends the process where it is so. A signal that the process ignores (as in
//! `nohup`), or that somebody else catches, is left as it is.

use std::ffi::c_int;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::signals;
use crate::world::World;

/// A signal that asks to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// SIGUSR1: schedulers send it some time before they end a job, where they are told to.
    User1,
    /// SIGTERM.
    Terminate,
    /// SIGINT.
    Interrupt,
}

impl Signal {
    const ALL: [Signal; 3] = [Signal::User1, Signal::Terminate, Signal::Interrupt];

    /// A number from 1 for each, to tell other ranks.
    pub fn code(self) -> u8 {
        match self {
            Signal::User1 => 1,
            Signal::Terminate => 2,
            Signal::Interrupt => 3,
        }
    }

    /// The signal of this number.
    pub fn of_code(code: u8) -> Option<Signal> {
        Signal::ALL.into_iter().find(|signal| signal.code() == code)
    }

    fn number(self) -> c_int {
        match self {
            Signal::User1 => libc::SIGUSR1,
            Signal::Terminate => libc::SIGTERM,
            Signal::Interrupt => libc::SIGINT,
        }
    }
}

impl fmt::Display for Signal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Signal::User1 => "SIGUSR1",
            Signal::Terminate => "SIGTERM",
            Signal::Interrupt => "SIGINT (Ctrl-C)",
        })
    }
}

/// How many `Stops` there are in this process: where ranks are threads, one a rank.
static CATCHING: AtomicUsize = AtomicUsize::new(0);
/// The number of the signal that came first; 0 for none.
static ASKED: AtomicI32 = AtomicI32::new(0);
/// Whether there was a Ctrl-C.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// While it lives, signals that ask to stop are remembered in place of ending the process.
#[derive(Debug)]
pub struct Stops(());

impl Stops {
    /// The signal that has asked this process to stop, if one has: the first.
    pub fn asked(&self) -> Option<Signal> {
        asked()
    }
}

/// The first signal that has come while somebody wanted to know.
pub(crate) fn asked() -> Option<Signal> {
    let number = ASKED.load(Ordering::SeqCst);
    Signal::ALL.into_iter().find(|signal| signal.number() == number)
}

impl World {
    /// From now on SIGUSR1, SIGTERM and Ctrl-C ask this process to stop in place of ending it, until the value is dropped. The
    /// second Ctrl-C ends it at once.
    pub fn catch_stop(&self) -> Stops {
        let _turn = turn();
        if CATCHING.fetch_add(1, Ordering::SeqCst) == 0 {
            ASKED.store(0, Ordering::SeqCst);
            INTERRUPTED.store(false, Ordering::SeqCst);
            for signal in Signal::ALL.map(Signal::number) {
                // Where the watch has caught SIGTERM, it tells us.
                if signals::current(signal) == Some(libc::SIG_DFL) {
                    signals::catch(signal, on_signal);
                }
            }
        }
        Stops(())
    }
}

impl Drop for Stops {
    fn drop(&mut self) {
        let _turn = turn();
        if CATCHING.fetch_sub(1, Ordering::SeqCst) == 1 {
            let ours = Some(signals::address(on_signal));
            let caught = Signal::ALL.map(Signal::number).into_iter().filter(|&signal| signals::current(signal) == ours);
            caught.for_each(signals::let_go);
        }
    }
}

/// One thread at a time sets handlers.
fn turn() -> std::sync::MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether signals that ask to stop are remembered now.
pub(crate) fn is_catching() -> bool {
    CATCHING.load(Ordering::SeqCst) > 0
}

/// Remembers `signal`, if somebody wants to know. Safe in a handler.
pub(crate) fn note(signal: c_int) {
    if is_catching() {
        // The first is the one that is told.
        _ = ASKED.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst);
    }
}

extern "C" fn on_signal(signal: c_int) {
    note(signal);
    if signal == libc::SIGINT && INTERRUPTED.swap(true, Ordering::SeqCst) {
        signals::let_go(signal);
        // SAFETY: sends this process a signal, which is held back until this handler returns, and then ends it. The call is safe in a
        // handler.
        unsafe { libc::kill(libc::getpid(), signal) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn send(signal: Signal) {
        // SAFETY: to this thread, whose handler runs before the call returns.
        unsafe { libc::raise(signal.number()) };
    }

    #[test]
    fn the_first_signal_is_remembered_while_somebody_wants_to_know() {
        let _alone = signals::testing::alone();
        // What a script starts in the background ignores Ctrl-C, and what is ignored is left so.
        Signal::ALL.map(Signal::number).into_iter().for_each(signals::let_go);
        let world = World::single().unwrap();
        for (first, second) in [(Signal::User1, Signal::Terminate), (Signal::Interrupt, Signal::User1)] {
            let (stops, others) = (world.catch_stop(), world.catch_stop());
            assert_eq!(stops.asked(), None);
            send(first);
            send(second);
            drop(stops);
            assert_eq!(others.asked(), Some(first));
        }
        let now: Vec<_> = Signal::ALL.iter().map(|signal| signals::current(signal.number())).collect();
        assert_eq!(now, [Some(libc::SIG_DFL); 3], "nothing is caught any more");
    }

    #[test]
    fn a_signal_that_somebody_else_handles_is_left_to_them() {
        extern "C" fn others(_: c_int) {}
        let _alone = signals::testing::alone();
        signals::catch(libc::SIGUSR1, others);
        let stops = World::single().unwrap().catch_stop();
        send(Signal::User1);
        assert_eq!(stops.asked(), None);
        drop(stops);
        assert_eq!(signals::current(libc::SIGUSR1), Some(signals::address(others)));
        signals::let_go(libc::SIGUSR1);
    }

    #[test]
    fn codes_are_told_apart() {
        assert!(Signal::ALL.iter().all(|&signal| Signal::of_code(signal.code()) == Some(signal)));
        assert_eq!((Signal::of_code(0), Signal::of_code(4)), (None, None));
    }
}
