//! A step on a GPU computes what it computes on the CPU: to the bit where sums are exact, within a
//! derived bound elsewhere.

use ddp::config::{GraphChoice, Precision};
use ddp::data::{Batch, InOrder, Loader, Source};
use ddp::optim::{Method, Rule};
use ddp::step::Step;
use ddp_comm::Group;
use ddp_kernels::ops::{Activation, SgdConstants};
use ddp_kernels::{DType, Device, Tensor};

use crate::support::random::whole;
use crate::support::training::{Case, on_ranks};
use crate::{Setup, Training, bound, gpu};

/// The steps compared of each way of training.
const STEPS: u64 = 30;
const RATE: f64 = 0.01;

#[test]
fn where_sums_are_exact_the_gpu_has_the_bits_of_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let plain = Case::regression(48, whole);
    let momentum = Rule {
        weight_decay: 0.25,
        ..Rule::of(Method::Sgd(SgdConstants {
            momentum: 0.5,
            nesterov: true,
        }))
    };
    let cases = [
        plain.clone(),
        Case {
            activation: None,
            hidden: vec![5, 3],
            ..plain.clone()
        },
        Case {
            rule: Rule::adamw(),
            ..plain.clone()
        },
        Case {
            rule: momentum,
            ..plain.clone()
        },
        Case {
            clip_norm: 0.5,
            ..plain.clone()
        },
        Case {
            micro: Some(5),
            ..plain.clone()
        },
        Case {
            frozen: "2.",
            ..plain.clone()
        },
        Case {
            reduce_dtype: DType::BF16,
            batch: 2,
            ..plain.clone()
        },
        // The short last batch: 7 rows.
        Case {
            steps: 2..3,
            ..Case::regression(31, whole)
        },
    ];
    for (index, case) in cases.into_iter().enumerate() {
        let train = |device| {
            on_ranks(1, None, |world| {
                Case {
                    device,
                    ..case.clone()
                }
                .run(world)
            })
            .remove(0)
        };
        assert_eq!(train(device), train(Device::Cpu), "case {index}");
    }
}

/// The largest fraction of its bound that any error reached: bounds must be neither loose nor met
/// by luck.
#[derive(Debug, Default)]
struct Share {
    gradients: f64,
    values: f64,
}

/// Takes every step on both devices from the CPU's previous state, so that errors do not add up,
/// and compares each result with its bound.
pub(crate) fn every_step_is_within_its_bound(what: &str, setup: &Setup, device: Device) {
    let mut cpu = setup.start(Device::Cpu, GraphChoice::Off).unwrap();
    let mut other = setup.start(device, GraphChoice::Auto).unwrap();
    let mut share = Share::default();
    for step0 in 0..STEPS {
        copy_state(&other.step, &cpu.step);
        let before = state(&cpu.step);
        let batch = cpu.loader.load(step0).unwrap().clone();
        let gradients = |device| {
            bound::gradients(
                setup,
                &cpu.step.stages()[0].model().params,
                &batch,
                setup.precision_on(device),
            )
        };
        let expected = [gradients(Device::Cpu), gradients(device)];
        cpu.step.measure_norm(true);
        cpu.step.run(&batch, RATE).unwrap();
        other.take(step0, RATE, true).unwrap();
        check_step(
            what,
            setup,
            &batch,
            &expected,
            &before,
            [&cpu, &other],
            &mut share,
        );
    }
    assert!(
        share.gradients > 1e-6 && share.values > 1e-6,
        "{what}: bounds so wide hold anything: {share:?}"
    );
    println!("{what}: {share:?}");
}

/// Values and moments by element of the arena.
fn state(step: &Step) -> Vec<Vec<f32>> {
    let of = |tensor: &Tensor| tensor.to_vec::<f32>().unwrap();
    let moments = step.stages()[0]
        .optimizer()
        .moments()
        .map(|(_, moment)| of(moment));
    std::iter::once(of(step.stages()[0].model().params.trained_values()))
        .chain(moments)
        .collect()
}

fn copy_state(target: &Step, source: &Step) {
    let (params, from) = (
        &target.stages()[0].model().params,
        &source.stages()[0].model().params,
    );
    // One by one: in another format they lie elsewhere.
    for parameter in params.list() {
        let same = from.find(&parameter.name).unwrap();
        params
            .master(parameter.id)
            .copy_from(from.master(same.id))
            .unwrap();
        for ((_, target), (_, source)) in target.stages()[0]
            .optimizer()
            .moments()
            .zip(source.stages()[0].optimizer().moments())
        {
            let part = source.slice(same.range.clone()).unwrap();
            target
                .slice(parameter.range.clone())
                .unwrap()
                .copy_from(&part)
                .unwrap();
        }
    }
    params.refresh(0..params.values().count()).unwrap();
}

