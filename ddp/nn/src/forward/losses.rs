//! Losses by their formula. As a module, a loss is traced once for each shape, and its gradient
//! follows from the table of derivatives. All is computed in the dtype of sums; the gradient is
//! rounded once. Letters: B rows, T positions, C outputs, R rows or positions.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use ddp_kernels::{DType, Tensor, ops};

use super::derivatives;
use super::op::{Expand, Input, Op};
use super::plan::{self, Ends, PassPlan, PlanFor, PlannedRun};
use super::scope::{DeclaredParameters, PassMode, Scope};
use super::trace::{Trace, Var};
use crate::error::{Error, Result};
use crate::loss::{Loss, STATS, math_dtype};
use crate::pass::Pass;

/// A loss by its formula, which is a [`Loss`]: its gradient follows from it.
///
/// ```
/// use ddp_nn::{LossFormula, Scope, Var};
///
/// /// As `torch.nn.HuberLoss`.
/// #[derive(Clone, Debug, PartialEq)]
/// struct Huber {
///     delta: f64,
/// }
///
/// impl LossFormula for Huber {
///     fn losses(&self, _m: &mut Scope, output: &Var, target: &Var) -> Var {
///         let error = (output - target).abs();
///         let near = error.minimum(&error.number(self.delta));
///         (&near * (error - &near * 0.5)).mean(-1)
///     }
/// }
/// ```
///
/// The formula is traced, as [`Module::forward`](crate::Module::forward) is: it must be the same
/// for equal values of the type, and computes each row by itself. `target` has as many axes as
/// `output`, of length 1 at the end where the data have fewer, so that class indices (B) are
/// (B, 1). Integers become floats.
///
/// Of a model that ends in a [`Head`](crate::Head) the output is (R, C), the positions of several
/// rows, and the targets (R, 1) or (R, C).
pub trait LossFormula: Any + Clone + PartialEq + fmt::Debug + Send + Sync {
    /// The loss of each row, (B), or of each position, (B, T); perhaps with axes of length 1 after
    /// these, as `mean(-1)` leaves them. The mean over all of them is minimized.
    fn losses(&self, m: &mut Scope<'_>, output: &Var, target: &Var) -> Var;

    /// How much each row or position counts in the mean, which is Σ weight·loss / Σ weight; 1 by
    /// default. Those of weight 0 are ignored, whatever their loss. No gradient flows through it.
    fn weights(&self, _m: &mut Scope<'_>, _output: &Var, _target: &Var) -> Option<Var> {
        None
    }

    /// 1 for each row or position that is right, for the accuracy, else 0. By default those whose
    /// largest output is at the target, if that is a class index.
    fn correct(&self, _m: &mut Scope<'_>, _output: &Var, _target: &Var) -> Option<Var> {
        None
    }
}

impl<F: LossFormula> Loss for F {
    fn compute(
        &self,
        pass: &mut Pass<'_>,
        [output, targets, stats]: [&Tensor; 3],
        gradient: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (of, dtype) = ([output, targets], math_dtype(output));
        let fits = |it: &PlannedLoss| {
            it.has_gradient == gradient.is_some()
                && it.dtypes == of.map(Tensor::dtype)
                && (0..2).all(|at| it.shapes[at][..] == of[at].shape()[..])
                && it.formula.downcast_ref() == Some(self)
        };
        let plans = pass.loss_plans();
        let known = plans
            .iter()
            .position(|it| it.downcast_ref().is_some_and(fits));
        // The latest is last.
        let mut kept = match known {
            Some(at) => plans.remove(at),
            None => {
                plans.drain(..(plans.len() + 1).saturating_sub(PLANS_MAX));
                Box::new(PlannedLoss::new(self, of, gradient.is_some())?)
            }
        };
        let planned: &mut PlannedLoss = kept.downcast_mut().expect("it was found or made");
        // A chain cannot write to what it reads.
        let in_place = gradient.filter(|it| it.shares_memory_with(output));
        let made = match in_place {
            Some(gradient) => Some(pass.take_as(gradient.shape(), gradient.dtype())?),
            None => gradient.cloned(),
        };
        let targets = cast(pass, targets, dtype)?;
        let read = if planned.widens {
            dtype
        } else {
            output.dtype()
        };
        let output = cast(pass, output, read)?;
        let joined = planned.run(pass, [&output, &targets], made.clone());
        planned.values.fill(None);
        pass.loss_plans().push(kept);
        let joined = joined?;
        if let (Some(gradient), Some(made)) = (in_place, made) {
            gradient.copy_from(&made)?;
        }
        let rows = joined.count() / STATS;
        let sums = pass.take_as(&[STATS, 1], dtype)?;
        ops::row_sum_into(&sums, &joined.reshape(&[STATS, rows])?)?;
        let sums = cast(pass, &sums, stats.dtype())?;
        ops::axpy(stats, 1.0, &sums.flatten()?)?;
        Ok(joined.slice(0..rows)?)
    }
}

/// The first index along the last axis where each value is largest, (…, 1); the axis's length
/// where one is NaN. All axes are as long as the first.
pub(crate) fn first_largest<const N: usize>(m: &mut Scope<'_>, values: [&Var; N]) -> [Var; N] {
    let count = values[0].size(-1);
    let left: Vec<f64> = (1..=count).rev().map(|it| it as f64).collect();
    let left = m.numbers(&left, &[count]);
    values.map(|x| count as f64 - (x.equal(&x.largest(-1)) * &left).largest(-1))
}

/// The most plans of losses that are kept: rows of tokens have many lengths.
const PLANS_MAX: usize = 256;

/// What runs for a loss, and its values while it runs. Its values 0 and 1 are output and targets.
struct PlannedLoss {
    formula: Box<dyn Any + Send>,
    /// Of output and targets, as they come.
    shapes: [Vec<usize>; 2],
    dtypes: [DType; 2],
    has_gradient: bool,
    /// Whether an operation needs an output in bf16 in f32. Chains read both.
    widens: bool,
    plan: PassPlan,
    values: Vec<Option<Tensor>>,
}

/// The tensor in this dtype.
fn cast(pass: &mut Pass<'_>, tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    if tensor.dtype() == dtype {
        return Ok(tensor.clone());
    }
    let made = pass.take_as(tensor.shape(), dtype)?;
    ops::cast_into(&made, tensor)?;
    Ok(made)
}

