//! Norms and their gradients: the CPU's bits, because kernels add in the CPU's order. bf16, in
//! which the CPU does not compute, is the f32 result of the widened operands, rounded once.

use ddp_kernels::ops::{self, Norm, NormGradients, NormOptions};
use ddp_kernels::{DType, Device, Tensor};

use crate::reductions::{cpu, finite, upload};
use crate::tiles::{Odd, around, constant, placing};
use crate::{assert_same_bits, next_device};

/// No rows, one column, around the columns of a warp and more than five warps, around a block of
/// rows and more than five, and more columns than the registers of a block hold.
fn shapes() -> Vec<[usize; 2]> {
    let warp =
        constant!("norm.cu", WARP) * constant!("norm.cu", PACK) * constant!("norm.cu", PACKS);
    let held = constant!("norm.cu", WARPS_MAX) * warp;
    let mut shapes = vec![[0, 4], [3, held + 4], [2, held + 7], PACKED];
    shapes.extend(around(constant!("norm.cu", ROW_BLOCK)).map(|rows| [rows, 130]));
    shapes.extend(around(warp).map(|columns| [2, columns]));
    shapes
}

/// A shape whose rows can be accessed in packs.
const PACKED: [usize; 2] = [33, 36];
/// Tensors that `Case` places for both directions.
const PLACED: usize = 15;

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
            let sum = match self.scaled {
                true => residual.clone(),
                false => self.empty(shape, false),
            };
            let operands = [&self.x, &residual];
            ops::add_norm_into(&sum, &out, &stats, operands, &self.options()).unwrap();
            return vec![out, stats, sum];
        }
        ops::norm_into(&out, &stats, &self.x, &self.options()).unwrap();
        vec![out, stats]
    }

    /// dx, in place of the residual's gradient, the sums for weight and bias, and dx without all
    /// that is optional, in place of dy.
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
        };
        let least = NormGradients {
            dx: &outputs[3],
            dresidual: None,
            weight_sums: None,
            bias_sums: None,
        };
        let (x, options) = (&self.x, self.options());
        ops::norm_backward_into(&all, &self.dy, x, stats, &options).unwrap();
        ops::norm_backward_into(&least, &outputs[3], x, stats, &options).unwrap();
        outputs
    }
}

/// A copy on the CPU in f32.
fn widened(tensor: &Tensor) -> Tensor {
    upload(&tensor.to_dtype(DType::F32).unwrap(), Device::Cpu, 0)
}

#[test]
fn norms_and_their_gradients_have_the_cpu_s_bits() {
    const CASES: [(Norm, bool); 3] = [(Norm::Layer, true), (Norm::Layer, false), (Norm::Rms, true)];
    for (case, shape) in
        (CASES.into_iter()).flat_map(|case| shapes().into_iter().map(move |shape| (case, shape)))
    {
        for dtype in [DType::F32, DType::BF16] {
            let rounded = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
            let here = Case::new(case, shape, dtype, &widened);
            let [plain, mut added] = [false, true].map(|adds| here.forward(adds));
            // bf16 is normalized after the sum is rounded.
            let sum = rounded(&added[2]);
            let summed = Case {
                x: widened(&sum),
                ..Case::new(case, shape, dtype, &widened)
            };
            added.splice(..2, summed.forward(false));
            let mut gradients = here.backward(&plain[1]);
            for index in [0, 3] {
                gradients[index] = rounded(&gradients[index]);
            }
            // Rows that packs could access also where an address does not allow it.
            let odd = Odd::each(PLACED).take(if shape == PACKED { usize::MAX } else { 1 });
            for (device, odd) in odd.filter_map(|odd| Some((next_device()?, odd))) {
                let place = placing(device, odd);
                let there = Case::new(case, shape, dtype, &place);
                let what = format!("{case:?} of {dtype}{shape:?}, {odd:?} at odd addresses");
                let got = [there.forward(false), there.forward(true)].concat();
                for (got, expected) in got.iter().zip(plain.iter().chain(&added)) {
                    let is_stats =
                        got.shape().dims() == plain[1].shape().dims() && got.dtype() == DType::F32;
                    let expected = if is_stats {
                        expected.clone()
                    } else {
                        rounded(expected)
                    };
                    assert_same_bits(got, &expected, &what);
                }
                for (got, expected) in there.backward(&got[1]).iter().zip(&gradients) {
                    assert_same_bits(got, expected, &format!("backward of {what}"));
                }
            }
        }
    }
}
