//! linear's backward: the gradients of its input and of its parameters.

use ddp_kernels::ops::{self, Activation, F32Math, with_f32_math};
use ddp_kernels::{DType, Device, Tensor};

use super::{
    KINDS, SHAPES, activation_bounds, activations, added_bound, assert_within, normals, placed,
    reference, sliced, slope, stored_bound, sum_bound, transpose, values,
};
use crate::tiles::constant;
use crate::{assert_same_bits, devices};

/// The derivative of the activation below, times `dy`.
fn derive(activation: Option<Activation>, dy: &Tensor, saved: &Tensor) {
    if let Some(activation) = activation {
        ops::activate_backward_into(dy, dy, saved, activation).unwrap();
    }
}

/// `run` writes the gradient and the sums of its blocks of rows: the gradient is `expected`, and
/// the sums make the gradient of the bias, new and added to.
fn check_row_sums(expected: &Tensor, run: impl Fn(&Tensor, &Tensor)) {
    let (device, [m, n]) = (expected.device(), [0, 1].map(|at| expected.shape()[at]));
    let dx = Tensor::full(&[m, n], 9.0, expected.dtype(), device).unwrap();
    let row_sums = Tensor::full(&ops::row_sums_of(expected), 9.0, DType::F32, device).unwrap();
    run(&dx, &row_sums);
    let on_cpu = |tensor: &Tensor| tensor.to(Device::Cpu).unwrap();
    assert_same_bits(&dx, &on_cpu(expected), "the gradient with sums");
    for device in [device, Device::Cpu] {
        let x = dx.to((device, DType::F32)).unwrap();
        let again = Tensor::full(row_sums.shape(), 8.0, DType::F32, device).unwrap();
        ops::row_block_sums_into(&again, &x).unwrap();
        assert_same_bits(&again, &on_cpu(&row_sums), "sums of blocks of rows");
    }
    for accumulate in [false, true] {
        let [got, expected] = [0, 1].map(|_| Tensor::full(&[n], 3.5, DType::F32, device).unwrap());
        ops::add_row_sums_into(&got, &row_sums, accumulate).unwrap();
        ops::column_sum_into(&expected, &dx, accumulate).unwrap();
        assert_same_bits(&got, &on_cpu(&expected), "the gradient of the bias");
    }
}

fn check_backward_input(
    mnk: [usize; 3],
    kind: (DType, F32Math),
    activation: Option<Activation>,
    skip: usize,
    device: Device,
) {
    let ([m, n, k], (dtype, math)) = (mnk, kind);
    let dy = placed(&normals(&[m, k], dtype, 21), skip, device);
    let weight = placed(&normals(&[k, n], dtype, 22), skip, device);
    // With zeros of both signs, where relu's derivative is 0.
    let saved = normals(&[m, n], DType::F32, 23);
    let mut with_zeros = saved.to_vec::<f32>().unwrap();
    with_zeros
        .iter_mut()
        .step_by(3)
        .for_each(|value| *value *= 0.0);
    let saved = Tensor::from_slice(&with_zeros, &[m, n], Device::Cpu)
        .unwrap()
        .to_dtype(dtype)
        .unwrap();
    let saved = placed(&saved, skip, device);
    let below = activation.map(|activation| (activation, &saved));
    let run = |below: Option<(Activation, &Tensor)>| {
        let dx = placed(&normals(&[m, n], dtype, 24), skip, device);
        with_f32_math(math, || {
            ops::linear_backward_input_into(&dx, &dy, &weight, below)
        })
        .unwrap();
        dx
    };
    let dx = run(below);
    check_row_sums(&dx, |dx, row_sums| {
        with_f32_math(math, || {
            ops::linear_backward_input_summed_into(dx, Some(row_sums), &dy, &weight, below)
        })
        .unwrap();
    });
    let sums = reference(&values(&dy), &values(&weight), mnk);
    let (saved_values, what) = (
        values(&saved),
        format!("{mnk:?} {kind:?} {activation:?} skip {skip}"),
    );
    let in_f64 = Tensor::from_slice(&saved_values, &[m * n], Device::Cpu).unwrap();
    let slopes = in_f64.ones_like().unwrap();
    derive(activation, &slopes, &in_f64);
    let slopes = values(&slopes);
    let expected: Vec<f64> = sums
        .iter()
        .zip(&slopes)
        .map(|(&(sum, _), slope)| sum * slope)
        .collect();
    let bound = |index: usize| {
        let (sum, magnitudes) = sums[index];
        let before = stored_bound(sum_bound(k, magnitudes, kind), sum, dtype);
        let bound = slope(activation, saved_values[index]) * before
            + activation_bounds(activation, [saved_values[index]; 2], kind)[1]
                * (sum.abs() + before);
        stored_bound(bound, expected[index], dtype)
    };
    assert_within(&dx, &expected, bound, &what);
    if activation == Some(Activation::Relu) {
        let zero = values(&dx)
            .into_iter()
            .zip(&saved_values)
            .all(|(dx, &saved)| saved > 0.0 || dx == 0.0);
        assert!(zero, "{what}: the mask is z > 0");
    }
    if kind == (DType::F32, F32Math::Strict) {
        let unfolded = run(None).to(Device::Cpu).unwrap();
        let saved = saved.to(Device::Cpu).unwrap();
        derive(activation, &unfolded, &saved);
        assert_same_bits(&dx, &unfolded, &what);
    }
}

