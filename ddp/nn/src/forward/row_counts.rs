//! Compares traces of one formula for different numbers of rows. Only lengths along rows may
//! differ: ranks, micro-batches and shards divide the batch.

use std::any::{Any, TypeId};
use std::collections::HashMap;

use super::trace::{Op, Trace, TraceNode, Var};

/// How many rows a formula is traced for, which is then compared with others. Not 1, which would be
/// broadcast.
pub(super) const ROWS: usize = 2;
/// How many times the rows another trace of it has: few values have an axis of that length.
pub(super) const MORE: usize = 7;

/// Which row each index of an axis belongs to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum RowsAlong {
    /// Index i is of row `i / inner % count`.
    Each { inner: usize, count: usize },
    /// Indices are of rows, and alike for each of them.
    Alike,
    /// Indices are of rows, but not in this way. The value that has brought them in this order.
    Unknown(usize),
}

/// A formula for a few rows.
#[derive(Debug)]
pub(super) struct RowReference {
    pub(super) trace: Trace,
    pub(super) rows: usize,
    pub(super) output: usize,
    /// By value, the axes that are longer for more rows.
    grows: Vec<Vec<usize>>,
    /// By value: how numbers along such an axis belong to rows.
    numbers: HashMap<usize, RowsAlong>,
}

impl RowReference {
    /// Of the output for `rows` rows, and for `MORE` times as many. An error if it mixes rows (see
    /// `refuse_mixed_rows`), or if more than lengths along rows differs.
    pub(super) fn new(
        [few, more]: [&Var; 2],
        rows: usize,
        period: usize,
    ) -> Result<RowReference, String> {
        let other = more.trace.borrow();
        let trace = std::mem::take(&mut *few.trace.borrow_mut());
        let pairs = || trace.nodes.iter().zip(&other.nodes);
        let grows = pairs().map(|(one, other)| {
            let lengths = one.shape.iter().zip(&other.shape).enumerate();
            let longer = lengths.filter(|(_, (one, other))| one != other);
            longer.map(|it| it.0).collect()
        });
        let mut it = RowReference {
            grows: grows.collect(),
            numbers: HashMap::new(),
            output: few.id,
            rows,
            trace,
        };
        for (id, (one, other)) in it.trace.nodes.iter().zip(&other.nodes).enumerate() {
            if let [axis] = it.grows[id][..] {
                let along = along(one, other, axis, rows);
                it.numbers.extend(along.map(|along| (id, along)));
            }
        }
        let is_similar = it.trace.nodes.len() == other.nodes.len();
        let mixed = || it.refuse_mixed_rows(few.id, period);
        let first = is_similar.then(mixed).flatten();
        let wrong = first.or_else(|| it.difference(more, rows * MORE));
        wrong.map_or(Ok(it), Err)
    }

    /// The axes of a value that are longer for more rows.
    pub(super) fn growing(&self, id: usize) -> impl Iterator<Item = usize> {
        self.grows[id].iter().copied()
    }

    /// Whether only the first axis of a value is the batch.
    pub(super) fn is_batch(&self, id: usize) -> bool {
        self.growing(id).eq([0]) && self.trace.nodes[id].shape[0] == self.rows
    }

    /// Of numbers: the axis along which rows are, and how.
    pub(super) fn numbers_along(&self, id: usize) -> Option<(usize, RowsAlong)> {
        Some((*self.grows[id].first()?, *self.numbers.get(&id)?))
    }

    /// The error if this formula, for so many rows, differs in more than lengths along rows. Of a
    /// `CustomOp` only the type is compared: what it holds may change at any time.
    pub(super) fn difference(&self, output: &Var, rows: usize) -> Option<String> {
        let other = output.trace.borrow();
        // One row is repeated by doing nothing. What computes must still be the same.
        let computing = |trace: &Trace| -> Vec<String> {
            let nodes = trace.nodes.iter().filter(|it| computes(&it.op));
            nodes.map(|it| format!("{:?}", it.op)).collect()
        };
        if rows == 1 && computing(&self.trace) == computing(&other) {
            return None;
        }
        let both = |at: usize| [&self.trace, &*other].map(|it| it.nodes.get(at));
        let differ = |at: &usize| match both(*at) {
            [Some(_), Some(node)] => !self.is_same(*at, node, rows),
            _ => true,
        };
        let count = self.trace.nodes.len().max(other.nodes.len());
        let at = match (0..count).find(differ) {
            Some(at) => [at; 2],
            None if self.output == output.id => return None,
            None => [self.output, output.id],
        };
        let of = [&self.trace, &*other];
        let nodes = [0, 1].map(|it| of[it].nodes.get(at[it]));
        let is_alike =
            matches!(nodes, [Some(one), Some(other)] if one.op.name() == other.op.name());
        let shown = |it: usize| {
            let Some(node) = nodes[it] else {
                return "nothing".to_string();
            };
            let inputs: Vec<String> = node.inputs.iter().map(|&id| of[it].name(id)).collect();
            match &node.op {
                Op::Constant(_) | Op::Numbers(_) => of[it].described(at[it]),
                op if is_alike && !inputs.is_empty() => {
                    format!("{op:?} {:?} of {}", node.shape, inputs.join(", "))
                }
                _ => of[it].described(at[it]),
            }
        };
        let text = format!(
            "expected the same operations and numbers for any number of rows, since ranks and \
             micro-batches divide the batch, got {} for {} rows, which differs from {} for {rows}; \
             help: let only lengths along the batch depend on its length; the step averages over it",
            shown(0),
            self.rows,
            shown(1)
        );
        Some(nodes.iter().flatten().next()?.error(&text))
    }

