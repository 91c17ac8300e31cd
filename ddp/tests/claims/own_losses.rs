//! Losses by their formula train the same on any number of ranks, with micro-batches and shards,
//! and on GPUs captured as eager.

use std::sync::Arc;

use crate::support::pass::in_pass;
use crate::support::random::{mixed, uniform};
use crate::support::training::{self, Way, cpu, on_ranks, worlds};
use crate::{turn, ways};
use ddp::Result;
use ddp::config::{GraphChoice, Precision};
use ddp::data::{InMemory, Loader, TaskSpec};
use ddp::models::Model;
use ddp::nn::{CrossEntropy, Init, Linear, Loss, LossFormula, Module, Pass};
use ddp::nn::{Scope, Sequential, Var};
use ddp::optim::AdamW;
use ddp::reducer::ReducerOptions;
use ddp::step::Step;
use ddp_comm::World;
use ddp_kernels::{DType, Device, Seed, Tensor};

/// As `torch.nn.HuberLoss`.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Huber {
    pub(crate) delta: f64,
}

impl LossFormula for Huber {
    fn losses(&self, _m: &mut Scope<'_>, output: &Var, target: &Var) -> Var {
        let error = (output - target).abs();
        let near = error.minimum(&error.number(self.delta));
        (&near * (error - &near * 0.5)).mean(-1)
    }
}

/// The focal loss of class indices. Rows of class `ignored` do not count, those of class 0 half.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Focal {
    pub(crate) gamma: f64,
    pub(crate) ignored: f64,
}

impl LossFormula for Focal {
    fn losses(&self, m: &mut Scope<'_>, output: &Var, target: &Var) -> Var {
        let chosen = target.equal(&m.indices(output.size(-1)));
        let log_p = (chosen * output.log_softmax(-1)).sum(-1);
        -(1.0 - log_p.exp()).pow(self.gamma) * log_p
    }

    fn weights(&self, _m: &mut Scope<'_>, _output: &Var, target: &Var) -> Option<Var> {
        let halved = target.equal(&target.number(0.0)) * 0.5;
        Some(1.0 - halved - target.equal(&target.number(self.ignored)))
    }
}

/// The kinds of losses here: numbers, class indices and probabilities as targets.
pub(crate) fn losses() -> [Arc<dyn Loss>; 3] {
    [
        Arc::new(Huber { delta: 0.3 }),
        Arc::new(Focal {
            gamma: 2.0,
            ignored: 2.0,
        }),
        Arc::new(CrossEntropy {
            label_smoothing: 0.1,
            ..CrossEntropy::default()
        }),
    ]
}

/// Shares the loss that a step takes by value.
#[derive(Debug)]
struct Shared(Arc<dyn Loss>);

impl Loss for Shared {
    fn compute(
        &self,
        pass: &mut Pass<'_>,
        of: [&Tensor; 3],
        gradient: Option<&Tensor>,
    ) -> ddp::nn::Result<Tensor> {
        self.0.compute(pass, of, gradient)
    }

    fn gradient(&self, pass: &mut Pass<'_>, of: [&Tensor; 3]) -> ddp::nn::Result<Tensor> {
        self.0.gradient(pass, of)
    }
}

const CLASSES: usize = 3;

fn numbers(stream: u64, shape: &[usize]) -> Tensor {
    let count = shape.iter().product::<usize>() as u64;
    let values: Vec<f32> = (0..count).map(|at| uniform(stream, at)).collect();
    cpu(&values, shape)
}

/// Targets of this loss in host memory.
fn targets(loss: usize, rows: usize) -> Tensor {
    let each = 0..rows as u64;
    match loss {
        0 => numbers(2, &[rows, CLASSES]),
        1 => {
            let classes: Vec<i64> = each.map(|row| (mixed(2, row) % 3) as i64).collect();
            Tensor::from_slice(&classes, &[rows], Device::Cpu).unwrap()
        }
        _ => {
            let row = |row| {
                let drawn = (0..3).map(|at| uniform(2, 3 * row + at).abs());
                let drawn: Vec<f32> = drawn.collect();
                let sum: f32 = drawn.iter().sum();
                drawn.into_iter().map(move |it| it / sum)
            };
            cpu(&each.flat_map(row).collect::<Vec<f32>>(), &[rows, CLASSES])
        }
    }
}

/// A gated block.
#[derive(Debug)]
struct Gated;

impl Module for Gated {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let hidden = m.linear("up", x, 8).tanh();
        let temperature = m.parameter("temperature", &[1], Init::Constant(1.0));
        let gate = (m.linear("gate", x, 8) / temperature).softmax(-1);
        x + m.linear("down", &(hidden * gate), x.size(-1))
    }
}

