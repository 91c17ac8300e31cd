//! Sums along the tree of shards have the same bits on any number of ranks, and those of the plain
//! recursion.

use std::time::Duration;

use ddp_comm::{SumTree, World};
use ddp_kernels::dtype::bf16;
use ddp_kernels::stream::Stream;
use ddp_kernels::{Device, Element, Tensor};

/// The value of a shard at an element: of all magnitudes, so that every order of additions shows.
fn value(shard: usize, index: usize) -> f64 {
    let mut bits = (shard * 1_000_003 + index) as u64 + 1;
    for _ in 0..3 {
        bits = bits.wrapping_mul(6_364_136_223_846_793_005).rotate_left(23) ^ 0x9e37;
    }
    let sign = if bits & 1 == 0 { 1.0 } else { -1.0 };
    sign * (1.0 + (bits >> 40) as f64 / 1e7) * 2f64.powi((bits >> 8 & 15) as i32 - 8)
}

fn rounded<T: Element>(value: f64) -> f64 {
    T::from_f64(value).to_f64()
}

/// The sum of the shards from `first` on, 2^`level` of them, each addition rounded.
fn sum<T: Element>(first: usize, level: u32, shards: usize, index: usize) -> Option<f64> {
    if first >= shards {
        return None;
    }
    if level == 0 {
        return Some(rounded::<T>(value(first, index)));
    }
    let half = 1 << (level - 1);
    let left = sum::<T>(first, level - 1, shards, index)?;
    match sum::<T>(first + half, level - 1, shards, index) {
        Some(right) => Some(rounded::<T>(left + right)),
        None => Some(left),
    }
}

/// This rank's partial sums, made by its additions: the rows, and the last one.
fn partial_sums<T: Element>(tree: &SumTree, rank: usize, count: usize) -> (Vec<T>, Vec<T>) {
    let mut left: Vec<Vec<T>> = Vec::new();
    for (shard, additions) in tree.shards_of(rank).zip(tree.additions(rank)) {
        let mut sum: Vec<T> = (0..count).map(|i| T::from_f64(value(shard, i))).collect();
        for _ in 0..additions {
            for (sum, before) in sum.iter_mut().zip(left.pop().unwrap()) {
                *sum = T::from_f64(before.to_f64() + sum.to_f64());
            }
        }
        left.push(sum);
    }
    let last = left.pop().unwrap();
    (left.concat(), last)
}

fn is_the_plain_recursion<T: Element>(shards: usize, ranks: usize, count: usize, seed: u64) {
    let tree = SumTree::new(shards, ranks);
    let level = shards.next_power_of_two().trailing_zeros();
    let expected: Vec<f64> = (0..count)
        .map(|index| sum::<T>(0, level, shards, index).unwrap())
        .collect();
    std::thread::scope(|scope| {
        for world in World::threads(ranks, Some(seed), Duration::from_secs(60)).unwrap() {
            let (tree, expected) = (&tree, &expected);
            scope.spawn(move || {
                let group = world.group("main").unwrap();
                let stream = Stream::default_of(Device::Cpu).unwrap();
                for scatter in [false, true] {
                    if scatter && !count.is_multiple_of(ranks) {
                        continue;
                    }
                    let (rows, last) = partial_sums::<T>(tree, group.rank(), count);
                    let of = |values: &[T]| {
                        Tensor::from_slice(values, &[values.len()], Device::Cpu).unwrap()
                    };
                    let (rows, tensor) = (of(&rows), of(&last));
                    group
                        .sum_along(&tensor, &rows, tree, scatter, &stream)
                        .unwrap();
                    let mine = if scatter {
                        count / ranks * group.rank()..count / ranks * (group.rank() + 1)
                    } else {
                        0..count
                    };
                    let got = tensor.to_vec::<T>().unwrap();
                    for index in mine {
                        let (got, expected) = (got[index].to_f64(), expected[index]);
                        assert_eq!(got, expected, "{shards} shards, {ranks} ranks, {index}");
                    }
                }
            });
        }
    });
}

#[test]
fn sums_along_the_tree_are_the_plain_recursion_on_any_number_of_ranks() {
    for shards in [1, 2, 3, 7, 12, 16] {
        for ranks in (1..=shards).filter(|ranks| *ranks <= 8) {
            // One round, one piece, and several pieces.
            for count in [1, 24, 840, 40_320] {
                is_the_plain_recursion::<f32>(shards, ranks, count, 7);
            }
            is_the_plain_recursion::<bf16>(shards, ranks, 840, 8);
            is_the_plain_recursion::<f64>(shards, ranks, 3000, 9);
        }
    }
}

#[test]
fn partial_sums_of_another_number_are_refused() {
    let world = World::single().unwrap();
    let group = world.group("main").unwrap();
    let stream = Stream::default_of(Device::Cpu).unwrap();
    let zeros = |count| Tensor::zeros(&[count], ddp_kernels::DType::F32, Device::Cpu).unwrap();
    let refusal = |rows: usize, ranks: usize| {
        let tree = SumTree::new(4, ranks);
        let error = group.sum_along(&zeros(3), &zeros(rows), &tree, false, &stream);
        error.unwrap_err().to_string()
    };
    for (rows, ranks) in [(6, 1), (0, 2)] {
        let text = refusal(rows, ranks);
        assert!(
            text.contains("partial sums") && text.contains("help:"),
            "{text}"
        );
    }
}
