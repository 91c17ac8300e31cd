//! The last linear layer of a model with many classes, whose outputs (logits) would take more
//! memory than the rest. With a loss it processes the rows in pieces: logits, loss and gradients of
//! one piece, then the next. Letters: R rows, C columns.

use std::ops::Range;

use ddp_kernels::ops::{Chain, ChainStep, ChainView, Function};
use ddp_kernels::{DType, Tensor, ops};

use crate::build::ParamId;
use crate::error::{Error, Result};
use crate::loss::{Loss, math_dtype};
use crate::pass::{Gradient, Pass};

/// Rows of a piece on the CPU, as many as a matmul sums at a time. The weight's gradient is the
/// sum of the pieces in order. If all pieces are full, it is bit-identical to one matmul.
pub(crate) const ROWS_CPU: usize = 256;
/// In bf16 pieces are larger, because each reads the weight twice and adds to its gradient. The
/// gradient is not bit-identical to one matmul.
const ROWS_CPU_BF16: usize = 1024;
/// Rows of a piece on a GPU.
const ROWS_GPU: usize = 8192;

/// The head of a model, which the loss runs.
#[derive(Clone, Debug)]
pub(crate) struct LeftHead {
    pub(crate) weight: ParamId,
    pub(crate) mask: Option<Tensor>,
    /// Logits z become cap·tanh(z / cap), unless it is 0.
    pub(crate) cap: f64,
}

