//! Ranks that the program itself starts (`--ranks`): signals, exit codes, restarts. What holds for
//! all ranks, however they were started, is in the other files.

use crate::support::job::{Ended, Folder, Job, QUICK, STEP_2, all_at_once};
use crate::support::metrics_log::model_bytes;

/// Steps of some milliseconds, without end.
pub(crate) const ENDLESS: &str = "--data glyphs,rows=2048,held-out=64 --hidden 64 --batch-size 256 --steps 1000000 \
                       --log-every 1 --eval-every 0 --checkpoint-every 0 --threads 1 --out OUT";

#[cfg(feature = "mpi")]
#[test]
fn ranks_train_the_bits_that_mpirun_s_ranks_train() {
    let [own, mpi] = ["own", "mpi"].map(Folder::new);
    own.started(3, QUICK).run().assert_well();
    mpi.each(&[(3, QUICK)]).run().assert_well();
    assert_eq!(model_bytes(&own.out(), 8), model_bytes(&mpi.out(), 8));
}

#[test]
fn every_signal_to_the_starter_stops_the_ranks_which_save() {
    let signals = [
        ("INT", "SIGINT (Ctrl-C)"),
        ("TERM", "SIGTERM"),
        ("HUP", "SIGHUP (its terminal was closed)"),
        ("QUIT", "SIGTERM"),
        ("USR1", "SIGUSR1"),
    ];
    all_at_once(signals, |(signal, told)| {
        let folder = Folder::new(&format!("started-{signal}"));
        let mut running = folder.started(2, ENDLESS).start();
        running.wait_for(STEP_2);
        running.signal(signal);
        let ended = running.wait();
        assert_eq!(ended.exit_code(), Some(75), "{ended}");
        let [cause] = ended.causes()[..] else {
            panic!("one line says why: {ended}")
        };
        assert!(cause.contains(&format!(" by {told}")), "{ended}");
        assert_eq!(folder.checkpoints().len(), 1, "{ended}");
    });
}

#[test]
fn a_second_ctrl_c_ends_all_at_once_with_130() {
    let folder = Folder::new("started-twice");
    let job = folder.started(2, ENDLESS);
    let mut running = job.env("DDP_TEST_FAULT", "1:forward:3:hang").start();
    running.wait_for_fault("1:forward:3");
    running.signal("INT");
    running.wait_for_said("Ctrl-C: finishing this step");
    assert!(running.goes_on(), "the first only asks");
    running.signal("INT");
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(130), "{ended}");
    // No rank blames another that ended a moment before it.
    assert_eq!(ended.causes(), [""; 0], "{ended}");
    assert_eq!(folder.checkpoints(), [""; 0]);
}

/// Each rank took what the launcher passed on for a second Ctrl-C: the job ended unsaved, with 130.
#[test]
fn one_ctrl_c_to_every_process_of_a_job_stops_it_and_saves() {
    let folder = Folder::new("started-all");
    let job = folder.started(2, ENDLESS);
    let running = job.env("DDP_TEST_FAULT", "0:forward:3:hold").start();
    running.wait_for_fault("0:forward:3");
    running.signal("INT");
    let told = "Ctrl-C: finishing this step";
    running.wait_for_said(told);
    (0..2).for_each(|rank| running.signal_rank(rank, "INT"));
    running.go_on(3);
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
    assert_eq!(ended.stderr.matches(told).count(), 1, "{ended}");
    assert_eq!(folder.checkpoints().len(), 1, "{ended}");
}

/// It ended with 137 and no word.
#[test]
fn a_job_whose_ranks_are_all_killed_says_by_what_and_what_is_saved() {
    // Ranks are stopped first, so that none sees the end of another one.
    let words = ENDLESS.replace("--checkpoint-every 0", "--checkpoint-every 2");
    for (folder, words, saved) in [
        (Folder::new("started-killed"), &*words, true),
        (Folder::new("started-killed-early"), ENDLESS, false),
    ] {
        let faults = "0:forward:5:hold,1:forward:5:hold";
        let running = folder
            .started(2, words)
            .env("DDP_TEST_FAULT", faults)
            .start();
        (0..2).for_each(|rank| running.wait_for_fault(&format!("{rank}:forward:5")));
        if saved {
            running.wait_for_file("out/checkpoints/step-00000004");
        }
        (0..2).for_each(|rank| running.signal_rank(rank, "STOP"));
        (0..2).for_each(|rank| running.signal_rank(rank, "KILL"));
        let ended = running.wait();
        assert_eq!(ended.exit_code(), Some(137), "{ended}");
        let [killed, left] = ended.causes()[..] else {
            panic!("two lines: {ended}")
        };
        let told = "ddp-train: ranks 0 and 1 killed by signal 9: no rank is left";
        assert!(killed.starts_with(told), "{ended}");
        let folder = folder.out().display().to_string();
        let told = if saved {
            format!("ddp-train: the newest checkpoint is {folder}/checkpoints/step-00000004; ")
        } else {
            format!("ddp-train: {folder} holds no checkpoint; ")
        };
        assert!(left.starts_with(&told), "{ended}");
    }
}

/// Nothing but the rank that was asked knew, and the job started again.
#[test]
fn a_job_of_which_a_rank_is_asked_to_stop_and_another_is_lost_does_not_start_again() {
    let folder = Folder::new("started-asked");
    let words = ENDLESS.replace("--steps 1000000", "--steps 60");
    let job = folder.started(2, &format!("{words} --restarts 3"));
    let running = job.env("DDP_TEST_FAULT", "0:forward:20:hold").start();
    running.wait_for_fault("0:forward:20");
    running.signal_rank(0, "TERM");
    running.signal_rank(1, "KILL");
    running.go_on(20);
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(75), "{ended}");
    let told = "ddp-train: the job ended with 137: it was asked to stop, and is not started again; \
                help: --resume auto continues";
    assert!(ended.causes().contains(&told), "{ended}");
}

