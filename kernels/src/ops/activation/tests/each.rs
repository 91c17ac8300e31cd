//! Tests of every activation: against formulas written by hand, PyTorch and finite differences.

use super::super::*;
use crate::DType;
use crate::ops::testing::{SIZES, assert_close, cpu, cpu_of, random_f32};

/// 2⁻²⁴, the ε of `math.rs`.
const EPSILON: f64 = 1.0 / (1 << 24) as f64;

const POINTS: [f64; 5] = [-6.0, -1.0, -0.25, 0.5, 3.0];
const EDGES: [f64; 5] = [f64::NEG_INFINITY, -1e30, 0.0, -0.0, f64::INFINITY];

/// The values at `POINTS` and the derivatives, by other programs, then both at `EDGES`. Those of
/// gelu at points are torch 2.11's in f64, the others were computed with 60 digits.
fn known(activation: Activation) -> [[f64; 5]; 4] {
    const MOST: f64 = f64::INFINITY;
    match activation {
        Activation::Relu => [
            [0.0, 0.0, 0.0, 0.5, 3.0],
            [0.0, 0.0, 0.0, 1.0, 1.0],
            [0.0, 0.0, 0.0, 0.0, MOST],
            [0.0, 0.0, 0.0, 0.0, 1.0],
        ],
        Activation::LeakyRelu => [
            [-0.06, -0.01, -0.0025, 0.5, 3.0],
            [0.01, 0.01, 0.01, 1.0, 1.0],
            [-MOST, -1e28, 0.0, 0.0, MOST],
            [0.01, 0.01, 0.01, 0.01, 1.0],
        ],
        Activation::ReluSquared => [
            [0.0, 0.0, 0.0, 0.25, 9.0],
            [0.0, 0.0, 0.0, 1.0, 6.0],
            [0.0, 0.0, 0.0, 0.0, MOST],
            [0.0, 0.0, 0.0, 0.0, MOST],
        ],
        Activation::Gelu => [
            [
                -5.919525869479969e-09,
                -0.15865525393145702,
                -0.10032341857926907,
                0.34573123063700656,
                2.99595030590511,
            ],
            [
                -3.5468709453902015e-08,
                -0.0833154705876863,
                0.30462664511636395,
                0.8674951246561629,
                1.011945647204184,
            ],
            [0.0, 0.0, 0.0, 0.0, MOST],
            [0.0, 0.0, 0.5, 0.5, 1.0],
        ],
        Activation::GeluTanh => [
            [
                -8.43964897967453e-11,
                -0.15880800939172324,
                -0.100324649298315,
                0.34571400982514394,
                2.996362607918227,
            ],
            [
                -7.709973930953696e-10,
                -0.08296408384578255,
                0.30464590484893955,
                0.8673699035346423,
                1.0115841666309697,
            ],
            [0.0, 0.0, 0.0, 0.0, MOST],
            [0.0, 0.0, 0.5, 0.5, 1.0],
        ],
        Activation::Silu => [
            [
                -0.014835738939808645,
                -0.2689414213699951,
                -0.10945587477855047,
                0.3112296656009273,
                2.8577223804672998,
            ],
            [
                -0.012326432591525513,
                0.07232948812851327,
                0.37628997842980233,
                0.7399611873026518,
                1.0881041060151697,
            ],
            [0.0, 0.0, 0.0, 0.0, MOST],
            [0.0, 0.0, 0.5, 0.5, 1.0],
        ],
    }
}

/// The activation at x, and its gradient for these dy.
fn both(activation: Activation, x: &Tensor, dy: &Tensor) -> [Tensor; 2] {
    let (y, dx) = (activate(x, activation).unwrap(), dy.empty_like().unwrap());
    activate_backward_into(&dx, dy, saved(activation, x, &y), activation).unwrap();
    [y, dx]
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
        let wide = [&x32, &dy32].map(|it| it.to_dtype(DType::F64).unwrap());
        let exact = both(activation, &wide[0], &wide[1]).map(|it| it.to_vec::<f64>().unwrap());
        let errors = |at: usize| (activation.about().errors)(x[at].into(), exact[0][at]);

        let [out, dx] = both(activation, &x32, &dy32);
        let [values, gradient] = [&out, &dx].map(|it| it.to_vec::<f32>().unwrap());
        assert_close(&values, &exact[0], |at, _| EPSILON * errors(at)[0]);
        assert_close(&gradient, &exact[1], |at, _| {
            EPSILON * errors(at)[1] * f64::from(dy[at].abs())
        });

        let saved = saved(activation, &x32, &out);
        activate_backward_into(&dy32, &dy32, saved, activation).unwrap();
        assert_eq!(dy32.to_vec::<f32>().unwrap(), gradient, "{activation:?}");
        activate_into(&x32, &x32, activation).unwrap();
        assert_eq!(x32.to_vec::<f32>().unwrap(), values, "{activation:?}");
    }
}

#[test]
fn values_and_derivatives_in_f64_are_known() {
    for activation in Activation::all() {
        let x = cpu_of(&POINTS, &[5]);
        let got = both(activation, &x, &x.ones_like().unwrap());
        for (got, known) in got.iter().zip(known(activation)) {
            for (got, known) in got.to_vec::<f64>().unwrap().iter().zip(known) {
                // 1 + tanh cancels, and 1 + erf in PyTorch: some 2⁻⁵³ of |x| <= 6.
                assert!(
                    (got - known).abs() < 6.0 * f64::EPSILON,
                    "{activation:?}: {got:e} is not {known:e}"
                );
            }
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

#[test]
fn infinities_give_limits_and_nan_stays_nan() {
    for activation in Activation::all() {
        let [_, _, values, slopes] = known(activation);
        let run = |x: &Tensor| {
            both(activation, x, &x.ones_like().unwrap()).map(|tensor| {
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

/// With `DDP_TEST_WRITE` it writes them.
#[test]
fn the_texts_of_kernels_are_those_of_the_list() {
    let (mut types, mut cases) = (String::new(), String::new());
    let listed = Activation::all().zip(TEXTS);
    for (activation, (name, text)) in listed {
        types += &format!("template <class T> struct {name} {{\n{text}\n}};\n");
        let number = activation.number();
        cases += &format!("    case {number}: {{ typedef {name}<T> F; __VA_ARGS__ }} break; \\\n");
    }
    let text = format!(
        "// Activations: their values, and their derivatives times dy. activation.rs has the list, \
         and its\n// tests write this file.\n#define let const float\n{types}#undef let\n\n\
         /// The statement with F as the activation of this number, exact enough for elements of \
         type T.\n#define WITH_ACTIVATION(NUMBER, T, F, ...) \\\n    switch (NUMBER) {{ \\\n    \
         case 0: {{ typedef Identity F; __VA_ARGS__ }} break; \\\n{cases}    }}\n"
    );
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/ops/activations.cuh");
    if std::env::var_os("DDP_TEST_WRITE").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    let found = std::fs::read_to_string(path).unwrap_or_default();
    assert!(found == text, "{path}: run this test with DDP_TEST_WRITE=1");
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
