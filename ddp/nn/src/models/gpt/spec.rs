//! The settings of a transformer.

use crate::family_settings;
use crate::models::blocks::{Blocks, MlpKind, NormKind, RecomputeKind};
use ddp_kernels::choices;

/// The standard deviation of initial weights in GPT-2.
pub(super) const DEVIATION: f64 = 0.02;

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

    /// Multiplications and additions for a token in training: of matrices forward and twice
    /// backward, and of causal attention as it is computed.
    pub fn flop_of_a_token(&self, vocabulary: usize) -> f64 {
        self.blocks().flop_of_a_token(self.context) + 6.0 * (vocabulary * self.width) as f64
    }

    /// Heads of keys and values.
    pub fn kv_heads(&self) -> usize {
        match self.kv_heads {
            0 => self.heads,
            kv_heads => kv_heads,
        }
    }

    /// Its blocks.
    pub(super) fn blocks(&self) -> Blocks {
        Blocks {
            layers: self.layers,
            heads: self.heads,
            kv_heads: self.kv_heads(),
            width: self.width,
            mlp_width: self.mlp_width(),
            norm: self.norm,
            mlp: self.mlp,
            bias: self.bias,
            causal: true,
            rope_base: (self.position == PositionKind::Rope).then_some(self.rope_base),
            dropout: self.dropout,
            norm_epsilon: self.norm_epsilon,
            recompute: self.recompute,
            deviation: Some(DEVIATION),
        }
    }
}
