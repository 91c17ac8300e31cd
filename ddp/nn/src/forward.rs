//! Modules: a model, or a part of one, is one function from inputs to outputs.
//!
//! `Module::forward` is a formula over `Var`. It is traced once for each shape and mode into a list
//! of operations (`trace.rs`). Its backward follows from one table of derivatives
//! (`derivatives.rs`), and from both what runs (`plan.rs`): chains of elementwise operations in one
//! pass over memory, matmuls, layers. Memory comes from the pass, and goes back to it after a
//! value's last use. `Module::layer` makes it a [`Layer`], for a `Sequential` and all that takes
//! one.

mod convolution;
mod custom;
mod derivatives;
mod formulas;
mod plan;
mod scope;
mod trace;

use std::cell::RefCell;
use std::fmt;
use std::rc::Rc;

use ddp_kernels::ops::{self, Chain};
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor};

use crate::build::Build;
use crate::error::{Error, Result};
use crate::layer::Layer;
use crate::pass::{Pass, observe};
use plan::{Action, Plan, Run};
use scope::Declared;
use trace::Op;

pub use convolution::{Convolution, PerAxis};
pub use custom::CustomOp;
pub use scope::Scope;
pub use trace::Var;

/// A model or a part of one, by its formula.
///
/// ```
/// use ddp_nn::{Init, Module, Scope, Var};
///
/// /// A gated block with a learned temperature.
/// #[derive(Debug)]
/// struct Gated {
///     width: usize,
/// }
///
/// impl Module for Gated {
///     fn forward(&self, m: &mut Scope, x: &Var) -> Var {
///         let hidden = m.linear("up", x, self.width).gelu();
///         let temperature = m.parameter("temperature", &[1], Init::Constant(1.0));
///         let gate = (m.linear("gate", x, self.width) / temperature).softmax(-1);
///         x + m.linear("down", &(hidden * gate), x.size(-1))
///     }
/// }
/// # use ddp_kernels::{Device, Seed};
/// let model = ddp_nn::Sequential::new().then(Gated { width: 8 }.layer());
/// let model = model.build(&[4], Device::Cpu, Seed(1)).unwrap();
/// assert_eq!(model.output_shape, [4]);
/// ```
pub trait Module: fmt::Debug + Send + 'static {
    /// The output for `x` (B, …), which has the batch as its first axis, too. It is traced: it must
    /// do the same for every batch of a shape. Operations do not fail; the first error is reported
    /// with its line when the forward has returned.
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var;

    /// The dtype of the input, if it is not the dtype that layers compute in: i64 for tokens.
    fn input_dtype(&self) -> Option<DType> {
        None
    }

    /// The module as a layer.
    fn layer(self) -> Traced<Self>
    where
        Self: Sized,
    {
        Traced {
            module: self,
            name: String::new(),
            declared: RefCell::default(),
            plans: RefCell::default(),
        }
    }
}

/// A module as a layer.
pub struct Traced<M> {
    module: M,
    /// Its name in the model.
    name: String,
    declared: RefCell<Declared>,
    plans: RefCell<Vec<Planned>>,
}

/// Debug shows the module.
impl<M: fmt::Debug> fmt::Debug for Traced<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.module.fmt(f)
    }
}

/// What runs for inputs of a shape in a mode, and its values while it runs.
struct Planned {
    shape: Vec<usize>,
    is_training: bool,
    plan: Plan,
    /// Numbers of the forward, on the model's device.
    numbers: Vec<(usize, Tensor)>,
    values: Vec<Option<Tensor>>,
}

/// The most shapes whose plans are kept.
const PLANS_MAX: usize = 16;

impl<M: Module> Traced<M> {
    fn name(&self) -> String {
        format!("{} ({})", self.name, kind(&format!("{:?}", self.module)))
    }

