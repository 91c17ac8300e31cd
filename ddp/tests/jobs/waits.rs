//! No endless waits: a rank that is stopped at any moment is named and ends the job, a rank that
//! works is waited for, and an error names its rank.

#[cfg(feature = "mpi")]
use std::path::Path;
use std::time::{Duration, Instant};

use crate::data::write;
use crate::made::npy;
use crate::support::job::{Ended, Folder, QUICK, all_at_once};
#[cfg(feature = "mpi")]
use crate::support::job::{host, program};
use crate::support::processes::{look_again_soon, while_nothing_happens};

/// How long ranks wait for one that shows no progress.
const TIMEOUT_S: u64 = 20;
/// How much later the job may be over: the end of patience.
const LATER: Duration = Duration::from_secs(60);

/// Stops rank `rank` of three so long after it was started, and waits for the end. Returns it, and
/// whether the metrics log says that the run was done.
fn stopped_after(delay: Duration, rank: usize, words: &str) -> (Ended, bool) {
    let folder = Folder::new("stopped");
    let words = format!("{words} --timeout-s {TIMEOUT_S}");
    let mut running = folder.ranks(3, &words).start();
    let is_there = |ranks: Vec<(usize, u32)>| ranks.iter().any(|(number, _)| *number == rank);
    while !is_there(running.ranks()) && running.goes_on() {
        // Sleep: a moment, since each millisecond of what follows is another place to stop.
        std::thread::sleep(Duration::from_millis(1));
    }
    // Sleep: any moment will do.
    std::thread::sleep(delay);
    running.signal_rank(rank, "STOP");
    let (stopped_at, mut was_late) = (Instant::now(), false);
    while running.goes_on() {
        // The others have ended in good order: it was stopped at its very end.
        let ranks = running.ranks();
        if ranks.is_empty() {
            // `wait` ends an mpirun that waits for its own lock, as Open MPI 4 sometimes does.
            break;
        }
        if ranks.iter().all(|(number, _)| *number == rank) && !was_late {
            // Sleep: so long may it take to end.
            std::thread::sleep(Duration::from_secs(1));
            let log = std::fs::read_to_string(folder.out().join("metrics.jsonl"));
            let is_done = log.is_ok_and(|log| log.contains(r#""exit_code":0"#));
            was_late = running.goes_on() && is_done;
            running.signal_rank(rank, if was_late { "CONT" } else { "STOP" });
        }
        let limit = Duration::from_secs(TIMEOUT_S) + LATER;
        assert!(stopped_at.elapsed() < limit, "it continues: {ranks:?}");
        look_again_soon();
    }
    let ended = running.wait();
    let log = std::fs::read_to_string(folder.out().join("metrics.jsonl"));
    let is_done = log.is_ok_and(|log| log.contains(r#""exit_code":0"#));
    (ended, is_done)
}

#[test]
fn a_rank_that_is_stopped_at_any_moment_ends_the_job_with_77_and_is_named() {
    // About as long as a run takes.
    let moments = ddp_testing::cases("ranks stopped at random moments", 200, 3);
    // Number 0 stops rank 0 before the ranks have met: then both others said so, not one.
    let cases = moments
        .into_iter()
        .chain([0])
        .map(|number| (number, Duration::from_millis(3 * number as u64)));
    all_at_once(cases, |(number, delay)| {
        // Every other job would not end by itself; the rest may be over before the rank is stopped.
        let (rank, ends) = (number % 3, !number.is_multiple_of(2));
        let words = if ends {
            format!("{QUICK} --checkpoint-every 2")
        } else {
            QUICK.replace("--epochs 1", "--steps 1000000 --checkpoint-every 0")
        };
        let (ended, is_done) = stopped_after(delay, rank, &words);
        let is_locked = ended.signal() == Some(9);
        if ends && is_done && ended.causes().is_empty() {
            // It was over, or nothing waited for that rank any more.
            let is_well = ended.exit_code() == Some(0) || is_locked;
            assert!(is_well, "after {delay:?}: {ended}");
            return;
        }
        assert!(
            ended.exit_code() == Some(77) || is_locked,
            "after {delay:?}: {ended}"
        );
        let [cause] = ended.causes()[..] else {
            panic!("one line says why, after {delay:?}: {ended}")
        };
        let named = [
            format!("rank {rank} is stopped"),
            format!("rank {rank} did not arrive"),
            format!("rank {rank} did not come"),
            // The launcher, if this test lets the rank continue too late.
            format!("rank {rank} did not end"),
        ];
        assert!(
            named.iter().any(|named| cause.contains(named)),
            "after {delay:?}: {ended}"
        );
    });
}

#[test]
fn a_rank_that_works_past_the_timeout_is_awaited_and_reported() {
    all_at_once([0, 1], |rank| {
        let folder = Folder::new("works");
        let words = format!("{QUICK} --timeout-s {TIMEOUT_S}");
        let job = folder
            .ranks(2, &words)
            .env("DDP_TEST_FAULT", &format!("{rank}:setup:0:hold"));
        let running = job.start();
        running.wait_for_said(&format!("waiting for rank {rank}, which reads data: "));
        // The other one has waited for some seconds, and now for as long as the timeout besides.
        while_nothing_happens(Duration::from_secs(TIMEOUT_S));
        running.go_on(0);
        running.wait().assert_well();
    });
}

#[cfg(feature = "mpi")]
#[test]
fn ctrl_c_while_ranks_connect_is_answered_before_they_are() {
    let folder = Folder::new("connect");
    // The other rank starts once the answer is there, and gives up when this test has.
    let first = folder.program_after("first", "exec 2>said");
    let answer = "Ctrl-C: ending once the ranks are connected";
    let late = format!("until grep -qs '{answer}' said; do [ -e $0 ] || exit 1; sleep 0.05; done");
    let late = folder.program_after("late", &late);
    let running = folder.programs(&[&first, &late], QUICK).start();
    running.wait_until_it_listens(1);
    running.signal_rank(0, "INT");
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
}

#[cfg(feature = "mpi")]
#[test]
fn an_error_names_the_rank_that_it_happened_on() {
    // A file that one rank misses.
    all_at_once([0, 2], |rank| {
        let folder = Folder::new("missing");
        let names = ["zero", "one", "two"];
        for (number, name) in names.iter().enumerate() {
            let place = folder.path().join(name);
            std::fs::create_dir(&place).unwrap();
            if number != rank {
                std::fs::write(place.join("a.csv"), "x,y\n1,0\n2,1\n3,0\n4,1\n").unwrap();
            }
        }
        let words = format!(
            "--data a.csv --cache-dir {} --steps 2 --out OUT",
            folder.path().display()
        );
        let ended = folder.in_folders(&names, &words).run();
        let cause = ended.assert_fails(74);
        let named = format!("ddp-train: rank {rank} on {}: cannot open a.csv: ", host());
        assert!(cause.starts_with(&named), "{ended}");
    });
}

/// Two ranks, of which rank `rank` has this limit.
#[cfg(feature = "mpi")]
fn limited(rank: usize, limit: &str, words: &str) -> Ended {
    let folder = Folder::new("limited");
    let free = folder.program_after("free", "");
    let limited = folder.program_after("limited", limit);
    let programs: [&Path; 2] = if rank == 0 {
        [&limited, &free]
    } else {
        [&free, &limited]
    };
    folder.programs(&programs, words).run()
}

#[cfg(feature = "mpi")]
#[test]
fn a_limit_that_is_too_small_is_named_with_its_rank() {
    let cases = [
        (0, "ulimit -f 1000", "(ulimit -f)"),
        (1, "ulimit -v 300000", "(ulimit -v)"),
        (1, "ulimit -n 12", "(ulimit -n)"),
        (1, "prlimit --pid $$ --nproc=19", "(ulimit -u)"),
    ];
    all_at_once(cases, |(rank, limit, help)| {
        let ended = limited(rank, limit, QUICK);
        let cause = ended.assert_fails(71);
        assert!(
            cause.contains(help) && cause.contains(&format!("rank {rank} on ")),
            "{ended}"
        );
    });
}

#[test]
fn each_thread_that_cannot_start_is_named() {
    // The limit does not hold for root, and counts all processes of a user.
    let is_root = std::process::Command::new("setpriv")
        .args(["--clear-groups", "true"])
        .status();
    if !is_root.is_ok_and(|status| status.success()) {
        ddp_testing::skip("setpriv is missing, or this is not root");
        return;
    }
    let user = 100_000 + std::process::id();
    let folder = Folder::new("threads");
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    std::fs::set_permissions(folder.path(), mode).unwrap();
    // So many rows that several threads would read them.
    let x: Vec<u8> = (0..70_000u32)
        .flat_map(|row| (row as f32).to_le_bytes())
        .collect();
    let y: Vec<u8> = (0..70_000u32).map(|row| row as u8 % 2).collect();
    write(&folder, "x.npy", npy("<f4", &[70_000, 1], &x));
    write(&folder, "y.npy", npy("|u1", &[70_000], &y));
    let words =
        "--data x.npy --labels y.npy --hidden 2 --steps 2 --threads 2 --resume auto --out OUT";
    let mut named = Vec::new();
    for limit in 1..20 {
        let as_user = "exec setpriv --clear-groups --reuid";
        let before = format!("prlimit --pid $$ --nproc={limit}; {as_user} {user} \"$@\"");
        let ended = folder.in_shell(&before, words).run();
        if ended.exit_code() == Some(0) {
            let loader = "cannot start the thread that gathers batches: ";
            let all = named.join("\n");
            assert!(all.contains(loader), "{all}");
            return;
        }
        let cause = ended.assert_fails(71);
        assert!(cause.contains("threads (ulimit -u)"), "{ended}");
        named.push(cause.to_string());
    }
    panic!("20 threads are not enough: {named:?}");
}

#[cfg(feature = "mpi")]
#[test]
fn ranks_with_different_resume_or_binary_are_refused_before_anything_is_begun() {
    let folder = Folder::new("resume");
    let auto = format!("{QUICK} --resume auto");
    for parts in [
        [(1, QUICK), (1, auto.as_str())],
        [(1, auto.as_str()), (1, QUICK)],
    ] {
        let ended = folder.each(&parts).run();
        let cause = ended.assert_fails(78);
        let named = "ranks disagree on the configuration: rank 1 has resume = ";
        assert!(cause.contains(named), "{ended}");
        assert!(!folder.out().exists(), "nothing was begun: {ended}");
    }
    // One byte more at its end changes nothing but the file.
    let other = folder.path().join("ddp-train");
    let mut bytes = std::fs::read(program()).unwrap();
    bytes.push(0);
    ddp_testing::write_executable(&other, &bytes);
    let ended = folder
        .programs(&[Path::new(&program()), &other], QUICK)
        .run();
    let cause = ended.assert_fails(78);
    assert!(
        cause.contains("ranks disagree on the program's bytes: rank 1 has "),
        "{ended}"
    );
    assert!(!folder.out().exists(), "nothing was begun: {ended}");
}
