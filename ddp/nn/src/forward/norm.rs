//! Norms of rows. A layer norm or RMS norm that is written as a formula becomes the operation that
//! computes it: forward and backward read each row once, and the gradients of weight and bias are
//! summed in the same pass.

use ddp_kernels::ops::{self, Function, NormGradients, NormOptions};

use super::operation::*;

impl Var {
    /// A norm of the last axis, times the weight, plus the bias.
    pub(crate) fn norm(
        &self,
        norm: ops::Norm,
        epsilon: f64,
        weight: &Var,
        bias: Option<&Var>,
    ) -> Var {
        let inputs: Vec<&Var> = [self, weight].into_iter().chain(bias).collect();
        self.push(Norm(norm, epsilon), &inputs, self.shape())
    }

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
        let (Op::Norm(Norm(ops::Norm::Layer, epsilon)), [x, weight]) =
            (normed.op(), &normed.inputs()[..])
        else {
            return None;
        };
        let fits = x.shape() == self.shape();
        fits.then(|| x.norm(ops::Norm::Layer, epsilon, weight, Some(&bias)))
    }

    /// What this is the norm of, without a weight: `x / √(mean(x²) + ε)`, in a layer norm of
    /// `x − mean(x)`.
    fn normed(&self) -> Option<(Var, ops::Norm, f64)> {
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
            Some((x, of)) if x.id == of.id => Some((x, ops::Norm::Layer, epsilon)),
            _ => Some((value, ops::Norm::Rms, epsilon)),
        }
    }

    /// What this is the mean of, over the last axis.
    fn mean_of(&self) -> Option<Var> {
        let (sum, scale) = self.operands(Function::Mul, Var::number_of)?;
        let x = sum.inputs().pop()?;
        let is_mean = matches!(sum.op(), Op::Sum(Sum(axes)) if axes == [x.rank() - 1])
            && scale == 1.0 / x.size(-1) as f64;
        is_mean.then_some(x)
    }

    pub(super) fn number_of(&self) -> Option<f64> {
        let Op::Constant(Constant(value)) = self.op() else {
            return None;
        };
        Some(value)
    }

    /// Its argument, if it is this function.
    pub(super) fn operand(&self, function: Function) -> Option<Var> {
        let is_it = matches!(self.op(), Op::Apply(Apply(it)) if it == function);
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

impl Operation for Norm {
    fn part(&self, shape: &[usize]) -> Option<(NumberKind, Vec<usize>)> {
        let columns = shape.last().copied().unwrap_or(1).max(1);
        let rows = shape.iter().product::<usize>() / columns;
        Some((NumberKind::SumDtype, vec![rows, self.0.statistics()]))
    }

    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        let (Backward { x, y, d }, &Norm(norm, epsilon)) = (at, self);
        let inputs = [d, &x[0], &y.at(y.id + 1), &x[1]];
        let dx = d.push(NormBackward(norm, epsilon), &inputs, x[0].shape());
        let columns = x[0].size(-1);
        let rows = x[0].shape().iter().product::<usize>() / columns.max(1);
        let sums = [ops::norm_blocks_of(rows), columns];
        let parts = (0..x.len() - 1).map(|at| dx.part(at, NumberKind::SumDtype, sums.to_vec()));
        let parts: Vec<Var> = parts.collect();
        [dx].into_iter().chain(parts).map(Some).collect()
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let first = r.planned.outputs.len() - 2;
        let [y, statistics] = [r.take(first)?, r.take(first + 1)?];
        let options = NormOptions {
            norm: self.0,
            epsilon: self.1,
            weight: Some(r.x[first + 1]),
            bias: r.x.get(first + 2).copied(),
        };
        let (y, input) = (rows(&y)?, r.rows(0)?);
        if first == 0 {
            return Ok(ops::norm_into(&y, &statistics, &input, &options)?);
        }
        let (sum, other) = (r.take_rows(0)?, r.rows(1)?);
        ops::add_norm_into(&sum, &y, &statistics, [&input, &other], &options)?;
        Ok(())
    }
}

impl Operation for NormBackward {
    fn outputs(&self, planner: &mut Planner, id: usize) -> Vec<usize> {
        let parts = [0, 1].map(|at| planner.known_part(id, at));
        let live = |part: &usize| planner.live[*part];
        let parts = parts.into_iter().flatten().filter(live);
        [id].into_iter().chain(parts).collect()
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let (residual, x) = r.x.split_at(r.x.len() - 4);
        let dresidual = residual.first().map(|it| rows(it)).transpose()?;
        let dx = r.take_rows(0)?;
        let mut sums = [None, None];
        for (at, id) in r.planned.outputs.iter().enumerate().skip(1) {
            let is_of_bias = matches!(r.plan.nodes[*id].op, Op::Output(Output(1, _)));
            sums[usize::from(is_of_bias)] = Some(r.take(at)?);
        }
        let [weight_sums, bias_sums] = &sums;
        let mut gradients = NormGradients {
            dx: &dx,
            dresidual: dresidual.as_ref(),
            weight_sums: weight_sums.as_ref(),
            bias_sums: bias_sums.as_ref(),
            row_sums: None,
        };
        let options = NormOptions {
            norm: self.0,
            epsilon: self.1,
            weight: Some(x[3]),
            bias: None,
        };
        let (d, input) = (rows(x[0])?, rows(x[1])?);
        let sums_rows = ops::prefers_row_sums(dx.shape()[0])
            && ops::norm_sums_rows(&gradients, &d, &input, &options);
        let row_sums = sums_rows.then(|| r.take_sums(&dx)).transpose()?;
        let row_sums = row_sums.flatten();
        gradients.row_sums = row_sums.as_ref();
        ops::norm_backward_into(&gradients, &d, &input, x[2], &options)?;
        Ok(())
    }
}
