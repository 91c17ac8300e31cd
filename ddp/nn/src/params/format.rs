//! The number formats of a model.

use ddp_kernels::DType;
use ddp_kernels::ops::F32Math;

use crate::error::{Error, Result};

ddp_kernels::choices! {
    /// The precision in which a model computes. Values, gradients and moments are always f32.
    #[derive(Default)]
    pub enum Precision {
        /// 32 bits throughout
        #[default]
        F32 = "f32",
        /// On a GPU: matmuls of numbers rounded to 10 mantissa bits, sums in 32 bits
        Tf32 = "tf32",
        /// On a GPU: activations and the parameters that matmuls read in bf16
        Bf16 = "bf16",
    }
}

/// What layers compute in. The dtype of values, gradients and moments follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// The dtype of activations, of their gradients, and of the parameters that layers read.
    pub layers: DType,
    /// How a GPU multiplies f32.
    pub f32_math: F32Math,
}

impl Format {
    /// The dtype of values, gradients and moments: the layers' dtype, or f32 if that is narrower.
    /// These are sums of many small numbers, most of which bf16 with its 8 bits would lose.
    pub fn masters(self) -> DType {
        match self.layers {
            DType::BF16 => DType::F32,
            dtype => dtype,
        }
    }

    /// Refuses dtypes in which no model computes.
    pub(super) fn check(self) -> Result<()> {
        let help = match self.layers {
            DType::F32 | DType::F64 | DType::BF16 => return Ok(()),
            // Gradients below 6e-8 would be 0 without loss scaling, which does not exist here.
            DType::F16 => "use bf16, which has the range of f32",
            _ => "use f32",
        };
        let dtype = self.layers;
        Err(Error::Usage(format!(
            "a model's dtype: expected f32, bf16 or (for checks) f64, got {dtype}; help: {help}"
        )))
    }
}

impl From<DType> for Format {
    /// Layers in this dtype, with exact f32 matmuls.
    fn from(layers: DType) -> Format {
        Format {
            layers,
            f32_math: F32Math::Strict,
        }
    }
}

impl From<Precision> for Format {
    fn from(precision: Precision) -> Format {
        match precision {
            Precision::F32 => DType::F32.into(),
            Precision::Tf32 => Format {
                layers: DType::F32,
                f32_math: F32Math::Tf32,
            },
            Precision::Bf16 => DType::BF16.into(),
        }
    }
}
