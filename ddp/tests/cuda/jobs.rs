//! `ddp-train` under the real `mpirun` with a GPU for each rank: the same model captured and eager,
//! with ZeRO-1 and split over devices; which rank gets which GPU; and how a job ends if ranks, GPUs
//! or collectives fail.

use crate::support::job::{Ended, FAR, Folder, QUICK, all_at_once, host};
use crate::support::metrics_log::{model_bytes, number};
use crate::support::test_name;
use crate::{gpus_of_jobs, simulated_gpus_of_jobs};

/// Epochs of 8 steps of 32 rows and one of 5.
const UNEVEN: &str = "--data glyphs,rows=261,held-out=64 --hidden 16 --batch-size 32 --epochs 2 --log-every 3 --out OUT \
                      --threads 1 --device cuda";
const UNEVEN_STEPS: u64 = 18;

/// How many GPUs there are, if any can be used.
fn gpus() -> usize {
    ddp_kernels::Device::usable().len() - 1
}

/// The losses and the model of a job that goes well.
#[track_caller]
fn model_of(ranks: usize, flags: &str) -> (Vec<f64>, Vec<u8>) {
    let folder = Folder::new("gpus");
    let ended = folder
        .ranks(ranks, &format!("{UNEVEN} {flags}"))
        .on_gpus()
        .run();
    ended.assert_well();
    let log = folder.metrics_log();
    let devices = log.start()["devices"].as_array().unwrap().clone();
    for (rank, device) in devices.iter().enumerate() {
        let is_its_own = flags.contains("devices-per-rank")
            || device
                .as_str()
                .unwrap()
                .starts_with(&format!("cuda:{rank} "));
        assert!(is_its_own, "{devices:?}");
    }
    assert_eq!(number(log.end().unwrap(), "samples"), 2.0 * 261.0);
    (log.losses(), model_bytes(&folder.out(), UNEVEN_STEPS))
}

#[test]
fn ranks_train_on_gpus_of_their_own_and_captured_steps_have_the_bits_of_eager_ones() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let all = "--dropout 0.1 --grad-clip 1 --micro-batch 5 --reduce-dtype bf16 --bucket-mb 0.01";
    let ways = ["--graph on", "--overlap off", "--data-on-device off"];
    let cases = (1..=gpus().min(4)).flat_map(|ranks| ["", all].map(|flags| (ranks, flags)));
    let cases: Vec<_> = ddp_testing::cases_of(&test_name(), cases, 1);
    all_at_once(cases, |(ranks, flags)| {
        let eager = model_of(ranks, &format!("{flags} --graph off"));
        for way in ways {
            let other = model_of(ranks, &format!("{flags} {way}"));
            assert!(other == eager, "{ranks} ranks {flags} {way}");
        }
    });
}

#[test]
fn the_record_says_where_nccl_may_add_in_another_order() {
    let Some(_gpu) = gpus_of_jobs(2) else { return };
    let both = serde_json::json!(["NCCL_GRAPH_REGISTER", "NCCL_NVLS_ENABLE"]);
    let of_the_user = serde_json::json!(["NCCL_NVLS_ENABLE"]);
    for (flags, nvls, expected) in [
        ("", None, None),
        ("--nccl fast", None, Some(both)),
        ("", Some("1"), Some(of_the_user)),
    ] {
        let folder = Folder::new("bits");
        let words = QUICK.replace("--epochs 1", &format!("--steps 1 --device cuda {flags}"));
        let job = folder.ranks(2, &words).on_gpus();
        let job = match nvls {
            Some(value) => job.env("NCCL_NVLS_ENABLE", value),
            None => job,
        };
        let ended = job.run();
        ended.assert_well();
        // A run that asks for it gets no warning.
        let warned = ended.stderr.contains("so that bits differ");
        assert_eq!(warned, nvls == Some("1"), "{flags} {nvls:?}: {ended}");
        let log = folder.metrics_log();
        let world = &log.start()["world"];
        assert_eq!(world.get("bits_may_differ"), expected.as_ref(), "{world}");
        let seen = folder.alone("inspect OUT").run();
        seen.assert_well();
        let page = std::fs::read_to_string(folder.out().join("report.html")).unwrap();
        let page = page.replace("<wbr>", "");
        for text in [&seen.stdout, &page] {
            let said = text.contains("may differ from run to run, since these are not 0: NCCL_");
            assert_eq!(said, expected.is_some(), "{flags} {nvls:?}: {text}");
        }
    }
}

