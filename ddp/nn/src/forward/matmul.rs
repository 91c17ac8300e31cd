//! Matrix products. Those of attention become its operation.

use ddp_kernels::{Tensor, ops};

use super::operation::*;
use super::trace::broadcast;

impl Var {
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
        let of = [self, other];
        let has_rows = of.iter().any(|it| it.has_rows());
        if of_self.is_empty() && of_other.is_empty() && other.has_rows() {
            let expected = "a second matrix that is the same for all rows";
            let help = "make each row a matrix: reshape it to two axes";
            return self.refuse("matmul", &of, expected, help);
        }
        let both = broadcast(&of_self, &of_other).filter(|_| k == inner);
        let Some(both) = both else {
            let expected = format!(
                "as many rows of the second as columns of the first, {k}, and axes before of equal length or 1"
            );
            let help = "if the second is a weight of [out, in], pass weight.transpose(-1, -2)";
            return self.refuse("matmul", &of, &expected, help);
        };
        // Rows as the rows of one matrix, or as an axis before the matrices.
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
            let op = MatMul([false, is_turned]);
            let product = left.checked(op, &[&left, &right], vec![1, rows, n]);
            return product.named("matmul").reshape(&shape).named("matmul");
        }
        let (left, left_turned) = matrices(self, both, count(both));
        let (right, right_turned) = matrices(other, both, count(both));
        let op = MatMul([left_turned, right_turned]);
        let product = left.checked(op, &[&left, &right], vec![count(both), m, n]);
        product.named("matmul").reshape(&shape).named("matmul")
    }

    /// The value before its last two axes were exchanged, if they were.
    fn unturned(&self) -> (Var, bool) {
        if let Op::Permute(Permute(axes)) = self.op() {
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

impl Operation for MatMul {
    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        let ([left, right], a, b, d) = (self.0, &at.x[0], &at.x[1], at.d);
        let da = if left {
            at.like(0, MatMul([right, true]), &[b, d])
        } else {
            at.like(0, MatMul([false, !right]), &[d, b])
        };
        let db = if right {
            at.like(1, MatMul([true, left]), &[d, a])
        } else {
            at.like(1, MatMul([!left, false]), &[a, d])
        };
        vec![da, db]
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let turned = |x: &Tensor, by: bool| if by { x.t() } else { Ok(x.clone()) };
        let (a, b) = (turned(r.x[0], self.0[0])?, turned(r.x[1], self.0[1])?);
        let out = r.take(0)?;
        Ok(ops::addmm_into(&out, &out, &a, &b, 1.0, 0.0)?)
    }
}