impl LeftHead {
    /// Calls `body` with each piece: its rows, and of these `x`, `targets` and the logits.
    fn each_piece(
        &self,
        pass: &mut Pass<'_>,
        x: &Tensor,
        targets: &Tensor,
        mut body: impl FnMut(&mut Pass<'_>, Range<usize>, [&Tensor; 3]) -> Result<()>,
    ) -> Result<()> {
        let [outputs, columns] = self.sizes(pass)?;
        let x = x.reshape(&[x.count() / columns, columns])?;
        let rows = x.shape()[0];
        if !targets.count().is_multiple_of(rows.max(1)) {
            let expected = format!("a target for each of {rows} positions");
            let help = "give targets (B, T) for outputs (B, T, C)";
            return Err(Error::model("loss", expected, targets, help));
        }
        let targets = match targets.count() / rows.max(1) {
            0 | 1 => targets.flatten()?,
            of_row => targets.reshape(&[rows, of_row])?,
        };
        let most = if x.device().is_accelerator() {
            ROWS_GPU
        } else if x.dtype() == DType::BF16 {
            ROWS_CPU_BF16
        } else {
            ROWS_CPU
        };
        // With a cap there are three tensors of logits.
        let piece = if self.cap == 0.0 || most == ROWS_CPU {
            most
        } else {
            most / 4
        };
        // Without rows there is one piece without rows, which sets the gradient to 0.
        for start in (0..rows.max(1)).step_by(piece) {
            let rows = start..rows.min(start + piece);
            let (x, targets) = (x.slice(rows.clone())?, targets.slice(rows.clone())?);
            let logits = pass.take(&[rows.len(), outputs])?;
            let weight = pass.value(self.weight)?;
            let mask = self.mask.as_ref().filter(|_| self.cap == 0.0);
            ops::linear_into(&logits, &x, weight, mask, None, None)?;
            body(pass, rows, [&x, &targets, &logits])?;
        }
        Ok(())
    }

    /// The logits (R, V) below the cap, and the mask added; as they are without a cap.
    fn capped(&self, pass: &mut Pass<'_>, logits: &Tensor) -> Result<Tensor> {
        use Function::{Add, Mul, Tanh};
        if self.cap == 0.0 {
            return Ok(logits.clone());
        }
        let mut steps = vec![
            ChainStep::Load(0),
            ChainStep::Constant(1.0 / self.cap),
            ChainStep::Apply(Mul, [0, 1, 0]),
            ChainStep::Apply(Tanh, [2, 0, 0]),
            ChainStep::Constant(self.cap),
            ChainStep::Apply(Mul, [3, 4, 0]),
        ];
        if self.mask.is_some() {
            steps.extend([ChainStep::Load(1), ChainStep::Apply(Add, [5, 6, 0])]);
        }
        let inputs: Vec<&Tensor> = [logits].into_iter().chain(&self.mask).collect();
        run(pass, steps, &inputs)
    }

    /// The gradient by the logits of the linear layer, from that by those below the cap.
    fn uncapped(&self, pass: &mut Pass<'_>, d: &Tensor, capped: &Tensor) -> Result<Tensor> {
        use Function::{Max, Mul, Sub};
        if self.cap == 0.0 {
            return Ok(d.clone());
        }
        let steps = vec![
            ChainStep::Load(0),
            ChainStep::Load(1),
            ChainStep::Constant(1.0 / self.cap),
            ChainStep::Apply(Mul, [1, 2, 0]),
            // Those that are masked are −∞.
            ChainStep::Constant(-1.0),
            ChainStep::Apply(Max, [3, 4, 0]),
            ChainStep::Apply(Mul, [5, 5, 0]),
            ChainStep::Constant(1.0),
            ChainStep::Apply(Sub, [7, 6, 0]),
            ChainStep::Apply(Mul, [0, 8, 0]),
        ];
        run(pass, steps, &[d, capped])
    }

    fn sizes(&self, pass: &Pass<'_>) -> Result<[usize; 2]> {
        let shape = pass.value(self.weight)?.shape();
        Ok([shape[0], shape[1]])
    }

    /// The gradient by x (…, C) of the sum of losses, of x, targets and stats. Writes the weight's
    /// gradient.
    pub(crate) fn gradient(
        &self,
        loss: &dyn Loss,
        pass: &mut Pass<'_>,
        [x, targets, stats]: [&Tensor; 3],
    ) -> Result<Tensor> {
        let [_, columns] = self.sizes(pass)?;
        let dx = pass.take(&[x.count() / columns, columns])?;
        self.each_piece(pass, x, targets, |pass, rows, [x, targets, logits]| {
            let capped = self.capped(pass, logits)?;
            loss.compute(pass, [&capped, targets, stats], Some(logits))?;
            let logits = &self.uncapped(pass, logits, &capped)?;
            if let Some(Gradient { tensor, accumulate }) = pass.gradient(self.weight) {
                let accumulate = accumulate || rows.start > 0;
                ops::linear_backward_weight_into(tensor, None, logits, x, accumulate)?;
            }
            let dx = dx.slice(rows)?;
            let weight = pass.value(self.weight)?;
            Ok(ops::linear_backward_input_into(&dx, logits, weight, None)?)
        })?;
        Ok(dx.reshape(x.shape())?)
    }

    /// The loss of each row of x, (R), which are added to stats.
    pub(crate) fn losses(
        &self,
        loss: &dyn Loss,
        pass: &mut Pass<'_>,
        [x, targets, stats]: [&Tensor; 3],
    ) -> Result<Tensor> {
        let [_, columns] = self.sizes(pass)?;
        let losses = pass.take_as(&[x.count() / columns], math_dtype(x))?;
        self.each_piece(pass, x, targets, |pass, rows, [_, targets, logits]| {
            let logits = self.capped(pass, logits)?;
            let part = loss.compute(pass, [&logits, targets, stats], None)?;
            Ok(losses.slice(rows)?.copy_from(&part)?)
        })?;
        Ok(losses)
    }
}

/// What the last of `steps` gives for the elements of `inputs`, of which the first is (R, V) and a
/// row (V) is the same for all rows.
fn run(pass: &mut Pass<'_>, mut steps: Vec<ChainStep>, inputs: &[&Tensor]) -> Result<Tensor> {
    let shape = inputs[0].shape().dims();
    let out = pass.take_as(shape, inputs[0].dtype())?;
    let views = inputs.iter().map(|input| ChainView {
        offset: 0,
        strides: vec![shape[1] * (input.shape().dims().len() - 1), 1],
    });
    steps.push(ChainStep::Store(0, steps.len() - 1));
    let views = [views.collect(), vec![ChainView::whole(shape)]];
    let chain = Chain::new("logit_cap", shape, 0, steps, views)?;
    ops::chain_into(&chain, &[&out], inputs)?;
    Ok(out)
}
