//! Stop requests: by any of the signals, on any rank, at any time. All ranks save the same step,
//! the exit code is 75, and the resumed run is byte-identical to one that was never stopped.

use std::sync::OnceLock;

use crate::resuming::{Outcome, outcome};
use crate::support::job::{Ended, FAR, Folder, Job, Running, all_at_once};
use crate::support::metrics_log::number;

/// A stop comes in the middle of these steps; those after it are slow (`held`).
const LONG: &str = "--data glyphs,rows=512,held-out=64 --hidden 32 --batch-size 64 --dropout 0.1 --steps 80 --log-every 1 --eval-every 10 \
                    --checkpoint-every 0 --threads 1 --out OUT";
const STEPS: u64 = 80;

const RANKS: [usize; 2] = [1, 2];

fn job(folder: &Folder, ranks: usize, words: &str) -> Job {
    match ranks {
        1 => folder.alone(words),
        _ => folder.together(words),
    }
}

/// What is told of SIGUSR1.
const USR1: &str = "SIGUSR1 (sent by schedulers, and by launchers on Ctrl-C)";

/// The step at which a job was stopped, as its last line, its metrics log and its checkpoints say.
#[track_caller]
fn stopped_at(ended: &Ended, folder: &Folder, by: &str) -> u64 {
    let [cause] = ended.causes()[..] else {
        panic!("one line says why: {ended}")
    };
    assert!(!cause.contains("rank 1 on"), "rank 0 says it: {ended}");
    let (_, rest) = cause
        .split_once("stopped at step ")
        .unwrap_or_else(|| panic!("{ended}"));
    let step = rest
        .split(' ')
        .next()
        .and_then(|step| step.parse().ok())
        .unwrap_or_else(|| panic!("{ended}"));
    assert!(
        rest.starts_with(&format!("{step} of {STEPS} by {by}, and saved in ")),
        "{ended}"
    );
    assert!(
        rest.ends_with("; help: continue with the same command and --resume auto"),
        "{ended}"
    );
    assert!(step < STEPS, "it came in the middle: {ended}");
    // The best one before it may be another.
    let last = folder.checkpoints().pop();
    assert_eq!(last, Some(format!("step-{step:08}")), "{ended}");
    let log = folder.metrics_log();
    assert_eq!(log.of_steps("step").last(), Some(&(step as f64)), "{ended}");
    let end = log.end().unwrap_or_else(|| panic!("{log:?}"));
    assert!(end["exit_code"] == 75 && end["steps"] == step, "{end}");
    step
}

/// Goes on with a stopped run, and compares it with one that was not.
#[track_caller]
fn assert_goes_on(folder: &Folder, ranks: usize, from: u64, expected: &Outcome) {
    let ended = job(folder, ranks, &format!("{LONG} --resume auto")).run();
    ended.assert_well();
    let log = folder.metrics_log();
    let resumes: Vec<f64> = log
        .all("resume")
        .into_iter()
        .map(|event| number(event, "step"))
        .collect();
    assert_eq!(resumes, [from as f64], "{ended}");
    assert!(
        outcome(folder, STEPS) == *expected,
        "it comes to something else, from step {from}: {ended}"
    );
}

/// A run that is not stopped, of one rank or of two.
fn undisturbed(ranks: usize) -> &'static Outcome {
    static RUNS: [OnceLock<Outcome>; RANKS.len()] = [const { OnceLock::new() }; RANKS.len()];
    RUNS[ranks - 1].get_or_init(|| {
        let folder = Folder::new("undisturbed");
        job(&folder, ranks, LONG).run().assert_well();
        outcome(&folder, STEPS)
    })
}

/// The step in which rank 0 holds, so that a signal comes in the middle however slow a test is.
const HELD_AT: u64 = 20;

/// The job, started, when its rank 0 holds.
fn held(job: Job) -> Running {
    let at = format!("0:forward:{HELD_AT}");
    let slow = (HELD_AT + 1..HELD_AT + 41).map(|step| format!(",0:forward:{step}:slow"));
    let faults = format!("{at}:hold{}", slow.collect::<String>());
    let running = job.env("DDP_TEST_FAULT", &faults).start();
    running.wait_for_fault(&at);
    running
}

#[test]
fn a_signal_to_any_rank_stops_all_after_the_same_step() {
    let signals = [
        ("TERM", "SIGTERM"),
        ("USR1", USR1),
        ("INT", "SIGINT (Ctrl-C)"),
        ("QUIT", "SIGQUIT"),
    ];
    for ranks in RANKS {
        let expected = undisturbed(ranks);
        let cases = (0..ranks).flat_map(|rank| signals.map(|(signal, told)| (rank, signal, told)));
        let some = ddp_testing::cases_of("signals to ranks", cases, ranks);
        all_at_once(some, |(rank, signal, told)| {
            let folder = Folder::new(&format!("{signal}-{rank}"));
            let running = held(job(&folder, ranks, LONG));
            running.signal_rank(rank, signal);
            running.go_on(HELD_AT);
            let ended = running.wait();
            assert_eq!(ended.exit_code(), Some(75), "{ended}");
            let step = stopped_at(&ended, &folder, told);
            assert_goes_on(&folder, ranks, step, expected);
        });
    }
}

