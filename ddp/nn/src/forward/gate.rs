//! Gated activations, by kernels and by chains.

use ddp_kernels::Tensor;
use ddp_kernels::ops::ChainStep::{Apply, Load, Store};
use ddp_kernels::ops::{self, Chain, ChainStep, ChainView, Function};

use crate::error::Result;

/// f(gate)·up, of (…, 2·H): the first half of the columns is the gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// silu
    Swiglu,
    /// gelu, approximated with tanh
    Geglu,
}

impl Gate {
    pub(super) fn forward(self, out: &Tensor, x: &Tensor) -> Result<()> {
        use Function::{GeluTanh, Mul};
        match self {
            Gate::Swiglu => Ok(ops::swiglu_into(out, x)?),
            Gate::Geglu => {
                let gelu = [Apply(GeluTanh, [0; 3]), Apply(Mul, [3, 1, 0])];
                halves([out, x], None, 0, &[&gelu[..], &[Store(0, 4)]].concat())
            }
        }
    }

    pub(super) fn backward(self, dx: &Tensor, d: &Tensor, x: &Tensor) -> Result<()> {
        use Function::{GeluTanh, GeluTanhSlope, Mul};
        if self == Gate::Swiglu {
            return Ok(ops::swiglu_backward_into(dx, d, x)?);
        }
        let of_gate = [
            Apply(GeluTanhSlope, [0; 3]),
            Apply(Mul, [2, 1, 0]),
            Apply(Mul, [4, 3, 0]),
            Store(0, 5),
        ];
        let of_up = [Apply(GeluTanh, [0; 3]), Apply(Mul, [2, 3, 0]), Store(0, 4)];
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
