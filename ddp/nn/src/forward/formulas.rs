//! What formulas are made of: operators and methods of `Var`. Those of shapes are in `shapes.rs`.

use std::ops::{Add, Div, Mul, Neg, Sub};

use ddp_kernels::ops::{Activation, Function, Norm};

use super::gate::Gate;
use super::rope::Rope;
use super::trace::{HeadOf, Kind, Op, Var, broadcast};

impl Var {
    /// A function of elements, with NumPy's broadcasting. A norm's formula becomes a norm.
    #[track_caller]
    pub(super) fn apply(function: Function, values: &[&Var]) -> Var {
        let first = values[0];
        let rank = values.iter().map(|it| it.rank()).max().unwrap_or(0);
        if !Var::rows_meet(values, rank) {
            return first.refuse_rows(&Op::Apply(function).name(), values);
        }
        let mut shape = first.shape();
        for other in &values[1..] {
            let Some(both) = broadcast(&shape, &other.shape()) else {
                let name = Op::Apply(function).name();
                let help =
                    "axes are compared from the last on: reshape, or give an axis of length 1";
                return first.refuse(&name, values, "equal lengths, or 1", help);
            };
            shape = both;
        }
        let value = first.checked(Op::Apply(function), values, shape);
        value.as_norm().unwrap_or(value)
    }

    /// The length of an axis; -1 is the last one.
    #[track_caller]
    pub fn size(&self, axis: isize) -> usize {
        self.axis("size", axis).map_or(1, |axis| self.shape()[axis])
    }

    /// The smaller of both; NaN if one is.
    #[track_caller]
    pub fn minimum(&self, other: &Var) -> Var {
        Var::apply(Function::Min, &[self, other])
    }

    /// The larger of both; NaN if one is.
    #[track_caller]
    pub fn maximum(&self, other: &Var) -> Var {
        Var::apply(Function::Max, &[self, other])
    }

    /// The value, at least `low` and at most `high`, which may be infinite; NaN stays. The gradient
    /// passes where it is not outside of both, as `torch.clamp`'s.
    #[track_caller]
    pub fn clamp(&self, low: f64, high: f64) -> Var {
        let [low, high] = [low, high].map(|bound| self.constant(bound));
        let is_inside = low.less_equal(self) * self.less_equal(&high);
        let bounded = self.maximum(&low).minimum(&high).without_gradient();
        is_inside.select(self, &bounded).named("clamp")
    }

    /// 1 where this is less, else 0. Comparisons have no gradient.
    #[track_caller]
    pub fn less(&self, other: &Var) -> Var {
        Var::apply(Function::Less, &[self, other])
    }

    /// 1 where this is less or equal, else 0.
    #[track_caller]
    pub fn less_equal(&self, other: &Var) -> Var {
        Var::apply(Function::LessEqual, &[self, other])
    }

    /// 1 where both are equal, else 0.
    #[track_caller]
    pub fn equal(&self, other: &Var) -> Var {
        Var::apply(Function::Equal, &[self, other])
    }

    /// `yes` where this is not 0, else `no`.
    #[track_caller]
    pub fn select(&self, yes: &Var, no: &Var) -> Var {
        Var::apply(Function::Where, &[self, yes, no])
    }

    /// A number of the same trace, for `select`, `maximum` and the like.
    #[track_caller]
    pub fn number(&self, value: f64) -> Var {
        self.constant(value)
    }

    /// xᵖ. Whole powers are products, ±0.5 roots; others are e^(p ln x), NaN below 0.
    #[track_caller]
    pub fn pow(&self, power: f64) -> Var {
        let value = self.power(power);
        let is_product = power.fract() == 0.0 && (-1.0..=32.0).contains(&power);
        if is_product || power.abs() == 0.5 {
            return value;
        }
        // The derivative of e^(p ln x) would be 0·∞ at 0, that of 1 / xᵖ ∞·0.
        let slope = self.power(power - 1.0) * power;
        let of = [&value, self, &slope];
        self.checked(Op::Slope, &of, self.shape()).named("pow")
    }