    /// Traces the forward for an input of this shape.
    fn trace(
        &self,
        shape: &[usize],
        is_training: bool,
        build: Option<&mut Build<'_>>,
    ) -> Result<[Var; 2]> {
        let trace = Rc::<RefCell<trace::Trace>>::default();
        let id = trace.borrow_mut().push(Op::Input, vec![], shape.to_vec());
        let x = Var {
            trace: trace.clone(),
            id,
        };
        let mut declared = self.declared.borrow_mut();
        let mut scope = Scope {
            trace,
            declared: &mut declared,
            build: build.map(|build| build as &mut dyn scope::Declares),
            prefix: String::new(),
            is_training,
        };
        let y = self.module.forward(&mut scope, &x);
        if let Some(error) = x.trace.borrow_mut().error.take() {
            return Err(Error::Usage(format!("{}: {error}", self.name())));
        }
        let output = y.shape();
        if output.first() != shape.first() {
            let expected = format!("an output with the batch as its first axis, {:?}", shape[0]);
            let help = "reduce and reshape the other axes only";
            return Err(Error::model(
                self.name(),
                expected,
                format!("shape {output:?}"),
                help,
            ));
        }
        Ok([x, y])
    }

    /// The plan for `x`, made at its first use. Returns its place.
    fn planned(&self, pass: &Pass<'_>, shape: &[usize], like: &Tensor) -> Result<usize> {
        let is_training = pass.is_training();
        let mut plans = self.plans.borrow_mut();
        let known = plans
            .iter()
            .position(|it| it.is_training == is_training && it.shape == shape);
        if let Some(known) = known {
            return Ok(known);
        }
        let [x, y] = self.trace(shape, is_training, None)?;
        let forward = y.trace.borrow().nodes.len();
        let mut ends = [Some(x.id), Some(y.id), None, None];
        if is_training {
            let declared = self.declared.borrow();
            let trains = |op: &Op| match op {
                Op::Parameter(id) => pass.trains(*id),
                Op::Layer(layer) => {
                    let [begin, end] = declared.layers[*layer].uses;
                    pass.trains_between(begin, end)
                }
                _ => false,
            };
            let has_gradient = like.dtype().is_float();
            let (dy, dx) = derivatives::backward(&y, has_gradient.then_some(&x), &trains);
            (ends[2], ends[3]) = (Some(dy.id), dx.map(|dx| dx.id));
        }
        let nodes = std::mem::take(&mut y.trace.borrow_mut().nodes);
        let plan = plan::plan(nodes, forward, ends, is_training)?;
        let mut numbers = Vec::new();
        for (id, node) in plan.nodes.iter().enumerate() {
            let values = match &node.op {
                Op::Numbers(values) => values.to_vec(),
                Op::Constant(value) => vec![*value],
                _ => continue,
            };
            let runs = || plan.forward.iter().chain(&plan.backward);
            if runs().any(|run| run.inputs.contains(&id)) {
                let made = announced("numbers of a forward", || {
                    let tensor = Tensor::from_slice(&values, &node.shape, Device::Cpu)?;
                    tensor.to_dtype(pass.dtype())?.to(like.device())
                })?;
                numbers.push((id, made));
            }
        }
        if plans.len() == PLANS_MAX {
            plans.remove(0);
        }
        plans.push(Planned {
            shape: shape.to_vec(),
            is_training,
            values: vec![None; plan.nodes.len()],
            plan,
            numbers,
        });
        Ok(plans.len() - 1)
    }
}

/// The name of a type in its debug text.
fn kind(text: &str) -> &str {
    text.split(|c: char| !c.is_alphanumeric())
        .next()
        .unwrap_or_default()
}

/// The most inputs of a run.
const INPUTS_MAX: usize = 16;

/// Runs a plan's operations.
struct Running<'a, 'b, 'c> {
    pass: &'a mut Pass<'b>,
    declared: &'c Declared,
    nodes: &'c [trace::Node],
    numbers: &'c [(usize, Tensor)],
    values: &'c mut [Option<Tensor>],
    name: &'c str,
    /// Whether the gradient of the module's input is wanted.
    wants_input: bool,
}

