//! Refuses what mixes the rows of a batch, or depends on how many there are. Ranks, micro-batches
//! and shards divide the batch, so the result would depend on the number of ranks.

use super::trace::{Op, Trace, TraceNode};

/// Another trace of the same formula has so many times the rows.
pub(super) const MORE_ROWS: usize = 2;

/// Which row each index of an axis belongs to.
#[derive(Clone, Copy, Debug, PartialEq)]
enum RowsAlong {
    /// Index i is of row `i / inner % count`.
    Each { inner: usize, count: usize },
    /// Indices are of rows, but not in this way.
    Unknown,
}

use RowsAlong::{Each, Unknown};

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
        match self.along(axis) {
            Some(known) if known != rows => return None,
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

impl Trace {
    /// Keeps an error if row i of `output`, for a batch of `rows`, depends on other rows than i. Of
    /// a loss, whose output has another order, only if an operation mixes them. A `CustomOp` may
    /// read mixed values, for instance to store them in a buffer.
    pub(super) fn refuse_mixed_rows(&mut self, rows: usize, output: usize, is_loss: bool) {
        if rows < 2 || self.error.is_some() {
            return;
        }
        let mut axes = Vec::<RowAxes>::with_capacity(self.nodes.len());
        let mut mixed_by = Vec::<Option<usize>>::with_capacity(self.nodes.len());
        for (id, node) in self.nodes.iter().enumerate() {
            let of_node = row_axes(&self.nodes, node, &axes, rows);
            let of_inputs = || node.inputs.iter().find_map(|&it| mixed_by[it]);
            mixed_by.push(match (&node.op, &of_node) {
                (Op::Custom(_), _) => None,
                (_, None) => of_inputs().or(Some(id)),
                _ => of_inputs(),
            });
            axes.push(of_node.unwrap_or_default());
        }
        let is_in_order = |axes: &RowAxes| axes.0.is_empty() || *axes == RowAxes::first(rows);
        let is_disordered = !is_loss && !is_in_order(&axes[output]);
        let has_unknown = |axes: &RowAxes| axes.0.iter().any(|it| it.1 == Unknown);
        let disordered_by = || axes.iter().position(has_unknown).unwrap_or(output);
        let Some(id) = mixed_by[output].or_else(|| is_disordered.then(disordered_by)) else {
            return;
        };
        let node = &self.nodes[id];
        // A matmul's factors were reshaped for it.
        let is_matmul = matches!(node.op, Op::MatMul(_));
        let of = |mut it: usize| {
            while is_matmul && matches!(self.nodes[it].op, Op::Reshape | Op::Expand) {
                it = self.nodes[it].inputs[0];
            }
            self.described(it)
        };
        let inputs: Vec<String> = node.inputs.iter().copied().map(of).collect();
        let (op, got) = (self.name(id), inputs.join(" and "));
        let help = match node.op {
            Op::Dropout(..) => "reshape to (batch, …) first, as x is",
            Op::Sum(_) | Op::Largest(_) | Op::Norm(..) => {
                "reduce over other axes; the step averages over the batch"
            }
            _ => "keep the batch as the first axis, and its rows in order",
        };
        let text = format!(
            "{op}: expected a result for each row that does not depend on other rows, since ranks and \
             micro-batches divide the batch, got {got}; help: {help}"
        );
        let (place, line) = (node.place.clone(), node.line);
        self.keep_error_at(&place, line, text);
    }

    /// Keeps an error if `more`, the trace of the same formula for `MORE_ROWS` times the rows, has
    /// other operations or other numbers.
    pub(super) fn refuse_row_counts(&mut self, rows: usize, more: &Trace) {
        let traces = [&*self, more];
        let count = traces.map(|it| it.nodes.len());
        let is_other = |at: &usize| match traces.map(|it| it.nodes.get(*at)) {
            [Some(one), Some(other)] => !is_alike(&one.op, &other.op, rows.max(1)),
            _ => true,
        };
        let Some(at) = (0..count[0].max(count[1])).find(is_other) else {
            return;
        };
        let got = |it: &Trace| (at < it.nodes.len()).then(|| it.described(at));
        let [one, other] = traces.map(|it| got(it).unwrap_or("nothing".into()));
        let text = format!(
            "expected the same operations and numbers for any number of rows, since ranks and \
             micro-batches divide the batch, got {one} for {rows} rows, which differs from {other} \
             for {}; help: let only shapes depend on the batch's length; the step averages over the \
             batch",
            rows * MORE_ROWS
        );
        let node = &traces[usize::from(at >= count[0])].nodes[at];
        let (place, line) = (node.place.clone(), node.line);
        self.keep_error_at(&place, line, text);
    }
}

/// Whether operations of traces for `rows` and for `MORE_ROWS` times as many are the same. Numbers
/// may also be the same for each row.
fn is_alike(one: &Op, other: &Op, rows: usize) -> bool {
    match (one, other) {
        (Op::Constant(one), Op::Constant(other)) => one.to_bits() == other.to_bits(),
        (Op::Apply(one), Op::Apply(other)) => one == other,
        (Op::Numbers(one), Op::Numbers(other)) if one.len() != other.len() => {
            let (row, left) = (one.len() / rows, one.len() % rows);
            let mut all = one.chunks(row.max(1)).chain(other.chunks(row.max(1)));
            left == 0 && other.len() == MORE_ROWS * one.len() && all.all(|it| *it == one[..row])
        }
        (Op::Numbers(one), Op::Numbers(other)) => one == other,
        _ => std::mem::discriminant(one) == std::mem::discriminant(other),
    }
}

/// The axes of a node's value along which rows are; none if it mixes rows.
fn row_axes(
    nodes: &[TraceNode],
    node: &TraceNode,
    known: &[RowAxes],
    rows: usize,
) -> Option<RowAxes> {
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
            none.clone()
                .with_all((0..inputs.len()).flat_map(of_input))?
        }
        Op::Sum(axes) | Op::Largest(axes) => unless(axes.iter().any(|&axis| has(0, axis)))?,
        Op::Reshape => {
            let of = of(0).0.iter().flat_map(|it| reshaped(*it, from(0), shape));
            none.clone().with_all(of)?
        }
        Op::Permute(axes) => {
            let to =
                |it: &(usize, RowsAlong)| Some((axes.iter().position(|&axis| axis == it.0)?, it.1));
            RowAxes(of(0).0.iter().filter_map(to).collect())
        }
        &Op::Slice(axis, start, step) => {
            let is_whole = shape[axis] == from(0)[axis];
            let mut axes = of(0).clone();
            for it in axes.0.iter_mut().filter(|it| it.0 == axis && !is_whole) {
                it.1 = sliced(it.1, [start, step, shape[axis]], from(0)[axis])?;
            }
            axes
        }
        Op::Join(axis, starts, step) => joined(
            (0..inputs.len()).map(|at| (of(at), starts[at], from(at)[*axis])),
            *axis,
            *step,
            shape[*axis],
        )?,
        &Op::Window(axis, _) => unless(has(0, axis))?,
        Op::Unfold(_) => {
            let places = shape[1] / from(0)[0];
            let to = |rows| match rows {
                Each { inner, count } => Each {
                    inner: inner * places,
                    count,
                },
                Unknown => Unknown,
            };
            let axes = unless((1..4).any(|axis| has(0, axis)))?;
            RowAxes(axes.0.into_iter().map(|it| (1, to(it.1))).collect())
        }
        &Op::MatMul([left, right]) => {
            let (rows, columns) = (1 + usize::from(left), 2 - usize::from(right));
            if has(0, 3 - rows) || has(1, 3 - columns) {
                return None;
            }
            let to =
                |end: usize| move |it: &(usize, RowsAlong)| (if it.0 == 0 { 0 } else { end }, it.1);
            let of_left = of(0).0.iter().map(to(1));
            none.clone()
                .with_all(of_left.chain(of(1).0.iter().map(to(2))))?
        }
        Op::Linear => {
            let of_weight = (1..inputs.len()).flat_map(|at| of(at).0.iter().map(|it| (last, it.1)));
            unless(has(0, last) || has(1, 1))?.with_all(of_weight)?
        }
        Op::Norm(..) | Op::Gated(_) => unless(has(0, last))?,
        // Drops by the row's number in the batch, which follows from the first axis.
        Op::Dropout(..) => {
            let (inner, count) = (*shape.first()? / rows, rows);
            let first = RowAxes(vec![(0, Each { inner, count })]);
            let is_of_rows = *of(0) == first || all().next().is_none() && shape[0] == rows;
            is_of_rows.then_some(first)?
        }
        Op::Rope(..) | Op::Attention(_) => {
            let of_all = none.clone().with_all(all())?;
            let is_mixed = [1, 2].iter().any(|&axis| of_all.along(axis).is_some());
            (!is_mixed).then_some(of_all)?
        }
        Op::Stop | Op::Slope | Op::Activate(_) | Op::Documents | Op::Embedding(_) => of(0).clone(),
        // What it does with them is not known. Of one shape rows stay where they are; of another
        // number of axes it is a statistic.
        Op::Custom(_) => {
            let has_rows = |at: &usize| !of(*at).0.is_empty();
            let like = (0..inputs.len()).find(|at| has_rows(at) && from(*at) == &shape[..]);
            let is_of_rows = |at: usize| has_rows(&at) && from(at).len() == shape.len();
            match like {
                Some(at) => of(at).clone(),
                None if shape.first() == Some(&rows) && (0..inputs.len()).any(is_of_rows) => {
                    RowAxes::first(rows)
                }
                None => RowAxes::default(),
            }
        }
        _ => RowAxes::default(),
    };
    axes.0.retain(|it| shape[it.0] > 1);
    Some(axes)
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

