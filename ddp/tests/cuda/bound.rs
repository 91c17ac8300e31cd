//! How far the computations of one training step may be from the exact ones, derived for that
//! step's own numbers: in f32 on two devices, and in a GPU's narrower formats.
//!
//! The step is computed in f64, with a bound of the f32 error of every number, whatever the order
//! of summation. With u = 2⁻²⁴ and γₙ = n u / (1 − n u), a sum of n products in f32 is off by at
//! most γₙ₊₁ Σ|a b|, in any order and with or without fused multiply-adds (Higham, Accuracy and
//! Stability of Numerical Algorithms, §3.1). The errors of its factors add Σ(|a| e_b + e_a |b| +
//! e_a e_b). Everything else is elementwise: a function with slope at most L multiplies an error by
//! at most L and adds its own, which the operation's documentation states. If a ReLU's input is
//! closer to zero than its error, it may be on either side.
//!
//! Layers in bf16 store 8 bits: each such rounding adds 2⁻⁸ of the number (`Roundings::stored`).
//! That happens to inputs, to parameters when they are copied for the layers, and to what a
//! product, a bias, an activation, dropout or the loss's gradient writes. Sums, gradients of
//! parameters and all that follows are in f32. In TF32, matmuls cut their factors to 11 bits, which
//! adds up to 2⁻¹⁰ of each (`Roundings::factors`).
//!
//! Letters: B rows, I inputs, O outputs of a layer.

use ddp_kernels::ops::{self, Activation, AdamwConstants, DropoutKey, SgdConstants};
use ddp_kernels::{DType, Device, Tensor};

use ddp::config::Precision;
use ddp::data::Batch;
use ddp::optim::{Method, Rule};
use ddp::params::Params;

use crate::{SEED, Setup};

/// Half the distance from 1 to the next f32.
const U: f64 = 1.0 / (1u64 << 24) as f64;
/// What f64's own roundings here may add, relatively.
const SLACK: f64 = 1.0 + 1e-9;

fn gamma(roundings: usize) -> f64 {
    let n = roundings as f64;
    n * U / (1.0 - n * U)
}

/// What is lost beside f32's own roundings, relatively.
#[derive(Clone, Copy, Debug)]
struct Roundings {
    /// To each number that a layer reads or writes.
    stored: f64,
    /// To each factor of a product.
    factors: f64,
}

impl Roundings {
    fn of(precision: Precision) -> Roundings {
        match precision {
            Precision::F32 => Roundings {
                stored: 0.0,
                factors: 0.0,
            },
            Precision::Tf32 => Roundings {
                stored: 0.0,
                factors: 1.0 / 1024.0,
            },
            Precision::Bf16 => Roundings {
                stored: 1.0 / 256.0,
                factors: 0.0,
            },
        }
    }

    /// `x` as it is stored: rounded this many times.
    fn stored(self, x: &Uncertain, times: usize) -> Uncertain {
        x.lost((1.0 + self.stored).powi(times as i32) - 1.0)
    }

    /// `a` · `b`, with `more` roundings to f32.
    fn matmul(self, a: &Uncertain, b: &Uncertain, more: usize) -> Uncertain {
        a.lost(self.factors).times(&b.lost(self.factors), more)
    }
}

/// Numbers `[rows, columns]` and what their f32 versions may be off by.
#[derive(Clone, Debug)]
pub(crate) struct Uncertain {
    rows: usize,
    columns: usize,
    pub(crate) value: Vec<f64>,
    pub(crate) error: Vec<f64>,
}

impl Uncertain {
    fn exact(rows: usize, columns: usize, value: Vec<f64>) -> Uncertain {
        assert_eq!(value.len(), rows * columns);
        Uncertain {
            rows,
            columns,
            error: vec![0.0; value.len()],
            value,
        }
    }

    fn of(tensor: &Tensor) -> Uncertain {
        let rows = tensor.shape().first().copied().unwrap_or(1);
        Uncertain::exact(rows, tensor.count() / rows, numbers(tensor))
    }

    /// Each element and its error by `f(index, value, error)`.
    fn map(&self, f: impl Fn(usize, f64, f64) -> (f64, f64)) -> Uncertain {
        let elements = self.value.iter().zip(&self.error).enumerate();
        let (value, error) = elements
            .map(|(index, (&value, &error))| f(index, value, error))
            .unzip();
        Uncertain {
            value,
            error,
            ..*self
        }
    }

    /// Rounds each number. Below f32's smallest normal number (bf16 has the same range) the loss is
    /// not relative.
    fn lost(&self, relative: f64) -> Uncertain {
        let least = if relative > 0.0 {
            f64::from(f32::MIN_POSITIVE)
        } else {
            0.0
        };
        self.map(|_, value, error| (value, error + relative * (value.abs() + error) + least))
    }