#[test]
fn more_ranks_than_gpus_are_refused_with_the_table_and_auto_takes_the_cpu_and_says_so() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let ranks = gpus() + 1;
    let folder = Folder::new("too-many");
    let ended = folder
        .ranks(ranks, &format!("{QUICK} --device cuda"))
        .on_gpus()
        .run();
    let cause = ended.assert_fails(2);
    assert!(
        cause.contains(&format!(
            "--device cuda: expected GPUs that all {ranks} ranks can use"
        )),
        "{ended}"
    );
    assert!(
        ended.stderr.contains("--device cpu") && ended.stderr.contains("--share-gpus"),
        "{ended}"
    );
    let ended = folder.ranks(ranks, QUICK).on_gpus().run();
    ended.assert_well();
    assert_eq!(
        ended
            .stderr
            .matches("training on the CPU although there")
            .count(),
        1,
        "{ended}"
    );
    let devices = folder.metrics_log().start()["devices"]
        .as_array()
        .unwrap()
        .clone();
    assert!(
        devices
            .iter()
            .all(|device| device.as_str().unwrap().starts_with("cpu on ")),
        "{devices:?}"
    );
}

#[test]
fn it_is_said_once_how_nccl_connects_ranks_unless_the_user_has_its_log() {
    let Some(_gpu) = gpus_of_jobs(2) else { return };
    for (level, said) in [(None, 1), (Some("VERSION"), 0)] {
        let folder = Folder::new("connected");
        let job = folder.ranks(2, &format!("{QUICK} --device cuda")).on_gpus();
        let ended = match level {
            Some(level) => job.env("NCCL_DEBUG", level).run(),
            None => job.run(),
        };
        ended.assert_well();
        let text = "connects rank 0 by P2P/CUMEM";
        assert_eq!(ended.stderr.matches(text).count(), said, "{ended}");
    }
}

/// For ranks that only a timeout can notice. Longer than compiling a kernel takes on a busy
/// machine.
const NEAR: u64 = 20;

/// The end of a job of two ranks in which rank `rank` meets its fault in step 7, which is captured
/// if any is.
#[track_caller]
fn fault(rank: usize, place: &str, kind: &str, flags: &str) -> Ended {
    let folder = Folder::new(&format!("{kind}-{rank}-{place}"));
    let job = folder
        .ranks(2, &format!("{QUICK} --device cuda {flags}"))
        .on_gpus();
    let ended = job
        .env("DDP_TEST_FAULT", &format!("{rank}:{place}:7:{kind}"))
        .run();
    let steps = folder.metrics_log().of_steps("step");
    // While another rank fails, rank 0 may log one more, or may not have logged the sixth one yet.
    let least = if rank == 0 { 6 } else { 5 };
    assert!(
        [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0].starts_with(&steps) && steps.len() >= least,
        "{steps:?}: {ended}"
    );
    assert_eq!(folder.checkpoints(), [""; 0], "{ended}");
    ended
}

/// Checks each place on each of two ranks, eager and captured; an eighth of the cases.
fn everywhere(check: impl Fn(usize, &str, &str) + Sync) {
    let places = ["forward", "reduction", "optimizer", "log"];
    let cases = ["--graph off", "--graph on"]
        .into_iter()
        .flat_map(|graph| places.map(|place| (graph, place)))
        .flat_map(|(graph, place)| [0, 1].map(|rank| (rank, place, graph)));
    let cases = ddp_testing::cases_of(&test_name(), cases, 2);
    all_at_once(cases, |(rank, place, graph)| check(rank, place, graph));
}

/// The job said why it ended once, naming this rank.
#[track_caller]
fn assert_names(ended: &Ended, exit_code: i32, rank: usize) -> String {
    let cause = ended.assert_fails(exit_code);
    let named = format!("ddp-train: rank {rank} on {}: ", host());
    cause
        .strip_prefix(&named)
        .unwrap_or_else(|| panic!("it begins with {named}: {ended}"))
        .to_string()
}

#[test]
fn a_rank_killed_at_any_gpu_call_ends_all() {
    let Some(_gpu) = gpus_of_jobs(2) else { return };
    everywhere(|rank, place, graph| {
        let ended = fault(rank, place, "kill", &format!("{graph} {FAR}"));
        assert!(
            assert_names(&ended, 137, rank)
                .contains("ended without reporting an error: it was killed"),
            "{ended}"
        );
    });
}

