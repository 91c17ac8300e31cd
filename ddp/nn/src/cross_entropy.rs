//! The cross-entropy of class indices, by a kernel, and of class probabilities, by its formula.
//! Letters: B rows, T positions, C classes.

use std::fmt;

use ddp_kernels::ops::{self, CrossEntropyOptions, CrossEntropyOut};
use ddp_kernels::{DType, Tensor};

use crate::error::{Error, Result};
use crate::forward::{LossFormula, Scope, Var, first_largest};
use crate::loss::{Loss, math_dtype, wrong_output};
use crate::pass::Pass;

/// Softmax cross-entropy, as `torch.nn.CrossEntropyLoss`, of class indices (u8, i32 or i64), one
/// for each row or position of the output, or of probabilities of all classes (floats, in the
/// output's shape).
///
/// The mean of indices divides by the sum of the targets' class weights, which are 1 without
/// `class_weights`; that of probabilities by the number of rows. A row of probabilities is right if
/// its largest is that of the output.
#[derive(Clone)]
pub struct CrossEntropy {
    /// The part of the target's probability that is spread over all classes, 0 to 1.
    pub label_smoothing: f64,
    /// (C), the weight of each class, in the dtype of the model's values and on its device.
    pub class_weights: Option<Tensor>,
    /// Rows with this target are ignored, if targets are indices.
    pub ignore_index: Option<i64>,
}

impl fmt::Debug for CrossEntropy {
    /// With the numbers of the class weights: a run is resumed with the same ones.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = |weights: &Tensor| weights.to_dtype(DType::F64)?.to_vec::<f64>();
        let class_weights = self.class_weights.as_ref();
        let class_weights = class_weights.map(|it| numbers(it).unwrap_or_default());
        f.debug_struct("CrossEntropy")
            .field("label_smoothing", &self.label_smoothing)
            .field("class_weights", &class_weights)
            .field("ignore_index", &self.ignore_index)
            .finish()
    }
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
    fn is_by_position(&self) -> bool {
        true
    }

    fn compute(
        &self,
        pass: &mut Pass<'_>,
        of: [&Tensor; 3],
        gradient: Option<&Tensor>,
    ) -> Result<Tensor> {
        let [output, targets, stats] = of;
        let classes = classes(output)?;
        if targets.dtype().is_float() {
            return self
                .of_probabilities(output, targets)?
                .compute(pass, of, gradient);
        }
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

impl CrossEntropy {
    /// The loss of probabilities, which it checks.
    fn of_probabilities(&self, output: &Tensor, targets: &Tensor) -> Result<OfProbabilities> {
        classes(output)?;
        let (shape, label_smoothing) = (output.shape(), self.label_smoothing);
        if targets.shape()[..] != shape[..] {
            let expected =
                format!("probabilities of the output's shape {shape:?}, or class indices");
            let help = "give a probability for each class, or indices as i64";
            return Err(Error::model("cross entropy", expected, targets, help));
        }
        if !(0.0..=1.0).contains(&label_smoothing) {
            let (expected, help) = ("label_smoothing from 0 to 1", "0 smooths nothing");
            return Err(Error::model(
                "cross entropy",
                expected,
                label_smoothing,
                help,
            ));
        }
        Ok(OfProbabilities {
            label_smoothing,
            class_weights: self.class_weights.clone(),
        })
    }
}

/// How many classes an output (B, …, C) has.
fn classes(output: &Tensor) -> Result<usize> {
    match output.shape().dims() {
        [_, .., classes] if *classes > 0 => Ok(*classes),
        _ => Err(wrong_output("cross entropy", "[rows, …, classes]", output)),
    }
}

/// With x the logits, t the probabilities and a the label smoothing:
/// −Σ_c w_c ((1 − a) t_c + a/C) ln softmax(x)_c.
#[derive(Clone, Debug)]
struct OfProbabilities {
    label_smoothing: f64,
    class_weights: Option<Tensor>,
}

impl PartialEq for OfProbabilities {
    /// Weights are equal if they are the same tensor: their values are on the device.
    fn eq(&self, other: &OfProbabilities) -> bool {
        let [own, others] = [self, other].map(|it| it.class_weights.as_ref());
        let are_same = own
            .zip(others)
            .is_some_and(|(own, other)| own.shares_memory_with(other));
        self.label_smoothing == other.label_smoothing && (are_same || own.or(others).is_none())
    }
}

impl LossFormula for OfProbabilities {
    fn losses(&self, m: &mut Scope<'_>, output: &Var, target: &Var) -> Var {
        let log_p = output.log_softmax(-1);
        let mut shares = target.clone();
        if self.label_smoothing != 0.0 {
            let of_each = self.label_smoothing / output.size(-1) as f64;
            shares = shares * (1.0 - self.label_smoothing) + of_each;
        }
        if let Some(weights) = &self.class_weights {
            shares = shares * m.tensor(weights, "class_weights");
        }
        -(shares * log_p).sum(-1)
    }

    fn correct(&self, m: &mut Scope<'_>, output: &Var, target: &Var) -> Option<Var> {
        let [chosen, expected] = first_largest(m, [output, target]);
        Some(chosen.equal(&expected))
    }
}
