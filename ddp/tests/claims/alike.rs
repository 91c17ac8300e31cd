//! What ranks must have in common when a user's own program trains: models begin with the values of
//! rank 0, different shapes or data end all ranks, and buffers are those of rank 0.

use std::sync::Arc;

use crate::support::random::whole;
use crate::support::training::{self, Rows, Way, check_copies, on_ranks, try_on_ranks, worlds};
use crate::{turn, ways};
use ddp::Result;
use ddp::config::{GraphChoice, Precision};
use ddp::data::{Dataset, InMemory, InOrder, Loader, Sampler, Source, TaskSpec};
use ddp::models::Model;
use ddp::nn::{self, CustomOp, Init, Linear, Module, Mse, Scope, Sequential, Var};
use ddp::optim::{Optimizer, Rule};
use ddp::step::{Step, StepOptions};
use ddp_comm::World;
use ddp_kernels::{Device, Tensor, ops};

/// A rank that trains `layers` on rows of one number.
struct Rank<'a> {
    world: &'a World,
    device: Device,
    step: Step,
}

impl<'a> Rank<'a> {
    fn new(world: &'a World, way: Way, layers: Sequential, seed: u64) -> Result<Rank<'a>> {
        let (device, precision, graph) = match way {
            Way::Cpu => (Device::Cpu, Precision::F32, GraphChoice::Auto),
            Way::Gpus(graph) => (Device::Cuda(world.rank()), Precision::Bf16, graph),
        };
        let model = Model::new(Box::new(layers), &[1], precision, device, seed, &|_| false)?;
        let optimizer = Optimizer::new(Rule::adamw(), &model.params)?;
        let group = match way {
            Way::Cpu => world.group("gradients")?,
            Way::Gpus(_) => world.gpu_group("gradients", device)?,
        };
        let options = StepOptions {
            graph,
            ..StepOptions::default()
        };
        let step = Step::new(model, Box::new(Mse), optimizer, group, &options)?;
        Ok(Rank {
            world,
            device,
            step,
        })
    }

    fn source(&self, data: Arc<dyn Dataset>) -> Source {
        Source::new(data, [self.device; 2])
    }

    fn loader(&self, data: Arc<dyn Dataset>) -> Result<Loader> {
        let sampler = Sampler::new(data.rows(), 12, 7, false)?;
        let (rank, size) = (self.world.rank(), self.world.size());
        Ok(Loader::new(self.source(data), sampler, rank, size, None)?)
    }
}

fn rows() -> Arc<dyn Dataset> {
    Arc::new(Rows::new(48, 1, TaskSpec::Regression { outputs: 1 }, whole))
}

fn perceptron(hidden: usize) -> Sequential {
    let layers = Sequential::new().then(Linear::new(hidden));
    layers.then(Linear::new(1))
}

#[test]
fn ranks_with_other_seeds_train_the_model_of_rank_0() {
    let Some(_turn) = turn() else { return };
    for (way, size) in worlds(&ways(), |way| 2..=way.ranks_max()) {
        let trained = |seed_of: fn(usize) -> u64| {
            on_ranks(size, Some(3), |world| {
                let seed = seed_of(world.rank());
                let mut rank = Rank::new(world, way, perceptron(9), seed)?;
                let params =
                    |rank: &Rank<'_>| training::bits(&rank.step.stages()[0].model().params);
                let first = params(&rank)?;
                check_copies(&rank.step.stages()[0].model().params)?;
                let mut loader = rank.loader(rows())?;
                for step0 in 0..3 {
                    rank.step.run(loader.load(step0)?, 0.125)?;
                }
                Ok((first, params(&rank)?))
            })
        };
        let alike = trained(|_| 5);
        assert_eq!(
            trained(|rank| 5 + rank as u64),
            alike,
            "{size} ranks, {way:?}"
        );
        assert!(
            alike.iter().all(|rank| *rank == alike[0]),
            "{size} ranks, {way:?}"
        );
        assert_ne!(trained(|_| 6), alike);
    }
}

#[test]
fn models_of_other_shapes_end_all_ranks_with_the_first_parameter_s_name() {
    let Some(_turn) = turn() else { return };
    for (way, size) in worlds(&ways(), |way| 2..=way.ranks_max()) {
        let errors = try_on_ranks(size, Some(3), |world| {
            let hidden = if world.rank() == 1 { 10 } else { 9 };
            Rank::new(world, way, perceptron(hidden), 5).map(drop)
        });
        for error in errors.into_iter().map(|result| result.unwrap_err()) {
            let text = error.to_string();
            assert_eq!(error.exit_code(), 78, "{text}");
            assert!(
                text.contains("the parameters' names and shapes: rank 1 has 0.weight")
                    && text.contains("[10, 1]")
                    && text.contains("rank 0 has 0.weight"),
                "{text}"
            );
        }
    }
}

#[test]
fn a_step_keeps_no_data_set_whose_loader_is_gone() {
    on_ranks(2, Some(3), |world| {
        let mut rank = Rank::new(world, Way::Cpu, perceptron(9), 5)?;
        let data = rows();
        let mut loader = rank.loader(data.clone())?;
        rank.step.run(loader.load(0)?, 0.1)?;
        drop(loader);
        assert_eq!(Arc::strong_count(&data), 1);
        Ok(())
    });
}

/// 48 numbers, of which one differs on rank 1.
fn numbers(other: bool, count: usize) -> Result<Arc<dyn Dataset>> {
    let mut x: Vec<f32> = (0..count).map(|x| x as f32 / 48.0).collect();
    if other {
        x[40] += 0.5;
    }
    let x = Tensor::from_slice(&x, &[count, 1], Device::Cpu)?;
    Ok(Arc::new(InMemory::new(
        x.clone(),
        x,
        TaskSpec::Regression { outputs: 1 },
    )?))
}

#[test]
fn other_data_on_one_rank_end_all_ranks_at_the_first_batch() {
    let Some(_turn) = turn() else { return };
    type Use = fn(&mut Rank<'_>, bool) -> Result<()>;
    let one_value: Use = |rank, is_other| {
        let mut loader = rank.loader(numbers(is_other, 48)?)?;
        rank.step.run(loader.load(0)?, 0.1)
    };
    let fewer_rows: Use = |rank, is_other| {
        let mut loader = rank.loader(numbers(false, if is_other { 47 } else { 48 })?)?;
        rank.step.run(loader.load(0)?, 0.1)
    };
    let held_out: Use = |rank, is_other| {
        let mut loader = rank.loader(numbers(false, 48)?)?;
        rank.step.run(loader.load(0)?, 0.1)?;
        let source = rank.source(numbers(is_other, 48)?);
        let (index, size) = (rank.world.rank(), rank.world.size());
        let mut held_out = InOrder::new(source, index, size, 5)?;
        let group = rank.world.group("evaluation")?;
        rank.step.evaluate(&mut held_out, &group).map(drop)
    };
    for (way, size) in worlds(&ways(), |way| 2..=way.ranks_max()) {
        for differs in [one_value, fewer_rows, held_out] {
            let results = try_on_ranks(size, Some(3), |world| {
                let mut rank = Rank::new(world, way, perceptron(9), 5)?;
                differs(&mut rank, world.rank() == 1)
            });
            for error in results.into_iter().map(|result| result.unwrap_err()) {
                let text = error.to_string();
                assert_eq!(error.exit_code(), 78, "{text}");
                let expected = "ranks disagree on the data: rank 1 has in memory: 4";
                assert!(
                    text.contains(expected) && text.contains("rank 0 has"),
                    "{text}"
                );
            }
        }
    }
}

/// Passes its input on, and in training adds it to a buffer.
#[derive(Clone, Debug, Default)]
struct Tally {
    adds: bool,
}

impl Module for Tally {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let total = m.buffer("total", &[1], Init::Constant(0.0));
        let adds = m.is_training();
        let sum = m.custom(Arc::new(SumOfBatch), &[x]);
        m.custom(Arc::new(Tally { adds }), &[x, &sum, &total])
    }
}

/// The sum of all elements of a batch, (1).
#[derive(Debug)]
struct SumOfBatch;

impl CustomOp for SumOfBatch {
    fn shape(&self, _: &[Vec<usize>]) -> nn::Result<Vec<usize>> {
        Ok(vec![1])
    }

