//! Random programs of collectives on ranks with random delays, over staging so small that
//! everything takes many pieces, with counters that wrap: always the bits of the plain loop on all
//! ranks.

use ddp_kernels::dtype::bf16;
use ddp_kernels::sums::{self, Sources};
use proptest::prelude::*;

use super::*;
use crate::collective::{Operation, REDUCIBLE};

/// The bits of element `index`. All NaN are one: which of them a sum gives is the processor's
/// choice.
fn bits(dtype: DType, bytes: &[u8], index: usize) -> u64 {
    let size = dtype.bytes();
    let mut wide = [0; 8];
    wide[..size].copy_from_slice(&bytes[index * size..][..size]);
    let bits = u64::from_le_bytes(wide);
    let is_nan = match dtype {
        DType::F32 => f32::from_bits(bits as u32).is_nan(),
        DType::F64 => f64::from_bits(bits).is_nan(),
        DType::BF16 => bf16::from_bits(bits as u16).is_nan(),
        DType::F16 | DType::U8 | DType::I32 | DType::I64 => false,
    };
    if is_nan { u64::MAX } else { bits }
}

/// One call that all ranks make; a send is made by one, the receive by another, and the rest
/// continue.
#[derive(Clone, Copy, Debug)]
struct Step {
    operation: Operation,
    dtype: DType,
    count: usize,
}

/// What `rank` holds before step `index`: any bits, and often those of zeros, infinities and NaNs.
fn given(seed: u64, index: usize, rank: usize, step: &Step) -> Vec<u8> {
    let mut state = seed ^ (index as u64) << 40 ^ (rank as u64) << 20 | 1;
    (0..step.count * step.dtype.bytes())
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            if state >> 61 == 0 {
                [0, 0xff, 0x7f, 0x80][(state >> 40) as usize % 4]
            } else {
                (state >> 33) as u8
            }
        })
        .collect()
}

/// Makes one call on `tensor`, if this rank has a part in it.
fn make(group: &Group, step: &Step, tensor: &Tensor) {
    let stream = stream();
    match step.operation {
        Operation::AllReduce(reduce) => group.all_reduce(tensor, reduce, &stream),
        Operation::ReduceScatter(reduce) => group.reduce_scatter(tensor, reduce, &stream),
        Operation::AllGather => group.all_gather(tensor, &stream),
        Operation::Broadcast { root } => group.broadcast(tensor, root, &stream),
        // The receiver is the sender's right neighbour.
        Operation::Send { to } => {
            let from = (to + group.size() - 1) % group.size();
            match group.rank() {
                rank if rank == from => group.send(tensor, to, &stream),
                rank if rank == to => group.receive(tensor, from, &stream),
                _ => Ok(()),
            }
        }
        Operation::Receive { .. } => unreachable!("made by the send"),
        Operation::Barrier => group.barrier(&stream),
    }
    .unwrap();
}

/// Checks what `rank` holds after a step. `before` and `after` are of all ranks.
fn check(
    step: &Step,
    rank: usize,
    before: &[Vec<u8>],
    after: &[Vec<u8>],
) -> Result<(), TestCaseError> {
    let (ranks, found) = (before.len(), &after[rank]);
    let slice = |rank: usize| rank * found.len() / ranks..(rank + 1) * found.len() / ranks;
    let reduced = |reduce: Reduce, elements: std::ops::Range<usize>| -> Result<(), TestCaseError> {
        let (all, mut expected) = (before.concat(), before[0].clone());
        let sources = Sources {
            first: all.as_ptr(),
            stride_bytes: found.len(),
            ranks,
            mine: 0,
        };
        if ranks > 1 {
            // SAFETY: every rank's bytes lie within `all`, which nothing writes.
            unsafe { sums::reduce(step.dtype, reduce, &mut expected, sources) };
        }
        for index in elements {
            let of = |bytes| bits(step.dtype, bytes, index);
            let (found, expected) = (of(found), of(&expected));
            prop_assert!(
                found == expected,
                "{step:?} rank {rank} element {index}: {found:x} {expected:x}"
            );
        }
        Ok(())
    };
    match step.operation {
        Operation::AllReduce(reduce) => {
            reduced(reduce, 0..step.count)?;
            prop_assert!(found == &after[0], "{step:?}: ranks {rank} and 0 differ");
        }
        Operation::ReduceScatter(reduce) => {
            let size = step.dtype.bytes();
            reduced(reduce, slice(rank).start / size..slice(rank).end / size)?;
        }
        Operation::AllGather => {
            for other in 0..ranks {
                prop_assert!(
                    found[slice(other)] == before[other][slice(other)],
                    "{step:?} rank {rank} slice {other}"
                );
            }
        }
        Operation::Broadcast { root } => {
            prop_assert!(found == &before[root], "{step:?} rank {rank}")
        }
        Operation::Send { to } if rank == to => {
            prop_assert!(found == &before[(to + ranks - 1) % ranks], "{step:?}");
        }
        _ => prop_assert!(found == &before[rank], "{step:?} rank {rank} was changed"),
    }
    Ok(())
}

