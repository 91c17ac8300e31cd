//! Any fault ends the job in time and names the ranks, the call and its line.
//!
//! Faults are planted in simulated GPUs (`SIMCUDA_FAULTS`). On real GPUs those tests are skipped
//! with a message.

use super::{gpu_job, has_gpus, has_simulated_gpus};
use crate::job::{EXPIRES_MS, Ended};
use crate::rank::JOIN_TIMEOUT_MS;

#[test]
fn a_rank_that_never_arrives_is_named_after_the_timeout() {
    if !has_gpus(3) {
        return;
    }
    let job = gpu_job(3, "fault host 1 eager").timeout_ms(EXPIRES_MS);
    let ended = job.run();
    let cause = ended.assert_ended_with(77);
    for part in [
        "all_reduce sum of \"bucket 1\" f32[1000]",
        "rank 1 did not arrive within 20 s",
        "group gradients, at ",
        "gpu_rank.rs:",
        "Rank 1: its device is past all_reduce sum of \"bucket 0\" f32[1000]",
        "its host is in no call; help: check whether ",
    ] {
        assert!(cause.contains(part), "{part}: {ended}");
    }
}

#[test]
fn a_rank_that_never_joins_is_named() {
    if !has_gpus(3) {
        return;
    }
    let ended = gpu_job(3, "never 1").timeout_ms(EXPIRES_MS).run();
    assert!(
        ended
            .assert_ended_with(77)
            .contains("rank 1 did not arrive within 20 s"),
        "{ended}"
    );
}

#[test]
fn ranks_that_join_more_slowly_than_the_timeout_are_waited_for() {
    if !has_simulated_gpus(2) {
        return;
    }
    let slow = |join_ms: u64| {
        gpu_job(2, "fault none 0 eager")
            .timeout_ms(EXPIRES_MS)
            .env("SIMCUDA_JOIN_MS", &join_ms.to_string())
    };
    slow(EXPIRES_MS + 1000).run().assert_well();
    let limited = slow(60_000).env(JOIN_TIMEOUT_MS, &EXPIRES_MS.to_string());
    let ended = limited.run();
    let cause = ended.assert_ended_with(77);
    let expected = "all ranks have come, but NCCL did not connect them within 20 s";
    assert!(cause.contains(expected), "{ended}");
}

/// Tree and ring take 1 MiB each, and the memory pool 2 MiB of the 3.
#[test]
fn memory_that_nccl_lacks_is_missed_when_ranks_join() {
    if !has_simulated_gpus(2) {
        return;
    }
    let job = gpu_job(2, "fault none 0 eager").env("SIMCUDA_MEMORY_MB", "3");
    let ended = job.run();
    let cause = ended.assert_ended_with(71);
    let expected = ["join group gradients with cuda:", "out of memory"];
    assert!(expected.iter().all(|text| cause.contains(text)), "{ended}");
}

#[test]
fn a_rank_that_stops_while_ranks_join_is_named() {
    if !has_simulated_gpus(3) {
        return;
    }
    let job = gpu_job(3, "stops joining 1").timeout_ms(EXPIRES_MS);
    let ended = job.env("SIMCUDA_JOIN_MS", "60000").run();
    let cause = ended.assert_ended_with(77);
    assert!(cause.contains("join group gradients with cuda:"), "{ended}");
    assert!(
        cause.contains("rank 1 did not arrive within 20 s"),
        "{ended}"
    );
}

/// A job of two in which NCCL fails by `plan`.
fn fails(plan: &str, how: &str) -> Ended {
    gpu_job(2, &format!("fault none 0 {how}"))
        .timeout_ms(EXPIRES_MS)
        .env(JOIN_TIMEOUT_MS, &EXPIRES_MS.to_string())
        .env("SIMCUDA_FAULTS", plan)
        .run()
}

/// Calls of NCCL in the warm-up of a group: four sums, two moves, a send and a receive.
const WARM_UP: usize = 8;
/// The call of the second bucket in the seventh step; the first is eager in any case.
const SECOND_BUCKET: usize = WARM_UP + 6 * 3 + 2;

