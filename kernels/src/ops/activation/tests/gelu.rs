//! Tests of gelu.

use super::super::*;
use crate::DType;
use crate::ops::testing::{SIZES, assert_close, cpu, cpu_of, random_f32};

const KINDS: [Gelu; 2] = [Gelu::Tanh, Gelu::Erf];
/// 2⁻²⁴, the ε of `math.rs`.
const EPSILON: f64 = 1.0 / (1 << 24) as f64;

fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

#[test]
fn gelu_and_its_derivative_are_within_their_bounds_for_every_size_apart_and_in_place() {
    for (size, kind) in SIZES
        .into_iter()
        .flat_map(|size| KINDS.map(|kind| (size, kind)))
    {
        let x: Vec<f32> = random_f32(size, 11).iter().map(|x| 3.0 * x).collect();
        let dy = random_f32(size, 12);
        let (x32, dy32) = (cpu(&x, &[size]), cpu(&dy, &[size]));
        let (x64, dy64) = (
            cpu_of(&widened(&x), &[size]),
            cpu_of(&widened(&dy), &[size]),
        );

        let out = gelu(&x32, kind).unwrap().to_vec::<f32>().unwrap();
        let reference = gelu(&x64, kind).unwrap().to_vec::<f64>().unwrap();
        // The bound that the enum's comments state; math.rs derives it.
        assert_close(&out, &reference, |index, _| {
            4.0 * EPSILON * f64::from(x[index].abs().max(1.0))
        });

        gelu_backward_into(&dy64, &dy64, &x64, kind).unwrap();
        let dx32 = dy32.empty_like().unwrap();
        gelu_backward_into(&dx32, &dy32, &x32, kind).unwrap();
        let dx = dx32.to_vec::<f32>().unwrap();
        // The derivative is off by at most 8ε and below 1.2; the product with dy rounds once more.
        assert_close(&dx, &dy64.to_vec::<f64>().unwrap(), |index, _| {
            (8.0 + 1.2) * EPSILON * f64::from(dy[index].abs())
        });

        gelu_backward_into(&dy32, &dy32, &x32, kind).unwrap();
        assert_eq!(dy32.to_vec::<f32>().unwrap(), dx);
        gelu_into(&x32, &x32, kind).unwrap();
        assert_eq!(x32.to_vec::<f32>().unwrap(), out);
    }
}

#[test]
fn the_f64_version_agrees_with_pytorch_and_its_derivative_with_finite_differences() {
    // torch 2.11, float64: F.gelu(torch.tensor([-6, -1, -0.25, 0.5, 3]), approximate=…)
    let x = [-6.0, -1.0, -0.25, 0.5, 3.0];
    let known = [
        (
            Gelu::Tanh,
            [
                -8.43964897967453e-11,
                -0.15880800939172324,
                -0.100324649298315,
                0.34571400982514394,
                2.996362607918227,
            ],
        ),
        (
            Gelu::Erf,
            [
                -5.919525869479969e-09,
                -0.15865525393145702,
                -0.10032341857926907,
                0.34573123063700656,
                2.99595030590511,
            ],
        ),
    ];
    for (kind, known) in known {
        let at = |shift: f64| {
            let x: Vec<f64> = x.iter().map(|x| x + shift).collect();
            gelu(&cpu_of(&x, &[5]), kind)
                .unwrap()
                .to_vec::<f64>()
                .unwrap()
        };
        for (got, known) in at(0.0).iter().zip(known) {
            // PyTorch's f64 cancels in 1 + tanh and 1 + erf: some 2⁻⁵³ of |x| <= 6.
            assert!(
                (got - known).abs() < 6.0 * f64::EPSILON,
                "{kind:?}: {got:e} is not {known:e}"
            );
        }
        let dx = cpu_of(&[1.0f64; 5], &[5]);
        gelu_backward_into(&dx, &dx, &cpu_of(&x, &[5]), kind).unwrap();
        const STEP: f64 = 1e-5;
        for ((dx, above), below) in dx
            .to_vec::<f64>()
            .unwrap()
            .iter()
            .zip(at(STEP))
            .zip(at(-STEP))
        {
            // The central difference leaves h²/6 |f‴| < 1e-10 and rounding 6 · 2⁻⁵³ / h < 1e-10.
            let slope = (above - below) / (2.0 * STEP);
            assert!((dx - slope).abs() < 2e-10, "{kind:?}: {dx} is not {slope}");
        }
    }
}

#[test]
fn infinities_give_limits_and_nan_stays_nan() {
    let edges = [f64::NEG_INFINITY, -1e30, 0.0, 1e30, f64::INFINITY, f64::NAN];
    let edges32 = edges.map(|edge| edge as f32);
    for kind in KINDS {
        let out = gelu(&cpu_of(&edges, &[6]), kind)
            .unwrap()
            .to_vec::<f64>()
            .unwrap();
        let out32 = gelu(&cpu(&edges32, &[6]), kind)
            .unwrap()
            .to_vec::<f32>()
            .unwrap();
        assert_eq!(
            (&out[..5], &out32[..5]),
            (
                &[0.0, 0.0, 0.0, 1e30, f64::INFINITY][..],
                &[0.0, 0.0, 0.0, 1e30, f32::INFINITY][..]
            )
        );
        let (dx, dx32) = (cpu_of(&[1.0f64; 6], &[6]), cpu(&[1.0; 6], &[6]));
        gelu_backward_into(&dx, &dx, &cpu_of(&edges, &[6]), kind).unwrap();
        gelu_backward_into(&dx32, &dx32, &cpu(&edges32, &[6]), kind).unwrap();
        let (dx, dx32) = (dx.to_vec::<f64>().unwrap(), dx32.to_vec::<f32>().unwrap());
        assert_eq!(
            (&dx[..5], &dx32[..5]),
            (
                &[0.0, 0.0, 0.5, 1.0, 1.0][..],
                &[0.0, 0.0, 0.5, 1.0, 1.0][..]
            )
        );
        assert!(out[5].is_nan() && out32[5].is_nan() && dx[5].is_nan() && dx32[5].is_nan());
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let (x, out) = (cpu(&[1.0, 2.0], &[2]), cpu(&[0.0; 3], &[3]));
    let error = gelu_into(&out, &x, Gelu::Erf).unwrap_err().to_string();
    assert!(
        error.contains("gelu: x f32[2] on cpu: expected shape [3], as out has"),
        "{error}"
    );
    let error = gelu(&x.to_dtype(DType::F16).unwrap(), Gelu::Tanh)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("there is no version for f16 on cpu"),
        "{error}"
    );
    let error = gelu_backward_into(&x, &cpu(&[0.0; 2], &[2]), &x, Gelu::Erf)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("gelu_backward: dx f32[2] on cpu and x f32[2] on cpu share memory"),
        "{error}"
    );
}
