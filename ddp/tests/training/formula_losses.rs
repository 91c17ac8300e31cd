//! Losses by their formula, and the cross-entropy of probabilities: derivatives against finite
//! differences, values against textbook formulas in f64, rows that do not count, and what is
//! refused.

use crate::own_losses::{Focal, Huber, computed, losses};
use ddp::models::Model;
use ddp::nn::check::{DerivativeCheck, Objective};
use ddp::nn::{Activate, CrossEntropy, Head, Init, Linear, Loss, LossFormula};
use ddp::nn::{Result, Scope, Sequential, Var};
use ddp_kernels::{DType, Device, Random, Tensor, ops};

use crate::support::pass::in_pass;

const CPU: Device = Device::Cpu;

fn randn(shape: &[usize], seed: u64) -> Tensor {
    Tensor::randn(shape, DType::F64, CPU, &mut Random::new(seed)).unwrap()
}

fn floats(values: &[f64], shape: &[usize]) -> Tensor {
    Tensor::from_slice(values, shape, CPU).unwrap()
}

/// Rows of probabilities.
fn probabilities(shape: &[usize], seed: u64) -> Tensor {
    let classes = shape[shape.len() - 1];
    let drawn = randn(shape, seed).to_vec::<f64>().unwrap();
    let rows = drawn.chunks(classes).flat_map(softmax);
    floats(&rows.collect::<Vec<f64>>(), shape)
}

fn softmax(row: &[f64]) -> Vec<f64> {
    let sum: f64 = row.iter().map(|x| x.exp()).sum();
    row.iter().map(|x| x.exp() / sum).collect()
}

/// What a loss computes: the losses, the gradient, the statistics.
struct Computed([Vec<f64>; 3]);

/// Runs `losses`, one after the other, with the same memory.
fn run(losses: &[&dyn Loss], output: &Tensor, targets: &Tensor) -> Vec<Result<Computed>> {
    let model = Sequential::new().then(Linear::new(1));
    let model = Model::new(Box::new(model), &[1], output.dtype(), CPU, 1, &|_| false).unwrap();
    let wide = |it: &Tensor| -> Result<Vec<f64>> { Ok(it.to_dtype(DType::F64)?.to_vec()?) };
    in_pass(&model, true, |mut pass| {
        let mut one = |loss: &&dyn Loss| {
            let stats = Tensor::zeros(&[4], DType::F64, CPU)?;
            let of = [output, targets, &stats];
            let gradient = wide(&loss.gradient(&mut pass, of)?)?;
            let again = output.empty_like()?;
            ops::zero(&stats)?;
            let losses = loss.compute(&mut pass, of, Some(&again))?;
            assert_eq!(wide(&again)?, gradient, "{loss:?}");
            Ok(Computed([wide(&losses)?, gradient, wide(&stats)?]))
        };
        losses.iter().map(&mut one).collect()
    })
}

fn alone(loss: &dyn Loss, output: &Tensor, targets: &Tensor) -> [Vec<f64>; 3] {
    run(&[loss], output, targets).remove(0).unwrap().0
}

fn error_of(loss: &dyn Loss, output: &Tensor, targets: &Tensor) -> String {
    match run(&[loss], output, targets).remove(0) {
        Err(error) => error.to_string(),
        Ok(Computed(all)) => panic!("{loss:?} computed {all:?}"),
    }
}

/// `bound` is some roundings of f64 in sums of numbers of about 1.
#[track_caller]
fn assert_near(got: &[f64], expected: &[f64]) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        assert!(
            (got - expected).abs() < 1e-13,
            "{got} instead of {expected}"
        );
    }
}

#[test]
fn derivatives_of_losses_are_those_of_finite_differences() {
    let classes = Tensor::from_slice(&[2i64, 0, 1, 1, 2], &[5], CPU).unwrap();
    let of_positions = Tensor::from_slice(&[2u8, 0, 1, 1, 2, 0, 0, 1, 1, 2], &[5, 2], CPU).unwrap();
    let focal = Focal {
        gamma: 2.0,
        ignored: 1.0,
    };
    let smoothed = CrossEntropy {
        label_smoothing: 0.2,
        class_weights: Some(floats(&[0.5, 2.0, 1.25], &[3])),
        ..CrossEntropy::default()
    };
    let huber = Huber { delta: 0.5 };
    let cases: [(&dyn Loss, &[usize], Tensor); 6] = [
        (&huber, &[4], randn(&[5, 3], 7)),
        (&focal, &[4], classes),
        (&focal, &[2, 4], of_positions),
        (&CrossEntropy::default(), &[4], probabilities(&[5, 3], 8)),
        (&smoothed, &[4], probabilities(&[5, 3], 8)),
        (&smoothed, &[2, 4], probabilities(&[5, 2, 3], 9)),
    ];
    for (loss, shape, targets) in cases {
        for seed in 1..4 {
            let check = DerivativeCheck {
                rows: 5,
                seed,
                objective: Objective::Loss(loss, &targets),
                ..DerivativeCheck::new(shape)
            };
            let layers = Sequential::new()
                .then(Linear::new(6))
                .then(Activate::gelu());
            let worst = check.worst(layers.then(Linear::new(3))).unwrap();
            // As in derivatives.rs.
            assert!(worst.error() < 1e-8, "seed {seed}: {worst:?} of {loss:?}");
        }
    }
}

