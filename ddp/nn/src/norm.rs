//! LayerNorm and RMSNorm over the last axis, as `torch.nn.LayerNorm` and `torch.nn.RMSNorm`.
//! Letters: C columns.

use ddp_kernels::ops::Norm;

use crate::build::Init;
use crate::forward::{Module, Scope, Var};

/// Normalizes the last axis. The weight (C) starts at 1, the bias (C) at 0.
#[derive(Clone, Debug)]
pub struct Normalize {
    norm: Norm,
    epsilon: f64,
    has_bias: bool,
}

impl Normalize {
    /// LayerNorm with weight and bias, and ε = 1e-5.
    pub fn layer() -> Normalize {
        Normalize {
            norm: Norm::Layer,
            epsilon: 1e-5,
            has_bias: true,
        }
    }

    /// RMSNorm with a weight, and ε = 1e-5.
    pub fn rms() -> Normalize {
        Normalize {
            norm: Norm::Rms,
            has_bias: false,
            ..Normalize::layer()
        }
    }

    /// The same norm without a bias.
    pub fn without_bias(self) -> Normalize {
        let has_bias = false;
        Normalize { has_bias, ..self }
    }

    /// The same norm with another ε, which is added to the mean of squares.
    pub fn epsilon(self, epsilon: f64) -> Normalize {
        Normalize { epsilon, ..self }
    }
}

impl Module for Normalize {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let columns = x.shape().last().copied().unwrap_or(0);
        if x.rank() < 2 || columns == 0 {
            let help = "a norm works on the last axis: [rows, …, columns]";
            return x.refuse("norm", &[x], "rows of at least one column", help);
        }
        let weight = m.parameter("weight", &[columns], Init::Constant(1.0));
        let bias = || m.parameter("bias", &[columns], Init::Constant(0.0));
        let bias = self.has_bias.then(bias);
        x.norm(self.norm, self.epsilon, &weight, bias.as_ref())
    }
}

impl Scope<'_> {
    /// The layer norm of the last axis: `name.weight` and `name.bias`.
    #[track_caller]
    pub fn layer_norm(&mut self, name: &str, x: &Var) -> Var {
        self.layer(name, x, Normalize::layer())
    }

    /// The RMS norm of the last axis: `name.weight`.
    #[track_caller]
    pub fn rms_norm(&mut self, name: &str, x: &Var) -> Var {
        self.layer(name, x, Normalize::rms())
    }
}
