//! The blocks of a transformer, which several families have: attention and a perceptron, each with
//! a norm before it and added to its input.
//!
//! ```text
//! blocks.0.attention.norm, .mix.qkv, .mix.out
//! blocks.0.mlp.norm, .up, .down
//! ```

use ddp_kernels::choices;

use super::family::{check_size, refuse};
use crate::error::Result;
use crate::setting::{HEADS, WIDTH};
use crate::{
    Activate, Dropout, Gate, Layer, Linear, Normalize, Recompute, Residual, SelfAttention,
    Sequential,
};

/// The most blocks.
const LAYERS_MAX: usize = 1024;
/// The largest of each other size.
pub(super) const SIZE_MAX: usize = 1 << 24;
/// The widest head.
const HEAD_SIZE_MAX: usize = 256;

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

/// The blocks of a transformer.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    /// How many.
    pub(super) layers: usize,
    /// Heads of attention.
    pub(super) heads: usize,
    /// Heads that have separate keys and values.
    pub(super) kv_heads: usize,
    /// Columns of the residual stream.
    pub(super) width: usize,
    /// Columns of the perceptrons between their linear layers.
    pub(super) mlp_width: usize,
    /// The norm before each part.
    pub(super) norm: NormKind,
    /// The perceptrons' activation function.
    pub(super) mlp: MlpKind,
    /// Whether linear layers and norms have a bias.
    pub(super) bias: bool,
    /// Whether a token sees only itself and those before it.
    pub(super) causal: bool,
    /// The base of rotary positions, if these are wanted.
    pub(super) rope_base: Option<f64>,
    /// The probability of dropping an element of each part's result.
    pub(super) dropout: f64,
    /// What norms add to the mean of squares.
    pub(super) norm_epsilon: f64,
    /// What backward computes again.
    pub(super) recompute: RecomputeKind,
    /// The standard deviation of the linear layers' initial weights, as in GPT-2: what adds to the
    /// residual stream starts smaller, by the root of how many parts add to it. None for PyTorch's
    /// initial weights.
    pub(super) deviation: Option<f64>,
}

impl Blocks {
    /// Refuses sizes and numbers that no transformer has. The errors name settings.
    pub(super) fn check(&self) -> Result<()> {
        check_size("layers", self.layers, LAYERS_MAX)?;
        // `mlp_width` may follow from `width`, which is then the setting to name.
        for (name, size, most) in [
            ("heads", self.heads, SIZE_MAX),
            ("width", self.width, SIZE_MAX / 4),
            ("mlp-width", self.mlp_width, SIZE_MAX),
        ] {
            check_size(name, size, most)?;
        }
        if !self.width.is_multiple_of(self.heads) {
            let expected = format!("a divisor of {WIDTH}, which is {}", self.width);
            let help = "each head has an equal part of the columns";
            return Err(refuse("heads", self.heads, &expected, help));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let expected = format!("a divisor of {HEADS}, which is {}", self.heads);
            let help = "equally many heads share each head of keys and values";
            return Err(refuse("kv-heads", self.kv_heads, &expected, help));
        }
        if self.width / self.heads > HEAD_SIZE_MAX {
            let expected = format!("at least {}", self.width.div_ceil(HEAD_SIZE_MAX));
            let help = format!("a head has at most {HEAD_SIZE_MAX} columns");
            return Err(refuse("heads", self.heads, &expected, &help));
        }
        if !(0.0..1.0).contains(&self.dropout) {
            let expected = "a number, at least 0 and less than 1";
            return Err(refuse("dropout", self.dropout, expected, "0 turns it off"));
        }
        if !(self.norm_epsilon > 0.0 && self.norm_epsilon <= 1.0) {
            let (expected, help) = ("a number above 0, up to 1", "a usual value is 1e-5");
            return Err(refuse("norm-epsilon", self.norm_epsilon, expected, help));
        }
        Ok(())
    }

