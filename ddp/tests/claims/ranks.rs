//! N ranks compute what one would: to the bit where sums are exact, within a derived bound
//! elsewhere. On GPUs, eager and captured, they compute what one rank on the CPU would.
//!
//! Sums of small whole numbers are exact in any order (partial sums stay below 2²⁴ in f32 and 256
//! in bf16), and the only division, by the global count, is the same everywhere. One step only: a
//! second one would start from values that are not whole.

#[path = "alike.rs"]
mod alike;

use crate::support::random::{mixed, uniform, whole};
use crate::support::training::{self, Case, Outcome, worlds};
use crate::{turn, ways};
use ddp::data::{Batch, sampler};
use ddp::models::Model;
use ddp::nn::{Linear, Mse, Sequential, Tie};
use ddp::optim::{Optimizer, Rule};
use ddp::step::{Step, StepOptions};
use ddp_kernels::{DType, Device};

/// -1, 0 or 1, mostly 0: products and sums of few stay below 256.
fn sparse(stream: u64, index: u64) -> f32 {
    match mixed(stream, index) % 8 {
        0 => 1.0,
        1 => -1.0,
        _ => 0.0,
    }
}

/// Trains as one rank on the CPU, and in every world: expects the same bits on all ranks.
fn every_world_size_gives_the_same_bits(case: &Case) -> Outcome {
    let one = case.train(1, 0).remove(0);
    let first: Vec<f32> = one.values[0]
        .iter()
        .map(|&bits| f32::from_bits(bits))
        .collect();
    assert!(first.iter().all(|value| value.is_finite()), "{first:?}");
    assert!(
        first.iter().any(|value| value.fract() != 0.0),
        "the step changed nothing: {first:?}"
    );
    for (way, size) in worlds(&ways(), |way| 1..=way.ranks_max()) {
        for seed in way.seeds() {
            for (rank, outcome) in way.of(case).train(size, seed).into_iter().enumerate() {
                assert_eq!(outcome, one, "rank {rank} of {size}, seed {seed}, {way:?}");
            }
        }
    }
    one
}

#[test]
fn four_ranks_equal_one() {
    let Some(_turn) = turn() else { return };
    every_world_size_gives_the_same_bits(&Case::regression(48, whole));
}

#[test]
fn four_ranks_equal_one_when_reduced_after_the_backward() {
    let Some(_turn) = turn() else { return };
    every_world_size_gives_the_same_bits(&Case {
        overlap: false,
        ..Case::regression(48, whole)
    });
}

#[test]
fn accumulation_over_micro_batches_changes_nothing() {
    let Some(_turn) = turn() else { return };
    let whole_batches = every_world_size_gives_the_same_bits(&Case::regression(48, whole));
    for micro in [1, 2, 5] {
        let case = Case {
            micro: Some(micro),
            ..Case::regression(48, whole)
        };
        assert_eq!(
            every_world_size_gives_the_same_bits(&case),
            whole_batches,
            "micro-batches of {micro}"
        );
    }
}

#[test]
fn pieces_of_different_sizes_count_by_row() {
    let Some(_turn) = turn() else { return };
    // 2 ranks have 5 and 6 rows, 3 have 3, 4 and 4, 4 have 2, 3, 3 and 3.
    every_world_size_gives_the_same_bits(&Case {
        batch: 11,
        ..Case::regression(44, whole)
    });
}

#[test]
fn the_short_last_batch_counts_its_own_rows() {
    let Some(_turn) = turn() else { return };
    let case = Case {
        batch: 12,
        steps: 2..3,
        ..Case::regression(31, whole)
    };
    let outcome = every_world_size_gives_the_same_bits(&case);
    assert_eq!(outcome.rows, [7.0]);
}

#[test]
fn a_rank_without_rows_takes_part() {
    let Some(_turn) = turn() else { return };
    // The last batch has 1 row for up to 4 ranks. Memory has gradients of the steps before.
    let case = Case {
        batch: 12,
        steps: 2..3,
        warm_up: 2,
        micro: Some(1),
        ..Case::regression(25, whole)
    };
    let outcome = every_world_size_gives_the_same_bits(&case);
    assert_eq!(outcome.rows, [1.0]);
}

