//! What tests of models ask of a traced module.

use super::Traced;
use super::op::Reshape;
use super::trace::Var;

impl Traced {
    /// How many operations of the latest plan run forward and backward.
    pub(crate) fn run_counts(&self) -> [usize; 2] {
        let plans = self.plans.borrow();
        let plan = &plans.last().expect("a forward has run").plan;
        [&plan.forward, &plan.backward].map(Vec::len)
    }
}

impl Var {
    /// The same value, with which nothing is fused.
    pub(crate) fn apart(&self) -> Var {
        let longer = [&self.shape()[..], &[1]].concat();
        let apart = self.push(Reshape, &[self], longer);
        apart.push(Reshape, &[&apart], self.shape())
    }
}
