//! What the numbers of each value are: of the dtype of layers, of that of sums, and so on.

use super::op::{Numbers, Op, Role};
use super::trace::{NumberKind, TraceNode};

pub(super) fn kinds(nodes: &[TraceNode]) -> Vec<NumberKind> {
    let mut kinds = Vec::<NumberKind>::with_capacity(nodes.len());
    for TraceNode { op, inputs, .. } in nodes {
        // What each dtype holds changes nothing.
        let changes = |id: &usize| !is_exact_in_bf16(&nodes[*id].op);
        let of = inputs.iter().map(|id| changes(id).then(|| kinds[*id]));
        let of: Vec<Option<NumberKind>> = of.collect();
        let own = op.listed_kind().or_else(|| op.kind(&of));
        kinds.push(own.unwrap_or_else(|| match op.role() {
            Role::Reduction if mixed(&of) == NumberKind::SumDtype => NumberKind::SumDtype,
            // Backward compares sums and maxima with what they are of.
            Role::Reduction => NumberKind::SumDtypeReadRounded,
            Role::View | Role::Reshape | Role::Copy | Role::Elementwise => mixed(&of),
            Role::Leaf | Role::Same | Role::Output | Role::Kernel | Role::End => {
                NumberKind::LayerDtype
            }
        }));
    }
    kinds
}

/// The kind of the result of an elementwise operation on inputs of these kinds.
pub(super) fn mixed(of: &[Option<NumberKind>]) -> NumberKind {
    let of = of.iter().flatten();
    let all_are = |which: &[NumberKind]| of.clone().all(|it| which.contains(it));
    if all_are(&[NumberKind::SumDtype]) && of.clone().next().is_some() {
        NumberKind::SumDtype
    } else if all_are(&[NumberKind::SumDtype, NumberKind::SumDtypeReadRounded]) {
        NumberKind::SumDtypeReadRounded
    } else {
        NumberKind::LayerDtype
    }
}

fn is_exact_in_bf16(op: &Op) -> bool {
    if let Op::Numbers(Numbers(values)) = op {
        return values.iter().all(|value| is_bf16(*value));
    }
    matches!(op, Op::Constant(_))
}

/// Whether bf16 holds this number: it is the upper half of f32.
pub(super) fn is_bf16(value: f64) -> bool {
    let short = value as f32;
    value.is_nan() || f64::from(short) == value && short.to_bits() & 0xffff == 0
}
