//! Losses by their formula. As a module, a loss is traced once for each shape, and its gradient
//! follows from the table of derivatives. All is computed in the dtype of sums; the gradient is
//! rounded once. Letters: B rows, T positions, C outputs, R rows or positions.

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use ddp_kernels::{DType, Tensor, ops};

use super::derivatives;
use super::plan::{self, Action, PassPlan, PlanFor, PlannedRun};
use super::running::{self, Running};
use super::scope::{DeclaredParameters, PassMode, Scope};
use super::trace::{Op, Trace, Var};
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
/// The formula is traced, as [`Module::forward`](crate::Module::forward) is: it must be the same for
/// equal values of the type. `target` has as many axes as `output`, of length 1 at the end where
/// the data have fewer, so that class indices (B) are (B, 1). Integers become floats.
///
/// Of a model that ends in a [`Head`](crate::Head) the output is (R, C), the positions of several
/// rows, and the targets (R, 1) or (R, C).
pub trait LossFormula: Any + Clone + PartialEq + fmt::Debug + Send + Sync {
    /// The loss of each row, (B), or of each position, (B, T); perhaps with axes of length 1 after
    /// these, as `mean(-1)` leaves them. It should depend on this row alone: batches are divided
    /// among ranks. The mean over all of them is minimized.
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
        of: [&Tensor; 3],
        gradient: Option<&Tensor>,
    ) -> Result<Tensor> {
        let (losses, made) = run(self, pass, of, gradient.is_some())?;
        // A chain reads the output while it writes, so it cannot write there itself.
        if let (Some(gradient), Some(made)) = (gradient, made) {
            gradient.copy_from(&made)?;
        }
        Ok(losses)
    }

    fn gradient(&self, pass: &mut Pass<'_>, of: [&Tensor; 3]) -> Result<Tensor> {
        let (_, gradient) = run(self, pass, of, true)?;
        Ok(gradient.expect("a plan with a gradient makes it"))
    }
}

/// The first index along the last axis where each value is largest, (…, 1); the axis's length where
/// one is NaN. All axes are as long as the first.
pub(crate) fn first_largest<const N: usize>(m: &mut Scope<'_>, values: [&Var; N]) -> [Var; N] {
    let count = values[0].size(-1);
    let left: Vec<f64> = (1..=count).rev().map(|it| it as f64).collect();
    let left = m.numbers(&left, &[count]);
    values.map(|x| count as f64 - (x.equal(&x.largest(-1)) * &left).largest(-1))
}

/// The most plans of losses that are kept: rows of tokens have many lengths.
const PLANS_MAX: usize = 256;

/// What runs for a loss, and its values while it runs.
struct PlannedLoss {
    formula: Box<dyn Any + Send>,
    mode: PassMode,
    /// Of output and targets, as they come.
    shapes: [Vec<usize>; 2],
    has_gradient: bool,
    /// Whether an operation needs an output in bf16 in f32. Chains read both.
    widens: bool,
    plan: PassPlan,
    /// Output and target.
    inputs: [usize; 2],
    numbers: Vec<(usize, Tensor)>,
    values: Vec<Option<Tensor>>,
}

