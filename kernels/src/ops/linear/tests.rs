//! linear against f64, against the separate operations, and against finite differences.

use super::*;
use crate::DType;
use crate::ops::testing::{assert_close, cpu, random_f32};
use crate::ops::{activate, activate_backward_into};

/// Batch, inputs, outputs: a training step's, odd ones, one, and empty.
const SIZES: [[usize; 3]; 7] = [
    [128, 100, 70],
    [33, 65, 129],
    [1, 5, 3],
    [5, 1, 1],
    [0, 4, 3],
    [200, 3, 10],
    [4, 0, 3],
];

/// None and every activation.
fn activations() -> impl Iterator<Item = Option<Activation>> {
    [None].into_iter().chain(Activation::all().map(Some))
}

/// x·Wᵀ + b in f64, with the sum of the magnitudes that were added for each element.
fn pre_activations(
    x: &[f32],
    w: &[f32],
    bias: &[f32],
    [rows, inputs, outputs]: [usize; 3],
) -> (Vec<f64>, Vec<f64>) {
    let mut sums = Vec::new();
    let mut magnitudes = Vec::new();
    for row in 0..rows {
        for out in 0..outputs {
            let terms = (0..inputs)
                .map(|i| f64::from(x[row * inputs + i]) * f64::from(w[out * inputs + i]));
            sums.push(f64::from(bias[out]) + terms.clone().sum::<f64>());
            magnitudes.push(f64::from(bias[out]).abs() + terms.map(f64::abs).sum::<f64>());
        }
    }
    (sums, magnitudes)
}

#[test]
fn forward_agrees_with_f64_and_its_activation_with_the_separate_operation() {
    for (seed, sizes) in SIZES.into_iter().enumerate() {
        let [rows, inputs, outputs] = sizes;
        let seed = 10 * seed as u64;
        let (x, w) = (
            random_f32(rows * inputs, seed),
            random_f32(outputs * inputs, seed + 1),
        );
        let bias = random_f32(outputs, seed + 2);
        let (reference, magnitudes) = pre_activations(&x, &w, &bias, sizes);
        let (x, w, bias) = (
            cpu(&x, &[rows, inputs]),
            cpu(&w, &[outputs, inputs]),
            cpu(&bias, &[outputs]),
        );
        for activation in activations() {
            let y = x.new_empty(&[rows, outputs]).unwrap();
            let z = y.empty_like().unwrap();
            linear_into(&y, &x, &w, Some(&bias), activation, Some(&z)).unwrap();
            // One rounding a product, one a sum, one for the bias.
            let bound =
                |index: usize, _: f64| (inputs + 2) as f64 * 2f64.powi(-24) * magnitudes[index];
            assert_close(&z.to_vec::<f32>().unwrap(), &reference, bound);
            let separate = match activation {
                None => z.clone(),
                Some(activation) => activate(&z, activation).unwrap(),
            };
            assert_eq!(
                y.to_vec::<f32>().unwrap(),
                separate.to_vec::<f32>().unwrap(),
                "{activation:?} {sizes:?}"
            );
        }
    }
}

