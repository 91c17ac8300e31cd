//! ZeRO-1 and ZeRO-2 train the same model to the bit, with the optimizer's state, masters of bf16
//! and gradients split over the ranks; on the CPU and on GPUs, eager and captured.
//!
//! Why to the bit, for any number of steps: a rank sums its slices over the ranks in the order in
//! which an all-reduce does; an element's update reads only that element's numbers; the norm is
//! summed by quanta that no slice cuts, in the same order (`optim/clip.rs`); and a gather copies.
//! Only the memory layout differs, and no operation's result depends on it. On GPUs NCCL promises
//! no order, so the first holds for two ranks only (a + b = b + a); with more we expect that the
//! ranks agree, and what `claims/ranks.rs` checks for one exact step.

#[path = "zero/state.rs"]
mod state;

use crate::support::random::{uniform, whole};
use crate::support::training::{self, Case, Outcome, Way, on_ranks, try_on_ranks, worlds};
use crate::{turn, ways};
use ddp::config::Precision;
use ddp::models::{Mlp, Model};
use ddp::nn::Mse;
use ddp::optim::{Method, Optimizer, Rule};
use ddp::reducer::ReducerOptions;
use ddp::step::{Step, StepOptions};
use ddp_kernels::ops::{Activation, SgdConstants};
use ddp_kernels::{DType, Device};

/// Steps on the CPU, and on GPUs, where the last ones are launches of what was captured before.
const STEPS: [u64; 2] = [30, 8];

/// Buckets of all kinds: a first layer of 6 quanta, and small ones.
fn long() -> Case {
    Case {
        hidden: vec![70, 70, 9],
        rule: Rule::adamw(),
        learning_rate: 1e-2,
        bucket_elements: 3000,
        batch: 11,
        steps: 0..STEPS[0],
        ..Case::regression(40, uniform)
    }
}

/// The numbers of ranks to try.
fn sizes(way: Way) -> std::ops::RangeInclusive<usize> {
    match way {
        Way::Cpu => 1..=5,
        Way::Gpus(_) => way.ranks_max().min(2)..=way.ranks_max(),
    }
}

/// Whether all-reduce and reduce-scatter add this many ranks in the same order. Simulated GPUs do
/// not.
fn sums_are_ordered(way: Way, ranks: usize) -> bool {
    way == Way::Cpu || ranks <= 2
}

/// Trains with and without ZeRO-1 in every world; ranks take turns in orders drawn from seeds.
fn zero_is_plain(name: &str, case: &Case) -> Outcome {
    let mut one = None;
    for (way, ranks) in worlds(&ways(), sizes) {
        let mut case = case.clone();
        if way != Way::Cpu {
            case.steps.end = case.steps.end.min(STEPS[1]);
        }
        let case = way.of(&case);
        let plain = case.train(ranks, 1).remove(0);
        assert!(
            plain.losses.iter().all(|loss| loss.is_finite()),
            "{name}: {:?}",
            plain.losses
        );
        let overlaps = if way == Way::Cpu {
            &[true, false][..]
        } else {
            &[case.overlap]
        };
        // Whole matrices need all gradients, and micro-batches are summed in another order.
        let frees = case.rule.hidden.is_none() && case.micro.is_none();
        let stages = if frees { 0..=2 } else { 0..=1 };
        for (&overlap, stage) in overlaps
            .iter()
            .flat_map(|it| stages.clone().map(move |at| (it, at)))
        {
            let zero = Case {
                zero: true,
                stage: (stage > 0).then_some(stage),
                overlap,
                ..case.clone()
            }
            .train(ranks, 2);
            let plain = if sums_are_ordered(way, ranks) {
                plain.clone()
            } else {
                zero[0].clone()
            };
            for (rank, outcome) in zero.into_iter().enumerate() {
                let text = format!(
                    "{name}: rank {rank} of {ranks}, stage {stage}, overlap {overlap}, {way:?}"
                );
                assert_eq!(
                    (&outcome.losses, &outcome.rows),
                    (&plain.losses, &plain.rows),
                    "{text}"
                );
                let first = outcome
                    .values
                    .iter()
                    .zip(&plain.values)
                    .position(|(zero, plain)| zero != plain);
                assert_eq!(first, None, "the first step with other bits; {text}");
            }
        }
        one.get_or_insert(plain);
    }
    one.expect("a rank alone")
}

