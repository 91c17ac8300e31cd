//! The settings of a transformer.

use crate::family_settings;
use ddp_kernels::choices;

family_settings! {
    /// Settings of a transformer.
    pub struct GptSpec {
        /// Blocks of attention and perceptron
        layers "N": usize = 4;
        /// Heads of attention
        heads "N": usize = 4;
        /// Heads of keys and values, each shared by equally many heads; 0 for one per head
        kv_heads "N": usize = 0;
        /// Columns of the residual stream
        width "N": usize = 128;
        /// Width of the perceptrons; 0 for 4 times `width`
        mlp_width "N": usize = 0;
        /// Tokens that the model sees at once
        context "N": usize = 128;
        /// Different tokens; 0 for as many as the data have
        vocab "N": usize = 0;
        /// Norm before each part
        norm "NAME": NormKind = NormKind::Layer;
        /// How the model knows positions
        position "NAME": PositionKind = PositionKind::Learned;
        /// Activation function of the perceptrons
        mlp "NAME": MlpKind = MlpKind::GeluTanh;
        /// Whether linear layers and norms have a bias
        bias "BOOL": bool = true;
        /// Whether the last layer's weight is that of the embedding
        tied "BOOL": bool = true;
        /// Probability of dropping an element
        dropout "P": f64 = 0.0;
        /// What norms add to the mean of squares
        norm_epsilon "X": f64 = 1e-5;
        /// Base of rotary positions
        rope_base "X": f64 = 10_000.0;
        /// What backward computes again instead of keeping it: less memory, same bits, more time
        recompute "WHAT": RecomputeKind = RecomputeKind::None, changes_results: false;
    }
}

choices! {
    /// A norm.
    #[derive(Default)]
    pub enum NormKind {
        /// LayerNorm
        #[default]
        Layer = "layer",
        /// RMSNorm
        Rms = "rms",
    }
}

choices! {
    /// The activation function of a transformer's perceptrons.
    #[derive(Default)]
    pub enum MlpKind {
        /// z·Φ(z), exact
        Gelu = "gelu",
        /// z·Φ(z), approximated with tanh
        #[default]
        GeluTanh = "gelu-tanh",
        /// max(z, 0)²
        Relu2 = "relu2",
        /// silu(gate)·up, with one more matrix
        Swiglu = "swiglu",
    }
}

choices! {
    /// What backward computes again.
    #[derive(Default)]
    pub enum RecomputeKind {
        /// Nothing: all activations are kept
        #[default]
        None = "none",
        /// Queries, keys, values and results of attention
        Attention = "attention",
        /// Whole blocks, of which only the inputs are kept
        Block = "block",
    }
}

choices! {
    /// How a transformer knows positions.
    #[derive(Default)]
    pub enum PositionKind {
        /// A learned row for each position, added to the token's
        #[default]
        Learned = "learned",
        /// Queries and keys turned by angles that grow with the position
        Rope = "rope",
    }
}

impl GptSpec {
    /// Columns of the perceptrons between their linear layers.
    pub fn mlp_width(&self) -> usize {
        match self.mlp_width {
            0 => 4 * self.width,
            width => width,
        }
    }

    /// Heads of keys and values.
    pub fn kv_heads(&self) -> usize {
        match self.kv_heads {
            0 => self.heads,
            kv_heads => kv_heads,
        }
    }
}
