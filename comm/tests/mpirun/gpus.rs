//! Ranks with a GPU each, real or simulated (`launch/with-simulated-gpus 4`): NCCL's collectives
//! are right, and ranks that make different calls learn it.

mod faults;

use std::path::{Path, PathBuf};
use std::time::Duration;

use ddp_kernels::Device;
use ddp_kernels::device::discover;

use crate::job::{EXPIRES_MS, Ended, Job};
use crate::rank::{FAST, SHARE_GPUS};

/// Once a test: each has its thread.
fn skip(why: &str) {
    std::thread_local! {
        static SAID: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }
    if !SAID.replace(true) {
        ddp_testing::skip(why);
    }
}

/// Whether there are this many CUDA devices.
fn has_gpus(count: usize) -> bool {
    let usable = Device::usable()
        .into_iter()
        .filter(|device| device.is_accelerator())
        .count();
    match usable {
        0 => skip("no CUDA device"),
        found if found < count && std::env::var_os(SHARE_GPUS).is_none() => {
            skip(&format!("{count} CUDA devices are needed, {found} found"))
        }
        _ => return true,
    }
    false
}

/// Whether they are simulated, so that faults can be planted.
fn has_simulated_gpus(count: usize) -> bool {
    if !has_gpus(count) {
        return false;
    }
    let simulated = discover()
        .gpus
        .iter()
        .all(|gpu| gpu.name.contains("Simulated"));
    if !simulated {
        skip("real GPUs do not fail on demand");
    }
    simulated
}

/// A job of ranks with GPUs.
fn gpu_job(size: usize, role: &str) -> Job {
    Job::new(size, &format!("gpu {role}"))
}

/// The numbers of ranks, up to four, that this machine has GPUs for.
fn sizes() -> Vec<usize> {
    (1..=4).filter(|&size| has_gpus(size)).collect()
}

#[test]
fn every_operation_gives_every_rank_what_it_should() {
    for size in sizes() {
        let ended = gpu_job(size, "operations").run();
        ended.assert_well();
        assert_eq!(ended.told("operations").len(), size, "{ended}");
    }
}

/// Whether captured steps, and an eager one after them, had the bits of eager steps on every rank.
fn assert_same_bits(expected: bool, ended: &Ended, size: usize) {
    ended.assert_well();
    for name in ["captured has the same bits", "so has another"] {
        let told = vec![expected.to_string(); size];
        assert_eq!(ended.told(name), told, "{name}: {ended}");
    }
}

#[test]
fn a_graph_of_collectives_has_the_bits_of_the_same_calls_made_eagerly() {
    for size in sizes() {
        assert_same_bits(true, &gpu_job(size, "graphs").run(), size);
    }
}

/// Switches add in an order that the simulator takes from its seed and from a call's number.
#[test]
fn sums_keep_their_bits_where_nvlink_switches_would_add_in_any_order() {
    if !has_simulated_gpus(4) {
        return;
    }
    if std::env::var_os(SHARE_GPUS).is_some() {
        return skip("ranks that share a GPU do not use NVLink switches");
    }
    let run = |seed: &str, fast: bool| {
        let job = gpu_job(4, "graphs").env("SIMCUDA_NVLS", "1");
        let job = job.env("SIMCUDA_SEED", seed);
        let ended = if fast { job.env(FAST, "1") } else { job }.run();
        assert_same_bits(!fast, &ended, 4);
        // A run that asks for it gets no warning.
        assert!(!ended.stderr.contains("bits differ"), "{ended}");
        ended.told("bits")[0].to_string()
    };
    assert_eq!(run("1", false), run("2", false));
    assert_ne!(run("1", true), run("2", true));
}

#[test]
fn ranks_that_make_different_calls_end_with_78_and_both_calls() {
    if !has_gpus(3) {
        return;
    }
    let ended = gpu_job(3, "fault skip 2 eager")
        .timeout_ms(EXPIRES_MS)
        // The simulator would find it first.
        .env("SIMCUDA_NCCL_CHECK", "0")
        .run();
    let cause = ended.assert_ended_with(78);
    for part in [
        "all_reduce sum of \"bucket 1\" f32[1000]",
        "all_reduce sum of \"bucket 2\" f32[500]",
        "gpu_rank.rs:",
        "rank ",
        "group gradients",
    ] {
        assert!(cause.contains(part), "{part}: {ended}");
    }
}

#[test]
fn ranks_of_one_gpu_are_told_how_to_share_it() {
    if !has_simulated_gpus(2) {
        return;
    }
    // gpu-check lets all ranks of these tests share a GPU.
    let refused = gpu_job(2, "operations").env("SIMCUDA_DEVICES", "1");
    let refused = refused.without(SHARE_GPUS).run();
    let cause = refused.assert_ended_with(70);
    assert!(
        cause.contains("Duplicate GPU") && cause.contains("--share-gpus"),
        "{refused}"
    );
}

#[test]
fn a_group_that_is_idle_burns_no_core() {
    if !has_gpus(2) {
        return;
    }
    let ended = gpu_job(2, "idle").run();
    ended.assert_well();
    // By two watches that look ten times a second, and by the simulated machine.
    let shares = ended.told("cpu share");
    let is_small = |share: &&str| share.parse::<f64>().expect("a share") <= 0.1;
    assert!(shares.len() == 2 && shares.iter().all(is_small), "{ended}");
}

