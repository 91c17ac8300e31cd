//! The ends of a trace: what nothing computes, and gradients of parameters that are complete.

use ddp_kernels::{Tensor, ops};

use super::kinds::is_bf16;
use super::operation::*;

impl Operation for Input {
    fn name(&self) -> String {
        "x".into()
    }
}

impl Operation for Parameter {}

impl Operation for Numbers {
    fn kind(&self, _of: &[Option<NumberKind>]) -> Option<NumberKind> {
        (!self.0.iter().all(|it| is_bf16(*it))).then_some(NumberKind::SumDtypeReadRounded)
    }

    fn numbers(&self, _count: usize) -> Option<Vec<f64>> {
        Some(self.0.to_vec())
    }
}

impl Operation for Given {}

impl Operation for Constant {
    fn name(&self) -> String {
        self.0.to_string()
    }

    fn kind(&self, _of: &[Option<NumberKind>]) -> Option<NumberKind> {
        (!is_bf16(self.0)).then_some(NumberKind::SumDtypeReadRounded)
    }

    fn numbers(&self, count: usize) -> Option<Vec<f64>> {
        Some(vec![self.0; count])
    }
}

impl Operation for Steps {
    fn numbers(&self, count: usize) -> Option<Vec<f64>> {
        Some((0..count).map(|it| (it * self.0) as f64).collect())
    }
}

impl Operation for Output {
    fn kind(&self, _of: &[Option<NumberKind>]) -> Option<NumberKind> {
        Some(self.1)
    }

    /// Of a norm: the sum of its rows.
    fn write(&self, r: &mut Run<'_, '_>, out: &Tensor, accumulate: bool) -> Result<()> {
        Ok(ops::add_row_sums_into(&out.flatten()?, r.x[0], accumulate)?)
    }
}

impl Operation for Gradient {
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        r.write_gradient(self.0, |r, to| match r.x {
            [] if to.accumulate => Ok(()),
            [] => Ok(ops::zero(to.tensor)?),
            [of, ..] => to.write(of),
        })
    }
}

impl Operation for GradientBy {
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        r.write_gradient(self.0, |r, to| self.1.write(r, to.tensor, to.accumulate))
    }
}

impl Operation for Finished {
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        r.pass.finished(self.0)
    }
}