    fn has_rows(&self) -> bool {
        false
    }

    fn forward(&self, x: &[&Tensor], out: &Tensor) -> nn::Result<()> {
        let row = x[0].reshape(&[1, x[0].count()])?;
        Ok(ops::row_sum_into(&out.reshape(&[1, 1])?, &row)?)
    }

    fn backward(&self, _: &[&Tensor], _: [&Tensor; 2], dx: &[&Tensor]) -> nn::Result<()> {
        Ok(ops::zero(dx[0])?)
    }
}

impl CustomOp for Tally {
    fn shape(&self, inputs: &[Vec<usize>]) -> nn::Result<Vec<usize>> {
        Ok(inputs[0].clone())
    }

    fn forward(&self, inputs: &[&Tensor], out: &Tensor) -> nn::Result<()> {
        let &[x, sum, total] = inputs else {
            panic!("three inputs")
        };
        if self.adds {
            ops::axpy(total, 1.0, &sum.reshape(&[1])?)?;
        }
        Ok(out.copy_from(x)?)
    }

    fn backward(&self, _: &[&Tensor], [_, dy]: [&Tensor; 2], of: &[&Tensor]) -> nn::Result<()> {
        of[1..]
            .iter()
            .try_for_each(|gradient| ops::zero(gradient))?;
        Ok(of[0].copy_from(dy)?)
    }
}

#[test]
fn every_step_and_evaluation_begins_with_the_buffers_of_rank_0() {
    let Some(_turn) = turn() else { return };
    for (way, size) in worlds(&ways(), |way| 1..=way.ranks_max()) {
        let ranks = on_ranks(size, Some(3), |world| {
            let layers = Sequential::new().then(Tally::default());
            let mut rank = Rank::new(world, way, layers.then(Linear::new(1)), 5)?;
            let mut loader = rank.loader(rows())?;
            let total = |rank: &Rank<'_>| -> Result<f64> {
                let params = &rank.step.stages()[0].model().params;
                Ok(params.master(params.find("0.total")?.id).index(0)?.item()?)
            };
            let mut sums = Vec::new();
            // Enough for a captured step to be launched.
            for step0 in 0..8 {
                let batch = loader.load(step0)?;
                sums.push(
                    batch
                        .x
                        .to_vec::<f32>()?
                        .iter()
                        .map(|&x| f64::from(x))
                        .sum::<f64>(),
                );
                rank.step.run(batch, 0.0)?;
            }
            let own = total(&rank)?;
            rank.step.gather()?;
            Ok((sums, own, total(&rank)?))
        });
        let (first_sums, _, _) = ranks[0].clone();
        let before_the_last: f64 = first_sums[..7].iter().sum();
        for (rank, (sums, own, gathered)) in ranks.into_iter().enumerate() {
            assert_eq!(
                own,
                before_the_last + sums[7],
                "rank {rank} of {size}, {way:?}"
            );
            assert_eq!(
                gathered,
                before_the_last + first_sums[7],
                "rank {rank} of {size}, {way:?}"
            );
            assert!(
                rank == 0 || sums != first_sums,
                "the ranks have rows of their own"
            );
        }
    }
}