#[test]
fn a_call_that_hangs_in_a_graph_is_named_with_its_bucket_and_place() {
    if !has_simulated_gpus(2) {
        return;
    }
    let ended = fails(&format!("rank1:nccl@{SECOND_BUCKET}=hang"), "captured");
    let cause = ended.assert_ended_with(77);
    for part in [
        "all_reduce sum of \"bucket 1\" f32[1000]",
        "not done within 20 s",
        "gpu_rank.rs:",
        "on the device (number 2 of its graph):",
    ] {
        assert!(cause.contains(part), "{part}: {ended}");
    }
}

#[test]
fn an_asynchronous_error_ends_the_job_with_nccls_message() {
    if !has_simulated_gpus(2) {
        return;
    }
    for (effect, name, exit_code) in [
        ("async_error", "ncclRemoteError", 77),
        ("async_error(internal_error)", "ncclInternalError", 70),
    ] {
        let ended = fails(&format!("rank1:nccl@{SECOND_BUCKET}={effect}"), "captured");
        let cause = ended.assert_ended_with(exit_code);
        for part in [
            "rank 1 on ",
            "bucket 1",
            "ncclCommGetAsyncError returned ",
            name,
            "NCCL_DEBUG=INFO",
        ] {
            assert!(cause.contains(part), "{part}: {ended}");
        }
    }
}

#[test]
fn a_call_that_nccl_refuses_is_an_error_with_operation_tensor_and_line() {
    if !has_simulated_gpus(2) {
        return;
    }
    for (effect, name, exit_code) in [
        ("system_error", "ncclSystemError", 77),
        ("internal_error", "ncclInternalError", 70),
    ] {
        // Two of the warm-up, and three a step.
        let ended = fails(
            &format!("rank1:ncclAllReduce@{}={effect}", 2 + 3 * 3 + 2),
            "eager",
        );
        let cause = ended.assert_ended_with(exit_code);
        let call = "all_reduce sum of \"bucket 1\" f32[1000]";
        for part in [
            "rank 1 on ",
            call,
            "gpu_rank.rs:",
            "ncclAllReduce returned ",
            name,
        ] {
            assert!(cause.contains(part), "{part}: {ended}");
        }
    }
}

#[test]
fn an_error_at_the_start_ends_the_job_there() {
    if !has_simulated_gpus(2) {
        return;
    }
    for (plan, exit_code, expected) in [
        (
            "rank1:ncclCommInitRank@1=internal_error",
            70,
            &[
                "ncclCommInitRank returned ncclInternalError",
                "join group gradients",
            ][..],
        ),
        (
            "rank0:ncclGetUniqueId@1=system_error",
            77,
            &["ncclGetUniqueId returned ncclSystemError"],
        ),
        (
            "rank1:nccl@1=hang",
            77,
            &["warm-up all_reduce", "not done within 20 s"],
        ),
        ("rank1:nccl@3=flip", 70, &["of bf16 is wrong: element"]),
        // Send and receive are the last call: either rank may report that it hangs.
        (
            "rank0:nccl@8=hang",
            77,
            &[
                "\"warm-up send\" f32[1024]",
                "send or receive number 1 on the device: not done within 20 s",
            ],
        ),
    ] {
        let ended = fails(plan, "eager");
        let cause = ended.assert_ended_with(exit_code);
        assert!(
            expected.iter().all(|part| cause.contains(part)),
            "{plan}: {ended}"
        );
    }
}

#[test]
fn an_error_of_nccl_in_a_capture_says_how_to_run_without_graphs() {
    if !has_simulated_gpus(2) {
        return;
    }
    // Two of the warm-up, three of the eager step.
    let ended = fails("rank1:ncclAllReduce@7=internal_error", "captured");
    let cause = ended.assert_ended_with(70);
    assert!(
        cause.contains("ncclAllReduce returned ncclInternalError") && cause.contains("--graph off"),
        "{ended}"
    );
}
