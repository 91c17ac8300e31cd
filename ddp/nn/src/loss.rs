//! Losses: from a model's output and the targets they compute the loss of each row, the gradient of
//! the output, and running totals for the mean over a global batch.
//!
//! Nothing is divided here: gradients are divided once, by the sum of weights over all ranks and
//! micro-batches. For an output in bf16, losses and totals are f32, and the gradient is rounded
//! once. Letters: B rows, C classes.

use std::fmt;

use ddp_kernels::ops::{self, CrossEntropyOptions, CrossEntropyOut};
use ddp_kernels::{DType, Tensor};

use crate::build::Numerics;
use crate::error::{Error, Result};
use crate::pass::Pass;

/// What training minimizes.
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

    /// The gradient alone, in new memory.
    fn gradient(&self, pass: &mut Pass<'_>, of: [&Tensor; 3]) -> Result<Tensor> {
        let gradient = pass.take_as(of[0].shape(), of[0].dtype())?;
        self.compute(pass, of, Some(&gradient))?;
        Ok(gradient)
    }
}

/// The number of elements of `stats`.
pub const STATS: usize = 4;

/// Softmax cross-entropy with class indices (u8, i32 or i64), as `torch.nn.CrossEntropyLoss`. The
/// mean divides by the sum of the targets' class weights, which are 1 without `class_weights`.
#[derive(Clone, Debug)]
pub struct CrossEntropy {
    /// The part of the target's probability that is spread over all classes, 0 to 1.
    pub label_smoothing: f64,
    /// (C), the weight of each class, in the dtype of the model's values and on its device.
    pub class_weights: Option<Tensor>,
    /// Rows with this target are ignored.
    pub ignore_index: Option<i64>,
}

impl Default for CrossEntropy {
    /// PyTorch's defaults.
    fn default() -> CrossEntropy {
        CrossEntropy {
            label_smoothing: 0.0,
            class_weights: None,
            ignore_index: Some(-100),
        }
    }
}

impl Loss for CrossEntropy {
    fn compute(
        &self,
        pass: &mut Pass<'_>,
        [output, targets, stats]: [&Tensor; 3],
        gradient: Option<&Tensor>,
    ) -> Result<Tensor> {
        let classes = match output.shape().dims() {
            [_, .., classes] if *classes > 0 => *classes,
            _ => return Err(wrong_output("cross entropy", "[rows, …, classes]", output)),
        };
        // (B, T, C) with targets (B, T) has B·T rows.
        let rows = output.count() / classes;
        let logits = output.reshape(&[rows, classes])?;
        let targets = if targets.count() == rows {
            &targets.reshape(&[rows])?
        } else {
            targets
        };
        let dtype = math_dtype(output);
        let losses = pass.take_as(&[rows], dtype)?;
        let own = self.class_weights.as_ref();
        let weights = own.map(|_| pass.take_as(&[rows], dtype)).transpose()?;
        let gradient = gradient
            .map(|it| it.reshape(&[rows, classes]))
            .transpose()?;
        let out = CrossEntropyOut {
            losses: &losses,
            dlogits: gradient.as_ref(),
            weights: weights.as_ref(),
        };
        let options = CrossEntropyOptions {
            ignore_index: self.ignore_index,
            label_smoothing: self.label_smoothing,
            class_weights: self.class_weights.as_ref(),
            gradient_scale: 1.0,
        };
        ops::cross_entropy(&logits, targets, out, &options, Some(stats))?;
        Ok(losses)
    }
}

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

fn wrong_output(loss: &str, expected: &str, output: &Tensor) -> Error {
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
