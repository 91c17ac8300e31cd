//! The blocks of a transformer and their settings, shared by several families: attention and a
//! perceptron, each preceded by a norm and added to its input.
//!
//! ```text
//! blocks.0.attention.norm, .mix.qkv, .mix.out
//! blocks.0.mlp.norm, .up, .down
//! ```

use ddp_kernels::choices;
use ddp_kernels::ops::Activation;

use super::family::{check_size, refuse};
use crate::error::{HEADS, Result, WIDTH};
use crate::{
    Activate, Dropout, Layer, Linear, Normalize, Recompute, Residual, SelfAttention, Sequential,
    Swiglu, family_settings,
};

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

/// The most blocks.
const LAYERS_MAX: usize = 1024;
/// The largest of each other size.
pub(super) const SIZE_MAX: usize = 1 << 24;
/// The widest head.
const HEAD_SIZE_MAX: usize = 256;

/// The blocks of a transformer: those of a gpt with these settings, and two properties that are not
/// settings of a gpt.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    pub(super) spec: GptSpec,
    /// Whether a token sees only itself and those before it.
    pub(super) causal: bool,
    /// The standard deviation of the linear layers' initial weights, as in GPT-2: what adds to the
    /// residual stream starts smaller, by the root of how many parts add to it. None for PyTorch's
    /// initial weights.
    pub(super) deviation: Option<f64>,
}

impl Blocks {
    /// Refuses sizes and numbers that no transformer has. The errors name settings.
    pub(super) fn check(&self) -> Result<()> {
        let spec = &self.spec;
        check_size("layers", spec.layers, LAYERS_MAX)?;
        // `mlp_width` may follow from `width`, which is then the setting to name.
        for (name, size, most) in [
            ("heads", spec.heads, SIZE_MAX),
            ("width", spec.width, SIZE_MAX / 4),
            ("mlp-width", spec.mlp_width(), SIZE_MAX),
        ] {
            check_size(name, size, most)?;
        }
        if !spec.width.is_multiple_of(spec.heads) {
            let expected = format!("a divisor of {WIDTH}, which is {}", spec.width);
            let help = "each head has an equal part of the columns";
            return Err(refuse("heads", spec.heads, &expected, help));
        }
        if !spec.heads.is_multiple_of(spec.kv_heads()) {
            let expected = format!("a divisor of {HEADS}, which is {}", spec.heads);
            let help = "equally many heads share each head of keys and values";
            return Err(refuse("kv-heads", spec.kv_heads(), &expected, help));
        }
        if spec.width / spec.heads > HEAD_SIZE_MAX {
            let expected = format!("at least {}", spec.width.div_ceil(HEAD_SIZE_MAX));
            let help = format!("a head has at most {HEAD_SIZE_MAX} columns");
            return Err(refuse("heads", spec.heads, &expected, &help));
        }
        if !(0.0..1.0).contains(&spec.dropout) {
            let expected = "a number, at least 0 and less than 1";
            return Err(refuse("dropout", spec.dropout, expected, "0 turns it off"));
        }
        if !(spec.norm_epsilon > 0.0 && spec.norm_epsilon <= 1.0) {
            let (expected, help) = ("a number above 0, up to 1", "a usual value is 1e-5");
            return Err(refuse("norm-epsilon", spec.norm_epsilon, expected, help));
        }
        Ok(())
    }

    /// Multiplications and additions for a token in training: of the blocks' matrices forward and
    /// twice backward, and of attention to `time` tokens, of which a causal one computes half.
    pub(super) fn flop_of_a_token(&self, time: usize) -> f64 {
        let spec = &self.spec;
        let (width, mlp_width) = (spec.width as f64, spec.mlp_width() as f64);
        let qkv = width + 2.0 * width * spec.kv_heads() as f64 / spec.heads as f64;
        let matrices = match spec.mlp {
            MlpKind::Swiglu => 3.0,
            MlpKind::Gelu | MlpKind::GeluTanh | MlpKind::Relu2 => 2.0,
        };
        let seen = time as f64 / if self.causal { 2.0 } else { 1.0 };
        let block = width * (qkv + width + matrices * mlp_width) + 2.0 * width * seen;
        6.0 * spec.layers as f64 * block
    }

    /// Adds the blocks and the last norm to `layers`.
    pub(super) fn push(&self, layers: &mut Sequential) {
        let recompute = self.spec.recompute;
        for index in 0..self.spec.layers {
            let attention = match recompute {
                RecomputeKind::Attention => Residual::new(Recompute::new(self.attention())),
                RecomputeKind::None | RecomputeKind::Block => Residual::new(self.attention()),
            };
            let attention = attention.after(self.norm());
            let mlp = Residual::new(self.perceptron()).after(self.norm());
            let name = format!("blocks.{index}");
            if recompute == RecomputeKind::Block {
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
        let spec = &self.spec;
        let linear = |outputs| self.linear(outputs);
        let last = |outputs| self.last_linear(outputs);
        let (heads, kv_heads) = (spec.heads, spec.kv_heads());
        let mut mix = SelfAttention::causal(spec.width, heads, kv_heads, [&linear, &last]);
        if !self.causal {
            mix = mix.full();
        }
        if spec.position == PositionKind::Rope {
            mix = mix.rotary(spec.rope_base);
        }
        let mut layers = Sequential::new().named("mix", mix);
        self.push_dropout(&mut layers);
        layers
    }

    fn perceptron(&self) -> Sequential {
        // SwiGLU's gate is made beside the rest.
        let (activation, halves): (Box<dyn Layer>, usize) = match self.spec.mlp {
            MlpKind::Gelu => (Box::new(Activate::gelu()), 1),
            MlpKind::GeluTanh => (Box::new(Activate::gelu_tanh()), 1),
            MlpKind::Relu2 => (Box::new(Activate::new(Activation::ReluSquared)), 1),
            MlpKind::Swiglu => (Box::new(Swiglu), 2),
        };
        let parts = vec![self.spec.mlp_width(); halves];
        let up = self.linear(parts.iter().sum()).in_parts(&parts);
        let mut layers = Sequential::new().named("up", up);
        layers.push_named("activation", activation);
        let mut layers = layers.named("down", self.last_linear(self.spec.width));
        self.push_dropout(&mut layers);
        layers
    }

    fn norm(&self) -> Normalize {
        let norm = match self.spec.norm {
            NormKind::Layer if self.spec.bias => Normalize::layer(),
            NormKind::Layer => Normalize::layer().without_bias(),
            NormKind::Rms => Normalize::rms(),
        };
        norm.epsilon(self.spec.norm_epsilon)
    }

    fn linear(&self, outputs: usize) -> Linear {
        let linear = match self.deviation {
            Some(deviation) => Linear::new(outputs).normal(deviation),
            None => Linear::new(outputs),
        };
        if self.spec.bias {
            return linear;
        }
        linear.without_bias()
    }

    /// The last linear layer of a part, whose output is added to the stream.
    fn last_linear(&self, outputs: usize) -> Linear {
        let (linear, parts) = (self.linear(outputs), 2.0 * self.spec.layers as f64);
        match self.deviation {
            Some(deviation) => linear.normal(deviation / parts.sqrt()),
            None => linear,
        }
    }

    /// Adds a dropout, unless it would drop nothing.
    pub(super) fn push_dropout(&self, layers: &mut Sequential) {
        let dropout = self.spec.dropout;
        if dropout != 0.0 {
            layers.push_named("dropout", Box::new(Dropout::new(dropout)));
        }
    }
}
