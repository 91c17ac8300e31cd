//! The trait of layers.
//!
//! `build` declares the parameters and returns the shape of the output. `forward` computes, and in
//! training saves on the pass's stack what `backward` will need. `backward` takes that off the
//! stack in reverse order, writes the gradients of the parameters, and returns the gradient of the
//! input. Letters: B rows of the batch.

use std::fmt;

use ddp_kernels::ops::Activation;
use ddp_kernels::{DType, Tensor};

use crate::build::Build;
use crate::error::Result;
use crate::fold::{Fold, Folded};
use crate::loss::LossHead;
use crate::pass::Pass;

/// One layer, or a model made of layers. `examples/custom_layer.rs` shows how to write one.
pub trait Layer: fmt::Debug + Send {
    /// Declares parameters and buffers. `shape` is that of one row of the input, without B. Returns
    /// the shape of one row of the output.
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>>;

    /// The output for `x` (B, …), where B may be 0. If `pass.is_training()`, saves what `backward`
    /// needs with `pass.save`.
    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor>;

    /// Restores what `forward` saved, writes the parameters' gradients (`pass.gradient`, then
    /// `pass.finished`), and returns the gradient of the input as `fold` asks; `pass.fold` helps
    /// with that. Must not write to `dy`, which others may still read.
    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor, fold: Fold) -> Result<Folded>;

    /// As `forward`, of which the layer below may have computed this layer's norm. This layer may
    /// compute that of the layer above.
    fn forward_normed(
        &self,
        pass: &mut Pass<'_>,
        input: Normed,
        above: Option<&dyn SumNorm>,
    ) -> Result<Normed> {
        let _ = above;
        Ok(Normed::plain(&self.forward(pass, &input.x)?))
    }

    /// The norm of the input with which this layer begins, if `forward_normed` takes it computed.
    fn norm(&self) -> Option<&dyn SumNorm> {
        None
    }

    /// The dtype of the input, if it is not the dtype that layers compute in: i64 for a layer that
    /// looks up tokens. A model takes inputs of its first layer's dtype.
    fn input_dtype(&self) -> Option<DType> {
        None
    }

    /// If this layer is an activation: which. The layer below may then apply it (`fuse`), and the
    /// layer above may multiply its derivative in (`Fold::Activation`). Such a layer saves one
    /// tensor: the output for ReLU, the input for GELU.
    fn activation(&self) -> Option<Activation> {
        None
    }

    /// The layer that a pass may leave to the loss: see `Head`. Only of the whole model's last one.
    fn head(&self) -> Option<&dyn LossHead> {
        None
    }

    /// Asks this layer to apply the activation `above` to its output. Returns whether it will; then
    /// in training it saves, after its own tensors, what that activation's backward needs: the
    /// output for ReLU, the input for GELU.
    fn fuse(&mut self, above: Activation) -> bool {
        let _ = above;
        false
    }

    /// Tells an activation that the layer below applies it: its forward then passes `x` on and
    /// saves nothing.
    fn set_fused(&mut self) {}

    /// Tells this layer which activation its input comes from. That activation's saved tensor is on
    /// top of the stack in this layer's backward, once this layer has restored its own.
    fn set_below(&mut self, below: Option<Activation>) {
        let _ = below;
    }
}

/// A norm that can be computed with the sum that it is of.
pub trait SumNorm {
    /// x + residual and its norm, in one pass over memory. In training saves what the norm's
    /// backward needs.
    fn forward_sum(&self, pass: &mut Pass<'_>, x: &Tensor, residual: &Tensor) -> Result<Normed>;
}

/// A tensor between two layers, and its norm if the layer below computed that for the layer above.
#[derive(Debug)]
pub struct Normed {
    /// The tensor (B, …).
    pub x: Tensor,
    /// What the layer above's `norm` makes of it, in the same shape.
    pub normed: Option<Tensor>,
}

impl Normed {
    /// A tensor without its norm.
    pub fn plain(x: &Tensor) -> Normed {
        Normed {
            x: x.clone(),
            normed: None,
        }
    }
}
