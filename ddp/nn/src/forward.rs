//! Modules: a model, or a part of one, is one function from inputs to outputs.
//!
//! `Module::forward` is a formula over `Var`. It is traced once for each shape and mode into a list
//! of operations (`trace.rs`), none of which touches the first axis: the rows of the batch.
//! One list has all operations (`op.rs`); what each does is in its own file, by one trait
//! (`operation.rs`): the gradients of its inputs, from which the backward follows
//! (`derivatives.rs`), and its run. From both passes a plan is made (`plan.rs`): chains of
//! elementwise operations in one pass over memory (`groups.rs`, `emit.rs`), operations within
//! others (`fuse.rs`), dtypes (`kinds.rs`) and memory (`lifetimes.rs`), which comes from the pass
//! and goes back to it after a value's last use. `running.rs` runs it. A model is split over
//! devices, and computed again, by parts (`parts.rs`).

#![deny(clippy::wildcard_enum_match_arm)]

mod attended;
mod attention;
mod branches;
mod convolution;
mod custom;
mod derivatives;
mod dropout;
mod embedding;
mod emit;
mod formulas;
mod fuse;
mod gate;
mod gather;
mod groups;
mod kinds;
mod leaves;
mod lifetimes;
mod linear;
mod losses;
mod matmul;
mod norm;
mod op;
mod operation;
mod parts;
mod plan;
mod reductions;
mod rope;
mod running;
mod scope;
mod shapes;
mod trace;

use std::cell::{OnceCell, RefCell};
use std::fmt;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

use ddp_kernels::ops;
use ddp_kernels::{DType, Tensor};

use crate::build::Declarations;
use crate::error::{Error, Result};
use crate::head::LeftHead;
use crate::pass::Pass;
use op::{Attention, Input, Numbers, Op, Parameter};
pub(crate) use parts::ModulePiece;
use parts::Part;
use plan::{Ends, PassPlan, PlanFor};
use scope::{DeclaredParameters, PassMode};
use trace::NumberKind;

pub use convolution::{Convolution, PerAxis};
pub use losses::LossFormula;
pub(crate) use losses::first_largest;
pub use op::{CustomOp, Gate, Rope};
pub use scope::{Formula, Module, Scope};
pub use trace::Var;

impl PassMode {
    fn of(pass: &mut Pass<'_>) -> PassMode {
        if pass.cache().is_some() {
            PassMode::Decoding
        } else if pass.is_training() {
            PassMode::Training
        } else {
            PassMode::Evaluation
        }
    }
}

/// A model's function, and what runs for it.
pub(crate) struct Traced {
    module: Arc<dyn Module>,
    /// What of the module it is, if not all.
    part: Option<Part>,
    /// How many parts of the module backward computes again.
    pub(crate) recomputed: usize,
    declared: RefCell<DeclaredParameters>,
    plans: RefCell<Vec<Planned>>,
    /// The shape of a row of the module's input.
    row_shape: Vec<usize>,
    /// Numbers and attention of such a row's forward, once tokens are decoded.
    of_whole: OnceCell<Vec<Op>>,
}

/// Debug shows the module, and which part of it.
impl fmt::Debug for Traced {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.module.fmt(f)?;
        let part = self.part.as_ref();
        part.map_or(Ok(()), |part| write!(f, ", of which {part:?}"))
    }
}

/// What runs for inputs of a shape in a mode, and its values while it runs.
struct Planned {
    /// No other plan of the model has it.
    number: usize,
    shape: Vec<usize>,
    mode: PassMode,
    leaves_head: Option<bool>,
    plan: PassPlan,
    values: Vec<Option<Tensor>>,
    /// The last layer, if it is left to the loss.
    head: Option<LeftHead>,
}

/// The help where a model cannot generate.
pub(crate) const COMBINES_TOKENS: &str = "combine tokens only by SelfAttention, m.attention or \
    written-out causal attention (docs/adding-a-model.md)";

/// The rows of the trace that declares parameters. Not 1, which would be broadcast.
const ROWS: usize = 2;

/// How many plans are kept for training, and as many for all other modes.
const PLANS_MAX: usize = 64;

impl Traced {
    /// Declares what `module` declares for rows of this shape. Returns the shape of a row of its
    /// output, too.
    pub(crate) fn build(
        module: Arc<dyn Module>,
        declarations: &mut Declarations,
        row_shape: &[usize],
    ) -> Result<(Traced, Vec<usize>)> {
        let traced = Traced {
            module,
            part: None,
            recomputed: 0,
            declared: RefCell::default(),
            plans: RefCell::default(),
            row_shape: row_shape.to_vec(),
            of_whole: OnceCell::new(),
        };
        let [_, output] = traced.trace_rows(row_shape, Some(declarations))?;
        let output = output.shape().split_off(1);
        Ok((traced, output))
    }