/// The losses (R), and the gradient of their sum if that is wanted. Adds to the statistics.
fn run<F: LossFormula>(
    formula: &F,
    pass: &mut Pass<'_>,
    [output, targets, stats]: [&Tensor; 3],
    wants_gradient: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    let (mode, dtype) = (PassMode::of(pass), math_dtype(output));
    let plans = pass.loss_plans();
    let known = plans.iter().position(|it| {
        it.downcast_ref::<PlannedLoss>().is_some_and(|it| {
            it.mode == mode
                && it.has_gradient == wants_gradient
                && it.shapes[0][..] == output.shape()[..]
                && it.shapes[1][..] == targets.shape()[..]
                && it.formula.downcast_ref() == Some(formula)
        })
    });
    // The latest is last.
    let mut kept = match known {
        Some(at) => plans.remove(at),
        None => {
            let made = PlannedLoss::new(formula, mode, [output, targets], wants_gradient)?;
            plans.drain(..(plans.len() + 1).saturating_sub(PLANS_MAX));
            Box::new(made)
        }
    };
    let planned = kept.downcast_mut::<PlannedLoss>();
    let planned = planned.expect("it was found or made");
    let targets = cast(pass, targets, dtype)?;
    let output = match planned.widens {
        true => cast(pass, output, dtype)?,
        false => output.clone(),
    };
    let result = planned.run(pass, [&output, &targets]);
    planned.values.fill(None);
    pass.loss_plans().push(kept);
    let (all, gradient) = result?;
    let rows = all.count() / STATS;
    let sums = pass.take_as(&[STATS, 1], dtype)?;
    ops::row_sum_into(&sums, &all.reshape(&[STATS, rows])?)?;
    let sums = cast(pass, &sums, stats.dtype())?;
    ops::axpy(stats, 1.0, &sums.flatten()?)?;
    Ok((all.slice(0..rows)?, gradient))
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
        mode: PassMode,
        [output, targets]: [&Tensor; 2],
        has_gradient: bool,
    ) -> Result<PlannedLoss> {
        let (dims, mut of_target) = (output.shape(), targets.shape().to_vec());
        if dims.is_empty() || of_target.first() != dims.first() {
            let expected = format!("as many rows of targets as of the output {output}");
            let help = "give each row of the output its target";
            return Err(Error::model("loss", expected, targets, help));
        }
        of_target.resize(of_target.len().max(dims.len()), 1);
        let trace = Rc::<RefCell<Trace>>::default();
        trace.borrow_mut().place = "loss".into();
        let mut declared = DeclaredParameters::default();
        declared.is_loss = true;
        let mut m = Scope {
            trace: trace.clone(),
            declared: &mut declared,
            build: None,
            prefix: String::new(),
            mode,
            lora: None,
        };
        let x = m.leaf(Op::Input, dims, "output".into());
        let target = m.leaf(Op::Input, &of_target, "target".into());
        let all = Rows::of(formula, &mut m, [&x, &target], !targets.dtype().is_float())?;
        let forward = trace.borrow().nodes.len();
        let mut ends = [Some(x.id), Some(all.joined.id), None, None];
        if has_gradient {
            let Some(dx) = all.gradient(&x) else {
                let help = "comparisons and without_gradient have no derivative";
                let expected = "a formula with a derivative by the output";
                return Err(Error::model("loss", expected, format!("{formula:?}"), help));
            };
            ends[3] = Some(dx.id);
        }
        let nodes = std::mem::take(&mut trace.borrow_mut().nodes);
        let how = PlanFor {
            is_training: has_gradient,
            is_cpu: !output.device().is_accelerator(),
            is_loss: true,
        };
        let plan = plan::plan(nodes, forward, ends, how)?;
        let reads_both = |run: &PlannedRun| {
            use Action::{Chain, Join, Reshape};
            matches!(run.action, Chain(_) | Join(..) | Reshape)
        };
        Ok(PlannedLoss {
            widens: !plan.forward.iter().chain(&plan.backward).all(reads_both),
            formula: Box::new(formula.clone()),
            mode,
            shapes: [output, targets].map(|it| it.shape().to_vec()),
            has_gradient,
            inputs: [x.id, target.id],
            numbers: running::numbers(&plan, None, math_dtype(output), output.device())?,
            values: vec![None; plan.nodes.len()],
            plan,
        })
    }

    /// What `Rows::joined` says, and the gradient if the plan has one.
    fn run(&mut self, pass: &mut Pass<'_>, of: [&Tensor; 2]) -> Result<(Tensor, Option<Tensor>)> {
        let PlannedLoss {
            plan,
            inputs,
            numbers,
            values,
            ..
        } = self;
        let mut results = [None, None];
        let [_, all, _, dx] = plan.ends;
        for (end, runs) in [(all, &plan.forward), (dx, &plan.backward)] {
            for (&id, tensor) in inputs.iter().zip(of) {
                values[id] = Some(tensor.reshape(&plan.nodes[id].shape)?);
            }
            let is_backward = end == dx;
            let mut running = Running::new(pass, plan, numbers, values, true);
            running.all(runs, is_backward)?;
            results[usize::from(is_backward)] = end.map(|end| running.value(end)).transpose()?;
        }
        let [all, gradient] = results;
        Ok((all.expect("a plan has an output"), gradient))
    }
}