#[test]
fn errors_say_that_nothing_is_known_of_other_hosts() {
    if !has_gpus(2) {
        return;
    }
    let ended = Job::on_hosts(&[("left", 1), ("right", 1)], "gpu fault host 1 eager")
        .timeout_ms(EXPIRES_MS)
        .run();
    let cause = ended.assert_ended_with(77);
    for part in [
        "rank 0 on left",
        "\"bucket 1\" f32[1000]",
        "not done within 20 s",
        "nothing is known of other hosts",
    ] {
        assert!(cause.contains(part), "{part}: {ended}");
    }
}

#[test]
fn a_host_that_can_name_the_missing_rank_reports_first() {
    if !has_gpus(3) {
        return;
    }
    let ended = Job::on_hosts(&[("left", 1), ("right", 2)], "gpu fault host 2 eager")
        .timeout_ms(EXPIRES_MS)
        .run();
    let cause = ended.assert_ended_with(77);
    assert!(
        cause.contains("rank 1 on right: ") && cause.contains("rank 2 did not arrive within 20 s"),
        "{ended}"
    );
}

#[test]
fn ranks_of_several_hosts_that_made_different_calls_learn_it_where_they_meet() {
    if !has_gpus(2) {
        return;
    }
    let ended = Job::on_hosts(&[("left", 1), ("right", 1)], "gpu apart").run();
    let cause = ended.assert_ended_with(78);
    assert!(
        cause.contains("ranks disagree on the collectives of group gradients: rank 1 has "),
        "{ended}"
    );
}

#[test]
fn ranks_that_make_other_groups_learn_it_before_they_join() {
    if !has_gpus(2) {
        return;
    }
    let ended = gpu_job(2, "names").run();
    let cause = ended.assert_ended_with(78);
    assert!(
        cause.contains("ranks disagree on the group: rank 1 has others, rank 0 has gradients"),
        "{ended}"
    );
}

#[test]
fn an_error_on_one_rank_is_the_cause_though_others_wait_for_it() {
    if !has_gpus(2) {
        return;
    }
    // Less time than NCCL may take to end.
    let ended = gpu_job(2, "early").timeout_ms(EXPIRES_MS).run();
    let cause = ended.assert_ended_with(70);
    assert!(
        cause.contains("rank 1 on ") && cause.contains("all_reduce max: reduction"),
        "{ended}"
    );
}

#[test]
fn a_graph_is_still_watched_after_its_group_is_dropped() {
    if !has_gpus(2) {
        return;
    }
    let ended = gpu_job(2, "outlive").timeout_ms(EXPIRES_MS).run();
    let cause = ended.assert_ended_with(77);
    for part in [
        "\"bucket 0\" f32[1000]",
        "rank 1 did not arrive within 20 s",
        "(number 1 of its graph)",
    ] {
        assert!(cause.contains(part), "{part}: {ended}");
    }
}

/// A folder with all libraries of the simulated machine except NCCL. None on other machines.
fn without_nccl() -> Option<PathBuf> {
    let path = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let simulated = path
        .split(':')
        .map(Path::new)
        .find(|folder| folder.join("libcuda.so.1").exists())?;
    let folder = std::env::temp_dir().join(format!("ddp-without-nccl-{}", std::process::id()));
    std::fs::create_dir_all(&folder).ok()?;
    for entry in std::fs::read_dir(simulated).ok()?.flatten() {
        let name = entry.file_name();
        if name.to_string_lossy().contains(".so") && !name.to_string_lossy().starts_with("libnccl")
        {
            let file = std::fs::canonicalize(entry.path()).ok()?;
            _ = std::os::unix::fs::symlink(file, folder.join(name));
        }
    }
    Some(folder)
}

#[test]
fn without_nccl_several_ranks_are_refused_with_help_and_one_needs_none() {
    if !has_simulated_gpus(2) {
        return;
    }
    let folder = without_nccl().expect("simulated GPUs come from a folder of LD_LIBRARY_PATH");
    let run = |size: usize| {
        gpu_job(size, "operations")
            .env("LD_LIBRARY_PATH", &folder.display().to_string())
            .run()
    };
    let (several, one) = (run(2), run(1));
    std::fs::remove_dir_all(&folder).expect("it is ours");
    let cause = several.assert_ended_with(77);
    for part in [
        "cannot join group gradients with cuda:",
        "NCCL was not found",
        "libnccl2",
        "nvidia-nccl-cu13",
        "LD_LIBRARY_PATH",
    ] {
        assert!(cause.contains(part), "{part}: {several}");
    }
    one.assert_well();
}

#[test]
fn a_job_suspended_past_its_timeout_continues() {
    if !has_gpus(2) {
        return;
    }
    let mut running = gpu_job(2, "steps").timeout_ms(EXPIRES_MS).start();
    running.wait_until_told("steps", 2);
    running.suspend(Duration::from_millis(EXPIRES_MS + 1000));
    running.let_end();
    running.wait().assert_well();
}
