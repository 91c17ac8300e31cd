//! Tests of norm.

mod gradients;

use super::*;
use crate::ops::testing::{alone_with_the_pool, assert_close, cpu, cpu_of, random_f32};
use crate::ops::{axpy, column_sum_into};
use crate::{DType, Device, Element};

const NORMS: [Norm; 2] = [Norm::Layer, Norm::Rms];
/// Half the distance from 1 to the next f32.
const UNIT: f64 = 1.0 / (1 << 24) as f64;
const EPSILON: f64 = 1e-5;

/// No rows, one column, around a chunk, a warp's columns, a block of rows, and more columns than a
/// block of threads holds.
const SHAPES: [[usize; 2]; 9] = [
    [0, 3],
    [5, 1],
    [1, 2],
    [3, 33],
    [17, 130],
    [2, 513],
    [33, 40],
    [2, 8197],
    [1, 50_000],
];

/// The roundings of a row's sum: those of a thread's partial sum, four partial sums, two trees of
/// 32.
fn roundings(columns: usize) -> f64 {
    (4 * columns.div_ceil(8192) + 2 + 5 + 5) as f64
}

fn widened(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

fn mean(values: impl ExactSizeIterator<Item = f64>) -> f64 {
    let count = values.len() as f64;
    values.sum::<f64>() / count
}

/// PyTorch's formulas in f64: mean and 1/σ or 1/rms of a row.
fn statistics(norm: Norm, row: &[f64]) -> (f64, f64) {
    let center = match norm {
        Norm::Layer => mean(row.iter().copied()),
        Norm::Rms => 0.0,
    };
    let square = mean(row.iter().map(|x| (x - center).powi(2)));
    (center, 1.0 / (square + EPSILON).sqrt())
}

/// Everything for a norm of `rows` by `columns`, in one dtype.
struct Case {
    norm: Norm,
    sizes: [usize; 2],
    x: Tensor,
    residual: Tensor,
    dy: Tensor,
    weight: Option<Tensor>,
    bias: Option<Tensor>,
}

impl Case {
    fn new(norm: Norm, [rows, columns]: [usize; 2], dtype: DType, scaled: bool) -> Case {
        let normals = |shape: &[usize], seed| {
            let count = shape.iter().product();
            let values = cpu(&random_f32(count, seed), shape);
            values.to_dtype(dtype).unwrap()
        };
        Case {
            norm,
            sizes: [rows, columns],
            x: normals(&[rows, columns], 51),
            residual: normals(&[rows, columns], 52),
            dy: normals(&[rows, columns], 53),
            weight: scaled.then(|| normals(&[columns], 54)),
            bias: scaled.then(|| normals(&[columns], 55)),
        }
    }

    fn options(&self) -> NormOptions<'_> {
        NormOptions {
            norm: self.norm,
            epsilon: EPSILON,
            weight: self.weight.as_ref(),
            bias: self.bias.as_ref(),
        }
    }

    fn empty(&self, shape: &[usize]) -> Tensor {
        self.x.new_full(shape, 9.0).unwrap()
    }

    /// The norm of `x`, and its statistics.
    fn forward(&self) -> [Tensor; 2] {
        let stats = self.empty(&[self.sizes[0], self.norm.statistics()]);
        let out = self.empty(&self.sizes);
        norm_into(&out, &stats, &self.x, &self.options()).unwrap();
        [out, stats]
    }

    /// dx and the sums for weight and bias.
    fn backward(&self, stats: &Tensor, with_residual: bool) -> [Tensor; 3] {
        let [rows, columns] = self.sizes;
        let sums = [norm_blocks_of(rows), columns];
        let outputs = [&self.sizes, &sums, &sums].map(|shape| self.empty(shape));
        let gradients = NormGradients {
            dx: &outputs[0],
            dresidual: with_residual.then_some(&self.residual),
            weight_sums: Some(&outputs[1]),
            bias_sums: Some(&outputs[2]),
            row_sums: None,
        };
        norm_backward_into(&gradients, &self.dy, &self.x, stats, &self.options()).unwrap();
        outputs
    }
}

fn vec<T: Element>(tensor: &Tensor) -> Vec<T> {
    tensor.to_vec().unwrap()
}

fn copy_of(tensor: &Tensor) -> Tensor {
    let copy = tensor.empty_like().unwrap();
    copy.copy_from(tensor).unwrap();
    copy
}

fn wide(tensor: Option<&Tensor>, columns: usize, absent: f64) -> Vec<f64> {
    match tensor {
        Some(tensor) => vec(&tensor.to_dtype(DType::F64).unwrap()),
        None => vec![absent; columns],
    }
}

