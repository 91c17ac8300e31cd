//! The family `mlp`: linear layers with an activation between each two, and dropout after the
//! activation if wanted. Parameters have the names of a `torch.nn.Sequential` of the same layers:
//! `0.weight`, `0.bias`, `2.weight` … Dropout layers are not counted, so that a perceptron has the
//! same names, and so the same initial weights, with and without dropout.

use ddp_kernels::DType;
use ddp_kernels::ops::Activation;

use super::family::{DataShape, Family, refuse};
use crate::error::Result;
use crate::forward::{Module, Scope, Var};
use crate::{Activate, Dropout, Linear, Sequential, family_settings};

/// The widest layer.
pub const WIDTH_MAX: usize = 1 << 24;

family_settings! {
    /// Settings of a perceptron. The widths of input and output follow from the data.
    pub struct MlpSpec {
        /// Widths of the hidden layers, separated by commas; write the word none for a linear model
        hidden "WIDTHS": Vec<usize> = vec![256, 128];
        /// Activation function between the layers
        activation "NAME": Activation = Activation::Relu;
        /// Probability of dropping an element
        dropout "P": f64 = 0.0;
        /// Add a linear model of the inputs to the output. The perceptron then sees
        /// x/√(1 + (x/3)²), and its last layer begins at zero [default: false; for tables true]
        linear_path "BOOL": Option<bool> = None;
    }
}

impl Family for MlpSpec {
    fn name(&self) -> &'static str {
        "mlp"
    }

    fn help(&self) -> &'static str {
        "A multilayer perceptron"
    }

    fn check(&self) -> Result<()> {
        let is_wrong = |width: &&usize| !(1..=WIDTH_MAX).contains(*width);
        if let Some(width) = self.hidden.iter().find(is_wrong) {
            let expected = format!("widths from 1 to {WIDTH_MAX}");
            let help = "give widths with commas between, as in 256,128, or none for a linear model";
            return Err(refuse("hidden", width, &expected, help));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            let expected = "a number, at least 0 and less than 1";
            let help = "it is the probability of dropping an element; 0 turns it off";
            return Err(refuse("dropout", self.dropout, expected, help));
        }
        Ok(())
    }

    fn layers(&self, data: &DataShape<'_>) -> Result<Sequential> {
        data.check_dtype(DType::F32, "mlp")?;
        let mlp = Mlp {
            hidden: self.hidden.clone(),
            outputs: data.outputs,
            activation: self.activation,
            dropout: self.dropout,
        };
        let zero_last = self.linear_path == Some(true);
        let layers = mlp.layers_to(Linear::new(data.outputs).starting_at_zero(zero_last));
        if !zero_last {
            return Ok(layers);
        }
        Ok(Sequential::new().named(
            "",
            LinearPath {
                beside: layers,
                outputs: data.outputs,
            },
        ))
    }

    fn torch(&self, row_shape: &[usize], outputs: usize) -> Option<String> {
        let activation = self.activation.about().pytorch?;
        let mut inputs = row_shape.last().copied().unwrap_or(0);
        let mut layers = Vec::new();
        for &width in &self.hidden {
            layers.push(format!("nn.Linear({inputs}, {width})"));
            // Dropout does not count in names.
            layers.push(match self.dropout {
                0.0 => activation.to_string(),
                part => format!("nn.Sequential({activation}, nn.Dropout({part}))"),
            });
            inputs = width;
        }
        layers.push(format!("nn.Linear({inputs}, {outputs})"));
        if self.linear_path != Some(true) {
            return Some(format!("nn.Sequential({})", layers.join(", ")));
        }
        let features = row_shape.last().copied().unwrap_or(0);
        let layers = layers.iter().enumerate();
        let layers: Vec<_> = layers
            .map(|(at, layer)| format!("'{at}': {layer}"))
            .collect();
        Some(format!(
            "type('Table', (nn.Sequential,), {{'forward': lambda m, x: nn.Sequential.forward(m[:-1], \
             x / (1 + (x / 3) ** 2).sqrt()) + m[-1](x)}})(collections.OrderedDict({{{}, \
             'linear': nn.Linear({features}, {outputs}, bias=False)}}))",
            layers.join(", ")
        ))
    }
}

/// Layers beside a linear model, which starts at zero. The layers see inputs without extremes: near
/// 0 as they are, and at most 3.
#[derive(Debug)]
struct LinearPath {
    beside: Sequential,
    outputs: usize,
}

impl Module for LinearPath {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let third = x * (1.0 / 3.0);
        let limited = x * (1.0 + &third * &third).rsqrt();
        let y = self.beside.forward(m, &limited);
        let linear = Linear::new(self.outputs).without_bias();
        y + m.layer("linear", x, linear.starting_at_zero(true).outer())
    }
}

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
        self.layers_to(Linear::new(self.outputs))
    }

    /// Makes the layers with this one as the last.
    fn layers_to(&self, last: Linear) -> Sequential {
        let mut layers = Sequential::new();
        for &width in &self.hidden {
            layers.push(Box::new(Linear::new(width)));
            layers.push(Box::new(Activate::new(self.activation)));
            if self.dropout != 0.0 {
                layers.push_unnumbered(Box::new(Dropout::new(self.dropout)));
            }
        }
        layers.then(last.outer())
    }
}
