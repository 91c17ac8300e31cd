//! A captured step is the eager step, to the bit.

use std::sync::Arc;

use ddp::config::GraphChoice;
use ddp::models::Model;
use ddp::nn::{CustomOp, Linear, Module, Mse, Scope, Sequential, Var};
use ddp::optim::{Optimizer, Rule};
use ddp::step::{Step, StepOptions};
use ddp::{Error, Result};
use ddp_comm::Group;
use ddp_kernels::ops::{self, Activation};
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Tensor};

use crate::{Setup, Training, gpu};

const STEPS: u64 = 24;

/// Epochs of three batches of 16 rows and one of 2.
fn setup() -> Setup {
    Setup::new("glyphs,rows=50,held-out=0")
}

/// The rate changes from step to step, and the norm is measured now and then.
fn take(training: &mut Training, step0: u64) -> Result<()> {
    training.take(step0, 0.01 / (step0 + 1) as f64, step0.is_multiple_of(3))
}

/// The bits after each step, or only after the last.
pub(crate) fn run(
    setup: &Setup,
    device: Device,
    graph: GraphChoice,
    looks: bool,
) -> (Vec<Vec<u32>>, Option<usize>) {
    let mut training = setup.start(device, graph).unwrap();
    let mut seen = Vec::new();
    for step0 in 0..STEPS {
        take(&mut training, step0).unwrap();
        if looks || step0 + 1 == STEPS {
            seen.push(training.bits().unwrap());
        }
    }
    let report = training.step.report().unwrap();
    assert!(
        report.stats.loss().is_finite() && report.bad_step.is_none(),
        "{report:?}"
    );
    (seen, training.step.graphs())
}

#[test]
fn every_step_has_the_same_bits_captured_and_eager_short_batches_too() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let all = Setup {
        activation: Activation::Gelu,
        dropout: 0.25,
        clip_norm: 0.5,
        micro: Some(5),
        reduce_dtype: DType::BF16,
        ..setup()
    };
    let tanh = Setup {
        activation: Activation::GeluTanh,
        rule: Rule::muon(),
        hidden: vec![9, 8],
        ..setup()
    };
    // Seventeen micro-batches and more: their positions take more than 256 bytes.
    let many = Setup {
        batch: 20,
        micro: Some(1),
        hidden: vec![],
        ..setup()
    };
    for (index, setup) in [setup(), all, tanh, many].iter().enumerate() {
        let (eager, none) = run(setup, device, GraphChoice::Off, true);
        assert_eq!(none, None);
        // A look between steps waits for the device.
        for looks in [true, false].into_iter().skip(usize::from(index != 1)) {
            let (captured, graphs) = run(setup, device, GraphChoice::On, looks);
            // Two slots, with and without the norm.
            assert_eq!(graphs, Some(4), "case {index}");
            let expected = &eager[eager.len() - captured.len()..];
            for (step, (captured, eager)) in captured.iter().zip(expected).enumerate() {
                assert!(
                    captured == eager,
                    "case {index}, looks {looks}: step {step} of {}",
                    expected.len()
                );
            }
        }
    }
}

#[test]
fn batches_of_another_loader_are_never_taken_for_those_of_the_first() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let bits = |graph| {
        let mut training = setup().start(device, graph).unwrap();
        let mut other = Setup {
            batch: 16,
            ..Setup::new("glyphs,rows=48,held-out=0,seed=1")
        }
        .start(device, graph)
        .unwrap();
        for round in 0..6 {
            take(&mut training, 2 * round).unwrap();
            // The same sizes in other memory.
            training
                .step
                .run(other.loader.load(round).unwrap(), 0.01)
                .unwrap();
        }
        training.bits().unwrap()
    };
    assert!(bits(GraphChoice::On) == bits(GraphChoice::Off));
}

