//! Refuses what mixes the rows of a batch. Ranks, micro-batches and shards divide the batch, so
//! that such a result would depend on how many there are.

use super::trace::{Op, Trace, TraceNode};

/// Where rows are along an axis: index i is of row `i / inner % count`.
#[derive(Clone, Copy, Debug, PartialEq)]
struct RowAxis {
    axis: usize,
    inner: usize,
    count: usize,
}

impl RowAxis {
    fn all_of(axis: usize, shape: &[usize]) -> RowAxis {
        RowAxis {
            axis,
            inner: 1,
            count: shape[axis],
        }
    }

    fn to(self, axis: usize) -> RowAxis {
        RowAxis { axis, ..self }
    }
}

impl Trace {
    /// Keeps an error if `output` depends on an operation that mixes rows of a batch of `rows`.
    /// Own operations may read such values, to write them to a buffer.
    pub(super) fn refuse_mixed_rows(&mut self, rows: usize, output: usize) {
        if rows < 2 || self.error.is_some() {
            return;
        }
        let mut axes = Vec::<Vec<RowAxis>>::with_capacity(self.nodes.len());
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
        let Some(id) = mixed_by[output] else { return };
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
            _ => "use other axes; the mean over the batch is the step's, not the model's",
        };
        let text = format!(
            "{op}: expected each row of the batch by itself, as ranks and micro-batches divide it, \
             got {got}; help: {help}"
        );
        let (place, line) = (node.place.clone(), node.line);
        self.keep_error_at(&place, line, text);
    }
}

/// The axes of a node's value that rows are along; none if it mixes rows.
fn row_axes(
    nodes: &[TraceNode],
    node: &TraceNode,
    known: &[Vec<RowAxis>],
    rows: usize,
) -> Option<Vec<RowAxis>> {
    let (shape, inputs) = (&node.shape, &node.inputs);
    if shape.contains(&0) {
        return Some(vec![]);
    }
    let of = |at: usize| inputs.get(at).map_or(&[][..], |&it| &known[it][..]);
    let from = |at: usize| &nodes[inputs[at]].shape[..];
    let last = shape.len().saturating_sub(1);
    // Axes count from the last one on.
    let broadcast = |at: usize| {
        let more = shape.len() - from(at).len();
        of(at).iter().map(move |it| it.to(it.axis + more))
    };
    let unless = |is_mixed: bool| (!is_mixed).then(|| of(0).to_vec());
    let has = |at: usize, axis: usize| of(at).iter().any(|it| it.axis == axis);
    let mut all = match &node.op {
        Op::Input => vec![RowAxis::all_of(0, shape)],
        Op::Apply(_) | Op::Expand => (0..inputs.len()).flat_map(broadcast).collect(),
        Op::Sum(axes) | Op::Largest(axes) => unless(axes.iter().any(|&axis| has(0, axis)))?,
        Op::Reshape => of(0)
            .iter()
            .flat_map(|it| reshaped(*it, from(0), shape))
            .collect(),
        Op::Permute(axes) => {
            let to = |it: &RowAxis| Some(it.to(axes.iter().position(|&axis| axis == it.axis)?));
            of(0).iter().filter_map(to).collect()
        }
        &Op::Slice(axis, ..) => {
            let is_part = shape[axis] != from(0)[axis];
            cut(
                unless(has(0, axis) && shape[axis] < rows)?,
                axis,
                shape,
                is_part,
            )
        }
        &Op::Join(axis, ..) => {
            let is_other = |at: usize| of(at) != of(0) || from(at)[axis] != from(0)[axis];
            let is_padded = inputs.len() == 1 && shape[axis] != from(0)[axis];
            let is_part = is_padded || (0..inputs.len()).any(is_other);
            let all = (0..inputs.len()).flat_map(|at| of(at).iter().copied());
            cut(all.collect(), axis, shape, is_part)
        }
        &Op::Window(axis, _) => unless(has(0, axis))?,
        Op::Unfold(_) => {
            let places = shape[1] / from(0)[0];
            let to = |it: &RowAxis| RowAxis {
                axis: 1,
                inner: it.inner * places,
                ..*it
            };
            let axes = unless((1..4).any(|axis| has(0, axis)))?;
            axes.iter().map(to).collect()
        }
        &Op::MatMul([left, right]) => {
            let (rows, columns) = (1 + usize::from(left), 2 - usize::from(right));
            if has(0, 3 - rows) || has(1, 3 - columns) {
                return None;
            }
            let to = |it: &RowAxis, end: usize| it.to(if it.axis == 0 { 0 } else { end });
            let of_left = of(0).iter().map(|it| to(it, 1));
            of_left.chain(of(1).iter().map(|it| to(it, 2))).collect()
        }
        Op::Linear => {
            let of_weight = (1..inputs.len()).flat_map(|at| of(at).iter().map(|it| it.to(last)));
            let of_x = unless(has(0, last) || has(1, 1))?;
            of_x.into_iter().chain(of_weight).collect()
        }
        Op::Norm(..) | Op::Gated(_) => unless(has(0, last))?,
        // Drops by the row's number in the batch, which is that of the first axis.
        Op::Dropout(..) => unless(of(0) != [RowAxis::all_of(0, shape)])?,
        Op::Rope(..) | Op::Attention(_) => unless(has(0, 1) || has(0, 2))?,
        Op::Stop | Op::Slope | Op::Activate(_) | Op::Documents | Op::Embedding(_) => of(0).to_vec(),
        // What it does with them is not known.
        Op::Custom(_) if (0..inputs.len()).any(|at| !of(at).is_empty()) => {
            vec![RowAxis::all_of(0, shape)]
        }
        _ => vec![],
    };
    all.retain(|it| it.count > 1);
    all.dedup();
    Some(all)
}

/// The axes where an axis has been cut to a part, or joined of different ones.
fn cut(mut all: Vec<RowAxis>, axis: usize, shape: &[usize], is_part: bool) -> Vec<RowAxis> {
    if is_part {
        let of_axis = all.iter_mut().filter(|it| it.axis == axis);
        of_axis.for_each(|it| *it = RowAxis::all_of(axis, shape));
    }
    all
}

/// Where rows of one axis of `from` are in a reshaped value.
fn reshaped(of: RowAxis, from: &[usize], to: &[usize]) -> Vec<RowAxis> {
    let stride = |shape: &[usize], axis: usize| shape[axis + 1..].iter().product::<usize>();
    let begin = stride(from, of.axis) * of.inner;
    let end = begin * of.count;
    let mut all = Vec::new();
    for axis in (0..to.len()).filter(|&axis| to[axis] > 1) {
        let (first, beyond) = (stride(to, axis), stride(to, axis) * to[axis]);
        if begin.is_multiple_of(first) && beyond.is_multiple_of(end) {
            let inner = begin / first;
            return vec![RowAxis { axis, inner, ..of }];
        }
        if first < end && begin < beyond {
            all.push(RowAxis::all_of(axis, to));
        }
    }
    all
}