#[test]
fn an_error_on_one_rank_ends_all_with_its_code_and_in_its_words() {
    let Some(_gpu) = gpus_of_jobs(2) else { return };
    everywhere(|rank, place, graph| {
        let ended = fault(rank, place, "error", &format!("{graph} {FAR}"));
        assert!(
            assert_names(&ended, 65, rank).starts_with("a fault on purpose in "),
            "{ended}"
        );
    });
}

#[test]
fn a_rank_that_stops_or_hangs_is_named_with_the_collective_that_waits_for_it() {
    let Some(_gpu) = gpus_of_jobs(2) else { return };
    let is_of_gradients = |cause: &str| {
        cause.starts_with("all_reduce sum of \"") && cause.contains("(group gradients, at ")
    };
    for kind in ddp_testing::cases_of(&test_name(), ["stop", "hang"], 1) {
        everywhere(|rank, place, graph| {
            let ended = fault(rank, place, kind, &format!("{graph} --timeout-s {NEAR}"));
            let cause = assert_names(&ended, 77, 1 - rank);
            // Where it has all gradients of the step, the other rank may poll for a stop before it
            // needs the next ones: on a slow machine it polls after every step.
            if place == "log" || place == "optimizer" {
                let stop_poll = "all_reduce max of \"stop poll\"";
                assert!(
                    is_of_gradients(&cause) || cause.starts_with(stop_poll),
                    "{ended}"
                );
            } else {
                assert!(is_of_gradients(&cause), "{ended}");
            }
            assert!(
                cause.contains(&format!(": rank {rank} did not arrive within {NEAR} s")),
                "{ended}"
            );
        });
    }
}

#[test]
fn a_gpu_that_is_lost_in_a_collective_ends_all_and_says_so() {
    let Some(_gpu) = simulated_gpus_of_jobs(2) else {
        return;
    };
    for graph in ddp_testing::cases_of(&test_name(), ["off", "on"], 1) {
        let folder = Folder::new("nccl");
        let words = format!("{QUICK} --device cuda --graph {graph} --timeout-s {NEAR}");
        let job = folder.ranks(2, &words).on_gpus();
        let ended = job.env("SIMCUDA_FAULTS", "rank1:nccl@17=lost").run();
        let cause = ended.assert_fails(70);
        let expected = "CUDA_ERROR_DEVICE_UNAVAILABLE";
        assert!(cause.contains(expected), "--graph {graph}: {ended}");
        assert_eq!(folder.checkpoints(), [""; 0], "{ended}");
    }
}

#[test]
fn a_kernel_that_fails_on_one_of_two_devices_of_a_rank_ends_the_job_with_70() {
    let Some(_gpu) = simulated_gpus_of_jobs(2) else {
        return;
    };
    let words = "--data glyphs,rows=64,held-out=0 --hidden 24,24 --batch-size 16 --epochs 1 \
                 --device cuda --devices-per-rank 2 --out OUT";
    let kernels = ddp_testing::cases_of(&test_name(), [18, 26, 32, 38], 2);
    all_at_once(kernels, |kernel| {
        let folder = Folder::new("kernel");
        let plan = format!("kernel@{kernel}=illegal_address");
        let ended = folder
            .alone(words)
            .on_gpus()
            .env("SIMCUDA_FAULTS", &plan)
            .run();
        let cause = ended.assert_fails(70);
        assert!(cause.contains(" failed: CUDA_ERROR_"), "{plan}: {ended}");
        assert_eq!(folder.checkpoints(), [""; 0], "{ended}");
    });
}

