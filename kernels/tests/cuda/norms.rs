//! Norms and their gradients: in f32 the CPU's bits, because kernels add in the CPU's order. bf16
//! is within the roundings of its sums, and one to bf16, of the CPU's f32 for the same numbers:
//! stricter than the CPU's bf16, which has a rounding of the same size.

use ddp_kernels::ops::{self, Norm, NormGradients, NormOptions};
use ddp_kernels::{DType, Device, Tensor};

use crate::reductions::{cpu, finite, upload};
use crate::rows::sums_of_blocks;
use crate::tiles::{Odd, around, constant, placing};
use crate::{assert_same_bits, devices, next_device};

/// No rows, one column, around the columns of a warp in f32 and more than five warps, two warps in
/// bf16, around a block of rows and more than five, blocks of more rows, and more columns than the
/// registers of a block hold.
fn shapes() -> Vec<[usize; 2]> {
    let lanes = constant!("norm.cu", WARP) * constant!("norm.cu", PACKS);
    let [warp, warp_of_bf16] = [4, 8].map(|pack| lanes * pack);
    let [held, held_of_bf16] =
        [warp, warp_of_bf16].map(|warp| constant!("norm.cu", WARPS_MAX) * warp);
    let mut shapes = vec![
        [0, 4],
        [3, held + 4],
        [2, held + 7],
        [2, held_of_bf16 + 8],
        PACKED,
    ];
    shapes.extend([[5, 768], [17, warp_of_bf16], [2, warp_of_bf16 + 8]]);
    shapes.push([16_400, 8]);
    shapes.extend(around(16).map(|rows| [rows, 130]));
    shapes.extend(around(warp).map(|columns| [2, columns]));
    shapes
}

/// A shape whose rows can be accessed in packs.
const PACKED: [usize; 2] = [33, 40];
/// Tensors that `Case` places for both directions.
const PLACED: usize = 16;

/// Everything for a norm, where `place` puts it.
struct Case<'a> {
    norm: Norm,
    scaled: bool,
    place: &'a dyn Fn(&Tensor) -> Tensor,
    x: Tensor,
    residual: Tensor,
    dy: Tensor,
    weight: Tensor,
    bias: Tensor,
}

/// Standard normals, rounded to `dtype`.
fn normals(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let values = cpu(&finite(shape.iter().product(), seed), shape);
    values.to_dtype(dtype).unwrap()
}