#[test]
fn the_gradient_below_is_dy_times_w_times_the_derivative_there() {
    for (seed, [rows, inputs, outputs]) in SIZES.into_iter().enumerate() {
        let seed = 100 + 10 * seed as u64;
        let (dy, w) = (
            random_f32(rows * outputs, seed),
            random_f32(outputs * inputs, seed + 1),
        );
        let saved = cpu(&random_f32(rows * inputs, seed + 2), &[rows, inputs]);
        let (dy, w) = (cpu(&dy, &[rows, outputs]), cpu(&w, &[outputs, inputs]));
        let plain = saved.empty_like().unwrap();
        linear_backward_input_into(&plain, &dy, &w, None).unwrap();
        let zero = saved.zeros_like().unwrap();
        let matmul = crate::ops::addmm(&zero, &dy, &w, 1.0, 0.0).unwrap();
        assert_eq!(
            plain.to_vec::<f32>().unwrap(),
            matmul.to_vec::<f32>().unwrap()
        );
        for activation in Activation::all() {
            let below = Some((activation, &saved));
            let folded = saved.empty_like().unwrap();
            linear_backward_input_into(&folded, &dy, &w, below).unwrap();
            let separate = saved.empty_like().unwrap();
            activate_backward_into(&separate, &plain, &saved, activation).unwrap();
            assert_eq!(
                folded.to_vec::<f32>().unwrap(),
                separate.to_vec::<f32>().unwrap(),
                "{activation:?}"
            );
            let row_sums = cpu(
                &vec![9.0; row_sums_of(&folded).iter().product()],
                &row_sums_of(&folded),
            );
            linear_backward_input_summed_into(&folded, Some(&row_sums), &dy, &w, below).unwrap();
            for accumulate in [false, true] {
                let [db, sum] = [0, 1].map(|_| cpu(&vec![3.5; inputs], &[inputs]));
                add_row_sums_into(&db, &row_sums, accumulate).unwrap();
                crate::ops::column_sum_into(&sum, &folded, accumulate).unwrap();
                assert_eq!(
                    db.to_vec::<f32>().unwrap(),
                    sum.to_vec::<f32>().unwrap(),
                    "{activation:?}"
                );
            }
        }
    }
}

#[test]
fn weight_and_bias_gradients_agree_with_f64_and_accumulate() {
    for (seed, [rows, inputs, outputs]) in SIZES.into_iter().enumerate() {
        let seed = 200 + 10 * seed as u64;
        let (dy, x) = (
            random_f32(rows * outputs, seed),
            random_f32(rows * inputs, seed + 1),
        );
        let at = |v: &[f32], index: usize| f64::from(v[index]);
        let (mut dw, mut dw_magnitudes) =
            (vec![0.0; outputs * inputs], vec![0.0; outputs * inputs]);
        let (mut db, mut db_magnitudes) = (vec![0.0; outputs], vec![0.0; outputs]);
        for row in 0..rows {
            for out in 0..outputs {
                let gradient = at(&dy, row * outputs + out);
                db[out] += gradient;
                db_magnitudes[out] += gradient.abs();
                for i in 0..inputs {
                    let term = gradient * at(&x, row * inputs + i);
                    dw[out * inputs + i] += term;
                    dw_magnitudes[out * inputs + i] += term.abs();
                }
            }
        }
        let (dy, x) = (cpu(&dy, &[rows, outputs]), cpu(&x, &[rows, inputs]));
        let got_dw = x.new_full(&[outputs, inputs], f64::NAN).unwrap();
        let got_db = x.new_full(&[outputs], f64::NAN).unwrap();
        for times in [1.0, 2.0] {
            linear_backward_weight_into(&got_dw, Some(&got_db), &dy, &x, times > 1.0).unwrap();
            let scaled = |values: &[f64]| values.iter().map(|v| times * v).collect::<Vec<_>>();
            // One rounding a product and a sum, and one more for each time it is added to what is
            // there.
            let bound =
                |magnitude: f64| (rows as f64 + 2.0 * times) * 2f64.powi(-24) * times * magnitude;
            assert_close(&got_dw.to_vec::<f32>().unwrap(), &scaled(&dw), |i, _| {
                bound(dw_magnitudes[i])
            });
            assert_close(&got_db.to_vec::<f32>().unwrap(), &scaled(&db), |i, _| {
                bound(db_magnitudes[i])
            });
        }
    }
}

