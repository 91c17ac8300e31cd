//! Dropout.

use ddp_kernels::ops::{self, DropoutKey};

use super::operation::*;
use super::scope::Scope;

impl Scope<'_> {
    /// Drops elements of `x` in training; at most once for each name.
    #[track_caller]
    pub(crate) fn drop_elements(&mut self, x: &Var, probability: f64) -> Var {
        if !(0.0..1.0).contains(&probability) {
            let expected =
                format!("a probability of at least 0 and less than 1, not {probability}");
            return x.refuse("dropout", &[x], &expected, "use 0 to drop nothing");
        }
        if let Some(build) = &mut self.build {
            let number = build.random_layer();
            let before = self.declared.numbers.insert(self.prefix.clone(), number);
            if before.is_some() {
                let help = "give each its own: with one name they drop the same elements";
                return x.refuse("dropout", &[x], "a name that no other dropout has", help);
            }
        }
        let Some(&number) = self.declared.numbers.get(&self.prefix) else {
            let help = "let no condition depend on the mode; a loss drops nothing";
            return x.refuse("dropout", &[x], "one of the first trace", help);
        };
        if probability == 0.0 || !self.is_training() {
            return x.clone();
        }
        if !x.has_rows() {
            let help = "apply dropout to a value that is computed from x";
            return x.refuse("dropout", &[x], "a value that has rows", help);
        }
        x.push(Dropout(number, probability), &[x], x.shape())
    }
}

impl Operation for Dropout {
    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        vec![at.like(0, self.clone(), &[at.d])]
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let out = r.take(0)?;
        let key = DropoutKey {
            seed: r.pass.seed(),
            layer: self.0,
            position: r.pass.position(),
        };
        // A row of the batch may be several of the first axis.
        let batch = r.plan.nodes[r.plan.ends.x].shape[0].max(1);
        let [out, x] = [&out, r.x[0]].map(|it| it.reshape(&[batch, it.count() / batch]));
        Ok(ops::dropout_into(&out?, &x?, self.1, &key)?)
    }
}
