//! Tests of every activation: against formulas written by hand, PyTorch and finite differences.

use super::super::*;
use crate::DType;
use crate::ops::testing::{SIZES, assert_close, cpu, cpu_of, random_f32};

/// 2⁻²⁴, the ε of `math.rs`.
const EPSILON: f64 = 1.0 / (1 << 24) as f64;

/// Its value at x and its derivative in f64. Those of gelu are checked below.
fn by_hand(activation: Activation, x: f64) -> (f64, f64) {
    let is_positive = x > 0.0;
    match activation {
        Activation::Relu if is_positive => (x, 1.0),
        Activation::Relu => (0.0, 0.0),
        Activation::LeakyRelu if is_positive => (x, 1.0),
        Activation::LeakyRelu => (0.01 * x, 0.01),
        Activation::ReluSquared if is_positive => (x * x, 2.0 * x),
        Activation::ReluSquared => (0.0, 0.0),
        Activation::Gelu => (Formulas::gelu_erf(x), x.gelu_erf_grad()),
        Activation::GeluTanh => (Formulas::gelu_tanh(x), x.gelu_tanh_grad()),
    }
}

/// How far f32 may be off at x, where the value is y: in ε, and in ε of the derivative times dy.
fn bounds(activation: Activation, x: f64, y: f64) -> (f64, f64) {
    match activation {
        Activation::Relu => (0.0, 0.0),
        // The slope and the product round.
        Activation::LeakyRelu => (2.01 * y.abs(), 0.0201),
        // The square, and the product with dy.
        Activation::ReluSquared => (y, 2.0 * x.abs()),
        // The bounds that the types state. Derivatives are below 1.2; the product rounds once more.
        Activation::Gelu => (4.0 * x.abs().max(1.0), 6.0 + 1.2),
        Activation::GeluTanh => (4.0 * x.abs().max(1.0), 8.0 + 1.2),
    }
}

/// What forward saves: `x` or its output.
fn saved<'a>(activation: Activation, x: &'a Tensor, y: &'a Tensor) -> &'a Tensor {
    if activation.keeps_input() { x } else { y }
}

#[test]
fn values_and_derivatives_are_within_their_bounds_for_every_size_apart_and_in_place() {
    for (size, activation) in SIZES
        .into_iter()
        .flat_map(|size| Activation::all().map(move |activation| (size, activation)))
    {
        let x: Vec<f32> = random_f32(size, 11).iter().map(|x| 3.0 * x).collect();
        let dy = random_f32(size, 12);
        let (x32, dy32) = (cpu(&x, &[size]), cpu(&dy, &[size]));
        let by_hand: Vec<(f64, f64)> = x.iter().map(|&x| by_hand(activation, x.into())).collect();
        let bounds = |at: usize| bounds(activation, x[at].into(), by_hand[at].0);

        let out = activate(&x32, activation).unwrap();
        let expected: Vec<f64> = by_hand.iter().map(|it| it.0).collect();
        let values = out.to_vec::<f32>().unwrap();
        assert_close(&values, &expected, |at, _| EPSILON * bounds(at).0);

        let dx = dy32.empty_like().unwrap();
        let saved = saved(activation, &x32, &out);
        activate_backward_into(&dx, &dy32, saved, activation).unwrap();
        let slopes = by_hand.iter().zip(&dy);
        let expected: Vec<f64> = slopes.map(|(it, &dy)| it.1 * f64::from(dy)).collect();
        let gradient = dx.to_vec::<f32>().unwrap();
        assert_close(&gradient, &expected, |at, _| {
            EPSILON * bounds(at).1 * f64::from(dy[at].abs())
        });

        activate_backward_into(&dy32, &dy32, saved, activation).unwrap();
        assert_eq!(dy32.to_vec::<f32>().unwrap(), gradient, "{activation:?}");
        activate_into(&x32, &x32, activation).unwrap();
        assert_eq!(x32.to_vec::<f32>().unwrap(), values, "{activation:?}");
    }
}

#[test]
fn gelu_in_f64_agrees_with_pytorch() {
    // torch 2.11, float64: F.gelu(torch.tensor([-6, -1, -0.25, 0.5, 3]), approximate=…)
    let x = [-6.0, -1.0, -0.25, 0.5, 3.0];
    let known = [
        (
            Activation::GeluTanh,
            [
                -8.43964897967453e-11,
                -0.15880800939172324,
                -0.100324649298315,
                0.34571400982514394,
                2.996362607918227,
            ],
        ),
        (
            Activation::Gelu,
            [
                -5.919525869479969e-09,
                -0.15865525393145702,
                -0.10032341857926907,
                0.34573123063700656,
                2.99595030590511,
            ],
        ),
    ];
    for (activation, known) in known {
        let got = activate(&cpu_of(&x, &[5]), activation).unwrap();
        for (got, known) in got.to_vec::<f64>().unwrap().iter().zip(known) {
            // PyTorch's f64 cancels in 1 + tanh and 1 + erf: some 2⁻⁵³ of |x| <= 6.
            assert!(
                (got - known).abs() < 6.0 * f64::EPSILON,
                "{activation:?}: {got:e} is not {known:e}"
            );
        }
    }
}

