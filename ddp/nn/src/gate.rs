//! Activations of transformers that linear layers do not apply: SwiGLU and ReLU².

use ddp_kernels::{Tensor, ops};

use crate::build::Build;
use crate::error::Result;
use crate::layer::Layer;
use crate::linear::with_last_of;
use crate::pass::Pass;

/// SwiGLU or ReLU². Letters: H columns of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gate {
    /// silu(gate)·up, of (…, 2·H): the first half of the columns is the gate.
    Swiglu,
    /// max(z, 0)².
    ReluSquared,
}

impl Layer for Gate {
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        let mut shape = shape.to_vec();
        if *self == Gate::ReluSquared {
            return Ok(shape);
        }
        let Some(columns) = shape.last_mut().filter(|columns| columns.is_multiple_of(2)) else {
            return Err(build.refuse(
                "an even number of columns: gate and up",
                format!("rows of shape {shape:?}"),
                "make both with one linear layer",
            ));
        };
        *columns /= 2;
        Ok(shape)
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        let (rows, columns) = rows(x)?;
        let y = match self {
            Gate::Swiglu => {
                let y = pass.take(&[rows.shape()[0], columns / 2])?;
                ops::swiglu_into(&y, &rows)?;
                y
            }
            Gate::ReluSquared => {
                let y = pass.take(rows.shape())?;
                ops::relu_squared_into(&y, &rows)?;
                y
            }
        };
        if pass.is_training() {
            pass.save(&rows);
        }
        with_last_of(&y, x, y.shape()[1])
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        let x = pass.restore();
        let (dy_rows, _) = rows(dy)?;
        let dx = pass.take(x.shape())?;
        match self {
            Gate::Swiglu => ops::swiglu_backward_into(&dx, &dy_rows, &x)?,
            Gate::ReluSquared => ops::relu_squared_backward_into(&dx, &dy_rows, &x)?,
        }
        Ok(Some(with_last_of(&dx, dy, x.shape()[1])?))
    }
}

/// `x` (…, C) as (R, C), and C.
fn rows(x: &Tensor) -> Result<(Tensor, usize)> {
    let columns = x.shape()[x.shape().rank() - 1];
    Ok((x.reshape(&[x.count() / columns, columns])?, columns))
}