#[test]
fn only_a_second_ctrl_c_ends_a_stopping_run_at_once() {
    let folder = Folder::new("again");
    let running = held(folder.together(LONG));
    for signal in ["USR1", "TERM", "TERM", "INT"] {
        running.signal_rank(0, signal);
    }
    running.go_on(HELD_AT);
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
    stopped_at(&ended, &folder, USR1);

    // A run that does not finish its step cannot stop in order.
    let folder = Folder::new("twice");
    let mut running = folder
        .alone(LONG)
        .env("DDP_TEST_FAULT", "0:forward:3:hang")
        .start();
    running.wait_for_fault("0:forward:3");
    running.signal_rank(0, "INT");
    running.wait_for_said("Ctrl-C: finishing this step");
    assert!(running.goes_on(), "the first only asks");
    running.signal_rank(0, "INT");
    let ended = running.wait();
    assert_eq!(
        (ended.signal(), ended.causes().len()),
        (Some(2), 0),
        "{ended}"
    );
    for said in ["Ctrl-C: finishing this step, then saving", "ended at once"] {
        assert_eq!(ended.stderr.matches(said).count(), 1, "{said}: {ended}");
    }
    assert_eq!(folder.checkpoints(), [""; 0]);
}

#[test]
fn a_stop_during_an_evaluation_takes_effect_after_it() {
    let folder = Folder::new("evaluation");
    let job = folder.together(&LONG.replace("--eval-every 10", "--eval-every 5"));
    let running = job.env("DDP_TEST_FAULT", "0:evaluation:5:hold").start();
    running.wait_for_fault("0:evaluation:5");
    running.signal_rank(0, "TERM");
    running.go_on(5);
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
    let step = stopped_at(&ended, &folder, "SIGTERM");
    assert_eq!(step, 5, "{ended}");
    let evals: Vec<f64> = folder
        .metrics_log()
        .all("eval")
        .into_iter()
        .map(|eval| number(eval, "step"))
        .collect();
    assert_eq!(
        evals.last(),
        Some(&(step as f64)),
        "its evaluation is logged: {evals:?}"
    );
}

#[test]
fn a_stop_in_the_last_step_lets_the_run_end() {
    let folder = Folder::new("last");
    let words = LONG.replace("--steps 80", "--steps 6");
    let ended = folder
        .together(&words)
        .env("DDP_TEST_FAULT", "0:optimizer:6:term")
        .run();
    ended.assert_well();
    assert_eq!(folder.metrics_log().end().unwrap()["exit_code"], 0);
    assert_eq!(folder.checkpoints(), ["step-00000006"]);
}