impl<'a> Case<'a> {
    fn new(
        (norm, scaled): (Norm, bool),
        [rows, columns]: [usize; 2],
        dtype: DType,
        place: &'a dyn Fn(&Tensor) -> Tensor,
    ) -> Case<'a> {
        let matrix = |seed| place(&normals(&[rows, columns], dtype, seed));
        let vector = |seed| place(&normals(&[columns], dtype, seed));
        Case {
            norm,
            scaled,
            place,
            x: matrix(61),
            residual: matrix(62),
            dy: matrix(63),
            weight: vector(64),
            bias: vector(65),
        }
    }

    fn options(&self) -> NormOptions<'_> {
        NormOptions {
            norm: self.norm,
            epsilon: 1e-5,
            weight: self.scaled.then_some(&self.weight),
            // One norm has a weight alone, which keeps the sign of a zero.
            bias: (self.scaled && self.norm == Norm::Layer).then_some(&self.bias),
        }
    }

    /// An output, of the dtype of sums if `wide`.
    fn empty(&self, shape: &[usize], wide: bool) -> Tensor {
        let dtype = if wide { DType::F32 } else { self.x.dtype() };
        (self.place)(&Tensor::full(shape, 9.0, dtype, Device::Cpu).unwrap())
    }

    /// Output, statistics, and the sum, if the residual is added: with a weight in place of that.
    fn forward(&self, adds: bool) -> Vec<Tensor> {
        let shape = self.x.shape().dims();
        let out = self.empty(shape, false);
        let stats = self.empty(&[shape[0], self.norm.statistics()], true);
        if adds {
            let residual = (self.place)(&self.residual);
            let sum = if self.scaled {
                residual.clone()
            } else {
                self.empty(shape, false)
            };
            let operands = [&self.x, &residual];
            ops::add_norm_into(&sum, &out, &stats, operands, &self.options()).unwrap();
            return vec![out, stats, sum];
        }
        ops::norm_into(&out, &stats, &self.x, &self.options()).unwrap();
        vec![out, stats]
    }

    /// dx, in place of the residual's gradient, the sums for weight and bias, and dx without all
    /// that is optional, in place of dy. Where dx is summed besides, nothing else changes.
    fn backward(&self, stats: &Tensor) -> Vec<Tensor> {
        let shape = self.x.shape().dims();
        let sums = [ops::norm_blocks_of(shape[0]), shape[1]];
        let outputs = vec![
            (self.place)(&self.residual),
            self.empty(&sums, true),
            self.empty(&sums, true),
            (self.place)(&self.dy),
        ];
        let all = NormGradients {
            dx: &outputs[0],
            dresidual: Some(&outputs[0]),
            weight_sums: Some(&outputs[1]),
            bias_sums: Some(&outputs[2]),
            row_sums: None,
        };
        let least = NormGradients {
            dx: &outputs[3],
            dresidual: None,
            weight_sums: None,
            bias_sums: None,
            row_sums: None,
        };
        let (x, options) = (&self.x, self.options());
        self.check_row_sums(&all, stats);
        ops::norm_backward_into(&all, &self.dy, x, stats, &options).unwrap();
        ops::norm_backward_into(&least, &outputs[3], x, stats, &options).unwrap();
        outputs
    }

    /// The sums of dx have the bits of its rows, as they are stored, added in order, in each of two
    /// runs; the other gradients have those that they have without.
    fn check_row_sums(&self, all: &NormGradients<'_>, stats: &Tensor) {
        let (x, dy, options) = (&self.x, &self.dy, self.options());
        if !ops::norm_sums_rows(all, dy, x, &options) {
            return;
        }
        let [rows, columns] = [0, 1].map(|at| x.shape()[at]);
        let shape = [ops::norm_blocks_of(rows), columns];
        let run = |sums: Option<&Tensor>| {
            let [dx, weight_sums, bias_sums] = [
                &self.residual,
                all.weight_sums.unwrap(),
                all.bias_sums.unwrap(),
            ]
            .map(|tensor| upload(tensor, x.device(), 0));
            let gradients = NormGradients {
                dx: &dx,
                dresidual: Some(&dx),
                weight_sums: Some(&weight_sums),
                bias_sums: Some(&bias_sums),
                row_sums: sums,
            };
            ops::norm_backward_into(&gradients, dy, x, stats, &options).unwrap();
            [dx, weight_sums, bias_sums].map(|tensor| tensor.to(Device::Cpu).unwrap())
        };
        let without = run(None);
        let dx: Vec<f32> = widened(&without[0]).to_vec().unwrap();
        let block = rows.div_ceil(shape[0].max(1)).max(16);
        let expected = cpu(&sums_of_blocks(&dx, block, columns), &shape);
        for _ in 0..2 {
            let sums = Tensor::full(&shape, 9.0, DType::F32, x.device()).unwrap();
            for (got, without) in run(Some(&sums)).iter().zip(&without) {
                assert_same_bits(got, without, "a gradient beside sums of dx");
            }
            assert_same_bits(&sums, &expected, "sums of dx");
        }
    }
}

/// A copy on the CPU in f32.
fn widened(tensor: &Tensor) -> Tensor {
    upload(&tensor.to_dtype(DType::F32).unwrap(), Device::Cpu, 0)
}

/// Half the distance from 1 to the next f32.
const UNIT: f64 = 1.0 / (1 << 24) as f64;

fn values(tensor: &Tensor) -> Vec<f64> {
    tensor
        .to((Device::Cpu, DType::F64))
        .unwrap()
        .to_vec()
        .unwrap()
}