fn check_step(
    what: &str,
    setup: &Setup,
    batch: &Batch,
    expected: &[Vec<(String, bound::Uncertain)>; 2],
    before: &[Vec<f32>],
    trainings: [&Training; 2],
    share: &mut Share,
) {
    let weights = trainings[0].step.report().unwrap().stats.weight_sum;
    let first = &trainings[0].step.stages()[0].model().params;
    for (training, expected) in trainings.into_iter().zip(expected) {
        let scale = bound::scale(setup, expected, weights);
        let params = &training.step.stages()[0].model().params;
        let report = training.step.report().unwrap();
        assert_eq!(
            (report.bad_step, report.stats.weight_sum),
            (None, weights),
            "{what}"
        );
        for (name, expected) in expected {
            let parameter = params.find(name).unwrap();
            let gradients: Vec<f32> = params.gradient(parameter.id).unwrap().to_vec().unwrap();
            let values: Vec<f32> = params.master(parameter.id).to_vec().unwrap();
            for (index, at) in first.find(name).unwrap().range.clone().enumerate() {
                let (gradient, error) = (expected.value[index], expected.error[index]);
                let place = || {
                    format!(
                        "{what}, step {}, {name}[{index}] on {}",
                        batch.step + 1,
                        params.device()
                    )
                };
                let off = (f64::from(gradients[index]) - gradient).abs();
                assert!(
                    off <= error,
                    "{}: the gradient is off by {off:e}, at most {error:e}: {gradient:e}",
                    place()
                );
                let moment = |which: usize| {
                    before
                        .get(1 + which)
                        .map_or(0.0, |moment| f64::from(moment[at]))
                };
                let element = bound::Before {
                    value: f64::from(before[0][at]),
                    moments: [moment(0), moment(1)],
                    decays: parameter.decays,
                };
                let after = bound::update(
                    &setup.rule,
                    batch.step + 1,
                    RATE,
                    element,
                    (gradient, error),
                    scale,
                );
                let (value, value_error) = after;
                let value_off = (f64::from(values[index]) - value).abs();
                assert!(
                    value_off <= value_error,
                    "{}: off by {value_off:e}, at most {value_error:e}",
                    place()
                );
                if params.device().is_accelerator() {
                    share.gradients = share.gradients.max(off / error.max(f64::MIN_POSITIVE));
                    share.values = share.values.max(value_off / value_error);
                }
            }
        }
    }
}

#[test]
fn glyphs_are_learned_by_the_same_steps_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let glyphs = Setup::new("glyphs,rows=200,held-out=0");
    let gelu = Activation::Gelu;
    every_step_is_within_its_bound("relu, adamw", &glyphs, device);
    let all = Setup {
        activation: gelu,
        dropout: 0.25,
        clip_norm: 0.1,
        micro: Some(5),
        ..glyphs.clone()
    };
    every_step_is_within_its_bound("gelu, adamw, dropout, clipping, accumulation", &all, device);
    let momentum = Rule {
        weight_decay: 1e-3,
        ..Rule::of(Method::Sgd(SgdConstants {
            momentum: 0.9,
            nesterov: false,
        }))
    };
    let deeper = Setup {
        hidden: vec![24, 12],
        rule: momentum,
        dropout: 0.1,
        ..glyphs
    };
    every_step_is_within_its_bound(
        "relu, sgd with momentum, dropout, two hidden layers",
        &deeper,
        device,
    );
}

#[test]
fn numbers_are_learned_by_the_same_steps_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let numbers = Setup::new("synthetic:regression,rows=100,held-out=0,features=8,outputs=2");
    every_step_is_within_its_bound("squared error, adamw", &numbers, device);
    let sgd = Setup {
        activation: Activation::Gelu,
        rule: Rule::sgd(0.0),
        clip_norm: 1.0,
        ..numbers
    };
    every_step_is_within_its_bound("squared error, gelu, sgd, clipping", &sgd, device);
}

