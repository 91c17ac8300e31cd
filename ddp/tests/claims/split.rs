//! What a step over several devices promises. The including file says on which devices the parts
//! may be (`places`); `turn` is held while a test runs.

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

use super::places;
use crate::support::random::uniform;
use crate::support::training::{Rows, on_ranks, state};
use crate::turn;

/// Where the parts of each rank lie.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    pub(crate) ranks: usize,
    /// By rank.
    pub(crate) devices: Vec<Vec<Device>>,
}

/// One way of training.
#[derive(Clone)]
pub(crate) struct Recipe {
    pub(crate) data: Arc<Rows>,
    pub(crate) hidden: Vec<usize>,
    pub(crate) activation: Activation,
    pub(crate) dropout: f64,
    pub(crate) batch: u64,
    pub(crate) micro: Option<usize>,
    pub(crate) rule: Rule,
    pub(crate) clip_norm: f64,
    pub(crate) frozen: &'static str,
    pub(crate) reduce_dtype: DType,
    pub(crate) zero: bool,
    /// Whether layers "2", "4" and "6" are tied, of 40 inputs and outputs each.
    pub(crate) tied: bool,
    /// Whether all layers are in one module.
    pub(crate) own: bool,
    /// Of values and gradients.
    pub(crate) dtype: DType,
    /// Into how many shards batches are cut.
    pub(crate) shards: Option<usize>,
}

const GROUPS: [&str; 4] = ["part 0", "part 1", "part 2", "part 3"];
const STEPS: u64 = 12;
const RATE: f64 = 0.01;
pub(crate) const FEATURES: usize = 6;
pub(crate) const OUTPUTS: usize = 4;

/// Four layers, past two of which their input goes.
#[derive(Debug)]
struct OwnModule {
    dropout: f64,
}

impl Module for OwnModule {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let mut x = m.layer("0", x, Linear::new(40));
        for name in ["2", "4"] {
            let inner = m.layer(name, &x, Linear::new(40)).gelu();
            x = x + m.layer(&format!("{name}.drop"), &inner, Dropout::new(self.dropout));
        }
        m.layer("6", &x, Linear::new(OUTPUTS))
    }
}

impl Recipe {
    /// Four layers on rows of numbers; whole batches, but for the last of an epoch.
    pub(crate) fn new(task: TaskSpec) -> Recipe {
        Recipe {
            data: Arc::new(Rows::new(40, FEATURES, task, uniform)),
            hidden: vec![40, 40, 24],
            activation: Activation::Relu,
            dropout: 0.0,
            batch: 12,
            micro: None,
            rule: Rule::adamw(),
            clip_norm: 0.0,
            frozen: "nothing",
            reduce_dtype: DType::F32,
            zero: false,
            tied: false,
            own: false,
            dtype: DType::F32,
            shards: None,
        }
    }

    /// The same with a weight that three layers share, the first of which is "2".
    pub(crate) fn tied(self) -> Recipe {
        Recipe { tied: true, ..self }
    }

    fn layers(&self) -> Sequential {
        if self.own {
            let dropout = self.dropout;
            return Sequential::new().then(OwnModule { dropout });
        }
        let (hidden, activation) = (self.hidden.clone(), self.activation);
        if !self.tied {
            let (outputs, dropout) = (OUTPUTS, self.dropout);
            return Mlp {
                hidden,
                outputs,
                activation,
                dropout,
            }
            .layers();
        }
        let tie = Tie::new();
        let mut layers = Sequential::new().then(Linear::new(40));
        for tied in 0..3 {
            layers = layers.then(Activate::new(activation));
            if self.dropout > 0.0 {
                layers.push_unnumbered(Box::new(Dropout::new(self.dropout)));
            }
            let linear = Linear::new(40).tied(&tie);
            // A later layer says that its weight is a hidden matrix, for Muon.
            layers = layers.then(if tied == 0 { linear.outer() } else { linear });
        }
        layers
            .then(Activate::new(activation))
            .then(Linear::new(OUTPUTS).outer())
    }

    pub(crate) fn regression() -> Recipe {
        Recipe::new(TaskSpec::Regression { outputs: OUTPUTS })
    }

    fn classification() -> Recipe {
        Recipe::new(TaskSpec::numbered_classes(OUTPUTS))
    }

