//! Attention that is written as a formula becomes the operation that computes it: scores and their
//! softmax are never in memory. Letters: B rows, H heads, T tokens, D columns of a head.

use ddp_kernels::ops::{Attention, Function};

use super::trace::{Kind, Op, Var};

/// A score of at most this has the weight 0.
const HIDDEN: f64 = -1e4;
/// The widest head of the operation.
const HEAD_SIZE_MAX: usize = 256;

impl Var {
    /// The product of this and values (B, H, T, D) by the operation, if this is
    /// `softmax(q·kᵀ · scale)`, perhaps with a causal mask, perhaps with a window.
    pub(super) fn as_attention(&self, values: &Var) -> Option<Var> {
        let of = <[usize; 4]>::try_from(values.shape()).ok()?;
        let [batch, heads, time, head_size] = of;
        let fits = time > 0 && (1..=HEAD_SIZE_MAX).contains(&head_size);
        if !fits || self.shape() != [batch, heads, time, time] {
            return None;
        }
        let (scores, causal, window) = self.softmax_of()?.unmasked(time)?;
        let (product, scale) = scores.unscaled();
        let [queries, keys] = product.factors(of)?;
        let all = [&queries, &keys, values].map(|it| {
            let by_token = it.permute(&[0, 2, 1, 3]);
            by_token.reshape(&[batch, time, heads * head_size])
        });
        let qkv = Var::whole_of(&all);
        let attention = Attention {
            time,
            heads,
            kv_heads: heads,
            head_size,
            causal,
            scale: Some(scale),
            window,
            cap: None,
        };
        let shape = vec![batch, time, heads * head_size];
        let y = qkv.push(Op::Attention(attention), &[&qkv], shape);
        y.part(0, Kind::Sums, vec![batch * heads, time]);
        let by_head = y.reshape(&[batch, time, heads, head_size]);
        Some(by_head.permute(&[0, 2, 1, 3]))
    }

    /// What this is the softmax of, over the last axis.
    fn softmax_of(&self) -> Option<Var> {
        let over_last = |is_sum: bool| {
            move |it: &Var| {
                let it = match it.op() {
                    Op::Stop => it.inputs().pop()?,
                    _ => it.clone(),
                };
                let axes = match it.op() {
                    Op::Sum(axes) if is_sum => axes,
                    Op::Largest(axes) if !is_sum => axes,
                    _ => return None,
                };
                it.inputs().pop().filter(|_| axes == [it.rank() - 1])
            }
        };
        let (exp, summed) = self.operands(Function::Div, over_last(true))?;
        let centred = exp.operand(Function::Exp)?;
        let (scores, of) = centred.operands(Function::Sub, over_last(false))?;
        (exp.id == summed.id && scores.id == of.id).then_some(scores)
    }

    /// Scores before a mask, whether it is causal, and its window. None for another mask.
    fn unmasked(self, time: usize) -> Option<(Var, bool, Option<usize>)> {
        let (scores, shown): (Var, Vec<bool>) = match self.op() {
            Op::Apply(Function::Where) => {
                let [condition, yes, no] = <[Var; 3]>::try_from(self.inputs()).ok()?;
                let hides = |it: &Var| it.number_of().is_some_and(|it| it <= HIDDEN);
                let shows = hides(&no);
                let scores = if shows {
                    yes
                } else {
                    Some(no).filter(|_| hides(&yes))?
                };
                let mask = condition.square_of(time)?.elements()?;
                let shown = mask.iter().map(|it| (*it != 0.0) == shows);
                (scores, shown.collect())
            }
            Op::Apply(Function::Add) => {
                let of = |it: &Var| it.square_of(time)?.elements();
                let (scores, mask) = self.operands(Function::Add, of)?;
                if !mask.iter().all(|it| *it == 0.0 || *it <= HIDDEN) {
                    return None;
                }
                (scores, mask.iter().map(|it| *it == 0.0).collect())
            }
            _ => return Some((self, false, None)),
        };
        let last = &shown[time * (time - 1)..];
        let window = last.iter().filter(|it| **it).count();
        let is_shown = |at: usize| at % time <= at / time && at / time < at % time + window;
        let is_causal = window > 0 && (0..time * time).all(|at| shown[at] == is_shown(at));
        is_causal.then_some((scores, true, Some(window).filter(|it| *it < time)))
    }

    /// The value of shape (T, T) that this repeats.
    fn square_of(&self, time: usize) -> Option<Var> {
        let mut square = self.clone();
        while let Op::Reshape | Op::Expand = square.op() {
            square = square.inputs().pop()?;
        }
        let is_last = |it: &Var| it.shape().ends_with(&[time, time]);
        let count: usize = square.shape().iter().product();
        (is_last(self) && is_last(&square) && count == time * time).then_some(square)
    }