#[test]
fn frozen_layers_stay_and_the_rest_is_equal() {
    let Some(_turn) = turn() else { return };
    let free = every_world_size_gives_the_same_bits(&Case::regression(48, whole));
    let frozen = every_world_size_gives_the_same_bits(&Case {
        frozen: "2.",
        ..Case::regression(48, whole)
    });
    // Frozen ones come last in the arena: 2.weight, 64 numbers, and 2.bias, 4, as drawn, and whole.
    let is_whole = |bits: &u32| f32::from_bits(*bits).fract() == 0.0;
    let tail = frozen.values[0].len() - 68;
    assert!(frozen.values[0][tail..].iter().all(is_whole));
    assert!(!frozen.values[0][..tail].iter().all(is_whole));
    assert_ne!(free.values, frozen.values);
}

#[test]
fn sums_in_bf16_are_equal_where_they_are_exact() {
    let Some(_turn) = turn() else { return };
    let case = Case {
        reduce_dtype: DType::BF16,
        batch: 6,
        ..Case::regression(48, sparse)
    };
    let exact = Case {
        reduce_dtype: DType::F32,
        ..case.clone()
    };
    assert_eq!(
        every_world_size_gives_the_same_bits(&case),
        every_world_size_gives_the_same_bits(&exact)
    );
}

#[test]
fn clipping_sees_the_norm_of_the_whole() {
    let Some(_turn) = turn() else { return };
    let free = every_world_size_gives_the_same_bits(&Case::regression(48, whole));
    let clipped = every_world_size_gives_the_same_bits(&Case {
        clip_norm: 0.5,
        ..Case::regression(48, whole)
    });
    assert_ne!(free.values, clipped.values);
}

#[test]
fn dropout_is_by_row_and_step_and_not_by_rank() {
    let Some(_turn) = turn() else { return };
    let case = Case {
        dropout: 0.5,
        ..Case::regression(48, whole)
    };
    let dropped = every_world_size_gives_the_same_bits(&case);
    let kept = Case {
        dropout: 0.0,
        ..case.clone()
    };
    assert_ne!(dropped, every_world_size_gives_the_same_bits(&kept));
    // Nor by micro-batch.
    for micro in [1, 5] {
        let micro_batches = Case {
            micro: Some(micro),
            ..case.clone()
        };
        let got = every_world_size_gives_the_same_bits(&micro_batches);
        assert_eq!(got, dropped, "micro-batches of {micro}");
    }
}

/// Rows that are all alike, and a batch of all of them: what is dropped is all that can differ.
#[test]
fn dropout_is_new_in_each_step() {
    let Some(_turn) = turn() else { return };
    let step = |step0: u64, dropout: f64| {
        let case = Case {
            dropout,
            batch: 48,
            steps: step0..step0 + 1,
            values: whole,
            ..Case::regression(48, |stream, index| whole(stream, index % 2))
        };
        every_world_size_gives_the_same_bits(&case).values
    };
    assert_eq!(step(0, 0.0), step(1, 0.0));
    assert_ne!(step(0, 0.5), step(1, 0.5));
}

#[test]
fn a_bucket_a_parameter_or_one_for_all_gives_the_same_bits() {
    let Some(_turn) = turn() else { return };
    let few = every_world_size_gives_the_same_bits(&Case::regression(48, whole));
    let case = Case {
        bucket_elements: 1 << 20,
        ..Case::regression(48, whole)
    };
    assert_eq!(every_world_size_gives_the_same_bits(&case), few);
}

