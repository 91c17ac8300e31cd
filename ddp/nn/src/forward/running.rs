//! Runs a plan, with memory of a pass.

use std::collections::HashSet;

use ddp_kernels::ops::{self, Chain};
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor};

use super::plan::{Action, PassPlan, PlannedRun};
use super::trace::{INPUTS_MAX, Kind, Op, TraceNode};
use super::written::must_write;
use crate::error::{Error, Result};
use crate::pass::{Pass, observe};

/// Runs a plan's operations.
pub(super) struct Running<'a, 'b, 'c> {
    pub(super) pass: &'a mut Pass<'b>,
    pub(super) plan: &'c PassPlan,
    pub(super) nodes: &'c [TraceNode],
    numbers: &'c [(usize, Tensor)],
    pub(super) values: &'c mut [Option<Tensor>],
    /// Whether the gradient of the model's input is wanted.
    wants_input: bool,
}

impl<'a, 'b, 'c> Running<'a, 'b, 'c> {
    pub(super) fn new(
        pass: &'a mut Pass<'b>,
        plan: &'c PassPlan,
        numbers: &'c [(usize, Tensor)],
        values: &'c mut [Option<Tensor>],
        wants_input: bool,
    ) -> Running<'a, 'b, 'c> {
        Running {
            pass,
            plan,
            nodes: &plan.nodes,
            numbers,
            values,
            wants_input,
        }
    }
    pub(super) fn value(&self, id: usize) -> Result<Tensor> {
        match &self.nodes[id].op {
            Op::Parameter(parameter) => Ok(self.pass.value(*parameter)?.clone()),
            Op::Tensor(tensor) => Ok(tensor.clone()),
            Op::Numbers(_) | Op::Constant(_) | Op::Steps(_) => {
                let found = self.numbers.binary_search_by_key(&id, |it| it.0);
                let at = found.expect("numbers that runs read are made with the plan");
                Ok(self.numbers[at].1.clone())
            }
            _ => {
                let value = self.values[id].clone();
                value.ok_or_else(|| {
                    let help = "run the model's forward in the same pass, or one that resumes it";
                    Error::model("backward", "the values of a forward", "none", help)
                })
            }
        }
    }

    /// Runs in order; `is_backward` is for observers.
    pub(super) fn all(&mut self, runs: &[PlannedRun], is_backward: bool) -> Result<()> {
        for run in runs {
            if run.is_for_input && !self.wants_input {
                continue;
            }
            if let Err(error) = self.run(run) {
                let place = self.nodes[run.of].users_place();
                return Err(match place {
                    Some(place) => error.within(place),
                    None => error,
                });
            }
            for &id in &run.outputs {
                let node = &self.nodes[id];
                // Not what a processor computes again, or computes besides.
                if let Some(value) = &self.values[id]
                    && id < self.plan.traced
                    && !matches!(node.op, Op::Part(..))
                {
                    let of = if is_backward { "backward" } else { "forward" };
                    let name = || format!("{of} of layer {} ({})", node.place, node.op.name());
                    observe(name, value)?;
                }
            }
            run.last.iter().for_each(|&id| self.values[id] = None);
        }
        Ok(())
    }

    /// In the dtype of the layers.
    fn rounded(&mut self, value: Tensor) -> Result<Tensor> {
        if value.dtype() == self.pass.dtype() {
            return Ok(value);
        }
        let rounded = self.pass.take(value.shape())?;
        ops::cast_into(&rounded, &value)?;
        Ok(rounded)
    }

    fn chain(&mut self, run: &PlannedRun, chain: &Chain, inputs: &[&Tensor]) -> Result<()> {
        let mut outs = [const { None }; INPUTS_MAX];
        for (at, out) in outs.iter_mut().enumerate().take(run.outputs.len()) {
            *out = Some(self.take(run, at)?);
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

    fn run(&mut self, run: &PlannedRun) -> Result<()> {
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
        let op = &self.nodes[run.of].op;
        let reads_any = run.action.reads_any_dtype()
            || matches!(op, Op::Cast(_) | Op::Gather(_) | Op::GatherBackward);
        for (input, &id) in inputs.iter_mut().zip(&run.inputs) {
            let value = self.value(id)?;
            let is_rounded = self.plan.kinds[id] == Kind::Exact && !reads_any;
            *input = Some(if is_rounded {
                self.rounded(value)?
            } else {
                value
            });
        }
        let first = inputs[0].clone();
        let x = |at: usize| inputs[at].as_ref().expect("a run has its inputs");
        let Some(any) = &first else {
            let parameter = match &run.action {
                Action::Gradient(parameter) => *parameter,
                Action::Finished(parameter) => return self.pass.finished(*parameter),
                // A chain that reads only constants has no inputs.
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
        // References, on the stack: a step allocates nothing.
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
            Action::Gradient(parameter) => {
                if let Some(gradient) = self.pass.gradient(*parameter) {
                    gradient.write(any)?;
                }
                return self.pass.finished(*parameter);
            }
            _ => {}
        }
        if self.kernel(run, inputs)? {
            return Ok(());
        }
        (0..run.outputs.len()).try_for_each(|at| self.take(run, at).map(drop))?;
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
            Action::Custom | Action::CustomBackward => {
                let mut outputs = [out(0); INPUTS_MAX];
                (0..run.outputs.len()).for_each(|at| outputs[at] = out(at));
                let (node, outputs) = (&self.nodes[id], &outputs[..run.outputs.len()]);
                let write = || match &node.op {
                    Op::Custom(op) => op.forward(inputs, outputs[0]),
                    Op::CustomBackward(op) => {
                        let (of, ends) = inputs.split_at(inputs.len() - 2);
                        op.backward(of, [ends[0], ends[1]], outputs)
                    }
                    _ => Ok(()),
                };
                if run.has_run.replace(true) {
                    write()?;
                } else {
                    must_write(node, outputs, write)?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// A value as rows of this many columns.
pub(super) fn rows(x: &Tensor, columns: usize) -> Result<Tensor> {
    Ok(x.reshape(&[x.count() / columns.max(1), columns])?)
}

/// The numbers that runs of a plan read, of its output, and those of `also`, in the order of
/// values; `dtype` is that of the layers.
pub(super) fn numbers(
    plan: &PassPlan,
    also: Option<usize>,
    dtype: DType,
    device: Device,
) -> Result<Vec<(usize, Tensor)>> {
    let runs = plan.forward.iter().chain(&plan.backward);
    let mut read: HashSet<usize> = runs.flat_map(|run| run.inputs.iter().copied()).collect();
    read.extend(also.into_iter().chain([plan.ends.y]));
    let mut numbers = Vec::new();
    for (id, node) in plan.nodes.iter().enumerate() {
        let values = match &node.op {
            Op::Numbers(values) => values.to_vec(),
            Op::Constant(value) => vec![*value; node.shape.iter().product()],
            Op::Steps(step) => {
                let count = node.shape.iter().product();
                (0..count).map(|it| (it * step) as f64).collect()
            }
            _ => continue,
        };
        if read.contains(&id) {
            let made = announced("numbers of a forward", || {
                let tensor = Tensor::from_slice(&values, &node.shape, Device::Cpu)?;
                let dtype = match plan.kinds[id] {
                    Kind::Exact if dtype == DType::BF16 => DType::F32,
                    _ => dtype,
                };
                tensor.to_dtype(dtype)?.to(device)
            })?;
            numbers.push((id, made));
        }
    }
    Ok(numbers)
}