    /// The dtype of the input, if it is not the dtype that layers compute in.
    pub(crate) fn input_dtype(&self) -> Option<DType> {
        self.module.input_dtype().filter(|_| self.takes_input())
    }

    /// Whether its input is the module's.
    pub(crate) fn takes_input(&self) -> bool {
        self.part.as_ref().is_none_or(Part::is_first)
    }

    /// How many parts it has, of which one value alone goes to the next.
    pub(crate) fn part_count(&self) -> Result<usize> {
        let [_, y] = self.trace_rows(&self.row_shape, None)?;
        let trace = y.trace.borrow();
        Ok(trace.firsts(y.id).len())
    }

    /// Its pieces; call right after `build`. Where rows of tokens may be shorter, what goes from
    /// one part to the next has an axis of tokens after the rows.
    pub(crate) fn pieces(&self) -> Result<Vec<ModulePiece>> {
        let pieces = |y: &Var, may_begin: &dyn Fn(&ModulePiece) -> bool| {
            y.trace.borrow().pieces(y.id, may_begin)
        };
        let takes_tokens = self.input_dtype() == Some(DType::I64);
        let shorter = match self.row_shape[..] {
            [time] if takes_tokens && time > 1 => self.trace_rows(&[time - 1], None).ok(),
            _ => None,
        };
        let [_, y] = self.trace_rows(&self.row_shape, None)?;
        let Some(shorter) = shorter.map(|[_, shorter]| pieces(&shorter, &|_| true)) else {
            return Ok(pieces(&y, &|_| true));
        };
        Ok(pieces(&y, &|piece| {
            let time = self.row_shape[0];
            let mut row = piece.row.clone();
            let has_time = row
                .first_mut()
                .is_some_and(|it| std::mem::replace(it, time - 1) == time);
            has_time
                && shorter
                    .iter()
                    .any(|it| it.is_same_cut(piece) && it.row == row)
        }))
    }

    /// The part of these pieces of it, for rows of this shape, with what it declares.
    pub(crate) fn part(
        &self,
        pieces: &[ModulePiece],
        range: Range<usize>,
        row_shape: &[usize],
        declarations: &Declarations,
    ) -> (Traced, Declarations) {
        let (part, declarations) = Part::new(pieces, range, row_shape, declarations);
        let traced = Traced {
            module: self.module.clone(),
            part: Some(part),
            recomputed: self.recomputed,
            declared: self.declared.clone(),
            plans: RefCell::default(),
            row_shape: self.row_shape.clone(),
            of_whole: OnceCell::new(),
        };
        (traced, declarations)
    }

    /// Traces the forward for an input of this shape.
    fn trace(
        &self,
        shape: &[usize],
        mode: PassMode,
        build: Option<&mut Declarations>,
    ) -> Result<[Var; 2]> {
        let trace = Rc::<RefCell<trace::Trace>>::default();
        trace.borrow_mut().place = "model".into();
        let id = trace.borrow_mut().push(Input, vec![], shape.to_vec());
        let dtype = self.module.input_dtype();
        {
            let trace = &mut trace.borrow_mut();
            trace.input_is_tokens = dtype.is_some_and(|it| !it.is_float());
            (trace.hides_rows, trace.nodes[id].has_rows) = (true, true);
        }
        let x = Var {
            trace: trace.clone(),
            id,
        };
        let mut declared = self.declared.borrow_mut();
        let mut scope = Scope {
            trace,
            declared: &mut declared,
            build,
            prefix: String::new(),
            mode,
            lora: None,
        };
        let y = self.module.forward(&mut scope, &x);
        x.trace.borrow_mut().hides_rows = false;
        let mut error = x.trace.borrow_mut().error.take();
        if error.is_none() {
            error = x.trace.borrow().codes_as_numbers();
        }
        if let Some(error) = error {
            return Err(Error::Usage(error));
        }
        let trace = x.trace.borrow();
        if !trace.nodes[y.id].has_rows {
            let text = format!(
                "output: expected one value per row, got {}, which is the same for all rows; \
                 help: compute it from x",
                trace.described(y.id)
            );
            return Err(Error::Usage(trace.nodes[y.id].error(&text)));
        }
        drop(trace);
        Ok([x, y])
    }

    /// Traces the training of a few rows of this shape.
    fn trace_rows(&self, row: &[usize], build: Option<&mut Declarations>) -> Result<[Var; 2]> {
        self.trace(&[&[ROWS], row].concat(), PassMode::Training, build)
    }

