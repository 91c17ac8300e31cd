//! Values that choose elements of others: tokens, and indices that a formula computes.
//!
//! Tokens are integers, which only a table takes. Any other operation on them reads them as numbers
//! (`Cast`), so a formula may slice them, or compare them for a mask.

use ddp_kernels::ops;

use super::embedding::scatter;
use super::kinds::mixed;
use super::operation::*;
use crate::error::Error;

/// f32 holds all whole numbers up to this one.
const WHOLE_MAX: usize = 1 << 24;

impl Var {
    /// Whether these are tokens.
    pub(super) fn are_tokens(&self) -> bool {
        let trace = self.trace.borrow();
        let mut id = self.id;
        while let Op::Reshape(_) | Op::Stop(_) = trace.nodes[id].op {
            id = trace.nodes[id].inputs[0];
        }
        let op = &trace.nodes[id].op;
        let is_input = || id == 0 && trace.input_is_tokens && matches!(op, Op::Input(_));
        matches!(op, Op::Documents(_) | Op::Cast(Cast(NumberKind::Tokens))) || is_input()
    }

    #[track_caller]
    pub(super) fn cast(&self, kind: NumberKind) -> Var {
        self.push(Cast(kind), &[self], self.shape())
    }

    /// The same as tokens; −1 for what is negative, not whole or NaN.
    #[track_caller]
    pub(super) fn as_tokens(&self) -> Var {
        if self.are_tokens() {
            return self.clone();
        }
        let numbers = self.cast(NumberKind::SumDtypeReadRounded);
        let [zero, none] = [0.0, -1.0].map(|it| numbers.constant(it));
        let whole = numbers
            .cast(NumberKind::Tokens)
            .cast(NumberKind::SumDtypeReadRounded);
        let is_token = zero.less_equal(&numbers) * whole.equal(&numbers);
        is_token.select(&numbers, &none).cast(NumberKind::Tokens)
    }

    /// Picks elements along an axis, as `torch.gather`. `indices`, tokens or numbers, have this
    /// value's shape except along that axis. If that axis is their last, each index picks all that
    /// is along the axes after it. Of both, what is the same for all rows may have a length of 1 as
    /// its first axis. An index outside of the axis or between two places is an error on the CPU; a
    /// GPU gives NaN.
    #[track_caller]
    pub fn gather(&self, axis: isize, indices: &Var) -> Var {
        let Some(axis) = self.axis("gather", axis) else {
            return self.clone();
        };
        let has_rows = self.has_rows() || indices.has_rows();
        let of_all = [self, indices];
        if axis == 0 {
            return self.with_all_axes(has_rows, || self.gathered(axis, indices));
        }
        let meets = |it: &&Var| it.has_rows() || it.shape().first() == Some(&1);
        if has_rows && !of_all.iter().all(meets) {
            return self.refuse_rows("gather", &of_all);
        }
        let rows = of_all
            .iter()
            .find(|it| it.has_rows())
            .map(|it| it.shape()[0]);
        let of_each = |it: &Var| {
            let mut shape = it.shape();
            if let (Some(first), Some(rows)) = (shape.first_mut(), rows) {
                *first = rows;
            }
            it.expanded(&shape)
        };
        let (of, indices) = (of_each(self), of_each(indices));
        self.with_all_axes(has_rows, || of.gathered(axis, &indices))
    }

    #[track_caller]
    fn gathered(&self, axis: usize, indices: &Var) -> Var {
        let (of, mut shape) = (self.shape(), indices.shape());
        let fits = |it: usize| it == axis || shape[it] == of[it];
        let has_axes = shape.len() == axis + 1 || shape.len() == of.len();
        if !has_axes || !(0..shape.len()).all(fits) {
            let expected = "indices of the same shape but for the axis, which they may end with";
            let help = "expand them, or choose whole rows with table.rows(&indices)";
            return self.refuse("gather", &[self, indices], expected, help);
        }
        let inner: usize = shape[axis + 1..].iter().product();
        let outer: usize = of[..axis].iter().product();
        if outer * of[axis] * inner > WHOLE_MAX {
            let expected = format!("at most {WHOLE_MAX} elements or rows of the batch together");
            let help = "use smaller batches, or one_hot = i.equal(&m.indices(n)) and a sum";
            return self.refuse("gather", &[self, indices], &expected, help);
        }
        let numbers = indices.as_tokens().cast(NumberKind::SumDtypeReadRounded);
        let [zero, length, none] = [0.0, of[axis] as f64, -1.0].map(|it| numbers.constant(it));
        let is_inside = zero.less_equal(&numbers) * numbers.less(&length);
        let mut places = numbers * inner as f64;
        if axis > 0 {
            let mut begins = of[..axis].to_vec();
            begins.resize(shape.len(), 1);
            places = places.push(Steps(of[axis] * inner), &[], begins) + places;
        }
        if inner > 1 {
            places = places.push(Steps(1), &[], shape[axis + 1..].to_vec()) + places;
        }
        let tokens = is_inside.select(&places, &none).cast(NumberKind::Tokens);
        let source = if self.are_tokens() {
            self.cast(NumberKind::SumDtypeReadRounded)
        } else {
            self.clone()
        };
        if shape.len() == axis + 1 {
            shape.extend(&of[axis + 1..]);
        }
        self.checked(Gather(axis), &[&tokens, &source], shape)
    }

    /// The rows of this table (V, …) that `indices` name, tokens or numbers of any shape.
    #[track_caller]
    pub fn rows(&self, indices: &Var) -> Var {
        if self.has_rows() {
            let help = "choose within a row with gather";
            return self.refuse(
                "rows",
                &[self],
                "a table that is the same for all rows",
                help,
            );
        }
        let (shape, of) = (indices.shape(), self.shape());
        self.with_all_axes(indices.has_rows(), || {
            let flat = indices.reshape(&[shape.iter().product()]);
            let chosen = self.gather(0, &flat);
            chosen.reshape(&[&shape, of.get(1..).unwrap_or(&[])].concat())
        })
    }
}

impl Operation for Gather {
    fn kind(&self, of: &[Option<NumberKind>]) -> Option<NumberKind> {
        of[1].map(|_| mixed(&of[1..]))
    }

    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        vec![None, at.like(1, GatherBackward, &[at.d, &at.x[0]])]
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let (out, tokens, table) = (r.take(0)?, r.x[0].flatten()?, r.x[1]);
        let columns = out.count() / tokens.count().max(1);
        if columns == 0 {
            return Ok(());
        }
        let [out, rows] = [&out, table].map(|it| rows_of(it, columns));
        let found = ops::embedding_into(&out?, &rows?, &tokens, None);
        found.map_err(|error| {
            if table.device().is_accelerator() {
                return error.into();
            }
            // On the CPU nothing else can be wrong.
            let (axis, length) = (self.0, table.shape()[self.0]);
            let expected = format!("whole indices below {length}, the length of axis {axis}");
            let help = "check how they are computed";
            Error::model("gather", expected, "another, or NaN", help)
        })
    }
}

impl Operation for GatherBackward {
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let (out, d, tokens) = (r.take(0)?, r.x[0], r.x[1].flatten()?);
        let columns = d.count() / tokens.count().max(1);
        if columns == 0 {
            return Ok(ops::zero(&out)?);
        }
        let [out, d] = [&out, d].map(|it| rows_of(it, columns));
        scatter(r, (&out?, false), &[], [&d?, &tokens])
    }
}