impl PlannedLoss {
    fn new<F: LossFormula>(
        formula: &F,
        of: [&Tensor; 2],
        has_gradient: bool,
    ) -> Result<PlannedLoss> {
        let [output, targets] = of;
        let mut of_target = targets.shape().to_vec();
        if output.shape().is_empty() || of_target.first() != output.shape().first() {
            let expected = format!("as many rows of targets as of the output {output}");
            let help = "give each row of the output its target";
            return Err(Error::model("loss", expected, targets, help));
        }
        of_target.resize(of_target.len().max(output.shape().rank()), 1);
        let mode = if has_gradient {
            PassMode::Training
        } else {
            PassMode::Evaluation
        };
        let are_indices = !targets.dtype().is_float();
        let shapes = [output.shape().to_vec(), of_target];
        let (x, rows) = FormulaLosses::traced(formula, shapes, mode, are_indices)?;
        let trace = x.trace.clone();
        let forward = trace.borrow().nodes.len();
        by_row(&rows.joined)?;
        let dx = has_gradient.then(|| rows.gradient(&x)).flatten();
        if has_gradient && dx.is_none() {
            let help = "comparisons and without_gradient have no derivative";
            let expected = "a formula with a derivative by the output";
            return Err(Error::model("loss", expected, format!("{formula:?}"), help));
        }
        let ends = Ends {
            x: x.id,
            y: rows.joined.id,
            dy: None,
            dx: dx.map(|dx| dx.id),
        };
        let nodes = std::mem::take(&mut trace.borrow_mut().nodes);
        let how = PlanFor {
            is_training: has_gradient,
            is_cpu: !output.device().is_accelerator(),
            is_bf16: false,
            is_loss: true,
        };
        let mut plan = plan::plan(nodes, forward, ends, how)?;
        plan.make_numbers(None, math_dtype(output), output.device())?;
        let reads_both =
            |run: &PlannedRun| matches!(run.op, Op::Chain(_) | Op::Copies(_) | Op::Reshape(_));
        Ok(PlannedLoss {
            formula: Box::new(formula.clone()),
            shapes: of.map(|it| it.shape().to_vec()),
            dtypes: of.map(Tensor::dtype),
            has_gradient,
            widens: !plan.forward.iter().chain(&plan.backward).all(reads_both),
            values: vec![None; plan.nodes.len()],
            plan,
        })
    }

    /// What `FormulaLosses::joined` says. Writes the gradient.
    fn run(
        &mut self,
        pass: &mut Pass<'_>,
        of: [&Tensor; 2],
        gradient: Option<Tensor>,
    ) -> Result<Tensor> {
        let (plan, values) = (&self.plan, &mut self.values);
        for backward in [None, Some(true)] {
            for (id, tensor) in of.into_iter().enumerate() {
                values[id] = Some(tensor.reshape(&plan.nodes[id].shape)?);
            }
            if let (Some(_), Some(dx)) = (backward, plan.ends.dx) {
                values[dx].clone_from(&gradient);
            }
            plan.run(pass, values, backward)?;
        }
        Ok(values[plan.ends.y].take().expect("a plan makes its output"))
    }
}

/// What a formula gives for each row or position, in the shape of its losses.
struct FormulaLosses {
    /// Times their weights; 0 where ignored.
    losses: Var,
    /// 1 where ignored, if there are weights.
    ignored: Option<Var>,
    /// (4·R): the losses, their weights, which are right, and which count.
    joined: Var,
}

