//! Which rows of a batch a value is of. Refuses what mixes rows, or differs between them otherwise
//! than by what they hold. Ranks, micro-batches and shards divide the batch, so the result would
//! depend on the number of ranks.

use super::row_counts::RowReference;
use super::row_counts::RowsAlong::{self, Alike, Each, Unknown};
use super::trace::Op;

/// The axes of a value along which rows are.
#[derive(Clone, Debug, Default, PartialEq)]
struct RowAxes(Vec<(usize, RowsAlong)>);

impl RowAxes {
    fn first(count: usize) -> RowAxes {
        RowAxes(vec![(0, Each { inner: 1, count })])
    }

    fn along(&self, axis: usize) -> Option<RowsAlong> {
        let mut all = self.0.iter();
        all.find(|it| it.0 == axis).map(|it| it.1)
    }

    /// Adds rows along an axis. None if others are there: one index would be of two rows.
    fn with(mut self, axis: usize, rows: RowsAlong) -> Option<RowAxes> {
        match self.0.iter_mut().find(|it| it.0 == axis) {
            Some(known) if known.1 == Alike => known.1 = rows,
            Some(known) if known.1 != rows && rows != Alike => return None,
            Some(_) => {}
            None => self.0.push((axis, rows)),
        }
        Some(self)
    }

    fn with_all(self, all: impl IntoIterator<Item = (usize, RowsAlong)>) -> Option<RowAxes> {
        all.into_iter()
            .try_fold(self, |all, (axis, rows)| all.with(axis, rows))
    }
}

/// What is wrong with a value.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wrong {
    /// It depends on several rows.
    Mixes,
    /// It has entries for each row that are not computed from the row.
    Counts,
}

impl RowReference {
    /// The error if row i of the output depends on other rows than i, or on i. A `CustomOp` may
    /// read such values, for instance to store them in a buffer. `period` is that of the output
    /// along its first axis: how many entries it has before they are of the first row again.
    pub(super) fn refuse_mixed_rows(&self, output: usize, period: usize) -> Option<String> {
        let nodes = &self.trace.nodes;
        let mut axes = Vec::<RowAxes>::with_capacity(nodes.len());
        let mut wrong_by = Vec::<Option<(usize, Wrong)>>::with_capacity(nodes.len());
        for (id, node) in nodes.iter().enumerate() {
            let of_node = self.row_axes(id, &axes);
            let is_known = |all: &RowAxes| {
                let mut growing = self.growing(id);
                node.shape.contains(&0)
                    || matches!(node.op, Op::Part(..))
                    || growing.all(|it| all.along(it).is_some())
            };
            let own = match &of_node {
                None => Some(Wrong::Mixes),
                Some(of) if !is_known(of) => {
                    let mut inputs = node.inputs.iter();
                    let has_rows = inputs.any(|&it| !axes[it].0.is_empty());
                    Some(if has_rows {
                        Wrong::Mixes
                    } else {
                        Wrong::Counts
                    })
                }
                _ => None,
            };
            let of_inputs = node.inputs.iter().find_map(|&it| wrong_by[it]);
            let of_inputs = of_inputs.filter(|_| !matches!(node.op, Op::Custom(_)));
            wrong_by.push(of_inputs.or(own.map(|own| (id, own))));
            axes.push(of_node.unwrap_or_default());
        }
        let (inner, count) = (period / self.rows, self.rows);
        let is_in_order = match &axes[output].0[..] {
            [] | [(0, Alike)] => true,
            [(0, rows)] => *rows == Each { inner, count },
            _ => false,
        };
        let has_unknown = |axes: &RowAxes| axes.0.iter().any(|it| matches!(it.1, Unknown(_)));
        let disordered = || {
            let by = axes.iter().position(has_unknown).unwrap_or(output);
            (!is_in_order).then_some((by, Wrong::Mixes))
        };
        let (id, wrong) = wrong_by[output].or_else(disordered)?;
        Some(self.text_of(id, wrong))
    }