    /// Its elements, if they follow from numbers alone.
    fn elements(&self) -> Option<Vec<f64>> {
        let shape = self.shape();
        match self.op() {
            Op::Constant(value) => Some(vec![value]),
            Op::Numbers(values) => Some(values.to_vec()),
            Op::Stop | Op::Reshape => self.inputs().pop()?.elements(),
            Op::Expand => self.inputs().pop()?.repeated(&shape),
            Op::Slice(axis, start, step) => {
                let of = self.inputs().pop()?;
                let (all, length) = (of.elements()?, of.size(axis as isize));
                let inner: usize = shape[axis + 1..].iter().product();
                let count = shape.iter().product();
                let from = |at: usize| {
                    let (outer, place) = (at / inner / shape[axis], at / inner % shape[axis]);
                    (outer * length + start + place * step) * inner + at % inner
                };
                Some((0..count).map(|at| all[from(at)]).collect())
            }
            Op::Apply(function) => {
                let inputs = self.inputs().into_iter();
                let all: Option<Vec<_>> = inputs.map(|it| it.repeated(&shape)).collect();
                let all = all?;
                let of = |at: usize| [0, 1, 2].map(|it| all.get(it).map_or(0.0, |it| it[at]));
                let count = shape.iter().product();
                (0..count).map(|at| applied(function, of(at))).collect()
            }
            _ => None,
        }
    }

    /// Its elements, if they follow from numbers alone, broadcast to this shape.
    fn repeated(&self, shape: &[usize]) -> Option<Vec<f64>> {
        let (all, own) = (self.elements()?, self.shape());
        let Some((&columns, before)) = shape.split_last().filter(|_| own != shape) else {
            return Some(all);
        };
        let own_columns = own.last().copied().unwrap_or(1);
        let mut repeated = Vec::new();
        for row in 0..before.iter().product() {
            let (mut rest, mut from, mut stride) = (row, 0, own_columns);
            let own_before = own.iter().rev().skip(1);
            for (own, length) in own_before.zip(before.iter().rev()) {
                from += rest % length % own * stride;
                (rest, stride) = (rest / length, stride * own);
            }
            let row = &all[from..from + own_columns];
            repeated.extend(row.iter().cycle().take(columns));
        }
        Some(repeated)
    }

    /// Scores before they are multiplied by a number, and that number.
    fn unscaled(self) -> (Var, f64) {
        let by = |function| self.operands(function, Var::number_of);
        if let Some(found) = by(Function::Mul) {
            return found;
        }
        match by(Function::Div) {
            Some((scores, by)) => (scores, 1.0 / by),
            None => (self, 1.0),
        }
    }

    /// q and k (B, H, T, D) of q·kᵀ.
    fn factors(&self, of: [usize; 4]) -> Option<[Var; 2]> {
        let product = match self.op() {
            Op::Reshape => self.inputs().pop()?,
            _ => self.clone(),
        };
        let Op::MatMul([false, is_turned]) = product.op() else {
            return None;
        };
        let [batch, heads, time, head_size] = of;
        let [left, right] = <[Var; 2]>::try_from(product.inputs()).ok()?;
        let columns = [batch, heads, head_size, time];
        let of_right = if is_turned { of } else { columns };
        let counts = |it: &Var, of: [usize; 4]| it.shape() == [of[0] * of[1], of[2], of[3]];
        if !counts(&left, of) || !counts(&right, of_right) {
            return None;
        }
        let keys = right.reshape(&of_right);
        let keys = if is_turned {
            keys
        } else {
            keys.transpose(-1, -2)
        };
        Some([left.reshape(&of), keys])
    }

    /// The value whose thirds along the last axis these are, or one that is made of them.
    fn whole_of(parts: &[Var; 3]) -> Var {
        let source = parts[0].inputs().pop();
        let shape = parts[0].shape();
        let is_part = |(at, part): (usize, &Var)| {
            let is_slice = matches!(part.op(), Op::Slice(2, start, 1) if start == at * shape[2]);
            is_slice && part.inputs().first().map(|it| it.id) == source.as_ref().map(|it| it.id)
        };
        match source.clone() {
            Some(whole)
                if whole.shape().last() == Some(&(3 * shape[2]))
                    && parts.iter().enumerate().all(is_part) =>
            {
                whole
            }
            _ => Var::concatenate(&[&parts[0], &parts[1], &parts[2]], -1),
        }
    }
}

/// A function of numbers, of those that make masks.
fn applied(function: Function, [a, b, c]: [f64; 3]) -> Option<f64> {
    Some(match function {
        Function::Add => a + b,
        Function::Sub => a - b,
        Function::Mul => a * b,
        Function::Div => a / b,
        Function::Less => f64::from(a < b),
        Function::LessEqual => f64::from(a <= b),
        Function::Equal => f64::from(a == b),
        Function::Where => [b, c][usize::from(a == 0.0)],
        Function::Neg => -a,
        Function::Abs => a.abs(),
        _ => return None,
    })
}
