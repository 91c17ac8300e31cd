//! A multilayer perceptron: linear layers with an activation between each two, and dropout after
//! the activation if wanted. Parameters have the names of a `torch.nn.Sequential` of the same
//! layers: `0.weight`, `0.bias`, `2.weight` … Dropout layers do not count, so that a perceptron has
//! the same names, and so the same initial weights, with dropout as without.

use ddp_kernels::ops::Activation;

use crate::{Activate, Dropout, Linear, Sequential};

/// The description of a multilayer perceptron. The number of inputs follows from the data.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    /// The widths of the hidden layers, from the input on; may be empty.
    pub hidden: Vec<usize>,
    /// The width of the output.
    pub outputs: usize,
    /// The activation after each hidden layer.
    pub activation: Activation,
    /// The probability of dropping each element after each activation. At 0 there are no dropout
    /// layers.
    pub dropout: f64,
}

impl Mlp {
    /// Makes the layers.
    pub fn layers(&self) -> Sequential {
        let mut layers = Sequential::new();
        for &width in &self.hidden {
            layers.push(Box::new(Linear::new(width)));
            layers.push(Box::new(Activate::new(self.activation)));
            if self.dropout != 0.0 {
                layers.push_unnumbered(Box::new(Dropout::new(self.dropout)));
            }
        }
        layers.then(Linear::new(self.outputs).outer())
    }
}