    fn text_of(&self, id: usize, wrong: Wrong) -> String {
        let node = &self.trace.nodes[id];
        // A matmul's factors were reshaped for it.
        let is_matmul = matches!(node.op, Op::MatMul(_));
        let of = |mut it: usize| {
            while is_matmul && matches!(self.trace.nodes[it].op, Op::Reshape | Op::Expand) {
                it = self.trace.nodes[it].inputs[0];
            }
            self.trace.described(it)
        };
        let inputs: Vec<String> = node.inputs.iter().copied().map(of).collect();
        let (op, mut got) = (self.trace.name(id), inputs.join(" and "));
        let expected = match wrong {
            Wrong::Mixes => "a result for each row that does not depend on other rows",
            Wrong::Counts => {
                "entries that are computed from their row, or are the same for all rows"
            }
        };
        if wrong == Wrong::Counts {
            let of = if inputs.is_empty() { "" } else { " of " };
            got = format!("{:?}{of}{got}", node.shape);
        }
        let help = match node.op {
            _ if wrong == Wrong::Counts => "broadcast what is the same for each row",
            Op::Dropout(..) => "permute or reshape to (batch, …) first, as x is",
            Op::Sum(_) | Op::Largest(_) | Op::Norm(..) => {
                "reduce over other axes; the step averages over the batch"
            }
            _ => "keep the batch as the first axis, and its rows in order",
        };
        node.error(&format!(
            "{op}: expected {expected}, since ranks and micro-batches divide the batch, got {got}; \
             help: {help}"
        ))
    }

