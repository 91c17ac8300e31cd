//! The processes of a job, as /proc shows them, and the shared memory that they leave behind.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use super::random::mixed;

/// The end of patience for what happens soon.
const SOON_MAX: Duration = Duration::from_secs(60);

/// Between two looks at what a test waits for. Often enough for what takes tens of milliseconds,
/// and seldom enough to leave the cores to the job.
pub(crate) fn look_again_soon() {
    // Sleep: what is waited for is looked at.
    std::thread::sleep(Duration::from_millis(20));
}

/// Lets a random time pass, up to `most`, before a test disturbs a job: what it asserts holds
/// whenever that is.
pub(crate) fn at_random(seed: u64, index: u64, most: Duration) {
    // Sleep: any moment will do.
    std::thread::sleep(most.mul_f64(mixed(seed, index) as f64 / u64::MAX as f64));
}

/// Lets a time pass in which nothing may happen. Too short a time cannot fail a test, only make it
/// miss something.
pub(crate) fn while_nothing_happens(time: Duration) {
    // Sleep: nothing is waited for.
    std::thread::sleep(time);
}

/// The processes that have `mark` in their environment. Zombies have no environment.
pub(super) fn processes_of(mark: &str) -> Vec<u32> {
    // Whole variables: what looks at each byte takes long in code that is not optimized.
    let is_ours = |pid: &u32| {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let environment = String::from_utf8_lossy(&environment);
        let mut variables = environment.split('\0');
        variables.any(|it| {
            it.strip_suffix(mark)
                .is_some_and(|name| name.ends_with('='))
        })
    };
    names_in(Path::new("/proc"))
        .iter()
        .filter_map(|name| name.parse().ok())
        .filter(is_ours)
        .collect()
}

/// Whether the main thread of a process waits for a lock. Open MPI 4's launcher deadlocks when a
/// rank is killed while connecting to it; these tests end it then.
pub(super) fn waits_for_a_lock(pid: u32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/wchan")).is_ok_and(|place| place.contains("futex"))
}

/// A process, and what its threads are at.
pub(super) fn described(pid: u32) -> String {
    let read =
        |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let threads = names_in(Path::new(&format!("/proc/{pid}/task")));
    let threads = threads.iter().map(|thread| {
        let [name, waits] = ["comm", "wchan"].map(|what| read(&format!("task/{thread}/{what}")));
        format!("{} in {}", name.trim(), waits.trim())
    });
    format!(
        "{pid} {}: {}",
        read("cmdline").replace('\0', " "),
        threads.collect::<Vec<_>>().join(", ")
    )
}

/// The names of a process's threads.
pub(super) fn threads_of(pid: u32) -> Vec<String> {
    let name = |thread: &String| {
        let name = std::fs::read_to_string(format!("/proc/{pid}/task/{thread}/comm"));
        name.unwrap_or_default().trim().to_string()
    };
    let threads = names_in(Path::new(&format!("/proc/{pid}/task")));
    threads.iter().map(name).collect()
}

/// The processes that stay.
pub(super) fn left_behind(mark: &str) -> Vec<u32> {
    let started = Instant::now();
    loop {
        let left = processes_of(mark);
        if left.is_empty() || started.elapsed() > SOON_MAX {
            return left;
        }
        look_again_soon();
    }
}

pub(super) fn kill(pids: &[u32]) {
    send("KILL", pids);
}

pub(super) fn send(signal: &str, pids: &[u32]) {
    if !pids.is_empty() {
        let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
        // Processes that have ended meanwhile do not matter.
        let line = format!("kill -s {signal} {} 2>&-", pids.join(" "));
        _ = Command::new("sh").args(["-c", &line]).status();
    }
}

/// Whether a process has pending signals. A process that is gone, a zombie or stopped counts as
/// having none.
pub(super) fn has_pending_signals(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    if ["Z", "T"]
        .iter()
        .any(|state| status.contains(&format!("\nState:\t{state}")))
    {
        return false;
    }
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:"));
    pending.is_some_and(|set| set.trim().bytes().any(|digit| digit != b'0'))
}

const SIGUSR1: u32 = 10;
pub(crate) const SIGTSTP: u32 = 20;

/// Whether a process of ours, and not its launcher, has a handler for SIGUSR1.
pub(super) fn catches_usr1(pid: u32) -> bool {
    status_of(pid, "Name:") == "ddp-train" && has_signal(pid, "SigCgt:", SIGUSR1)
}

/// Whether a set of signals of a process, such as `SigIgn:` for those it ignores, has this one.
pub(super) fn has_signal(pid: u32, set: &str, signal: u32) -> bool {
    let set = u64::from_str_radix(&status_of(pid, set), 16).unwrap_or(0);
    set & (1 << (signal - 1)) != 0
}

/// A field of a process's status.
fn status_of(pid: u32, field: &str) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let value = status.lines().find_map(|line| line.strip_prefix(field));
    value.unwrap_or_default().trim().to_string()
}

/// New files in /dev/shm that no process uses. Those of other programs do not count: of the fuzz
/// tests, and of MPI, whose files `ddp-train` puts elsewhere.
pub(super) fn left_in_shared_memory(before: &BTreeSet<String>) -> Vec<String> {
    let started = Instant::now();
    loop {
        let new = names_in(Path::new("/dev/shm"))
            .difference(before)
            .cloned()
            .collect::<Vec<_>>();
        let left: Vec<String> = new
            .into_iter()
            .filter(|name| {
                !["ddp-fuzz-", "vader_segment"]
                    .iter()
                    .any(|of| name.starts_with(of))
            })
            .filter(|name| !is_in_use(&format!("/dev/shm/{name}")))
            .collect();
        if left.is_empty() || started.elapsed() > SOON_MAX {
            return left;
        }
        look_again_soon();
    }
}

/// Whether a process has this file, or one in this folder, open or in its memory.
pub(super) fn is_in_use(path: &str) -> bool {
    let has = |pid: &String| {
        let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
        let folder = format!("/proc/{pid}/fd");
        let mut open = names_in(Path::new(&folder))
            .into_iter()
            .filter_map(|fd| std::fs::read_link(format!("{folder}/{fd}")).ok());
        maps.contains(path) || open.any(|file| file.to_string_lossy().starts_with(path))
    };
    names_in(Path::new("/proc"))
        .iter()
        .filter(|name| name.parse::<u32>().is_ok())
        .any(has)
}

/// The names in a folder; none if it cannot be read.
pub(super) fn names_in(folder: &Path) -> BTreeSet<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}
