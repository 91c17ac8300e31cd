//! Matmuls: addmm and linear against sums in f64, with bounds derived here; exactly, where all sums
//! are whole numbers that every type holds; and against the CPU's bits where the order of
//! operations is ours.
//!
//! A matmul with k terms is off by at most (k + 3) roundings of 2⁻²⁴ of the sum of magnitudes, in
//! any order (`sum_bound`), and by one rounding to what is stored, two where bias or activation are
//! separate passes (`unit`), and one more of the product where it is added to a matrix in bf16
//! (`added_bound`: cuBLASLt does so on Hopper). TF32 cuts each operand to 11 bits: another 2⁻⁹ of
//! the magnitudes. The library's tanh form of gelu is off by up to 2.5·10⁻⁴ max(|z|, 1): half of
//! what the hardware's tanh is off by, 2⁻¹¹.

mod addmm;
mod backward;
mod linear;
mod streams;

use ddp_kernels::ops::{self, Activation, F32Math};
use ddp_kernels::{DType, Device, Random, Tensor};

/// What is stored, and how f32 is multiplied.
const KINDS: [(DType, F32Math); 3] = [
    (DType::F32, F32Math::Strict),
    (DType::F32, F32Math::Tf32),
    (DType::BF16, F32Math::Strict),
];

/// m, n, k: one, odd, around the library's tiles, and as a training step has them.
const SHAPES: [[usize; 3]; 7] = [
    [1, 1, 1],
    [1, 5, 3],
    [5, 1, 7],
    [7, 9, 2],
    [17, 33, 65],
    [66, 10, 129],
    [64, 128, 96],
];

/// A third of these shapes in each kind.
fn sliced(check: &str, shapes: &[[usize; 3]]) -> Vec<([usize; 3], (DType, F32Math))> {
    let all = KINDS
        .into_iter()
        .flat_map(|kind| shapes.iter().map(move |&mnk| (mnk, kind)));
    ddp_testing::cases_of(check, all, shapes.len())
}

/// The most that rounding to a dtype changes a number by, relative to it.
fn unit(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        _ => 2f64.powi(-24),
    }
}

/// Of a sum of k products whose magnitudes add up to `magnitudes`.
fn sum_bound(k: usize, magnitudes: f64, (dtype, math): (DType, F32Math)) -> f64 {
    let cut = if dtype == DType::F32 && math == F32Math::Tf32 {
        2f64.powi(-9)
    } else {
        0.0
    };
    ((k + 3) as f64 * 2f64.powi(-24) + cut) * magnitudes
}

/// What rounding the product adds where it is added to a matrix that is stored in `dtype`.
fn added_bound(product: f64, is_added: bool, dtype: DType) -> f64 {
    match dtype {
        DType::BF16 if is_added => unit(dtype) * product.abs(),
        _ => 0.0,
    }
}

/// A result within `bound` before it is stored, which may take two roundings.
fn stored_bound(bound: f64, expected: f64, dtype: DType) -> f64 {
    1.01 * (bound + 2.0 * unit(dtype) * expected.abs())
}

/// The tensor on `device`, beginning `skip` elements into a new allocation.
fn placed(values: &Tensor, skip: usize, device: Device) -> Tensor {
    let count = values.count();
    let memory = Tensor::zeros(&[skip + count], values.dtype(), device).unwrap();
    let view = memory.slice(skip..skip + count).unwrap();
    let flat = values.flatten().unwrap();
    view.copy_from(&flat).unwrap();
    view.reshape(values.shape().dims()).unwrap()
}

/// Normals on the CPU, rounded to a dtype.
fn normals(shape: &[usize], dtype: DType, seed: u64) -> Tensor {
    let wide = Tensor::randn(shape, DType::F32, Device::Cpu, &mut Random::new(seed)).unwrap();
    wide.to_dtype(dtype).unwrap()
}

/// Whole numbers from −2 to 2.
fn integers(shape: &[usize], seed: u64) -> Tensor {
    let values =
        Tensor::randint(5, shape, DType::I32, Device::Cpu, &mut Random::new(seed)).unwrap();
    let values: Vec<f32> = values
        .to_vec::<i32>()
        .unwrap()
        .into_iter()
        .map(|value| value as f32 - 2.0)
        .collect();
    Tensor::from_slice(&values, shape, Device::Cpu).unwrap()
}

