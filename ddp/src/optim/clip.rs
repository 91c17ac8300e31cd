//! Clipping by the norm of all gradients, without leaving the device: one pass over the gradients, and one number that the
//! optimizer multiplies them by. That number also divides them by the global batch.

use ddp_kernels::{DType, Tensor, ops};

use crate::error::{Error, Result};
use crate::params::Params;

/// The norm of the gradients and the scale that clips them.
#[derive(Debug)]
pub struct Clip {
    max_norm: f64,
    chunks: ops::ChunkTable,
    /// f64 [quanta of the chunks]
    partials: Tensor,
    /// [scale, norm]
    out: Tensor,
}

impl Clip {
    /// Clips the gradients of `params` to a norm of `max_norm`; 0 clips nothing.
    pub fn new(max_norm: f64, params: &Params) -> Result<Clip> {
        if !(0.0..f64::INFINITY).contains(&max_norm) {
            return Err(Error::Usage(format!("the norm to clip at: expected 0 (off) or more, got {max_norm}")));
        }
        let chunks = params.chunks()?;
        let partials = Tensor::zeros(&[chunks.quanta()], DType::F64, params.device())?.named("squares of gradients");
        let dtype = if params.dtype() == DType::F64 { DType::F64 } else { DType::F32 };
        let out = Tensor::zeros(&[2], dtype, params.device())?.named("gradient scale and norm");
        Ok(Clip { max_norm, chunks, partials, out })
    }

    /// Whether anything is ever clipped.
    pub fn is_on(&self) -> bool {
        self.max_norm > 0.0
    }

    /// Measures the gradients and writes the scale: 1 / `divisor`, and smaller where the norm of the gradients so divided
    /// is above the maximum. `divisor` is one number on the device. The norm is written when clipping is on or
    /// `wants_norm`; otherwise it is 0, and the gradients are not read.
    pub fn compute(&self, params: &Params, divisor: Option<&Tensor>, wants_norm: bool) -> Result<()> {
        let measured = self.is_on() || wants_norm;
        if measured {
            ops::grad_norm_partials(&self.partials, params.gradients(), &self.chunks)?;
        }
        Ok(ops::clip_scale(&self.out, measured.then_some(&self.partials), self.max_norm, divisor)?)
    }

    /// \[2\]: what to multiply gradients by, and the norm of the divided gradients before clipping.
    pub fn out(&self) -> &Tensor {
        &self.out
    }
}