/// torch.nn.CrossEntropyLoss with probabilities: the targets are smoothed, then weighted, and the
/// mean divides by the number of rows, also with weights.
#[test]
fn cross_entropy_of_probabilities_is_pytorchs() {
    let (rows, classes) = (6, 4);
    let weights = [0.5, 2.0, 1.25, 0.0];
    let targets = probabilities(&[rows, classes], 1);
    let output = randn(&[rows, classes], 2);
    let (x, t) = (
        output.to_vec::<f64>().unwrap(),
        targets.to_vec::<f64>().unwrap(),
    );
    for smoothing in [0.0, 0.3, 1.0] {
        for weights in [None, Some(weights)] {
            let loss = CrossEntropy {
                label_smoothing: smoothing,
                class_weights: weights.map(|it| floats(&it, &[classes])),
                ..CrossEntropy::default()
            };
            let [losses, gradient, stats] = alone(&loss, &output, &targets);
            let (mut expected, mut slopes, mut correct) = (Vec::new(), Vec::new(), 0.0);
            for (x, t) in x.chunks(classes).zip(t.chunks(classes)) {
                let w = weights.unwrap_or([1.0; 4]);
                let share = |c: usize| w[c] * ((1.0 - smoothing) * t[c] + smoothing / 4.0);
                let p = softmax(x);
                expected.push(-(0..classes).map(|c| share(c) * p[c].ln()).sum::<f64>());
                let all: f64 = (0..classes).map(share).sum();
                slopes.extend((0..classes).map(|c| all * p[c] - share(c)));
                let largest = |row: &[f64]| (0..classes).max_by(|&a, &b| row[a].total_cmp(&row[b]));
                correct += f64::from(u8::from(largest(x) == largest(t)));
            }
            assert_near(&losses, &expected);
            assert_near(&gradient, &slopes);
            let rows = rows as f64;
            assert_near(&stats, &[expected.iter().sum(), rows, correct, rows]);
            assert!(correct > 0.0 && correct < rows, "the draw has both");
        }
    }
}

#[test]
fn probabilities_of_one_class_are_its_index() {
    let output = randn(&[5, 2, 3], 3);
    let indices = [2i64, 0, 1, 1, 2, 0, 0, 1, 1, 2];
    let shares: Vec<f64> = indices
        .iter()
        .flat_map(|index| (0..3).map(move |class| f64::from(u8::from(class == *index))))
        .collect();
    let loss = CrossEntropy {
        label_smoothing: 0.1,
        ..CrossEntropy::default()
    };
    let by_index = Tensor::from_slice(&indices, &[5, 2], CPU).unwrap();
    let by_index = alone(&loss, &output, &by_index);
    let by_share = alone(&loss, &output, &floats(&shares, &[5, 2, 3]));
    for (a, b) in by_index.iter().zip(&by_share) {
        assert_near(b, a);
    }
}

#[test]
fn a_head_gives_its_pieces_of_positions_the_same_loss() {
    let targets = probabilities(&[300, 2, 5], 1).to_dtype(DType::F32).unwrap();
    let x = randn(&[300, 2, 4], 2).to_dtype(DType::F32).unwrap();
    let formula = Of(|_, x, t| (x - t).pow(2.0).mean(-1));
    let losses: [&dyn Loss; 2] = [&CrossEntropy::default(), &formula];
    for loss in losses {
        pieces_of_a_head_equal_the_whole(loss, &x, &targets);
    }
}

