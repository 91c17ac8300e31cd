//! cross_entropy against a plain f64 formula, against finite differences, and against PyTorch's
//! numbers.

mod accuracy;

use super::*;
use crate::DType;
use crate::ops::testing::{assert_close, cpu, cpu_of, random_f32};
use crate::{Device, Random};

/// Half the distance from 1 to the next f32.
const EPSILON: f64 = 1.0 / (1 << 24) as f64;

/// Losses, gradients and weights by the plain formula, in f64.
struct Reference {
    losses: Vec<f64>,
    dlogits: Vec<f64>,
    weights: Vec<f64>,
    /// The largest |x − max x| of each row.
    ranges: Vec<f64>,
}

/// `reference(logits, targets, classes, class_weights, smoothing, ignore_index, gradient_scale)`
fn reference(
    x: &[f64],
    y: &[i64],
    w: &[f64],
    smoothing: f64,
    ignore: Option<i64>,
    scale: f64,
) -> Reference {
    let classes = w.len();
    let mut out = Reference {
        losses: vec![],
        dlogits: vec![],
        weights: vec![],
        ranges: vec![],
    };
    for (row, &target) in x.chunks(classes).zip(y) {
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let log_sum = largest + row.iter().map(|x| (x - largest).exp()).sum::<f64>().ln();
        out.ranges
            .push(row.iter().map(|x| largest - x).fold(0.0, f64::max));
        if Some(target) == ignore {
            out.losses.push(0.0);
            out.weights.push(0.0);
            out.dlogits.extend(vec![0.0; classes]);
            continue;
        }
        let share = |class: usize| {
            let hit = if class == target as usize {
                1.0 - smoothing
            } else {
                0.0
            };
            (hit + smoothing / classes as f64) * w[class]
        };
        let total: f64 = (0..classes).map(share).sum();
        out.losses.push(
            (0..classes)
                .map(|class| share(class) * (log_sum - row[class]))
                .sum(),
        );
        out.weights.push(w[target as usize]);
        out.dlogits.extend(
            (0..classes).map(|class| scale * (total * (row[class] - log_sum).exp() - share(class))),
        );
    }
    out
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// Targets below `classes`, every fifth -100.
fn targets_for(rows: usize, classes: usize, seed: u64) -> Vec<i64> {
    let drawn = Tensor::randint(
        classes as u32,
        &[rows],
        DType::I64,
        Device::Cpu,
        &mut Random::new(seed),
    )
    .unwrap()
    .to_vec::<i64>();
    drawn
        .unwrap()
        .into_iter()
        .enumerate()
        .map(|(row, y)| if row % 5 == 4 { -100 } else { y })
        .collect()
}

fn bits(tensor: &Tensor) -> Vec<u32> {
    tensor
        .to_vec::<f32>()
        .unwrap()
        .into_iter()
        .map(f32::to_bits)
        .collect()
}

#[test]
fn losses_and_gradients_agree_with_f64_for_every_shape_and_option() {
    let shapes = [
        (0, 3),
        (1, 1),
        (7, 2),
        (16, 10),
        (17, 10),
        (33, 31),
        (5, 64),
        (5, 65),
        (4, 100),
        (2, 512),
        (3, 513),
        (2, 1500),
    ];
    for (case, (rows, classes)) in shapes.into_iter().enumerate() {
        let x: Vec<f32> = random_f32(rows * classes, case as u64)
            .iter()
            .map(|x| 5.0 * x)
            .collect();
        let y = targets_for(rows, classes, 100 + case as u64);
        let w: Vec<f32> = random_f32(classes, 200 + case as u64)
            .iter()
            .map(|w| w.abs() + 0.1)
            .collect();
        let (logits, targets) = (cpu(&x, &[rows, classes]), cpu_of(&y, &[rows]));
        for (smoothing, weighted) in [
            (0.0, false),
            (0.0, true),
            (0.1, false),
            (0.1, true),
            (1.0, true),
        ] {
            let class_weights = weighted.then(|| cpu(&w, &[classes]));
            let ones = vec![1.0; classes];
            let want = reference(
                &wide(&x),
                &y,
                &if weighted { wide(&w) } else { ones },
                smoothing,
                Some(-100),
                0.25,
            );
            let [losses, weights] = [(); 2].map(|()| cpu(&vec![9.0; rows], &[rows]));
            let dlogits = logits.ones_like().unwrap();
            let options = CrossEntropyOptions {
                label_smoothing: smoothing,
                class_weights: class_weights.as_ref(),
                gradient_scale: 0.25,
                ..Default::default()
            };
            let out = CrossEntropyOut {
                losses: &losses,
                dlogits: Some(&dlogits),
                weights: Some(&weights),
            };
            cross_entropy(&logits, &targets, out, &options, None).unwrap();

            // s = Σ eᶻ has at most 64 roundings (few classes; 21 with many), each eᶻ 2ε besides and
            // ε |z| from z's own rounding, where |z| eᶻ < 0.4: 67ε relative. ln s, ln s - z and the
            // products add 6ε of what they are, at most the row's range R + ln C; Σ w z has another
            // 64 roundings of as much, by the smoothing.
            let heaviest = if weighted {
                w.iter().copied().fold(1.0, f32::max).into()
            } else {
                1.0
            };
            let loss_bound = |row: usize| {
                let range = want.ranges[row] + (classes as f64).ln();
                heaviest * EPSILON * (70.0 + (6.0 + 140.0 * smoothing) * range)
            };
            // The softmax is within 67ε + 2ε + |z|ε of itself, and |z| eᶻ < 0.4; its factor and the
            // two sums add 6ε; W in the factor has the roundings of a lane sum, under 70ε.
            let gradient_bound = 0.25 * heaviest * EPSILON * (80.0 + 70.0 * smoothing);
            assert_close(&losses.to_vec::<f32>().unwrap(), &want.losses, |row, _| {
                loss_bound(row)
            });
            assert_close(&dlogits.to_vec::<f32>().unwrap(), &want.dlogits, |_, _| {
                gradient_bound
            });
            assert_close(&weights.to_vec::<f32>().unwrap(), &want.weights, |_, _| 0.0);

            let again = losses.zeros_like().unwrap();
            let out = CrossEntropyOut {
                losses: &again,
                dlogits: None,
                weights: None,
            };
            cross_entropy(&logits, &targets, out, &options, None).unwrap();
            assert_eq!(bits(&again), bits(&losses), "without the gradient");
            let in_place = cpu(&x, &[rows, classes]);
            let out = CrossEntropyOut {
                losses: &again,
                dlogits: Some(&in_place),
                weights: None,
            };
            cross_entropy(&in_place, &targets, out, &options, None).unwrap();
            assert_eq!(
                (bits(&again), bits(&in_place)),
                (bits(&losses), bits(&dlogits)),
                "in place"
            );
        }
    }
}

#[test]
fn gradients_are_those_of_the_loss_by_finite_differences_for_every_combination() {
    // Central differences: h²/6 × f‴ < 2e-11, and 20 × 2⁻⁵³ / h < 3e-10 of rounding.
    const STEP: f64 = 1e-5;
    const BOUND: f64 = 1e-9;
    for (rows, classes) in [(5, 3), (2, 70)] {
        let x = wide(&random_f32(rows * classes, 1));
        let y = targets_for(rows, classes, 2);
        let w: Vec<f64> = random_f32(classes, 3)
            .iter()
            .map(|w| f64::from(w.abs()) + 0.1)
            .collect();
        let (targets, class_weights) = (cpu_of(&y, &[rows]), cpu_of(&w, &[classes]));
        for combination in 0..12 {
            let options = CrossEntropyOptions {
                ignore_index: if combination & 1 == 0 {
                    Some(-100)
                } else {
                    Some(y[0])
                },
                class_weights: (combination & 2 != 0).then_some(&class_weights),
                label_smoothing: [0.0, 0.3, 1.0][combination / 4],
                gradient_scale: 1.5,
            };
            let targets = if combination & 1 == 0 {
                &targets
            } else {
                &cpu_of(&y.map_minus(y[0]), &[rows])
            };
            let total = |x: &[f64], dlogits: Option<&Tensor>| {
                let losses = cpu_of(&vec![0.0f64; rows], &[rows]);
                let out = CrossEntropyOut {
                    losses: &losses,
                    dlogits,
                    weights: None,
                };
                cross_entropy(&cpu_of(x, &[rows, classes]), targets, out, &options, None).unwrap();
                losses.to_vec::<f64>().unwrap().iter().sum::<f64>()
            };
            let dlogits = cpu_of(&vec![0.0f64; rows * classes], &[rows, classes]);
            total(&x, Some(&dlogits));
            for (index, got) in dlogits.to_vec::<f64>().unwrap().into_iter().enumerate() {
                let moved = |by: f64| {
                    let mut x = x.clone();
                    x[index] += by;
                    total(&x, None)
                };
                let want = 1.5 * (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
                assert!(
                    (got - want).abs() < BOUND,
                    "{options:?}, element {index}: {got} by formula, {want} by difference"
                );
            }
        }
    }
}

/// With it a class that exists is ignored: no -100 is left.
trait MapMinus {
    fn map_minus(&self, instead: i64) -> Vec<i64>;
}

impl MapMinus for Vec<i64> {
    fn map_minus(&self, instead: i64) -> Vec<i64> {
        self.iter()
            .map(|&y| if y < 0 { instead } else { y })
            .collect()
    }
}

/// PyTorch 2.11:
/// ```python
/// x = torch.tensor([[1.,2.,-1.],[.5,-.5,3.],[10.,-10.,0.],[.25,.125,-2.],[-1.,4.,1.5]],
///     requires_grad=True)
/// y = torch.tensor([1,0,-100,2,1]); w = torch.tensor([1.,.5,2.])
/// l = F.cross_entropy(x, y, weight=w or None, label_smoothing=0 or .1, reduction='none')
/// l.sum().backward()
/// l, x.grad, F.cross_entropy(x, y, weight=w or None, label_smoothing=0 or .1)
/// ```
struct Golden {
    smoothing: f64,
    weighted: bool,
    losses: [f32; 5],
    dlogits: [f32; 15],
    mean: f64,
}

#[rustfmt::skip]
const GOLDEN: [Golden; 3] = [
    Golden { smoothing: 0.0, weighted: false,
        losses: [0.349_012_17, 2.606_414, 0.0, 2.937_076_8, 0.085_097_26],
        dlogits: [0.259_496_48, -0.294_615_45, 0.035_119_03, -0.926_201_3, 0.027_149_027, 0.899_052_26, 0.0, 0.0, 0.0,
            0.503_044_4, 0.443_935_16, -0.946_979_5, 0.006_188_284_6, -0.081_577_06, 0.075_388_744],
        mean: 1.494_400_143_623_352 },
    Golden { smoothing: 0.1, weighted: false,
        losses: [0.482_345_46, 2.556_414, 0.0, 2.791_243_3, 0.335_097_28],
        dlogits: [0.226_163_15, -0.227_948_78, 0.001_785_695_6, -0.859_534_6, -0.006_184_308, 0.865_718_9, 0.0, 0.0, 0.0,
            0.469_711_1, 0.410_601_82, -0.880_312_86, -0.027_145_05, -0.014_910_4, 0.042_055_41],
        mean: 1.541_275_143_623_352 },
    Golden { smoothing: 0.1, weighted: true,
        losses: [0.431_106_9, 2.499_854, 0.0, 5.518_98, 0.381_555_14],
        dlogits: [0.113_714_67, -0.066_948_76, -0.046_765_886, -0.858_304_7, 0.010_934_843, 0.847_369_8, 0.0, 0.0, 0.0,
            0.930_835_1, 0.834_209, -1.765_044_1, -0.029_826_641, 0.053_772_993, -0.023_946_382],
        mean: 2.207_874_059_677_124 },
];

#[test]
fn pytorch_gives_the_same_losses_gradients_and_mean() {
    let logits = [
        1., 2., -1., 0.5, -0.5, 3., 10., -10., 0., 0.25, 0.125, -2., -1., 4., 1.5,
    ];
    let (logits, targets) = (cpu(&logits, &[5, 3]), cpu_of(&[1i32, 0, -100, 2, 1], &[5]));
    let class_weights = cpu(&[1.0, 0.5, 2.0], &[3]);
    for golden in GOLDEN {
        let [losses, weights] = [(); 2].map(|()| cpu(&[9.0; 5], &[5]));
        let dlogits = logits.zeros_like().unwrap();
        let options = CrossEntropyOptions {
            label_smoothing: golden.smoothing,
            class_weights: golden.weighted.then_some(&class_weights),
            ..Default::default()
        };
        let out = CrossEntropyOut {
            losses: &losses,
            dlogits: Some(&dlogits),
            weights: Some(&weights),
        };
        cross_entropy(&logits, &targets, out, &options, None).unwrap();
        // Both sides round a dozen times, numbers of up to 6.
        let bound = |_: usize, _: f64| 24.0 * 6.0 * EPSILON;
        assert_close(
            &losses.to_vec::<f32>().unwrap(),
            &wide(&golden.losses),
            bound,
        );
        assert_close(
            &dlogits.to_vec::<f32>().unwrap(),
            &wide(&golden.dlogits),
            bound,
        );
        let sum = |tensor: &Tensor| wide(&tensor.to_vec::<f32>().unwrap()).iter().sum::<f64>();
        assert!(
            (sum(&losses) / sum(&weights) - golden.mean).abs() < bound(0, 0.0),
            "{}",
            golden.mean
        );
    }
}

#[test]
fn a_row_gives_the_same_bits_alone_in_a_batch_and_for_any_number_of_threads() {
    let _alone = crate::ops::testing::alone_with_the_pool();
    for (rows, classes) in [(1603, 10), (601, 33), (150, 65), (37, 1000)] {
        let x = random_f32(rows * classes, 5);
        let y = targets_for(rows, classes, 6);
        let logits = cpu(&x, &[rows, classes]);
        let run = |range: std::ops::Range<usize>| {
            let (logits, targets) = (
                logits.slice(range.clone()).unwrap(),
                cpu_of(&y[range.clone()], &[range.len()]),
            );
            let (losses, dlogits) = (
                cpu(&vec![0.0; range.len()], &[range.len()]),
                logits.zeros_like().unwrap(),
            );
            let out = CrossEntropyOut {
                losses: &losses,
                dlogits: Some(&dlogits),
                weights: None,
            };
            let options = CrossEntropyOptions {
                label_smoothing: 0.1,
                ..Default::default()
            };
            cross_entropy(&logits, &targets, out, &options, None).unwrap();
            (bits(&losses), bits(&dlogits))
        };
        threads::set_count(1).unwrap();
        let (losses, dlogits) = run(0..rows);
        for count in [2, 3] {
            threads::set_count(count).unwrap();
            assert!(
                run(0..rows) == (losses.clone(), dlogits.clone()),
                "{rows} × {classes} with {count} threads"
            );
        }
        for row in (0..rows).step_by(7) {
            let (loss, gradient) = run(row..row + 1);
            assert_eq!(loss[0], losses[row]);
            assert_eq!(gradient, dlogits[row * classes..(row + 1) * classes]);
        }
    }
}

#[test]
fn nan_and_infinity_spoil_their_own_row_only_and_ignored_rows_count_zero() {
    for classes in [3, 100] {
        let mut x = random_f32(6 * classes, 8);
        x[classes] = f32::NAN;
        x[2 * classes + 1] = f32::INFINITY;
        x[3 * classes + 1] = f32::NEG_INFINITY;
        x[4 * classes] = f32::NAN;
        x[5 * classes..].fill(f32::NEG_INFINITY);
        let (logits, targets) = (
            cpu(&x, &[6, classes]),
            cpu_of(&[0u8, 0, 0, 0, 255, 1], &[6]),
        );
        let (losses, dlogits) = (cpu(&[9.0; 6], &[6]), logits.ones_like().unwrap());
        let out = CrossEntropyOut {
            losses: &losses,
            dlogits: Some(&dlogits),
            weights: None,
        };
        let options = CrossEntropyOptions {
            ignore_index: Some(255),
            ..Default::default()
        };
        cross_entropy(&logits, &targets, out, &options, None).unwrap();
        let (losses, dlogits) = (
            losses.to_vec::<f32>().unwrap(),
            dlogits.to_vec::<f32>().unwrap(),
        );
        let rows: Vec<&[f32]> = dlogits.chunks(classes).collect();
        for row in [1, 2, 5] {
            assert!(
                losses[row].is_nan() && rows[row].iter().all(|d| d.is_nan()),
                "row {row}: {losses:?}"
            );
        }
        for row in [0, 3] {
            assert!(
                losses[row].is_finite() && rows[row].iter().all(|d| d.is_finite()),
                "row {row}: {losses:?}"
            );
        }
        assert_eq!(rows[3][1], 0.0, "a masked class has probability 0");
        assert!(losses[4] == 0.0 && rows[4].iter().all(|&d| d == 0.0));
    }
}

#[test]
fn large_logits_do_not_overflow() {
    let (logits, losses) = (
        cpu(&[1e4, 1e4 - 1.0, -1e38, 3e38, -3e38, 0.0], &[2, 3]),
        cpu(&[0.0; 2], &[2]),
    );
    let out = CrossEntropyOut {
        losses: &losses,
        dlogits: None,
        weights: None,
    };
    cross_entropy(
        &logits,
        &cpu_of(&[1i64, 0], &[2]),
        out,
        &Default::default(),
        None,
    )
    .unwrap();
    // ln(1 + e⁻¹) + 1 is below 2: exp, sum, ln and the addition round by 2⁻²⁴ of at most 2 each, 8
    // in all. And ln 1.
    assert_close(
        &losses.to_vec::<f32>().unwrap(),
        &[1.0 + (-1.0f64).exp().ln_1p(), 0.0],
        |_, _| 8.0 * EPSILON,
    );
}

#[test]
fn a_target_out_of_range_is_named_and_nothing_is_written() {
    let (logits, losses) = (cpu(&[0.5; 50], &[5, 10]), cpu(&[9.0; 5], &[5]));
    let out = CrossEntropyOut {
        losses: &losses,
        dlogits: Some(&logits),
        weights: None,
    };
    let targets = cpu_of(&[0i64, 1, -100, 12, 3], &[5]);
    let error = cross_entropy(&logits, &targets, out, &Default::default(), None)
        .unwrap_err()
        .to_string();
    let wanted =
        "cross_entropy: targets[3]: expected a class in 0..10 or ignore_index -100, got 12";
    assert!(
        error.contains(wanted) && error.contains("tests.rs"),
        "{error}"
    );
    assert_eq!(
        (
            losses.to_vec::<f32>().unwrap(),
            logits.to_vec::<f32>().unwrap()
        ),
        (vec![9.0; 5], vec![0.5; 50])
    );
    let options = CrossEntropyOptions {
        ignore_index: None,
        ..Default::default()
    };
    let targets = cpu_of(&[0i32, 1, -100, 2, 3], &[5]);
    let error = cross_entropy(&logits, &targets, out, &options, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("targets[2]: expected a class in 0..10, got -100"),
        "{error}"
    );
}

#[test]
fn operands_and_options_that_do_not_fit_are_named() {
    let (logits, targets, losses) = (
        cpu(&[0.5; 6], &[2, 3]),
        cpu_of(&[0u8, 1], &[2]),
        cpu(&[0.0; 2], &[2]),
    );
    let out = CrossEntropyOut {
        losses: &losses,
        dlogits: None,
        weights: None,
    };
    let message = |result: Result<()>| result.unwrap_err().to_string();
    let fine = CrossEntropyOptions::default();

    let text = message(cross_entropy(
        &cpu(&[], &[2, 0]),
        &targets,
        out,
        &fine,
        None,
    ));
    assert!(
        text.contains("logits f32[2, 0] on cpu: expected at least one class"),
        "{text}"
    );
    let text = message(cross_entropy(
        &logits,
        &cpu_of(&[0u8; 3], &[3]),
        out,
        &fine,
        None,
    ));
    assert!(
        text.contains("targets u8[3] on cpu: expected shape [2]"),
        "{text}"
    );
    let text = message(cross_entropy(
        &logits,
        &cpu(&[0.0; 2], &[2]),
        out,
        &fine,
        None,
    ));
    assert!(
        text.contains("targets f32[2] on cpu: expected dtype u8 or i32 or i64"),
        "{text}"
    );
    for label_smoothing in [-0.1, 1.1, f64::NAN] {
        let text = message(cross_entropy(
            &logits,
            &targets,
            out,
            &CrossEntropyOptions {
                label_smoothing,
                ..fine
            },
            None,
        ));
        assert!(
            text.contains("label_smoothing: expected 0 to 1, got"),
            "{text}"
        );
    }
    let short = cpu(&[1.0; 2], &[2]);
    let options = CrossEntropyOptions {
        class_weights: Some(&short),
        ..fine
    };
    let text = message(cross_entropy(&logits, &targets, out, &options, None));
    assert!(
        text.contains("class_weights f32[2] on cpu: expected shape [3]"),
        "{text}"
    );
    let arena = cpu(&[0.0; 9], &[9]);
    let overlapping =
        [0..6, 3..9].map(|range| arena.slice(range).unwrap().reshape(&[2, 3]).unwrap());
    let out = CrossEntropyOut {
        dlogits: Some(&overlapping[1]),
        ..out
    };
    let text = message(cross_entropy(&overlapping[0], &targets, out, &fine, None));
    assert!(text.contains("share memory"), "{text}");
}