    fn t(&self) -> Uncertain {
        let turn = |elements: &[f64]| {
            let columns =
                (0..self.columns).flat_map(|c| (0..self.rows).map(move |r| r * self.columns + c));
            columns.map(|index| elements[index]).collect()
        };
        Uncertain {
            rows: self.columns,
            columns: self.rows,
            value: turn(&self.value),
            error: turn(&self.error),
        }
    }

    /// self · other, with `more` roundings beside those of the matmul.
    fn times(&self, other: &Uncertain, more: usize) -> Uncertain {
        assert_eq!(self.columns, other.rows);
        let (rows, columns) = (self.rows, other.columns);
        let (mut value, mut error) = (vec![0.0; rows * columns], vec![0.0; rows * columns]);
        let gamma = gamma(self.columns + 1 + more);
        for r in 0..rows {
            for k in 0..self.columns {
                let (a, ea) = (
                    self.value[r * self.columns + k],
                    self.error[r * self.columns + k],
                );
                if a == 0.0 && ea == 0.0 {
                    continue;
                }
                for c in 0..columns {
                    let (b, eb) = (other.value[k * columns + c], other.error[k * columns + c]);
                    value[r * columns + c] += a * b;
                    let passed_on = a.abs() * eb + ea * b.abs() + ea * eb;
                    error[r * columns + c] += passed_on + gamma * (a.abs() + ea) * (b.abs() + eb);
                }
            }
        }
        Uncertain {
            rows,
            columns,
            value,
            error,
        }
    }

    /// The norm of the errors.
    fn error_norm(&self) -> f64 {
        self.error
            .iter()
            .map(|error| error * error)
            .sum::<f64>()
            .sqrt()
    }
}

fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor
        .to(Device::Cpu)
        .unwrap()
        .to_dtype(DType::F64)
        .unwrap()
        .to_vec()
        .unwrap()
}

/// An operation of ours on one column of f64, where it is as exact as f64 is.
fn in_f64(values: &[f64], operation: impl Fn(&Tensor) -> Tensor) -> Vec<f64> {
    operation(&Tensor::from_slice(values, &[values.len()], Device::Cpu).unwrap())
        .to_vec()
        .unwrap()
}

/// Behind a linear layer: the activation, and its slope for the way back.
fn activate(z: &Uncertain, activation: Activation) -> (Uncertain, Uncertain) {
    match activation {
        Activation::Relu => {
            let slope =
                |_, z: f64, e: f64| (f64::from(z > 0.0), f64::from(z.abs() <= e && e > 0.0));
            (z.map(|_, z, e| (z.max(0.0), e)), z.map(slope))
        }
        Activation::LeakyRelu => {
            let at = |z: f64| if z > 0.0 { 1.0 } else { 0.01 };
            let near = |z: f64, e: f64| 0.99 * f64::from(z.abs() <= e && e > 0.0);
            // The factor of 0.01 is rounded, and so is the product.
            (
                z.map(|_, z, e| (z * at(z), e + 2.01 * U * (z.abs() + e))),
                z.map(|_, z, e| (at(z), near(z, e) + 2.01 * U)),
            )
        }
        Activation::Gelu => {
            let y = in_f64(&z.value, |z| ops::activate(z, activation).unwrap());
            let slope = in_f64(&z.value, |z| {
                let dx = z.empty_like().unwrap();
                ops::activate_backward_into(&dx, &z.ones_like().unwrap(), z, activation).unwrap();
                dx
            });
            // Slope at most 1.13, curvature at most 2 φ(0) < 0.8; f32's own errors as documented at
            // its formula.
            let forward =
                z.map(|index, z, e| (y[index], 1.13 * e + 4.0 * U * (z.abs() + e).max(1.0)));
            (
                forward,
                z.map(|index, _, e| (slope[index], 0.8 * e + 6.0 * U)),
            )
        }
        other => panic!("no bound for {other:?} here"),
    }
}

/// Elementwise product, one rounding.
fn scaled(x: &Uncertain, by: &Uncertain) -> Uncertain {
    x.map(|index, value, error| {
        let (b, eb) = (by.value[index], by.error[index]);
        let passed_on = value.abs() * eb + error * b.abs() + error * eb;
        (value * b, passed_on + U * (value * b).abs() + U * passed_on)
    })
}

/// The gradient of the sum of squared errors: `2 (output − target)`, two roundings.
fn mse_gradient(output: &Uncertain, targets: &[f64]) -> Uncertain {
    output.map(|index, value, error| {
        let gradient = 2.0 * (value - targets[index]);
        (
            gradient,
            2.0 * error + 3.0 * U * (gradient.abs() + 2.0 * error),
        )
    })
}

