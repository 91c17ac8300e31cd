//! LayerNorm and RMSNorm over the last dimension, as `torch.nn.LayerNorm` and `torch.nn.RMSNorm`.
//! Letters: R rows of the input (all its dimensions but the last), C columns.

use ddp_kernels::Tensor;
use ddp_kernels::ops::{self, Norm, NormGradients, NormOptions};

use crate::build::{Build, Init, ParamId};
use crate::error::Result;
use crate::layer::Layer;
use crate::loss::math_dtype;
use crate::pass::Pass;

/// Normalizes the last dimension. The weight (C) starts at 1, the bias (C) at 0.
#[derive(Clone, Debug)]
pub struct Normalize {
    norm: Norm,
    epsilon: f64,
    has_bias: bool,
    built: Option<Built>,
}

#[derive(Clone, Copy, Debug)]
struct Built {
    columns: usize,
    weight: ParamId,
    bias: Option<ParamId>,
}

impl Normalize {
    /// LayerNorm with weight and bias, and ε = 1e-5.
    pub fn layer() -> Normalize {
        Normalize {
            norm: Norm::Layer,
            epsilon: 1e-5,
            has_bias: true,
            built: None,
        }
    }

    /// RMSNorm with a weight, and ε = 1e-5.
    pub fn rms() -> Normalize {
        Normalize {
            norm: Norm::Rms,
            has_bias: false,
            ..Normalize::layer()
        }
    }

    /// The same norm without a bias.
    pub fn without_bias(mut self) -> Normalize {
        self.has_bias = false;
        self
    }

    /// The same norm with another ε, which is added to the mean of squares.
    pub fn epsilon(self, epsilon: f64) -> Normalize {
        Normalize { epsilon, ..self }
    }

    fn built(&self) -> Built {
        self.built
            .expect("a layer is built (Model::new) before it is run")
    }

    fn options<'a>(&self, pass: &Pass<'a>) -> Result<NormOptions<'a>> {
        let Built { weight, bias, .. } = self.built();
        Ok(NormOptions {
            norm: self.norm,
            epsilon: self.epsilon,
            weight: Some(pass.value(weight)?),
            bias: bias.map(|bias| pass.value(bias)).transpose()?,
        })
    }

    /// `x` (…, C) as (R, C).
    fn rows(&self, x: &Tensor) -> Result<Tensor> {
        let columns = self.built().columns;
        Ok(x.reshape(&[x.count() / columns, columns])?)
    }

    /// Memory for the output (R, C) and the statistics of `rows` (R, C).
    fn take(&self, pass: &mut Pass<'_>, rows: &Tensor) -> Result<(Tensor, Tensor)> {
        let kept = [rows.shape()[0], self.norm.statistics()];
        Ok((
            pass.take(rows.shape())?,
            pass.take_as(&kept, math_dtype(rows))?,
        ))
    }

    /// Saves what backward restores.
    fn save(&self, pass: &mut Pass<'_>, rows: &Tensor, statistics: &Tensor) {
        if pass.is_training() {
            pass.save(rows);
            pass.save(statistics);
        }
    }

    /// Whether weight or bias is trained.
    pub(crate) fn trains(&self, pass: &Pass<'_>) -> bool {
        let Built { weight, bias, .. } = self.built();
        pass.trains(weight) || bias.is_some_and(|bias| pass.trains(bias))
    }

    /// x + residual, in one pass over memory with its norm, which it leaves to the layer above.
    pub(crate) fn forward_sum(
        &self,
        pass: &mut Pass<'_>,
        x: &Tensor,
        residual: &Tensor,
    ) -> Result<Tensor> {
        let (rows, residual) = (self.rows(x)?, self.rows(residual)?);
        let sum = pass.take(rows.shape())?;
        let (y, statistics) = self.take(pass, &rows)?;
        let of = [&rows, &residual];
        ops::add_norm_into(&sum, &y, &statistics, of, &self.options(pass)?)?;
        self.save(pass, &sum, &statistics);
        pass.leave_norm(&sum, y.reshape(x.shape())?);
        Ok(sum.reshape(x.shape())?)
    }

    /// The backward, to which the gradient `dresidual` that reaches x past the norm is added.
    pub(crate) fn backward_sum(
        &self,
        pass: &mut Pass<'_>,
        dy: &Tensor,
        dresidual: Option<&Tensor>,
    ) -> Result<Tensor> {
        let built = self.built();
        let (weight, bias) = (built.weight, built.bias);
        let (statistics, x) = (pass.restore(), pass.restore());
        let rows = x.shape()[0];
        let blocks = [ops::norm_blocks_of(rows), built.columns];
        let sums_of = |pass: &mut Pass<'_>, parameter: Option<ParamId>| {
            parameter
                .filter(|&parameter| pass.trains(parameter))
                .map(|_| pass.take_as(&blocks, math_dtype(dy)))
                .transpose()
        };
        let weight_sums = sums_of(pass, Some(weight))?;
        let bias_sums = sums_of(pass, bias)?;
        let dx = pass.take(x.shape())?;
        let dresidual = dresidual.map(|of| self.rows(of)).transpose()?;
        let mut gradients = NormGradients {
            dx: &dx,
            dresidual: dresidual.as_ref(),
            weight_sums: weight_sums.as_ref(),
            bias_sums: bias_sums.as_ref(),
            row_sums: None,
        };
        let (dy_rows, options) = (self.rows(dy)?, self.options(pass)?);
        // The layer below a norm with a bias mostly has one, too.
        let has_biases = bias_sums.is_some() && ops::prefers_row_sums(rows);
        let sums_rows = has_biases && ops::norm_sums_rows(&gradients, &dy_rows, &x, &options);
        let row_sums = sums_rows.then(|| pass.take_row_sums(&dx)).transpose()?;
        let row_sums = row_sums.flatten();
        gradients.row_sums = row_sums.as_ref();
        ops::norm_backward_into(&gradients, &dy_rows, &x, &statistics, &options)?;
        for (parameter, sums) in [(Some(weight), weight_sums), (bias, bias_sums)] {
            let Some(parameter) = parameter else { continue };
            if let (Some(sums), Some(gradient)) = (sums, pass.gradient(parameter)) {
                ops::add_row_sums_into(gradient.tensor, &sums, gradient.accumulate)?;
            }
            pass.finished(parameter)?;
        }
        Ok(dx.reshape(dy.shape())?)
    }
}

impl Layer for Normalize {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        let Some(&columns) = shape.last().filter(|&&columns| columns > 0) else {
            return Err(build.refuse(
                "at least one column",
                format!("rows of shape {shape:?}"),
                "a norm works on the last dimension of a row",
            ));
        };
        let weight = build.parameter("weight", &[columns], Init::Constant(1.0))?;
        let bias = self
            .has_bias
            .then(|| build.parameter("bias", &[columns], Init::Constant(0.0)))
            .transpose()?;
        self.built = Some(Built {
            columns,
            weight,
            bias,
        });
        Ok(shape.to_vec())
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        if let Some(normed) = pass.norm_of(x) {
            return Ok(normed);
        }
        let rows = self.rows(x)?;
        let (y, statistics) = self.take(pass, &rows)?;
        ops::norm_into(&y, &statistics, &rows, &self.options(pass)?)?;
        self.save(pass, &rows, &statistics);
        Ok(y.reshape(x.shape())?)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        self.backward_sum(pass, dy, None).map(Some)
    }
}