#[test]
fn a_norm_and_its_statistics_are_pytorch_s_formulas_for_every_shape() {
    for (norm, shape, scaled) in NORMS
        .into_iter()
        .flat_map(|norm| SHAPES.map(|shape| (norm, shape)))
        .flat_map(|(norm, shape)| [true, false].map(|scaled| (norm, shape, scaled)))
    {
        let columns = shape[1];
        let case = Case::new(norm, shape, DType::F32, scaled);
        let [out, stats] = case.forward();
        let (weight, bias) = (
            wide(case.weight.as_ref(), columns, 1.0),
            wide(case.bias.as_ref(), columns, 0.0),
        );
        let x = widened(&vec(&case.x));
        let (mut expected, mut bounds, mut expected_stats) = (vec![], vec![], vec![]);
        let k = roundings(columns);
        for row in x.chunks(columns) {
            let (center, scale) = statistics(norm, row);
            expected_stats.extend([center, scale].into_iter().skip(2 - norm.statistics()));
            // The mean is off by k + 1 roundings of the mean magnitude. Squares add k + 3, of which
            // the root leaves half, and root, quotient, difference and product one each.
            let magnitude = mean(row.iter().map(|x| x.abs()));
            for ((&x, &weight), &bias) in row.iter().zip(&weight).zip(&bias) {
                let normed = (x - center) * scale;
                let out = normed * weight + bias;
                expected.push(out);
                let off = normed.abs() * ((k + 3.0) / 2.0 + 5.0) + scale * magnitude * (k + 1.0);
                bounds.push(1.01 * UNIT * (weight.abs() * off + out.abs()));
            }
        }
        assert_close(&vec(&out), &expected, |index, _| bounds[index]);
        // 3 is above every mean magnitude here.
        assert_close(&vec(&stats), &expected_stats, |_, expected| {
            UNIT * (k + 6.0) * (expected.abs() + 3.0)
        });
    }
}

#[test]
fn a_norm_has_pytorch_s_values() {
    // F.layer_norm and F.rms_norm of [1, 2, 3, 4]: the formulas of PyTorch's documentation with
    // ε = 1e-5, in decimal arithmetic: ±1.5, ±0.5 over √1.25001, and x over √7.50001.
    let x = cpu_of(&[1.0f64, 2.0, 3.0, 4.0], &[1, 4]);
    let layer = [-1.3416354200, -0.4472118067, 0.4472118067, 1.3416354200];
    let rms = [0.3651481282, 0.7302962565, 1.0954443847, 1.4605925130];
    for (norm, known) in NORMS.into_iter().zip([layer, rms]) {
        let case = Case {
            x: x.clone(),
            ..Case::new(norm, [1, 4], DType::F64, false)
        };
        for (got, known) in vec::<f64>(&case.forward()[0]).into_iter().zip(known) {
            assert!(
                (got - known).abs() < 1e-10,
                "{norm:?}: {got} is not {known}"
            );
        }
    }
}

