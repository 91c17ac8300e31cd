//! A layer norm or RMS norm that is written as a formula becomes the operation that computes it:
//! forward and backward read each row once, and the gradients of weight and bias are summed in the
//! same pass.

use ddp_kernels::ops::{Function, Norm};

use super::trace::{Op, Var};

impl Var {
    /// The same value by a norm's operation, if this is a norm times its weight, or that plus its
    /// bias. Weight and bias are parameters of one row.
    pub(super) fn as_norm(&self) -> Option<Var> {
        let row = [*self.shape().last().filter(|_| self.rank() > 1)?];
        let of_row = |it: &Var| {
            let is_row = matches!(it.op(), Op::Parameter(_)) && it.shape() == row && row != [0];
            is_row.then(|| it.clone())
        };
        if let Some((normed, weight)) = self.operands(Function::Mul, of_row) {
            let (x, norm, epsilon) = normed.normed()?;
            let fits = x.shape() == self.shape();
            return fits.then(|| x.norm(norm, epsilon, &weight, None));
        }
        let (normed, bias) = self.operands(Function::Add, of_row)?;
        match (normed.op(), &normed.inputs()[..]) {
            (Op::Norm(Norm::Layer, epsilon), [x, weight]) if x.shape() == self.shape() => {
                Some(x.norm(Norm::Layer, epsilon, weight, Some(&bias)))
            }
            _ => None,
        }
    }

    /// What this is the norm of, without a weight: `x / √(mean(x²) + ε)`, in a layer norm of
    /// `x − mean(x)`.
    fn normed(&self) -> Option<(Var, Norm, f64)> {
        let of_root = |function| move |it: &Var| it.operand(function);
        let (value, squares) = self
            .operands(Function::Mul, of_root(Function::Rsqrt))
            .or_else(|| self.operands(Function::Div, of_root(Function::Sqrt)))?;
        let (squares, epsilon) = squares.operands(Function::Add, Var::number_of)?;
        Some(epsilon).filter(|it| *it >= 0.0 && it.is_finite())?;
        let is_value = |it: &Var| (it.id == value.id).then_some(());
        let (other, ()) = squares.mean_of()?.operands(Function::Mul, is_value)?;
        is_value(&other)?;
        match value.operands(Function::Sub, Var::mean_of) {
            Some((x, of)) if x.id == of.id => Some((x, Norm::Layer, epsilon)),
            _ => Some((value, Norm::Rms, epsilon)),
        }
    }

    /// What this is the mean of, over the last axis.
    fn mean_of(&self) -> Option<Var> {
        let (sum, scale) = self.operands(Function::Mul, Var::number_of)?;
        let x = sum.inputs().pop()?;
        let is_mean = matches!(sum.op(), Op::Sum(axes) if axes == [x.rank() - 1])
            && scale == 1.0 / x.size(-1) as f64;
        is_mean.then_some(x)
    }

    pub(super) fn number_of(&self) -> Option<f64> {
        match self.op() {
            Op::Constant(value) => Some(value),
            _ => None,
        }
    }

    /// What this is the function of.
    pub(super) fn operand(&self, function: Function) -> Option<Var> {
        let is_it = matches!(self.op(), Op::Apply(it) if it == function);
        self.inputs().pop().filter(|_| is_it)
    }

    /// The operands of a function of two, if the second one fits, or the first one of a sum or a
    /// product. The one that fits comes last.
    pub(super) fn operands<T>(
        &self,
        function: Function,
        fits: impl Fn(&Var) -> Option<T>,
    ) -> Option<(Var, T)> {
        self.operand(function)?;
        let [a, b] = <[Var; 2]>::try_from(self.inputs()).ok()?;
        if let Some(fit) = fits(&b) {
            return Some((a, fit));
        }
        let is_ordered = matches!(function, Function::Sub | Function::Div);
        fits(&a).filter(|_| !is_ordered).map(|fit| (b, fit))
    }
}
