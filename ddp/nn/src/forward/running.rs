//! Runs a plan, with memory of a pass.

use std::collections::HashSet;

use ddp_kernels::ops;
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor};

use super::op::{Given, Op, Parameter};
use super::plan::{PassPlan, PlannedRun};
use super::trace::{INPUTS_MAX, Kind};
use crate::build::ParamId;
use crate::error::{Error, Result};
use crate::pass::{Gradient, Pass, observe};

/// Runs a plan's operations.
pub(super) struct Running<'a, 'b> {
    pub(super) pass: &'a mut Pass<'b>,
    pub(super) plan: &'a PassPlan,
    pub(super) numbers: &'a [(usize, Tensor)],
    pub(super) values: &'a mut [Option<Tensor>],
    /// Whether the gradient of the model's input is wanted.
    pub(super) wants_input: bool,
}

/// One run of an operation.
pub(super) struct Run<'a, 'b> {
    pub(super) pass: &'a mut Pass<'b>,
    pub(super) plan: &'a PassPlan,
    pub(super) values: &'a mut [Option<Tensor>],
    pub(super) planned: &'a PlannedRun,
    /// Its inputs.
    pub(super) x: &'a [&'a Tensor],
}

impl Running<'_, '_> {
    pub(super) fn value(&self, id: usize) -> Result<Tensor> {
        let op = &self.plan.nodes[id].op;
        if let Op::Parameter(Parameter(parameter)) = op {
            return Ok(self.pass.value(*parameter)?.clone());
        }
        if let Op::Given(Given(tensor)) = op {
            return Ok(tensor.clone());
        }
        if let Ok(at) = self.numbers.binary_search_by_key(&id, |it| it.0) {
            return Ok(self.numbers[at].1.clone());
        }
        self.values[id].clone().ok_or_else(|| {
            let help = "run the model's forward in the same pass, or one that resumes it";
            Error::model("backward", "the values of a forward", "none", help)
        })
    }

    /// Runs in order; `is_backward` is for observers.
    pub(super) fn all(&mut self, runs: &[PlannedRun], is_backward: bool) -> Result<()> {
        for run in runs {
            if run.is_for_input && !self.wants_input {
                continue;
            }
            if let Err(error) = self.run(run) {
                let place = self.plan.nodes[run.of].users_place();
                return Err(match place {
                    Some(place) => error.within(place),
                    None => error,
                });
            }
            for &id in &run.outputs {
                let node = &self.plan.nodes[id];
                // Not what a processor computes again, or computes besides.
                if let Some(value) = &self.values[id]
                    && id < self.plan.traced
                    && !matches!(node.op, Op::Part(_))
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

    fn run(&mut self, run: &PlannedRun) -> Result<()> {
        let mut inputs = [const { None }; INPUTS_MAX];
        if run.inputs.len() > INPUTS_MAX {
            let got = format!("{} inputs", run.inputs.len());
            let op = self.plan.nodes[run.of].op.name();
            let help = "join or pass them in several steps";
            return Err(Error::model(
                op,
                format!("at most {INPUTS_MAX} inputs"),
                got,
                help,
            ));
        }
        let reads_any = run.op.reads().takes_sums();
        for (input, &id) in inputs.iter_mut().zip(&run.inputs) {
            let value = self.value(id)?;
            let is_rounded = self.plan.kinds[id] == Kind::Exact && !reads_any;
            *input = Some(if is_rounded {
                self.rounded(value)?
            } else {
                value
            });
        }
        // References, on the stack: a step allocates nothing.
        let all = inputs[0].as_ref().map(|any| of_all(&inputs, any));
        let x = all.as_ref().map_or(&[][..], |all| &all[..run.inputs.len()]);
        run.op.run(&mut Run {
            pass: self.pass,
            plan: self.plan,
            values: self.values,
            planned: run,
            x,
        })
    }
}

/// References to tensors; to `any` where there is none.
fn of_all<'a>(all: &'a [Option<Tensor>; INPUTS_MAX], any: &'a Tensor) -> [&'a Tensor; INPUTS_MAX] {
    all.each_ref().map(|it| it.as_ref().unwrap_or(any))
}

impl Run<'_, '_> {
    /// Memory for an output: what was given for it, if something was.
    pub(super) fn take(&mut self, at: usize) -> Result<Tensor> {
        let id = self.planned.outputs[at];
        if let Some(given) = &self.values[id] {
            return Ok(given.clone());
        }
        let made = if self.planned.is_in_place && at == 0 {
            self.x[0].clone()
        } else {
            let (plan, shape) = (self.plan, &self.plan.nodes[id].shape);
            let of = (plan.pools[id], plan.kinds[id]);
            self.pass.take_again(of, &plan.buffers[id], shape)?
        };
        self.values[id] = Some(made.clone());
        Ok(made)
    }

    /// Memory for an output (…, C) as (R, C).
    pub(super) fn take_rows(&mut self, at: usize) -> Result<Tensor> {
        rows(&self.take(at)?)
    }

    /// An input (…, C) as (R, C).
    pub(super) fn rows(&self, at: usize) -> Result<Tensor> {
        rows(self.x[at])
    }

    /// Memory for all outputs, for `write`.
    pub(super) fn write_all(
        &mut self,
        write: impl FnOnce(&Self, &[&Tensor]) -> Result<()>,
    ) -> Result<()> {
        let mut outputs = [const { None }; INPUTS_MAX];
        for (at, output) in outputs
            .iter_mut()
            .enumerate()
            .take(self.planned.outputs.len())
        {
            *output = Some(self.take(at)?);
        }
        outputs[0].as_ref().map_or(Ok(()), |any| {
            write(self, &of_all(&outputs, any)[..self.planned.outputs.len()])
        })
    }

    /// Completes a gradient, unless it is frozen.
    pub(super) fn write_gradient(
        &mut self,
        parameter: ParamId,
        write: impl FnOnce(&mut Self, &Gradient<'_>) -> Result<()>,
    ) -> Result<()> {
        if let Some(gradient) = self.pass.gradient(parameter) {
            write(self, &gradient)?;
        }
        self.pass.finished(parameter)
    }

    /// Memory for the sums of blocks of rows of `dx`, if something reads them.
    pub(super) fn take_sums(&mut self, dx: &Tensor) -> Result<Option<Tensor>> {
        let Some(sums) = self.planned.sums.filter(|_| dx.shape()[0] > 0) else {
            return Ok(None);
        };
        let made = self.pass.take_as(&ops::row_sums_of(dx), DType::F32)?;
        self.values[sums] = Some(made.clone());
        Ok(Some(made))
    }

    /// The sums of blocks of rows that another run has left.
    pub(super) fn left_sums(&mut self) -> Option<Tensor> {
        self.planned.sums.and_then(|sums| self.values[sums].take())
    }
}

/// `x` (…, C) as (R, C).
pub(super) fn rows(x: &Tensor) -> Result<Tensor> {
    rows_of(x, x.shape()[x.shape().rank() - 1])
}

/// A value as rows of this many columns.
pub(super) fn rows_of(x: &Tensor, columns: usize) -> Result<Tensor> {
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
    for (id, node) in plan
        .nodes
        .iter()
        .enumerate()
        .filter(|it| read.contains(&it.0))
    {
        if let Some(values) = node.op.numbers(node.shape.iter().product()) {
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