/// Compares with the f32 result on the CPU, which is rounded to the dtype of `got`: f32 has its
/// bits. bf16 adds rows of `columns` in another order: each side's sums round at most C/128 + 12
/// times, and what is done with them 10 times more, relative to `sizes`. Then it rounds once, by
/// 2⁻⁸ at most.
fn check(got: &Tensor, expected: &Tensor, sizes: Option<&[f64]>, columns: usize, what: &str) {
    let Some(sizes) = sizes.filter(|_| what.contains("bf16")) else {
        let expected = expected.to_dtype(got.dtype()).unwrap();
        return assert_same_bits(got, &expected, what);
    };
    let unit = 2.0 * UNIT * (columns as f64 / 128.0 + 22.0);
    let rounding = if got.dtype() == DType::BF16 {
        1.0 / 256.0
    } else {
        0.0
    };
    for (index, (got, expected)) in values(got).into_iter().zip(values(expected)).enumerate() {
        // Half of the smallest bf16 besides.
        let bound = unit * sizes[index] + rounding * 1.01 * expected.abs() + 2f64.powi(-134);
        assert!(
            (got - expected).abs() <= bound,
            "{what}: element {index} is {got}, expected {expected} within {bound:e}"
        );
    }
}

/// What the roundings of sums are relative to, of a forward that gave `stats`: for each element of
/// the output, and for the statistics.
fn forward_sizes(case: &Case<'_>, stats: &Tensor) -> [Vec<f64>; 2] {
    let columns = case.x.shape()[1];
    let [x, weight, bias] = [&case.x, &case.weight, &case.bias].map(values);
    let options = case.options();
    let mut sizes = [vec![], vec![]];
    for (row, stats) in values(stats).chunks(case.norm.statistics()).enumerate() {
        let x = &x[row * columns..(row + 1) * columns];
        let mean_size = x.iter().map(|x| x.abs()).sum::<f64>() / columns as f64;
        let scale = stats[stats.len() - 1];
        let mean = if stats.len() == 2 { stats[0] } else { 0.0 };
        sizes[1].extend([mean_size, scale].into_iter().skip(2 - stats.len()));
        for (column, x) in x.iter().enumerate() {
            let weight = options.weight.map_or(1.0, |_| weight[column].abs());
            let bias = options.bias.map_or(0.0, |_| bias[column].abs());
            sizes[0].push(scale * weight * (mean_size + (x - mean).abs()) + bias);
        }
    }
    sizes
}

/// Likewise of the gradient by x, with the residual's gradient and without.
fn backward_sizes(case: &Case<'_>, stats: &Tensor) -> [Vec<f64>; 2] {
    let columns = case.x.shape()[1];
    let [x, dy, residual, weight] = [&case.x, &case.dy, &case.residual, &case.weight].map(values);
    let mut sizes = [vec![], vec![]];
    for (row, stats) in values(stats).chunks(case.norm.statistics()).enumerate() {
        let range = row * columns..(row + 1) * columns;
        let scale = stats[stats.len() - 1];
        let mean = if stats.len() == 2 { stats[0] } else { 0.0 };
        let of = |column: usize| {
            let at = row * columns + column;
            let weight = case.options().weight.map_or(1.0, |_| weight[column]);
            ((dy[at] * weight).abs(), ((x[at] - mean) * scale).abs())
        };
        let average = |f: &dyn Fn((f64, f64)) -> f64| {
            (0..columns).map(|column| f(of(column))).sum::<f64>() / columns as f64
        };
        let [along_one, along_x] = [average(&|(g, _)| g), average(&|(g, n)| g * n)];
        for (column, at) in range.enumerate() {
            let (g, n) = of(column);
            sizes[1].push(scale * (g + along_one + n * along_x));
            sizes[0].push(sizes[1][at] + residual[at].abs());
        }
    }
    sizes
}