impl FormulaLosses {
    /// Those of an output and targets of these shapes, and the output.
    fn traced<F: LossFormula>(
        formula: &F,
        [output, target]: [Vec<usize>; 2],
        mode: PassMode,
        are_indices: bool,
    ) -> Result<(Var, FormulaLosses)> {
        let trace = Rc::<RefCell<Trace>>::default();
        trace.borrow_mut().place = "loss".into();
        let mut declared = DeclaredParameters::default();
        let mut m = Scope {
            trace,
            declared: &mut declared,
            build: None,
            prefix: String::new(),
            mode,
            lora: None,
        };
        let output = m.leaf(Input, &output, "output".into());
        let target = m.leaf(Input, &target, "target".into());
        let [output, target] = [output, target].map(|it| it.with_rows(true));
        let losses = FormulaLosses::of(formula, &mut m, [&output, &target], are_indices)?;
        Ok((output, losses))
    }

    fn of<F: LossFormula>(
        formula: &F,
        m: &mut Scope<'_>,
        [output, target]: [&Var; 2],
        are_indices: bool,
    ) -> Result<FormulaLosses> {
        let losses = of_rows(m, |m| formula.losses(m, output, target));
        let shape = by_row(&losses)?;
        let dims = output.shape();
        let is_by_row = losses.trace.borrow().nodes[losses.id].has_rows;
        if !is_by_row || shape.len() > dims.len().max(2) - 1 || !dims.starts_with(&shape) {
            let expected = "one for each row, or for each position of the output";
            return Err(wrong("losses", expected.into(), &losses));
        }
        let (own, flat) = (losses.shape(), [shape.iter().product()]);
        let of = losses.described();
        let each = |what: &str, value: Var| {
            let is_by_row = value.trace.borrow().nodes[value.id].has_rows;
            if by_row(&value)? == shape && is_by_row {
                Ok(value.reshape(&own))
            } else {
                Err(wrong(
                    what,
                    format!("one for each of the losses, {of}"),
                    &value,
                ))
            }
        };
        let weights = of_rows(m, |m| {
            Some(formula.weights(m, output, target)?.without_gradient())
        });
        let weights = weights.map(|it| each("weights", it));
        let weights = weights.transpose()?;
        let ignored = weights.as_ref().map(|it| it.equal(&it.number(0.0)));
        let counted = |value: Var| match &ignored {
            Some(ignored) => ignored.select(&value.number(0.0), &value),
            None => value,
        };
        let losses = counted(match &weights {
            Some(weights) => losses * weights,
            None => losses,
        });
        // The copy ends the loss's chain, so that what follows does not take its operands.
        let mut parts = vec![Var::concatenate(&[&losses.reshape(&flat)], 0)];
        let [zero, one] = [0.0, 1.0].map(|it| output.number(it).expand(&flat));
        let [chosen] = first_largest(m, [output]);
        let are_classes = are_indices
            && output.size(-1) > 1
            && chosen.shape() == target.shape()
            && by_row(&chosen)? == shape;
        let by_class = are_classes.then(|| chosen.equal(target).with_rows(true));
        let correct = of_rows(m, |m| formula.correct(m, output, target)).or(by_class);
        let correct = correct.map(|it| each("correct", it)).transpose()?;
        let correct = correct.map_or(zero, counted);
        let counts = ignored.as_ref().map_or(one.clone(), |it| 1.0 - it);
        parts.extend([weights.unwrap_or(one), correct, counts].map(|it| it.reshape(&flat)));
        let joined = Var::concatenate(&parts.iter().collect::<Vec<_>>(), 0);
        by_row(&joined)?;
        Ok(FormulaLosses {
            losses,
            ignored,
            joined,
        })
    }

    /// The gradient of the sum of losses by the output, if there is one.
    fn gradient(&self, output: &Var) -> Option<Var> {
        let one = output.number(1.0);
        let (d, dx) = derivatives::backward(&self.losses, Some(output), &|_| false, None);
        {
            let mut trace = output.trace.borrow_mut();
            let node = &mut trace.nodes[d.id];
            (node.op, node.inputs) = (Expand.into(), vec![one.id]);
        }
        // A step of a chain, which rounds it. Not 0·NaN where rows are ignored.
        let dx = dx?;
        let Some(ignored) = &self.ignored else {
            return Some(dx * 1.0);
        };
        let mut axes = ignored.shape();
        axes.resize(output.rank(), 1);
        Some(ignored.reshape(&axes).select(&dx.number(0.0), &dx))
    }
}

/// What a formula makes of rows, none of which sees another.
fn of_rows<T>(m: &mut Scope<'_>, formula: impl FnOnce(&mut Scope<'_>) -> T) -> T {
    m.trace.borrow_mut().hides_rows = true;
    let made = formula(m);
    m.trace.borrow_mut().hides_rows = false;
    made
}

/// The shape of `value` without axes of length 1 at the end, or the formula's first error.
fn by_row(value: &Var) -> Result<Vec<usize>> {
    if let Some(error) = value.trace.borrow_mut().error.take() {
        return Err(Error::Usage(error));
    }
    let mut shape = value.shape();
    while shape.len() > 1 && shape.ends_with(&[1]) {
        shape.pop();
    }
    Ok(shape)
}

fn wrong(what: &str, expected: String, value: &Var) -> Error {
    let got = value.described();
    let help = "sum or average over the other axes, as .mean(-1) does";
    Error::model(format!("loss: {what}"), expected, got, help)
}
