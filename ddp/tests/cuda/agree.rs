//! A step on a GPU computes what it computes on the CPU, to the bit where sums are exact. How far
//! it may be off elsewhere, `claims/ranks.rs` derives, and the tests of operations.

use ddp::config::GraphChoice;
use ddp::data::{InOrder, Loader, Source};
use ddp::optim::{Method, Rule};
use ddp_comm::Group;
use ddp_kernels::ops::SgdConstants;
use ddp_kernels::{DType, Device, Tensor};

use crate::support::random::whole;
use crate::support::training::{Case, on_ranks};
use crate::{Setup, gpu};

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
