//! Lost ranks with GPUs (`--min-ranks`): the others abort their NCCL calls, which then have no
//! results, and continue. With `--same-bits` the model is bit-identical to that of an undisturbed
//! run. The host is several steps ahead of the GPU, but under ZeRO-1 it waits for each step.
//! Faults can only be planned for simulated GPUs, and each rank has its own.

use std::sync::OnceLock;
use std::time::Duration;

use crate::simulated_gpus_of_jobs;
use crate::support::job::{Ended, Folder, Job, all_at_once, kill_ranks};
use crate::support::metrics_log::model_bytes;
use crate::support::test_name;

const STEPS: u64 = 24;
const RUN: &str = "--data glyphs,rows=512,held-out=32 --hidden 16 --batch-size 32 --steps 24 --log-every 5 \
                   --eval-every 11 --checkpoint-every 9 --same-bits 4 --dropout 0.1 --grad-clip 1 --micro-batch 4 \
                   --threads 1 --device cuda --out OUT";

/// What a run leaves that must not depend on its ranks.
#[derive(PartialEq)]
struct Left {
    model: Vec<u8>,
    steps: Vec<f64>,
    losses: Vec<f64>,
    /// None if the last rank was killed when all was done.
    samples: Option<f64>,
}

fn left(folder: &Folder) -> Left {
    let log = folder.metrics_log();
    Left {
        model: model_bytes(&folder.out(), STEPS),
        steps: log.of_steps("step"),
        losses: log.losses(),
        samples: log.end().map(|end| end["samples"].as_f64().unwrap()),
    }
}

/// The run that nothing disturbs.
fn undisturbed() -> &'static Left {
    static LEFT: OnceLock<Left> = OnceLock::new();
    LEFT.get_or_init(|| {
        let folder = Folder::new("losing-none");
        folder.started(2, RUN).on_gpus().run().assert_well();
        left(&folder)
    })
}

/// A job of three ranks that may lose some, with this seed of its GPUs.
fn job(folder: &Folder, flags: &str, seed: usize) -> Job {
    job_of(3, folder, flags, seed)
}

fn job_of(ranks: usize, folder: &Folder, flags: &str, seed: usize) -> Job {
    let job = folder.started(ranks, &format!("{RUN} --min-ranks 1 {flags}"));
    job.on_gpus().env("SIMCUDA_SEED", &seed.to_string())
}

/// The job did all its work, with the same bits, and lost these ranks.
#[track_caller]
fn assert_undisturbed(folder: &Folder, ended: &Ended, lost: &[u64]) {
    let log = folder.metrics_log();
    let events = log.all("ranks").into_iter();
    let names = events.flat_map(|event| event["lost"].as_array().unwrap().clone());
    let mut names: Vec<u64> = names.map(|it| it["rank"].as_u64().unwrap()).collect();
    names.sort_unstable();
    assert_eq!(names, lost, "{ended}");
    assert!(log.end().is_some(), "{ended}");
    assert_same(folder, ended);
}

/// The job did all its work, with the same bits.
#[track_caller]
fn assert_same(folder: &Folder, ended: &Ended) {
    assert_eq!(ended.exit_code(), Some(0), "{ended}");
    let (left, expected) = (left(folder), undisturbed());
    // Each process has made the settings of NCCL.
    assert!(!ended.stderr.contains("bits differ"), "{ended}");
    assert_eq!(left.steps, expected.steps, "{ended}");
    assert!(left.losses == expected.losses, "{ended}");
    let is_same = left.samples.is_none_or(|it| Some(it) == expected.samples);
    assert!(is_same, "{ended}");
    assert!(left.model == expected.model, "{ended}");
}

/// For ranks, GPUs and calls that only a timeout can notice. Healthy ones are sooner.
const SHORT: &str = "--timeout-s 20";

const GRAPHS: [&str; 2] = ["on", "off"];
const POINTS: [&str; 3] = ["forward", "reduction", "optimizer"];

#[test]
fn a_killed_rank_costs_no_bit_in_any_order_of_the_work() {
    let Some(_gpu) = simulated_gpus_of_jobs(3) else {
        return;
    };
    undisturbed();
    // Steps 1 and 2 are eager, 3 to 6 are captured, later ones launched.
    let steps = [1, 3, 4, 12, 13, 14, 18];
    let cases = (0..10_usize).flat_map(|seed| {
        let step = move |step| POINTS.map(|point| (seed, point, step));
        steps.into_iter().flat_map(step)
    });
    let cases = ddp_testing::cases_of(&test_name(), cases, 2);
    // No step is complete by then.
    let first = [(1, "reduction", 1)];
    all_at_once(cases.into_iter().chain(first), |(seed, point, step)| {
        let (folder, rank) = (Folder::new("losing-one"), seed % 3);
        let graph = GRAPHS[step % 7 / 5];
        let fault = format!("{rank}:{point}:{step}:kill");
        let job = job(&folder, &format!("--graph {graph}"), seed);
        let ended = job.env("DDP_TEST_FAULT", &fault).run();
        assert_undisturbed(&folder, &ended, &[rank as u64]);
    });
}

