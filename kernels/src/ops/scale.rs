//! scale: `out = factor · x`. The factor is first rounded to the dtype of the math: f32, or f64 for
//! f64.

use crate::Tensor;
use crate::error::Result;
use crate::launch::Source;
use crate::ops::elementwise::unary_op;
use crate::ops::float::Float;
use crate::ops::loops::Unary;

static SOURCE: Source = Source::new("scale.cu", include_str!("scale.cu"));

/// One element times the factor.
#[derive(Clone, Copy)]
struct Scale(f64);

impl<T: Float> Unary<T> for Scale {
    #[inline(always)]
    fn apply(self, x: T) -> T {
        x * T::from_f64(self.0)
    }
}

/// `factor · x` in a new tensor.
#[track_caller]
pub fn scale(x: &Tensor, factor: f64) -> Result<Tensor> {
    let out = x.empty_like()?;
    scale_into(&out, x, factor)?;
    Ok(out)
}

/// `out = factor · x`; `out` may be `x`.
///
/// Backward: `dx = factor · dout`, with `scale_into`.
#[track_caller]
pub fn scale_into(out: &Tensor, x: &Tensor, factor: f64) -> Result<()> {
    let kernel = (&SOURCE, "scale");
    unary_op("scale", out, x, Scale(factor), kernel, Some(factor as f32))
}

#[cfg(test)]
mod tests;
