//! Sums and maxima over axes, and what is made of them.

use ddp_kernels::Tensor;
use ddp_kernels::ops::{self, ChainStep};

use super::operation::*;

impl Var {
    /// The sum over an axis, which stays with length 1.
    #[track_caller]
    pub fn sum(&self, axis: isize) -> Var {
        match self.axis("sum", axis) {
            Some(axis) => self.reduce(Sum(vec![axis])),
            None => self.clone(),
        }
    }

    /// The mean over an axis, which stays with length 1.
    #[track_caller]
    pub fn mean(&self, axis: isize) -> Var {
        self.axis("mean", axis);
        let sum = self.sum(axis).named("mean");
        (sum * (1.0 / self.size(axis) as f64)).named("mean")
    }

    /// The largest over an axis, which stays with length 1; NaN if one is. Of equal ones each gets
    /// an equal part of the gradient.
    #[track_caller]
    pub fn largest(&self, axis: isize) -> Var {
        match self.axis("largest", axis) {
            Some(axis) => self.reduce(Largest(vec![axis])),
            None => self.clone(),
        }
    }

    /// The smallest over an axis, as `largest`.
    #[track_caller]
    pub fn smallest(&self, axis: isize) -> Var {
        self.axis("smallest", axis);
        (-(-self).largest(axis).named("smallest")).named("smallest")
    }

    #[track_caller]
    pub(super) fn reduce(&self, op: impl Into<Op>) -> Var {
        let (op, mut shape) = (op.into(), self.shape());
        let (Op::Sum(Sum(axes)) | Op::Largest(Largest(axes))) = &op else {
            return self.clone();
        };
        axes.iter().for_each(|&axis| shape[axis] = 1);
        // Sums of nothing.
        let is_empty = axes.iter().any(|&axis| self.shape()[axis] == 0);
        if is_empty && !shape.contains(&0) {
            if matches!(op, Op::Sum(_)) {
                return self.filled(0.0, &shape);
            }
            let help = "reduce axes that have elements";
            return self.refuse(&op.name(), &[self], "an axis that is not empty", help);
        }
        self.push(op, &[self], shape)
    }

    /// e^x divided by its sum over an axis.
    #[track_caller]
    pub fn softmax(&self, axis: isize) -> Var {
        self.axis("softmax", axis);
        let largest = self.largest(axis).named("softmax");
        let exp = (self - largest.without_gradient()).exp();
        (&exp / exp.sum(axis)).named("softmax")
    }

    /// The logarithm of the softmax.
    #[track_caller]
    pub fn log_softmax(&self, axis: isize) -> Var {
        self.axis("log_softmax", axis);
        let largest = self.largest(axis).named("log_softmax");
        let centred = self - largest.without_gradient();
        (&centred - centred.exp().sum(axis).log()).named("log_softmax")
    }
}

impl Operation for Sum {
    fn step(&self, of: [usize; 3]) -> Option<ChainStep> {
        Some(ChainStep::Sum(of[0]))
    }

    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        vec![Some(at.d.expand(&at.x[0].shape()))]
    }

    /// Of all rows, perhaps from the sums of blocks of them.
    fn write(&self, r: &mut Run<'_, '_>, out: &Tensor, accumulate: bool) -> Result<()> {
        let out = out.flatten()?;
        if let Some(sums) = r.left_sums() {
            return Ok(ops::add_row_sums_into(&out, &sums, accumulate)?);
        }
        let x = rows_of(r.x[0], out.count())?;
        Ok(ops::column_sum_into(&out, &x, accumulate)?)
    }
}

impl Operation for Largest {
    fn step(&self, of: [usize; 3]) -> Option<ChainStep> {
        Some(ChainStep::Max(of[0]))
    }

    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        let is_largest = at.x[0].equal(at.y);
        let over = |sum: Var, axis: &usize| sum.sum(*axis as isize);
        let ties = self.0.iter().fold(is_largest.clone(), over);
        vec![Some(is_largest * (at.d / ties))]
    }
}