    /// The step of a rank over these devices.
    pub(crate) fn step(&self, devices: &[Device], world: &World) -> Result<Step> {
        self.step_with(devices, world, GraphChoice::Auto)
    }

    pub(crate) fn step_with(
        &self,
        devices: &[Device],
        world: &World,
        graph: GraphChoice,
    ) -> Result<Step> {
        let group = |index: usize| -> Result<Group> {
            match devices[index] {
                // A world has a limited number of groups, and a test makes steps.
                _ if world.size() == 1 => Ok(Group::alone()),
                Device::Cpu => Ok(world.group(GROUPS[index])?),
                device => Ok(world.gpu_group(GROUPS[index], device)?),
            }
        };
        let groups = (0..devices.len()).map(group).collect::<Result<Vec<_>>>()?;
        let sizes = BucketSizes {
            first_elements: 1024,
            elements: 1024,
            cuts_parameters: true,
        };
        let reducer = ReducerOptions {
            sizes: Some(sizes),
            dtype: self.reduce_dtype,
            overlap: true,
            zero: u64::from(self.zero),
            shards: self.shards,
            ..ReducerOptions::default()
        };
        let shares = reducer.shares(world.size());
        let frozen = |name: &str| self.frozen.split(',').any(|layer| name.starts_with(layer));
        let models = Model::split(
            self.layers(),
            &[FEATURES],
            devices,
            |layers, shape, device| {
                Model::with_shares(layers, shape, self.dtype, device, 3, &frozen, shares)
            },
        )?;
        let part = |(model, group): (Model, Group)| -> Result<StageSpec> {
            let optimizer = Optimizer::of_slices(
                self.rule,
                &model.params,
                &ddp::reducer::owned(&model.params, &group, reducer),
            )?;
            Ok(StageSpec {
                model,
                optimizer,
                group,
            })
        };
        let parts = models
            .into_iter()
            .zip(groups)
            .map(part)
            .collect::<Result<Vec<_>>>()?;
        let loss = tasks::of(self.data.task()).loss(&LossOptions::default(), Device::Cpu)?;
        let options = StepOptions {
            reducer,
            clip_norm: self.clip_norm,
            seed: 5,
            graph,
        };
        Step::over(parts, loss, &options)
    }

    pub(crate) fn loader(&self, devices: &[Device], world: &World) -> Result<Loader> {
        let sampler = Sampler::new(self.data.rows(), self.batch, 7, false)?;
        let (source, shards) = (self.source(devices), self.shards_of(world));
        Ok(Loader::in_shards(source, sampler, shards, self.micro)?)
    }

    fn shards_of(&self, world: &World) -> Shards {
        let (rank, size) = (world.rank(), world.size());
        Shards::of_rank(self.shards.unwrap_or(size), rank, size)
    }

    fn source(&self, devices: &[Device]) -> Source {
        Source::new(self.data.clone(), [devices[0], devices[devices.len() - 1]])
    }

    fn train(&self, devices: &[Device], world: &World) -> Result<Seen> {
        let mut step = self.step(devices, world)?;
        let mut loader = self.loader(devices, world)?;
        let mut reports = Vec::new();
        for step0 in 0..STEPS {
            step.measure_norm(step0 % 3 == 0);
            step.run(loader.load(step0)?, RATE)?;
            reports.push(step.report()?);
        }
        step.measure_norm(false);
        step.gather()?;
        let row_losses = step.losses_of(&loader.load(STEPS)?.clone())?;
        step.run(loader.load(STEPS)?, RATE)?;
        let mut in_order = InOrder::in_shards(self.source(devices), self.shards_of(world), 9)?;
        // Evaluation runs on a new stream: the sum over ranks must wait for it.
        let last = devices[devices.len() - 1];
        let group = match last {
            Device::Cpu => world.group("main")?,
            _ => world.gpu_group("evaluation", last)?,
        };
        let stream = Stream::new(last)?;
        let evaluation = stream.scope(|| step.evaluate(&mut in_order, &group))?;
        let again = stream.scope(|| step.evaluate(&mut in_order, &group))?;
        assert_eq!(again, evaluation, "a second evaluation");
        if self.shards.is_some() {
            let hosts = world.group("evaluation on the host")?;
            let there = stream.scope(|| step.evaluate(&mut in_order, &hosts))?;
            assert_eq!(there, evaluation, "added on the host");
        }
        assert_eq!(
            evaluation.rows,
            self.data.rows() as f64,
            "rows of all ranks"
        );
        Ok(Seen {
            values: values(&step)?,
            moments: moments(&step)?,
            reports,
            evaluation,
            row_losses,
        })
    }
}

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
        zero: true,
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

