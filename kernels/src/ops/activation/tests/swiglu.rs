//! Tests of swiglu.

use super::super::*;
use crate::Element;
use crate::ops::float::Float;
use crate::ops::testing::{alone_with_the_pool, assert_close, cpu, cpu_of, random_f32};

/// 2⁻²⁴, the ε of `math.rs`.
const EPSILON: f64 = 1.0 / (1 << 24) as f64;

const SHAPES: [[usize; 2]; 7] = [[0, 3], [3, 0], [1, 1], [5, 1], [7, 33], [3, 300], [401, 64]];

/// gate and up of each element of the result.
fn pairs<T: Float>(x: &[T], columns: usize) -> Vec<(T, T)> {
    let rows = x.chunks(2 * columns.max(1));
    let pairs =
        rows.flat_map(|row| (0..columns).map(|column| (row[column], row[columns + column])));
    pairs.collect()
}

#[test]
fn values_and_gradients_are_within_their_bounds_for_every_shape_apart_and_in_place() {
    for [rows, columns] in SHAPES {
        let x: Vec<f32> = random_f32(2 * rows * columns, 23)
            .iter()
            .map(|x| 3.0 * x)
            .collect();
        let dout = random_f32(rows * columns, 24);
        let (x32, dout32) = (cpu(&x, &[rows, 2 * columns]), cpu(&dout, &[rows, columns]));
        let pairs: Vec<(f64, f64)> = (pairs(&x, columns).into_iter())
            .map(|(gate, up)| (gate.into(), up.into()))
            .collect();

        let out = dout32.empty_like().unwrap();
        swiglu_into(&out, &x32).unwrap();
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let expected: Vec<f64> = pairs.iter().map(|&(gate, up)| silu(gate) * up).collect();
        // silu is within 6ε, and the product rounds once.
        assert_close(&out.to_vec().unwrap(), &expected, |_, out| {
            7.01 * EPSILON * out.abs()
        });

        let dx = x32.empty_like().unwrap();
        swiglu_backward_into(&dx, &dout32, &x32).unwrap();
        let (mut expected, mut bounds) = (vec![], vec![]);
        for (pairs, dout) in (pairs.chunks(columns.max(1))).zip(dout.chunks(columns.max(1))) {
            let slope = |x: f64| (1.0 + x * (1.0 - 1.0 / (1.0 + (-x).exp()))) / (1.0 + (-x).exp());
            for (&(gate, up), &dout) in pairs.iter().zip(dout) {
                let scale = f64::from(dout) * up;
                expected.push(scale * slope(gate));
                // The derivative is within 7ε and below 1.1; two products round.
                bounds.push((7.0 + 2.0 * 1.1) * EPSILON * scale.abs());
            }
            for (&(gate, _), &dout) in pairs.iter().zip(dout) {
                let gradient = f64::from(dout) * silu(gate);
                expected.push(gradient);
                bounds.push(7.01 * EPSILON * gradient.abs());
            }
        }
        let apart: Vec<f32> = dx.to_vec().unwrap();
        assert_close(&apart, &expected, |index, _| bounds[index]);
        swiglu_backward_into(&x32, &dout32, &x32).unwrap();
        assert_eq!(x32.to_vec::<f32>().unwrap(), apart);
    }
}

#[test]
fn gradients_are_those_of_finite_differences() {
    const STEP: f64 = 1e-5;
    let x = [-6.0, -0.5, 0.0, 2.0, 1.5, -0.75, 0.3, 4.0];
    let dout = [0.5, -1.0, 2.0, 1.5];
    let loss = |x: &[f64]| {
        let out = cpu_of(&[0.0f64; 4], &[2, 2]);
        swiglu_into(&out, &cpu_of(x, &[2, 4])).unwrap();
        let out = out.to_vec::<f64>().unwrap();
        out.iter()
            .zip(dout)
            .map(|(out, dout)| out * dout)
            .sum::<f64>()
    };
    let dx = cpu_of(&x, &[2, 4]);
    swiglu_backward_into(&dx, &cpu_of(&dout, &[2, 2]), &dx).unwrap();
    for (index, dx) in dx.to_vec::<f64>().unwrap().into_iter().enumerate() {
        let [above, below] = [STEP, -STEP].map(|step| {
            let mut x = x;
            x[index] += step;
            loss(&x)
        });
        let slope = (above - below) / (2.0 * STEP);
        // h²/6 of a third derivative below 8, and rounding 10 · 2⁻⁵³ / h.
        assert!(
            (dx - slope).abs() < 3e-10,
            "element {index}: {dx} is not {slope}"
        );
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let _alone = alone_with_the_pool();
    let x = cpu(&random_f32(2 * 401 * 90, 25), &[401, 180]);
    let results = [1, 2, 3].map(|threads| {
        threads::set_count(threads).unwrap();
        let out = cpu(&vec![0.0; 401 * 90], &[401, 90]);
        swiglu_into(&out, &x).unwrap();
        let dx = x.empty_like().unwrap();
        swiglu_backward_into(&dx, &out, &x).unwrap();
        [out, dx].map(|tensor| tensor.to_vec::<f32>().unwrap())
    });
    assert!(results[0] == results[1] && results[0] == results[2]);
}

/// gate, and the value and the gradients of gate and up where up is 2 and `dout` is 3.
const EDGES: [(f64, [f64; 3]); 5] = [
    (f64::NEG_INFINITY, [0.0, 0.0, 0.0]),
    (-1e30, [0.0, 0.0, 0.0]),
    (0.0, [0.0, 3.0, 0.0]),
    (1e30, [2e30, 6.0, 3.0 * 1e30]),
    (f64::INFINITY, [f64::INFINITY, 6.0, f64::INFINITY]),
];

#[test]
fn infinities_give_limits_and_nan_stays_nan() {
    fn run<T: Element>(gate: f64) -> [f64; 3] {
        let x = cpu_of(&[gate, 2.0].map(T::from_f64), &[1, 2]);
        let (out, dout) = (
            cpu_of(&[T::from_f64(9.0)], &[1, 1]),
            cpu_of(&[T::from_f64(3.0)], &[1, 1]),
        );
        swiglu_into(&out, &x).unwrap();
        swiglu_backward_into(&x, &dout, &x).unwrap();
        let [out, x] = [out, x].map(|tensor| tensor.to_vec::<T>().unwrap());
        [out[0], x[0], x[1]].map(T::to_f64)
    }
    for (gate, expected) in EDGES {
        assert_eq!(run::<f64>(gate), expected, "{gate}");
        let rounded = expected.map(|it| f64::from(it as f32));
        let close =
            |(got, expected): (f64, f64)| got == expected || (got / expected - 1.0).abs() < 1e-6;
        assert!(
            run::<f32>(gate).into_iter().zip(rounded).all(close),
            "{gate} in f32"
        );
    }
    for [out, gate, up] in [run::<f32>(f64::NAN), run::<f64>(f64::NAN)] {
        assert!(out.is_nan() && gate.is_nan() && up.is_nan());
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let (x, out) = (cpu(&[0.0; 6], &[2, 3]), cpu(&[0.0; 4], &[2, 2]));
    let error = swiglu_into(&out, &x).unwrap_err().to_string();
    let expected =
        "swiglu: x f32[2, 3] on cpu: expected shape [2, 4], that is gate and up side by side";
    assert!(error.contains(expected), "{error}");
}