#[test]
fn norms_and_their_gradients_have_the_cpu_s_bits_in_f32_and_are_within_their_bounds_in_bf16() {
    const CASES: [(Norm, bool); 3] = [(Norm::Layer, true), (Norm::Layer, false), (Norm::Rms, true)];
    let all =
        (CASES.into_iter()).flat_map(|case| shapes().into_iter().map(move |shape| (case, shape)));
    let third = shapes().len();
    for (case, shape) in ddp_testing::cases_of("norms", all, third) {
        for dtype in [DType::F32, DType::BF16] {
            let here = Case::new(case, shape, dtype, &widened);
            let [plain, mut added] = [false, true].map(|adds| here.forward(adds));
            // bf16 is normalized after the sum is rounded.
            let sum = widened(&added[2].to_dtype(dtype).unwrap());
            let summed = Case {
                x: sum,
                ..Case::new(case, shape, dtype, &widened)
            };
            added.splice(..2, summed.forward(false));
            let gradients = here.backward(&plain[1]);
            let [out, stats] = forward_sizes(&here, &plain[1]);
            let [sum_out, sum_stats] = forward_sizes(&summed, &added[1]);
            let forward_sizes = [Some(out), Some(stats), Some(sum_out), Some(sum_stats), None];
            let [with, without] = backward_sizes(&here, &plain[1]);
            // The sums for weight and bias add in the same order.
            let backward_sizes = [Some(with), None, None, Some(without)];
            // Rows that packs could access also where an address does not allow it.
            let odd = Odd::each(PLACED).take(if shape == PACKED { usize::MAX } else { 1 });
            for (device, odd) in odd.filter_map(|odd| Some((next_device()?, odd))) {
                let place = placing(device, odd);
                let there = Case::new(case, shape, dtype, &place);
                let what = format!("{case:?} of {dtype}{shape:?}, {odd:?} at odd addresses");
                let got = [there.forward(false), there.forward(true)].concat();
                let expected = plain.iter().chain(&added);
                for ((got, expected), sizes) in got.iter().zip(expected).zip(&forward_sizes) {
                    check(got, expected, sizes.as_deref(), shape[1], &what);
                }
                let got = there.backward(&place(&plain[1]));
                for ((got, expected), sizes) in got.iter().zip(&gradients).zip(&backward_sizes) {
                    let what = format!("backward of {what}");
                    check(got, expected, sizes.as_deref(), shape[1], &what);
                }
            }
        }
    }
}

#[test]
fn a_row_whose_squares_overflow_gives_nan_in_both_directions() {
    let held = constant!("norm.cu", WARPS_MAX)
        * constant!("norm.cu", WARP)
        * constant!("norm.cu", PACKS)
        * 8;
    // A warp with a row, a row that is not whole packs, one that no registers hold.
    for (norm, columns) in [Norm::Layer, Norm::Rms]
        .into_iter()
        .flat_map(|norm| [40, 41, held + 8].map(|columns| (norm, columns)))
    {
        for dtype in [DType::F32, DType::BF16] {
            let row = |size: f32| (0..columns).map(move |k| [size, -size][k % 2]);
            let rows: Vec<f32> = row(1.0).chain(row(1e20)).chain(row(1e15)).collect();
            let x = cpu(&rows, &[3, columns]).to_dtype(dtype).unwrap();
            let run = |place: &dyn Fn(&Tensor) -> Tensor| {
                let case = Case {
                    x: place(&x),
                    ..Case::new((norm, true), [3, columns], dtype, place)
                };
                let made = case.forward(false);
                let dx = case.backward(&made[1]).swap_remove(0);
                [made, vec![dx]].concat()
            };
            let expected = run(&widened);
            let is_nan =
                |of: &Tensor| -> Vec<bool> { values(of).into_iter().map(f64::is_nan).collect() };
            let second_row: Vec<bool> = (0..3 * columns).map(|k| k / columns == 1).collect();
            assert_eq!(
                [&expected[0], &expected[2]].map(is_nan),
                [&second_row; 2].map(Clone::clone)
            );
            for device in devices() {
                for (got, expected) in run(&|x| upload(x, device, 0)).iter().zip(&expected) {
                    let what = format!("{norm:?} of {dtype}, {columns} columns");
                    if dtype == DType::F32 {
                        assert_same_bits(got, expected, &what);
                    }
                    assert_eq!(is_nan(got), is_nan(expected), "{what}");
                }
            }
        }
    }
}
