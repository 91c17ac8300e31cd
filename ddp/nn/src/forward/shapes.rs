//! Operations that move elements to another shape, and compute nothing.

use std::ops::Range;

use ddp_kernels::ops::ChainView;

use super::emit::within;
use super::operation::*;
use super::trace::{INPUTS_MAX, broadcast, count_of};

impl Var {
    /// The value with lengths of 1 repeated to these lengths of a row. What is the same for all
    /// rows meets each row as it is, and need not be expanded to the batch.
    #[track_caller]
    pub fn expand(&self, lengths: &[usize]) -> Var {
        let shape = self.whole_shape(lengths);
        let fits = shape.len() == self.rank() || !self.has_rows();
        if !fits || broadcast(&self.shape(), &shape).is_none_or(|both| both != shape) {
            let expected = format!("lengths of {lengths:?}, or 1");
            return self.refuse("expand", &[self], &expected, "reshape it first");
        }
        self.expanded(&shape)
    }

    /// The same with all axes, also that of the rows.
    #[track_caller]
    pub(super) fn expanded(&self, shape: &[usize]) -> Var {
        if self.shape() == shape {
            return self.clone();
        }
        self.checked(Expand, &[self], shape.to_vec())
    }

    /// A number in each element of a value like this one, but of this shape.
    #[track_caller]
    pub(super) fn filled(&self, value: f64, shape: &[usize]) -> Var {
        let filled = self.constant(value).expanded(shape);
        filled.with_rows(self.has_rows() && !shape.is_empty())
    }

    /// The sum over the axes that broadcasting to this value's shape has repeated.
    pub(super) fn reduced_to(&self, shape: &[usize]) -> Var {
        let own = self.shape();
        if own.contains(&0) && !shape.contains(&0) {
            return self.filled(0.0, shape);
        }
        let missing = own.len() - shape.len();
        let is_repeated = |&at: &usize| own[at] != 1 && (at < missing || shape[at - missing] == 1);
        let axes: Vec<usize> = (0..own.len()).filter(is_repeated).collect();
        let sum = if axes.is_empty() {
            self.clone()
        } else {
            self.reduce(Sum(axes))
        };
        sum.reshape(shape)
    }

    /// The same elements, in order, in another shape: these are the lengths of a row, or of all
    /// axes of a value that is the same for all rows.
    #[track_caller]
    pub fn reshape(&self, lengths: &[usize]) -> Var {
        let own = self.row_shape();
        if Some(own.iter().product()) != count_of(lengths) {
            let expected = format!("as many elements as {lengths:?} has");
            let help = if self.has_rows() {
                "give the lengths of a row, without the number of rows"
            } else {
                "give lengths whose product is the number of elements"
            };
            return self.refuse("reshape", &[self], &expected, help);
        }
        self.reshaped(&self.whole_shape(lengths))
    }

    /// The same with all axes, also that of the rows.
    #[track_caller]
    pub(super) fn reshaped(&self, shape: &[usize]) -> Var {
        if self.shape() == shape {
            return self.clone();
        }
        let has_rows = self.has_rows();
        if let Op::Reshape(_) = self.op() {
            return self.inputs()[0].reshaped(shape).with_rows(has_rows);
        }
        self.checked(Reshape, &[self], shape.to_vec())
    }

    /// The value with axes in this order.
    #[track_caller]
    pub fn permute(&self, axes: &[usize]) -> Var {
        let shape = self.shape();
        let mut sorted = axes.to_vec();
        sorted.sort_unstable();
        if !sorted.into_iter().eq(0..shape.len()) {
            let expected = format!("each of its axes once in {axes:?}");
            return self.refuse("permute", &[self], &expected, "name all axes, the rows too");
        }
        if self.has_rows() && axes[0] != 0 {
            let help = "exchange axes within a row, as permute(&[0, 2, 1]) does";
            return self.refuse("permute", &[self], "the rows to stay the first axis", help);
        }
        if let Op::Permute(Permute(before)) = self.op() {
            let axes: Vec<usize> = axes.iter().map(|&axis| before[axis]).collect();
            let source = self.inputs()[0].clone();
            let permuted = if axes.is_sorted() {
                source
            } else {
                source.permute(&axes)
            };
            return permuted.with_rows(self.has_rows());
        }
        let permuted = axes.iter().map(|&axis| shape[axis]).collect();
        self.push(Permute(axes.to_vec()), &[self], permuted)
    }

