//! The thread pool has as many threads as the affinity mask has cores. Its workers keep that mask,
//! also when the thread that starts them is pinned to one core. The mask belongs to the whole
//! process, so this test is the only one in its file.

use std::time::{Duration, Instant};

use ddp_kernels::threads;

/// The cores that the pool's one worker may run on, in Linux's notation. A thread that was joined
/// is listed a moment longer, so this waits until only one is.
fn allowed_of_the_worker() -> String {
    let started = Instant::now();
    loop {
        if let [only] = allowed().as_slice() {
            return only.clone();
        }
        assert!(
            started.elapsed() < Duration::from_secs(60),
            "the workers: {:?}",
            allowed()
        );
        // Sleep: what is waited for is looked at.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The cores that each listed worker may run on.
fn allowed() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let status = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("status")).ok();
    let workers = tasks
        .filter_map(|task| status(task.ok()?))
        .filter(|status| status.contains("ddp-math"));
    let line = |status: String| {
        status
            .lines()
            .find(|line| line.starts_with("Cpus_allowed_list:"))
            .map(str::to_string)
    };
    workers.map(|status| line(status).unwrap()).collect()
}

#[test]
fn the_pool_follows_the_mask_of_the_process() {
    assert_eq!(threads::count(), threads::cores().len());
    // nproc would follow these variables.
    let own = std::process::Command::new("nproc")
        .env_remove("OMP_NUM_THREADS")
        .env_remove("OMP_THREAD_LIMIT")
        .output()
        .expect("nproc is part of every Linux system");
    let seen: usize = String::from_utf8(own.stdout)
        .unwrap()
        .trim()
        .parse()
        .unwrap();
    assert_eq!(threads::cores().len(), seen);

    threads::set_count(2).unwrap();
    let free = allowed_of_the_worker();
    threads::set_count_pinned_from(0, 2).unwrap();
    threads::set_count(2).unwrap();
    assert_eq!(
        allowed_of_the_worker(),
        free,
        "a worker started by a pinned thread is as free as before"
    );
}
