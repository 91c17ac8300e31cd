//! The layers of a transformer of tokens and their names: `embedding.tokens.weight`,
//! `embedding.positions.weight`, those of the blocks, `norm` and `head`.

use super::spec::{DEVIATION, GptSpec, PositionKind};
use crate::{Embedding, Head, Sequential, Tie};

/// The layers. Of `padded` tokens the first `vocabulary` are some.
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
    let (blocks, mut layers) = (spec.blocks(), Sequential::new());
    layers.push_named("embedding", Box::new(embedding));
    blocks.push_dropout(&mut layers);
    blocks.push(&mut layers);
    layers.named("head", head)
}
