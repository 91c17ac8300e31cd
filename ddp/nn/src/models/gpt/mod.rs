//! The family `gpt`: a causal transformer over tokens, as GPT-2 or Llama.

mod layers;
mod spec;
#[cfg(test)]
mod tests;

use ddp_kernels::DType;

pub use super::blocks::{MlpKind, NormKind, RecomputeKind};
pub use spec::{GptSpec, PositionKind};

use super::blocks::{SIZE_MAX, check_size, recompute_setting};
use super::family::{DataShape, Family, Setting, refuse};
use crate::Sequential;
use crate::error::Result;

impl Family for GptSpec {
    fn settings() -> Vec<Setting<GptSpec>> {
        vec![
            Setting::count("layers", "N", "Blocks of attention and perceptron", |gpt| {
                &mut gpt.layers
            }),
            Setting::count("heads", "N", "Heads of attention", |gpt| &mut gpt.heads),
            Setting::count(
                "kv-heads",
                "N",
                "Heads that have keys and values of their own; 0 for all",
                |gpt| &mut gpt.kv_heads,
            ),
            Setting::count("width", "N", "Columns of the residual stream", |gpt| {
                &mut gpt.width
            }),
            Setting::count(
                "mlp-width",
                "N",
                "Width of the perceptrons; 0 for 4 times `width`",
                |gpt| &mut gpt.mlp_width,
            ),
            Setting::count(
                "context",
                "N",
                "Tokens that the model sees at once",
                |gpt| &mut gpt.context,
            ),
            Setting::count(
                "vocab",
                "N",
                "Different tokens; 0 for as many as the data have",
                |gpt| &mut gpt.vocab,
            ),
            Setting::choice("norm", "NAME", "Norm before each part", |gpt| &mut gpt.norm),
            Setting::choice("position", "NAME", "How the model knows positions", |gpt| {
                &mut gpt.position
            }),
            Setting::choice(
                "mlp",
                "NAME",
                "Activation function of the perceptrons",
                |gpt| &mut gpt.mlp,
            ),
            Setting::switch(
                "bias",
                "Whether linear layers and norms have a bias",
                |gpt| &mut gpt.bias,
            ),
            Setting::switch(
                "tied",
                "Whether the last layer's weight is that of the embedding",
                |gpt| &mut gpt.tied,
            ),
            Setting::number(
                "dropout",
                "P",
                "Probability of dropping an element",
                |gpt| &mut gpt.dropout,
            ),
            Setting::number(
                "norm-epsilon",
                "X",
                "What norms add to the mean of squares",
                |gpt| &mut gpt.norm_epsilon,
            ),
            Setting::number("rope-base", "X", "Base of rotary positions", |gpt| {
                &mut gpt.rope_base
            }),
            recompute_setting(|gpt| &mut gpt.recompute),
        ]
    }

    fn presets() -> Vec<(&'static str, GptSpec)> {
        let gpt2 = |layers: usize, heads: usize, width: usize| GptSpec {
            layers,
            heads,
            width,
            context: 1024,
            ..GptSpec::default()
        };
        vec![
            ("gpt-tiny", GptSpec::default()),
            ("gpt2", gpt2(12, 12, 768)),
            ("gpt2-medium", gpt2(24, 16, 1024)),
            ("gpt2-large", gpt2(36, 20, 1280)),
            ("gpt2-xl", gpt2(48, 25, 1600)),
            (
                "llama-tiny",
                GptSpec {
                    kv_heads: 2,
                    mlp_width: 352,
                    norm: NormKind::Rms,
                    position: PositionKind::Rope,
                    mlp: MlpKind::Swiglu,
                    bias: false,
                    tied: false,
                    ..GptSpec::default()
                },
            ),
        ]
    }

    fn context(&self) -> Option<usize> {
        Some(self.context)
    }

    fn vocabulary(&self) -> Option<usize> {
        (self.vocab != 0).then_some(self.vocab)
    }

    fn check(&self) -> Result<()> {
        self.blocks().check()?;
        check_size("context", self.context, SIZE_MAX)?;
        check_size("vocab", self.vocab.max(1), SIZE_MAX)?;
        if self.position == PositionKind::Rope && !(self.width / self.heads).is_multiple_of(2) {
            let expected = format!("half a divisor of `width`, which is {}", self.width);
            let help = "rotary positions turn pairs of a head's columns";
            return Err(refuse("heads", self.heads, &expected, help));
        }
        if !(self.rope_base > 1.0 && self.rope_base.is_finite()) {
            let (expected, help) = ("a finite number above 1", "a usual value is 10000");
            return Err(refuse("rope-base", self.rope_base, expected, help));
        }
        Ok(())
    }

    fn flop_of_a_row(&self, data: &DataShape<'_>) -> Option<f64> {
        let of_a_token = self.flop_of_a_token(self.vocab.max(data.outputs));
        Some(self.context as f64 * of_a_token)
    }

    fn layers(&self, data: &DataShape<'_>) -> Result<Sequential> {
        data.check_dtype(DType::I64, "gpt")?;
        if self.vocab != 0 && self.vocab < data.outputs {
            let expected = format!("at least {}, the vocabulary of the data", data.outputs);
            let help = "give data of the model's tokenizer; in a new model, raise it";
            return Err(refuse("vocab", self.vocab, &expected, help));
        }
        if data.row_shape != [self.context] {
            let expected = format!("the data's tokens in a row, {:?}", data.row_shape);
            let help = "give the data the same context";
            return Err(refuse("context", self.context, &expected, help));
        }
        let padded = self.vocab.max(data.outputs);
        Ok(layers::layers(self, data.outputs, padded))
    }
}
