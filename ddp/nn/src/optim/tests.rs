//! What an optimizer changes and what it leaves unchanged. Its numbers are compared with PyTorch's
//! in ddp/tests/training/golden_layers.rs.

use ddp_kernels::Device;
use ddp_kernels::ops::{self, AdamwConstants};

use super::*;
use crate::models::Model;
use crate::{Linear, Sequential};

fn params(dtype: DType, frozen: &dyn Fn(&str) -> bool) -> Params {
    let layers = Sequential::new().then(Linear::new(5)).then(Linear::new(3));
    let layers = Box::new(layers);
    Model::new(layers, &[4], dtype, Device::Cpu, 1, frozen)
        .unwrap()
        .params
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
    || Rule {
        weight_decay: 0.1,
        ..Rule::of(Method::Sgd(SgdConstants {
            momentum: 0.5,
            nesterov: true,
        }))
    },
];

#[test]
fn a_step_changes_trained_parameters_and_neither_frozen_ones_nor_padding() {
    for (rule, dtype) in RULES
        .iter()
        .flat_map(|rule| [(rule(), DType::F32), (rule(), DType::F64)])
    {
        let params = params(dtype, &|name| name == "0.weight" || name == "1.bias");
        let before = numbers(params.values());
        // Also in the padding, which must not be read.
        ops::fill_into(params.gradients(), 1.0).unwrap();
        let mut optimizer = Optimizer::new(rule, &params).unwrap();
        optimizer.update(&params, 1, 0.1, None, None).unwrap();
        let after = numbers(params.values());
        let trained = |index: &usize| {
            params
                .list()
                .iter()
                .any(|p| p.is_trained() && p.range.contains(index))
        };
        for index in 0..before.len() {
            assert_eq!(
                before[index] != after[index],
                trained(&index),
                "element {index} under {rule:?}"
            );
        }
        for (name, moment) in optimizer.moments() {
            let moment = numbers(moment);
            assert!(
                (0..moment.len()).all(|index| (moment[index] != 0.0) == trained(&index)),
                "{name}"
            );
        }
    }
}