const ROWS: usize = 26;
const FEATURES: usize = 5;

/// Trains for some steps, the last of an epoch on fewer rows than there are shards. The bits of the
/// weights, then of the losses, accuracies and of an evaluation.
fn trained(world: &World, way: Way, loss: usize, precision: Precision) -> Result<Vec<u64>> {
    let (device, graph) = match way {
        Way::Cpu => (Device::Cpu, GraphChoice::Auto),
        Way::Gpus(graph) => (Device::Cuda(world.rank()), graph),
    };
    let layers = Sequential::new().then(Gated).then(Linear::new(CLASSES));
    let model = Model::new(Box::new(layers), &[FEATURES], precision, device, 1, &|_| {
        false
    })?;
    let data = || {
        let task = match loss {
            1 => TaskSpec::numbered_classes(CLASSES),
            _ => TaskSpec::Regression { outputs: CLASSES },
        };
        let x = numbers(1, &[ROWS, FEATURES]);
        InMemory::new(x, targets(loss, ROWS), task)
    };
    let reducer = ReducerOptions {
        shards: Some(4),
        ..ReducerOptions::default()
    };
    let mut step = Step::builder(model, Shared(losses()[loss].clone()), AdamW::default())
        .graph(graph)
        .reducer(reducer)
        .build(world)?;
    let loader = Loader::builder(data()?).device(device).shards(4);
    let mut loader = loader
        .batch_size(12)
        .micro_batch(2)
        .shuffle(Seed(1))
        .build(world)?;
    let (mut first, mut bits) = (None, Vec::new());
    for step0 in 0..12 {
        step.run(loader.load(step0)?, 0.03)?;
        let stats = step.report()?.stats;
        first.get_or_insert(stats.loss());
        bits.extend([stats.loss(), stats.weight_sum, stats.correct, stats.rows].map(f64::to_bits));
    }
    let held_out = Loader::builder(data()?).device(device).shards(4);
    let mut held_out = held_out.batch_size(7).build_in_order(world)?;
    let stats = step.evaluate(&mut held_out, &world.group("evaluation")?)?;
    assert!(
        stats.loss() < 0.95 * first.unwrap_or(0.0),
        "{loss}: {stats:?} after {first:?}"
    );
    bits.extend([stats.loss(), stats.correct, stats.rows].map(f64::to_bits));
    let weights = training::bits(&step.stages()[0].model().params)?;
    bits.extend(weights.into_iter().map(u64::from));
    Ok(bits)
}

#[test]
fn losses_by_formula_train_the_same_on_any_number_of_ranks() {
    let Some(_turn) = turn() else { return };
    let of_precision = |precision| (0..losses().len()).map(move |loss| (precision, loss));
    let mut cases: Vec<_> = [Precision::F32, Precision::Bf16]
        .into_iter()
        .flat_map(of_precision)
        .collect();
    if !ways().contains(&Way::Cpu) {
        cases = ddp_testing::cases_of("losses by formula", cases, 2);
    }
    for (precision, loss) in cases {
        let of = |way, size| on_ranks(size, Some(3), |world| trained(world, way, loss, precision));
        let one = of(ways()[0], 1).remove(0);
        for (way, size) in worlds(&ways(), |way| 1..=way.ranks_max().min(2)) {
            for (rank, other) in of(way, size).into_iter().enumerate() {
                let what = format!("loss {loss} in {precision:?}, rank {rank} of {size}, {way:?}");
                assert!(other == one, "{what}");
            }
        }
    }
}

/// The losses, the gradient and the statistics of random outputs, which are rounded to bf16.
pub(crate) fn computed(loss: usize, rows: usize, dtype: DType, device: Device) -> [Tensor; 3] {
    let model = Sequential::new().then(Linear::new(1));
    let model = Model::new(Box::new(model), &[1], dtype, device, 1, &|_| false).unwrap();
    let output = numbers(3, &[rows, CLASSES]).to_dtype(DType::BF16).unwrap();
    let output = output.to_dtype(dtype).unwrap();
    let (output, targets) = (
        output.to(device).unwrap(),
        targets(loss, rows).to(device).unwrap(),
    );
    let stats = Tensor::zeros(&[4], DType::F32, device).unwrap();
    let gradient = output.empty_like().unwrap();
    let of = [&output, &targets, &stats];
    let all = in_pass(&model, true, |mut pass| {
        losses()[loss].compute(&mut pass, of, Some(&gradient))
    });
    [all.unwrap(), gradient, stats]
}