/// What a formula gives for each row or position.
struct Rows {
    /// (B) or (B, T)
    shape: Vec<usize>,
    /// In the formula's shape: times their weights; 0 where ignored.
    losses: Var,
    /// 1 where ignored, if there are weights.
    ignored: Option<Var>,
    /// (4·R): the losses, their weights, which are right, and which count.
    joined: Var,
}

impl Rows {
    fn of<F: LossFormula>(
        formula: &F,
        m: &mut Scope<'_>,
        [output, target]: [&Var; 2],
        takes_indices: bool,
    ) -> Result<Rows> {
        let (dims, classes) = (output.shape(), output.size(-1));
        let positions = &dims[..dims.len() - 1];
        let own_correct = formula.correct(m, output, target);
        let has_own = own_correct.is_some();
        let are_classes = takes_indices && classes > 1;
        let are_classes = are_classes && target.shape() == [positions, &[1]].concat();
        let of_classes = (are_classes && !has_own).then(|| {
            let [chosen] = first_largest(m, [output]);
            chosen.equal(target)
        });
        let correct = own_correct.or(of_classes).map(|it| -> Result<Var> {
            let shape = by_row("correct", &it, &dims)?;
            // The copy ends a chain, so that the loss is not divided between two.
            Ok(Var::concatenate(&[&it.reshape(&shape)], 0))
        });
        let correct = correct.transpose()?;
        let losses = formula.losses(m, output, target);
        let (own, shape) = (losses.shape(), by_row("losses", &losses, &dims)?);
        // One for each of the losses, in their shape.
        let each = |what: &str, value: &Var| -> Result<Var> {
            let mut axes = by_row(what, value, &[&shape[..], &[1]].concat())?;
            axes.resize(shape.len(), 1);
            Ok(value.reshape(&axes).expand(&shape).reshape(&own))
        };
        let weights = formula.weights(m, output, target);
        let weights = weights.map(|it| each("weights", &it.without_gradient()));
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
        let flat = [shape.iter().product()];
        let [zero, one] = [0.0, 1.0].map(|it| output.number(it).expand(&flat));
        let correct = match correct.filter(|it| has_own || it.shape() == shape) {
            Some(correct) => counted(each("correct", &correct)?),
            None => zero,
        };
        let counts = ignored.as_ref().map_or(one.clone(), |it| 1.0 - it);
        let parts = [&losses, weights.as_ref().unwrap_or(&one), &correct, &counts];
        let parts = parts.map(|it| it.reshape(&flat));
        let joined = Var::concatenate(&parts.each_ref(), 0);
        no_error(output)?;
        Ok(Rows {
            shape,
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
            (node.op, node.inputs) = (Op::Expand, vec![one.id]);
        }
        // A step of a chain, which rounds it. Not 0·NaN where rows are ignored.
        let dx = dx?;
        let Some(ignored) = &self.ignored else {
            return Some(dx * 1.0);
        };
        let mut by_row = self.shape.clone();
        by_row.resize(output.rank(), 1);
        Some(ignored.reshape(&by_row).select(&dx.number(0.0), &dx))
    }
}

/// The first error of the formula so far.
fn no_error(value: &Var) -> Result<()> {
    let error = value.trace.borrow_mut().error.take();
    error.map_or(Ok(()), |error| Err(Error::Usage(error)))
}

/// The shape of `value` without axes of length 1 at the end, if it has a number for each row, or for
/// each position, of an output of this shape.
fn by_row(what: &str, value: &Var, output: &[usize]) -> Result<Vec<usize>> {
    no_error(value)?;
    let mut shape = value.shape();
    while shape.len() > 1 && shape.ends_with(&[1]) {
        shape.pop();
    }
    let most = output.len().saturating_sub(1).max(1);
    if shape.is_empty() || shape.len() > most || !output.starts_with(&shape) {
        let positions = match most {
            1 => String::new(),
            most => format!(", or for each position, {:?}", &output[..most]),
        };
        let expected = format!("one for each row, {:?}{positions}", &output[..1]);
        let got = format!("shape {:?}", value.shape());
        let help = "sum or average over the other axes, as .mean(-1) does";
        return Err(Error::model(format!("loss: {what}"), expected, got, help));
    }
    Ok(shape)
}
