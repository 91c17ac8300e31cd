//! Constants and linear models, beside what scikit-learn's `Ridge` of standardized features says.

use ddp_data::{InMemory, TensorSpec};
use ddp_kernels::{DType, Device, Tensor};

use super::super::linear::LinearModels;
use super::*;

/// The features and the number of a row: one feature is far from 0, one is the same everywhere.
fn row(row: usize) -> ([f32; 4], f32) {
    let x = [
        ((row * 37) % 61) as f32 / 10.0,
        2000.0 + ((row * 17) % 23) as f32,
        f32::from(u8::from(row.is_multiple_of(3))),
        5.0,
    ];
    let noise = ((row * 29) % 31) as f32 / 4.0;
    (x, 0.7 * x[0] - 0.3 * (x[1] - 2000.0) + 4.0 * x[2] + noise)
}

fn tensor(values: &[f32], width: usize) -> Tensor {
    Tensor::from_slice(values, &[values.len() / width, width], Device::Cpu).unwrap()
}

fn features(rows: std::ops::Range<usize>) -> Tensor {
    tensor(&rows.flat_map(|at| row(at).0).collect::<Vec<_>>(), 4)
}

fn numbers(rows: std::ops::Range<usize>) -> InMemory {
    let targets: Vec<f32> = rows.clone().map(|at| row(at).1).collect();
    InMemory::numbers(features(rows), tensor(&targets, 1)).unwrap()
}

fn classes(rows: std::ops::Range<usize>) -> InMemory {
    let class = |at| i64::from(row(at).1 > 4.012) + i64::from(row(at).1 > 7.986);
    let labels: Vec<i64> = rows.clone().map(class).collect();
    InMemory::classes(features(rows), labels, 3).unwrap()
}

#[test]
fn numbers_are_predicted_as_by_ridge_regression() {
    let found = beside(&numbers(0..60), &numbers(60..100)).unwrap().unwrap();
    assert!(
        (found.linear.unwrap() - 0.598_170_012).abs() < 1e-6,
        "{found:?}"
    );
    assert!((found.constant + 0.001_584_629).abs() < 1e-6, "{found:?}");
    let text =
        "R² on the held-out rows: this model 0.7500, a linear model 0.5982, their mean -0.001585";
    assert_eq!(found.text("on the held-out rows", Some(0.75)), text);
}

/// As of `LinearDiscriminantAnalysis(solver="lsqr")`, without the feature that is the same
/// everywhere: −32.577396 is the sum of logarithms of probabilities.
#[test]
fn classes_have_the_probabilities_of_linear_discriminants() {
    let models = LinearModels::of(&classes(0..60)).unwrap().unwrap();
    let fitted = [models.fit(1e-6), models.fit(1e6)];
    let losses = models.losses(&fitted, &classes(60..100)).unwrap();
    assert!((losses[0] - 32.577_396).abs() < 1e-3, "{losses:?}");
    // Of a model without weights: the parts of the classes.
    let of_parts = 40.0 * 3f64.ln();
    assert!((losses[1] - of_parts).abs() < 4.0, "{losses:?}");
}

#[test]
fn a_layer_answers_as_its_linear_model_does() {
    let models = LinearModels::of(&numbers(0..60)).unwrap().unwrap();
    let model = models.fit(2.0).unwrap();
    let [weight, bias] = model.layer();
    for at in [0, 7, 61] {
        let x = row(at).0;
        let products = x.iter().zip(&weight).map(|(x, w)| x * w);
        let answer = products.sum::<f32>() + bias[0];
        // Sums of numbers of up to 2000 in f32.
        assert!((answer - model.answer(&x)[0]).abs() < 1e-3);
    }
}

#[test]
fn classes_are_the_largest_answers_of_ridge_regression() {
    let found = beside(&classes(0..60), &classes(60..100)).unwrap().unwrap();
    assert_eq!((found.linear, found.constant), (Some(0.55), 0.4));
    let text = "accuracy on the held-out rows: a linear model 55.00%, the largest class 40.00%";
    assert_eq!(found.text("on the held-out rows", None), text);
}

#[test]
fn a_wide_table_has_a_constant_alone_and_one_row_a_linear_model() {
    let wide = |rows: usize| {
        let targets: Vec<f32> = (0..rows).map(|at| at as f32).collect();
        InMemory::numbers(tensor(&vec![1.0; rows * 512], 512), tensor(&targets, 1)).unwrap()
    };
    let found = beside(&wide(9), &wide(3)).unwrap().unwrap();
    assert!(found.linear.is_none() && found.constant < 0.0, "{found:?}");
    assert!(
        beside(&numbers(0..1), &numbers(1..9))
            .unwrap()
            .unwrap()
            .linear
            .is_some()
    );
    assert_eq!(beside(&numbers(0..9), &numbers(0..0)).unwrap(), None);
    let positions = tensor(&[1.0; 8], 2).to_dtype(DType::I64).unwrap();
    let spec = TaskSpec::numbered_classes(3);
    let of_positions = InMemory::new(tensor(&[1.0; 8], 2), positions, spec).unwrap();
    assert_eq!(
        of_positions.spec().targets,
        TensorSpec::new(DType::I64, &[2])
    );
    assert_eq!(beside(&of_positions, &of_positions).unwrap(), None);
}
