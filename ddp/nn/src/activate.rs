//! Activations as layers: ReLU and GELU. In a `Sequential` a linear layer below applies them, and a
//! linear layer above multiplies their derivative into its own backward. Those of transformers,
//! SwiGLU and ReLU², stay layers of their own.

use ddp_kernels::Tensor;
use ddp_kernels::ops::{self, Activation, Gelu};

use crate::build::Build;
use crate::error::Result;
use crate::layer::Layer;
use crate::linear::with_last_of;
use crate::pass::Pass;

/// An activation, applied to each element.
#[derive(Debug)]
pub struct Activate {
    pub(crate) activation: Activation,
    /// Whether the linear layer below applies it.
    pub(crate) is_applied: bool,
    /// Whether the linear layer above multiplies its derivative in.
    pub(crate) is_derived: bool,
}

impl Activate {
    /// Applies `activation`.
    pub fn new(activation: Activation) -> Activate {
        Activate {
            activation,
            is_applied: false,
            is_derived: false,
        }
    }

    /// max(z, 0)
    pub fn relu() -> Activate {
        Activate::new(Activation::Relu)
    }

    /// z·Φ(z), as `torch.nn.GELU()`.
    pub fn gelu() -> Activate {
        Activate::new(Activation::Gelu(Gelu::Erf))
    }

    /// GELU by tanh, as `torch.nn.GELU("tanh")` and GPT-2.
    pub fn gelu_tanh() -> Activate {
        Activate::new(Activation::Gelu(Gelu::Tanh))
    }
}

impl Layer for Activate {
    fn build(&mut self, _: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>> {
        (self.is_applied, self.is_derived) = (false, false);
        Ok(shape.to_vec())
    }

    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor> {
        if self.is_applied || self.activation == Activation::Identity {
            return Ok(x.clone());
        }
        let y = pass.take(x.shape())?;
        let kept = match self.activation {
            Activation::Gelu(kind) => {
                ops::gelu_into(&y, x, kind)?;
                x
            }
            _ => {
                ops::relu_into(&y, x)?;
                &y
            }
        };
        if pass.is_training() {
            pass.save(kept);
        }
        Ok(y)
    }

    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>> {
        if self.activation == Activation::Identity {
            return Ok(Some(dy.clone()));
        }
        // Saved by the layer below if that applies the activation.
        let kept = pass.restore().reshape(dy.shape())?;
        if self.is_derived {
            return Ok(Some(dy.clone()));
        }
        let dx = pass.take(dy.shape())?;
        match self.activation {
            Activation::Gelu(kind) => ops::gelu_backward_into(&dx, dy, &kept, kind)?,
            _ => ops::relu_backward_into(&dx, dy, &kept)?,
        }
        Ok(Some(dx))
    }
}

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
