//! What a step over several devices promises. The including file says on which devices the parts
//! may be (`places`); `turn` is held while a test runs.

#[path = "split/nonfinite.rs"]
mod nonfinite;
#[path = "split/recipes.rs"]
mod recipes;
#[path = "split/saved.rs"]
mod saved;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use ddp::Result;
use ddp::checkpoint;
use ddp::config::GraphChoice;
use ddp::data::sampler::Shards;
use ddp::data::{Batch, Dataset, InOrder, Loader, Sampler, Source, TaskSpec};
use ddp::models::{Mlp, Model};
use ddp::nn::{Activate, Dropout, Linear, Module, Scope, Sequential, Tie, Var};
use ddp::optim::{Optimizer, Rule};
use ddp::params::Params;
use ddp::reducer::ReducerOptions;
use ddp::reducer::plan::BucketSizes;
use ddp::step::{StageSpec, Stats, Step, StepOptions, StepReport};
use ddp::tasks::{self, LossOptions};
use ddp_comm::{Group, World};
use ddp_kernels::ops::Activation;
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

pub(crate) use self::recipes::{Place, Recipe};
use super::places;
use crate::support::random::uniform;
use crate::support::training::{Rows, on_ranks, state};
use crate::turn;

const GROUPS: [&str; 4] = ["part 0", "part 1", "part 2", "part 3"];
/// An epoch of four, of which the last is short, and one of the next.
const STEPS: u64 = 5;
const RATE: f64 = 0.01;
pub(crate) const FEATURES: usize = 6;
pub(crate) const OUTPUTS: usize = 4;

/// The result of a training.
#[derive(Debug, PartialEq)]
struct Seen {
    values: BTreeMap<String, Vec<u32>>,
    moments: BTreeMap<String, Vec<u32>>,
    reports: Vec<StepReport>,
    evaluation: Stats,
    row_losses: Vec<f64>,
}

fn bits(tensor: &Tensor) -> Result<Vec<u32>> {
    Ok(tensor
        .to_vec::<f32>()?
        .into_iter()
        .map(f32::to_bits)
        .collect())
}

fn params(step: &Step) -> Vec<&Params> {
    step.stages()
        .iter()
        .map(|stage| &stage.model().params)
        .collect()
}

/// The values of all parameters, by name.
pub(crate) fn values(step: &Step) -> Result<BTreeMap<String, Vec<u32>>> {
    let params = step.stages().iter().map(|stage| &stage.model().params);
    let of = params.flat_map(|params| {
        params
            .list()
            .iter()
            .map(move |p| Ok((p.name.clone(), bits(params.value(p.id))?)))
    });
    of.collect()
}

/// The optimizer's, by name; nothing where each rank has its own share, or the method its own.
fn moments(step: &Step) -> Result<BTreeMap<String, Vec<u32>>> {
    let mut all = BTreeMap::new();
    for stage in step.stages() {
        let params = &stage.model().params;
        let is_whole = params.shares() == 1 && stage.optimizer().rule().hidden.is_none();
        for (name, moment) in stage.optimizer().moments().filter(|_| is_whole) {
            for p in params.list().iter().filter(|p| p.is_trained()) {
                all.insert(
                    format!("{}: {name}", p.name),
                    bits(&moment.slice(p.range.clone())?)?,
                );
            }
        }
    }
    Ok(all)
}

/// Trains as each rank of the place, over its devices or (`whole`) its first alone.
fn seen(recipe: &Recipe, place: &Place, whole: bool) -> Vec<Seen> {
    on_ranks(place.ranks, Some(11), |world| {
        let devices = &place.devices[world.rank()];
        recipe.train(if whole { &devices[..1] } else { devices }, world)
    })
}

fn everywhere_the_same_bits(what: &str, recipe: &Recipe) {
    let Some(_turn) = turn() else { return };
    for place in places() {
        let (split, whole) = (seen(recipe, &place, false), seen(recipe, &place, true));
        let last = whole[0].reports[STEPS as usize - 1];
        assert!(
            last.stats.loss().is_finite() && last.bad_step.is_none(),
            "{what}: {last:?}"
        );
        for (rank, (split, whole)) in split.iter().zip(&whole).enumerate() {
            let place = || {
                format!(
                    "{what}, rank {rank} of {}, {:?}",
                    place.ranks, place.devices[rank]
                )
            };
            assert_eq!(split.reports, whole.reports, "{}", place());
            assert_eq!(split.evaluation, whole.evaluation, "{}", place());
            assert_eq!(split.row_losses, whole.row_losses, "{}", place());
            assert_eq!(split.values.len(), 8);
            assert!(split == whole, "{}: values or moments differ", place());
        }
    }
}

