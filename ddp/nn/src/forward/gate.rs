//! Gated activations, by kernels and by chains.

use ddp_kernels::Tensor;
use ddp_kernels::ops::Activation::GeluTanh;
use ddp_kernels::ops::ChainStep::{Apply, Load, Store};
use ddp_kernels::ops::{self, Chain, ChainStep, ChainView, Function};

use super::operation::*;

impl Var {
    /// f(gate)·up, where the first half of the last axis is the gate.
    #[track_caller]
    pub fn gated(&self, gate: Gate) -> Var {
        let mut shape = self.shape();
        let has_columns = self.rank() > usize::from(self.has_rows());
        let columns = shape.last_mut().filter(|_| has_columns);
        let Some(columns) = columns.filter(|columns| columns.is_multiple_of(2)) else {
            let help = "make both with one linear layer";
            return self.refuse("gated", &[self], "an even last axis: gate and up", help);
        };
        *columns /= 2;
        self.push(Gated(gate), &[self], shape)
    }
}

impl Operation for Gated {
    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        vec![at.like(0, GatedBackward(self.0), &[at.d, &at.x[0]])]
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let (out, x) = (&r.take_rows(0)?, &r.rows(0)?);
        if self.0 == Gate::Swiglu {
            return Ok(ops::swiglu_into(out, x)?);
        }
        let gelu = [
            Apply(Function::Activation(GeluTanh), [0; 3]),
            Apply(Function::Mul, [3, 1, 0]),
            Store(0, 4),
        ];
        halves([out, x], None, 0, &gelu)
    }
}

impl Operation for GatedBackward {
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        use Function::{Activation, Gradient, Mul};
        let (dx, d, x) = (&r.take_rows(0)?, &r.rows(0)?, &r.rows(1)?);
        if self.0 == Gate::Swiglu {
            return Ok(ops::swiglu_backward_into(dx, d, x)?);
        }
        let of_gate = [
            Apply(Mul, [2, 1, 0]),
            Apply(Gradient(GeluTanh), [3, 0, 0]),
            Store(0, 4),
        ];
        let of_up = [
            Apply(Activation(GeluTanh), [0; 3]),
            Apply(Mul, [2, 3, 0]),
            Store(0, 4),
        ];
        halves([dx, x], Some(d), 0, &of_gate)?;
        halves([dx, x], Some(d), d.shape()[1], &of_up)
    }
}

/// Writes what `steps` compute to the columns of `out` (R, …) from the one with this number on.
/// They load gate and up, the halves of a row of `x` (R, 2·H), then d (R, H), if there is one.
fn halves(
    [out, x]: [&Tensor; 2],
    d: Option<&Tensor>,
    column: usize,
    steps: &[ChainStep],
) -> Result<()> {
    let [rows, columns] = [x.shape()[0], x.shape()[1] / 2];
    let view = |of: &Tensor, offset| ChainView {
        offset,
        strides: vec![of.shape()[1], 1],
    };
    let mut loads = vec![view(x, 0), view(x, columns)];
    loads.extend(d.map(|d| view(d, 0)));
    // Without d, the gate is loaded in its place, and not used.
    let last = loads.len() - 1;
    let steps = [&[Load(0), Load(1), Load(last)], steps].concat();
    let views = [loads, vec![view(out, column)]];
    let chain = Chain::new("geglu", &[rows, columns], 0, steps, views)?;
    let inputs: Vec<&Tensor> = [x, x].into_iter().chain(d).collect();
    Ok(ops::chain_into(&chain, &[out], &inputs)?)
}
