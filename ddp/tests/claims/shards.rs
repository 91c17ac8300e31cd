//! Batches in shards give the same bits on any number of ranks, for any number of steps and any
//! numbers: values, losses and the norm for clipping. On the CPU and on GPUs, eager and captured.

use crate::support::random::uniform;
use crate::support::training::{Case, Way, worlds};
use crate::{turn, ways};
use ddp::optim::{Method, Rule};
use ddp_kernels::DType;
use ddp_kernels::ops::{Activation, SgdConstants};

/// Shards of 1 and 2 rows; the last batch of an epoch leaves some of them without rows.
const SHARDS: usize = 7;

fn plain() -> Case {
    Case {
        hidden: vec![40, 9],
        rule: Rule::adamw(),
        learning_rate: 1e-2,
        bucket_elements: 1100,
        batch: 11,
        steps: 0..8,
        shards: Some(SHARDS),
        ..Case::regression(27, uniform)
    }
}

/// Trains in every world: expects what one rank computes in the same way.
fn every_world_size_gives_the_same_bits(case: &Case) {
    for (way, size) in worlds(&ways(), |way: Way| 2..=way.ranks_max()) {
        let one = way.of(case).train(1, 0).remove(0);
        assert!(one.losses.iter().all(|loss| loss.is_finite()));
        for (rank, outcome) in way.of(case).train(size, 3).into_iter().enumerate() {
            assert_eq!(outcome, one, "rank {rank} of {size}, {way:?}");
        }
    }
}

#[test]
fn shards_give_the_same_bits_on_any_number_of_ranks() {
    let Some(_turn) = turn() else { return };
    every_world_size_gives_the_same_bits(&plain());
}

#[test]
fn shards_with_zero_clipping_dropout_and_micro_batches_do() {
    let Some(_turn) = turn() else { return };
    every_world_size_gives_the_same_bits(&Case {
        zero: true,
        clip_norm: 0.05,
        dropout: 0.2,
        micro: Some(1),
        activation: Some(Activation::GeluTanh),
        ..plain()
    });
}

#[test]
fn shards_whose_gradients_travel_in_bf16_and_are_freed_do() {
    let Some(_turn) = turn() else { return };
    every_world_size_gives_the_same_bits(&Case {
        stage: Some(2),
        reduce_dtype: DType::BF16,
        rule: Rule::of(Method::Sgd(SgdConstants {
            momentum: 0.9,
            nesterov: false,
        })),
        overlap: false,
        ..plain()
    });
}

#[test]
fn shards_under_muon_whose_matrices_ranks_share_do() {
    let Some(_turn) = turn() else { return };
    every_world_size_gives_the_same_bits(&Case {
        zero: true,
        rule: Rule::muon(),
        hidden: vec![40, 20, 9],
        ..plain()
    });
}

#[test]
fn shards_give_the_same_bits_in_any_order_of_ranks() {
    let Some(_turn) = turn() else { return };
    for seed in ddp_testing::cases("shards, orders of ranks", 100, 1) {
        let case = Case {
            stage: [None, Some(1), Some(2)][seed % 3],
            clip_norm: 0.05,
            steps: 0..4,
            ..plain()
        };
        let (ways, seed) = (ways(), seed as u64);
        let way = ways[seed as usize % ways.len()];
        let size = (2 + seed as usize / ways.len() % 3).min(way.ranks_max());
        let one = way.of(&case).train(1, 0).remove(0);
        for outcome in way.of(&case).train(size, seed) {
            assert_eq!(outcome, one, "{size} ranks, seed {seed}, {way:?}");
        }
    }
}

#[test]
fn a_bucket_cut_at_another_place_changes_nothing() {
    let Some(_turn) = turn() else { return };
    for (way, size) in worlds(&ways(), |way| 2..=way.ranks_max().min(2)) {
        let of = |bucket_elements: usize, stage: u64| {
            let case = Case {
                bucket_elements,
                stage: Some(stage),
                ..plain()
            };
            way.of(&case).train(size, 1).remove(0)
        };
        let first = of(1100, 0);
        for (size, stage) in [(5000, 0), (1100, 1), (1100, 2), (5000, 2), (1, 2)] {
            assert_eq!(of(size, stage), first, "{size}, {stage}, {way:?}");
        }
    }
}
