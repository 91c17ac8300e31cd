//! So many jobs of ranks run at the same time, and no more.

use std::sync::{Condvar, Mutex};

/// Jobs under `mpirun` that run at a time. More than one, because a job that has failed mostly
/// waits: `mpirun` takes a second to reap its ranks. Few enough for two cores.
const TURNS: usize = 3;
static TAKEN: Mutex<usize> = Mutex::new(0);
static GIVEN_BACK: Condvar = Condvar::new();

pub(super) struct Turn;

impl Turn {
    pub(super) fn wait_for() -> Turn {
        let taken = TAKEN.lock().expect("nothing panics under this lock");
        *GIVEN_BACK
            .wait_while(taken, |taken| *taken == TURNS)
            .expect("nothing panics under this lock") += 1;
        Turn
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *TAKEN.lock().expect("nothing panics under this lock") -= 1;
        GIVEN_BACK.notify_one();
    }
}