#[test]
fn a_rank_that_does_not_save_in_time_is_killed_and_named() {
    let folder = Folder::new("started-grace");
    let job = folder.started(2, &format!("{ENDLESS} --grace-s 1"));
    let running = job.env("DDP_TEST_FAULT", "1:forward:3:stop").start();
    running.wait_for_fault("1:forward:3");
    running.signal("TERM");
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(143), "{ended}");
    let told = "ddp-train: ranks 0 and 1 did not end within 1 s: killed";
    assert_eq!(ended.causes(), [told], "{ended}");
}

#[test]
fn no_rank_outlives_a_starter_that_is_killed() {
    let folder = Folder::new("started-orphans");
    let mut running = folder.started(2, ENDLESS).start();
    running.wait_for(STEP_2);
    running.kill();
    // Waiting asserts that no process is left.
    let ended = running.wait();
    assert_eq!(ended.signal(), Some(9), "{ended}");
    assert!(ended.stderr.contains("the launcher of this job"), "{ended}");
}

#[test]
fn a_job_that_lost_a_rank_starts_again_and_resumes() {
    start_again_after_a_kill("started", |folder, words| folder.started(2, words));
}

/// A job of two ranks that `job` makes of a folder and words loses rank 1, starts again and trains
/// the model of a job that lost none. Returns how it ended.
pub(crate) fn start_again_after_a_kill(name: &str, job: impl Fn(&Folder, &str) -> Job) -> Ended {
    let words = ENDLESS.replace("--steps 1000000", "--steps 60");
    let words = words.replace("--checkpoint-every 0", "--checkpoint-every 1");
    let [whole, again] = ["whole", "again"].map(|end| Folder::new(&format!("{name}-{end}")));
    whole.started(2, &words).run().assert_well();
    let job = job(&again, &format!("{words} --restarts 1"));
    let running = job.env("DDP_TEST_FAULT", "0:forward:20:hold").start();
    running.wait_for_fault("0:forward:20");
    running.signal_rank(1, "KILL");
    running.go_on(20);
    let ended = running.wait();
    assert_eq!(ended.exit_code(), Some(0), "{ended}");
    let told = "ddp-train: the job ended with 137: starting again with --resume auto (1 of 1)";
    assert!(ended.causes().contains(&told), "{ended}");
    assert_eq!(model_bytes(&again.out(), 60), model_bytes(&whole.out(), 60));
    ended
}

#[test]
fn a_job_that_keeps_losing_ranks_ends_with_their_code() {
    let folder = Folder::new("started-gives-up");
    let job = folder.started(2, &format!("{QUICK} --restarts 2"));
    let ended = job.env("DDP_TEST_FAULT", "1:forward:3:kill").run();
    assert_eq!(ended.exit_code(), Some(137), "{ended}");
    let starts = ended.stderr.matches("starting again").count();
    assert_eq!(starts, 2, "{ended}");
}

#[test]
fn a_rank_of_another_launcher_starts_no_ranks_and_joins_none() {
    let (folder, words) = (Folder::new("started-by"), format!("{QUICK} --ranks 2"));
    let torch = [
        "RANK=0",
        "WORLD_SIZE=2",
        "MASTER_ADDR=127.0.0.1",
        "MASTER_PORT=9",
    ];
    let slurm = [
        "SLURM_PROCID=0",
        "SLURM_STEP_NUM_TASKS=2",
        "SLURM_STEP_NODELIST=a",
    ];
    let exports = [torch.join(" "), slurm.join(" ")].map(|all| format!("export {all}"));
    let jobs = exports.iter().map(|all| folder.in_shell(all, &words));
    #[cfg(feature = "mpi")]
    let jobs = jobs.chain([folder.each(&[(2, &words)])]);
    for job in jobs {
        let ended = job.run();
        let cause = ended.assert_fails(2);
        let told = "ddp-train: --ranks: a launcher has started this process";
        assert!(cause.starts_with(told), "{ended}");
    }
}

#[test]
fn more_ranks_than_a_host_may_have_are_refused_before_any_is_started() {
    let folder = Folder::new("started-many");
    let ended = folder.started(257, QUICK).run();
    let told = "ddp-train: --ranks: expected at most 256 ranks on a host, got 257 on localhost; help: \
                start fewer there, each with more --threads";
    assert_eq!(ended.assert_fails(2), told);
}

#[test]
fn a_stack_that_is_too_small_is_refused_by_its_limit() {
    let folder = Folder::new("started-stack");
    for words in [QUICK.to_string(), format!("{QUICK} --ranks 2")] {
        let ended = folder.in_shell("ulimit -s 64", &words).run();
        let cause = ended.assert_fails(71);
        assert!(
            cause.ends_with("got 65536; help: raise it (ulimit -s)"),
            "{ended}"
        );
    }
}

#[test]
fn a_limit_that_is_too_small_is_named_with_one_help() {
    let folder = Folder::new("started-limit");
    let job = folder.in_shell("ulimit -v 300000", &format!("{QUICK} --ranks 2"));
    let ended = job.run();
    let cause = ended.assert_fails(71);
    assert!(cause.contains("rank 0: cannot connect"), "{ended}");
    assert!(cause.ends_with("; help: raise it (ulimit -v)"), "{ended}");
    assert_eq!(cause.matches("help:").count(), 1, "{ended}");
}
