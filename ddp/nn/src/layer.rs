//! The trait `Layer`. Letters: B rows of the batch.

use std::any::Any;
use std::fmt;

use ddp_kernels::{DType, Tensor};

use crate::build::Build;
use crate::error::Result;
use crate::pass::Pass;

/// One layer, or a model made of layers. `examples/custom_layer.rs` shows how to write one.
pub trait Layer: Any + fmt::Debug + Send {
    /// Declares parameters and buffers. `shape` is that of one row of the input, without B. Returns
    /// the shape of one row of the output.
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>>;

    /// The output for `x` (B, …), where B may be 0. If `pass.is_training()`, saves what `backward`
    /// needs with `pass.save`.
    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor>;

    /// Restores what `forward` saved, in reverse order, writes the parameters' gradients
    /// (`pass.gradient`, then `pass.finished`), and returns the gradient of the input. That may be
    /// None if `pass.needs_input_gradient()` is false, and where the input has no gradient. Must
    /// not write to `dy`, which others may still read.
    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Option<Tensor>>;

    /// The dtype of the input, if it is not the dtype that layers compute in: i64 for a layer that
    /// looks up tokens. A model takes inputs of its first layer's dtype.
    fn input_dtype(&self) -> Option<DType> {
        None
    }
}

/// What a layer is called where it is observed: `layer 2 (Linear)`.
pub(crate) fn described(path: &str, layer: &dyn Layer) -> String {
    let text = format!("{layer:?}");
    let kind = text.split(|c: char| !c.is_alphanumeric()).next();
    format!("layer {path} ({})", kind.unwrap_or_default())
}