#[test]
fn derivatives_are_those_of_finite_differences() {
    const STEP: f64 = 1e-5;
    let x = [-6.0, -1.0, -0.25, -1e-3, 1e-3, 0.5, 3.0];
    for activation in Activation::all() {
        let at = |shift: f64| {
            let x: Vec<f64> = x.iter().map(|x| x + shift).collect();
            activate(&cpu_of(&x, &[7]), activation).unwrap()
        };
        let dx = cpu_of(&[1.0f64; 7], &[7]);
        let (input, output) = (cpu_of(&x, &[7]), at(0.0));
        let saved = saved(activation, &input, &output);
        activate_backward_into(&dx, &dx, saved, activation).unwrap();
        let [dx, above, below] =
            [dx, at(STEP), at(-STEP)].map(|tensor| tensor.to_vec::<f64>().unwrap());
        for ((dx, above), below) in dx.iter().zip(above).zip(below) {
            // The central difference leaves h²/6 |f‴| < 1e-10 and rounding 9 · 2⁻⁵³ / h < 1e-10.
            let slope = (above - below) / (2.0 * STEP);
            assert!(
                (dx - slope).abs() < 2e-10,
                "{activation:?}: {dx} is not {slope}"
            );
        }
    }
}

/// At these: the values, and the derivatives.
const EDGES: [f64; 5] = [f64::NEG_INFINITY, -1e30, 0.0, -0.0, f64::INFINITY];

fn at_edges(activation: Activation) -> ([f64; 5], [f64; 5]) {
    const MOST: f64 = f64::INFINITY;
    match activation {
        Activation::Relu => ([0.0, 0.0, 0.0, 0.0, MOST], [0.0, 0.0, 0.0, 0.0, 1.0]),
        Activation::LeakyRelu => (
            [-MOST, -1e28, 0.0, 0.0, MOST],
            [0.01, 0.01, 0.01, 0.01, 1.0],
        ),
        Activation::ReluSquared => ([0.0, 0.0, 0.0, 0.0, MOST], [0.0, 0.0, 0.0, 0.0, MOST]),
        Activation::Gelu | Activation::GeluTanh => {
            ([0.0, 0.0, 0.0, 0.0, MOST], [0.0, 0.0, 0.5, 0.5, 1.0])
        }
    }
}

#[test]
fn infinities_give_limits_and_nan_stays_nan() {
    for activation in Activation::all() {
        let (values, slopes) = at_edges(activation);
        let run = |x: &Tensor| {
            let (y, dx) = (activate(x, activation).unwrap(), x.ones_like().unwrap());
            activate_backward_into(&dx, &dx, saved(activation, x, &y), activation).unwrap();
            [y, dx].map(|tensor| {
                tensor
                    .to_dtype(DType::F64)
                    .unwrap()
                    .to_vec::<f64>()
                    .unwrap()
            })
        };
        let [y, dx] = run(&cpu_of(&EDGES, &[5]));
        assert_eq!(
            (&y[..], &dx[..]),
            (&values[..], &slopes[..]),
            "{activation:?}"
        );
        let [y, dx] = run(&cpu(&EDGES.map(|edge| edge as f32), &[5]));
        let rounded = |x: [f64; 5]| x.map(|x| f64::from(x as f32));
        assert_close(
            &dx.iter().map(|&x| x as f32).collect::<Vec<_>>(),
            &rounded(slopes),
            |_, _| 0.0,
        );
        assert_close(
            &y.iter().map(|&y| y as f32).collect::<Vec<_>>(),
            &rounded(values),
            |_, y| 2.01 * EPSILON * y.abs(),
        );
        for nan in [cpu(&[f32::NAN], &[1]), cpu_of(&[f64::NAN], &[1])] {
            let [y, dx] = run(&nan);
            // The derivative of what is positive or not compares, and so NaN is not.
            let is_nan = activation.keeps_input();
            assert!(y[0].is_nan() && dx[0].is_nan() == is_nan, "{activation:?}");
        }
    }
}

#[test]
fn kernels_know_activations_by_the_same_numbers() {
    let lines = include_str!("../../math.cuh").lines();
    let cases = lines.filter_map(|line| line.trim().strip_prefix("case "));
    let in_kernels: Vec<(u32, &str)> = cases
        .filter_map(|case| case.split_once(": { typedef "))
        .map(|(number, rest)| {
            (
                number.parse().unwrap(),
                rest.split([' ', '<']).next().unwrap(),
            )
        })
        .collect();
    let names: Vec<String> = Activation::all().map(|it| format!("{it:?}")).collect();
    let numbers = Activation::all()
        .map(Activation::number)
        .zip(names.iter().map(|it| &**it));
    let here: Vec<(u32, &str)> = [(0, "Identity")].into_iter().chain(numbers).collect();
    assert_eq!(in_kernels, here);
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let (x, out) = (cpu(&[1.0, 2.0], &[2]).named("h1"), cpu(&[0.0; 3], &[3]));
    let error = activate_into(&out, &x, Activation::Relu)
        .unwrap_err()
        .to_string();
    let expected = r#"activate: x "h1" f32[2] on cpu: expected shape [3], as out has"#;
    assert!(error.contains(expected), "{error}");
    let half = x.to_dtype(DType::F16).unwrap();
    let error = activate(&half, Activation::Gelu).unwrap_err().to_string();
    let expected = "there is no version for f16 on cpu";
    assert!(error.contains(expected), "{error}");
    let error = activate_backward_into(&out, &x, &x, Activation::Relu);
    let error = error.unwrap_err().to_string();
    let expected = r#"activate_backward: dy "h1" f32[2] on cpu: expected shape [3], as dx has"#;
    assert!(error.contains(expected), "{error}");
}

#[test]
fn an_output_that_overlaps_its_input_is_refused_with_both_names() {
    let whole = cpu(&[1.0, 2.0, 3.0], &[3]);
    let (a, b) = (whole.slice(0..2).unwrap(), whole.slice(1..3).unwrap());
    let error = activate_into(&a, &b, Activation::Relu)
        .unwrap_err()
        .to_string();
    let expected = "activate: out f32[2] on cpu and x f32[2] on cpu share memory";
    assert!(error.contains(expected), "{error}");
}