#[test]
fn a_killed_job_resumes_to_the_same_losses_and_bytes() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    let cases = [
        (
            1,
            1,
            "--graph on --dropout 0.1 --micro-batch 5 --grad-clip 1",
        ),
        // Each choice of these has one with several ranks.
        (2, 1, "--graph off --dtype bf16"),
        (2, 1, "--graph on --zero 1 --bucket-mb 0.01"),
        (2, 1, "--graph on --data-on-device off --optimizer sgd"),
        (1, 2, "--devices-per-rank 2 --dropout 0.1"),
    ];
    let fits = |(ranks, devices, _): &(usize, usize, _)| ranks * devices <= gpus();
    let cases = ddp_testing::cases_of(&test_name(), cases.into_iter().filter(fits), 2);
    all_at_once(cases, |(ranks, _, flags)| {
        let words = format!("{flags} --checkpoint-every 4");
        let expected = model_of(ranks, &words);
        let folder = Folder::new("killed");
        let words = format!("{UNEVEN} {words}");
        let job = folder.ranks(ranks, &words).on_gpus();
        let ended = job
            .env("DDP_TEST_FAULT", &format!("{}:log:12:kill", ranks - 1))
            .run();
        assert_eq!(ended.exit_code(), Some(137), "{ended}");
        let ended = folder
            .ranks(ranks, &format!("{words} --resume auto"))
            .on_gpus()
            .run();
        ended.assert_well();
        let from = folder.metrics_log().all("resume")[0]["step"].as_u64();
        // Every fourth step is saved, and the ninth, whose evaluation is the first and therefore
        // the best.
        assert!([4, 8, 9].map(Some).contains(&from), "{from:?}: {ended}");
        let got = (
            folder.metrics_log().losses(),
            model_bytes(&folder.out(), UNEVEN_STEPS),
        );
        assert!(got == expected, "{ranks} ranks, {flags}: {ended}");
    });
}

#[test]
fn a_bit_that_flips_on_one_rank_is_found_before_anything_is_saved() {
    let Some(_gpu) = simulated_gpus_of_jobs(2) else {
        return;
    };
    for graph in ddp_testing::cases_of(&test_name(), ["off", "on"], 1) {
        let words = format!("{QUICK} --device cuda --graph {graph}");
        let whole = Folder::new("whole");
        whole.ranks(2, &words).on_gpus().run().assert_well();
        // A high bit of some gradient's exponent. Calls for losses and gradients alternate; one
        // for losses has four numbers, and no place for this flip.
        let found = [16, 17].map(|collective| {
            let folder = Folder::new("flip");
            let flip = format!("rank1:nccl@{collective}=flip(3229)");
            let job = folder.ranks(2, &words).on_gpus();
            let ended = job.env("SIMCUDA_FAULTS", &flip).run();
            if ended.exit_code() == Some(0) {
                let bytes = |of: &Folder| model_bytes(&of.out(), 8);
                assert!(bytes(&folder) == bytes(&whole), "not found: {ended}");
                return false;
            }
            let cause = ended.assert_fails(78);
            assert!(
                cause.contains("ranks disagree on the model after step 8: rank 1 has "),
                "{ended}"
            );
            assert_eq!(folder.checkpoints(), [""; 0], "{ended}");
            true
        });
        assert!(found[0] != found[1], "{found:?}, --graph {graph}");
    }
}

#[test]
fn a_rank_with_more_rows_of_the_short_batch_stays_in_step() {
    let Some(_gpu) = gpus_of_jobs(1) else { return };
    // Ranks share GPUs where that is asked for. Of 8 rows five ranks have 1, 2, 1, 2 and 2; of 7
    // rows 1, 1, 2, 1 and 2: the third rank has a second micro-batch only in the short batch.
    let folder = Folder::new("shares");
    let words = "--data glyphs,rows=47,held-out=0 --hidden 8 --batch-size 8 --micro-batch 1 --epochs 4 --device cuda --graph on \
                 --share-gpus --timeout-s 60 --out OUT";
    folder.ranks(5, words).on_gpus().run().assert_well();
    let log = folder.metrics_log();
    let mut devices = log.start()["devices"].as_array().unwrap().iter();
    assert!(
        devices.all(|device| device.as_str().unwrap().starts_with("cuda:")),
        "{log:?}"
    );
}

#[test]
fn a_capture_that_fails_on_one_rank_makes_all_go_on_eagerly() {
    let Some(_gpu) = simulated_gpus_of_jobs(2) else {
        return;
    };
    let eager = Folder::new("eager");
    eager
        .ranks(2, &format!("{QUICK} --device cuda --graph off"))
        .on_gpus()
        .run()
        .assert_well();
    // Before any collective is captured, and after all of them.
    for function in ["cuStreamBeginCapture", "cuStreamEndCapture"] {
        let folder = Folder::new("fallback");
        let job = folder
            .ranks(2, &format!("{QUICK} --device cuda --graph auto"))
            .on_gpus();
        let ended = job
            .env(
                "SIMCUDA_FAULTS",
                &format!("rank1:{function}@1=not_supported"),
            )
            .run();
        ended.assert_well();
        assert!(
            ended.stderr.contains("another rank cannot capture it"),
            "{function}: {ended}"
        );
        assert!(
            model_bytes(&folder.out(), 8) == model_bytes(&eager.out(), 8),
            "{function}: another model"
        );
    }
}