/// A weight that several parts use: its values come to all of them, and its gradient is summed in
/// the order of the whole.
#[test]
fn a_module_split_within_trains_to_the_same_bits() {
    let recipe = Recipe {
        own: true,
        dropout: 0.25,
        frozen: "0.2",
        ..Recipe::classification()
    };
    let more = Recipe {
        zero: true,
        micro: Some(4),
        ..recipe.clone()
    };
    everywhere_the_same_bits("own module", &recipe);
    everywhere_the_same_bits("own module, ZeRO", &more);
}

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
        zero: true,
        micro: Some(5),
        ..plain.clone()
    };
    everywhere_the_same_bits("tied, shared moments", &shared);
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
            zero: true,
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
            zero: true,
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

#[test]
fn split_models_are_saved_as_the_file_of_the_whole_and_loaded_from_it() {
    let Some(_turn) = turn() else { return };
    let plain = Recipe {
        dropout: 0.25,
        frozen: "3.",
        ..Recipe::regression()
    };
    let alone = places().into_iter().filter(|place| place.ranks == 1);
    let cases = alone.flat_map(|place| {
        [plain.clone(), plain.clone().tied()].map(|recipe| (place.clone(), recipe))
    });
    for (place, recipe) in cases {
        let devices = &place.devices[0];
        let folder = std::env::temp_dir().join(format!(
            "ddp-split-{}-{}",
            std::process::id(),
            devices.len()
        ));
        on_ranks(1, None, |world| {
            let file = |devices: &[Device], name: &str| -> Result<(Step, PathBuf)> {
                let mut step = recipe.step(devices, world)?;
                step.run(recipe.loader(devices, world)?.load(0)?, RATE)?;
                let path = folder.join(name);
                checkpoint::write_model(&path, &params(&step))?;
                Ok((step, path))
            };
            std::fs::create_dir(&folder).unwrap();
            let ((split, in_parts), (_, in_one)) =
                (file(devices, "split")?, file(&devices[..1], "whole")?);
            assert!(
                std::fs::read(&in_parts).unwrap() == std::fs::read(&in_one).unwrap(),
                "{devices:?}"
            );
            let fresh = recipe.step(devices, world)?;
            checkpoint::load_model(&in_one, &params(&fresh))?;
            assert!(values(&fresh)? == values(&split)?, "{devices:?}");
            std::fs::remove_dir_all(&folder).unwrap();
            Ok(())
        });
    }
}

#[test]
fn split_and_whole_models_resume_each_others_checkpoints() {
    let Some(_turn) = turn() else { return };
    for (number, place) in places().into_iter().enumerate() {
        let cases = (0..8).map(|case| [1, 2, 4].map(|bit| case & bit > 0));
        for [zero, from_split, tied] in cases {
            if zero && place.ranks == 1 {
                continue;
            }
            let recipe = Recipe {
                zero,
                tied,
                frozen: if tied { "8." } else { "2." },
                clip_norm: 0.25,
                ..Recipe::regression()
            };
            let out =
                std::env::temp_dir().join(format!("ddp-split-run-{}-{number}", std::process::id()));
            let run = |split: bool, goes_on: bool| {
                on_ranks(place.ranks, Some(7), |world| {
                    let devices = &place.devices[world.rank()];
                    let devices = if split { &devices[..] } else { &devices[..1] };
                    let (mut step, mut loader) =
                        (recipe.step(devices, world)?, recipe.loader(devices, world)?);
                    let mut saver = checkpoint::Saver::new(world, &out, 1)?;
                    if goes_on {
                        let opened = checkpoint::newest(&out)?.0.expect("a checkpoint");
                        checkpoint::restore(&opened, &mut step)?;
                    }
                    for step0 in if goes_on { 4..8 } else { 0..8 } {
                        if step0 == 4 && !goes_on {
                            saver.save(&mut step, state(world.size(), &recipe.data, 4))?;
                        }
                        step.run(loader.load(step0)?, RATE)?;
                    }
                    saver.finish()?;
                    step.gather()?;
                    Ok((values(&step)?, moments(&step)?))
                })
            };
            let whole = run(from_split, false);
            let text = format!("{place:?}, ZeRO {zero}, from parts {from_split}, tied {tied}");
            assert!(run(!from_split, true) == whole, "{text}");
            assert!(run(from_split, true) == whole, "{text}, to the same");
            std::fs::remove_dir_all(&out).unwrap();
        }
    }
}

