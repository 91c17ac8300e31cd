//! Ranks that are processes.

use std::mem::MaybeUninit;
use std::time::{Duration, SystemTime};

use super::bench::*;
use crate::machine::testing::{device, made, ok};
use crate::memory::calls::cuMemGetInfo_v2;
use crate::nccl::comm_calls::*;
use crate::nccl::connect::CONNECTION_BYTES;
use crate::nccl::refusal::code;
use crate::stream::calls::{cuStreamCreate, cuStreamSynchronize};

#[test]
fn all_ranks_have_the_sum_that_the_documentation_says_to_the_bit() {
    for ranks in 1..=4 {
        let test = name!(all_ranks_have_the_sum_that_the_documentation_says_to_the_bit);
        let ended = played(test, ranks, &[("SIMCUDA_SCHEDULE", "random")], |own| {
            let ranks = own.ranks;
            let comm = own.start();
            let stream = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
            // The last is larger than the ring.
            for count in [1, 63, 1000, (1 << 20) + 99] {
                let from = upload(&values(own.rank, count));
                let to = upload(&vec![0.0; count]);
                done(all_reduce(from, to, count, comm, stream));
                assert_eq!(cuStreamSynchronize(stream), SUCCESS);
                let all: Vec<Vec<f32>> = (0..ranks).map(|rank| values(rank, count)).collect();
                let expected: Vec<f32> = (0..count)
                    .map(|at| ring_sum(ranks, at, 0, |rank| all[rank][at]))
                    .collect();
                assert!(download(to, count) == expected, "{count} elements");
            }
            done(ncclCommDestroy(comm));
        });
        let Some(ended) = ended else { return };
        all_clean(&ended);
    }
}

#[test]
fn the_first_collective_returns_once_every_rank_has_made_it() {
    let test = name!(the_first_collective_returns_once_every_rank_has_made_it);
    let ended = played(test, 2, &[("SIMCUDA_SCHEDULE", "lazy")], |own| {
        let comm = own.start_unconnected();
        let stream = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
        let (from, to) = (upload(&[1.0; 8]), upload(&[0.0; 8]));
        let now = || SystemTime::UNIX_EPOCH.elapsed().unwrap().as_nanos();
        if own.rank == 1 {
            // Sleep: the other one has called by then, and may not have returned.
            std::thread::sleep(Duration::from_millis(300));
            println!("time: {}", now());
        }
        done(all_reduce(from, to, 8, comm, stream));
        if own.rank == 0 {
            println!("time: {}", now());
            // Connected, it returns without the other.
            done(all_reduce(from, to, 8, comm, stream));
        }
        done(ncclCommAbort(comm));
    });
    let Some(ended) = ended else { return };
    let time = |rank: usize| -> u128 {
        ended[rank].came_to_its_end();
        let mut lines = ended[rank].text.lines();
        let time = lines.find_map(|line| line.strip_prefix("time: ")).unwrap();
        time.parse().unwrap()
    };
    assert!(time(0) >= time(1), "the call returned before the other's");
}

/// Of the current device.
fn free_bytes() -> u64 {
    let (mut free, mut total) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    ok(cuMemGetInfo_v2(Some(&mut free), Some(&mut total)));
    // SAFETY: the call has succeeded.
    unsafe { free.assume_init() as u64 }
}

#[test]
fn the_first_use_of_an_algorithm_takes_memory_until_the_communicator_ends() {
    let test = name!(the_first_use_of_an_algorithm_takes_memory_until_the_communicator_ends);
    let ended = played(test, 2, &[], |own| {
        let comm = own.start_unconnected();
        let stream = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
        let large = upload(&vec![1.0; 1 << 20]);
        let before = free_bytes();
        // A tree for few bytes, a ring for many.
        for (count, connections) in [(8, 1), (16, 1), (1 << 20, 2), (1 << 20, 2)] {
            done(all_reduce(large, large, count, comm, stream));
            assert_eq!(before - free_bytes(), connections * CONNECTION_BYTES);
        }
        ok(cuStreamSynchronize(stream));
        done(ncclCommDestroy(comm));
        assert_eq!(before, free_bytes());
    });
    let Some(ended) = ended else { return };
    all_clean(&ended);
}