    /// xᵖ without a written derivative: that of its parts is wrong where one is 0 or infinite.
    #[track_caller]
    fn power(&self, power: f64) -> Var {
        if power == 0.5 {
            return self.sqrt();
        }
        if power == -0.5 {
            return self.rsqrt();
        }
        if power < 0.0 {
            return 1.0 / self.power(-power);
        }
        if power.fract() != 0.0 {
            return (self.log() * power).exp();
        }
        let (mut left, mut square, mut result) = (power as u64, self.clone(), None);
        loop {
            if left % 2 == 1 {
                result = Some(match result {
                    Some(product) => product * &square,
                    None => square.clone(),
                });
            }
            left /= 2;
            if left == 0 {
                return result.unwrap_or_else(|| self.filled(1.0, &self.shape()));
            }
            square = &square * &square;
        }
    }

    /// The sum over an axis, which stays with length 1.
    #[track_caller]
    pub fn sum(&self, axis: isize) -> Var {
        match self.axis("sum", axis) {
            Some(axis) => self.reduce(Op::Sum(vec![axis])),
            None => self.clone(),
        }
    }

    /// The mean over an axis, which stays with length 1.
    #[track_caller]
    pub fn mean(&self, axis: isize) -> Var {
        self.axis("mean", axis);
        let sum = self.sum(axis).named("mean");
        (sum * (1.0 / self.size(axis) as f64)).named("mean")
    }

    /// The largest over an axis, which stays with length 1; NaN if one is. Of equal ones each gets
    /// an equal part of the gradient.
    #[track_caller]
    pub fn largest(&self, axis: isize) -> Var {
        match self.axis("largest", axis) {
            Some(axis) => self.reduce(Op::Largest(vec![axis])),
            None => self.clone(),
        }
    }

    /// The smallest over an axis, as `largest`.
    #[track_caller]
    pub fn smallest(&self, axis: isize) -> Var {
        self.axis("smallest", axis);
        (-(-self).largest(axis).named("smallest")).named("smallest")
    }

    #[track_caller]
    pub(super) fn reduce(&self, op: Op) -> Var {
        let mut shape = self.shape();
        let (Op::Sum(axes) | Op::Largest(axes)) = &op else {
            return self.clone();
        };
        axes.iter().for_each(|&axis| shape[axis] = 1);
        // Sums of nothing.
        let is_empty = axes.iter().any(|&axis| self.shape()[axis] == 0);
        if is_empty && !shape.contains(&0) {
            if matches!(op, Op::Sum(_)) {
                return self.filled(0.0, &shape);
            }
            let help = "reduce axes that have elements";
            return self.refuse(&op.name(), &[self], "an axis that is not empty", help);
        }
        self.push(op, &[self], shape)
    }

    /// e^x divided by its sum over an axis.
    #[track_caller]
    pub fn softmax(&self, axis: isize) -> Var {
        self.axis("softmax", axis);
        let largest = self.largest(axis).named("softmax");
        let exp = (self - largest.without_gradient()).exp();
        (&exp / exp.sum(axis)).named("softmax")
    }

    /// The logarithm of the softmax.
    #[track_caller]
    pub fn log_softmax(&self, axis: isize) -> Var {
        self.axis("log_softmax", axis);
        let largest = self.largest(axis).named("log_softmax");
        let centred = self - largest.without_gradient();
        (&centred - centred.exp().sum(axis).log()).named("log_softmax")
    }

    /// The same value, through which no gradient flows.
    pub fn without_gradient(&self) -> Var {
        self.push(Op::Stop, &[self], self.shape())
    }