#[test]
fn the_gradient_of_the_input_with_every_activation_below_is_within_its_bound() {
    for device in devices() {
        // More than five blocks of the rows that the gradient of a bias adds together.
        let rows = 5 * constant!("linear.cu", ROW_BLOCK) + 3;
        let shapes = [
            [0, 3, 4],
            [3, 0, 4],
            [3, 8, 0],
            [rows, 33, 5],
            [rows, 24, 5],
        ];
        let shapes = [&SHAPES[..], &shapes].concat();
        for (mnk, kind) in sliced("gradients of linear", &shapes) {
            for activation in activations() {
                check_backward_input(mnk, kind, activation, 0, device);
            }
        }
        for (kind, skip) in KINDS
            .into_iter()
            .flat_map(|kind| [1, 2, 5].map(|skip| (kind, skip)))
        {
            for activation in activations() {
                check_backward_input([18, 24, 40], kind, activation, skip, device);
            }
        }
    }
}

/// `rows` of the batch, `inputs`, `outputs`.
fn check_backward_weight(
    [rows, inputs, outputs]: [usize; 3],
    kind: (DType, F32Math),
    gradients: [DType; 2],
    accumulate: bool,
    skip: usize,
    device: Device,
) {
    let ((dtype, math), [dw_dtype, db_dtype]) = (kind, gradients);
    let dy = placed(&normals(&[rows, outputs], dtype, 31), skip, device);
    let x = placed(&normals(&[rows, inputs], dtype, 32), skip, device);
    let dw = placed(&normals(&[outputs, inputs], dw_dtype, 33), skip, device);
    let db = placed(&normals(&[outputs], db_dtype, 34), skip, device);
    let (dw_before, db_before) = (values(&dw), db.to(Device::Cpu).unwrap());
    with_f32_math(math, || {
        ops::linear_backward_weight_into(&dw, Some(&db), &dy, &x, accumulate)
    })
    .unwrap();
    let what = format!(
        "rows {rows}, {inputs} to {outputs}, {kind:?} {gradients:?} accumulate {accumulate} skip {skip}"
    );

    let there = if accumulate { 1.0 } else { 0.0 };
    let sums = reference(
        &transpose(&values(&dy), rows, outputs),
        &values(&x),
        [outputs, inputs, rows],
    );
    let expected: Vec<f64> = sums
        .iter()
        .zip(&dw_before)
        .map(|((sum, _), before)| sum + there * before)
        .collect();
    let bound = |index: usize| {
        let magnitudes = sums[index].1 + there * dw_before[index].abs();
        let of_product = added_bound(sums[index].0, accumulate, dw_dtype);
        let bound = sum_bound(rows, magnitudes, kind) + of_product;
        stored_bound(bound, expected[index], dw_dtype)
    };
    assert_within(&dw, &expected, bound, &what);

    // The CPU's sums of the same numbers, in f32, rounded once.
    let wide = |x: &Tensor| x.to(Device::Cpu).unwrap().to_dtype(DType::F32).unwrap();
    let (db_expected, dw_unused) = (
        wide(&db_before),
        Tensor::zeros(&[outputs, inputs], DType::F32, Device::Cpu).unwrap(),
    );
    ops::linear_backward_weight_into(
        &dw_unused,
        Some(&db_expected),
        &wide(&dy),
        &wide(&x),
        accumulate,
    )
    .unwrap();
    assert_same_bits(
        &db,
        &db_expected.to_dtype(db_dtype).unwrap(),
        &format!("db, {what}"),
    );
}

#[test]
fn the_gradients_of_the_parameters_are_within_their_bounds_and_the_bias_has_the_cpus_bits() {
    for device in devices() {
        let shapes = [
            [1, 1, 1],
            [3, 5, 1],
            [2, 9, 7],
            [64, 33, 17],
            [65, 10, 66],
            [130, 24, 40],
            [1100, 3, 70],
            [0, 4, 5],
            [6, 0, 5],
            [6, 4, 0],
        ];
        for (shape, accumulate) in shapes
            .into_iter()
            .flat_map(|shape| [false, true].map(|accumulate| (shape, accumulate)))
        {
            for (dtype, math) in KINDS {
                check_backward_weight(shape, (dtype, math), [dtype, dtype], accumulate, 0, device);
            }
            for dtype in [DType::BF16] {
                for gradients in [
                    [DType::F32, DType::F32],
                    [DType::F32, dtype],
                    [dtype, DType::F32],
                ] {
                    check_backward_weight(
                        shape,
                        (dtype, F32Math::Strict),
                        gradients,
                        accumulate,
                        0,
                        device,
                    );
                }
            }
        }
        for (kind, skip) in KINDS
            .into_iter()
            .flat_map(|kind| [1, 2, 5].map(|skip| (kind, skip)))
        {
            check_backward_weight([70, 24, 40], kind, [kind.0; 2], true, skip, device);
        }
    }
}
