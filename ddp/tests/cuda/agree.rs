//! A step on a GPU computes what it computes on the CPU: to the bit where sums are exact;
//! elsewhere each parameter changes by as much, up to rounding. The tests of operations bound that
//! by element.

use ddp::config::{GraphChoice, Precision};
use ddp::data::{InOrder, Loader, Source};
use ddp::optim::{Method, Rule};
use ddp::params::Parameter;
use ddp_comm::Group;
use ddp_kernels::ops::{Activation, SgdConstants};
use ddp_kernels::{DType, Device, Tensor};

use crate::support::random::whole;
use crate::support::training::{Case, on_ranks};
use crate::{Setup, Training, gpu};

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

/// What a step of SGD adds to each parameter. That is its gradient times the rate, so it shows a
/// gradient that is off by a factor, which AdamW hides.
fn added(setup: &Setup, precision: Precision, device: Device) -> Vec<(String, Vec<f64>)> {
    let mut training = setup.start_in(precision, device, GraphChoice::Off).unwrap();
    let values = |training: &Training| -> Vec<(String, Vec<f32>)> {
        let params = &training.step.stages()[0].model().params;
        let of = |it: &Parameter| (it.name.clone(), params.master(it.id).to_vec().unwrap());
        params.list().iter().map(of).collect()
    };
    let before = values(&training);
    // The values' own roundings are small beside changes at this rate.
    training.take(0, 1.0, false).unwrap();
    let pairs = before.into_iter().zip(values(&training));
    let added = pairs.map(|((name, before), (_, after))| {
        let pairs = before.into_iter().zip(after);
        let added = pairs.map(|(before, after)| f64::from(after) - f64::from(before));
        (name, added.collect())
    });
    added.collect()
}

fn norm(x: impl Iterator<Item = f64>) -> f64 {
    x.map(|x| x * x).sum::<f64>().sqrt()
}

#[test]
fn every_parameter_changes_by_as_much_as_on_the_cpu() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.device;
    // Clipping hides a factor of all gradients.
    for (clip_norm, activation) in [(0.0, Activation::Relu), (0.1, Activation::Gelu)] {
        let setup = Setup {
            activation,
            dropout: 0.25,
            clip_norm,
            micro: Some(5),
            rule: Rule::sgd(0.0),
            ..Setup::new("glyphs,rows=50,held-out=0")
        };
        let [cpu, on_gpu] = [Device::Cpu, device].map(|device| {
            [Precision::F32, Precision::Bf16].map(|precision| added(&setup, precision, device))
        });
        for (what, got, expected, apart_max) in [
            // Sums of 784 terms, forward and backward: 2 · 784 · 2⁻²⁴ < 1e-4.
            ("f32", &on_gpu[0], &cpu[0], 1e-4),
            // At most 8 roundings on a row's way: of its numbers, the hidden layer's weights, sums
            // and outputs, the weights and sums above it, and the gradients of both: 8 · 2⁻⁹.
            ("bf16 beside f32", &on_gpu[1], &cpu[0], 0.016),
            // Of these 4 may differ: of sums, of the outputs, and of gradients of both.
            ("bf16", &on_gpu[1], &cpu[1], 0.008),
        ] {
            for ((name, got), (same, expected)) in got.iter().zip(expected) {
                assert_eq!(name, same);
                let apart = norm(got.iter().zip(expected).map(|(a, b)| a - b));
                let apart = apart / norm(expected.iter().copied());
                println!("{activation:?}, {what}, {name}: {apart:e} apart");
                assert!(
                    apart < apart_max,
                    "{activation:?}, {what}, {name}: {apart:e} apart, at most {apart_max:e}"
                );
            }
        }
    }
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