#[test]
fn zero_is_plain_training_on_one_to_five_ranks_to_the_bit() {
    let Some(_turn) = turn() else { return };
    zero_is_plain("AdamW", &long());
}

#[test]
fn zero_is_plain_training_when_nothing_runs_beside_the_layers() {
    let Some(_turn) = turn() else { return };
    zero_is_plain(
        "--overlap off",
        &Case {
            overlap: false,
            clip_norm: 0.3,
            steps: 0..8,
            ..long()
        },
    );
}

#[test]
fn zero_is_plain_training_with_clipping_dropout_micro_batches_and_rounded_gradients() {
    let Some(_turn) = turn() else { return };
    let case = Case {
        clip_norm: 0.3,
        dropout: 0.2,
        micro: Some(2),
        reduce_dtype: DType::BF16,
        activation: Some(Activation::Gelu),
        ..long()
    };
    let clipped = zero_is_plain("everything", &case);
    let free = Case {
        clip_norm: 0.0,
        steps: 0..1,
        ..case
    }
    .train(1, 1)
    .remove(0);
    assert_ne!(clipped.values[0], free.values[0], "nothing was clipped");
}

#[test]
fn zero_is_plain_training_under_sgd_with_and_without_momentum() {
    let Some(_turn) = turn() else { return };
    for (momentum, nesterov) in [(0.0, false), (0.9, true)] {
        let rule = Rule {
            weight_decay: 0.01,
            ..Rule::of(Method::Sgd(SgdConstants { momentum, nesterov }))
        };
        // With a rate of AdamW's it diverges.
        zero_is_plain(
            "SGD",
            &Case {
                rule,
                learning_rate: 1e-4,
                steps: 0..8,
                ..long()
            },
        );
    }
}

#[test]
fn zero_is_plain_training_under_muon_whose_matrices_ranks_share() {
    let Some(_turn) = turn() else { return };
    zero_is_plain(
        "Muon",
        &Case {
            rule: Rule::muon(),
            steps: 0..8,
            ..long()
        },
    );
}

/// Layers read bf16 copies, so ranks have masters of what they own alone.
#[test]
fn zero_is_plain_training_where_ranks_divide_the_masters() {
    let Some(_turn) = turn() else { return };
    for rule in [Rule::adamw(), Rule::muon()] {
        let case = Case {
            precision: Precision::Bf16,
            frozen: "2.",
            clip_norm: 0.3,
            steps: 0..8,
            rule,
            ..long()
        };
        let of = |ranks, stage| {
            let stage = Some(stage);
            Case {
                stage,
                ..case.clone()
            }
            .train(ranks, 3)
        };
        for (ranks, stage) in [(2, 1), (3, 1), (2, 2), (4, 2)] {
            if stage == 1 || rule.hidden.is_none() {
                let text = format!("{ranks} ranks, stage {stage}, {rule:?}");
                assert_eq!(of(ranks, stage), of(ranks, 0), "{text}");
            }
        }
    }
}

#[test]
fn zero_leaves_frozen_layers_alone() {
    let Some(_turn) = turn() else { return };
    for frozen in ["0.", "4.bias", ""] {
        // The last freezes everything: no rank owns anything, and nothing is gathered.
        zero_is_plain(
            "frozen",
            &Case {
                frozen,
                steps: 0..4,
                ..long()
            },
        );
    }
}

#[test]
fn models_with_fewer_elements_than_ranks_and_ranks_without_rows_take_part() {
    let Some(_turn) = turn() else { return };
    // 6 inputs and 4 outputs: two parameters, fewer quanta than ranks. The third batch has one row.
    let tiny = Case {
        hidden: vec![],
        batch: 12,
        micro: Some(1),
        steps: 0..9,
        ..Case::regression(25, uniform)
    };
    zero_is_plain(
        "tiny",
        &Case {
            rule: Rule::adamw(),
            clip_norm: 0.1,
            ..tiny
        },
    );
}

