//! Runs a plan, with memory of a pass.

use std::collections::HashSet;

use ddp_kernels::ops;
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor};

use super::op::{Given, Op, Parameter, Reads, Role};
use super::plan::{PassPlan, PlannedRun};
use super::trace::{INPUTS_MAX, NumberKind};
use crate::build::ParamId;
use crate::error::{Error, Result};
use crate::pass::{Gradient, Pass, observe};

/// One run of an operation.
pub(super) struct Run<'a, 'b> {
    pub(super) pass: &'a mut Pass<'b>,
    pub(super) plan: &'a PassPlan,
    pub(super) values: &'a mut [Option<Tensor>],
    pub(super) planned: &'a PlannedRun,
    /// Its inputs.
    pub(super) x: &'a [&'a Tensor],
}

impl PassPlan {
    pub(super) fn value(
        &self,
        pass: &Pass<'_>,
        values: &[Option<Tensor>],
        id: usize,
    ) -> Result<Tensor> {
        let op = &self.nodes[id].op;
        if let Op::Parameter(Parameter(parameter)) = op {
            return Ok(pass.value(*parameter)?.clone());
        }
        if let Op::Given(Given(tensor)) = op {
            return Ok(tensor.clone());
        }
        let numbers = (op.role() == Role::Leaf).then(|| self.numbers_of(id));
        let value = numbers.flatten().or(values[id].as_ref());
        value.cloned().ok_or_else(|| {
            let help = "run the model's forward in the same pass, or one that resumes it";
            Error::model("backward", "the values of a forward", "none", help)
        })
    }

    /// Runs the forward; or the backward, and whether the gradient of the input is wanted.
    pub(super) fn run(
        &self,
        pass: &mut Pass<'_>,
        values: &mut [Option<Tensor>],
        backward: Option<bool>,
    ) -> Result<()> {
        let (runs, of) = match backward {
            Some(_) => (&self.backward, "backward"),
            None => (&self.forward, "forward"),
        };
        for run in runs {
            if run.is_for_input && backward != Some(true) {
                continue;
            }
            let placed = |error: Error| match self.nodes[run.of].users_place() {
                Some(place) => error.within(place),
                None => error,
            };
            self.run_one(run, pass, values).map_err(placed)?;
            for &id in &run.outputs {
                let node = &self.nodes[id];
                // Skip recomputed values and by-products.
                if let Some(value) = &values[id]
                    && id < self.traced
                    && node.op.role() != Role::Output
                {
                    let name = || format!("{of} of layer {} ({})", node.place, node.op.name());
                    observe(name, value)?;
                }
            }
            run.last.iter().for_each(|&id| values[id] = None);
        }
        Ok(())
    }

    fn run_one(
        &self,
        planned: &PlannedRun,
        pass: &mut Pass<'_>,
        values: &mut [Option<Tensor>],
    ) -> Result<()> {
        let mut inputs = [const { None }; INPUTS_MAX];
        let count = planned.inputs.len();
        if count > INPUTS_MAX {
            let expected = format!("at most {INPUTS_MAX} inputs");
            let help = "join or pass them in several steps";
            let op = self.nodes[planned.of].op.name();
            return Err(Error::model(op, expected, format!("{count} inputs"), help));
        }
        let reads_any = matches!(planned.op.reads(), Reads::Floats | Reads::All);
        for (input, &id) in inputs.iter_mut().zip(&planned.inputs) {
            let mut value = self.value(pass, values, id)?;
            let is_rounded = self.kinds[id] == NumberKind::SumDtypeReadRounded && !reads_any;
            if is_rounded && value.dtype() != pass.dtype() {
                let rounded = pass.take(value.shape())?;
                ops::cast_into(&rounded, &value)?;
                value = rounded;
            }
            *input = Some(value);
        }
        // References, on the stack: a step allocates nothing.
        let all = inputs[0].as_ref().map(|any| of_all(&inputs, any));
        planned.op.run(&mut Run {
            pass,
            plan: self,
            values,
            planned,
            x: all.as_ref().map_or(&[], |all| &all[..count]),
        })
    }

    /// These numbers on the device.
    pub(super) fn numbers_of(&self, id: usize) -> Option<&Tensor> {
        let found = self.numbers.binary_search_by_key(&id, |it| it.0).ok();
        found.map(|at| &self.numbers[at].1)
    }

    /// Makes the numbers that runs read, of the output, and those of `also`; `dtype` is that of the
    /// layers.
    pub(super) fn make_numbers(
        &mut self,
        also: Option<usize>,
        dtype: DType,
        device: Device,
    ) -> Result<()> {
        let runs = self.forward.iter().chain(&self.backward);
        let mut read: HashSet<usize> = runs.flat_map(|run| run.inputs.iter().copied()).collect();
        read.extend(also.into_iter().chain([self.ends.y]));
        let nodes = self.nodes.iter().enumerate();
        for (id, node) in nodes.filter(|it| read.contains(&it.0)) {
            if let Some(values) = node.op.numbers(node.shape.iter().product()) {
                let made = announced("numbers of a forward", || {
                    let tensor = Tensor::from_slice(&values, &node.shape, Device::Cpu)?;
                    let is_wide =
                        dtype == DType::BF16 && self.kinds[id] == NumberKind::SumDtypeReadRounded;
                    let dtype = if is_wide { DType::F32 } else { dtype };
                    tensor.to_dtype(dtype)?.to(device)
                })?;
                self.numbers.push((id, made));
            }
        }
        Ok(())
    }
}

/// A reference to each tensor, or to `any` where one is missing.
fn of_all<'a>(all: &'a [Option<Tensor>; INPUTS_MAX], any: &'a Tensor) -> [&'a Tensor; INPUTS_MAX] {
    all.each_ref().map(|it| it.as_ref().unwrap_or(any))
}

impl Run<'_, '_> {
    /// Memory for an output: what was given for it, if something was.
    pub(super) fn take(&mut self, at: usize) -> Result<Tensor> {
        let id = self.planned.outputs[at];
        let made = if self.planned.is_in_place && at == 0 {
            self.x[0].clone()
        } else if let Some(given) = &self.values[id] {
            return Ok(given.clone());
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
        let (mut outputs, count) = ([const { None }; INPUTS_MAX], self.planned.outputs.len());
        for (at, output) in outputs.iter_mut().enumerate().take(count) {
            *output = Some(self.take(at)?);
        }
        let any = outputs[0].as_ref();
        any.map_or(Ok(()), |any| write(self, &of_all(&outputs, any)[..count]))
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