/// The gradient of the sum of cross-entropies: softmax − target.
fn cross_entropy_gradient(output: &Uncertain, classes: &[i64]) -> Uncertain {
    let columns = output.columns;
    output.map(|index, _, _| {
        let row = index / columns * columns..(index / columns + 1) * columns;
        let largest = output.value[row.clone()]
            .iter()
            .copied()
            .fold(f64::NEG_INFINITY, f64::max);
        let off = output.error[row.clone()]
            .iter()
            .copied()
            .fold(0.0, f64::max);
        let smallest = output.value[row.clone()]
            .iter()
            .copied()
            .fold(f64::INFINITY, f64::min);
        let sum: f64 = output.value[row].iter().map(|z| (z - largest).exp()).sum();
        let p = (output.value[index] - largest).exp() / sum;
        // Logits off by `off` change p by a factor within exp(±2 off). In f32 the difference from
        // the largest is rounded relatively, which exp makes absolute; exp is within an ulp (2 u),
        // the sum has one rounding an addend, the quotient two, and the difference from the target
        // one.
        let computed = (largest - smallest + 2.0 * off + columns as f64 + 12.0) * U;
        let relative = ((2.0 * off + 2.0 * computed).exp() - 1.0) * SLACK;
        let target = f64::from(classes[index / columns] as usize == index % columns);
        (p - target, p * relative + U * (p - target).abs())
    })
}

/// The gradients of one step by parameter, summed over the batch, as layers compute them in this
/// precision.
pub(crate) fn gradients(
    setup: &Setup,
    params: &Params,
    batch: &Batch,
    precision: Precision,
) -> Vec<(String, Uncertain)> {
    let lost = Roundings::of(precision);
    let micro_batches = batch.micro_count();
    let layers = setup.hidden.len() + 1;
    let parameter = |layer: usize, kind: &str| {
        let name = format!("{}.{kind}", layer * 2);
        let values = Uncertain::of(params.master(params.find(&name).unwrap().id));
        (name, lost.stored(&values, 1))
    };
    // Forward: the input of each layer, the slope after it, and what it drops.
    let x = Uncertain::of(
        &batch
            .x
            .reshape(&[batch.mine, batch.x.count() / batch.mine])
            .unwrap(),
    );
    let mut x = lost.stored(&x, 1);
    let (mut inputs, mut slopes, mut masks) = (Vec::new(), Vec::new(), Vec::new());
    for layer in 0..layers {
        let (_, weight) = parameter(layer, "weight");
        let (_, bias) = parameter(layer, "bias");
        inputs.push(x.clone());
        // Where the library does not add the bias the matmul is stored before.
        let matmul = lost.stored(&lost.matmul(&x, &weight.t(), 1), 1);
        let columns = matmul.columns;
        // The bias is one more addend, of which the same roundings count.
        let rounding = gamma(x.columns + 2);
        let z = matmul.map(|index, value, error| {
            let (bias, off) = (bias.value[index % columns], bias.error[index % columns]);
            (value + bias, error + off + rounding * (bias.abs() + off))
        });
        let z = lost.stored(&z, 1);
        if layer + 1 == layers {
            x = z;
            break;
        }
        let (y, slope) = activate(&z, setup.activation);
        slopes.push(slope);
        masks.push(mask(setup, layer as u32, batch, &y));
        // Once by the activation and once by dropout.
        x = lost.stored(&scaled(&y, &masks[layer]), 2);
    }
    // Backward.
    let mut dy = match batch.targets.dtype() {
        DType::I64 => cross_entropy_gradient(&x, &batch.targets.to_vec::<i64>().unwrap()),
        _ => mse_gradient(&x, &numbers(&batch.targets)),
    };
    dy = lost.stored(&dy, 1);
    let mut found = Vec::new();
    for layer in (0..layers).rev() {
        // Sums over rows, a rounding more for each micro-batch that is added.
        found.push((
            parameter(layer, "weight").0,
            lost.matmul(&dy.t(), &inputs[layer], micro_batches),
        ));
        let ones = Uncertain::exact(1, dy.rows, vec![1.0; dy.rows]);
        found.push((parameter(layer, "bias").0, ones.times(&dy, micro_batches)));
        if layer > 0 {
            let dx = lost.matmul(&dy, &parameter(layer, "weight").1, 0);
            // By the matmul, by dropout and by the activation's derivative.
            dy = lost.stored(
                &scaled(&scaled(&dx, &masks[layer - 1]), &slopes[layer - 1]),
                3,
            );
        }
    }
    found
}

