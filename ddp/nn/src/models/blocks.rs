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
use super::rope::rope;
use crate::error::{HEADS, RECOMPUTE, Result, WIDTH};
use crate::{
    Dropout, Gate, Linear, Module, NormOver, Normalize, Rope, Scope, SelfAttention, Sequential,
    Var, family_settings,
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
        /// Columns of a head; 0 for `width` divided by `heads`
        head_size "N": usize = 0;
        /// Columns of the residual stream
        width "N": usize = 128;
        /// Width of the perceptrons; 0 for 4 times `width`
        mlp_width "N": usize = 0;
        /// Tokens that the model sees at once
        context "N": usize = 128;
        /// Longest context of the model, for programs that it is exported to; 0 for `context`
        longest_context "N": usize = 0;
        /// Different tokens; 0 for as many as the data have
        vocab "N": usize = 0;
        /// Norm of each part
        norm "NAME": NormKind = NormKind::Layer;
        /// Where each part has its norm
        norm_place "WHERE": NormPlace = NormPlace::Before;
        /// RMSNorm of queries and keys
        qk_norm "OVER": QkNorm = QkNorm::None;
        /// How the model knows positions
        position "NAME": PositionKind = PositionKind::Learned;
        /// Activation function of the perceptrons
        mlp "NAME": MlpKind = MlpKind::GeluTanh;
        /// Whether linear layers and norms have a bias
        bias "BOOL": bool = true;
        /// Whether queries, keys and values have a bias even without `bias`
        qkv_bias "BOOL": bool = false;
        /// Whether the last layer's weight is that of the embedding
        tied "BOOL": bool = true;
        /// Probability of dropping an element
        dropout "P": f64 = 0.0;
        /// What norms add to the mean of squares
        norm_epsilon "X": f64 = 1e-5;
        /// Base of rotary positions
        rope_base "X": f64 = 10_000.0;
        /// How rotary positions are stretched, as in llama3:8:1:4:8192, or none
        rope_scaling "TEXT": String = "none".into();
        /// Share of a head's columns that have rotary positions
        rope_share "X": f64 = 1.0;
        /// Every N-th block lacks rotary positions; 0: none does
        rope_skip "N": usize = 0;
        /// Base of rotary positions of blocks with a window; 0 for that of the others
        window_rope_base "X": f64 = 0.0;
        /// Tokens that each token sees, with itself; 0 for all before it
        window "N": usize = 0;
        /// Every N-th block lacks a window; 0: none does
        window_skip "N": usize = 0;
        /// q·k is divided by the root of N; 0 for `head-size`
        attention_scalar "N": usize = 0;
        /// Scores s of attention become cap·tanh(s / cap); 0 for no cap
        attention_cap "X": f64 = 0.0;
        /// Logits z become cap·tanh(z / cap); 0 for no cap
        logit_cap "X": f64 = 0.0;
        /// Whether rows of the embedding are multiplied by the root of `width`
        scale_embedding "BOOL": bool = false;
        /// Tokens whose rows of the embedding get no gradient where they are inputs
        untrained_tokens "N,…": Vec<usize> = Vec::new();
        /// Class of transformers that export prefers; none for the first that has such models
        export_class "NAME": String = "none".into(), changes_results: false;
        /// What backward computes again instead of keeping it: less memory, same bits, more time
        recompute "WHAT": RecomputeKind = RecomputeKind::None, changes_results: false;
        /// How many blocks `recompute`, counted from the first; 0 for all
        recompute_blocks "N": usize = 0, changes_results: false;
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
    /// Where a part of a transformer has its norm.
    #[derive(Default)]
    pub enum NormPlace {
        /// Before it
        #[default]
        Before = "before",
        /// After it, before its output is added to the stream
        After = "after",
        /// Two norms, one before it and one after it
        Both = "both",
    }
}

