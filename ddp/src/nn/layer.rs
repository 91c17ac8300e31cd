//! What a layer is.
//!
//! A layer's life: `build` declares its parameters and says what shape it makes of its input; `forward` computes, and
//! in training saves on the pass's stack what its backward will need; `backward` takes that off the stack in the opposite
//! order, writes its parameters' gradients, and returns the gradient of its input. Letters: B rows of the batch.

use std::fmt;

use ddp_kernels::Tensor;
use ddp_kernels::ops::Activation;

use crate::error::Result;
use crate::nn::build::Build;
use crate::nn::pass::Pass;

/// One layer, or a model made of layers. A layer of your own is a page: examples/custom_layer.rs.
pub trait Layer: fmt::Debug + Send {
    /// Declares parameters and buffers. `shape` is that of one row of the input (without B); returns that of one row of
    /// the output.
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>>;

    /// The output for `x` (B first, which may be 0). Saves what `backward` needs with `pass.save` if `pass.is_training()`.
    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor>;

    /// Takes back what `forward` saved, writes the parameters' gradients (`pass.gradient`, then `pass.finished`), and
    /// returns the gradient of the input as `fold` asks for it (`pass.fold` does the asking's rest). `dy` is not written
    /// to: others may still need it.
    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor, fold: Fold) -> Result<Folded>;

    /// The activation this layer is, if it is one: the layer below may fuse it (`fuse`), the layer above may fold its
    /// derivative into its own backward (`Fold::Activation`). Such a layer saves one tensor: ReLU's output, GELU's input.
    fn activation(&self) -> Option<Activation> {
        None
    }

    /// Asks this layer to apply `above` to its output itself. A layer that agrees (true) saves, in training, after its
    /// own what that activation's backward needs: the output for ReLU, the input for GELU.
    fn fuse(&mut self, above: Activation) -> bool {
        let _ = above;
        false
    }

    /// Tells an activation that the layer below applies it: its forward passes `x` on and saves nothing.
    fn set_fused(&mut self) {}
}

/// What `backward` is to return.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fold {
    /// Nothing: nobody needs the gradient of the input.
    Nothing,
    /// The gradient of the input.
    Input,
    /// The gradient of the input, times the derivative of this activation that made it, if the layer can do that on the way. What the
    /// activation's backward needs is on top of the stack once the layer has taken its own off (`pass.top`), and stays
    /// there; ReLU's is also the layer's own input.
    Activation(Activation),
}

/// The gradient that `backward` returns.
#[derive(Debug)]
pub struct Folded {
    /// The gradient of the input; none for `Fold::Nothing`.
    pub gradient: Option<Tensor>,
    /// Whether the activation of `Fold::Activation` is in it.
    pub folded: bool,
}

impl Folded {
    /// The gradient of the input, nothing folded in.
    pub fn plain(gradient: Tensor) -> Folded {
        Folded { gradient: Some(gradient), folded: false }
    }

    /// No gradient, since none was asked for.
    pub fn nothing() -> Folded {
        Folded { gradient: None, folded: false }
    }
}
