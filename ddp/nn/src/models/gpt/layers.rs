//! The layers of a transformer and their names.
//!
//! ```text
//! embedding.tokens.weight, embedding.positions.weight
//! blocks.0.attention.norm, .mix.qkv, .mix.out
//! blocks.0.mlp.norm, .up, .down
//! norm, head
//! ```

use super::spec::{GptSpec, MlpKind, NormKind, PositionKind};
use crate::{
    Activate, Dropout, Embedding, Gate, Head, Layer, Linear, Normalize, Residual, SelfAttention,
};
use crate::{Sequential, Tie};

/// The standard deviation of first values in GPT-2.
const DEVIATION: f64 = 0.02;

/// The layers, with first values as in GPT-2: what adds to the residual stream starts smaller, by
/// the root of how many parts add to it. Of `padded` tokens the first `vocabulary` are some.
pub(super) fn layers(spec: &GptSpec, vocabulary: usize, padded: usize) -> Sequential {
    let tie = Tie::new();
    let mut embedding = Embedding::new(padded, spec.width).normal(DEVIATION);
    if spec.position == PositionKind::Learned {
        embedding = embedding.with_positions(spec.context);
    }
    let mut head = Head::new(padded).of_classes(vocabulary).normal(DEVIATION);
    if spec.tied {
        (embedding, head) = (embedding.tied(&tie), head.tied(&tie));
    }
    let mut layers = Sequential::new().named("embedding", embedding);
    push_dropout(&mut layers, spec);
    for index in 0..spec.layers {
        let part = |name: &str| format!("blocks.{index}.{name}");
        for (name, inner) in [("attention", attention(spec)), ("mlp", perceptron(spec))] {
            let residual = Residual::new(inner).after(norm(spec));
            layers.push_named(&part(name), Box::new(residual));
        }
    }
    layers.named("norm", norm(spec)).named("head", head)
}

fn attention(spec: &GptSpec) -> Sequential {
    let mut mix = SelfAttention::causal(
        spec.width,
        spec.heads,
        spec.kv_heads(),
        [&|outputs| linear(spec, outputs), &|outputs| {
            last_linear(spec, outputs)
        }],
    );
    if spec.position == PositionKind::Rope {
        mix = mix.rotary(spec.rope_base);
    }
    let mut layers = Sequential::new().named("mix", mix);
    push_dropout(&mut layers, spec);
    layers
}

fn perceptron(spec: &GptSpec) -> Sequential {
    // SwiGLU's gate is made beside the rest.
    let (activation, halves): (Box<dyn Layer>, usize) = match spec.mlp {
        MlpKind::Gelu => (Box::new(Activate::gelu()), 1),
        MlpKind::GeluTanh => (Box::new(Activate::gelu_tanh()), 1),
        MlpKind::Relu2 => (Box::new(Gate::ReluSquared), 1),
        MlpKind::Swiglu => (Box::new(Gate::Swiglu), 2),
    };
    let mut layers = Sequential::new().named("up", linear(spec, halves * spec.mlp_width()));
    layers.push_named("activation", activation);
    let mut layers = layers.named("down", last_linear(spec, spec.width));
    push_dropout(&mut layers, spec);
    layers
}

fn norm(spec: &GptSpec) -> Normalize {
    let norm = match spec.norm {
        NormKind::Layer if spec.bias => Normalize::layer(),
        NormKind::Layer => Normalize::layer().without_bias(),
        NormKind::Rms => Normalize::rms(),
    };
    norm.epsilon(spec.norm_epsilon)
}

fn linear(spec: &GptSpec, outputs: usize) -> Linear {
    let linear = Linear::new(outputs).normal(DEVIATION);
    if spec.bias {
        linear
    } else {
        linear.without_bias()
    }
}

/// The last linear layer of a part, whose output is added to the stream.
fn last_linear(spec: &GptSpec, outputs: usize) -> Linear {
    let parts = 2.0 * spec.layers as f64;
    linear(spec, outputs).normal(DEVIATION / parts.sqrt())
}

fn push_dropout(layers: &mut Sequential, spec: &GptSpec) {
    if spec.dropout != 0.0 {
        layers.push_named("dropout", Box::new(Dropout::new(spec.dropout)));
    }
}