choices! {
    /// What the norms of queries and keys are taken over.
    #[derive(Default)]
    pub enum QkNorm {
        /// There are none
        #[default]
        None = "none",
        /// Each head
        Head = "head",
        /// All heads together
        Heads = "heads",
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
        /// As `swiglu`, with `gelu-tanh` instead of silu
        Geglu = "geglu",
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

    /// Columns of a head.
    pub fn head_size(&self) -> usize {
        match self.head_size {
            0 => self.width / self.heads.max(1),
            head_size => head_size,
        }
    }

    /// What turns queries and keys, of blocks without a window and of those with one.
    pub(super) fn rope(&self) -> Result<[Rope; 2]> {
        // As in transformers, which rounds down.
        let columns = (self.head_size() as f64 * self.rope_share) as usize;
        if !(0.0..=1.0).contains(&self.rope_share) || !columns.is_multiple_of(2) {
            let expected = format!("a share of {} columns, an even number", self.head_size());
            let help = "rotary positions turn pairs of a head's columns";
            return Err(refuse("rope-share", self.rope_share, &expected, help));
        }
        let help = "leave it out if the context was not stretched";
        let of = |base: f64, scaling: &str| {
            let made = rope(columns, base, scaling);
            made.map_err(|expected| refuse("rope-scaling", scaling, &expected, help))
        };
        let all = of(self.rope_base, &self.rope_scaling)?;
        let windowed = match self.window_rope_base {
            0.0 => all.clone(),
            base => of(base, "none")?,
        };
        Ok([all, windowed])
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
        let (again, is_off) = (spec.recompute_blocks, spec.recompute == RecomputeKind::None);
        if again > spec.layers || again > 0 && is_off {
            let expected = format!(
                "at most the {} of the model, with {RECOMPUTE} attention or block",
                spec.layers
            );
            let help = "give 0 for all blocks";
            return Err(refuse("recompute-blocks", again, &expected, help));
        }
        // `mlp_width` may follow from `width`, which is then the setting to name.
        for (name, size, most) in [
            ("heads", spec.heads, SIZE_MAX),
            ("width", spec.width, SIZE_MAX / 4),
            ("mlp-width", spec.mlp_width(), SIZE_MAX),
        ] {
            check_size(name, size, most)?;
        }
        if spec.head_size == 0 && !spec.width.is_multiple_of(spec.heads) {
            let expected = format!("a divisor of {WIDTH}, which is {}", spec.width);
            let help = "each head has an equal part of the columns, without head-size";
            return Err(refuse("heads", spec.heads, &expected, help));
        }
        if !spec.heads.is_multiple_of(spec.kv_heads()) {
            let expected = format!("a divisor of {HEADS}, which is {}", spec.heads);
            let help = "equally many heads share each head of keys and values";
            return Err(refuse("kv-heads", spec.kv_heads(), &expected, help));
        }
        if spec.head_size > HEAD_SIZE_MAX {
            let (expected, help) = (format!("at most {HEAD_SIZE_MAX}"), "choose more heads");
            return Err(refuse("head-size", spec.head_size, &expected, help));
        }
        if spec.head_size() > HEAD_SIZE_MAX {
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
        let mixed = (spec.heads * spec.head_size()) as f64;
        let qkv = mixed + 2.0 * (spec.kv_heads() * spec.head_size()) as f64;
        let matrices = match spec.mlp {
            MlpKind::Swiglu | MlpKind::Geglu => 3.0,
            MlpKind::Gelu | MlpKind::GeluTanh | MlpKind::Relu2 => 2.0,
        };
        let seen = time as f64 / if self.causal { 2.0 } else { 1.0 };
        let block = width * (qkv + mixed + matrices * mlp_width) + 2.0 * mixed * seen;
        6.0 * spec.layers as f64 * block
    }

    /// Adds the blocks and the last norm to `layers`.
    pub(super) fn push(&self, layers: &mut Sequential) -> Result<()> {
        let rope = match self.spec.position {
            PositionKind::Learned => None,
            PositionKind::Rope => Some(self.spec.rope()?),
        };
        for index in 0..self.spec.layers {
            let mut blocks = self.clone();
            let recomputing = match self.spec.recompute_blocks {
                0 => self.spec.layers,
                count => count,
            };
            if index >= recomputing {
                blocks.spec.recompute = RecomputeKind::None;
            }
            let recompute = blocks.spec.recompute;
            let mlp = PerceptronPart(blocks.clone());
            let attention = AttentionPart {
                blocks,
                mix: self.attention(index, rope.as_ref()),
            };
            let name = format!("blocks.{index}");
            if recompute == RecomputeKind::Block {
                layers.push_named(&name, Box::new(TransformerBlock(attention, mlp)));
            } else {
                layers.push_named(&format!("{name}.attention"), Box::new(attention));
                layers.push_named(&format!("{name}.mlp"), Box::new(mlp));
            }
        }
        layers.push_named("norm", Box::new(self.norm()));
        Ok(())
    }

    /// x + f(x), with the norms of a part.
    fn part(&self, m: &mut Scope<'_>, x: &Var, f: impl FnOnce(&mut Scope<'_>, &Var) -> Var) -> Var {
        let place = self.spec.norm_place;
        let mut y = x.clone();
        if place != NormPlace::After {
            y = m.layer("norm", &y, self.norm());
        }
        x + f(m, &y)
    }

    /// What follows the last linear layer of a part.
    fn ending(&self, m: &mut Scope<'_>, y: Var) -> Var {
        let y = match self.spec.dropout {
            0.0 => y,
            probability => m.dropout("dropout", &y, probability),
        };
        match self.spec.norm_place {
            NormPlace::Before => y,
            NormPlace::After | NormPlace::Both => m.layer("post_norm", &y, self.norm()),
        }
    }

    fn attention(&self, index: usize, rope: Option<&[Rope; 2]>) -> SelfAttention {
        let spec = &self.spec;
        let linear = |outputs| self.linear(outputs, spec.bias || spec.qkv_bias);
        let last = |outputs| self.last_linear(outputs);
        let heads = [spec.heads, spec.kv_heads(), spec.head_size()];
        let mut mix = SelfAttention::of_heads(heads, spec.width, [&linear, &last]);
        if !self.causal {
            mix = mix.full();
        }
        let is_skipped = |by: usize| by != 0 && (index + 1).is_multiple_of(by);
        let has_window = spec.window != 0 && !is_skipped(spec.window_skip);
        if has_window {
            mix = mix.windowed(spec.window);
        }
        if let Some(rope) = rope.filter(|_| !is_skipped(spec.rope_skip)) {
            mix = mix.rotary(rope[usize::from(has_window)].clone());
        }
        if spec.attention_scalar != 0 {
            mix = mix.scaled(1.0 / (spec.attention_scalar as f64).sqrt());
        }
        if spec.attention_cap != 0.0 {
            mix = mix.capped(spec.attention_cap);
        }
        let norm = Normalize::rms().epsilon(spec.norm_epsilon);
        match spec.qk_norm {
            QkNorm::None => mix,
            QkNorm::Head => mix.normed(&norm, NormOver::Head),
            QkNorm::Heads => mix.normed(&norm, NormOver::Heads),
        }
    }

    fn norm(&self) -> Normalize {
        let norm = match self.spec.norm {
            NormKind::Layer if self.spec.bias => Normalize::layer(),
            NormKind::Layer => Normalize::layer().without_bias(),
            NormKind::Rms => Normalize::rms(),
        };
        norm.epsilon(self.spec.norm_epsilon)
    }

    fn linear(&self, outputs: usize, has_bias: bool) -> Linear {
        let linear = Linear::new(outputs).biased(has_bias);
        match self.deviation {
            Some(deviation) => linear.normal(deviation),
            None => linear,
        }
    }

    /// The last linear layer of a part, whose output is added to the stream.
    fn last_linear(&self, outputs: usize) -> Linear {
        let linear = self.linear(outputs, self.spec.bias);
        let parts = 2.0 * self.spec.layers as f64;
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

/// Attention, added to its input.
#[derive(Debug)]
struct AttentionPart {
    blocks: Blocks,
    mix: SelfAttention,
}

impl Module for AttentionPart {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let blocks = &self.blocks;
        blocks.part(m, x, |m, x| {
            let body = |m: &mut Scope<'_>| {
                let y = m.layer("mix", x, self.mix.clone());
                blocks.ending(m, y)
            };
            match blocks.spec.recompute {
                RecomputeKind::Attention => m.recompute(body),
                RecomputeKind::None | RecomputeKind::Block => body(m),
            }
        })
    }
}

/// A perceptron, added to its input.
#[derive(Debug)]
struct PerceptronPart(Blocks);

impl Module for PerceptronPart {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let (blocks, spec) = (&self.0, &self.0.spec);
        blocks.part(m, x, |m, x| {
            // A gate is made beside the rest.
            let parts = match spec.mlp {
                MlpKind::Swiglu | MlpKind::Geglu => vec![spec.mlp_width(); 2],
                MlpKind::Gelu | MlpKind::GeluTanh | MlpKind::Relu2 => vec![spec.mlp_width()],
            };
            let up = blocks
                .linear(parts.iter().sum(), spec.bias)
                .in_parts(&parts);
            let up = m.layer("up", x, up);
            let hidden = match spec.mlp {
                MlpKind::Gelu => up.activate(Activation::Gelu),
                MlpKind::GeluTanh => up.activate(Activation::GeluTanh),
                MlpKind::Relu2 => up.activate(Activation::ReluSquared),
                MlpKind::Swiglu => up.gated(Gate::Swiglu),
                MlpKind::Geglu => up.gated(Gate::Geglu),
            };
            let y = m.layer("down", &hidden, blocks.last_linear(spec.width));
            blocks.ending(m, y)
        })
    }
}

/// Both, of which only the input is kept.
#[derive(Debug)]
struct TransformerBlock(AttentionPart, PerceptronPart);

impl Module for TransformerBlock {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        m.recompute(|m| {
            let x = m.within("attention", |m| self.0.forward(m, x));
            m.within("mlp", |m| self.1.forward(m, &x))
        })
    }
}
