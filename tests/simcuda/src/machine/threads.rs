//! Host threads. All are one actor, so what one has waited for counts as known to all. Therefore a
//! wait lasts until the other threads sleep: a thread that uses what another waited for, and was
//! not told so, runs before the end of the wait, and its use is found.

use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// For threads that compute all the time.
const LONGEST: Duration = Duration::from_millis(50);
/// After the first waits of the process, one of this many lasts that long.
const RARELY: usize = 128;

/// Waits, without the lock, until all other threads of the process sleep: the `first` times that
/// `count` counts, and then rarely.
pub fn let_others_run(count: &AtomicUsize, first: usize) {
    let wait = count.fetch_add(1, Ordering::Relaxed);
    if wait >= first && !wait.is_multiple_of(RARELY) {
        return;
    }
    let end = Instant::now() + LONGEST;
    while Instant::now() < end && others_run() {
        std::thread::sleep(Duration::from_micros(50));
    }
}

fn others_run() -> bool {
    let own = fs::read_link("/proc/thread-self").unwrap_or_default();
    let Ok(threads) = fs::read_dir("/proc/self/task") else {
        return false;
    };
    threads.flatten().any(|thread| {
        Some(&*thread.file_name()) != own.file_name() && !sleeps(&thread.path().join("stat"))
    })
}

/// Whether a thread sleeps, or has ended: its state comes after its name, which may have spaces.
fn sleeps(stat: &Path) -> bool {
    let stat = fs::read_to_string(stat).unwrap_or_default();
    stat.rsplit_once(") ")
        .is_none_or(|(_, rest)| rest.starts_with(['S', 'Z', 'X', 'T']))
}
