//! Losses: from a model's output and the targets they compute the loss of each row, the gradient of
//! the output, and running totals for the mean over a global batch.
//!
//! Nothing is divided here: gradients are divided once, by the sum of weights over all ranks and
//! micro-batches. For an output in bf16, losses and totals are f32, and the gradient is rounded
//! once. Letter: B rows.

use std::fmt;

use ddp_kernels::{DType, Tensor, ops};

use crate::build::Numerics;
use crate::error::{Error, Result};
use crate::pass::Pass;

/// What training minimizes. A [`LossFormula`](crate::LossFormula) is one, too.
pub trait Loss: fmt::Debug + Send + Sync {
    /// The loss (B) of each row of `output` (B, …), in the dtype of the model's values; 0 for
    /// ignored rows. Writes the gradient of their SUM to `gradient`, if given, which has the shape
    /// and dtype of `output` and may be `output`. Adds to `stats`, f32 or f64 `[4]` on the model's
    /// device: the sum of losses, its divisor for the mean, the number of correct rows, and the
    /// number of rows.
    fn compute(
        &self,
        pass: &mut Pass<'_>,
        of: [&Tensor; 3],
        gradient: Option<&Tensor>,
    ) -> Result<Tensor>;

    /// Whether outputs (B, T, C) have the losses of B·T rows (C). Then a last linear layer without
    /// bias is left to the loss, as a [`Head`](crate::Head) always is.
    fn is_by_position(&self) -> bool {
        false
    }

    /// The gradient alone, in new memory.
    fn gradient(&self, pass: &mut Pass<'_>, of: [&Tensor; 3]) -> Result<Tensor> {
        let gradient = pass.take_as(of[0].shape(), of[0].dtype())?;
        self.compute(pass, of, Some(&gradient))?;
        Ok(gradient)
    }
}

/// The number of elements of `stats`.
pub const STATS: usize = 4;

/// The squared error, as `torch.nn.MSELoss`. Targets have the output's shape, and the mean is over
/// all elements.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mse;

impl Loss for Mse {
    fn compute(
        &self,
        pass: &mut Pass<'_>,
        [output, targets, stats]: [&Tensor; 3],
        gradient: Option<&Tensor>,
    ) -> Result<Tensor> {
        let Some(&rows) = output.shape().first() else {
            return Err(wrong_output("squared error", "[rows, …]", output));
        };
        let losses = pass.take_as(&[rows], math_dtype(output))?;
        ops::mse_into(&losses, gradient, output, targets, 1.0, Some(stats))?;
        Ok(losses)
    }
}

pub(crate) fn wrong_output(loss: &str, expected: &str, output: &Tensor) -> Error {
    Error::model(
        loss,
        format!("an output of {expected}"),
        output.to_string(),
        "keep the rows as the first dimension",
    )
}

/// The dtype in which losses, statistics and sums of this tensor are computed.
pub(crate) fn math_dtype(output: &Tensor) -> DType {
    Numerics::from(output.dtype()).masters()
}