#[test]
fn a_connection_that_finds_no_memory_fails_in_nccls_words() {
    let test = name!(a_connection_that_finds_no_memory_fails_in_nccls_words);
    let variables = [("SIMCUDA_MEMORY_MB", "4")];
    let ended = played(test, 2, &variables, |own| {
        let comm = own.start_unconnected();
        let stream = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
        let large = upload(&vec![1.0; 1 << 20]);
        let code = all_reduce(large, large, 1 << 20, comm, stream);
        assert_eq!(code, code::UNHANDLED_CUDA_ERROR);
        assert!(last_error().contains("Cuda failure 2 'out of memory'"));
        done(ncclCommAbort(comm));
    });
    let Some(ended) = ended else { return };
    all_clean(&ended);
}

#[test]
fn a_communicator_that_finds_no_memory_for_all_its_algorithms_takes_none() {
    let test = name!(a_communicator_that_finds_no_memory_for_all_its_algorithms_takes_none);
    // A tree would find memory, and a ring none.
    let variables = [("SIMCUDA_MEMORY_MB", "1"), ("NCCL_RUNTIME_CONNECT", "0")];
    let ended = played(test, 2, &variables, |own| {
        device(own.rank as i32);
        let before = free_bytes();
        let mut comm = MaybeUninit::uninit();
        let code = ncclCommInitRank(Some(&mut comm), own.ranks as i32, own.id, own.rank as i32);
        assert_eq!(code, code::UNHANDLED_CUDA_ERROR);
        assert_eq!(before, free_bytes());
    });
    let Some(ended) = ended else { return };
    all_clean(&ended);
}

#[test]
fn switches_add_in_an_order_of_the_seed_and_the_call_unless_they_are_off() {
    let test = name!(switches_add_in_an_order_of_the_seed_and_the_call_unless_they_are_off);
    // The sums of the same numbers, made several times, that every rank has.
    let sums = |switches: &str, enable: &str, seed: &str| -> Option<Vec<String>> {
        let variables = [
            ("SIMCUDA_NVLS", switches),
            ("NCCL_NVLS_ENABLE", enable),
            ("SIMCUDA_SEED", seed),
        ];
        let ended = played(test, 4, &variables, |own| {
            let comm = own.start();
            let stream = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
            let from = upload(&values(own.rank, 64));
            for _ in 0..6 {
                let to = upload(&[0.0; 64]);
                done(all_reduce(from, to, 64, comm, stream));
                assert_eq!(cuStreamSynchronize(stream), SUCCESS);
                println!("\nsum: {:?}", download(to, 64));
            }
            done(ncclCommDestroy(comm));
        })?;
        all_clean(&ended);
        let sums_of = |text: &str| -> Vec<String> {
            let lines = text.lines().filter(|line| line.starts_with("sum: "));
            lines.map(str::to_owned).collect()
        };
        let of_ranks: Vec<_> = ended.iter().map(|ended| sums_of(&ended.text)).collect();
        assert!(of_ranks[0].len() == 6 && of_ranks.iter().all(|sums| *sums == of_ranks[0]));
        of_ranks.into_iter().next()
    };
    let Some(first) = sums("1", "2", "1") else {
        return;
    };
    let all_equal = |sums: &[String]| sums.iter().all(|sum| *sum == sums[0]);
    assert!(!all_equal(&first), "each call has the same order");
    assert_eq!(sums("1", "2", "1").as_ref(), Some(&first), "the same seed");
    assert_ne!(sums("1", "2", "2").as_ref(), Some(&first), "another seed");
    let off = sums("1", "0", "1").expect("it is not the child");
    assert!(all_equal(&off), "each call has another order");
    for (switches, enable) in [("1", "0"), ("0", "2")] {
        assert_eq!(sums(switches, enable, "2").as_ref(), Some(&off));
    }
}
