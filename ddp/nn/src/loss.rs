//! Losses: from a model's output and the targets they compute the loss of each row, the gradient of
//! the output, and running totals for the mean over a global batch.
//!
//! Nothing is divided here: gradients are divided once, by the sum of weights over all ranks and
//! micro-batches. For an output in bf16, losses and totals are f32, and the gradient is rounded
//! once. Letters: B rows, C classes.

use std::fmt;

use ddp_kernels::ops::{self, CrossEntropyOptions, CrossEntropyOut};
use ddp_kernels::{DType, Tensor};

use crate::error::{Error, Result};
use crate::pass::Pass;

/// What training minimizes.
pub trait Loss: fmt::Debug + Send {
    /// The loss of each row of `output` (B, …), and in training the gradient of their SUM. Adds to
    /// `stats`, f32 or f64 `[4]` on the model's device: the sum of losses, its divisor for the
    /// mean, the number of correct rows, and the number of rows.
    fn compute(
        &self,
        pass: &mut Pass<'_>,
        output: &Tensor,
        targets: &Tensor,
        stats: &Tensor,
    ) -> Result<Losses>;

    /// As `compute` in training, but writes the gradient over `output`.
    fn overwrite(
        &self,
        pass: &mut Pass<'_>,
        output: &Tensor,
        targets: &Tensor,
        stats: &Tensor,
    ) -> Result<()> {
        let gradient = self.gradient(pass, output, targets, stats)?;
        Ok(output.copy_from(&gradient)?)
    }

    /// As `compute` in training, but returns only the gradient.
    fn gradient(
        &self,
        pass: &mut Pass<'_>,
        output: &Tensor,
        targets: &Tensor,
        stats: &Tensor,
    ) -> Result<Tensor> {
        let losses = self.compute(pass, output, targets, stats)?;
        Ok(losses
            .gradient
            .expect("in training a loss returns the gradient"))
    }
}

/// What a loss returns.
#[derive(Debug)]
pub struct Losses {
    /// (B), the loss of each row, in the dtype of the model's values; 0 for ignored rows.
    pub rows: Tensor,
    /// The gradient of their sum by the output, in its shape and dtype. Present in training.
    pub gradient: Option<Tensor>,
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

impl CrossEntropy {
    /// The loss of each row. Writes the gradient to `gradient`, which may be `output`.
    fn run(
        &self,
        pass: &mut Pass<'_>,
        [output, targets, stats]: [&Tensor; 3],
        gradient: Option<&Tensor>,
    ) -> Result<Tensor> {
        let classes = output
            .shape()
            .last()
            .copied()
            .filter(|&classes| classes > 0 && output.shape().rank() > 1);
        let Some(classes) = classes else {
            return Err(wrong_output("cross entropy", "[rows, …, classes]", output));
        };
        // (B, T, C) with targets (B, T) has B·T rows.
        let rows = output.count() / classes;
        let logits = output.reshape(&[rows, classes])?;
        let targets = if targets.count() == rows {
            targets.reshape(&[rows])?
        } else {
            targets.clone()
        };
        let dtype = math_dtype(output);
        let losses = pass.take_as(&[rows], dtype)?;
        let weights = self
            .class_weights
            .is_some()
            .then(|| pass.take_as(&[rows], dtype))
            .transpose()?;
        let gradient = gradient
            .map(|gradient| gradient.reshape(&[rows, classes]))
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
        ops::cross_entropy(&logits, &targets, out, &options, Some(stats))?;
        Ok(losses)
    }
}

impl Loss for CrossEntropy {
    fn compute(
        &self,
        pass: &mut Pass<'_>,
        output: &Tensor,
        targets: &Tensor,
        stats: &Tensor,
    ) -> Result<Losses> {
        let gradient = pass
            .is_training()
            .then(|| pass.take_as(output.shape(), output.dtype()))
            .transpose()?;
        Ok(Losses {
            rows: self.run(pass, [output, targets, stats], gradient.as_ref())?,
            gradient,
        })
    }

    fn overwrite(
        &self,
        pass: &mut Pass<'_>,
        output: &Tensor,
        targets: &Tensor,
        stats: &Tensor,
    ) -> Result<()> {
        self.run(pass, [output, targets, stats], Some(output))?;
        Ok(())
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
        output: &Tensor,
        targets: &Tensor,
        stats: &Tensor,
    ) -> Result<Losses> {
        let Some(&rows) = output.shape().first() else {
            return Err(wrong_output("squared error", "[rows, …]", output));
        };
        let losses = pass.take_as(&[rows], math_dtype(output))?;
        let gradient = pass
            .is_training()
            .then(|| pass.take_as(output.shape(), output.dtype()))
            .transpose()?;
        ops::mse_into(
            &losses,
            gradient.as_ref(),
            output,
            targets,
            1.0,
            Some(stats),
        )?;
        Ok(Losses {
            rows: losses,
            gradient,
        })
    }
}

fn wrong_output(loss: &str, expected: &str, output: &Tensor) -> Error {
    Error::Model {
        layer: loss.into(),
        expected: format!("an output of {expected}"),
        got: output.to_string(),
        help: "keep the rows as the first dimension".into(),
    }
}

/// The dtype in which losses, statistics and sums of this tensor are computed.
pub(crate) fn math_dtype(output: &Tensor) -> DType {
    if output.dtype() == DType::BF16 {
        DType::F32
    } else {
        output.dtype()
    }
}