    /// The value with two axes exchanged.
    #[track_caller]
    pub fn transpose(&self, a: isize, b: isize) -> Var {
        let (Some(a), Some(b)) = (self.axis("transpose", a), self.axis("transpose", b)) else {
            return self.clone();
        };
        let mut axes: Vec<usize> = (0..self.rank()).collect();
        axes.swap(a, b);
        self.permute(&axes)
    }

    /// Some indices of an axis.
    #[track_caller]
    pub fn slice(&self, axis: isize, range: Range<usize>) -> Var {
        let Some(axis) = self.axis("slice", axis) else {
            return self.clone();
        };
        let mut shape = self.shape();
        if range.start > range.end || range.end > shape[axis] {
            let expected = format!("indices {range:?} below {}", shape[axis]);
            return self.refuse("slice", &[self], &expected, "give a range within the axis");
        }
        shape[axis] = range.len();
        self.push(Slice(axis, range.start, 1), &[self], shape)
    }

    /// One of every `step` indices of an axis, from the first on.
    #[track_caller]
    pub fn every(&self, axis: isize, step: usize) -> Var {
        let (Some(axis), mut shape) = (self.axis("every", axis), self.shape()) else {
            return self.clone();
        };
        if step == 0 {
            return self.refuse(
                "every",
                &[self],
                "a step of at least 1",
                "give another step",
            );
        }
        shape[axis] = shape[axis].div_ceil(step);
        self.push(Slice(axis, 0, step), &[self], shape)
    }

    /// Windows of `size` indices of an axis, each `step` further on. The axis then counts windows,
    /// and what is in each is a new last axis.
    #[track_caller]
    pub fn windows(&self, axis: isize, size: usize, step: usize) -> Var {
        let Some(axis) = self.axis("windows", axis) else {
            return self.clone();
        };
        let mut shape = self.shape();
        if size == 0 || step == 0 || size > shape[axis] {
            let expected = format!("a size from 1 to {}, and a step of at least 1", shape[axis]);
            let help = "pad the axis, or choose smaller windows";
            return self.refuse("windows", &[self], &expected, help);
        }
        shape[axis] = (shape[axis] - size) / step + 1;
        shape.push(size);
        self.checked(Window(axis, step), &[self], shape)
    }

    /// The value with this many zeros before and after it along an axis.
    #[track_caller]
    pub fn pad(&self, axis: isize, before: usize, after: usize) -> Var {
        let (Some(axis), mut shape) = (self.axis("pad", axis), self.shape()) else {
            return self.clone();
        };
        if before == 0 && after == 0 {
            return self.clone();
        }
        shape[axis] = shape[axis].saturating_add(before).saturating_add(after);
        self.checked(Join(axis, vec![before], 1), &[self], shape)
    }

    /// Consecutive parts of an axis, of these lengths.
    #[track_caller]
    pub fn split(&self, axis: isize, lengths: &[usize]) -> Vec<Var> {
        if self.axis("split", axis).is_some() && self.size(axis) != lengths.iter().sum::<usize>() {
            let expected = format!("an axis as long as {lengths:?} together");
            self.refuse(
                "split",
                &[self],
                &expected,
                "split all of the axis, or use slice",
            );
            return vec![self.clone(); lengths.len()];
        }
        // Not by a closure, which would not pass on the caller's line.
        let (mut parts, mut start) = (Vec::with_capacity(lengths.len()), 0);
        for length in lengths {
            parts.push(self.slice(axis, start..start + length));
            start += length;
        }
        parts
    }