/// The elements in row-major order, whatever the dtype and wherever they are.
fn values(tensor: &Tensor) -> Vec<f64> {
    let here = tensor.to(Device::Cpu).unwrap();
    let here = if here.is_transposed() {
        here.contiguous().unwrap()
    } else {
        here
    };
    here.to_dtype(DType::F64).unwrap().to_vec::<f64>().unwrap()
}

/// `left·right` in f64 with the sum of magnitudes of each element.
fn reference(left: &[f64], right: &[f64], [m, n, k]: [usize; 3]) -> Vec<(f64, f64)> {
    let mut sums = vec![(0.0, 0.0); m * n];
    for i in 0..m {
        for l in 0..k {
            for j in 0..n {
                let term = left[i * k + l] * right[l * n + j];
                let (sum, magnitudes) = &mut sums[i * n + j];
                *sum += term;
                *magnitudes += term.abs();
            }
        }
    }
    sums
}

fn transpose(values: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    (0..rows * columns)
        .map(|index| values[index % rows * columns + index / rows])
        .collect()
}

#[track_caller]
fn assert_within(got: &Tensor, expected: &[f64], bound: impl Fn(usize) -> f64, what: &str) {
    for (index, (got, expected)) in values(got).into_iter().zip(expected).enumerate() {
        let bound = bound(index);
        assert!(
            (got - expected).abs() <= bound,
            "{what}: element {index} is {got}, expected {expected} within {bound:e}"
        );
    }
}

/// Sums of at most 30 terms of at most 4 are below 128: whole numbers that bf16 holds.
const EXACT: [usize; 3] = [19, 24, 30];

/// None and every activation.
fn activations() -> impl Iterator<Item = Option<Activation>> {
    [None].into_iter().chain(Activation::all().map(Some))
}

/// How much steeper than 1 an activation is near z, at most.
fn slope(activation: Option<Activation>, z: f64) -> f64 {
    activation.map_or(1.0, |it| (it.about().steepest)(z))
}

/// What an activation, which is y at z, adds to an error before it, and what its derivative does.
fn activation_bounds(
    activation: Option<Activation>,
    [z, y]: [f64; 2],
    kind: (DType, F32Math),
) -> [f64; 2] {
    match activation {
        Some(Activation::GeluTanh) if kind != KINDS[0] => [2.5e-4 * z.abs().max(1.0); 2],
        Some(it) => (it.about().errors)(z, y).map(|units| units * 2f64.powi(-24)),
        None => [0.0; 2],
    }
}

struct Layer {
    x: Tensor,
    weight: Tensor,
    bias: Option<Tensor>,
    pre: Option<Tensor>,
    y: Tensor,
}

impl Layer {
    fn new(
        [m, n, k]: [usize; 3],
        dtype: DType,
        has_bias: bool,
        has_pre: bool,
        skip: usize,
        device: Device,
    ) -> Layer {
        let nan = || {
            Tensor::full(&[m, n], f64::NAN, DType::F32, Device::Cpu)
                .unwrap()
                .to_dtype(dtype)
                .unwrap()
        };
        Layer {
            x: placed(&normals(&[m, k], dtype, 11), skip, device),
            weight: placed(&normals(&[n, k], dtype, 12), skip, device),
            bias: has_bias.then(|| placed(&normals(&[n], dtype, 13), skip, device)),
            pre: has_pre.then(|| placed(&nan(), skip, device)),
            y: placed(&nan(), skip, device),
        }
    }

    fn forward(&self, activation: Option<Activation>) {
        let Layer {
            x,
            weight,
            bias,
            pre,
            y,
        } = self;
        ops::linear_into(y, x, weight, bias.as_ref(), activation, pre.as_ref()).unwrap();
    }

    /// The pre-activation in f64 with its magnitudes.
    fn reference(&self, [m, n, k]: [usize; 3]) -> Vec<(f64, f64)> {
        let mut sums = reference(
            &values(&self.x),
            &transpose(&values(&self.weight), n, k),
            [m, n, k],
        );
        if let Some(bias) = &self.bias {
            let bias = values(bias);
            for (index, (sum, magnitudes)) in sums.iter_mut().enumerate() {
                *sum += bias[index % n];
                *magnitudes += bias[index % n].abs();
            }
        }
        sums
    }
}
