//! The settings of a transformer.

use ddp_kernels::choices;
use serde::{Deserialize, Serialize};

use crate::models::blocks::{Blocks, MlpKind, NormKind, RecomputeKind};

/// The standard deviation of first values in GPT-2.
pub(super) const DEVIATION: f64 = 0.02;

/// Settings of a transformer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields, default)]
pub struct GptSpec {
    /// Blocks of attention and perceptron.
    pub layers: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Heads that have keys and values of their own; 0 for all.
    pub kv_heads: usize,
    /// Columns of the residual stream.
    pub width: usize,
    /// Width of the perceptrons; 0 for 4 times the stream's.
    pub mlp_width: usize,
    /// Tokens that the model sees at once.
    pub context: usize,
    /// Different tokens; 0 for as many as the data have.
    pub vocab: usize,
    /// The norm before each part.
    pub norm: NormKind,
    /// How the model knows positions.
    pub position: PositionKind,
    /// The perceptrons' activation function.
    pub mlp: MlpKind,
    /// Whether linear layers and norms have a bias.
    pub bias: bool,
    /// Whether the last layer's weight is that of the embedding.
    pub tied: bool,
    /// The probability of dropping an element after the embedding and of each part's result.
    pub dropout: f64,
    /// What norms add to the mean of squares.
    pub norm_epsilon: f64,
    /// The base of rotary positions.
    pub rope_base: f64,
    /// What backward computes again.
    pub recompute: RecomputeKind,
}

impl Default for GptSpec {
    fn default() -> GptSpec {
        GptSpec {
            layers: 4,
            heads: 4,
            kv_heads: 0,
            width: 128,
            mlp_width: 0,
            context: 128,
            vocab: 0,
            norm: NormKind::Layer,
            position: PositionKind::Learned,
            mlp: MlpKind::GeluTanh,
            bias: true,
            tied: true,
            dropout: 0.0,
            norm_epsilon: 1e-5,
            rope_base: 10_000.0,
            recompute: RecomputeKind::None,
        }
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
