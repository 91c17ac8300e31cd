//! Processes that are stopped (SIGSTOP) before they take part, or all at once. The launcher kills
//! them, names them, and restarts them if it may.

use std::process::Command;
use std::time::{Duration, Instant};

use super::tcp;
use crate::support::job::{Folder, QUICK, Running, all_at_once};

/// More steps than any test waits for.
const ENDLESS: &str = "--data glyphs,rows=256,held-out=64 --hidden 16 --batch-size 32 \
                       --steps 100000000 --log-every 1000000 --threads 1 --out OUT";
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
        let words = if is_elastic {
            format!("{QUICK} --min-ranks 2 --restarts 9 --timeout-s 5")
        } else {
            format!("{ENDLESS} --timeout-s 5")
        };
        let mut running = folder.started(2, &words).start();
        stop_both(&mut running);
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
    // How far it comes differs.
    all_at_once(0..4, |_| {
        let folder = Folder::new("frozen-met");
        let words = format!("{QUICK} --min-ranks 2 --restarts 9 --timeout-s 5");
        let mut running = folder.started(2, &words).start();
        let pid = until(&mut running, |it| process(it, 1));
        until(&mut running, |_| {
            let pid = pid?;
            let threads = std::fs::read_dir(format!("/proc/{pid}/task")).ok()?;
            let name = |it: std::fs::DirEntry| std::fs::read_to_string(it.path().join("comm"));
            let mut names = threads.flatten().filter_map(|it| name(it).ok());
            // It begins when the ranks have met.
            names.any(|name| name.trim() == "watch").then(|| stop(pid))
        });
        let ended = running.wait();
        assert_eq!(ended.exit_code(), Some(0), "{ended}");
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
    let words = format!("{ENDLESS} --min-ranks 1 --timeout-s 10");
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
