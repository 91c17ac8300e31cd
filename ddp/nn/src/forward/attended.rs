//! Attention that is written as a formula becomes the operation that computes it: scores and their
//! softmax are never in memory. Letters: B rows, H heads, T tokens, D columns of a head.

use ddp_kernels::ops::{self, Function};

use super::op::{Apply, Attention, Constant, Largest, MatMul, Numbers, Op, Slice, Sum};
use super::trace::{KnownMask, Var};

/// A score of at most this has the weight 0.
const HIDDEN: f64 = -1e4;
/// The most operations of a mask's formula.
const FORMULA_MAX: usize = 64;
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
        let (scores, mask) = self.softmax_of()?.unmasked(time)?;
        let (product, scale) = scores.unscaled();
        let [queries, keys] = product.factors(of)?;
        let causal = mask.is_some();
        let window = mask.map_or(Some(time), |mask| mask.window(time))?;
        let all = [&queries, &keys, values].map(|it| {
            let by_token = it.permute(&[0, 2, 1, 3]);
            by_token.reshape(&[batch, time, heads * head_size])
        });
        let qkv = Var::whole_of(&all);
        let attention = ops::Attention {
            time,
            heads,
            kv_heads: heads,
            head_size,
            causal,
            scale: Some(scale),
            window: Some(window).filter(|it| *it < time),
            cap: None,
        };
        let shape = vec![batch, time, heads * head_size];
        let y = qkv.push(Attention(attention), &[&qkv], shape);
        let by_head = y.reshape(&[batch, time, heads, head_size]);
        Some(by_head.permute(&[0, 2, 1, 3]))
    }

    /// What this is the softmax of, over the last axis.
    fn softmax_of(&self) -> Option<Var> {
        let over_last = |is_sum: bool| {
            move |it: &Var| {
                let it = if let Op::Stop(_) = it.op() {
                    it.inputs().pop()?
                } else {
                    it.clone()
                };
                let op = it.op();
                let (Op::Sum(Sum(axes)) | Op::Largest(Largest(axes))) = &op else {
                    return None;
                };
                let fits = matches!(op, Op::Sum(_)) == is_sum && *axes == [it.rank() - 1];
                it.inputs().pop().filter(|_| fits)
            }
        };
        let (exp, summed) = self.operands(Function::Div, over_last(true))?;
        let centred = exp.operand(Function::Exp)?;
        let (scores, of) = centred.operands(Function::Sub, over_last(false))?;
        (exp.id == summed.id && scores.id == of.id).then_some(scores)
    }

    /// Scores before a mask, and the mask. None for one that is not made of numbers alone.
    fn unmasked(self, time: usize) -> Option<(Var, Option<Mask>)> {
        let of_numbers = |it: &Var| {
            let square = it.square_of(time)?;
            let is_short = square.is_shorter(&mut FORMULA_MAX.clone());
            square.run(0, 1).filter(|_| is_short).map(|_| square)
        };
        let (scores, square, shows) = if self.operand(Function::Where).is_some() {
            let [condition, yes, no] = <[Var; 3]>::try_from(self.inputs()).ok()?;
            let hides = |it: &Var| it.number_of().is_some_and(|it| it <= HIDDEN);
            let shows = hides(&no);
            let scores = if shows {
                yes
            } else {
                Some(no).filter(|_| hides(&yes))?
            };
            (scores, of_numbers(&condition)?, Some(shows))
        } else if self.operand(Function::Add).is_some() {
            let (scores, square) = self.operands(Function::Add, of_numbers)?;
            (scores, square, None)
        } else {
            return Some((self, None));
        };
        Some((scores, Some(Mask { square, shows })))
    }

    /// The value of shape (T, T) that this repeats.
    fn square_of(&self, time: usize) -> Option<Var> {
        let mut square = self.clone();
        let is_last = |it: &Var| it.shape().ends_with(&[time, time]);
        while is_last(&square)
            && let Op::Reshape(_) | Op::Expand(_) = square.op()
        {
            square = square.inputs().pop()?;
        }
        let count: usize = square.shape().iter().product();
        (is_last(&square) && count == time * time).then_some(square)
    }

    /// Whether its formula, written out, has at most so many operations.
    fn is_shorter(&self, left: &mut usize) -> bool {
        *left = left.saturating_sub(1);
        *left > 0 && self.inputs().iter().all(|it| it.is_shorter(left))
    }

    /// Whether both are the same formula of the same numbers.
    fn is_alike(&self, other: &Var) -> bool {
        let is_same = match (self.op(), other.op()) {
            (Op::Numbers(Numbers(own)), Op::Numbers(Numbers(other))) => own == other,
            (Op::Constant(own), Op::Constant(other)) => own.0.to_bits() == other.0.to_bits(),
            (Op::Apply(own), Op::Apply(other)) => own.0 == other.0,
            (Op::Slice(Slice(a, b, c)), Op::Slice(Slice(x, y, z))) => [a, b, c] == [x, y, z],
            (Op::Stop(_), Op::Stop(_)) => true,
            (Op::Reshape(_), Op::Reshape(_)) | (Op::Expand(_), Op::Expand(_)) => true,
            _ => false,
        };
        let (inputs, others) = (self.inputs(), other.inputs());
        let mut pairs = inputs.iter().zip(&others);
        is_same && self.shape() == other.shape() && pairs.all(|(one, other)| one.is_alike(other))
    }

    /// So many elements from one on, in row-major order, all in one row, if they follow from
    /// numbers alone.
    fn run(&self, from: usize, count: usize) -> Option<Vec<f64>> {
        let shape = self.shape();
        let columns = shape.last().copied().unwrap_or(1);
        let (row, column) = (from / columns, from % columns);
        if column + count > columns {
            return None;
        }
        let (op, mut inputs) = (self.op(), self.inputs());
        if let Op::Apply(Apply(function)) = op {
            let inputs = inputs.into_iter();
            let all: Option<Vec<_>> = inputs.map(|it| it.run_of(&shape, from, count)).collect();
            let all = all?;
            let of = |at: usize| [0, 1, 2].map(|it| all.get(it).map_or(0.0, |it| it[at]));
            return (0..count).map(|at| applied(function, of(at))).collect();
        }
        if let Op::Constant(Constant(value)) = op {
            return Some(vec![value; count]);
        }
        if let Op::Numbers(Numbers(values)) = op {
            return Some(values[from..from + count].to_vec());
        }
        let of = inputs.pop()?;
        if let Op::Stop(_) | Op::Reshape(_) = op {
            return of.run(from, count);
        }
        if let Op::Expand(_) = op {
            return of.run_of(&shape, from, count);
        }
        let Op::Slice(Slice(axis, start, step)) = op else {
            return None;
        };
        let whole = of.shape();
        if axis + 1 == shape.len() {
            let from = row * whole[axis] + start + column;
            return (step == 1).then(|| of.run(from, count))?;
        }
        let inner: usize = shape[axis + 1..shape.len() - 1].iter().product();
        let (outer, place) = (row / inner / shape[axis], row / inner % shape[axis]);
        let row = (outer * whole[axis] + start + place * step) * inner + row % inner;
        of.run(row * columns + column, count)
    }

    /// The same of this broadcast to a shape.
    fn run_of(&self, shape: &[usize], from: usize, count: usize) -> Option<Vec<f64>> {
        let own = self.shape();
        let (Some((&columns, before)), true) = (shape.split_last(), own != shape) else {
            return self.run(from, count);
        };
        let (mut rest, mut row, mut rows) = (from / columns, 0, 1);
        for (own, length) in own.iter().rev().skip(1).zip(before.iter().rev()) {
            row += rest % length % own * rows;
            (rest, rows) = (rest / length, rows * own);
        }
        match own.last() {
            Some(&own) if own == columns => self.run(row * columns + from % columns, count),
            _ => Some(vec![self.run(row, 1)?[0]; count]),
        }
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
        let product = if let Op::Reshape(_) = self.op() {
            self.inputs().pop()?
        } else {
            self.clone()
        };
        let Op::MatMul(MatMul([false, is_turned])) = product.op() else {
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
            let is_slice =
                matches!(part.op(), Op::Slice(Slice(2, start, 1)) if start == at * shape[2]);
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

/// What hides scores.
struct Mask {
    /// Of shape (T, T), made of numbers.
    square: Var,
    /// Whether it is not 0 for scores that are shown, or for hidden ones; None if it is added.
    shows: Option<bool>,
}

impl Mask {
    /// How many tokens the last one sees, if each sees so many at most, itself and those right
    /// before it. Layers have the same mask.
    fn window(&self, time: usize) -> Option<usize> {
        let known = self.square.trace.borrow().masks.clone();
        let is_it = |it: &&KnownMask| {
            it.shows == self.shows && self.square.at(it.square).is_alike(&self.square)
        };
        if let Some(known) = known.iter().find(is_it) {
            return known.window;
        }
        let window = self.computed_window(time);
        self.square.trace.borrow_mut().masks.push(KnownMask {
            square: self.square.id,
            shows: self.shows,
            window,
        });
        window
    }

    fn computed_window(&self, time: usize) -> Option<usize> {
        let is_shown = |value: &f64| match self.shows {
            Some(shows) => Some((*value != 0.0) == shows),
            None if *value == 0.0 => Some(true),
            None => (*value <= HIDDEN).then_some(false),
        };
        let row = |own: usize| -> Option<Vec<bool>> {
            let row = self.square.run(own * time, time)?;
            row.iter().map(is_shown).collect()
        };
        let window = row(time - 1)?.into_iter().filter(|it| *it).count();
        let is_causal = (0..time).all(|own| {
            let in_window = |other: usize| other <= own && own < other + window;
            row(own).is_some_and(|row| row.into_iter().eq((0..time).map(in_window)))
        });
        (window > 0 && is_causal).then_some(window)
    }
}

/// A function of numbers, of those that make masks.
fn applied(function: Function, [a, b, c]: [f64; 3]) -> Option<f64> {
    use Function::*;
    Some(match function {
        Add => a + b,
        Sub => a - b,
        Mul => a * b,
        Div => a / b,
        Min => a.min(b),
        Max => a.max(b),
        Less => f64::from(a < b),
        LessEqual => f64::from(a <= b),
        Equal => f64::from(a == b),
        Where => [b, c][usize::from(a == 0.0)],
        Neg => -a,
        Abs => a.abs(),
        Exp | Log | Sqrt | Rsqrt | Tanh | Sigmoid | Round | Activation(_) | Gradient(_) => {
            return None;
        }
    })
}