/// What dropout multiplies by: the same bits on every device, so exact here.
fn mask(setup: &Setup, layer: u32, batch: &Batch, like: &Uncertain) -> Uncertain {
    let ones = Tensor::ones(&[like.rows, like.columns], DType::F32, Device::Cpu).unwrap();
    if setup.dropout == 0.0 {
        return Uncertain::of(&ones);
    }
    let position = [batch.step as i64 + 1, batch.first as i64];
    let position = Tensor::from_slice(&position, &[2], Device::Cpu).unwrap();
    let key = DropoutKey {
        seed: SEED,
        layer,
        position: &position,
    };
    Uncertain::of(&ops::dropout(&ones, setup.dropout, &key).unwrap())
}

/// The factor applied to gradients before the update, and its error: 1 / weights, smaller if the
/// norm of the divided gradients exceeds the maximum.
pub(crate) fn scale(setup: &Setup, gradients: &[(String, Uncertain)], weights: f64) -> (f64, f64) {
    let squares = gradients
        .iter()
        .flat_map(|(_, gradient)| &gradient.value)
        .map(|g| g * g)
        .sum::<f64>();
    let error = gradients
        .iter()
        .map(|(_, gradient)| gradient.error_norm().powi(2))
        .sum::<f64>()
        .sqrt();
    let of_norm = |norm: f64| {
        let limit = setup.clip_norm / (norm / weights + 1e-6);
        if setup.clip_norm == 0.0 || limit > 1.0 {
            1.0 / weights
        } else {
            limit / weights
        }
    };
    let norm = squares.sqrt();
    let (low, middle, high) = (
        of_norm(norm + error),
        of_norm(norm),
        of_norm((norm - error).max(0.0)),
    );
    (
        middle,
        ((middle - low).max(high - middle) + U * middle) * SLACK,
    )
}

/// One element's state before the update.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Before {
    pub(crate) value: f64,
    /// In the order of the rule's moments; 0 where it has none.
    pub(crate) moments: [f64; 2],
    pub(crate) decays: bool,
}

/// What the value becomes, and the error of that: the gradient's is `(g, e)`, unscaled.
pub(crate) fn update(
    rule: &Rule,
    step: u64,
    rate: f64,
    before: Before,
    (g, e): (f64, f64),
    (s, es): (f64, f64),
) -> (f64, f64) {
    let Before {
        value,
        moments,
        decays,
    } = before;
    // The rate, and what is computed from it in f64, is rounded once.
    let gs = g * s;
    let d = e * s + g.abs() * es + e * es + 2.0 * U * gs.abs();
    let weight_decay = rule.weight_decay;
    match rule.method {
        Method::Sgd(SgdConstants {
            momentum,
            nesterov: false,
        }) => {
            let decay = if decays { weight_decay } else { 0.0 };
            let new = momentum * moments[0] + gs + decay * value;
            let size = (momentum * moments[0]).abs() + gs.abs() + d + (decay * value).abs();
            let after = value - rate * new;
            (
                after,
                (rate * (d + 6.0 * U * size) + 3.0 * U * (value.abs() + rate * size)) * SLACK,
            )
        }
        Method::AdamW(AdamwConstants {
            beta1,
            beta2,
            epsilon,
        }) => {
            let keep = 1.0 - if decays { rate * weight_decay } else { 0.0 };
            let (remaining1, remaining2) =
                (1.0 - beta1.powf(step as f64), 1.0 - beta2.powf(step as f64));
            let (size, correction) = (rate / remaining1, 1.0 / remaining2.sqrt());
            let m = moments[0] + (1.0 - beta1) * (gs - moments[0]);
            let dm = (1.0 - beta1) * d + 6.0 * U * (moments[0].abs() + gs.abs() + d);
            let denominator = |gs: f64, sign: f64| {
                let v = beta2 * moments[1] + (1.0 - beta2) * gs * gs;
                (v * (1.0 + sign * 8.0 * U)).sqrt() * correction * (1.0 + sign * 8.0 * U)
                    + epsilon * (1.0 + sign * U)
            };
            let low = denominator((gs.abs() - d).max(0.0), -1.0);
            let high = denominator(gs.abs() + d, 1.0);
            let middle = denominator(gs, 0.0);
            let quotient = m / middle;
            // However close to zero the gradient is, |m| / √v is at most this, by Cauchy-Schwarz
            // over all steps so far.
            let most =
                (1.0 - beta1) * correction / ((1.0 - beta2) * (1.0 - beta1 * beta1 / beta2)).sqrt();
            let apart =
                (dm / low + m.abs() * (1.0 / low - 1.0 / high)).min(2.0 * most * (1.0 + 16.0 * U));
            let after = value * keep - size * quotient;
            (
                after,
                (size * (apart + 4.0 * U * (quotient.abs() + apart))
                    + 4.0 * U * (value.abs() + after.abs()))
                    * SLACK,
            )
        }
        ref other => panic!("no bound for {other:?} here"),
    }
}
