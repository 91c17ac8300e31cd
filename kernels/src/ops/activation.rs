//! The functions that a linear layer can apply to its sums.

use super::gelu::Gelu;

/// What a layer applies to `x·Wᵀ + b`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    #[default]
    Identity,
    /// max(z, 0).
    Relu,
    /// z·Φ(z), by tanh or erf.
    Gelu(Gelu),
}
