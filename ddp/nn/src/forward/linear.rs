//! Linear layers and their activations. A layer applies the activation above it, its backward the
//! derivative of the one below it, and gradients of weight and bias are made at once.

use ddp_kernels::ops::{self, Activation, Function};

use super::operation::*;
use super::trace::HeadOf;

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
        self.checked(Linear(None), &inputs, shape)
    }

    /// An activation. A linear layer before it applies it.
    #[track_caller]
    pub fn activate(&self, activation: Activation) -> Var {
        self.push(Activate(activation), &[self], self.shape())
    }

    /// A linear layer that the loss may run, to whose output, below `cap`, `mask` is added.
    pub(crate) fn as_head(&self, mask: Option<&Var>, cap: f64) -> Var {
        let inputs: Vec<Var> = self.inputs().into_iter().chain(mask.cloned()).collect();
        let head = if !matches!(self.op(), Op::Linear(_)) {
            self.clone()
        } else if cap != 0.0 {
            let capped = (self / cap).tanh() * cap;
            mask.map_or(capped.clone(), |mask| capped + mask)
        } else if mask.is_some() {
            let inputs: Vec<&Var> = inputs.iter().collect();
            self.push(Linear(None), &inputs, self.shape())
        } else {
            self.clone()
        };
        let of = inputs.iter().map(|it| it.id).collect();
        self.trace.borrow_mut().head = Some((head.id, of, cap));
        head
    }

    /// This output as `as_head` notes it; with `by_position` also a linear layer of positions whose
    /// weight nothing else reads.
    pub(super) fn head(&self, by_position: bool) -> Option<HeadOf> {
        let noted = self.trace.borrow_mut().head.take();
        let ([_, weight], Op::Linear(_)) = (&self.inputs()[..], self.op()) else {
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

macro_rules! methods {
    ($($(#[$help:meta])* $Name:ident $method:ident $flag:literal $entry:tt)*) => {
        impl Var {
            $($(#[$help])*
            #[track_caller]
            pub fn $method(&self) -> Var {
                self.activated(Activation::$Name)
            })*
        }
    };
}
ddp_kernels::activations!(methods);

impl Var {
    /// Fused into a linear layer if possible. SiLU always runs in a chain, because gates multiply
    /// its output.
    #[track_caller]
    fn activated(&self, activation: Activation) -> Var {
        if !activation.about().stays_in_chains && matches!(self.op(), Op::Linear(_)) {
            return self.activate(activation);
        }
        Var::apply(Function::Activation(activation), &[self])
    }
}

impl Operation for Linear {
    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        // That of x comes later, in `backward`.
        let bias = at.x.get(2).map(|bias| at.d.reduced_to(&bias.shape()));
        let weight = at.like(1, LinearWeight, &[at.d, &at.x[0]]);
        vec![None, weight, bias]
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let bias = r.x.get(2).map(|it| it.flatten()).transpose()?;
        let y = r.take_rows(0)?;
        // What the activation's derivative needs, if that is kept.
        let kept = (r.planned.outputs.len() > 1).then(|| r.take_rows(1));
        let (kept, x, bias) = (kept.transpose()?, r.rows(0)?, bias.as_ref());
        ops::linear_into(&y, &x, r.x[1], bias, self.0, kept.as_ref())?;
        Ok(())
    }
}

impl Operation for LinearInput {
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let dx = r.take_rows(0)?;
        let saved = self.0.map(|_| r.rows(2)).transpose()?;
        let (sums, d, below) = (r.take_sums(&dx)?, r.rows(0)?, self.0.zip(saved.as_ref()));
        ops::linear_backward_input_summed_into(&dx, sums.as_ref(), &d, r.x[1], below)?;
        Ok(())
    }
}

impl Operation for LinearWeight {
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let dw = r.take(0)?;
        ops::linear_backward_weight_into(&dw, None, &r.rows(0)?, &r.rows(1)?, false)?;
        Ok(())
    }
}

impl Operation for LinearGradients {
    /// dw = dᵀ·x and db = Σ rows of d, for `d` (B, O) and `x` (B, I).
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let (&LinearGradients(weight, bias), d, x) = (self, &r.rows(0)?, &r.rows(1)?);
        let dw = r.pass.gradient(weight);
        let db = bias.and_then(|bias| r.pass.gradient(bias));
        // One operation adds to both or replaces both. If a tied weight was already used above, it
        // is added to but the bias is replaced: the bias then starts at zero.
        let accumulate = [&dw, &db].into_iter().flatten().any(|it| it.accumulate);
        for gradient in [&dw, &db].into_iter().flatten() {
            if accumulate && !gradient.accumulate {
                ops::zero(gradient.tensor)?;
            }
        }
        let mut db = db.map(|db| db.tensor.flatten()).transpose()?;
        let mut sums = r.left_sums();
        if sums.is_none() && db.is_some() {
            sums = r.pass.sum_row_blocks(d)?;
        }
        if let (Some(sums), Some(db)) = (&sums, &db) {
            ops::add_row_sums_into(db, sums, accumulate)?;
        }
        db = db.filter(|_| sums.is_none());
        if let Some(dw) = dw {
            ops::linear_backward_weight_into(dw.tensor, db.as_ref(), d, x, accumulate)?;
        }
        bias.map_or(Ok(()), |bias| r.pass.finished(bias))?;
        r.pass.finished(weight)
    }
}

impl Operation for AddMatMul {
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let (out, d, w) = (r.take_rows(0)?, r.rows(1)?, r.x[2]);
        let w = if self.0 { w.t()? } else { w.clone() };
        Ok(ops::addmm_into(&out, &out, &d, &w, 1.0, 1.0)?)
    }
}

impl Operation for Activate {
    fn name(&self) -> String {
        snake_case(&format!("{:?}", self.0))
    }

    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        let kept = if self.0.keeps_input() { &at.x[0] } else { at.y };
        vec![at.like(0, ActivateBackward(self.0), &[at.d, kept])]
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        Ok(ops::activate_into(&r.take(0)?, r.x[0], self.0)?)
    }
}

impl Operation for ActivateBackward {
    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let saved = r.x[1].reshape(r.x[0].shape())?;
        ops::activate_backward_into(&r.take(0)?, r.x[0], &saved, self.0)?;
        Ok(())
    }
}
