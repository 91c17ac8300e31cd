//! What a layer's backward is asked to return, and what it returns.

use ddp_kernels::Tensor;
use ddp_kernels::ops::Activation;

/// What `Layer::backward` is asked to return.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fold {
    /// Nothing: the gradient of the input is not needed.
    Nothing,
    /// The gradient of the input.
    Input,
    /// The gradient of the input, times the derivative of the activation that made the input, if
    /// the layer can multiply it in. The activation's saved tensor is on top of the stack once the
    /// layer has taken its own (`Pass::top`), and stays there. For ReLU it is the layer's input.
    Activation(Activation),
}

/// The gradient that `Layer::backward` returns.
#[derive(Debug)]
pub struct Folded {
    /// The gradient of the input; None for `Fold::Nothing`.
    pub gradient: Option<Tensor>,
    /// Whether it contains the derivative that `Fold::Activation` asked for.
    pub folded: bool,
}

impl Folded {
    /// The gradient of the input, without an activation's derivative.
    pub fn plain(gradient: Tensor) -> Folded {
        Folded {
            gradient: Some(gradient),
            folded: false,
        }
    }

    /// No gradient, because none was asked for.
    pub fn nothing() -> Folded {
        Folded {
            gradient: None,
            folded: false,
        }
    }
}