/// With shards also those of the whole model on one rank.
#[test]
fn shards_of_a_split_model_have_the_bits_of_one_rank_and_device() {
    let Some(_turn) = turn() else { return };
    let plain = Recipe {
        shards: Some(5),
        clip_norm: 0.25,
        ..Recipe::classification()
    };
    let more = Recipe {
        zero: 1,
        dropout: 0.25,
        micro: Some(2),
        reduce_dtype: DType::BF16,
        ..plain.clone()
    };
    for recipe in [plain.clone().tied(), plain, more] {
        for place in places() {
            let alone = Place {
                ranks: 1,
                devices: place.devices.clone(),
            };
            let one = &seen(&recipe, &alone, true)[0];
            for (rank, split) in seen(&recipe, &place, false).iter().enumerate() {
                assert!(split.values == one.values, "rank {rank} of {place:?}");
                let figures = |of: &Seen| (of.reports.clone(), of.evaluation);
                assert_eq!(figures(split), figures(one), "rank {rank} of {place:?}");
            }
        }
    }
}

/// A step of gradient descent with rate 1 on the mean square of relu layers, by plain loops.
fn by_hand(
    values: &BTreeMap<String, Vec<f64>>,
    x: &[f64],
    targets: &[f64],
) -> BTreeMap<String, Vec<f64>> {
    let (rows, layers) = (x.len() / FEATURES, values.len() / 2);
    let of = |layer: usize, kind: &str| format!("{}.{kind}", 2 * layer);
    let mut after = values.clone();
    for (x, targets) in x.chunks(FEATURES).zip(targets.chunks(OUTPUTS)) {
        let mut inputs = vec![x.to_vec()];
        for layer in 0..layers {
            let below = &inputs[layer];
            let weights = values[&of(layer, "weight")].chunks(below.len());
            let z = weights
                .zip(&values[&of(layer, "bias")])
                .map(|(row, bias)| bias + row.iter().zip(below).map(|(w, x)| w * x).sum::<f64>());
            let low = if layer + 1 == layers { f64::MIN } else { 0.0 };
            inputs.push(z.map(|z| z.max(low)).collect());
        }
        let errors = inputs[layers].iter().zip(targets).map(|(y, t)| y - t);
        let mut slopes: Vec<f64> = errors.map(|e| 2.0 * e / (rows * OUTPUTS) as f64).collect();
        for layer in (0..layers).rev() {
            let (below, weight) = (&inputs[layer], &values[&of(layer, "weight")]);
            for (output, slope) in slopes.iter().enumerate() {
                after.get_mut(&of(layer, "bias")).unwrap()[output] -= slope;
                let row = &mut after.get_mut(&of(layer, "weight")).unwrap()[output * below.len()..];
                row.iter_mut().zip(below).for_each(|(w, x)| *w -= slope * x);
            }
            let sum = |input: usize| -> f64 {
                let column = weight[input..].iter().step_by(below.len());
                column.zip(&slopes).map(|(w, slope)| w * slope).sum()
            };
            let passes = |input: usize| if below[input] > 0.0 { sum(input) } else { 0.0 };
            slopes = (0..below.len()).map(passes).collect();
        }
    }
    after
}

#[test]
fn an_evaluation_drops_nothing() {
    let Some(_turn) = turn() else { return };
    let evaluations = on_ranks(1, None, |world| {
        let evaluation = |dropout: f64| {
            let recipe = Recipe {
                dropout,
                ..Recipe::regression()
            };
            let devices = &places()[0].devices[0];
            let mut step = recipe.step(devices, world)?;
            let mut rows = InOrder::new(recipe.source(devices), 0, 1, 9)?;
            step.evaluate(&mut rows, &Group::alone())
        };
        Ok([evaluation(0.0)?, evaluation(0.5)?])
    });
    assert_eq!(evaluations[0][0], evaluations[0][1]);
}

/// Whole and split models share their layers' code, so both could have the same bug.
#[test]
fn a_step_of_a_split_model_is_the_one_computed_by_hand() {
    let Some(_turn) = turn() else { return };
    let recipe = Recipe {
        rule: crate::support::training::Case::sgd(),
        micro: Some(5),
        ..Recipe::regression()
    };
    let wide = |values: BTreeMap<String, Vec<u32>>| -> BTreeMap<String, Vec<f64>> {
        let wide = |bits: Vec<u32>| {
            bits.into_iter()
                .map(|x| f64::from(f32::from_bits(x)))
                .collect()
        };
        values
            .into_iter()
            .map(|(name, bits)| (name, wide(bits)))
            .collect()
    };
    for place in places() {
        let seen = on_ranks(place.ranks, Some(11), |world| {
            let devices = &place.devices[world.rank()];
            let mut step = recipe.step(devices, world)?;
            let before = wide(values(&step)?);
            step.run(recipe.loader(devices, world)?.load(0)?, 1.0)?;
            Ok((before, wide(values(&step)?)))
        });
        let whole = Sampler::new(recipe.data.rows(), recipe.batch, 7, false).unwrap();
        let mut whole = Loader::new(recipe.source(&[Device::Cpu]), whole, 0, 1, None).unwrap();
        let batch = whole.load(0).unwrap();
        let [x, targets] = [&batch.x, &batch.targets].map(|tensor| {
            let wide = tensor.to_dtype(DType::F64).unwrap();
            wide.to_vec::<f64>().unwrap()
        });
        for (before, after) in &seen {
            for (name, expected) in by_hand(before, &x, &targets) {
                let apart = |a: &[f64], b: &[f64]| {
                    let apart = a.iter().zip(b).map(|(a, b)| (a - b).abs());
                    apart.fold(0.0, f64::max)
                };
                // Sums of at most 40 numbers of about 1 in f32, in four layers and their gradients.
                let (off, moved) = (
                    apart(&after[&name], &expected),
                    apart(&before[&name], &expected),
                );
                assert!(
                    off < 2e-5 && moved > 1e-3,
                    "{name}: {off}, moved by {moved}, {place:?}"
                );
            }
        }
    }
}

