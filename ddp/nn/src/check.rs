//! Compares derivatives with finite differences, in f64 on the CPU: for all layers here, and for
//! your own.

use ddp_kernels::{DType, Device, Random, Tensor, ops};

use crate::error::Result;
use crate::forward::Module;
use crate::loss::{Loss, STATS};
use crate::models::Model;
use crate::pass::{Pass, PassOptions, Saved};
use crate::scratch::Scratch;

/// A derivative from backward and the finite difference it should equal.
#[derive(Clone, Debug, PartialEq)]
pub struct Derivative {
    /// The element it is by, in row-major order: `0.weight[3]` or `input[3]`.
    pub by: String,
    /// The derivative from the backward pass.
    pub backward: f64,
    /// The finite difference from forward passes.
    pub finite: f64,
}

impl Derivative {
    /// The distance of the two, relative to the larger of 1 and the finite difference. For smooth
    /// layers 1e-8 is agreement: with a step of 1e-5 the error of the method is about 1e-10 times
    /// the third derivative.
    pub fn error(&self) -> f64 {
        let error = (self.backward - self.finite).abs() / self.finite.abs().max(1.0);
        // NaN counts as infinite, because comparisons with NaN are false.
        if error.is_nan() { f64::INFINITY } else { error }
    }
}

/// The number that is differentiated.
#[derive(Clone, Copy, Debug)]
pub enum Objective<'a> {
    /// The sum of all outputs, each times a random number: depends on every part of the layer.
    Projection,
    /// The sum of a loss over the rows, with these targets.
    Loss(&'a dyn Loss, &'a Tensor),
}

/// The rows that a layer is checked with, and what is differentiated.
#[derive(Clone, Copy)]
pub struct DerivativeCheck<'a> {
    /// The shape of a row.
    pub shape: &'a [usize],
    /// How many random rows there are. Where the layer takes integers, they are from 0 to 6.
    pub rows: usize,
    /// The seed of the rows, of initial values, and of what dropout drops, always the same
    /// elements.
    pub seed: u64,
    /// What is differentiated.
    pub objective: Objective<'a>,
    /// Tells by name which parameters are not trained.
    pub frozen: &'a dyn Fn(&str) -> bool,
}

impl<'a> DerivativeCheck<'a> {
    /// Of a projection, on four rows of this shape, with all parameters trained.
    pub fn new(shape: &'a [usize]) -> DerivativeCheck<'a> {
        DerivativeCheck {
            shape,
            rows: 4,
            seed: 1,
            objective: Objective::Projection,
            frozen: &|_| false,
        }
    }

    /// Computes the derivatives by all trained parameters and all inputs of `module`, with
    /// `backward` and as differences of `forward`, and returns the one where they differ most.
    pub fn worst(self, module: impl Module) -> Result<Derivative> {
        let DerivativeCheck {
            shape,
            rows,
            seed,
            objective,
            frozen,
        } = self;
        let takes = module.input_dtype();
        let module = Box::new(module);
        let model = Model::new(module, shape, DType::F64, Device::Cpu, seed, frozen)?;
        let params = &model.params;
        let mut random = Random::new(seed);
        let x_shape: Vec<usize> = [rows].iter().chain(shape).copied().collect();
        let x = match takes {
            None => Tensor::randn(&x_shape, DType::F64, Device::Cpu, &mut random)?,
            Some(dtype) => {
                let unit = Tensor::rand(&x_shape, DType::F64, Device::Cpu, &mut random)?;
                ops::scale_into(&unit, &unit, 7.0)?;
                unit.to_dtype(dtype)?
            }
        };
        let mut trial = ModelTrial {
            model: &model,
            x: &x,
            objective,
            scratch: Scratch::new(Device::Cpu),
            saved: Saved::default(),
            position: Tensor::from_slice(&[1i64, 0], &[2], Device::Cpu)?,
            seed,
            multiples: None,
        };
        // Earlier contents must not matter.
        ops::fill_into(params.gradients(), f64::NAN)?;
        let dx = trial.run(true)?.1;
        let mut worst = Derivative {
            by: "nothing".into(),
            backward: 0.0,
            finite: 0.0,
        };
        let mut parts = Vec::new();
        if let Some(dx) = dx {
            parts.push(("input", &x, dx));
        }
        for parameter in params.list() {
            if let Some(gradient) = params.gradient(parameter.id) {
                parts.push((
                    &parameter.name,
                    params.value(parameter.id),
                    gradient.to_vec()?,
                ));
            }
        }
        for (name, values, backward) in parts {
            for (index, backward) in backward.into_iter().enumerate() {
                let finite = trial.difference(values, index)?;
                let derivative = Derivative {
                    by: format!("{name}[{index}]"),
                    backward,
                    finite,
                };
                if derivative.error() >= worst.error() {
                    worst = derivative;
                }
            }
        }
        Ok(worst)
    }
}

/// A model, run repeatedly on one input.
struct ModelTrial<'a> {
    model: &'a Model,
    x: &'a Tensor,
    objective: Objective<'a>,
    scratch: Scratch,
    saved: Saved,
    position: Tensor,
    seed: u64,
    /// The random numbers of a projection, in the output's shape.
    multiples: Option<Tensor>,
}

/// Half the distance between the two points of a finite difference.
const STEP: f64 = 1e-5;

impl ModelTrial<'_> {
    /// Returns the objective, and with `backward` its derivatives by the input, if that has any.
    /// Those by the parameters are then in the gradients' arena.
    fn run(&mut self, backward: bool) -> Result<(f64, Option<Vec<f64>>)> {
        let position = &self.position;
        let options = PassOptions {
            training: true,
            accumulate: false,
            last: true,
            seed: self.seed,
            position,
        };
        let mut ready = |_| Ok(());
        let mut pass = Pass::new(
            &self.model.params,
            &mut self.scratch,
            &mut self.saved,
            options,
            &mut ready,
        );
        let y = self.model.forward(&mut pass, self.x)?;
        let (objective, dy) = match self.objective {
            Objective::Projection => {
                let multiples = match &self.multiples {
                    Some(multiples) => multiples.clone(),
                    None => y.randn_like(&mut Random::new(!self.seed))?,
                };
                self.multiples = Some(multiples.clone());
                let numbers = [&y, &multiples].map(Tensor::to_vec::<f64>);
                let [y, by] = numbers;
                let sum = y?.iter().zip(by?).map(|(y, by)| y * by).sum();
                (sum, multiples)
            }
            Objective::Loss(loss, targets) => {
                let stats = Tensor::zeros(&[STATS], DType::F64, Device::Cpu)?;
                let dy = loss.gradient(&mut pass, [&y, targets, &stats])?;
                (stats.index(0)?.item()?, dy)
            }
        };
        if !backward {
            return Ok((objective, None));
        }
        let dx = self.model.backward_to_input(&mut pass, &dy)?;
        Ok((objective, dx.map(|dx| dx.to_vec()).transpose()?))
    }

    /// The central difference of the objective by element `index` of `values`.
    fn difference(&mut self, values: &Tensor, index: usize) -> Result<f64> {
        let set = |value: f64| {
            values.with_slice_mut(|values: &mut [f64]| std::mem::replace(&mut values[index], value))
        };
        let value = set(0.0)?;
        let mut at = |value: f64| -> Result<f64> {
            set(value)?;
            Ok(self.run(false)?.0)
        };
        let difference = at(value + STEP)? - at(value - STEP)?;
        set(value)?;
        Ok(difference / (2.0 * STEP))
    }
}
