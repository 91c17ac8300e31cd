//! Operations with a backward by hand. The first run of each must write all of its outputs.

use std::sync::Arc;

use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor, ops};

use super::operation::*;
use super::scope::Scope;
use crate::error::Error;

impl Scope<'_> {
    /// An operation with a backward by hand.
    #[track_caller]
    pub fn custom(&mut self, op: Arc<dyn CustomOp>, inputs: &[&Var]) -> Var {
        let shapes: Vec<Vec<usize>> = inputs.iter().map(|it| it.shape()).collect();
        let Some(first) = inputs.first() else {
            let text = "custom: expected at least one input, got none; help: give it x";
            return self.refused(text.into(), &[]);
        };
        let shape = match op.shape(&shapes) {
            Ok(shape) => shape,
            Err(error) => return self.refused(error.to_string(), &shapes[0]),
        };
        let of_rows = inputs.iter().position(|it| it.has_rows());
        let (has_rows, text) = (of_rows.is_some() && op.has_rows(), format!("{op:?}"));
        if has_rows && shape.first() != of_rows.map(|at| &shapes[at][0]) {
            let expected = "an output whose first axis is the rows";
            let help = "return false from has_rows if the output is not per row";
            return first.refuse(&text, inputs, expected, help);
        }
        let made = first.checked(Custom(op), inputs, shape);
        self.trace.borrow_mut().nodes[made.id].has_rows = has_rows;
        made
    }
}

impl Operation for Custom {
    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        let inputs: Vec<&Var> = at.x.iter().chain([at.y, at.d]).collect();
        let op = CustomBackward(self.0.clone());
        let first = at.d.push(op, &inputs, at.x[0].shape());
        let others =
            (1..at.x.len()).map(|it| first.part(it, NumberKind::LayerDtype, at.x[it].shape()));
        let others: Vec<Var> = others.collect();
        [first].into_iter().chain(others).map(Some).collect()
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        r.write_all(|r, outputs| {
            let what = |_| format!("{:?}: forward: out", self.0);
            first_run(r, what, outputs, || self.0.forward(r.x, outputs[0]))
        })
    }
}

impl Operation for CustomBackward {
    fn outputs(&self, planner: &mut Planner, id: usize) -> Vec<usize> {
        let parts = 1..planner.node(id).inputs.len() - 2;
        let parts = parts.filter_map(|at| planner.known_part(id, at));
        [id].into_iter().chain(parts).collect()
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        r.write_all(|r, outputs| {
            let what = |at| format!("{:?}: backward: gradient {at}", self.0);
            let (of, ends) = r.x.split_at(r.x.len() - 2);
            let write = || self.0.backward(of, [ends[0], ends[1]], outputs);
            first_run(r, what, outputs, write)
        })
    }
}

/// How many elements the host looks at in one go.
const CHECKED_AT_ONCE: usize = 1 << 20;

/// What outputs hold before their first run: exact in each dtype, and very unlikely as a result.
const UNWRITTEN: f64 = -175.0 * (1u128 << 120) as f64;

/// Runs `write`. The first time it is refused if it leaves elements of `outputs` as they were;
/// `what` is what an output is called.
fn first_run(
    r: &Run<'_, '_>,
    what: impl Fn(usize) -> String,
    outputs: &[&Tensor],
    write: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let is_first = !r.planned.has_run.replace(true);
    if !is_first || outputs.iter().any(|it| it.device().is_planned()) {
        return write();
    }
    for output in outputs {
        ops::fill_into(output, UNWRITTEN)?;
    }
    write()?;
    for (at, output) in outputs.iter().enumerate() {
        let (all, count) = (output.flatten()?, output.count());
        let mut left = 0;
        for start in (0..count).step_by(CHECKED_AT_ONCE) {
            let part = all.slice(start..(start + CHECKED_AT_ONCE).min(count))?;
            let values: Vec<f64> = announced("first outputs of an own operation", || {
                part.to(Device::Cpu)?.to_dtype(DType::F64)?.to_vec()
            })?;
            left += values.iter().filter(|it| **it == UNWRITTEN).count();
        }
        if left > 0 {
            return Err(Error::model(
                what(at),
                format!("all {count} elements to be written"),
                format!("{left} unwritten"),
                "write zeros, too: outputs are not cleared before",
            ));
        }
    }
    Ok(())
}