fn pieces_of_a_head_equal_the_whole(loss: &dyn Loss, x: &Tensor, targets: &Tensor) {
    let mut all = Vec::new();
    for in_pieces in [false, true] {
        let head = Box::new(Head::new(5));
        let model = Model::new(head, &[2, 4], DType::F32, CPU, 1, &|_| false).unwrap();
        let stats = Tensor::zeros(&[4], DType::F64, CPU).unwrap();
        in_pass(&model, true, |mut pass| {
            if in_pieces {
                pass = pass.leaving_head(true);
            }
            let output = model.forward(&mut pass, x).unwrap();
            let of = [&output, targets, &stats];
            let losses = model.losses(&mut pass, loss, of).unwrap();
            assert_eq!(losses.count(), 600);
            let dy = model.loss_gradient(&mut pass, loss, of).unwrap();
            model.backward(&mut pass, &dy).unwrap();
        });
        all.push(model.params.gradients().to_vec::<f32>().unwrap());
        assert_eq!(stats.to_vec::<f64>().unwrap()[3], 1200.0);
    }
    let [whole, pieces] = &all[..] else {
        panic!("two runs")
    };
    for (whole, pieces) in whole.iter().zip(pieces) {
        // Sums of 600 numbers of at most 4 in another order.
        assert!((whole - pieces).abs() < 1e-3, "{whole} {pieces}");
    }
}

/// Math is in f32, and the gradient is rounded once.
#[test]
fn losses_of_an_output_in_bf16_are_those_of_the_same_numbers_in_f32() {
    for loss in 0..losses().len() {
        let [narrow, wide] = [DType::BF16, DType::F32].map(|it| computed(loss, 9, it, CPU));
        assert_eq!(narrow[1].dtype(), DType::BF16);
        for at in 0..3 {
            let rounded = wide[at].to_dtype(narrow[at].dtype()).unwrap();
            let [narrow, rounded] = [&narrow[at], &rounded]
                .map(|it| it.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap());
            assert_eq!(narrow, rounded, "loss {loss}");
        }
    }
}

#[test]
fn settings_tell_losses_of_a_type_apart() {
    let (output, targets) = (floats(&[0.0, 4.0], &[2, 1]), floats(&[0.5, 0.0], &[2, 1]));
    let [near, far] = [1.0, 3.0].map(|delta| Huber { delta });
    let all = run(&[&near, &far, &near], &output, &targets);
    let all: Vec<[Vec<f64>; 3]> = all.into_iter().map(|it| it.unwrap().0).collect();
    // δ·(|e| − δ/2) beyond δ.
    assert_eq!(
        all[0],
        [
            vec![0.125, 3.5],
            vec![-0.5, 1.0],
            vec![3.625, 2.0, 0.0, 2.0]
        ]
    );
    assert_eq!(
        all[1],
        [
            vec![0.125, 7.5],
            vec![-0.5, 3.0],
            vec![7.625, 2.0, 0.0, 2.0]
        ]
    );
    assert_eq!(all[2], all[0]);
}

#[test]
fn rows_of_weight_0_do_not_count_whatever_their_numbers() {
    let focal = Focal {
        gamma: 0.0,
        ignored: 1.0,
    };
    let targets = Tensor::from_slice(&[0i64, 1, 2, 2], &[4], CPU).unwrap();
    let nan = f64::NAN;
    let output = [0.0, 0.0, 0.0, nan, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0];
    let [losses, gradient, stats] = alone(&focal, &floats(&output, &[4, 3]), &targets);
    let (ln3, last) = (3f64.ln(), softmax(&[1.0, 0.0, 0.0]));
    let of_last = -last[2].ln();
    // Class 0 counts half. Of equal outputs the first is the largest.
    assert_near(&losses, &[0.5 * ln3, 0.0, ln3, of_last]);
    let third = 1.0 / 3.0;
    let [a, b] = [third, third - 1.0];
    let rows = [[0.5 * b, 0.5 * a, 0.5 * a], [0.0; 3], [a, a, b]];
    let of_last_row = [last[0], last[1], last[2] - 1.0];
    assert_near(&gradient, &[rows.as_flattened(), &of_last_row].concat());
    assert_near(&stats, &[1.5 * ln3 + of_last, 2.5, 1.0, 3.0]);
}

