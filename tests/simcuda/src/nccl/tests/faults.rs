//! Faults of the plan, in one rank of several processes.

use std::ffi::c_int;
use std::time::Duration;

use cudarc::driver::sys::CUstream;

use super::bench::*;
use super::hangs::{hangs, is_freed_by_abort};
use crate::error::CUresult;
use crate::graph::calls::{
    cuGraphDestroy, cuGraphExecDestroy, cuGraphInstantiateWithFlags, cuGraphLaunch,
};
use crate::graph::capture_calls::{cuStreamBeginCapture_v2, cuStreamEndCapture};
use crate::machine::testing::{Ended, made, ok};
use crate::nccl::comm::Comm;
use crate::nccl::comm_calls::*;
use crate::stream::calls::{cuStreamCreate, cuStreamSynchronize};

const COUNT: usize = 64;

fn async_error(comm: *mut Comm) -> c_int {
    let mut error = 0;
    done(ncclCommGetAsyncError(comm, Some(&mut error)));
    error
}

/// Two ranks call an all-reduce twice; `second` sees what becomes of the second, which both have
/// queued.
fn twice(
    test: &str,
    faults: &str,
    second: impl FnOnce(&Rank, *mut Comm, CUstream, u64),
) -> Option<Vec<Ended>> {
    played(
        test,
        2,
        &[("SIMCUDA_SCHEDULE", "lazy"), ("SIMCUDA_FAULTS", faults)],
        |own| {
            let comm = own.start();
            let stream = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
            let (from, to) = (upload(&[1.0; COUNT]), upload(&[0.0; COUNT]));
            done(all_reduce(from, to, COUNT, comm, stream));
            assert_eq!(cuStreamSynchronize(stream), SUCCESS);
            assert_eq!(download(to, COUNT), [2.0; COUNT]);
            done(all_reduce(from, to, COUNT, comm, stream));
            second(&own, comm, stream, to);
        },
    )
}

#[test]
fn a_collective_that_hangs_on_one_rank_hangs_on_both() {
    let test = name!(a_collective_that_hangs_on_one_rank_hangs_on_both);
    let ended = twice(test, "rank1:nccl@2=hang", |_, comm, stream, to| {
        hangs(stream);
        assert_eq!(async_error(comm), 0);
        is_freed_by_abort(comm, stream, to, COUNT);
    });
    let Some(ended) = ended else { return };
    all_clean(&ended);
}

#[test]
fn abort_frees_a_graph_that_hangs_and_returns_once_the_graph_is_destroyed() {
    let test = name!(abort_frees_a_graph_that_hangs_and_returns_once_the_graph_is_destroyed);
    let ended = played(
        test,
        2,
        &[
            ("SIMCUDA_SCHEDULE", "lazy"),
            ("SIMCUDA_FAULTS", "rank1:nccl@2=hang"),
        ],
        |own| {
            let comm = own.start();
            let stream = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
            let to = upload(&[1.0; COUNT]);
            ok(cuStreamBeginCapture_v2(stream, 1));
            done(all_reduce(to, to, COUNT, comm, stream));
            let graph = made(|graph| cuStreamEndCapture(stream, graph));
            let executable = made(|executable| cuGraphInstantiateWithFlags(executable, graph, 0));
            ok(cuGraphDestroy(graph));
            ok(cuGraphLaunch(executable, stream));
            ok(cuStreamSynchronize(stream));
            assert_eq!(download(to, COUNT), [2.0; COUNT]);
            ok(cuGraphLaunch(executable, stream));
            hangs(stream);
            let handle = comm as usize;
            let aborting = std::thread::spawn(move || done(ncclCommAbort(handle as *mut Comm)));
            // It is freed at once, also for who waits.
            ok(cuStreamSynchronize(stream));
            assert!(
                download(to, COUNT)
                    .iter()
                    .all(|value| value.to_bits() == u32::MAX)
            );
            // Sleep: nothing may happen meanwhile.
            std::thread::sleep(Duration::from_millis(100));
            assert!(!aborting.is_finished());
            ok(cuGraphExecDestroy(executable));
            aborting.join().expect("it does not panic");
        },
    );
    let Some(ended) = ended else { return };
    all_clean(&ended);
}

#[test]
fn an_asynchronous_error_is_returned_on_query_and_hangs() {
    for (fault, code) in [("async_error", 6), ("async_error(system_error)", 2)] {
        let test = name!(an_asynchronous_error_is_returned_on_query_and_hangs);
        let faults = format!("rank0:nccl@2={fault}");
        let ended = twice(test, &faults, |own, comm, stream, to| {
            hangs(stream);
            println!("error {}", async_error(comm));
            if own.rank == 0 {
                assert_ne!(all_reduce(to, to, COUNT, comm, stream), 0);
                assert!(
                    last_error().contains("asynchronous error"),
                    "{}",
                    last_error()
                );
            }
            is_freed_by_abort(comm, stream, to, COUNT);
        });
        let Some(ended) = ended else { return };
        all_clean(&ended);
        for (ended, code) in ended.iter().zip([code, 0]) {
            assert!(
                ended.text.contains(&format!("error {code}")),
                "{}",
                ended.text
            );
        }
    }
}

#[test]
fn a_flipped_bit_is_in_the_result_of_one_rank_and_nobody_says_so() {
    let test = name!(a_flipped_bit_is_in_the_result_of_one_rank_and_nobody_says_so);
    let ended = twice(test, "rank1:nccl@2=flip(33)", |own, comm, stream, to| {
        assert_eq!(cuStreamSynchronize(stream), SUCCESS);
        let mut expected = [2.0f32; COUNT];
        if own.rank == 1 {
            expected[1] = f32::from_bits(expected[1].to_bits() ^ 2);
        }
        assert_eq!(download(to, COUNT), expected);
        done(ncclCommDestroy(comm));
    });
    let Some(ended) = ended else { return };
    all_clean(&ended);
}

#[test]
fn a_slow_rank_keeps_the_other_waiting() {
    let test = name!(a_slow_rank_keeps_the_other_waiting);
    let ended = twice(
        test,
        "rank0:nccl@2=slow(3000000000)",
        |own, comm, stream, to| {
            assert_eq!(cuStreamSynchronize(stream), SUCCESS);
            // The slow call began after the first one, in which both took part.
            let passed = own.began.elapsed();
            let slow = Duration::from_secs(3);
            assert!(passed >= slow, "rank {}: {passed:?}", own.rank);
            assert_eq!(download(to, COUNT), [2.0; COUNT]);
            done(ncclCommDestroy(comm));
        },
    );
    let Some(ended) = ended else { return };
    all_clean(&ended);
}

#[test]
fn a_rank_whose_device_is_lost_knows_it_and_the_other_hangs() {
    let test = name!(a_rank_whose_device_is_lost_knows_it_and_the_other_hangs);
    let ended = twice(test, "rank1:nccl@2=lost", |own, comm, stream, to| {
        if own.rank == 1 {
            assert_eq!(
                cuStreamSynchronize(stream),
                CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
            );
            assert_eq!(all_reduce(to, to, COUNT, comm, stream), 1);
            done(ncclCommAbort(comm));
            return;
        }
        hangs(stream);
        is_freed_by_abort(comm, stream, to, COUNT);
    });
    let Some(ended) = ended else { return };
    ended.iter().for_each(Ended::came_to_its_end);
    ended[0].is_clean();
    assert!(
        ended[1]
            .text
            .contains("device 1 is lost (CUDA_ERROR_DEVICE_UNAVAILABLE)"),
        "{}",
        ended[1].text
    );
}