#[test]
fn split_models_train_to_the_same_bits() {
    everywhere_the_same_bits("plain", &Recipe::regression());
    let gelu = Activation::Gelu;
    let all = Recipe {
        activation: gelu,
        dropout: 0.25,
        clip_norm: 0.25,
        micro: Some(5),
        ..Recipe::classification()
    };
    everywhere_the_same_bits("gelu, dropout, clipping, micro-batches", &all);
}

#[test]
fn a_module_split_within_trains_to_the_same_bits() {
    let recipe = Recipe {
        own: true,
        dropout: 0.25,
        frozen: "0.2",
        ..Recipe::classification()
    };
    let more = Recipe {
        zero: 1,
        micro: Some(4),
        ..recipe.clone()
    };
    everywhere_the_same_bits("own module", &recipe);
    everywhere_the_same_bits("own module, ZeRO", &more);
}

/// No gradient flows to the layers below the third.
#[test]
fn what_no_gradient_reaches_is_complete_on_all_devices() {
    let recipe = Recipe {
        own: true,
        stops: true,
        ..Recipe::regression()
    };
    let more = Recipe {
        zero: 2,
        micro: Some(5),
        ..recipe.clone()
    };
    everywhere_the_same_bits("stopped", &recipe);
    everywhere_the_same_bits("stopped, ZeRO-2", &more);
}

/// A weight that several parts use: its values come to all of them, and its gradient is summed in
/// the order of the whole.
#[test]
fn split_models_with_a_tied_weight_train_to_the_same_bits() {
    let plain = Recipe::regression().tied();
    everywhere_the_same_bits("tied", &plain);
    let all = Recipe {
        activation: Activation::Gelu,
        dropout: 0.25,
        clip_norm: 0.25,
        micro: Some(5),
        rule: Rule::muon(),
        ..Recipe::classification().tied()
    };
    everywhere_the_same_bits("tied: gelu, dropout, clipping, micro-batches, Muon", &all);
    let shared = Recipe {
        zero: 1,
        micro: Some(5),
        ..plain.clone()
    };
    everywhere_the_same_bits("tied, shared moments", &shared);
    let divided = Recipe {
        zero: 2,
        ..shared.clone()
    };
    everywhere_the_same_bits("tied, divided gradients", &divided);
    let few = Recipe {
        batch: 2,
        ..shared.clone()
    };
    everywhere_the_same_bits("tied, ranks without rows", &few);
    for frozen in ["2.weight", "0.,4."] {
        let recipe = Recipe {
            frozen,
            ..shared.clone()
        };
        everywhere_the_same_bits(&format!("tied, frozen {frozen}"), &recipe);
    }
}

#[test]
fn split_models_with_frozen_layers_train_to_the_same_bits() {
    let recipe = Recipe {
        clip_norm: 0.25,
        micro: Some(5),
        rule: Rule::sgd(0.9),
        ..Recipe::regression()
    };
    // The first part for any cut; the last; one between.
    for frozen in ["0.", "0.,2.", "6.", "2."] {
        everywhere_the_same_bits(
            frozen,
            &Recipe {
                frozen,
                ..recipe.clone()
            },
        );
    }
    everywhere_the_same_bits(
        "frozen, shared moments",
        &Recipe {
            frozen: "0.,2.",
            zero: 1,
            ..recipe
        },
    );
}

#[test]
fn split_models_reduce_to_the_same_bits() {
    let narrow = Recipe {
        reduce_dtype: DType::BF16,
        clip_norm: 0.25,
        ..Recipe::regression()
    };
    everywhere_the_same_bits("gradients that travel in bf16", &narrow);
    everywhere_the_same_bits(
        "shared moments",
        &Recipe {
            zero: 1,
            rule: Rule::muon(),
            reduce_dtype: DType::F32,
            ..narrow
        },
    );
    // Two rows and up to three ranks.
    everywhere_the_same_bits(
        "ranks without rows",
        &Recipe {
            batch: 2,
            clip_norm: 0.25,
            ..Recipe::regression()
        },
    );
}