/// Steps of SGD on a linear model with squared error are v − r (H v − c) with a positive
/// semidefinite H. While r H is at most 2, the difference between two runs grows in norm only by
/// each step's roundings: after k steps it is at most the sum of 2 e, where e is each step's bound.
#[test]
fn a_run_that_cannot_amplify_errors_stays_near_the_cpus_to_its_end() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let rule = Rule::sgd(0.0);
    let setup = Setup {
        hidden: vec![],
        rule,
        ..Setup::new("synthetic:regression,rows=100,held-out=0,features=8,outputs=2")
    };
    let mut cpu = setup.start(Device::Cpu, GraphChoice::Off).unwrap();
    let mut other = setup.start(device, GraphChoice::Auto).unwrap();
    let mut most = 0.0;
    for step0 in 0..STEPS {
        let values = state(&cpu.step).remove(0);
        let batch = cpu.loader.load(step0).unwrap().clone();
        // The largest eigenvalue of H is at most its trace: 2 / weights Σ (|x|² + 1), for one
        // output.
        let squares = batch
            .x
            .to_vec::<f32>()
            .unwrap()
            .iter()
            .map(|x| f64::from(x * x))
            .sum::<f64>();
        let weights = (2 * batch.mine) as f64;
        assert!(
            RATE * 2.0 / weights * (squares + batch.mine as f64) < 2.0,
            "r H is at most 2"
        );
        let gradients = bound::gradients(
            &setup,
            &cpu.step.stages()[0].model().params,
            &batch,
            Precision::F32,
        );
        let scale = bound::scale(&setup, &gradients, weights);
        let mut squared = 0.0;
        for (name, gradient) in &gradients {
            let parameter = cpu.step.stages()[0].model().params.find(name).unwrap();
            for (index, at) in parameter.range.clone().enumerate() {
                let before = bound::Before {
                    value: f64::from(values[at]),
                    moments: [0.0; 2],
                    decays: parameter.decays,
                };
                let gradient = (gradient.value[index], gradient.error[index]);
                squared += bound::update(&rule, step0 + 1, RATE, before, gradient, scale)
                    .1
                    .powi(2);
            }
        }
        // The GPU's own values are a little elsewhere: its bound is that of values a little larger.
        most += 2.0 * squared.sqrt() * 1.01;
        cpu.step.run(&batch, RATE).unwrap();
        other.take(step0, RATE, false).unwrap();
        let pairs = state(&cpu.step)
            .remove(0)
            .into_iter()
            .zip(state(&other.step).remove(0));
        let apart = pairs
            .map(|(a, b)| f64::from(a - b).powi(2))
            .sum::<f64>()
            .sqrt();
        assert!(
            apart <= most,
            "step {}: {apart:e} apart, at most {most:e}",
            step0 + 1
        );
    }
    assert!(
        other.step.graphs().is_some_and(|graphs| graphs > 0),
        "the steps were launched as graphs"
    );
}

#[test]
fn held_out_rows_are_judged_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let held_out = ddp::data::open(&"glyphs,rows=64,held-out=107".parse().unwrap())
        .unwrap()
        .held_out;
    let setup = Setup::new("glyphs,rows=64,held-out=107");
    let judge = |device| {
        let mut training = setup.start(device, GraphChoice::Auto).unwrap();
        // Batches of 10: the last has 7.
        let mut rows = InOrder::new(Source::new(held_out.clone(), [device; 2]), 0, 1, 10).unwrap();
        let first = training.step.evaluate(&mut rows, &Group::alone()).unwrap();
        assert_eq!(
            training.step.evaluate(&mut rows, &Group::alone()).unwrap(),
            first,
            "twice the same"
        );
        first
    };
    let (here, there) = (judge(Device::Cpu), judge(device));
    assert_eq!((there.rows, there.weight_sum), (107.0, 107.0));
    // A prediction may differ if two logits are closer than their errors. No such row is in these
    // data.
    assert_eq!(there.correct, here.correct);
    // Features and initial weights are at most 1 and 1/28 in the first layer, whose 786 roundings
    // give an error of at most 784/28 · 786/2²⁴ < 1.4e-3. The second layer multiplies that by
    // 24/√24, and a row's loss is off by twice a logit's error. On both devices: 2.8e-2.
    assert!(
        (there.loss_sum - here.loss_sum).abs() <= 107.0 * 2.8e-2,
        "{there:?} {here:?}"
    );
}

#[test]
fn a_loader_brings_the_same_rows_to_a_gpu_in_any_order_of_steps() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    let setup = Setup {
        batch: 7,
        micro: Some(2),
        ..Setup::new("synthetic:regression,rows=50,held-out=0")
    };
    let loader = |device| {
        let sampler = ddp::data::Sampler::new(50, 7, 7, false).unwrap();
        Loader::new(
            Source::new(setup.data.clone(), [device; 2]),
            sampler,
            0,
            1,
            setup.micro,
        )
        .unwrap()
    };
    let (mut here, mut there) = (loader(Device::Cpu), loader(device));
    for step0 in (0..20).chain([3, 3, 19, 0, 7]) {
        let expected = here.load(step0).unwrap();
        let got = there.load(step0).unwrap();
        assert_eq!(
            (got.x.device(), got.mine, got.first),
            (device, expected.mine, expected.first)
        );
        for (got, expected) in [(&got.x, &expected.x), (&got.targets, &expected.targets)] {
            let numbers = |tensor: &Tensor| {
                tensor
                    .to(Device::Cpu)
                    .unwrap()
                    .to_dtype(DType::F64)
                    .unwrap()
            };
            assert_eq!(
                numbers(got).to_vec::<f64>().unwrap(),
                numbers(expected).to_vec::<f64>().unwrap(),
                "{step0}"
            );
        }
    }
}