    /// The matrix product over the last two axes, with NumPy's broadcasting of those before.
    #[track_caller]
    pub fn matmul(&self, other: &Var) -> Var {
        let ([.., _, k], [.., inner, _]) = (&self.shape()[..], &other.shape()[..]) else {
            let help = "reshape a vector to a matrix";
            return self.refuse("matmul", &[self, other], "two axes or more each", help);
        };
        let (k, inner) = (*k, *inner);
        let batch = |value: &Var| value.shape()[..value.rank() - 2].to_vec();
        let (of_self, of_other) = (batch(self), batch(other));
        let both = broadcast(&of_self, &of_other).filter(|_| k == inner);
        let Some(both) = both else {
            let expected = format!(
                "as many rows of the second as columns of the first, {k}, and axes before of equal length or 1"
            );
            let help = "if the second is a weight of [out, in], pass weight.transpose(-1, -2)";
            return self.refuse("matmul", &[self, other], &expected, help);
        };
        // Rows as the rows of one matrix, or as an axis before the matrices.
        let of = [self, other];
        let has_rows = of.iter().any(|it| it.has_rows());
        if both.is_empty() && other.has_rows() {
            let expected = "a second matrix that is the same for all rows";
            let help = "make each row a matrix: reshape it to two axes";
            return self.refuse("matmul", &of, expected, help);
        }
        if !both.is_empty() && !Var::rows_meet(&of, both.len() + 2) {
            return self.refuse_rows("matmul", &of);
        }
        self.with_all_axes(has_rows, || self.product(other, &both))
    }

    /// The matrix product, whose axes before the matrices are `both`.
    #[track_caller]
    fn product(&self, other: &Var, both: &[usize]) -> Var {
        if let Some(attended) = self.as_attention(other) {
            return attended.named("matmul");
        }
        let (own, others) = (self.shape(), other.shape());
        let ([of_self @ .., m, k], [of_other @ .., _, n]) = (&own[..], &others[..]) else {
            return self.clone();
        };
        let (m, k, n) = (*m, *k, *n);
        let count = |batch: &[usize]| batch.iter().product::<usize>();
        let shape = [both, &[m, n]].concat();
        let matrices = |value: &Var, batch: &[usize], count: usize| {
            let (value, is_turned) = value.unturned();
            let last = &value.shape()[value.rank() - 2..];
            let all = value.expand(&[batch, last].concat());
            (all.reshape(&[count, last[0], last[1]]), is_turned)
        };
        // One matrix for all of a batch: the rows of the batch are multiplied at once.
        if count(of_other) == 1 && of_other.len() <= of_self.len() {
            let rows = count(of_self) * m;
            let (right, is_turned) = matrices(other, of_other, 1);
            let left = self.reshape(&[1, rows, k]);
            let op = Op::MatMul([false, is_turned]);
            let product = left.checked(op, &[&left, &right], vec![1, rows, n]);
            return product.named("matmul").reshape(&shape).named("matmul");
        }
        let (left, left_turned) = matrices(self, both, count(both));
        let (right, right_turned) = matrices(other, both, count(both));
        let op = Op::MatMul([left_turned, right_turned]);
        let product = left.checked(op, &[&left, &right], vec![count(both), m, n]);
        product.named("matmul").reshape(&shape).named("matmul")
    }

    /// The value before its last two axes were exchanged, if they were.
    fn unturned(&self) -> (Var, bool) {
        if let Op::Permute(axes) = self.op() {
            let rank = axes.len();
            let turned = |at: usize| match at {
                at if at + 2 == rank => rank - 1,
                at if at + 1 == rank => rank - 2,
                at => at,
            };
            if (0..rank).all(|at| axes[at] == turned(at)) {
                return (self.inputs()[0].clone(), true);
            }
        }
        (self.clone(), false)
    }
}