#[test]
fn a_stop_while_a_finished_job_leaves_changes_nothing() {
    let folder = Folder::new("leaves");
    let ends = [0, 1].map(|rank| format!("{rank}:end:{STEPS}"));
    let faults = ends.each_ref().map(|at| format!("{at}:hold")).join(",");
    let job = folder.together(LONG).env("DDP_TEST_FAULT", &faults);
    let mut running = job.start();
    // All steps are taken and saved, and the metrics log is open.
    ends.iter().for_each(|at| running.wait_for_fault(at));
    let ranks = running.ranks();
    assert_eq!(ranks.len(), 2, "{ranks:?}");
    (0..2).for_each(|rank| running.signal_rank(rank, "TERM"));
    running.go_on(STEPS);
    // Both have got a signal. More of them come while they leave, or too late.
    let pids = ranks.into_iter().map(|(_, pid)| pid.to_string());
    let pids = pids.collect::<Vec<_>>().join(" ");
    let report = folder.out().join("report.html");
    while !report.exists() && running.goes_on() {
        // Sleep: a moment, since what follows is short.
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    let often = format!("for i in 1 2 3 4 5 6 7 8; do kill -s TERM {pids}; sleep 0.01; done");
    let told = std::process::Command::new("sh")
        .args(["-c", &often])
        .output();
    told.expect("there is a shell");
    running.wait().assert_well();
    assert_eq!(folder.metrics_log().end().unwrap()["exit_code"], 0);
}

#[test]
fn a_stop_while_a_run_is_set_up_ends_it_at_once_with_75_and_changes_nothing() {
    let words = LONG.replace(
        "--steps 80",
        "--schedule constant --warmup-steps 0 --steps 6",
    );
    let cases = RANKS
        .iter()
        .flat_map(|&ranks| [("USR1", USR1), ("TERM", "SIGTERM")].map(|signal| (ranks, signal)));
    let cases = ddp_testing::cases_of("stops during set-up", cases, 2);
    all_at_once(cases, |(ranks, (signal, told))| {
        let folder = Folder::new(&format!("setup-{ranks}-{signal}"));
        let hang = (0..ranks)
            .map(|rank| format!("{rank}:setup:0:hang"))
            .collect::<Vec<_>>()
            .join(",");
        let stop = |words: &str| {
            let running = job(&folder, ranks, words)
                .env("DDP_TEST_FAULT", &hang)
                .start();
            running.wait_until_it_listens(ranks);
            running.signal_rank(ranks - 1, signal);
            let ended = running.wait();
            let cause = ended.assert_fails(75);
            assert!(
                cause.contains(&format!("stopped by {told} during set-up, before any step")),
                "{ended}"
            );
            assert!(cause.contains("run the same command again"), "{ended}");
        };
        // A new run, and a resumed one.
        let before = folder.tree();
        stop(&words);
        assert!(folder.tree() == before);
        job(&folder, ranks, &words).run().assert_well();
        let before = folder.tree();
        let longer = words.replace("--steps 6", "--steps 8 --resume auto");
        stop(&longer);
        assert!(folder.tree() == before);
        job(&folder, ranks, &longer).run().assert_well();
        assert_eq!(folder.checkpoints(), ["step-00000006", "step-00000008"]);
    });
}

#[test]
fn ctrl_c_during_set_up_says_that_there_is_nothing_to_save() {
    let folder = Folder::new("setup-ctrl-c");
    let running = folder
        .alone(LONG)
        .env("DDP_TEST_FAULT", "0:setup:0:hang")
        .start();
    // It ends a run that is set up.
    running.wait_for_thread("stop");
    running.signal_rank(0, "INT");
    let ended = running.wait();
    ended.assert_fails(75);
    let told = "Ctrl-C: ending at once: there is nothing to save during set-up";
    assert_eq!(ended.stderr.matches(told).count(), 1, "{ended}");
    assert!(!ended.stderr.contains("finishing this step"), "{ended}");
}

#[test]
fn what_fails_while_a_checkpoint_is_stuck_is_told_at_once() {
    // The test gives up before the stuck rank times out.
    let words = LONG.replace("--checkpoint-every 0", "--checkpoint-every 10");
    let words = format!("{words} {FAR}");
    // Where the write is stuck, and where there is an error.
    let cases = [(1, 0), (2, 0), (2, 1)];
    let some = ddp_testing::cases_of("errors while a checkpoint is stuck", cases, 1);
    all_at_once(some, |(ranks, rank)| {
        let folder = Folder::new(&format!("stuck-{ranks}-{rank}"));
        let fault = format!("0:save:10:hang,{rank}:forward:15:error");
        let ended = job(&folder, ranks, &words)
            .env("DDP_TEST_FAULT", &fault)
            .run();
        assert!(
            ended
                .assert_fails(65)
                .contains("a fault on purpose in Forward of step 15"),
            "{ended}"
        );
        assert!(
            !folder.checkpoints().contains(&"step-00000010".to_string()),
            "{ended}"
        );
        // Nothing holds the folder any more.
        job(&folder, ranks, &format!("{words} --resume auto"))
            .run()
            .assert_well();
    });
}

#[cfg(feature = "mpi")]
#[test]
fn a_launcher_that_ends_its_ranks_by_sigterm_gives_them_time_to_save() {
    // Open MPI 4 sends SIGTERM some seconds after it was told to end, and SIGKILL as many later:
    // the end of patience.
    let words = LONG.replace("--steps 80", "--steps 1000000");
    // Steps of 50 ms leave the cores to other tests meanwhile.
    let slow = (1..=2000).map(|step| format!("0:optimizer:{step}:slow"));
    let slow = slow.collect::<Vec<_>>().join(",");
    let signals = ddp_testing::cases_of("signals to a launcher", ["TERM", "INT"], 1);
    all_at_once(signals, |signal| {
        let folder = Folder::new(&format!("mpirun-{signal}"));
        let job = folder
            .each(&[(2, words.as_str())])
            .env("OMPI_MCA_odls_base_sigkill_timeout", "60");
        let mut running = job.env("DDP_TEST_FAULT", &slow).start();
        running.wait_for(r#"{"event":"step","step":2,"#);
        running.signal(signal);
        running.wait_until("the end of the ranks", || running.ranks().is_empty());
        // It would wait for as long again before it ends.
        running.kill();
        let ended = running.wait();
        let log = folder.metrics_log();
        let end = log.end().unwrap_or_else(|| panic!("{log:?}: {ended}"));
        assert!(
            end["outcome"] == "stopped"
                && end["exit_code"] == 75
                && end["reason"].as_str().unwrap().contains("by SIGTERM"),
            "{end}: {ended}"
        );
        let last = format!("step-{:08}", end["steps"].as_u64().unwrap());
        assert_eq!(folder.checkpoints().last(), Some(&last), "{ended}");
    });
}