#[test]
fn a_step_with_more_micro_batches_is_captured_again() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let bits = |graph| {
        let few = Setup {
            micro: Some(16),
            ..setup()
        };
        let mut training = few.start(device, graph).unwrap();
        let mut many = Setup {
            micro: Some(2),
            ..setup()
        }
        .start(device, graph)
        .unwrap();
        (0..6).for_each(|step0| take(&mut training, step0).unwrap());
        for step0 in 6..12 {
            training
                .step
                .run(many.loader.load(step0).unwrap(), 0.01)
                .unwrap();
        }
        (12..18).for_each(|step0| take(&mut training, step0).unwrap());
        training.bits().unwrap()
    };
    assert!(bits(GraphChoice::On) == bits(GraphChoice::Off));
}

#[test]
fn two_trainings_side_by_side_on_streams_of_their_own_do_not_disturb_each_other() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let seeds = [0.25, 0.5];
    let train = |dropout| {
        let setup = Setup { dropout, ..setup() };
        Stream::new(device)
            .unwrap()
            .scope(|| run(&setup, device, GraphChoice::On, false).0)
    };
    let alone = seeds.map(train);
    let together = std::thread::scope(|scope| {
        seeds
            .map(|dropout| scope.spawn(move || train(dropout)))
            .map(|thread| thread.join().expect("it trains"))
    });
    assert!(together == alone && alone[0] != alone[1]);
}

/// ReLU, with a new tensor for its output each time: a graph cannot do that.
#[derive(Debug)]
struct Wasteful;

impl Module for Wasteful {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        m.custom(Arc::new(Wasteful), &[x])
    }
}

impl CustomOp for Wasteful {
    fn shape(&self, inputs: &[Vec<usize>]) -> ddp::nn::Result<Vec<usize>> {
        Ok(inputs[0].clone())
    }
    fn forward(&self, x: &[&Tensor], out: &Tensor) -> ddp::nn::Result<()> {
        Ok(out.copy_from(&ops::activate(x[0], Activation::Relu)?)?)
    }
    fn backward(
        &self,
        _: &[&Tensor],
        [y, dy]: [&Tensor; 2],
        dx: &[&Tensor],
    ) -> ddp::nn::Result<()> {
        Ok(ops::activate_backward_into(dx[0], dy, y, Activation::Relu)?)
    }
}

/// The last bits of a training with a layer that cannot be captured, or why it ended.
fn wasteful(device: Device, graph: GraphChoice) -> Result<Vec<u32>> {
    let setup = Setup::new("synthetic:regression,rows=50,held-out=0,features=8,outputs=2");
    let layers = Sequential::new()
        .then(Linear::new(6))
        .then(Wasteful)
        .then(Linear::new(2));
    let model = Model::new(Box::new(layers), &[8], DType::F32, device, 3, &|_| false)?;
    let optimizer = Optimizer::new(Rule::adamw(), &model.params)?;
    let options = StepOptions {
        graph,
        ..StepOptions::default()
    };
    let step = Step::new(model, Box::new(Mse), optimizer, Group::alone(), &options)?;
    let mut training = Training {
        step,
        ..setup.start(device, GraphChoice::Off)?
    };
    (0..8).try_for_each(|step0| take(&mut training, step0))?;
    assert_eq!(training.step.graphs(), None, "it was given up");
    training.bits()
}

#[test]
fn what_cannot_be_captured_runs_eagerly_unless_captures_are_asked_for() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let eager = wasteful(device, GraphChoice::Off).unwrap();
    assert!(wasteful(device, GraphChoice::Auto).unwrap() == eager);
    let error = wasteful(device, GraphChoice::On).unwrap_err();
    assert!(
        matches!(error, Error::Tensor(ddp_kernels::Error::Capture { .. })),
        "{error}"
    );
    assert!(error.to_string().contains("cannot allocate"), "{error}");
}

#[test]
fn graphs_are_refused_on_the_cpu() {
    let error = setup()
        .start(Device::Cpu, GraphChoice::On)
        .err()
        .expect("refused");
    assert_eq!(error.exit_code(), 2);
    assert_eq!(
        setup()
            .start(Device::Cpu, GraphChoice::Auto)
            .unwrap()
            .step
            .graphs(),
        None
    );
}
