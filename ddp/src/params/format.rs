//! What the numbers of a model are: `--dtype` for the program, a dtype for checks.

use ddp_kernels::DType;
use ddp_kernels::ops::F32Math;

use crate::config::Precision;
use crate::error::{Error, Result};

/// What layers compute in, from which follows what values, gradients and moments are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// The dtype of activations, of their gradients, and of the parameters that layers read.
    pub layers: DType,
    /// How a GPU multiplies f32.
    pub f32_math: F32Math,
}

impl Format {
    /// The dtype of values, gradients and moments: that of layers, or f32 where that is narrower. Sums over rows, micro-batches, ranks and
    /// steps are of many small numbers: in bf16, with its 8 bits, most of them would be lost.
    pub fn masters(self) -> DType {
        match self.layers {
            DType::BF16 => DType::F32,
            dtype => dtype,
        }
    }

    /// Refuses what no model computes in.
    pub(super) fn check(self) -> Result<()> {
        let way_out = match self.layers {
            DType::F32 | DType::F64 | DType::BF16 => return Ok(()),
            // Gradients below 6e-8 would be zero: it needs losses scaled up, which nobody does here.
            DType::F16 => "Use bf16, which has the range of f32",
            _ => "Use f32",
        };
        let dtype = self.layers;
        Err(Error::Usage(format!("a model's numbers: expected f32, bf16 or (for checks) f64, got {dtype}. {way_out}")))
    }
}

impl From<DType> for Format {
    /// Layers in this dtype, f32 multiplied as it is.
    fn from(layers: DType) -> Format {
        Format { layers, f32_math: F32Math::Strict }
    }
}

impl From<Precision> for Format {
    fn from(precision: Precision) -> Format {
        match precision {
            Precision::F32 => DType::F32.into(),
            Precision::Tf32 => Format { layers: DType::F32, f32_math: F32Math::Tf32 },
            Precision::Bf16 => DType::BF16.into(),
        }
    }
}