#[test]
fn slices_of_a_killed_rank_are_kept_by_its_neighbour() {
    let Some(_gpu) = simulated_gpus_of_jobs(4) else {
        return;
    };
    undisturbed();
    let steps = [1, 3, 4, 12, 13, 14, 18];
    let cases = (0..12_usize).flat_map(|seed| {
        let step = move |step| POINTS.map(|point| (seed, point, step));
        steps.into_iter().flat_map(step)
    });
    let cases = ddp_testing::cases_of(&test_name(), cases, 2);
    all_at_once(cases, |(seed, point, step)| {
        let ranks = 2 + seed % 3;
        let (folder, rank) = (Folder::new("losing-slice"), seed % ranks);
        let graph = GRAPHS[step % 7 / 5];
        let fault = format!("{rank}:{point}:{step}:kill");
        let job = job_of(ranks, &folder, &format!("--zero 1 --graph {graph}"), seed);
        let ended = job.env("DDP_TEST_FAULT", &fault).run();
        assert!(
            !ended.stderr.contains("last checkpoint"),
            "{fault}: {ended}"
        );
        assert_undisturbed(&folder, &ended, &[rank as u64]);
    });
}

#[test]
fn an_update_that_all_are_ready_for_is_made_by_ranks_that_come_to_it_late() {
    let Some(_gpu) = simulated_gpus_of_jobs(4) else {
        return;
    };
    undisturbed();
    // The rank that is lost next, and those whose GPUs get the update after that.
    let cases = [
        (3, 0, &[1][..]),
        (3, 0, &[2]),
        (3, 1, &[0]),
        (3, 2, &[0, 1]),
        (2, 1, &[0]),
        (4, 1, &[0, 2, 3]),
        (4, 3, &[1, 2]),
    ];
    let cases = cases
        .into_iter()
        .flat_map(|case| [0, 1].map(|seed| (seed, case)));
    let cases = ddp_testing::cases_of(&test_name(), cases, 1);
    all_at_once(cases, |(seed, (ranks, lost, late))| {
        let folder = Folder::new("losing-late");
        let late = late.iter().map(|rank| format!("{rank}:agreed:14:work"));
        // Until then the ranks have agreed on step 14.
        let lost_at = ["optimizer:14:pause", "forward:15:kill"];
        let lost_at = lost_at.map(|fault| format!("{lost}:{fault}"));
        let faults: Vec<_> = late.chain(lost_at).collect();
        // An odd seed leaves finite garbage where calls end without a result.
        let job = job_of(ranks, &folder, "--zero 1 --graph off", seed);
        let job = job.env("SIMCUDA_SCHEDULE", "eager");
        let ended = job.env("DDP_TEST_FAULT", &faults.join(",")).run();
        assert!(!ended.stderr.contains("last checkpoint"), "{ended}");
        assert_undisturbed(&folder, &ended, &[lost]);
    });
}

#[test]
fn an_update_is_made_by_all_ranks_or_by_none_with_whole_matrices_too() {
    let Some(_gpu) = simulated_gpus_of_jobs(3) else {
        return;
    };
    let faults = [
        // The others have made it, or none has.
        "0:agreed:14:leave",
        "2:optimizer:14:leave",
        "1:agreed:3:leave,0:reduction:13:kill",
        "2:agreed:13:kill",
    ];
    let of = |hidden| faults.map(|faults| (faults, hidden));
    let cases = ["16", "16,16 --optimizer muon"].into_iter().flat_map(of);
    all_at_once(
        ddp_testing::cases_of(&test_name(), cases, 1),
        |(faults, hidden)| {
            let run = RUN.replace("--hidden 16", &format!("--hidden {hidden}"));
            let folder = Folder::new("losing-update-none");
            folder.started(2, &run).on_gpus().run().assert_well();
            let expected = left(&folder);
            let graph = GRAPHS[faults.len() % 2];
            let words = format!("{run} --min-ranks 1 --zero 1 --graph {graph}");
            let folder = Folder::new("losing-update");
            let job = folder.started(3, &words).on_gpus();
            let ended = job.env("DDP_TEST_FAULT", faults).run();
            assert_eq!(ended.exit_code(), Some(0), "{faults}: {ended}");
            assert!(
                !ended.stderr.contains("last checkpoint"),
                "{faults}: {ended}"
            );
            assert!(
                !folder.metrics_log().all("ranks").is_empty(),
                "{faults}: {ended}"
            );
            assert!(left(&folder) == expected, "{faults}: {ended}");
        },
    );
}

