//! The family `gpt`: a causal transformer over tokens, as GPT-2 or Llama. Names of its layers:
//! `embedding.tokens.weight`, `embedding.positions.weight`, those of the blocks, `norm` and `head`.

pub use super::blocks::{
    GptSpec, MlpKind, NormKind, NormPlace, PositionKind, QkNorm, RecomputeKind,
};
pub use super::rope::{ROPE_SCALINGS, rope_scaling};

use ddp_kernels::DType;
use ddp_kernels::setting::SettingName;

use super::blocks::{Blocks, SIZE_MAX};
use super::family::{DataShape, Family, check_size, refuse};
use crate::error::Result;
use crate::{Embedding, Head, Sequential, Tie};

/// The standard deviation of initial weights in GPT-2.
const DEVIATION: f64 = 0.02;

impl Family for GptSpec {
    fn name(&self) -> &'static str {
        "gpt"
    }

    fn help(&self) -> &'static str {
        "A transformer that learns the next token, like GPT-2"
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

    fn generates(&self) -> bool {
        true
    }

    fn write_out(&mut self, outputs: usize) {
        (self.kv_heads, self.mlp_width) = (self.kv_heads(), self.mlp_width());
        if self.width.is_multiple_of(self.heads.max(1)) {
            self.head_size = self.head_size();
        }
        if self.attention_scalar == 0 {
            self.attention_scalar = self.head_size;
        }
        if self.longest_context == 0 && self.position == PositionKind::Rope {
            self.longest_context = self.context;
        }
        if self.vocab == 0 {
            self.vocab = outputs;
        }
    }

    fn check(&self) -> Result<()> {
        self.blocks().check()?;
        check_size("context", self.context, SIZE_MAX)?;
        check_size("vocab", self.vocab.max(1), SIZE_MAX)?;
        if !(self.rope_base > 1.0 && self.rope_base.is_finite()) {
            let (expected, help) = ("a finite number above 1", "a usual value is 10000");
            return Err(refuse("rope-base", self.rope_base, expected, help));
        }
        let caps = [self.attention_cap, self.logit_cap];
        for (name, cap) in ["attention-cap", "logit-cap"].into_iter().zip(caps) {
            if !(cap == 0.0 || (1e-30..=1e30).contains(&cap)) {
                return Err(refuse(name, cap, "0, or 1e-30 to 1e30", "0 is for no cap"));
            }
        }
        if let Some(&token) = self.untrained_tokens.iter().find(|it| **it >= self.vocab) {
            let expected = format!("tokens below {}, as `vocab` says", self.vocab);
            return Err(refuse(
                "untrained-tokens",
                token,
                &expected,
                "give `vocab`, too",
            ));
        }
        match self.position {
            PositionKind::Learned => Ok(()),
            PositionKind::Rope => self.rope().map(|_| ()),
        }
    }

    fn flop_of_a_row(&self, data: &DataShape<'_>) -> Option<f64> {
        let of_a_token = self.flop_of_a_token(self.vocab.max(data.outputs));
        Some(self.context as f64 * of_a_token)
    }

    fn layers(&self, data: &DataShape<'_>) -> Result<Sequential> {
        data.check_dtype(DType::I64, "gpt")?;
        self.check()?;
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
        let most = self.usable_context();
        if self.context > most {
            let name = SettingName("rope-scaling");
            let expected = format!("at most {most}, as the model's {name} says");
            let help =
                "longer contexts turn queries and keys by other angles, which is not supported";
            return Err(refuse("context", self.context, &expected, help));
        }
        let padded = self.vocab.max(data.outputs);
        let tie = Tie::new();
        let mut embedding = Embedding::new(padded, self.width).normal(DEVIATION);
        if self.position == PositionKind::Learned {
            embedding = embedding.with_positions(self.context);
        }
        embedding = embedding.untrained(&self.untrained_tokens);
        if self.scale_embedding {
            embedding = embedding.scaled((self.width as f64).sqrt());
        }
        if data.documents {
            embedding = embedding.of_documents();
        }
        // The vocabulary is padded: only the first `outputs` tokens occur.
        let mut head = Head::new(padded).of_classes(data.outputs).normal(DEVIATION);
        head = head.capped(self.logit_cap);
        if self.tied {
            (embedding, head) = (embedding.tied(&tie), head.tied(&tie));
        }
        let (blocks, mut layers) = (self.blocks(), Sequential::new());
        layers.push_named("embedding", Box::new(embedding));
        blocks.push_dropout(&mut layers);
        blocks.push(&mut layers)?;
        Ok(layers.named("head", head))
    }
}

impl GptSpec {
    /// Multiplications and additions for a token in training: of matrices forward and twice
    /// backward, and of causal attention as it is computed.
    pub(crate) fn flop_of_a_token(&self, vocabulary: usize) -> f64 {
        self.blocks().flop_of_a_token(self.context) + 6.0 * (vocabulary * self.width) as f64
    }

    /// `context`, or the longest one that is supported.
    pub fn usable_context(&self) -> usize {
        let scaling = rope_scaling(&self.rope_scaling);
        let longrope = scaling.filter(|(kind, _)| *kind == "longrope");
        longrope.map_or(self.context, |(_, numbers)| {
            self.context.min(numbers[0] as usize)
        })
    }

    fn blocks(&self) -> Blocks {
        Blocks {
            spec: self.clone(),
            causal: true,
            deviation: Some(DEVIATION),
        }
    }
}

#[cfg(test)]
mod tests;