#[test]
fn on_exactly_summable_numbers_every_number_of_ranks_gives_the_bits_of_one() {
    let Some(_turn) = turn() else { return };
    for clip_norm in [0.0, 0.5] {
        for rule in [Case::sgd(), Rule::adamw(), Rule::muon()] {
            let case = Case {
                rule,
                clip_norm,
                hidden: vec![70],
                ..Case::regression(48, whole)
            };
            let one = case.train(1, 0).remove(0);
            let zero = Case {
                zero: true,
                ..case.clone()
            };
            let stages = [(None, None), (Some(1), Some(3)), (Some(2), Some(1))];
            let stages = stages
                .into_iter()
                .filter(|it| it.0.is_none() || rule.hidden.is_none());
            let worlds = worlds(&ways(), sizes).into_iter();
            for ((way, ranks), (stage, micro)) in
                worlds.flat_map(|world| stages.clone().map(move |stage| (world, stage)))
            {
                let zero = Case {
                    stage,
                    micro,
                    ..zero.clone()
                };
                // Steps before a captured one leave traces in AdamW's moments, unlike in SGD
                // without momentum: AdamW's first step is eager.
                let warm_up = if rule == Case::sgd() {
                    way.of(&zero).warm_up
                } else {
                    0
                };
                let zero = Case {
                    warm_up,
                    ..way.of(&zero)
                };
                let one = if rule.hidden.is_some() && way != Way::Cpu {
                    // Muon's matmuls are not exact: a GPU adds them in another order.
                    let alone = Case {
                        zero: false,
                        ..zero.clone()
                    };
                    alone.train(1, 0).remove(0)
                } else {
                    one.clone()
                };
                for outcome in zero.train(ranks, 3) {
                    assert_eq!(
                        outcome, one,
                        "{ranks} ranks, {stage:?}, {rule:?}, clipped at {clip_norm}, {way:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn every_bucket_size_gives_the_same_bits() {
    let Some(_turn) = turn() else { return };
    let most = |way| if sums_are_ordered(way, 3) { 3 } else { 2 };
    let ranks = |way: Way| way.ranks_max().min(most(way))..=way.ranks_max().min(most(way));
    for (way, ranks) in worlds(&ways(), ranks) {
        let case = way.of(&Case {
            zero: true,
            clip_norm: 0.3,
            steps: 0..6,
            ..long()
        });
        let one = case.train(ranks, 0).remove(0);
        let sizes = [1, 5000, 1 << 20].map(|size| [(size, None), (size, Some(2))]);
        for (bucket_elements, stage) in sizes.concat() {
            let case = Case {
                bucket_elements,
                stage,
                ..case.clone()
            };
            assert_eq!(
                case.train(ranks, 1).remove(ranks - 1),
                one,
                "{bucket_elements}, {stage:?}, {way:?}"
            );
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_in_one_ranks_slice_stops_all_of_them() {
    let Some(_turn) = turn() else { return };
    // Bias and weight have one quantum each: two of four ranks own only padding, and one only
    // biases, whose gradients are finite.
    let case = Case {
        zero: true,
        rule: Rule::adamw(),
        hidden: vec![],
        steps: 0..3,
        ..Case::regression(48, huge)
    };
    for way in ways() {
        let (case, ranks) = (
            Case {
                warm_up: 0,
                ..way.of(&case)
            },
            way.ranks_max(),
        );
        // One rank has all gradients, and learns of the bad one while it updates.
        if ranks == 1 {
            continue;
        }
        let seen = on_ranks(ranks, Some(1), |world| {
            let mut step = case.step(world)?;
            let mut loader = case.loader(world)?;
            let before = training::bits(&step.stages()[0].model().params)?;
            for step0 in case.steps.clone() {
                step.run(loader.load(step0)?, 1e-3)?;
            }
            let report = step.report()?;
            assert!(
                report.stats.loss().is_finite(),
                "the loss tells nothing: {report:?}"
            );
            // No gather: nothing was updated.
            assert_eq!(training::bits(&step.stages()[0].model().params)?, before);
            Ok(report.bad_step)
        });
        assert_eq!(seen, vec![Some(1); ranks], "{way:?}");
    }
}

/// Features near the largest f32, weights near the smallest, targets near a thousand: outputs,
/// losses and bias gradients are ordinary numbers, but the weight's gradients overflow.
fn huge(stream: u64, index: u64) -> f32 {
    match stream {
        1 => uniform(stream, index) * 3e38,
        2 => uniform(stream, index) * 1e3,
        _ => uniform(stream, index) * 1e-38,
    }
}