    /// Compares the forward of new tokens with that of a whole row. Their attention becomes that of
    /// the row, since a few tokens do not fill a window. Refuses other differences: a mask that is
    /// not causal may look so among few tokens, and new tokens do not know their places.
    fn decode_as_whole(&self, output: &Var, time: usize) -> Result<()> {
        if self.of_whole.get().is_none() {
            let whole = [&[1], &self.row_shape[..]].concat();
            let [_, whole] = self.trace(&whole, PassMode::Evaluation, None)?;
            let trace = whole.trace.borrow();
            let decode_signature = trace.decode_signature(whole.id).into_iter();
            let ops = decode_signature.map(|id| trace.nodes[id].op.clone());
            _ = self.of_whole.set(ops.collect());
        }
        let of_whole = self.of_whole.get().into_iter().flatten();
        let trace = &mut *output.trace.borrow_mut();
        let decode_signature = trace.decode_signature(output.id);
        let is_as_long = of_whole.clone().count() == decode_signature.len();
        let is_same = |whole: &Op, own: &mut Op| match (whole, own) {
            (Op::Constant(whole), Op::Constant(own)) => whole.0.to_bits() == own.0.to_bits(),
            (Op::Numbers(Numbers(whole)), Op::Numbers(Numbers(own))) => {
                // Not of tokens, or the same number for all of them.
                let all = whole.iter().chain(&own[..]).map(|it| it.to_bits());
                let first = own.first().map(|it| it.to_bits());
                whole == own || all.clone().all(|it| Some(it) == first)
            }
            (Op::Attention(whole), Op::Attention(own)) => own.decodes_as(whole, time),
            _ => false,
        };
        let mut pairs = of_whole.zip(&decode_signature);
        let other = pairs.find(|(whole, id)| !is_same(whole, &mut trace.nodes[**id].op));
        let other = match other {
            None if is_as_long => return Ok(()),
            None => output.id,
            Some((_, id)) => *id,
        };
        let node = &trace.nodes[other];
        let text = if matches!(&node.op, Op::Attention(Attention(own)) if own.time == time) {
            "expected attention of a model that generates to have a mask that hides all later \
             tokens and, of the earlier ones, only those beyond a window, got another; help: "
        } else {
            "expected numbers that depend neither on the place of a token nor on how many there \
             are, in a model that generates, got others for new tokens; help: have positions \
             from Embedding::with_positions or Rope; if these are of a mask, its attention was \
             not recognised; "
        };
        Err(Error::Usage(
            node.error(&format!("{text}{COMBINES_TOKENS}")),
        ))
    }

    /// The plan for `x`, made at its first use. Returns its place.
    fn planned(&self, pass: &mut Pass<'_>, like: &Tensor) -> Result<usize> {
        let (mode, shape) = (PassMode::of(pass), like.shape());
        let leaves_head = pass.leaves_head();
        let mut plans = self.plans.borrow_mut();
        let known = plans.iter().position(|it| {
            it.mode == mode && it.leaves_head == leaves_head && it.shape[..] == shape[..]
        });
        if let Some(known) = known {
            return Ok(known);
        }
        let takes_tokens = self.module.input_dtype() == Some(DType::I64);
        let of_module = self
            .part
            .as_ref()
            .map(|part| part.module_shape(shape, takes_tokens));
        let of_module = of_module.as_deref().unwrap_or(shape);
        let [mut x, mut y] = self.trace(of_module, mode, None)?;
        let head = leaves_head.and_then(|by_position| y.head(by_position));
        if mode == PassMode::Decoding {
            self.decode_as_whole(&y, of_module.get(1).copied().unwrap_or(1))?;
        }
        if mode == PassMode::Training && self.recomputed > 0 {
            let mut trace = x.trace.borrow_mut();
            trace.recompute(y.id, self.recomputed);
        }
        if let Some(part) = &self.part {
            [x, y] = part.of([&x, &y], shape)?;
        }
        let head = head.filter(|(output, ..)| *output == y.id);
        let (_, of_head, cap) = head.unwrap_or_default();
        let left = of_head.get(1).copied();
        let left_from = of_head.first().map(|&input| y.at(input));
        y = left_from.unwrap_or(y).cast(NumberKind::LayerDtype);
        let forward = y.trace.borrow().nodes.len();
        let mut ends = Ends {
            x: x.id,
            y: y.id,
            dy: None,
            dx: None,
        };
        if mode == PassMode::Training {
            let trains = |op: &Op| matches!(op, Op::Parameter(it) if pass.trains(it.0));
            let has_gradient = like.dtype().is_float();
            let (dy, dx) = derivatives::backward(&y, has_gradient.then_some(&x), &trains, left);
            let dx = dx.map(|dx| dx.cast(NumberKind::LayerDtype));
            (ends.dy, ends.dx) = (Some(dy.id), dx.map(|dx| dx.id));
        }
        let nodes = std::mem::take(&mut y.trace.borrow_mut().nodes);
        let how = PlanFor {
            is_training: mode == PassMode::Training,
            is_cpu: !like.device().is_accelerator(),
            is_bf16: pass.dtype() == DType::BF16,
            is_loss: false,
        };
        let mut plan = plan::plan(nodes, forward, ends, how)?;
        let mask = of_head.get(2).copied();
        plan.make_numbers(mask, pass.dtype(), like.device())?;
        let head = left.map(|weight| {
            let Op::Parameter(Parameter(weight)) = plan.nodes[weight].op else {
                unreachable!("a head's weight is a parameter")
            };
            let mask = mask.and_then(|it| plan.numbers_of(it)).cloned();
            LeftHead { weight, mask, cap }
        });
        let trains = |it: &Planned| it.mode == PassMode::Training;
        let is_alike = |it: &Planned| trains(it) == (mode == PassMode::Training);
        if plans.iter().filter(|it| is_alike(it)).count() == PLANS_MAX {
            let oldest = plans.iter().position(is_alike);
            oldest.map(|oldest| plans.remove(oldest));
        }
        let number = plans.last().map_or(0, |last| last.number + 1);
        plans.push(Planned {
            number,
            shape: shape.to_vec(),
            mode,
            leaves_head,
            values: vec![None; plan.nodes.len()],
            plan,
            head,
        });
        Ok(plans.len() - 1)
    }