    /// Whether operation `id` is the same as `other`, for so many rows.
    fn is_same(&self, id: usize, other: &TraceNode, rows: usize) -> bool {
        let one = &self.trace.nodes[id];
        let fits = |one: usize, other: usize| one * rows == other * self.rows;
        let grows = |id: usize, axis: usize| self.grows[id].contains(&axis);
        let lengths = one.shape.iter().zip(&other.shape).enumerate();
        let are_fit = lengths
            .into_iter()
            .all(|(axis, (one, other))| one == other || grows(id, axis) && fits(*one, *other));
        if one.inputs != other.inputs || one.shape.len() != other.shape.len() || !are_fit {
            return false;
        }
        let is_start =
            |one: usize, other: usize, grows: bool| one == other || grows && fits(one, other);
        match (&one.op, &other.op) {
            (Op::Constant(one), Op::Constant(other)) => one.to_bits() == other.to_bits(),
            (Op::Numbers(_), Op::Numbers(_)) if !self.grows[id].is_empty() => {
                let is_major = |along| !matches!(along, RowsAlong::Each { inner: 1, .. });
                let major = self.numbers.get(&id).copied().map(is_major);
                let axis = self.grows[id][0];
                major.is_some_and(|major| follow([one, other], [self.rows, rows], axis, major))
            }
            (Op::Numbers(one), Op::Numbers(other)) => {
                let mut pairs = one.iter().zip(&**other);
                pairs.all(|(one, other)| one.to_bits() == other.to_bits())
            }
            (&Op::Slice(axis, start, step), &Op::Slice(of, other, every)) => {
                let grows = grows(one.inputs[0], axis);
                (axis, step) == (of, every) && is_start(start, other, grows)
            }
            (Op::Join(axis, starts, step), Op::Join(of, others, every)) => {
                let mut pairs = starts.iter().zip(others);
                let grows = grows(id, *axis);
                (axis, step) == (of, every)
                    && pairs.all(|(one, other)| is_start(*one, *other, grows))
            }
            (Op::Tensor(_), Op::Tensor(_)) => true,
            (Op::Custom(one), Op::Custom(other)) => type_of(&**one) == type_of(&**other),
            (one, other) => format!("{one:?}") == format!("{other:?}"),
        }
    }
}

fn type_of(op: &dyn Any) -> TypeId {
    op.type_id()
}

/// Whether an operation does more than move elements.
fn computes(op: &Op) -> bool {
    use Op::{
        Activate, Apply, Attention, Cast, Constant, Dropout, Embedding, Gated, Gather, Largest,
        Linear, Norm, Parameter, Rope, Sum,
    };
    matches!(
        op,
        Parameter(_)
            | Constant(_)
            | Apply(_)
            | Sum(_)
            | Largest(_)
            | Linear
            | Activate(_)
            | Norm(..)
            | Attention(_)
            | Dropout(..)
            | Gated(_)
            | Rope(..)
            | Cast(_)
            | Embedding(_)
            | Gather(_)
    )
}

/// How numbers along an axis belong to rows, if they are the same for each row.
fn along(one: &TraceNode, other: &TraceNode, axis: usize, rows: usize) -> Option<RowsAlong> {
    let counts = [rows, rows * MORE];
    let [major, minor] = [true, false].map(|major| follow([one, other], counts, axis, major));
    let each = |inner| RowsAlong::Each { inner, count: rows };
    match (major, minor) {
        (true, true) => Some(RowsAlong::Alike),
        (true, false) => Some(each(one.shape[axis] / rows)),
        (false, true) => Some(each(1)),
        (false, false) => None,
    }
}

/// Whether the numbers of both, for so many rows, are the same for each row. Along the axis rows
/// are one after the other (`major`), or each number has all rows.
fn follow(of: [&TraceNode; 2], rows: [usize; 2], axis: usize, major: bool) -> bool {
    let (Op::Numbers(first), Op::Numbers(_)) = (&of[0].op, &of[1].op) else {
        return false;
    };
    let length = of[0].shape[axis];
    let each = length / rows[0];
    let stride: usize = of[0].shape[axis + 1..].iter().product();
    let are_whole = [0, 1]
        .iter()
        .all(|&it| of[it].shape[axis] == each * rows[it]);
    are_whole
        && [0, 1].iter().all(|&it| {
            let Op::Numbers(numbers) = &of[it].op else {
                return false;
            };
            numbers.iter().enumerate().all(|(at, number)| {
                let (outer, place) = (
                    at / stride / of[it].shape[axis],
                    at / stride % of[it].shape[axis],
                );
                let like = if major {
                    place % each
                } else {
                    place / rows[it] * rows[0]
                };
                let like = (outer * length + like) * stride + at % stride;
                first[like].to_bits() == number.to_bits()
            })
        })
}