    /// The axes of a value along which rows are; none if it mixes rows.
    fn row_axes(&self, id: usize, known: &[RowAxes]) -> Option<RowAxes> {
        let (nodes, rows) = (&self.trace.nodes, self.rows);
        let node = &nodes[id];
        let (shape, inputs) = (&node.shape, &node.inputs);
        if shape.contains(&0) {
            return Some(RowAxes::default());
        }
        let none = RowAxes::default();
        let of = |at: usize| inputs.get(at).map_or(&none, |&it| &known[it]);
        let from = |at: usize| &nodes[inputs[at]].shape[..];
        let last = shape.len().saturating_sub(1);
        let unless = |is_mixed: bool| (!is_mixed).then(|| of(0).clone());
        let has = |at: usize, axis: usize| of(at).along(axis).is_some();
        let all = || (0..inputs.len()).flat_map(|at| of(at).0.iter().copied());
        let mut axes = match &node.op {
            Op::Input if !shape.is_empty() => RowAxes::first(shape[0]),
            Op::Apply(_) | Op::Expand => {
                // Axes count from the last one on.
                let of_input = |at: usize| {
                    let more = shape.len() - from(at).len();
                    of(at).0.iter().map(move |it| (it.0 + more, it.1))
                };
                let repeated = self.growing(id).map(|axis| (axis, Alike));
                let repeated = repeated.filter(|_| matches!(node.op, Op::Expand));
                let of_inputs = (0..inputs.len()).flat_map(of_input);
                none.clone().with_all(of_inputs.chain(repeated))?
            }
            Op::Sum(axes) | Op::Largest(axes) => unless(axes.iter().any(|&axis| has(0, axis)))?,
            Op::Reshape => {
                let are_alike = of(0).0.iter().all(|it| it.1 == Alike);
                let alike = self.growing(id).map(|axis| (axis, Alike));
                let alike = alike.filter(|_| are_alike && !of(0).0.is_empty());
                let ordered = of(0)
                    .0
                    .iter()
                    .filter(|_| !are_alike)
                    .flat_map(|&(axis, of)| {
                        let of = ordered(of, from(0)[axis], rows);
                        reshaped((axis, of), from(0), shape, id)
                    });
                none.clone().with_all(alike.chain(ordered))?
            }
            Op::Permute(axes) => {
                let to = |it: &(usize, RowsAlong)| {
                    Some((axes.iter().position(|&axis| axis == it.0)?, it.1))
                };
                RowAxes(of(0).0.iter().filter_map(to).collect())
            }
            &Op::Slice(axis, start, step) => {
                let is_whole = shape[axis] == from(0)[axis];
                let mut axes = of(0).clone();
                let ordered = |it: &&mut (usize, _)| it.0 == axis && !is_whole && it.1 != Alike;
                for it in axes.0.iter_mut().filter(ordered) {
                    it.1 = sliced(it.1, [start, step, shape[axis]], from(0)[axis])?;
                }
                axes
            }
            Op::Join(axis, starts, step) => {
                let part = |at: usize| {
                    let (mut axes, length) = (of(at).clone(), from(at)[*axis]);
                    for it in axes.0.iter_mut().filter(|it| it.0 == *axis) {
                        it.1 = ordered(it.1, length, rows);
                    }
                    (axes, starts[at], length)
                };
                let parts: Vec<_> = (0..inputs.len()).map(part).collect();
                joined(&parts, *axis, *step, shape[*axis], id)?
            }
            &Op::Window(axis, _) => unless(has(0, axis))?,
            Op::Unfold(_) => {
                let places = shape[1] / from(0)[0];
                let to = |rows| match rows {
                    Each { inner, count } => Each {
                        inner: inner * places,
                        count,
                    },
                    other => other,
                };
                let axes = unless((1..4).any(|axis| has(0, axis)))?;
                RowAxes(axes.0.into_iter().map(|it| (1, to(it.1))).collect())
            }
            &Op::MatMul([left, right]) => {
                let (rows, columns) = (1 + usize::from(left), 2 - usize::from(right));
                if has(0, 3 - rows) || has(1, 3 - columns) {
                    return None;
                }
                let to = |end: usize| {
                    move |it: &(usize, RowsAlong)| (if it.0 == 0 { 0 } else { end }, it.1)
                };
                let of_left = of(0).0.iter().map(to(1));
                none.clone()
                    .with_all(of_left.chain(of(1).0.iter().map(to(2))))?
            }
            Op::Linear => {
                let of_weight =
                    (1..inputs.len()).flat_map(|at| of(at).0.iter().map(|it| (last, it.1)));
                unless(has(0, last) || has(1, 1))?.with_all(of_weight)?
            }
            Op::Norm(..) | Op::Gated(_) => unless(has(0, last))?,
            // Drops by the row's number in the batch, which follows from the first axis.
            Op::Dropout(..) => {
                let (inner, count) = (*shape.first()? / rows, rows);
                let first = RowAxes(vec![(0, Each { inner, count })]);
                let is_of_rows = *of(0) == first || matches!(of(0).0[..], [(0, Alike)]);
                is_of_rows.then_some(first)?
            }
            Op::Rope(..) | Op::Attention(_) => {
                let of_all = none.clone().with_all(all())?;
                let is_mixed = [1, 2].iter().any(|&axis| of_all.along(axis).is_some());
                (!is_mixed).then_some(of_all)?
            }
            Op::Stop
            | Op::Slope
            | Op::Cast(_)
            | Op::Activate(_)
            | Op::Documents
            | Op::Embedding(_) => of(0).clone(),
            Op::Gather(axis) => {
                let of_all = none.clone().with_all(all())?;
                (!has(1, *axis)).then_some(of_all)?
            }
            // Where in a value each row begins; a gather uses it of the same row.
            Op::Steps(_) => RowAxes(self.growing(id).map(|axis| (axis, Alike)).collect()),
            // What it does with them is not known. Of one shape rows stay where they are; else they
            // are in order along what is longer for more rows.
            Op::Custom(_) => {
                let has_rows = |at: &usize| !of(*at).0.is_empty();
                let like = (0..inputs.len()).find(|at| has_rows(at) && from(*at) == &shape[..]);
                let in_order = self.growing(id).map(|axis| {
                    let (inner, count) = (shape[axis] / rows, rows);
                    (axis, Each { inner, count })
                });
                match like {
                    Some(at) => of(at).clone(),
                    None => RowAxes(in_order.collect()),
                }
            }
            Op::Numbers(_) => RowAxes(self.numbers_along(id).into_iter().collect()),
            _ => RowAxes::default(),
        };
        let grows = |axis: usize| self.growing(id).any(|it| it == axis);
        axes.0
            .retain(|it| shape[it.0] > 1 && (it.1 != Alike || grows(it.0)));
        Some(axes)
    }
}