#[test]
fn a_norm_of_a_sum_has_the_bits_of_both_operations_apart_and_in_place() {
    for (norm, shape) in NORMS
        .into_iter()
        .flat_map(|norm| SHAPES.map(|shape| (norm, shape)))
    {
        let case = Case::new(norm, shape, DType::F32, true);
        let expected_sum = copy_of(&case.x);
        axpy(&expected_sum, 1.0, &case.residual).unwrap();
        let summed = Case {
            x: expected_sum,
            ..Case::new(norm, shape, DType::F32, true)
        };
        let [expected, expected_stats] = summed.forward();
        let [x, residual] = [&case.x, &case.residual];
        for in_place in 0..3 {
            let (out, stats) = (case.empty(&shape), expected_stats.zeros_like().unwrap());
            let sum = match in_place {
                0 => case.empty(&shape),
                1 => copy_of(x),
                _ => copy_of(residual),
            };
            let operands = match in_place {
                0 => [x, residual],
                1 => [&sum, residual],
                _ => [x, &sum],
            };
            add_norm_into(&sum, &out, &stats, operands, &case.options()).unwrap();
            assert_eq!(vec::<f32>(&sum), vec::<f32>(&summed.x));
            assert_eq!(vec::<f32>(&out), vec::<f32>(&expected));
            assert_eq!(vec::<f32>(&stats), vec::<f32>(&expected_stats));
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let _alone = alone_with_the_pool();
    for norm in NORMS {
        let case = Case::new(norm, [611, 67], DType::F32, true);
        let results = [1, 2, 3].map(|threads| {
            threads::set_count(threads).unwrap();
            let [out, stats] = case.forward();
            let [dx, weight_sums, bias_sums] = case.backward(&stats, true);
            [out, stats, dx, weight_sums, bias_sums].map(|tensor| vec::<f32>(&tensor))
        });
        assert!(
            results[0] == results[1] && results[0] == results[2],
            "{norm:?}"
        );
    }
}

#[test]
fn rows_of_one_number_nan_and_infinity_give_what_pytorch_gives() {
    let case = Case::new(Norm::Layer, [3, 4], DType::F32, false);
    let x = cpu(
        &[
            5.0,
            5.0,
            5.0,
            5.0,
            1.0,
            f32::NAN,
            2.0,
            3.0,
            1.0,
            f32::INFINITY,
            0.0,
            0.0,
        ],
        &[3, 4],
    );
    let case = Case { x, ..case };
    let [out, stats] = case.forward();
    let out: Vec<f32> = vec(&out);
    assert_eq!(out[..4], [0.0; 4]);
    assert!(out[4..].iter().all(|x| x.is_nan()));
    assert_eq!(vec::<f32>(&stats)[0], 5.0);
}

#[test]
fn a_row_whose_squares_overflow_gives_nan_in_both_directions() {
    for (norm, dtype, large) in NORMS
        .into_iter()
        .flat_map(|norm| [(norm, DType::F32, 1e20), (norm, DType::F64, 1e160)])
    {
        // Both pass through the loops of a chunk and of the columns after it.
        for columns in [2, 130] {
            let row = |size: f64| (0..columns).map(move |k| [size, -size][k % 2]);
            let values: Vec<f64> = row(1.0)
                .chain(row(large))
                .chain(row(large / 1e10))
                .collect();
            let x = cpu_of(&values, &[3, columns]).to_dtype(dtype).unwrap();
            let case = Case {
                x,
                ..Case::new(norm, [3, columns], dtype, true)
            };
            let [out, stats] = case.forward();
            let [dx, ..] = case.backward(&stats, true);
            for of in [&out, &dx] {
                let values: Vec<f64> = vec(&of.to_dtype(DType::F64).unwrap());
                let rows: Vec<_> = values.chunks(columns).collect();
                assert!(rows[1].iter().all(|x| x.is_nan()), "{norm:?} {dtype}");
                let rest = [rows[0], rows[2]].concat();
                assert!(rest.iter().all(|x| x.is_finite()), "{norm:?} {dtype}");
            }
        }
    }
}

#[test]
fn operands_that_do_not_fit_are_named() {
    let case = Case::new(Norm::Layer, [2, 3], DType::F32, true);
    let told = |stats: &[usize], x: &Tensor, options: &NormOptions<'_>| {
        let out = x.empty_like().unwrap();
        let stats = case.empty(stats);
        norm_into(&out, &stats, x, options).unwrap_err().to_string()
    };
    let error = told(&[2, 1], &case.x, &case.options());
    let expected = "norm: stats f32[2, 1] on cpu: expected shape [2, 2], that is mean and 1/σ";
    assert!(error.contains(expected), "{error}");
    let error = told(&[2, 2], &cpu(&[0.0; 8], &[2, 4]), &case.options());
    assert!(
        error.contains("weight f32[3] on cpu: expected shape [4]"),
        "{error}"
    );
    let none = NormOptions {
        weight: None,
        bias: None,
        ..case.options()
    };
    let error = told(&[2, 2], &cpu(&[], &[2, 0]), &none);
    assert!(
        error.contains("x f32[2, 0] on cpu: expected at least one column"),
        "{error}"
    );
    let error = told(
        &[2, 2],
        &case.x,
        &NormOptions {
            epsilon: -1.0,
            ..none
        },
    );
    assert!(
        error.contains("epsilon: expected a finite number from 0 up, got -1"),
        "{error}"
    );
    let (dx, two, one) = (
        case.empty(&[2, 3]),
        case.empty(&[2, 3]),
        case.empty(&[1, 3]),
    );
    let stats = Tensor::zeros(&[2, 2], DType::F32, Device::Cpu).unwrap();
    let told = |weight_sums, row_sums| {
        let gradients = NormGradients {
            dx: &dx,
            dresidual: None,
            weight_sums,
            bias_sums: None,
            row_sums,
        };
        norm_backward_into(&gradients, &case.dy, &case.x, &stats, &case.options())
            .unwrap_err()
            .to_string()
    };
    let error = told(Some(&two), None);
    let expected = "norm_backward: weight_sums f32[2, 3] on cpu: expected shape [1, 3], that is a row \
                    for each block of rows: norm_blocks_of";
    assert!(error.contains(expected), "{error}");
    let error = told(None, Some(&one));
    let expected = "norm_backward: row_sums f32[1, 3] on cpu: expected none for these operands";
    assert!(
        error.contains(expected) && error.contains("norm_sums_rows"),
        "{error}"
    );
}