impl Running<'_, '_, '_> {
    fn value(&self, id: usize) -> Result<Tensor> {
        match &self.nodes[id].op {
            Op::Parameter(parameter) => Ok(self.pass.value(*parameter)?.clone()),
            Op::Numbers(_) | Op::Constant(_) => {
                let found = self.numbers.iter().find(|it| it.0 == id);
                Ok(found
                    .expect("numbers that runs read are made with the plan")
                    .1
                    .clone())
            }
            _ => {
                let value = self.values[id].clone();
                Ok(value.expect("a plan makes values before it reads them"))
            }
        }
    }

    /// Runs in order; `is_backward` is for observers.
    fn all(&mut self, runs: &[Run], is_backward: bool) -> Result<()> {
        for run in runs {
            if run.is_for_input && !self.wants_input {
                continue;
            }
            self.run(run)?;
            for &id in &run.outputs {
                if let Some(value) = &self.values[id] {
                    let of = if is_backward { "backward" } else { "forward" };
                    let (name, op) = (self.name, &self.nodes[id].op);
                    observe(|| format!("{of} of {name}: {} {id}", op.name()), value)?;
                }
            }
            run.last.iter().for_each(|&id| self.values[id] = None);
        }
        Ok(())
    }

    fn chain(&mut self, run: &Run, chain: &Chain, inputs: &[&Tensor]) -> Result<()> {
        let mut outs = [const { None }; INPUTS_MAX];
        for (out, &id) in outs.iter_mut().zip(&run.outputs) {
            *out = Some(self.pass.take(&self.nodes[id].shape)?);
            self.values[id] = out.clone();
        }
        let Some(any) = &outs[0] else {
            return Ok(());
        };
        let mut all = [any; INPUTS_MAX];
        for (to, out) in all.iter_mut().zip(outs.iter().flatten()) {
            *to = out;
        }
        Ok(ops::chain_into(chain, &all[..run.outputs.len()], inputs)?)
    }

    fn run(&mut self, run: &Run) -> Result<()> {
        let mut inputs = [const { None }; INPUTS_MAX];
        if run.inputs.len() > INPUTS_MAX {
            let got = format!("{} inputs", run.inputs.len());
            let op = self.nodes[run.of].op.name();
            let help = "join or pass them in several steps";
            return Err(Error::model(
                op,
                format!("at most {INPUTS_MAX} inputs"),
                got,
                help,
            ));
        }
        for (input, &id) in inputs.iter_mut().zip(&run.inputs) {
            *input = Some(self.value(id)?);
        }
        let first = inputs[0].clone();
        let x = |at: usize| inputs[at].as_ref().expect("a run has its inputs");
        // References, on the stack.
        let Some(any) = &first else {
            let parameter = match &run.action {
                Action::Gradient(parameter) => *parameter,
                // Of numbers alone.
                Action::Chain(chain) => return self.chain(run, chain, &[]),
                _ => return Ok(()),
            };
            if let Some(gradient) = self.pass.gradient(parameter)
                && !gradient.accumulate
            {
                ops::zero(gradient.tensor)?;
            }
            return self.pass.finished(parameter);
        };
        let mut all = [any; INPUTS_MAX];
        for (to, input) in all.iter_mut().zip(inputs.iter().flatten()) {
            *to = input;
        }
        let inputs = &all[..run.inputs.len()];
        match &run.action {
            Action::Chain(chain) => return self.chain(run, chain, inputs),
            Action::Reshape => {
                let id = run.outputs[0];
                self.values[id] = Some(any.reshape(&self.nodes[id].shape)?);
                return Ok(());
            }
            Action::Layer(layer, saves) => {
                let layer = &*self.declared.layers[*layer].layer;
                let y = match saves {
                    true => layer.forward(self.pass, any)?,
                    false => self.pass.without_saving(|pass| layer.forward(pass, any))?,
                };
                self.values[run.outputs[0]] = Some(y);
                return Ok(());
            }
            Action::LayerBackward(layer, is_needed) => {
                let layer = &*self.declared.layers[*layer].layer;
                let is_needed = *is_needed || self.wants_input && !run.outputs.is_empty();
                let backward = |pass: &mut Pass<'_>| layer.backward(pass, any);
                let dx = self.pass.input_gradient(is_needed, backward)?;
                if let Some(&id) = run.outputs.first() {
                    self.values[id] = dx;
                }
                return Ok(());
            }
            Action::Gradient(parameter) => {
                if let Some(gradient) = self.pass.gradient(*parameter) {
                    gradient.write(any)?;
                }
                return self.pass.finished(*parameter);
            }
            Action::GradientColumns(parameter) => {
                if let Some(gradient) = self.pass.gradient(*parameter) {
                    let out = gradient.tensor.flatten()?;
                    ops::column_sum_into(&out, &rows(any, out.count())?, gradient.accumulate)?;
                }
                return self.pass.finished(*parameter);
            }
            _ => {}
        }
        for &id in &run.outputs {
            self.values[id] = Some(self.pass.take(&self.nodes[id].shape)?);
        }
        let Some(&id) = run.outputs.first() else {
            return Ok(());
        };
        let out = |at: usize| {
            self.values[run.outputs[at]]
                .as_ref()
                .expect("it was just made")
        };
        match &run.action {
            Action::Join(is_partial, chains) => {
                if *is_partial {
                    ops::zero(out(0))?;
                }
                for (chain, input) in chains.iter().zip(inputs) {
                    ops::chain_into(chain, &[out(0)], &[input])?;
                }
            }
            Action::MatMul(turned) => {
                let side = |at: usize| {
                    if turned[at] {
                        x(at).t()
                    } else {
                        Ok(x(at).clone())
                    }
                };
                ops::addmm_into(out(0), out(0), &side(0)?, &side(1)?, 1.0, 0.0)?;
            }
            Action::Unfold(of, false) => ops::unfold_into(out(0), any, of)?,
            Action::Unfold(of, true) => ops::unfold_backward_into(out(0), any, of)?,
            Action::Columns => {
                let out = out(0).flatten()?;
                ops::column_sum_into(&out, &rows(any, out.count())?, false)?;
            }
            Action::Custom => {
                if let Op::Custom(op) = &self.nodes[id].op {
                    op.forward(inputs, out(0))?;
                }
            }
            Action::CustomBackward => {
                if let Op::CustomBackward(op) = &self.nodes[id].op {
                    let mut gradients = [out(0); INPUTS_MAX];
                    (0..run.outputs.len()).for_each(|at| gradients[at] = out(at));
                    let (of, ends) = inputs.split_at(inputs.len() - 2);
                    op.backward(of, [ends[0], ends[1]], &gradients[..run.outputs.len()])?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// A value as rows of this many columns.
fn rows(x: &Tensor, columns: usize) -> Result<Tensor> {
    Ok(x.reshape(&[x.count() / columns.max(1), columns])?)
}

impl<M: Module> Layer for Traced<M> {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        self.name = build.path().to_string();
        *self.declared.get_mut() = Declared::default();
        self.plans.get_mut().clear();
        // The number of rows is any; not 1, which would be broadcast.
        let shape: Vec<usize> = [2].iter().chain(shape).copied().collect();
        let [_, y] = self.trace(&shape, true, Some(build))?;
        Ok(y.shape()[1..].to_vec())
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let at = self.planned(pass, x.shape(), x)?;
        let planned = &mut self.plans.borrow_mut()[at];
        let Planned {
            plan,
            numbers,
            values,
            ..
        } = planned;
        values[plan.ends[0].unwrap_or(0)] = Some(x.clone());
        let mut running = Running {
            pass,
            declared: &self.declared.borrow(),
            nodes: &plan.nodes,
            numbers,
            values,
            name: &self.name,
            wants_input: false,
        };
        let done = running.all(&plan.forward, false);
        let y = plan.ends[1].map(|y| running.value(y)).transpose();
        if pass.is_training() {
            for &id in &plan.kept {
                if let Some(value) = &values[id] {
                    pass.save(value);
                }
            }
        }
        values.fill(None);
        done?;
        Ok(y?.unwrap_or_else(|| x.clone()))
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        let mut plans = self.plans.borrow_mut();
        let fits = |it: &&mut Planned| {
            let y = it.plan.ends[1].map(|y| &it.plan.nodes[y].shape[..]);
            it.is_training && y == Some(dy.shape())
        };
        let found = plans.iter_mut().find(fits);
        let Planned {
            plan,
            numbers,
            values,
            ..
        } = found.expect("forward has planned it");
        for &id in plan.kept.iter().rev() {
            values[id] = Some(pass.restore());
        }
        if let Some(id) = plan.ends[2] {
            values[id] = Some(dy.clone());
        }
        let wants = pass.needs_input_gradient();
        let mut running = Running {
            pass,
            declared: &self.declared.borrow(),
            nodes: &plan.nodes,
            numbers,
            values,
            name: &self.name,
            wants_input: wants,
        };
        let done = running.all(&plan.backward, true);
        let dx = plan.ends[3]
            .filter(|_| wants)
            .map(|dx| running.value(dx))
            .transpose();
        values.fill(None);
        done?;
        dx
    }

    fn input_dtype(&self) -> Option<DType> {
        self.module.input_dtype()
    }
}