/// Rows along an axis of which so many are left, from `start` on, one of `step`; none if only some
/// rows are.
fn sliced(of: RowsAlong, [start, step, left]: [usize; 3], length: usize) -> Option<RowsAlong> {
    let Each { inner, count } = of else {
        return None;
    };
    let period = inner * count;
    if step == 1 && start.is_multiple_of(period) && left.is_multiple_of(period) {
        return Some(of);
    }
    let is_of_each = inner.is_multiple_of(step) && start < step && left * step == length;
    is_of_each.then_some(Each {
        inner: inner / step,
        count,
    })
}

/// What is alike for all rows, along an axis of this length, as of rows in order.
fn ordered(of: RowsAlong, length: usize, rows: usize) -> RowsAlong {
    match of {
        Alike => Each {
            inner: length / rows,
            count: rows,
        },
        other => other,
    }
}

/// Rows of values that are joined along an axis by operation `id`: the axes of each, where it
/// begins, its length.
fn joined(
    parts: &[(RowAxes, usize, usize)],
    axis: usize,
    step: usize,
    length: usize,
    id: usize,
) -> Option<RowAxes> {
    let others = parts.iter().flat_map(|part| part.0.0.iter().copied());
    let axes = RowAxes::default().with_all(others.filter(|it| it.0 != axis))?;
    let Some(along) = parts.iter().find_map(|part| part.0.along(axis)) else {
        return Some(axes);
    };
    let fits = |period: usize| {
        let fits = |part: &(RowAxes, usize, usize)| {
            let is_same = part.0.along(axis).is_none_or(|it| it == along);
            is_same && [part.1, part.2].iter().all(|it| it.is_multiple_of(period))
        };
        step == 1 && length.is_multiple_of(period) && parts.iter().all(fits)
    };
    let is_regular = matches!(along, Each { inner, count } if fits(inner * count));
    axes.with(axis, if is_regular { along } else { Unknown(id) })
}

/// Where rows along an axis of `from` are in the value that operation `id` has reshaped.
fn reshaped(
    (axis, of): (usize, RowsAlong),
    from: &[usize],
    to: &[usize],
    id: usize,
) -> Vec<(usize, RowsAlong)> {
    let stride = |shape: &[usize], axis: usize| shape[axis + 1..].iter().product::<usize>();
    // A value's row follows from `index / begin % (end / begin)`.
    let (inner, count, unknown) = match of {
        Each { inner, count } => (inner, count, None),
        other => (1, from[axis], Some(other)),
    };
    let begin = stride(from, axis) * inner;
    let end = begin * count;
    let mut all = Vec::new();
    for axis in (0..to.len()).filter(|&axis| to[axis] > 1) {
        let (first, beyond) = (stride(to, axis), stride(to, axis) * to[axis]);
        let has_all = begin.is_multiple_of(first) && beyond.is_multiple_of(end);
        if has_all && unknown.is_none() {
            let inner = begin / first;
            return vec![(axis, Each { inner, count })];
        }
        if beyond > begin && !first.is_multiple_of(end) {
            all.push((axis, unknown.unwrap_or(Unknown(id))));
        }
    }
    all
}