#[test]
fn decay_is_for_matrices_alone_unless_all_decay() {
    for decayed in [Decayed::Matrices, Decayed::All] {
        for rule in [
            Method::AdamW(AdamwConstants::default()),
            Method::Sgd(SgdConstants::default()),
        ] {
            let rule = Rule {
                weight_decay: 0.5,
                decayed,
                ..Rule::of(rule)
            };
            let params = params(DType::F64, &|_| false);
            let names = ["0.weight", "0.bias"];
            let before = names.map(|name| value(&params, name));
            Optimizer::new(rule, &params)
                .unwrap()
                .update(&params, 1, 0.1, None, None)
                .unwrap();
            for (name, before) in names.into_iter().zip(before) {
                let decays = decayed == Decayed::All || name == "0.weight";
                let kept = if decays { 1.0 - 0.1 * 0.5 } else { 1.0 };
                for (after, before) in value(&params, name).into_iter().zip(before) {
                    // Two roundings; there is no gradient.
                    let error = (after - before * kept).abs();
                    assert!(
                        error <= 2.0 * f64::EPSILON * before.abs(),
                        "{name}: {decayed:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn reset_moments_are_bias_corrected_as_in_a_new_run() {
    for rule in RULES {
        let values = |since: u64| {
            let params = params(DType::F32, &|_| false);
            ops::fill_into(params.gradients(), 0.5).unwrap();
            let mut optimizer = Optimizer::new(rule(), &params).unwrap();
            optimizer.count_from(since);
            for step in since + 1..since + 4 {
                optimizer.update(&params, step, 0.1, None, None).unwrap();
            }
            numbers(params.values())
        };
        assert_eq!(values(1000), values(0));
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
        assert!(
            optimizer
                .moments()
                .all(|(_, moment)| numbers(moment).iter().all(|&m| m == 0.0))
        );
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
            let unit = if dtype == DType::F32 {
                f64::from(f32::EPSILON)
            } else {
                8.0 * f64::EPSILON
            };
            let fits = |(got, want): (&f64, f64)| (got - want).abs() <= unit * want;
            assert!(got.iter().zip(expected).all(fits), "{got:?} {expected:?}");
        };
        close(
            run(1.0, Some(&divisor), false),
            [0.25 / (norm + 1e-6), norm],
        );
        close(run(10.0, Some(&divisor), false), [0.25, norm]);
        close(run(0.0, Some(&divisor), true), [0.25, norm]);
        close(run(0.0, Some(&divisor), false), [0.25, 0.0]);
        close(
            run(1.0, None, false),
            [1.0 / (4.0 * norm + 1e-6), 4.0 * norm],
        );
    }
}

#[test]
fn constants_that_cannot_be_are_refused_by_name() {
    let of = |method, weight_decay| Rule {
        weight_decay,
        ..Rule::of(method)
    };
    let adamw = |beta1, beta2, epsilon, weight_decay| {
        let constants = AdamwConstants {
            beta1,
            beta2,
            epsilon,
        };
        of(Method::AdamW(constants), weight_decay)
    };
    let sgd = |momentum, nesterov, weight_decay| {
        let constants = SgdConstants { momentum, nesterov };
        of(Method::Sgd(constants), weight_decay)
    };
    for (rule, expected) in [
        (
            adamw(1.0, 0.9, 1e-8, 0.0),
            "beta1: expected 0 or more and below 1, got 1",
        ),
        (
            adamw(0.9, -0.1, 1e-8, 0.0),
            "beta2: expected 0 or more and below 1, got -0.1",
        ),
        (
            adamw(0.9, 0.9, f64::NAN, 0.0),
            "epsilon: expected 0 or more, got NaN",
        ),
        (
            adamw(0.9, 0.9, 1e-8, -1.0),
            "weight decay: expected 0 or more, got -1",
        ),
        (
            sgd(-0.5, false, 0.0),
            "momentum: expected 0 or more, got -0.5",
        ),
        (
            sgd(0.5, false, f64::INFINITY),
            "weight decay: expected 0 or more, got inf",
        ),
        (sgd(0.0, true, 0.0), "expected a momentum above 0, got 0"),
    ] {
        let error = Optimizer::new(rule, &params(DType::F32, &|_| false))
            .unwrap_err()
            .to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = Clip::new(-1.0, &params(DType::F32, &|_| false))
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "the norm to clip at: expected 0 (off) or more, got -1; help: 1 is usual"
    );
    let error = Optimizer::new(Rule::adamw(), &params(DType::F32, &|_| false)).unwrap();
    let mut optimizer = error;
    let error = optimizer
        .update(&params(DType::F32, &|_| false), 0, 0.1, None, None)
        .unwrap_err()
        .to_string();
    assert!(error.contains("steps count from 1"), "{error}");
}

#[test]
fn a_model_without_trained_parameters_can_be_stepped() {
    let params = params(DType::F32, &|_| true);
    let clip = Clip::new(1.0, &params).unwrap();
    clip.compute(&params, None, true).unwrap();
    for rule in RULES {
        Optimizer::new(rule(), &params)
            .unwrap()
            .update(&params, 1, 0.1, Some(clip.out()), None)
            .unwrap();
    }
}

/// Two layers of a few thousand elements each, laid out for this many ranks; the first bias is
/// frozen.
fn shared_params(ranks: usize) -> Params {
    let layers = Sequential::new()
        .then(Linear::new(50))
        .then(Linear::new(30));
    let (layers, frozen) = (Box::new(layers), |name: &str| name == "0.bias");
    Model::with_shares(layers, &[90], DType::F32, Device::Cpu, 1, &frozen, ranks)
        .unwrap()
        .params
}

/// Every third quantum from `rank` on: what a rank of three would own with buckets of three quanta.
fn quanta_of(rank: usize, params: &Params) -> Vec<std::ops::Range<usize>> {
    let starts = (rank * ops::QUANTUM..params.gradients().count()).step_by(3 * ops::QUANTUM);
    starts.map(|start| start..start + ops::QUANTUM).collect()
}

/// A different gradient for each element, and 0 in the padding.
fn draw_gradients(params: &Params) {
    for p in params.list().iter().filter(|p| p.is_trained()) {
        let gradient = params.gradient(p.id).unwrap();
        let draw = |at: usize| ((at * 7919 + p.id.0 * 104_729) % 1009) as f32 / 512.0 - 1.0;
        let numbers: Vec<f32> = (0..gradient.count()).map(draw).collect();
        gradient
            .copy_from(&Tensor::from_slice(&numbers, gradient.shape(), Device::Cpu).unwrap())
            .unwrap();
    }
}

#[test]
fn optimizers_of_slices_together_do_what_one_of_all_does_to_the_bit() {
    for rule in RULES {
        let (whole, shared) = (shared_params(3), shared_params(3));
        let mut all = Optimizer::new(rule(), &whole).unwrap();
        let of_rank =
            |rank: usize| Optimizer::of_slices(rule(), &shared, &quanta_of(rank, &shared)).unwrap();
        let mut ranks = [0, 1, 2].map(of_rank);
        for step in 1..=3 {
            draw_gradients(&whole);
            draw_gradients(&shared);
            all.update(&whole, step, 0.1, None, None).unwrap();
            ranks
                .iter_mut()
                .for_each(|rank| rank.update(&shared, step, 0.1, None, None).unwrap());
        }
        assert_eq!(
            numbers(whole.values()),
            numbers(shared.values()),
            "{:?}",
            rule()
        );
        // Each piece says where its moments are, and the pieces cover every parameter.
        let mut counts = vec![0; shared.list().len()];
        for (rank, optimizer) in ranks.iter().enumerate() {
            let owned: usize = optimizer.owned().map(|range| range.len()).sum();
            assert_eq!(
                owned * 3,
                shared.gradients().count(),
                "rank {rank} owns a third"
            );
            for ((name, own), (_, of_all)) in optimizer.moments().zip(all.moments()) {
                // A range of padding alone has none.
                assert!(own.count() <= owned);
                let (own, of_all) = (numbers(own), numbers(of_all));
                for piece in optimizer.owned_pieces() {
                    let start = shared.parameter(piece.parameter).range.start + piece.start;
                    let (own, of_all) = (
                        &own[piece.at..][..piece.length],
                        &of_all[start..][..piece.length],
                    );
                    assert!(
                        own == of_all && own.iter().any(|&m| m != 0.0),
                        "{name} of rank {rank}: {piece:?}"
                    );
                }
            }
            optimizer
                .owned_pieces()
                .iter()
                .for_each(|piece| counts[piece.parameter.0] += piece.length);
        }
        for p in shared.list() {
            assert_eq!(
                counts[p.id.0],
                if p.is_trained() { p.range.len() } else { 0 },
                "{}",
                p.name
            );
        }
    }
}

#[test]
fn norms_of_slices_added_up_have_the_bits_of_the_whole_and_tell_of_any_bad_gradient() {
    let tight = shared_params(1);
    let shared = shared_params(3);
    let divisor = Tensor::full(&[1], 3.0, DType::F32, Device::Cpu).unwrap();
    let measured = |clips: &[Clip]| -> Result<Vec<f64>> {
        clips[0].measure(&shared, |sum| {
            // Added as the reducer would add those of two ranks.
            for other in &clips[1..] {
                other.measure(&shared, |part| Ok(ops::axpy(sum, 1.0, part)?))?;
            }
            Ok(())
        })?;
        clips[0].finish(Some(clips[0].partials()), Some(&divisor), None)?;
        Ok(numbers(clips[0].out()))
    };
    draw_gradients(&tight);
    draw_gradients(&shared);
    let alone = Clip::new(0.5, &tight).unwrap();
    alone.compute(&tight, Some(&divisor), false).unwrap();
    let ranks =
        [0, 1, 2].map(|rank| Clip::of_slices(0.5, &shared, &quanta_of(rank, &shared)).unwrap());
    assert!(
        ranks.iter().all(|rank| rank.measures(false)),
        "they never go by their own gradients alone"
    );
    // Twice: the other ranks' sums of the first time must not remain.
    for _ in 0..2 {
        assert_eq!(measured(&ranks).unwrap(), numbers(alone.out()));
    }
    for p in shared.list().iter().filter(|p| p.is_trained()) {
        let gradient = shared.gradient(p.id).unwrap().flatten().unwrap();
        let last = gradient
            .slice(gradient.count() - 1..gradient.count())
            .unwrap();
        ops::fill_into(&last, f64::INFINITY).unwrap();
        assert!(
            !measured(&ranks).unwrap()[1].is_finite(),
            "the last gradient of {}",
            p.name
        );
        draw_gradients(&shared);
    }
}
