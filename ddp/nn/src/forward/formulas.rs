//! Elementwise operations: operators and methods of `Var`, and their derivatives.

use std::ops::{Add, Div, Mul, Neg, Sub};

use ddp_kernels::ops::{self, ChainStep, Function};

use super::kinds::mixed;
use super::operation::*;
use super::trace::broadcast;

impl Var {
    /// A function of elements, with NumPy's broadcasting. A norm's formula becomes a norm.
    #[track_caller]
    pub(super) fn apply(function: Function, values: &[&Var]) -> Var {
        let first = values[0];
        let rank = values.iter().map(|it| it.rank()).max().unwrap_or(0);
        if !Var::rows_meet(values, rank) {
            return first.refuse_rows(&Apply(function).name(), values);
        }
        let mut shape = first.shape();
        for other in &values[1..] {
            let Some(both) = broadcast(&shape, &other.shape()) else {
                let name = Apply(function).name();
                let help =
                    "axes are compared from the last on: reshape, or give an axis of length 1";
                return first.refuse(&name, values, "equal lengths, or 1", help);
            };
            shape = both;
        }
        let value = first.checked(Apply(function), values, shape);
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
        self.checked(Slope, &of, self.shape()).named("pow")
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

    /// The same value, through which no gradient flows.
    pub fn without_gradient(&self) -> Var {
        self.push(Stop, &[self], self.shape())
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

impl Operation for Apply {
    fn name(&self) -> String {
        self.0.name().to_string()
    }

    fn kind(&self, of: &[Option<NumberKind>]) -> Option<NumberKind> {
        // The condition is not among what it gives.
        (self.0 == Function::Where).then(|| mixed(&of[1..]))
    }

    fn step(&self, of: [usize; 3]) -> Option<ChainStep> {
        Some(ChainStep::Apply(self.0, of))
    }

    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        let reduced = |(d, x): (Option<Var>, &Var)| Some(d?.reduced_to(&x.shape()));
        slopes(self.0, at)
            .into_iter()
            .zip(at.x)
            .map(reduced)
            .collect()
    }
}

impl Operation for Stop {}

impl Operation for Slope {
    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        let of = |input: usize| (input % 2 == 1).then(|| at.d * &at.x[input + 1]);
        (0..at.x.len()).map(of).collect()
    }
}

impl Operation for Cast {
    fn kind(&self, _of: &[Option<NumberKind>]) -> Option<NumberKind> {
        Some(self.0)
    }

    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        vec![(self.0 == NumberKind::LayerDtype).then(|| at.d.clone())]
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        Ok(ops::cast_into(&r.take(0)?, r.x[0])?)
    }
}

/// The gradients of a function, before what was broadcast is summed.
fn slopes(function: Function, &Backward { x, y, d }: &Backward<'_>) -> Vec<Option<Var>> {
    use Function::*;
    // Of equal ones each gets half, as in PyTorch. Where one is NaN, both get all.
    let share = |greater: &Var, less: &Var| {
        let half = less.equal(greater).select(&(d * 0.5), d);
        Some(greater.less(less).select(&d.constant(0.0), &half))
    };
    let one = match function {
        Add => return vec![Some(d.clone()), Some(d.clone())],
        Sub => return vec![Some(d.clone()), Some(-d)],
        Mul => return vec![Some(d * &x[1]), Some(d * &x[0])],
        Div => {
            let of_left = d / &x[1];
            let of_right = -(&of_left * y);
            return vec![Some(of_left), Some(of_right)];
        }
        Min => return vec![share(&x[1], &x[0]), share(&x[0], &x[1])],
        Max => return vec![share(&x[0], &x[1]), share(&x[1], &x[0])],
        Where => {
            let zero = d.constant(0.0);
            let [yes, no] = [x[0].select(d, &zero), x[0].select(&zero, d)];
            return vec![None, Some(yes), Some(no)];
        }
        Neg => Some(-d),
        Abs => {
            let zero = d.constant(0.0);
            Some(d * (zero.less(&x[0]) - x[0].less(&zero)))
        }
        Exp => Some(d * y),
        Log => Some(d / &x[0]),
        Sqrt => Some(d * 0.5 / y),
        Rsqrt => Some(d * -0.5 * (y * y * y)),
        Tanh => Some(d * (1.0 - y * y)),
        Sigmoid => Some(d * (y * (1.0 - y))),
        Activation(activation) => {
            let kept = if activation.keeps_input() { &x[0] } else { y };
            Some(Var::apply(Gradient(activation), &[d, kept]))
        }
        // No gradient flows through comparisons, and gradients are not differentiated
        // again.
        Less | LessEqual | Equal | Gradient(_) | Round => None,
    };
    let mut all = vec![None; x.len()];
    all[0] = one;
    all
}