macro_rules! functions {
    ($($(#[$meta:meta])* $name:ident $Function:ident;)*) => {
        impl Var {
            $($(#[$meta])*
            #[track_caller]
            pub fn $name(&self) -> Var {
                Var::apply(Function::$Function, &[self])
            })*
        }
    };
}
functions! {
    /// |x|
    abs Abs;
    /// eˣ
    exp Exp;
    /// The natural logarithm.
    log Log;
    /// √x
    sqrt Sqrt;
    /// 1 / √x
    rsqrt Rsqrt;
    /// The hyperbolic tangent.
    tanh Tanh;
    /// 1 / (1 + e⁻ˣ)
    sigmoid Sigmoid;
    /// x / (1 + e⁻ˣ)
    silu Silu;
}

/// Operations with kernels of their own.
impl Var {
    /// x·Wᵀ + b on the last axis, of W (outputs, inputs) and b (outputs).
    #[track_caller]
    pub fn linear(&self, weight: &Var, bias: Option<&Var>) -> Var {
        let (mut shape, of_weight) = (self.shape(), weight.shape());
        let outputs = of_weight.first().copied().unwrap_or(0);
        let fits_bias = bias.is_none_or(|bias| bias.shape() == [outputs]);
        let has_rows = [weight].into_iter().chain(bias).any(|it| it.has_rows());
        let fits = shape.len() >= 2 && of_weight.len() == 2 && shape.last() == of_weight.last();
        if !fits || !fits_bias || has_rows {
            let operands: Vec<&Var> = [self, weight].into_iter().chain(bias).collect();
            let expected = "(…, inputs), a weight of (outputs, inputs) and a bias of (outputs)";
            let help = "weights are [outputs, inputs], as in torch.nn.Linear";
            return self.refuse("linear", &operands, expected, help);
        }
        let last = shape.len() - 1;
        shape[last] = outputs;
        let inputs: Vec<&Var> = [self, weight].into_iter().chain(bias).collect();
        self.checked(Op::Linear, &inputs, shape)
    }

    /// An activation. A linear layer before it applies it.
    #[track_caller]
    pub fn activate(&self, activation: Activation) -> Var {
        self.push(Op::Activate(activation), &[self], self.shape())
    }

    /// x·Φ(x), exact
    #[track_caller]
    pub fn gelu(&self) -> Var {
        self.applied(Activation::Gelu, Function::Gelu)
    }

    /// `gelu` approximated with tanh
    #[track_caller]
    pub fn gelu_tanh(&self) -> Var {
        self.applied(Activation::GeluTanh, Function::GeluTanh)
    }

    /// max(x, 0)
    #[track_caller]
    pub fn relu(&self) -> Var {
        self.applied(Activation::Relu, Function::Relu)
    }

    /// By a linear layer, or within a chain.
    #[track_caller]
    fn applied(&self, activation: Activation, function: Function) -> Var {
        match self.op() {
            Op::Linear => self.activate(activation),
            _ => Var::apply(function, &[self]),
        }
    }

    /// A norm of the last axis, times the weight, plus the bias.
    pub(crate) fn norm(&self, norm: Norm, epsilon: f64, weight: &Var, bias: Option<&Var>) -> Var {
        let shape = self.shape();
        let columns = shape.last().copied().unwrap_or(1).max(1);
        let rows = shape.iter().product::<usize>() / columns;
        let inputs: Vec<&Var> = [self, weight].into_iter().chain(bias).collect();
        let y = self.push(Op::Norm(norm, epsilon), &inputs, shape);
        y.part(0, Kind::Sums, vec![rows, norm.statistics()]);
        y
    }

    /// f(gate)·up, where the first half of the last axis is the gate.
    #[track_caller]
    pub fn gated(&self, gate: Gate) -> Var {
        let mut shape = self.shape();
        let has_columns = self.rank() > usize::from(self.has_rows());
        let columns = shape.last_mut().filter(|_| has_columns);
        let Some(columns) = columns.filter(|columns| columns.is_multiple_of(2)) else {
            let help = "make both with one linear layer";
            return self.refuse("gated", &[self], "an even last axis: gate and up", help);
        };
        *columns /= 2;
        self.push(Op::Gated(gate), &[self], shape)
    }

    /// The first heads of (B, T, …), turned by their positions: how many, and their columns.
    pub(crate) fn rope(&self, rope: &Rope, heads: [usize; 2]) -> Var {
        self.push(Op::Rope(rope.clone(), heads, false), &[self], self.shape())
    }

    /// Rows of `table` (V, C) for these tokens (B, T), plus those of positions.
    pub(crate) fn rows_of(&self, table: &Var, positions: Option<&Var>, untrained: &[usize]) -> Var {
        let shape = [&self.shape()[..], &table.shape()[1..]].concat();
        let tokens = self.as_tokens();
        let inputs: Vec<&Var> = [&tokens, table].into_iter().chain(positions).collect();
        self.checked(Op::Embedding(untrained.into()), &inputs, shape)
    }

    /// A linear layer that the loss may run, to whose output, below `cap`, `mask` is added.
    pub(crate) fn as_head(&self, mask: Option<&Var>, cap: f64) -> Var {
        let inputs: Vec<Var> = self.inputs().into_iter().chain(mask.cloned()).collect();
        let head = match (mask, self.op()) {
            (_, Op::Linear) if cap != 0.0 => {
                let capped = (self / cap).tanh() * cap;
                mask.map_or(capped.clone(), |mask| capped + mask)
            }
            (Some(_), Op::Linear) => {
                let inputs: Vec<&Var> = inputs.iter().collect();
                self.push(Op::Linear, &inputs, self.shape())
            }
            _ => self.clone(),
        };
        let of = inputs.iter().map(|it| it.id).collect();
        self.trace.borrow_mut().head = Some((head.id, of, cap));
        head
    }

    /// This output as `as_head` notes it; with `by_position` also a linear layer of positions whose
    /// weight nothing else reads.
    pub(super) fn head(&self, by_position: bool) -> Option<HeadOf> {
        let noted = self.trace.borrow_mut().head.take();
        let ([_, weight], Op::Linear) = (&self.inputs()[..], self.op()) else {
            return noted;
        };
        let trace = self.trace.borrow();
        let inputs = trace.nodes.iter().flat_map(|node| &node.inputs);
        let is_head = by_position
            && matches!(weight.op(), Op::Parameter(_))
            && trace.nodes[self.id].shape.len() > 2
            && inputs.filter(|it| **it == weight.id).count() == 1;
        let of = || (self.id, trace.nodes[self.id].inputs.clone(), 0.0);
        noted.or_else(|| is_head.then(of))
    }
}

macro_rules! operators {
    ($($Trait:ident $method:ident;)*) => {$(
        operators! { @ $Trait $method: &Var, &Var; &Var, Var; Var, &Var; Var, Var; }
        impl $Trait<f64> for &Var {
            type Output = Var;
            #[track_caller]
            fn $method(self, other: f64) -> Var {
                Var::apply(Function::$Trait, &[self, &self.constant(other)])
            }
        }
        impl $Trait<f64> for Var {
            type Output = Var;
            #[track_caller]
            fn $method(self, other: f64) -> Var {
                Var::apply(Function::$Trait, &[&self, &self.constant(other)])
            }
        }
        impl $Trait<&Var> for f64 {
            type Output = Var;
            #[track_caller]
            fn $method(self, other: &Var) -> Var {
                Var::apply(Function::$Trait, &[&other.constant(self), other])
            }
        }
        impl $Trait<Var> for f64 {
            type Output = Var;
            #[track_caller]
            fn $method(self, other: Var) -> Var {
                Var::apply(Function::$Trait, &[&other.constant(self), &other])
            }
        }
    )*};
    (@ $Trait:ident $method:ident: $($Left:ty, $Right:ty;)*) => {$(
        impl $Trait<$Right> for $Left {
            type Output = Var;
            #[track_caller]
            fn $method(self, other: $Right) -> Var {
                #[allow(clippy::needless_borrow, clippy::borrow_deref_ref)]
                Var::apply(Function::$Trait, &[&self, &other])
            }
        }
    )*};
}
operators! {
    Add add;
    Sub sub;
    Mul mul;
    Div div;
}

impl Neg for &Var {
    type Output = Var;
    #[track_caller]
    fn neg(self) -> Var {
        Var::apply(Function::Neg, &[self])
    }
}

impl Neg for Var {
    type Output = Var;
    #[track_caller]
    fn neg(self) -> Var {
        Var::apply(Function::Neg, &[&self])
    }
}