#[test]
fn the_bits_do_not_depend_on_the_number_of_threads() {
    let _alone = crate::ops::testing::alone_with_the_pool();
    let before = threads::count();
    let (rows, inputs, outputs) = (256, 300, 200);
    let x = cpu(&random_f32(rows * inputs, 1), &[rows, inputs]);
    let dy = cpu(&random_f32(rows * outputs, 2), &[rows, outputs]);
    let w = cpu(&random_f32(outputs * inputs, 3), &[outputs, inputs]);
    let bits = |count: usize| {
        threads::set_count(count).unwrap();
        let (y, dx) = (dy.empty_like().unwrap(), x.empty_like().unwrap());
        let (dw, db) = (w.empty_like().unwrap(), x.new_empty(&[outputs]).unwrap());
        linear_into(&y, &x, &w, None, Some(Activation::Gelu), None).unwrap();
        linear_backward_input_into(&dx, &dy, &w, Some((Activation::Relu, &x))).unwrap();
        linear_backward_weight_into(&dw, Some(&db), &dy, &x, false).unwrap();
        [y, dx, dw, db].map(|t| {
            t.to_vec::<f32>()
                .unwrap()
                .into_iter()
                .map(f32::to_bits)
                .collect::<Vec<_>>()
        })
    };
    let alone = bits(1);
    for count in [2, 3, 5] {
        assert!(bits(count) == alone, "{count} threads");
    }
    threads::set_count(before).unwrap();
}

#[test]
fn derivatives_agree_with_finite_differences_in_f64() {
    let mut random = crate::Random::new(9);
    let mut randn = |shape: &[usize]| {
        Tensor::randn(shape, DType::F64, crate::Device::Cpu, &mut random).unwrap()
    };
    let (x, w, bias, above) = (randn(&[3, 4]), randn(&[5, 4]), randn(&[5]), randn(&[3, 5]));
    // loss = Σ above ⊙ gelu(x·Wᵀ + b)
    let loss = |x: &Tensor, w: &Tensor, bias: &Tensor| -> f64 {
        let y = above.empty_like().unwrap();
        linear_into(&y, x, w, Some(bias), Some(Activation::Gelu), None).unwrap();
        let (y, above) = (y.to_vec::<f64>().unwrap(), above.to_vec::<f64>().unwrap());
        y.iter().zip(&above).map(|(y, above)| y * above).sum()
    };
    let (y, z, dz) = (
        above.empty_like().unwrap(),
        above.empty_like().unwrap(),
        above.empty_like().unwrap(),
    );
    linear_into(&y, &x, &w, Some(&bias), Some(Activation::Gelu), Some(&z)).unwrap();
    activate_backward_into(&dz, &above, &z, Activation::Gelu).unwrap();
    let (dx, dw, db) = (
        x.empty_like().unwrap(),
        w.empty_like().unwrap(),
        bias.empty_like().unwrap(),
    );
    linear_backward_input_into(&dx, &dz, &w, None).unwrap();
    linear_backward_weight_into(&dw, Some(&db), &dz, &x, false).unwrap();
    for (parameter, gradient) in [(&x, &dx), (&w, &dw), (&bias, &db)] {
        let gradient = gradient.to_vec::<f64>().unwrap();
        for (index, &gradient) in gradient.iter().enumerate() {
            let step = 1e-5;
            let moved = |by: f64| {
                parameter
                    .with_slice_mut::<f64, _>(|values| values[index] += by)
                    .unwrap();
                loss(&x, &w, &bias)
            };
            let difference = (moved(step) - moved(-2.0 * step)) / (2.0 * step);
            moved(step);
            // Central differences err by step²·f‴/6 (below 1e-9 here) and by 1e-16·|loss|/step
            // (below 1e-9).
            assert!(
                (difference - gradient).abs() < 1e-8,
                "{difference} against {gradient}"
            );
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let (x, w) = (
        cpu(&[0.0; 6], &[2, 3]),
        cpu(&[0.0; 8], &[4, 2]).named("fc1.weight"),
    );
    let y = x.new_empty(&[2, 4]).unwrap();
    let error = linear_into(&y, &x, &w, None, Some(Activation::Relu), None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(r#"weight "fc1.weight" f32[4, 2] on cpu: expected shape [outputs, 3], since x has 3 columns"#)
            && error.contains("weights are [outputs, inputs]"),
        "{error}"
    );
    let error = linear_backward_weight_into(&w, None, &y, &x.slice(0..1).unwrap(), false)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("x f32[1, 3] on cpu: expected shape [2, inputs], since dy has 2 rows"),
        "{error}"
    );
    let error = linear_backward_input_into(&x, &y, &w, None)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("dx f32[2, 3] on cpu: expected shape [2, 2]"),
        "{error}"
    );
}