    /// The output for `x` (B, …). In training the pass keeps what backward needs.
    pub(crate) fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let at = self.planned(pass, x)?;
        let planned = &mut self.plans.borrow_mut()[at];
        let values = &mut planned.values;
        values[planned.plan.ends.x] = Some(x.clone());
        let done = planned.plan.run(pass, values, None);
        let y = done.and_then(|()| planned.plan.value(pass, values, planned.plan.ends.y));
        let saved = pass.saved();
        saved.plan = planned.number;
        saved.values.clear();
        for &id in &planned.plan.kept {
            if let Some(value) = &values[id] {
                saved.values.push((id, value.clone()));
            }
        }
        values.fill(None);
        y
    }

    /// The backward of the forward before, from the gradient of its output. Returns the gradient of
    /// its input if that is wanted and exists.
    pub(crate) fn backward(
        &self,
        pass: &mut Pass<'_>,
        dy: &Tensor,
        wants_input: bool,
    ) -> Result<Option<Tensor>> {
        let mut plans = self.plans.borrow_mut();
        let number = pass.saved().plan;
        let fits = |it: &&mut Planned| it.number == number && it.mode == PassMode::Training;
        let Some(planned) = plans.iter_mut().find(fits) else {
            let help = "run the model's forward in the same pass, or one that resumes it";
            return Err(Error::model(
                "backward",
                "a forward in training",
                "none",
                help,
            ));
        };
        let (plan, values) = (&planned.plan, &mut planned.values);
        let y = &plan.nodes[plan.ends.y].shape;
        if dy.shape()[..] != y[..] {
            let expected = format!("a gradient of the output's shape {y:?}");
            let help = "give that of the forward before";
            return Err(Error::model("backward", expected, dy, help));
        }
        for (id, value) in pass.saved().values.drain(..) {
            values[id] = Some(value);
        }
        if let Some(id) = plan.ends.dy {
            values[id] = Some(dy.clone());
        }
        let done = plan.run(pass, values, Some(wants_input));
        let end = plan.ends.dx.filter(|_| wants_input);
        let dx = done.and_then(|()| end.map(|dx| plan.value(pass, values, dx)).transpose());
        values.fill(None);
        // Layers below may have parameters to which no gradient flows.
        let takes_floats = self.input_dtype().is_none_or(DType::is_float);
        match dx? {
            None if wants_input && takes_floats => {
                let zeros = pass.take(&plan.nodes[plan.ends.x].shape)?;
                ops::zero(&zeros)?;
                Ok(Some(zeros))
            }
            dx => Ok(dx),
        }
    }

    /// The last layer, if the forward of this pass has left it to the loss.
    pub(crate) fn left_head(&self, pass: &mut Pass<'_>) -> Option<LeftHead> {
        let number = pass.saved().plan;
        let plans = self.plans.borrow();
        let found = plans.iter().find(|it| it.number == number);
        found.filter(|_| pass.leaves_head().is_some())?.head.clone()
    }
}

#[cfg(test)]
mod tests;