/// Rows of values that are joined along an axis: the axes of each, where it begins, its length.
fn joined<'a>(
    parts: impl Iterator<Item = (&'a RowAxes, usize, usize)> + Clone,
    axis: usize,
    step: usize,
    length: usize,
) -> Option<RowAxes> {
    let others = parts.clone().flat_map(|part| part.0.0.iter().copied());
    let axes = RowAxes::default().with_all(others.filter(|it| it.0 != axis))?;
    let Some(along) = parts.clone().find_map(|part| part.0.along(axis)) else {
        return Some(axes);
    };
    let fits = |period: usize| {
        let fits = |part: (&RowAxes, usize, usize)| {
            let is_same = part.0.along(axis).is_none_or(|it| it == along);
            is_same && [part.1, part.2].iter().all(|it| it.is_multiple_of(period))
        };
        step == 1 && length.is_multiple_of(period) && parts.clone().all(fits)
    };
    let is_regular = matches!(along, Each { inner, count } if fits(inner * count));
    axes.with(axis, if is_regular { along } else { Unknown })
}

/// Where rows along an axis of `from` are in a reshaped value.
fn reshaped(
    (axis, of): (usize, RowsAlong),
    from: &[usize],
    to: &[usize],
) -> Vec<(usize, RowsAlong)> {
    let stride = |shape: &[usize], axis: usize| shape[axis + 1..].iter().product::<usize>();
    // A value's row follows from `index / begin % (end / begin)`.
    let (inner, count) = match of {
        Each { inner, count } => (inner, count),
        Unknown => (1, from[axis]),
    };
    let begin = stride(from, axis) * inner;
    let end = begin * count;
    let mut all = Vec::new();
    for axis in (0..to.len()).filter(|&axis| to[axis] > 1) {
        let (first, beyond) = (stride(to, axis), stride(to, axis) * to[axis]);
        let has_all = begin.is_multiple_of(first) && beyond.is_multiple_of(end);
        if has_all && of != Unknown {
            let inner = begin / first;
            return vec![(axis, Each { inner, count })];
        }
        if beyond > begin && !first.is_multiple_of(end) {
            all.push((axis, Unknown));
        }
    }
    all
}