/// y = W·W·x uses one weight twice: its gradient is complete after the second use and is counted
/// once on every rank.
#[test]
fn tied_parameters_are_reduced_once_after_their_last_use() {
    let Some(_turn) = turn() else { return };
    let train = |size: usize, micro: usize| -> Vec<Vec<u32>> {
        let ranks = training::on_ranks(size, Some(3), |world| {
            let tie = Tie::default();
            let layers = Sequential::new()
                .then(Linear::new(4).tied(&tie))
                .then(Linear::new(4).tied(&tie));
            let model = Model::new(Box::new(layers), &[4], DType::F32, Device::Cpu, 1, &|_| {
                false
            })?;
            let values = model.params.values();
            values.with_slice_mut(|values: &mut [f32]| {
                values
                    .iter_mut()
                    .enumerate()
                    .for_each(|(at, value)| *value = whole(9, at as u64));
            })?;
            let optimizer = Optimizer::new(Case::sgd(), &model.params)?;
            let group = world.group("gradients")?;
            let mut step = Step::new(
                model,
                Box::new(Mse),
                optimizer,
                group,
                &StepOptions::default(),
            )?;
            let mine = sampler::share(&(0..7), world.rank(), world.size());
            let draw = |stream: u64| -> Vec<f32> {
                (mine.start * 4..mine.end * 4)
                    .map(|at| whole(stream, at))
                    .collect()
            };
            let shape = [(mine.end - mine.start) as usize, 4];
            let (x, targets) = (
                training::cpu(&draw(1), &shape),
                training::cpu(&draw(2), &shape),
            );
            step.run(&Batch::new(0, 0, 7, mine.start, x, targets, micro), 0.125)?;
            training::bits(&step.stages()[0].model().params)
        });
        // A sum of zeros has one sign or the other, depending on their order: 0.0 for both.
        let plain = |bits: &u32| {
            if *bits == (-0.0f32).to_bits() {
                0
            } else {
                *bits
            }
        };
        ranks
            .iter()
            .map(|values| values.iter().map(plain).collect())
            .collect()
    };
    let one = train(1, 7).remove(0);
    for size in 1..=4 {
        for micro in [1, 2, 7] {
            assert!(
                train(size, micro).iter().all(|values| *values == one),
                "{size} ranks, micro-batches of {micro}"
            );
        }
    }
}

#[test]
fn replicas_hold_identical_bytes_after_every_step() {
    let Some(_turn) = turn() else { return };
    for reduce_dtype in [DType::F32, DType::BF16] {
        let case = Case {
            rule: Rule::adamw(),
            clip_norm: 0.3,
            dropout: 0.2,
            micro: Some(2),
            batch: 11,
            reduce_dtype,
            learning_rate: 1e-2,
            steps: 0..12,
            ..Case::regression(40, uniform)
        };
        for (way, size) in worlds(&ways(), |way| 2..=way.ranks_max()) {
            let ranks = way.of(&case).train(size, 3);
            ranks.iter().enumerate().for_each(|(rank, outcome)| {
                assert_eq!(
                    outcome, &ranks[0],
                    "rank {rank} of {size} differs from rank 0, {way:?}"
                );
            });
        }
    }
}

/// A step of y = W2 · relu(W1 x + b1) + b2 with squared error in f64. Beside each sum is the sum of
/// its terms' magnitudes, which bounds its rounding error.
struct Exact {
    /// By parameter in the arena's order: 2.bias, 2.weight, 0.bias, 0.weight.
    gradients: Vec<f64>,
    magnitudes: Vec<f64>,
}

const IN: usize = 6;
const MID: usize = 16;
const OUT: usize = 4;