    /// Multiplications and additions for a token in training: of the blocks' matrices forward and
    /// twice backward, and of attention to `time` tokens, of which a causal one computes half.
    pub(super) fn flop_of_a_token(&self, time: usize) -> f64 {
        let (width, mlp_width) = (self.width as f64, self.mlp_width as f64);
        let qkv = width + 2.0 * width * self.kv_heads as f64 / self.heads as f64;
        let matrices = match self.mlp {
            MlpKind::Swiglu => 3.0,
            _ => 2.0,
        };
        let seen = if self.causal {
            time as f64 / 2.0
        } else {
            time as f64
        };
        let block = width * (qkv + width + matrices * mlp_width) + 2.0 * width * seen;
        6.0 * self.layers as f64 * block
    }

    /// Adds the blocks and the last norm to `layers`.
    pub(super) fn push(&self, layers: &mut Sequential) {
        for index in 0..self.layers {
            let attention = match self.recompute {
                RecomputeKind::Attention => Residual::new(Recompute::new(self.attention())),
                _ => Residual::new(self.attention()),
            };
            let attention = attention.after(self.norm());
            let mlp = Residual::new(self.perceptron()).after(self.norm());
            let name = format!("blocks.{index}");
            if self.recompute == RecomputeKind::Block {
                let block = Sequential::new().named("attention", attention);
                let block = Recompute::new(block.named("mlp", mlp));
                layers.push_named(&name, Box::new(block));
            } else {
                layers.push_named(&format!("{name}.attention"), Box::new(attention));
                layers.push_named(&format!("{name}.mlp"), Box::new(mlp));
            }
        }
        layers.push_named("norm", Box::new(self.norm()));
    }

    fn attention(&self) -> Sequential {
        let mut mix = SelfAttention::causal(
            self.width,
            self.heads,
            self.kv_heads,
            [&|outputs| self.linear(outputs), &|outputs| {
                self.last_linear(outputs)
            }],
        );
        if !self.causal {
            mix = mix.full();
        }
        if let Some(base) = self.rope_base {
            mix = mix.rotary(base);
        }
        let mut layers = Sequential::new().named("mix", mix);
        self.push_dropout(&mut layers);
        layers
    }

    fn perceptron(&self) -> Sequential {
        // SwiGLU's gate is made beside the rest.
        let (activation, halves): (Box<dyn Layer>, usize) = match self.mlp {
            MlpKind::Gelu => (Box::new(Activate::gelu()), 1),
            MlpKind::GeluTanh => (Box::new(Activate::gelu_tanh()), 1),
            MlpKind::Relu2 => (Box::new(Gate::ReluSquared), 1),
            MlpKind::Swiglu => (Box::new(Gate::Swiglu), 2),
        };
        let parts = vec![self.mlp_width; halves];
        let up = self.linear(parts.iter().sum()).in_parts(&parts);
        let mut layers = Sequential::new().named("up", up);
        layers.push_named("activation", activation);
        let mut layers = layers.named("down", self.last_linear(self.width));
        self.push_dropout(&mut layers);
        layers
    }

    fn norm(&self) -> Normalize {
        let norm = match self.norm {
            NormKind::Layer if self.bias => Normalize::layer(),
            NormKind::Layer => Normalize::layer().without_bias(),
            NormKind::Rms => Normalize::rms(),
        };
        norm.epsilon(self.norm_epsilon)
    }

    fn linear(&self, outputs: usize) -> Linear {
        let linear = match self.deviation {
            Some(deviation) => Linear::new(outputs).normal(deviation),
            None => Linear::new(outputs),
        };
        if self.bias {
            linear
        } else {
            linear.without_bias()
        }
    }

    /// The last linear layer of a part, whose output is added to the stream.
    fn last_linear(&self, outputs: usize) -> Linear {
        let (linear, parts) = (self.linear(outputs), 2.0 * self.layers as f64);
        match self.deviation {
            Some(deviation) => linear.normal(deviation / parts.sqrt()),
            None => linear,
        }
    }

    /// Adds a dropout, unless it would drop nothing.
    pub(super) fn push_dropout(&self, layers: &mut Sequential) {
        if self.dropout != 0.0 {
            layers.push_named("dropout", Box::new(Dropout::new(self.dropout)));
        }
    }
}