#[test]
fn a_rank_whose_gpu_fails_says_so_and_the_others_continue() {
    let Some(_gpu) = simulated_gpus_of_jobs(3) else {
        return;
    };
    undisturbed();
    let errors = ["illegal_address", "ecc_uncorrectable", "launch_failure"];
    let cases = (0..30_usize).map(|case| (case, errors[case / 10], 250 + 27 * (case % 10)));
    all_at_once(
        ddp_testing::cases_of(&test_name(), cases, 2),
        |(case, error, kernel)| {
            let (folder, rank) = (Folder::new("losing-gpu"), case % 2);
            let plan = format!("rank{rank}:kernel@{kernel}={error}");
            let job = job(&folder, &format!("--graph {}", GRAPHS[case / 15]), case);
            let ended = job.env("SIMCUDA_FAULTS", &plan).run();
            let said = ["CUDA_ERROR_", "this rank leaves, and the others continue"];
            let line = ended
                .stderr
                .lines()
                .find(|line| said.iter().all(|part| line.contains(part)));
            assert!(line.is_some(), "{plan}: {ended}");
            assert_undisturbed(&folder, &ended, &[rank as u64]);
        },
    );
}

#[test]
fn a_kernel_that_hangs_costs_its_rank_and_a_collective_that_hangs_costs_none() {
    let Some(_gpu) = simulated_gpus_of_jobs(3) else {
        return;
    };
    undisturbed();
    let kernels = (0..10_usize).map(|case| (case, format!("kernel@{}=hang", 250 + 27 * case)));
    let calls = (0..10_usize).map(|case| (case, format!("nccl@{}=hang", 40 + 9 * case)));
    let of = |cases: Vec<_>, name| ddp_testing::cases_of(&(test_name() + name), cases, 1);
    let cases = [
        of(kernels.collect(), "kernels"),
        of(calls.collect(), "calls"),
    ]
    .concat();
    all_at_once(cases, |(case, plan)| {
        let (folder, rank) = (Folder::new("losing-hang"), case % 3);
        let flags = format!("{SHORT} --graph {}", GRAPHS[case / 5]);
        let job = job(&folder, &flags, case);
        let ended = job
            .env("SIMCUDA_FAULTS", &format!("rank{rank}:{plan}"))
            .run();
        let lost = [rank as u64];
        let is_kernel = plan.starts_with("kernel");
        assert_undisturbed(&folder, &ended, &lost[..usize::from(is_kernel)]);
        // Which rank a send or receive lacks, only the rank itself knows, which then leaves. The
        // others may wait in one, too, and one of them may be the first to say so.
        let told = [
            "not done within 20 s",
            "did not arrive within 20 s",
            "the GPU has not done its work after 20 s",
        ];
        let mut told = told.iter().take(if is_kernel { 3 } else { 1 });
        assert!(
            told.any(|told| ended.stderr.contains(told)),
            "{plan}: {ended}"
        );
    });
}

#[test]
fn a_rank_that_cannot_end_its_calls_is_lost_too_and_says_so() {
    let Some(_gpu) = simulated_gpus_of_jobs(3) else {
        return;
    };
    undisturbed();
    for graph in ddp_testing::cases_of(&test_name(), GRAPHS, 1) {
        let folder = Folder::new("losing-abort");
        let job = job(&folder, &format!("{SHORT} --graph {graph}"), 1);
        let job = job.env("SIMCUDA_FAULTS", "rank1:ncclCommAbort@1=hang");
        let ended = job.env("DDP_TEST_FAULT", "0:forward:14:kill").run();
        assert_undisturbed(&folder, &ended, &[0, 1]);
        let told =
            "cannot end the calls of group gradients: ncclCommAbort has not returned after 20 s";
        assert!(ended.stderr.contains(told), "{ended}");
    }
}

#[test]
fn a_rank_that_comes_back_gets_the_gpu_that_was_its_own() {
    let Some(_gpu) = simulated_gpus_of_jobs(3) else {
        return;
    };
    undisturbed();
    let cases = (0..8_usize).map(|case| (case, GRAPHS[case / 4]));
    all_at_once(
        ddp_testing::cases_of(&test_name(), cases, 1),
        |(seed, graph)| {
            let (folder, rank) = (Folder::new("losing-again"), seed % 3);
            let flags = format!("--restarts 1 --graph {graph}");
            // Another one holds until the rank is killed, and waits until it comes back.
            let other = (rank + 1) % 3;
            let held = format!("{other}:forward:8");
            let faults = format!("{held}:hold,{other}:newcomer:11:hold");
            let job = job(&folder, &flags, seed).env("DDP_TEST_FAULT", &faults);
            let running = job.start();
            running.wait_for_fault(&held);
            running.signal_rank(rank, "KILL");
            running.go_on(8);
            let ended = running.wait();
            assert_undisturbed(&folder, &ended, &[rank as u64]);
            let log = folder.metrics_log();
            let joined = log.all("ranks").into_iter();
            let joined: Vec<_> = joined
                .flat_map(|it| it["joined"].as_array().unwrap().clone())
                .collect();
            assert_eq!(joined, [rank], "{ended}");
        },
    );
}