type OfLosses = fn(&mut Scope<'_>, &Var, &Var) -> Var;

/// A formula that is a function.
#[derive(Clone, Debug)]
struct Of(OfLosses);

impl PartialEq for Of {
    fn eq(&self, other: &Of) -> bool {
        std::ptr::fn_addr_eq(self.0, other.0)
    }
}

impl LossFormula for Of {
    fn losses(&self, m: &mut Scope<'_>, output: &Var, target: &Var) -> Var {
        self.0(m, output, target)
    }
}

#[test]
fn a_matmul_in_a_loss_of_an_output_in_bf16_is_that_of_f32() {
    let loss = Of(|m, x, t| {
        let mixed = x.matmul(&m.numbers(&[0.5, 1.0, -1.5, 0.25, 2.0, 0.75], &[3, 2]));
        (mixed - t).pow(2.0).mean(-1)
    });
    let narrow = randn(&[4, 3], 1).to_dtype(DType::BF16).unwrap();
    let targets = randn(&[4, 2], 2).to_dtype(DType::F32).unwrap();
    let [losses, gradient, stats] = alone(&loss, &narrow, &targets);
    let wide = alone(&loss, &narrow.to_dtype(DType::F32).unwrap(), &targets);
    assert_eq!([&losses, &stats], [&wide[0], &wide[2]]);
    let rounded = floats(&wide[1], &[12]).to_dtype(DType::F32).unwrap();
    let rounded = rounded.to_dtype(DType::BF16).unwrap().to_dtype(DType::F64);
    assert_eq!(gradient, rounded.unwrap().to_vec::<f64>().unwrap());
}

#[test]
fn wrong_formulas_and_targets_are_refused_with_what_helps() {
    let (output, targets) = (randn(&[4, 3], 1), randn(&[4, 3], 2));
    let of = |formula| error_of(&Of(formula), &output, &targets);
    let text = of(|_, x, t| (x - t).abs());
    let expected = "loss: losses: expected one for each row, or for each position of the output, got abs [rows, 3]";
    assert!(text.starts_with(expected), "{text}");
    let text = of(|_, x, _| x.number(2.0).expand(&[4]));
    assert!(
        text.contains("one for each row, or for each position of the output, got expand [4]"),
        "{text}"
    );
    let text = of(|_, x, t| (x - t.slice(1, 0..2)).mean(-1));
    assert!(
        text.starts_with("loss (") && text.contains("formula_losses.rs:"),
        "{text}"
    );
    assert!(
        text.contains("got output [rows, 3] and slice [rows, 2]"),
        "{text}"
    );
    let text = of(|m, x, _| (x * m.parameter("scale", &[1], Init::Constant(1.0))).mean(-1));
    assert!(text.contains("a loss has no parameters"), "{text}");
    let text = of(|m, x, _| m.dropout("drop", x, 0.5).mean(-1));
    assert!(text.contains("a loss drops nothing"), "{text}");
    let touching: [OfLosses; 4] = [
        |_, x, t| (x - t).abs().sum(-1) / t.size(0) as f64,
        |_, x, t| (x.log_softmax(0) * t).mean(-1),
        |_, x, t| (x - t).abs().mean(-1) - t.mean(0).mean(-1),
        |_, x, _| x.transpose(0, 1).mean(-1),
    ];
    for formula in touching {
        let text = of(formula);
        assert!(text.contains("expected an axis within a row"), "{text}");
    }
    let text = of(|_, x, t| x.less(t).mean(-1));
    assert!(
        text.contains("a formula with a derivative by the output"),
        "{text}"
    );

    let huber = Huber { delta: 1.0 };
    // A rank may have no rows.
    alone(&huber, &randn(&[0, 3], 1), &randn(&[0, 3], 2));
    let text = error_of(&huber, &output, &randn(&[3, 3], 1));
    assert!(
        text.starts_with("loss: expected as many rows of targets as"),
        "{text}"
    );
    let soft = CrossEntropy::default();
    let text = error_of(&soft, &output, &randn(&[4], 1));
    let expected = "cross entropy: expected probabilities of the output's shape [4, 3], or class";
    assert!(text.starts_with(expected), "{text}");
    let weighted = CrossEntropy {
        class_weights: Some(floats(&[1.0, 2.0], &[2])),
        ..CrossEntropy::default()
    };
    let text = error_of(&weighted, &output, &targets);
    assert!(text.contains("class_weights [2]"), "{text}");
    let smoothed = CrossEntropy {
        label_smoothing: 1.5,
        ..CrossEntropy::default()
    };
    let text = error_of(&smoothed, &output, &targets);
    assert!(
        text.contains("label_smoothing from 0 to 1, got 1.5"),
        "{text}"
    );
}

#[test]
fn losses_without_rows_are_empty() {
    let output = Tensor::zeros(&[0, 3], DType::F64, CPU).unwrap();
    for loss in [&Huber { delta: 1.0 } as &dyn Loss, &CrossEntropy::default()] {
        let computed = alone(loss, &output, &output);
        assert_eq!(computed, [vec![], vec![], vec![0.0; 4]]);
    }
}
