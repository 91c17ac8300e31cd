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
    /// `softmax(q·kᵀ · scale)`, perhaps with a causal mask.
    pub(super) fn as_attention(&self, values: &Var) -> Option<Var> {
        let of = <[usize; 4]>::try_from(values.shape()).ok()?;
        let [batch, heads, time, head_size] = of;
        let fits = (1..=HEAD_SIZE_MAX).contains(&head_size);
        if !fits || self.shape() != [batch, heads, time, time] {
            return None;
        }
        let (scores, causal) = self.softmax_of()?.unmasked(time)?;
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
            window: None,
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

    /// Scores before a causal mask, and whether there is one. None for another mask.
    fn unmasked(self, time: usize) -> Option<(Var, bool)> {
        match self.op() {
            Op::Apply(Function::Where) => {
                let [condition, yes, no] = <[Var; 3]>::try_from(self.inputs()).ok()?;
                let hides = |it: &Var| it.number_of().is_some_and(|it| it <= HIDDEN);
                let shows = hides(&no);
                let scores = if shows {
                    yes
                } else {
                    Some(no).filter(|_| hides(&yes))?
                };
                condition.is_causal(time, shows).then_some((scores, true))
            }
            Op::Apply(Function::Add) => {
                let hides = |it: &Var| it.hides_later(time).then_some(());
                Some((self.operands(Function::Add, hides)?.0, true))
            }
            _ => Some((self, false)),
        }
    }

    /// Whether this is 0 for what a token may see, and hides what comes after it.
    fn hides_later(&self, time: usize) -> bool {
        if let Some((later, by)) = self.operands(Function::Mul, Var::number_of) {
            // 0 · ∞ is NaN.
            return by <= HIDDEN && by.is_finite() && later.is_causal(time, false);
        }
        let Some(Op::Numbers(values)) = self.square_of(time).map(|it| it.op()) else {
            return false;
        };
        let is_right = |(at, value): (usize, &f64)| {
            let is_seen = at % time <= at / time;
            is_seen && *value == 0.0 || !is_seen && *value <= HIDDEN
        };
        values.iter().enumerate().all(is_right)
    }

    /// Whether this is not 0 where a token is not after another one (`shows`), or where it is.
    fn is_causal(&self, time: usize, shows: bool) -> bool {
        let Some(square) = self.square_of(time) else {
            return false;
        };
        match square.op() {
            Op::Apply(function @ (Function::LessEqual | Function::Less)) => {
                let inputs = square.inputs();
                let [less, more] = [&inputs[0], &inputs[1]];
                let [own, other] = [[time, 1], [1, time]];
                match (function, shows) {
                    (Function::LessEqual, true) => less.counts(other) && more.counts(own),
                    (Function::Less, false) => less.counts(own) && more.counts(other),
                    _ => false,
                }
            }
            Op::Numbers(values) => {
                let mut all = values.iter().enumerate();
                all.all(|(at, value)| (*value != 0.0) == ((at % time <= at / time) == shows))
            }
            _ => false,
        }
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

    /// Whether this counts 0, 1, 2 and so on along the last two axes, which have these lengths.
    fn counts(&self, lengths: [usize; 2]) -> bool {
        let mut of = self.clone();
        while let Op::Reshape = of.op() {
            of = of.inputs().pop().unwrap_or(of);
        }
        let own = self.shape();
        let (before, last) = own.split_at(own.len().saturating_sub(2));
        let is_row = lengths[0] == 1 && own == lengths[1..];
        let is_shaped = (before.iter().all(|it| *it == 1) && last == lengths) || is_row;
        let Op::Numbers(values) = of.op() else {
            return false;
        };
        is_shaped && values.iter().enumerate().all(|(at, it)| at as f64 == *it)
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