fn params(step: &Step) -> Vec<&Params> {
    step.stages()
        .iter()
        .map(|stage| &stage.model().params)
        .collect()
}

/// A batch made by hand, all rows this rank's.
fn batch(step0: u64, x: &[f32], targets: &[f32], devices: &[Device]) -> Result<Batch> {
    let rows = x.len() / FEATURES;
    let x = Tensor::from_slice(x, &[rows, FEATURES], devices[0])?;
    let targets = Tensor::from_slice(targets, &[rows, OUTPUTS], devices[devices.len() - 1])?;
    Ok(Batch::new(step0, 0, rows as u64, 0, x, targets, 2))
}

#[test]
fn a_bad_loss_leaves_all_parts_as_they_were_and_its_row_is_found() {
    let Some(_turn) = turn() else { return };
    let alone = places().into_iter().filter(|place| place.ranks == 1);
    let recipes = [Recipe::regression(), Recipe::regression().tied()];
    for (place, recipe) in alone.flat_map(|place| recipes.clone().map(|it| (place.clone(), it))) {
        let devices = &place.devices[0];
        let found = on_ranks(1, None, |world| {
            let mut step = recipe.step(devices, world)?;
            let mut x: Vec<f32> = (0..5 * FEATURES as u64).map(|at| uniform(1, at)).collect();
            let targets = [0.5; 5 * OUTPUTS];
            step.run(&batch(0, &x, &targets, devices)?, RATE)?;
            assert_eq!(step.report()?.bad_step, None);
            let before = (values(&step)?, moments(&step)?);
            x[3 * FEATURES] = f32::INFINITY;
            let bad = batch(1, &x, &targets, devices)?;
            step.run(&bad, RATE)?;
            x[3 * FEATURES] = 0.0;
            step.measure_norm(true);
            step.run(&batch(2, &x, &targets, devices)?, RATE)?;
            let report = step.report()?;
            assert_eq!(
                [report.bad_step, report.own_bad_step],
                [Some(2); 2],
                "{devices:?}"
            );
            assert!(
                (values(&step)?, moments(&step)?) == before,
                "{devices:?}: something changed"
            );
            step.losses_of(&bad)
        });
        let bad: Vec<usize> = (0..5).filter(|&row| !found[0][row].is_finite()).collect();
        assert_eq!(bad, [3], "{devices:?}: {found:?}");
    }
}

#[test]
fn a_gradient_that_overflows_on_the_first_device_stops_all_of_them() {
    let Some(_turn) = turn() else { return };
    for place in places().into_iter().filter(|place| place.ranks == 1) {
        let devices = &place.devices[0];
        on_ranks(1, None, |world| {
            let mut step = Recipe::regression().step(devices, world)?;
            let params = &step.stages()[0].model().params;
            let weight = params.value(params.find("0.weight")?.id);
            weight.copy_from(&weight.zeros_like()?)?;
            // The weight is zero, so the loss is finite, but its gradient is not; the norm is not
            // measured.
            let bad = batch(0, &[3e38; 4 * FEATURES], &[1e6; 4 * OUTPUTS], devices)?;
            let before = values(&step)?;
            step.run(&bad, RATE)?;
            let report = step.report()?;
            assert!(report.stats.loss().is_finite(), "{report:?}");
            assert_eq!(
                [report.bad_step, report.own_bad_step],
                [Some(1), None],
                "{devices:?}"
            );
            assert!(values(&step)? == before, "{devices:?}: something changed");
            Ok(())
        });
    }
}