/// A program for `ranks` ranks.
fn program(ranks: usize) -> impl Strategy<Value = Vec<Step>> {
    let reduce = || prop_oneof![Just(Reduce::Sum), Just(Reduce::Max), Just(Reduce::Min)];
    let operation = prop_oneof![
        3 => reduce().prop_map(Operation::AllReduce),
        2 => reduce().prop_map(Operation::ReduceScatter),
        1 => Just(Operation::AllGather),
        1 => (0..ranks).prop_map(|root| Operation::Broadcast { root }),
        1 => (0..ranks).prop_map(|to| Operation::Send { to }),
        1 => Just(Operation::Barrier),
    ];
    let count = prop_oneof![Just(0usize), Just(1), 2..40usize, 40..700usize];
    let step =
        (operation, 0..DType::ALL.len(), count).prop_map(move |(operation, dtype, count)| {
            let (mut operation, mut dtype, mut count) = (operation, DType::ALL[dtype], count);
            match operation {
                Operation::AllReduce(_) | Operation::ReduceScatter(_) => {
                    dtype = REDUCIBLE[dtype.bytes() % REDUCIBLE.len()]
                }
                // A single rank has no other rank to send to.
                Operation::Send { .. } if ranks == 1 => operation = Operation::Barrier,
                _ => {}
            }
            if matches!(
                operation,
                Operation::ReduceScatter(_) | Operation::AllGather
            ) {
                count = count.next_multiple_of(ranks);
            }
            Step {
                operation,
                dtype,
                count,
            }
        });
    proptest::collection::vec(step, 1..14)
}

fn programs() -> impl Strategy<Value = (usize, Vec<Step>, Vec<Step>)> {
    (1usize..=5).prop_flat_map(|ranks| (Just(ranks), program(ranks), program(ranks)))
}

/// Runs a program on a channel as one rank; what it held after each step.
fn run(rank: &ThreadRank, channel: usize, steps: &[Step], seed: u64) -> Vec<Vec<u8>> {
    let group = super::group(rank, channel, "main");
    let one = |(index, step): (usize, &Step)| {
        let tensor = tensor_of(step.dtype, &given(seed, index, rank.rank, step));
        make(&group, step, &tensor);
        bytes_in(&tensor)
    };
    steps.iter().enumerate().map(one).collect()
}

fn check_all(
    ranks: usize,
    steps: &[Step],
    seed: u64,
    after: &[Vec<Vec<u8>>],
) -> Result<(), TestCaseError> {
    for (index, step) in steps.iter().enumerate() {
        let before: Vec<Vec<u8>> = (0..ranks)
            .map(|rank| given(seed, index, rank, step))
            .collect();
        let after: Vec<Vec<u8>> = after.iter().map(|all| all[index].clone()).collect();
        (0..ranks).try_for_each(|rank| check(step, rank, &before, &after))?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, max_shrink_iters: 40, ..ProptestConfig::default() })]

    #[test]
    fn any_program_in_any_order_gives_the_bits_of_the_plain_loop(
        (ranks, first, second) in programs(),
        seed in any::<u64>(),
        dawdles in any::<bool>(),
    ) {
        // Two groups at the same time, each on a thread of its own on every rank.
        let all = on_all(&tiny(ranks, dawdles.then_some(seed)), |rank| {
            std::thread::scope(|scope| {
                let other = scope.spawn(|| run(rank, 5, &second, !seed));
                (run(rank, 0, &first, seed), other.join().unwrap())
            })
        });
        let (on_first, on_second): (Vec<_>, Vec<_>) = all.into_iter().unzip();
        check_all(ranks, &first, seed, &on_first)?;
        check_all(ranks, &second, !seed, &on_second)?;
    }
}

#[test]
fn every_dtype_reduces_and_moves_at_full_size() {
    // Sizes around one round, one piece and several, with the staging that a job has.
    for (ranks, bytes) in [(2, 4096), (2, 4104), (3, 300_000), (2, 2_500_016)] {
        let ranks = super::ranks(ranks);
        let steps: Vec<Step> = DType::ALL
            .into_iter()
            .flat_map(|dtype| {
                let count = (bytes / dtype.bytes()).next_multiple_of(ranks.len());
                let reduces = REDUCIBLE.contains(&dtype);
                let all = [
                    Operation::AllReduce(Reduce::Sum),
                    Operation::ReduceScatter(Reduce::Sum),
                ];
                let moves = [
                    Operation::AllGather,
                    Operation::Broadcast { root: 1 },
                    Operation::Send { to: 1 },
                ];
                let chosen = all.into_iter().filter(move |_| reduces).chain(moves);
                chosen.map(move |operation| Step {
                    operation,
                    dtype,
                    count,
                })
            })
            .collect();
        let after = on_all(&ranks, |rank| run(rank, 0, &steps, 11));
        check_all(ranks.len(), &steps, 11, &after).unwrap();
    }
}

#[test]
#[ignore = "takes 9 GB of memory"]
fn counts_beyond_two_to_the_31_are_reduced_and_gathered() {
    let count = (1usize << 31) + 6;
    on_all(&ranks(2), |rank| {
        let group = super::group(rank, 0, "main");
        let tensor =
            Tensor::full(&[count], 1.0 + rank.rank as f64, DType::BF16, Device::Cpu).unwrap();
        let all_are = |value: f64| {
            let check = |all: &[bf16]| all.iter().all(|&element| element == bf16::from_f64(value));
            tensor.with_slice::<bf16, _>(check).unwrap()
        };
        group.all_reduce(&tensor, Reduce::Sum, &stream()).unwrap();
        assert!(all_are(3.0));
        group
            .reduce_scatter(&tensor, Reduce::Sum, &stream())
            .unwrap();
        group.all_gather(&tensor, &stream()).unwrap();
        assert!(all_are(6.0));
        group.broadcast(&tensor, 1, &stream()).unwrap();
        assert!(all_are(6.0));
    });
}
