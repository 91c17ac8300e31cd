//! Self-attention: a linear layer makes queries, keys and values of all heads, and another one
//! mixes the outputs of the heads. Letters: B sequences, T tokens, C columns, H heads, K heads of
//! keys and values, D columns of a head.

use ddp_kernels::ops::Attention;

pub use crate::forward::Rope;
use crate::forward::{Module, Scope, Var};
use crate::linear::Linear;
use crate::norm::Normalize;

/// What a norm of queries or keys is taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormOver {
    /// The columns of each head, which share weights.
    Head,
    /// All columns of all heads.
    Heads,
}

/// Self-attention over (B, T, C). Its linear layers are called "qkv" and "out"; rows of `qkv`'s
/// weight are the queries' H·D, then the keys' K·D, then the values' K·D. Norms of queries and keys
/// are called "q_norm" and "k_norm".
#[derive(Clone, Debug)]
pub struct SelfAttention {
    /// `time` is set for each input.
    attention: Attention,
    /// Rotary positions, if these are wanted.
    rotary: Option<Rope>,
    /// The norm of queries and keys, if these are wanted.
    norm: Option<(Normalize, NormOver)>,
    qkv: Linear,
    out: Linear,
}

impl SelfAttention {
    /// Causal attention with this many heads of C / `heads` columns, which must be whole;
    /// `kv_heads` of them have separate keys and values. `linear` makes a linear layer with this
    /// many outputs; the first makes queries, keys and values, the second the output.
    pub fn causal(
        width: usize,
        heads: usize,
        kv_heads: usize,
        linear: [&dyn Fn(usize) -> Linear; 2],
    ) -> SelfAttention {
        let divides = width.is_multiple_of(heads);
        // Heads of 0 columns are refused by `forward`.
        let head_size = if divides { width / heads.max(1) } else { 0 };
        SelfAttention::of_heads([heads, kv_heads, head_size], width, linear)
    }

    /// As [`SelfAttention::causal`], with `[H, K, D]`: D need not be C / H. It returns `width`
    /// columns.
    pub fn of_heads(
        [heads, kv_heads, head_size]: [usize; 3],
        width: usize,
        linear: [&dyn Fn(usize) -> Linear; 2],
    ) -> SelfAttention {
        let parts = [heads, kv_heads, kv_heads].map(|heads| heads * head_size);
        SelfAttention {
            attention: Attention {
                time: 0,
                heads,
                kv_heads,
                head_size,
                causal: true,
                scale: None,
                window: None,
                cap: None,
            },
            rotary: None,
            norm: None,
            qkv: linear[0](parts.iter().sum()).in_parts(&parts),
            out: linear[1](width),
        }
    }

    /// The same attention in which each token sees all of its sequence.
    pub fn full(mut self) -> SelfAttention {
        self.attention.causal = false;
        self
    }

    /// The same attention whose queries and keys are turned by their positions.
    pub fn rotary(mut self, rope: Rope) -> SelfAttention {
        self.rotary = Some(rope);
        self
    }

    /// The same attention in which each token sees at most this many, itself and those before it.
    pub fn windowed(mut self, tokens: usize) -> SelfAttention {
        self.attention.window = Some(tokens);
        self
    }

    /// The same attention that multiplies q·k by `scale` instead of 1/√D.
    pub fn scaled(mut self, scale: f64) -> SelfAttention {
        self.attention.scale = Some(scale);
        self
    }

    /// The same attention that makes cap·tanh(s / cap) of each score s.
    pub fn capped(mut self, cap: f64) -> SelfAttention {
        self.attention.cap = Some(cap);
        self
    }

    /// The same attention whose queries and keys are normalized, before they are turned.
    pub fn normed(mut self, norm: &Normalize, over: NormOver) -> SelfAttention {
        self.norm = Some((norm.clone(), over));
        self
    }
}

impl Module for SelfAttention {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let Attention {
            heads,
            kv_heads,
            head_size,
            ..
        } = self.attention;
        let &[_, time, width] = &x.shape()[..] else {
            let help = "attention is between the tokens of a row";
            return x.refuse("attention", &[x], "[rows, tokens, columns]", help);
        };
        let help = "choose another number of heads, or another width";
        if heads * kv_heads * head_size == 0 || !heads.is_multiple_of(kv_heads) {
            let expected = format!(
                "heads that divide {width} columns, and kv_heads that divide them, instead of \
                 {heads} heads of {head_size} columns and {kv_heads} kv_heads"
            );
            return x.refuse("attention", &[x], &expected, help);
        }
        let turned = self.rotary.as_ref().map_or(0, Rope::columns);
        if turned > head_size {
            let expected = format!(
                "rotary positions of at most {head_size} columns, those of a head, instead of {turned}"
            );
            return x.refuse("attention", &[x], &expected, help);
        }
        let mut qkv = m.layer("qkv", x, self.qkv.clone());
        if let Some((norm, over)) = &self.norm {
            let lengths = [heads, kv_heads, kv_heads].map(|heads| heads * head_size);
            let mut parts = qkv.split(-1, &lengths);
            for (name, part) in ["q_norm", "k_norm"].into_iter().zip(&mut parts) {
                let shape = part.row_shape();
                let rows = match over {
                    NormOver::Head => part.reshape(&[time, shape[1] / head_size, head_size]),
                    NormOver::Heads => part.clone(),
                };
                *part = m.layer(name, &rows, norm.clone()).reshape(&shape);
            }
            qkv = Var::concatenate(&parts.iter().collect::<Vec<_>>(), -1);
        }
        if let Some(rope) = &self.rotary {
            qkv = qkv.rope(rope, [heads + kv_heads, head_size]);
        }
        let attention = Attention {
            time,
            ..self.attention
        };
        let mixed = m.attention(&qkv, attention);
        m.layer("out", &mixed, self.out.clone())
    }
}
