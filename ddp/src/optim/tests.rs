//! What an optimizer touches and what it leaves alone. Its numbers are compared with PyTorch's in tests/golden_layers.rs.

use ddp_kernels::Device;

use super::*;
use crate::nn::{Linear, Sequential};

fn params(dtype: DType, frozen: &dyn Fn(&str) -> bool) -> Params {
    let mut layers = Sequential::new().then(Linear::new(5)).then(Linear::new(3));
    Params::new(&mut layers, &[4], dtype, Device::Cpu, 1, frozen).unwrap().0
}

fn numbers(x: &Tensor) -> Vec<f64> {
    x.to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

fn value(params: &Params, name: &str) -> Vec<f64> {
    numbers(params.value(params.find(name).unwrap().id))
}

const RULES: [fn() -> Rule; 4] = [
    Rule::adamw,
    || Rule::sgd(0.0),
    || Rule::sgd(0.9),
    || Rule::Sgd { constants: SgdConstants { momentum: 0.5, nesterov: true }, weight_decay: 0.1 },
];

#[test]
fn a_step_changes_trained_parameters_and_neither_frozen_ones_nor_padding() {
    for (rule, dtype) in RULES.iter().flat_map(|rule| [(rule(), DType::F32), (rule(), DType::F64)]) {
        let params = params(dtype, &|name| name == "0.weight" || name == "1.bias");
        let before = numbers(params.values());
        // In the padding too, where no gradient ever comes: it must not be read.
        ops::fill_into(params.gradients(), 1.0).unwrap();
        let mut optimizer = Optimizer::new(rule, &params).unwrap();
        optimizer.update(&params, 1, 0.1, None, None).unwrap();
        let after = numbers(params.values());
        let trained = |index: &usize| params.list().iter().any(|p| p.is_trained() && p.range.contains(index));
        for index in 0..before.len() {
            assert_eq!(before[index] != after[index], trained(&index), "element {index} under {rule:?}");
        }
        for (name, moment) in optimizer.moments() {
            let moment = numbers(moment);
            assert!((0..moment.len()).all(|index| (moment[index] != 0.0) == trained(&index)), "{name}");
        }
    }
}

#[test]
fn decay_is_for_matrices_alone() {
    for rule in [
        Rule::AdamW { constants: AdamwConstants::default(), weight_decay: 0.5 },
        Rule::Sgd { constants: SgdConstants::default(), weight_decay: 0.5 },
    ] {
        let params = params(DType::F64, &|_| false);
        let [weight, bias] = ["0.weight", "0.bias"].map(|name| value(&params, name));
        Optimizer::new(rule, &params).unwrap().update(&params, 1, 0.1, None, None).unwrap();
        assert_eq!(value(&params, "0.bias"), bias, "no gradient and no decay");
        for (after, before) in value(&params, "0.weight").into_iter().zip(weight) {
            // Two roundings.
            assert!((after - before * (1.0 - 0.1 * 0.5)).abs() <= 2.0 * f64::EPSILON * before.abs());
        }
    }
}

#[test]
fn after_a_bad_step_nothing_moves() {
    for rule in RULES {
        let params = params(DType::F32, &|_| false);
        let before = numbers(params.values());
        ops::fill_into(params.gradients(), 1.0).unwrap();
        let mut optimizer = Optimizer::new(rule(), &params).unwrap();
        let bad = Tensor::from_slice(&[3i64], &[1], Device::Cpu).unwrap();
        optimizer.update(&params, 4, 0.1, None, Some(&bad)).unwrap();
        assert_eq!(numbers(params.values()), before);
        assert!(optimizer.moments().all(|(_, moment)| numbers(moment).iter().all(|&m| m == 0.0)));
    }
}

#[test]
fn clipping_divides_by_the_weights_and_then_limits_the_norm() {
    for dtype in [DType::F32, DType::F64] {
        let params = params(dtype, &|_| false);
        for p in params.list() {
            ops::fill_into(params.gradient(p.id).unwrap(), 2.0).unwrap();
        }
        let divisor = Tensor::full(&[1], 4.0, dtype, Device::Cpu).unwrap();
        // 43 gradients of 2/4: the norm is √43/2.
        let norm = 43f64.sqrt() / 2.0;
        assert_eq!(params.trained_count(), 43);
        let run = |max_norm, divisor, wants_norm| {
            let clip = Clip::new(max_norm, &params).unwrap();
            clip.compute(&params, divisor, wants_norm).unwrap();
            numbers(clip.out())
        };
        let close = |got: Vec<f64>, expected: [f64; 2]| {
            // A few roundings in f64, and one to f32.
            let unit = if dtype == DType::F32 { f64::from(f32::EPSILON) } else { 8.0 * f64::EPSILON };
            let fits = |(got, want): (&f64, f64)| (got - want).abs() <= unit * want;
            assert!(got.iter().zip(expected).all(fits), "{got:?} {expected:?}");
        };
        close(run(1.0, Some(&divisor), false), [0.25 / (norm + 1e-6), norm]);
        close(run(10.0, Some(&divisor), false), [0.25, norm]);
        close(run(0.0, Some(&divisor), true), [0.25, norm]);
        close(run(0.0, Some(&divisor), false), [0.25, 0.0]);
        close(run(1.0, None, false), [1.0 / (4.0 * norm + 1e-6), 4.0 * norm]);
    }
}

#[test]
fn constants_that_cannot_be_are_refused_by_name() {
    let adamw = |beta1, beta2, epsilon, weight_decay| Rule::AdamW {
        constants: AdamwConstants { beta1, beta2, epsilon },
        weight_decay,
    };
    let sgd =
        |momentum, nesterov, weight_decay| Rule::Sgd { constants: SgdConstants { momentum, nesterov }, weight_decay };
    for (rule, expected) in [
        (adamw(1.0, 0.9, 1e-8, 0.0), "beta1: expected 0 or more and below 1, got 1"),
        (adamw(0.9, -0.1, 1e-8, 0.0), "beta2: expected 0 or more and below 1, got -0.1"),
        (adamw(0.9, 0.9, f64::NAN, 0.0), "epsilon: expected 0 or more, got NaN"),
        (adamw(0.9, 0.9, 1e-8, -1.0), "weight decay: expected 0 or more, got -1"),
        (sgd(-0.5, false, 0.0), "momentum: expected 0 or more, got -0.5"),
        (sgd(0.5, false, f64::INFINITY), "weight decay: expected 0 or more, got inf"),
        (sgd(0.0, true, 0.0), "expected a momentum above 0, got 0"),
    ] {
        let error = Optimizer::new(rule, &params(DType::F32, &|_| false)).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = Clip::new(-1.0, &params(DType::F32, &|_| false)).unwrap_err().to_string();
    assert_eq!(error, "the norm to clip at: expected 0 (off) or more, got -1");
    let error = Optimizer::new(Rule::adamw(), &params(DType::F32, &|_| false)).unwrap();
    let mut optimizer = error;
    let error = optimizer.update(&params(DType::F32, &|_| false), 0, 0.1, None, None).unwrap_err().to_string();
    assert!(error.contains("steps count from 1"), "{error}");
}

#[test]
fn a_model_without_trained_parameters_can_be_stepped() {
    let params = params(DType::F32, &|_| true);
    let clip = Clip::new(1.0, &params).unwrap();
    clip.compute(&params, None, true).unwrap();
    for rule in RULES {
        Optimizer::new(rule(), &params).unwrap().update(&params, 1, 0.1, Some(clip.out()), None).unwrap();
    }
}
