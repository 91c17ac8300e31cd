//! What the numbers of each value are: of the dtype of layers, of that of sums, and so on.

use ddp_kernels::ops::Function;

use super::trace::{Kind, Op, TraceNode};

/// Sums and maxima stay f32: backward compares with what they are of.
pub(super) fn kinds(nodes: &[TraceNode]) -> Vec<Kind> {
    let is_exact_in_bf16 = |id: usize| match &nodes[id].op {
        Op::Constant(_) => true,
        Op::Numbers(values) => values.iter().all(|value| is_bf16(*value)),
        _ => false,
    };
    let mut kinds = Vec::<Kind>::with_capacity(nodes.len());
    for node in nodes {
        let chosen = match &node.op {
            // The condition is not among what it gives.
            Op::Apply(Function::Where) => &node.inputs[1..],
            Op::Gather(_) => &node.inputs[1..],
            _ => &node.inputs[..],
        };
        // What each dtype holds changes nothing.
        let of = chosen.iter().filter(|it| !is_exact_in_bf16(**it));
        let all_are = |which: &[Kind]| of.clone().all(|it| which.contains(&kinds[*it]));
        kinds.push(match &node.op {
            Op::LinearWeight
            | Op::EmbeddingBackward(_)
            | Op::GatherBackward
            | Op::PositionsBackward
            | Op::Steps(_) => Kind::Exact,
            Op::Part(_, kind) | Op::Cast(kind) => *kind,
            Op::Documents => Kind::Tokens,
            Op::Numbers(values) if !values.iter().all(|value| is_bf16(*value)) => Kind::Exact,
            Op::Constant(value) if !is_bf16(*value) => Kind::Exact,
            Op::Gather(_) if of.clone().next().is_none() => Kind::Layers,
            Op::Apply(_)
            | Op::Sum(_)
            | Op::Largest(_)
            | Op::Join(..)
            | Op::Expand
            | Op::Reshape
            | Op::Permute(_)
            | Op::Slice(..)
            | Op::Window(..)
            | Op::Gather(_) => {
                let is_reduction = matches!(node.op, Op::Sum(_) | Op::Largest(_));
                if all_are(&[Kind::Sums]) && of.clone().next().is_some() {
                    Kind::Sums
                } else if is_reduction || all_are(&[Kind::Sums, Kind::Exact]) {
                    Kind::Exact
                } else {
                    Kind::Layers
                }
            }
            _ => Kind::Layers,
        });
    }
    kinds
}

/// Whether bf16 holds this number: it is the upper half of f32.
fn is_bf16(value: f64) -> bool {
    let short = value as f32;
    value.is_nan() || f64::from(short) == value && short.to_bits() & 0xffff == 0
}