    /// Values one after the other along an axis. One that is the same for all rows, with a length
    /// of 1 as its first axis, is joined to each row.
    ///
    /// # Panics
    /// If there are none.
    #[track_caller]
    pub fn concatenate(values: &[&Var], axis: isize) -> Var {
        let &first = values.first().expect("concatenate needs a value");
        let of_rows = values.iter().find(|it| it.has_rows());
        let Some(axis) = of_rows.unwrap_or(&first).axis("concatenate", axis) else {
            return first.clone();
        };
        let rank = of_rows.unwrap_or(&first).rank();
        if values.iter().any(|it| it.rank() != rank) {
            return first.refuse(
                "concatenate",
                values,
                "the same number of axes in all values",
                "reshape them",
            );
        }
        if !Var::rows_meet(values, rank) {
            return first.refuse_rows("concatenate", values);
        }
        // An operation has so many inputs.
        if values.len() > INPUTS_MAX {
            let mut parts = Vec::new();
            for part in values.chunks(INPUTS_MAX) {
                parts.push(Var::concatenate(part, axis as isize));
            }
            return Var::concatenate(&parts.iter().collect::<Vec<_>>(), axis as isize);
        }
        let rows = of_rows.map_or(1, |it| it.shape()[0]);
        let mut all = Vec::with_capacity(values.len());
        for &value in values {
            all.push(match value.shape().split_first() {
                Some((1, row)) if !value.has_rows() => value.expanded(&[&[rows], row].concat()),
                _ => value.clone(),
            });
        }
        let (first, values) = (&all[0], &all.iter().collect::<Vec<_>>()[..]);
        let (mut shape, mut starts) = (first.shape(), Vec::new());
        shape[axis] = 0;
        for value in values {
            let mut other = value.shape();
            let length = other.get(axis).copied().unwrap_or(0);
            starts.push(shape[axis]);
            shape[axis] += length;
            if let Some(own) = other.get_mut(axis) {
                *own = shape[axis];
            }
            if other.len() != shape.len() || other != shape {
                let expected = format!("equal lengths of all axes but axis {axis}");
                return first.refuse("concatenate", values, &expected, "reshape or slice them");
            }
        }
        first.checked(Join(axis, starts, 1), values, shape)
    }

    /// Values along an axis of this length, each from an index on, and 0 elsewhere.
    pub(crate) fn placed(values: &[Var], axis: usize, starts: &[usize], length: usize) -> Var {
        let mut shape = values[0].shape();
        shape[axis] = length;
        let op = Join(axis, starts.to_vec(), 1);
        values[0].checked(op, &values.iter().collect::<Vec<_>>(), shape)
    }
}

impl Operation for Expand {
    fn look(&self, at: &mut ChainView, [from, to]: [&[usize]; 2]) {
        at.strides = within(from, &at.strides, to);
    }

    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        vec![Some(at.d.reduced_to(&at.x[0].shape()))]
    }
}

impl Operation for Reshape {
    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        vec![Some(at.d.reshape(&at.x[0].shape()))]
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let id = r.planned.outputs[0];
        r.values[id] = Some(r.x[0].reshape(&r.plan.nodes[id].shape)?);
        Ok(())
    }
}

impl Operation for Permute {
    fn look(&self, at: &mut ChainView, _shapes: [&[usize]; 2]) {
        at.strides = self.0.iter().map(|&axis| at.strides[axis]).collect();
    }

    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        let mut back = vec![0; self.0.len()];
        let axes = self.0.iter().enumerate();
        axes.for_each(|(at, &axis)| back[axis] = at);
        vec![Some(at.d.permute(&back))]
    }
}

impl Operation for Slice {
    fn look(&self, at: &mut ChainView, _shapes: [&[usize]; 2]) {
        let &Slice(axis, start, step) = self;
        at.offset += start * at.strides[axis];
        at.strides[axis] *= step;
    }

    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        vec![at.like(0, Join(self.0, vec![self.1], self.2), &[at.d])]
    }
}

impl Operation for Join {
    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        let of = |(input, start)| at.like(input, Slice(self.0, start, self.2), &[at.d]);
        self.1.iter().copied().enumerate().map(of).collect()
    }
}

impl Operation for Window {
    fn look(&self, at: &mut ChainView, _shapes: [&[usize]; 2]) {
        at.strides.push(at.strides[self.0]);
        at.strides[self.0] *= self.1;
    }

    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        let shape = at.y.shape();
        let (size, windows) = shape.split_last().unwrap_or((&1, &[]));
        // Windows overlap: each place within them gives its part to the sum.
        let of_place = |place: usize| {
            let d = at.d.slice(-1, place..place + 1).reshape(windows);
            let op = Join(self.0, vec![place], self.1);
            d.push(op, &[&d], at.x[0].shape())
        };
        let sum = (1..*size).fold(of_place(0), |sum, place| sum + of_place(place));
        vec![Some(sum)]
    }
}