/// Garbage is where a gather that was ended has put values: a rank that is alone then has no others
/// to get them from. While slices are cut anew, the host of the rank that has come waits for its
/// GPU, and the other host for that rank, which is not to blame.
#[test]
fn a_gather_of_a_step_or_for_slices_slice_anew_that_hangs_costs_no_bit_and_no_rank() {
    let Some(_gpu) = simulated_gpus_of_jobs(2) else {
        return;
    };
    undisturbed();
    // Gathers of rank 0: a warm-up, step 1, step 2, in which it loses rank 1, a warm-up with the
    // rank that has come, and that for the slices.
    let cases = (0..4_usize).flat_map(|seed| [(seed, 3), (seed, 5)]);
    all_at_once(
        ddp_testing::cases_of(&test_name(), cases, 1),
        |(seed, gather)| {
            let folder = Folder::new("losing-gather");
            let flags = format!("{SHORT} --zero 1 --graph off --restarts 1");
            let faults = "1:forward:2:kill,1:joining:0:hold,0:newcomer:5:hold";
            let job = job_of(2, &folder, &flags, seed).env("DDP_TEST_FAULT", faults);
            let hang = format!("rank0:nccl/ncclAllGather@{gather}=hang");
            let mut running = job.env("SIMCUDA_FAULTS", &hang).start();
            // The steps alone are over.
            running.wait_for(r#""event":"step","step":5,"#);
            running.go_on(0);
            let ended = running.wait();
            let told = r#"all_gather of "values, bucket 0""#;
            assert!(gather == 3 || ended.stderr.contains(told), "{ended}");
            assert_undisturbed(&folder, &ended, &[1]);
        },
    );
}

#[test]
#[ignore = "launch/search runs it"]
fn ranks_that_are_killed_at_any_time_come_back_and_change_no_bit() {
    let Some(_gpu) = simulated_gpus_of_jobs(3) else {
        return;
    };
    undisturbed();
    let cases = (0..12_usize).map(|case| (case, GRAPHS[case / 6]));
    all_at_once(
        ddp_testing::cases_of(&test_name(), cases, 1),
        |(seed, graph)| {
            let folder = Folder::new("losing-often");
            let job = job(&folder, &format!("--restarts 1000 --graph {graph}"), seed);
            let slow = |step| POINTS.map(|point| format!("0:{point}:{step}:slow"));
            let slow: Vec<_> = (1..=24).flat_map(slow).collect();
            // However fast they are, they are killed before the end.
            let faults = format!("0:forward:20:hold,{}", slow.join(","));
            // Kills hit ranks that make communicators, too.
            let job = job
                .env("SIMCUDA_JOIN_MS", "100")
                .env("DDP_TEST_FAULT", &faults);
            let mut running = job.start();
            running.wait_for(r#""event":"step","step":1,"#);
            let kills = kill_ranks(&mut running, seed as u64, Duration::from_secs(2));
            running.go_on(20);
            let ended = running.wait();
            assert!(kills > 0, "{ended}");
            assert_same(&folder, &ended);
        },
    );
}

#[test]
fn an_error_of_nccl_repeats_the_step_and_one_that_lasts_ends_the_job() {
    let Some(_gpu) = simulated_gpus_of_jobs(3) else {
        return;
    };
    undisturbed();
    let calls = (20..40).map(|call| format!("rank1:ncclSend@{call}=remote_error"));
    let one = ddp_testing::cases_of(&test_name(), calls, 1).remove(0);
    // NCCL's own calls of all communicators count.
    let all: Vec<_> = (30..60)
        .map(|call| format!("rank1:ncclSend@{call}=remote_error"))
        .collect();
    all_at_once([(one, 0), (all.join(";"), 77)], |(plan, exit_code)| {
        let folder = Folder::new("losing-error");
        let ended = job(&folder, "--graph off", 0)
            .env("SIMCUDA_FAULTS", &plan)
            .run();
        assert!(ended.stderr.contains("ncclRemoteError"), "{ended}");
        match exit_code {
            0 => assert_undisturbed(&folder, &ended, &[]),
            _ => assert_eq!(ended.exit_code(), Some(exit_code), "{ended}"),
        }
    });
}
