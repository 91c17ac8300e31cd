//! Mlp: linear layers with an activation between each two, and dropout behind the activation if wanted. Its names are those
//! of a `torch.nn.Sequential` of the same layers: `0.weight`, `0.bias`, `2.weight` …

use ddp_kernels::ops::Activation;

use crate::nn::{Activate, Dropout, Linear, Sequential};

/// A multilayer perceptron, described. Inputs are as many as a row of the data has.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    /// The widths of the hidden layers, from the input on; may be empty.
    pub hidden: Vec<usize>,
    /// The width of the output.
    pub outputs: usize,
    /// What is applied behind each hidden layer.
    pub activation: Activation,
    /// The probability of dropping each element behind each activation. At 0 there is no such layer, which changes the
    /// names of those that follow.
    pub dropout: f64,
}

impl Mlp {
    /// The layers.
    pub fn layers(&self) -> Sequential {
        let mut layers = Sequential::new();
        for &width in &self.hidden {
            layers.push(Box::new(Linear::new(width)));
            layers.push(Box::new(Activate::new(self.activation)));
            if self.dropout != 0.0 {
                layers.push(Box::new(Dropout::new(self.dropout)));
            }
        }
        layers.then(Linear::new(self.outputs))
    }
}
