//! Processes that are stopped (SIGSTOP) before they take part, or all at once. The launcher kills
//! them, names them, and restarts them if it may.

use std::process::Command;
use std::time::{Duration, Instant};

use super::tcp;
use crate::losing::SHORT;
use crate::support::job::{Folder, QUICK, Running, all_at_once};

/// More steps than any test waits for.
const ENDLESS: &str = "--data glyphs,rows=256,held-out=64 --hidden 16 --batch-size 32 \
                       --steps 100000000 --log-every 1000000 --threads 1 --out OUT";
/// Both ranks hold before they read data, until the test lets step 0 continue.
const SETUP_HOLDS: &str = "0:setup:0:hold,1:setup:0:hold";
/// The end of patience with a job.
const PATIENCE: Duration = Duration::from_secs(100);

/// Looks at a job again and again, until `look` has found what it looks for.
fn until<T>(running: &mut Running, mut look: impl FnMut(&Running) -> Option<T>) -> Option<T> {
    let began = Instant::now();
    while running.goes_on() {
        if let Some(found) = look(running) {
            return Some(found);
        }
        assert!(
            began.elapsed() < PATIENCE,
            "what is looked for does not come"
        );
        // Sleep: what is waited for is looked at.
        std::thread::sleep(Duration::from_millis(1));
    }
    None
}

fn stop(pid: u32) {
    let line = format!("kill -s STOP {pid} 2>&-");
    _ = Command::new("sh").args(["-c", &line]).status();
}

fn is_stopped(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ")
        .next()
        .is_some_and(|it| it.starts_with('T'))
}

/// The process of a rank.
fn process(running: &Running, rank: usize) -> Option<u32> {
    let mut all = running.ranks().into_iter();
    all.find_map(|(known, pid)| (known == rank).then_some(pid))
}

/// Stops each of two ranks as soon as its process is there.
fn stop_both(running: &mut Running) {
    for rank in 0..2 {
        until(running, |it| process(it, rank).inspect(|&pid| stop(pid)));
    }
}

#[test]
fn a_job_of_which_all_processes_are_stopped_ends_or_starts_them_again() {
    all_at_once([true, false], |is_elastic| {
        let folder = Folder::new("frozen-all");
        // Not SHORT: the job waits for three timeouts, and may well lose one more rank.
        let words = if is_elastic {
            format!("{QUICK} --min-ranks 2 --restarts 9 --timeout-s 5")
        } else {
            format!("{ENDLESS} --timeout-s 5")
        };
        let job = folder.started(2, &words);
        // They come no further before they are stopped; those that are started again do.
        let mut running = job.env("DDP_TEST_FAULT", SETUP_HOLDS).start();
        stop_both(&mut running);
        running.go_on(0);
        let ended = running.wait();
        let code = if is_elastic { 0 } else { 77 };
        assert_eq!(ended.exit_code(), Some(code), "{ended}");
        // One look may see them stopped, or two.
        assert!(ended.stderr.contains("ddp-train: killed rank"), "{ended}");
        assert!(
            ended.stderr.contains("stopped for 15 s or longer"),
            "{ended}"
        );
    });
}

#[test]
fn a_rank_that_is_stopped_just_after_it_has_met_the_others_is_replaced() {
    let moments = [0, 1].map(|rank| ["command", "meeting"].map(|point| (rank, point)));
    all_at_once(moments.concat(), |(rank, point)| {
        let folder = Folder::new("frozen-met");
        let words = format!("{QUICK} --min-ranks 2 --restarts 9 {SHORT}");
        let job = folder.started(2, &words);
        // The process that replaces it comes to the second meeting.
        let fault = format!("{rank}:{point}:1:stop");
        let ended = job.env("DDP_TEST_FAULT", &fault).run();
        assert_eq!(ended.exit_code(), Some(0), "{ended}");
        let told = format!("rank {rank} killed because it showed no progress: starting it again");
        assert!(ended.stderr.contains(&told), "{ended}");
    });
}

#[test]
fn a_newcomer_that_is_stopped_does_not_keep_a_job_from_its_end() {
    let folder = Folder::new("frozen-newcomer");
    let words = format!("{ENDLESS} --min-ranks 1 --restarts 9 --timeout-s 600");
    let job = folder.started(2, &words);
    let job = job.env("DDP_TEST_FAULT", "1:forward:3:kill,1:joining:0:stop");
    let mut running = job.start();
    until(&mut running, |it| {
        process(it, 1).filter(|&pid| is_stopped(pid))
    });
    running.signal("TERM");
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
    assert!(
        ended.stderr.contains("killed rank 1, stopped for"),
        "{ended}"
    );
}

#[test]
fn limits_have_to_suffice_for_the_loss_of_a_rank() {
    let folder = Folder::new("frozen-limit");
    let words = format!("{QUICK} --ranks 3 --min-ranks 1 --restarts 9");
    let ended = folder.in_shell("ulimit -n 20", &words).run();
    assert_eq!(ended.exit_code(), Some(71), "{ended}");
    assert!(ended.stderr.contains("(ulimit -n)"), "{ended}");
}

/// The least virtual memory in bytes that ranks need, as they say when they have less.
fn memory_bytes_min(words: &str) -> u64 {
    let folder = Folder::new("frozen-memory-min");
    let ended = folder.in_shell("ulimit -v 300000", words).run();
    assert_eq!(ended.exit_code(), Some(71), "{ended}");
    let (_, rest) = ended
        .stderr
        .split_once("expected a limit of at least ")
        .unwrap();
    let (bytes, _) = rest.split_once(" bytes of virtual memory").unwrap();
    bytes.parse().unwrap()
}

#[test]
fn memory_has_to_suffice_for_the_loss_of_a_rank() {
    let words = format!("{QUICK} --ranks 3");
    let elastic = format!("{words} --min-ranks 1 --restarts 9");
    let [once, twice] = [&words, &elastic].map(|words| memory_bytes_min(words));
    // Ranks that meet again have the memory of two meetings for a moment.
    assert!(once < twice, "{once} {twice}");
    let limit = format!("ulimit -v {}", (once + twice) / 2048);
    let folder = Folder::new("frozen-memory");
    let ended = folder.in_shell(&limit, &elastic).run();
    assert_eq!(ended.exit_code(), Some(71), "{ended}");
    assert!(ended.stderr.contains("(ulimit -v)"), "{ended}");
    folder.in_shell(&limit, &words).run().assert_well();
}

#[test]
fn a_process_that_another_one_with_its_number_turns_away_is_named() {
    let folder = Folder::new("frozen-number");
    // Of processes with one number the first takes part, and the last one that comes waits.
    let three = folder.script(
        "three",
        "\"$@\" &\n\
         until [ -e out/metrics.jsonl ]; do sleep 0.05; done\n\
         \"$@\" 2>said &\n\
         until [ -e go-on-3 ]; do sleep 0.05; done\n\
         \"$@\" &\nwait",
    );
    let of_rank = |rank: usize| match rank {
        0 => String::new(),
        _ => three.display().to_string(),
    };
    let words = format!("{ENDLESS} --min-ranks 1 {SHORT}");
    let mut running = tcp::ranks(&folder, 2, &words, &of_rank).start();
    running.wait_for_said("it waits until the first one is lost");
    running.go_on(3);
    until(&mut running, |_| {
        let said = std::fs::read_to_string(folder.path().join("said")).ok()?;
        let told = "has taken another process with this number";
        said.contains(told).then_some(())
    });
    running.signal("TERM");
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
    assert!(ended.stderr.contains("is turned away"), "{ended}");
}