fn exact_gradients(rows: impl Iterator<Item = u64>, unit: f64) -> Exact {
    // As Case::step draws them: streams 10, 11, 12, 13 in the arena's order.
    let draw = |stream: u64, count: usize| -> Vec<f64> {
        (0..count as u64)
            .map(|at| f64::from(uniform(stream, at)))
            .collect()
    };
    let (b2, w2, b1, w1) = (
        draw(10, OUT),
        draw(11, OUT * MID),
        draw(12, MID),
        draw(13, MID * IN),
    );
    let count = OUT + OUT * MID + MID + MID * IN;
    let (mut gradients, mut magnitudes) = (vec![0.0; count], vec![0.0; count]);
    for row in rows {
        let x: Vec<f64> = (0..IN as u64)
            .map(|at| f64::from(uniform(1, row * IN as u64 + at)))
            .collect();
        let target: Vec<f64> = (0..OUT as u64)
            .map(|at| f64::from(uniform(2, row * OUT as u64 + at)))
            .collect();
        let (mut h, mut h_abs) = (vec![0.0; MID], vec![0.0; MID]);
        for m in 0..MID {
            let terms = (0..IN).map(|i| w1[m * IN + i] * x[i]).chain([b1[m]]);
            let (sum, abs) = terms.fold((0.0, 0.0), |(sum, abs): (f64, f64), t| {
                (sum + t, abs + t.abs())
            });
            assert!(
                sum.abs() > (IN + 1) as f64 * unit * abs,
                "row {row} lies on ReLU's kink: draw others"
            );
            (h[m], h_abs[m]) = (sum.max(0.0), if sum > 0.0 { abs } else { 0.0 });
        }
        let (mut dy, mut dy_abs) = (vec![0.0; OUT], vec![0.0; OUT]);
        for o in 0..OUT {
            let sum: f64 =
                (0..MID).map(|m| w2[o * MID + m] * h[m]).sum::<f64>() + b2[o] - target[o];
            let abs: f64 = (0..MID)
                .map(|m| w2[o * MID + m].abs() * h_abs[m])
                .sum::<f64>();
            (dy[o], dy_abs[o]) = (2.0 * sum, 2.0 * (abs + b2[o].abs() + target[o].abs()));
        }
        let mut add = |at: usize, value: f64, abs: f64| {
            gradients[at] += value;
            magnitudes[at] += abs;
        };
        for o in 0..OUT {
            add(o, dy[o], dy_abs[o]);
            (0..MID).for_each(|m| add(OUT + o * MID + m, dy[o] * h[m], dy_abs[o] * h_abs[m]));
        }
        for m in 0..MID {
            let back: f64 = (0..OUT).map(|o| dy[o] * w2[o * MID + m]).sum();
            let back_abs: f64 = (0..OUT).map(|o| dy_abs[o] * w2[o * MID + m].abs()).sum();
            let (dz, dz_abs) = if h[m] > 0.0 {
                (back, back_abs)
            } else {
                (0.0, 0.0)
            };
            add(OUT + OUT * MID + m, dz, dz_abs);
            (0..IN).for_each(|i| {
                add(
                    OUT + OUT * MID + MID + m * IN + i,
                    dz * x[i],
                    dz_abs * x[i].abs(),
                )
            });
        }
    }
    Exact {
        gradients,
        magnitudes,
    }
}

#[test]
fn on_any_numbers_every_world_size_is_within_rounding_of_the_exact_step() {
    let Some(_turn) = turn() else { return };
    let unit = f64::from(f32::EPSILON) / 2.0;
    let case = Case {
        batch: 11,
        ..Case::regression(11, uniform)
    };
    let exact = exact_gradients(0..11, unit);
    let start: Vec<f64> = [(10, OUT), (11, OUT * MID), (12, MID), (13, MID * IN)]
        .into_iter()
        .flat_map(|(stream, count)| (0..count as u64).map(move |at| f64::from(uniform(stream, at))))
        .collect();
    // Roundings between an input and a sum over the rows: two forward sums (IN + 1 and MID + 2, and
    // a product each), the doubled error, the backward sum (OUT and a product), the sum over rows
    // (11 and a product), then scale and learning rate. Rounded up.
    let roundings = (IN + 2 + MID + 3 + 1 + OUT + 1 + 11 + 1 + 4) as f64;
    let sizes = worlds(&ways(), |way| 1..=way.ranks_max());
    for ((way, size), zero) in sizes
        .into_iter()
        .flat_map(|way| [(way, false), (way, true)])
    {
        let outcome = way
            .of(&Case {
                zero,
                ..case.clone()
            })
            .train(size, 1)
            .remove(0);
        let rate = case.learning_rate / (11.0 * OUT as f64);
        for (at, &bits) in outcome.values[0].iter().enumerate() {
            let want = start[at] - rate * exact.gradients[at];
            let bound = unit * (roundings * rate * exact.magnitudes[at] + want.abs());
            let got = f64::from(f32::from_bits(bits));
            assert!(
                (got - want).abs() <= bound,
                "{way:?}, {size} ranks, zero {zero}, value {at}: {got} is not {want} within {bound}"
            );
        }
    }
}
