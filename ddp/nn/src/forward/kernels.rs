//! Runs the operations that have kernels of their own, forward and backward.

use ddp_kernels::ops::{self, Attention, DropoutKey, EmbeddingScratch, NormGradients, NormOptions};
use ddp_kernels::{DType, Tensor};

use super::plan::{Action, PlannedRun};
use super::running::{Running, rows as rows_of};
use super::trace::Op;
use crate::build::ParamId;
use crate::error::{Error, Result};

/// `x` (…, C) as (R, C).
fn rows(x: &Tensor) -> Result<Tensor> {
    let columns = x.shape()[x.shape().rank() - 1];
    rows_of(x, columns)
}

impl Running<'_, '_, '_> {
    /// Runs an operation that has its own kernel. Returns false for any other operation.
    pub(super) fn kernel(&mut self, run: &PlannedRun, x: &[&Tensor]) -> Result<bool> {
        match &run.action {
            Action::Linear {
                activation,
                has_bias,
            } => {
                let bias = has_bias.then_some(x[2..].first().copied()).flatten();
                let bias = bias.map(Tensor::flatten).transpose()?;
                let y = rows(&self.take(run, 0)?)?;
                let kept = (run.outputs.len() > 1).then(|| self.take(run, 1));
                let kept = kept.transpose()?.map(|kept| rows(&kept)).transpose()?;
                let (input, bias) = (rows(x[0])?, bias.as_ref());
                ops::linear_into(&y, &input, x[1], bias, *activation, kept.as_ref())?;
            }
            Action::LinearInput { below } => {
                let dx = rows(&self.take(run, 0)?)?;
                let saved = below.map(|_| rows(x[2])).transpose()?;
                let sums = self.take_sums(run, &dx)?;
                let (d, below) = (rows(x[0])?, below.zip(saved.as_ref()));
                ops::linear_backward_input_summed_into(&dx, sums.as_ref(), &d, x[1], below)?;
            }
            Action::AddMatMul { is_turned } => {
                let out = rows(x[0])?;
                let (d, w) = (rows(x[1])?, x[2]);
                let w = if *is_turned { w.t()? } else { w.clone() };
                ops::addmm_into(&out, &out, &d, &w, 1.0, 1.0)?;
                self.values[run.outputs[0]] = Some(x[0].clone());
            }
            Action::LinearWeight => {
                let dw = self.take(run, 0)?;
                ops::linear_backward_weight_into(&dw, None, &rows(x[0])?, &rows(x[1])?, false)?;
            }
            Action::LinearGradients { weight, bias } => {
                self.linear_gradients(run, *weight, *bias, [&rows(x[0])?, &rows(x[1])?])?;
            }
            Action::GradientColumns(parameter) => {
                let sums = run.sums.and_then(|sums| self.values[sums].take());
                self.write_gradient(*parameter, |_, out, accumulate| {
                    let out = out.flatten()?;
                    match sums {
                        Some(sums) => Ok(ops::add_row_sums_into(&out, &sums, accumulate)?),
                        None => {
                            let x = rows_of(x[0], out.count())?;
                            Ok(ops::column_sum_into(&out, &x, accumulate)?)
                        }
                    }
                })?;
            }
            Action::GradientSums(parameter) => {
                self.write_gradient(*parameter, |_, out, accumulate| {
                    Ok(ops::add_row_sums_into(&out.flatten()?, x[0], accumulate)?)
                })?;
            }
            Action::EmbeddingGradient(parameter, untrained) => {
                self.write_gradient(*parameter, |running, out, accumulate| {
                    let of = [&rows(x[0])?, x[1]];
                    running.embedding_gradient((out, accumulate), untrained, of)
                })?;
            }
            Action::PositionsGradient(parameter) => {
                self.write_gradient(*parameter, |_, out, accumulate| {
                    let d = rows(x[0])?;
                    Ok(ops::embedding_positions_backward_into(out, &d, accumulate)?)
                })?;
            }
            Action::Norm { is_sum, has_bias } => {
                let &Op::Norm(norm, epsilon) = &self.nodes[run.of].op else {
                    return Ok(false);
                };
                let first = usize::from(*is_sum);
                let [y, statistics] = [self.take(run, first)?, self.take(run, first + 1)?];
                let options = NormOptions {
                    norm,
                    epsilon,
                    weight: Some(x[first + 1]),
                    bias: has_bias.then(|| x[first + 2]),
                };
                let (y, input) = (rows(&y)?, rows(x[0])?);
                if *is_sum {
                    let (sum, other) = (rows(&self.take(run, 0)?)?, rows(x[1])?);
                    ops::add_norm_into(&sum, &y, &statistics, [&input, &other], &options)?;
                } else {
                    ops::norm_into(&y, &statistics, &input, &options)?;
                }
            }
            Action::NormBackward { parts, is_sum } => {
                let (residual, of) = x.split_at(usize::from(*is_sum));
                self.norm_backward(run, *parts, residual.first().copied(), of)?;
            }
            Action::Rope { is_in_place } => self.rope(run, *is_in_place, x[0])?,
            Action::Kernel => return self.kernel_of(run, x),
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Completes a gradient, unless it is frozen: `write` gets its place, and whether to add to it.
    fn write_gradient(
        &mut self,
        parameter: ParamId,
        write: impl FnOnce(&mut Self, &Tensor, bool) -> Result<()>,
    ) -> Result<()> {
        if let Some(gradient) = self.pass.gradient(parameter) {
            write(self, gradient.tensor, gradient.accumulate)?;
        }
        self.pass.finished(parameter)
    }

    /// The operations that nothing is fused with.
    fn kernel_of(&mut self, run: &PlannedRun, x: &[&Tensor]) -> Result<bool> {
        let nodes = self.nodes;
        match &nodes[run.of].op {
            Op::Activate(activation) => ops::activate_into(&self.take(run, 0)?, x[0], *activation)?,
            Op::ActivateBackward(activation) => {
                let saved = x[1].reshape(x[0].shape())?;
                ops::activate_backward_into(&self.take(run, 0)?, x[0], &saved, *activation)?;
            }
            Op::Dropout(layer, probability) => {
                let out = self.take(run, 0)?;
                let key = DropoutKey {
                    seed: self.pass.seed(),
                    layer: *layer,
                    position: self.pass.position(),
                };
                // A row of the batch may be several of the first axis.
                let batch = nodes[self.plan.ends.x].shape[0].max(1);
                let [out, x] = [&out, x[0]].map(|it| it.reshape(&[batch, it.count() / batch]));
                ops::dropout_into(&out?, &x?, *probability, &key)?;
            }
            Op::Gated(gate) => gate.forward(&rows(&self.take(run, 0)?)?, &rows(x[0])?)?,
            Op::GatedBackward(gate) => {
                gate.backward(&rows(&self.take(run, 0)?)?, &rows(x[0])?, &rows(x[1])?)?;
            }
            Op::Documents => {
                let [tokens, begins] = [self.take(run, 0)?, self.take(run, 1)?];
                ops::split_documents_into(&tokens.flatten()?, &begins, &x[0].flatten()?)?;
            }
            Op::Embedding(_) => {
                let out = rows(&self.take(run, 0)?)?;
                let tokens = x[0].flatten()?;
                let mut positions = x.get(2).map(|it| (*it).clone());
                if let (Some(all), Some(cache)) = (&mut positions, self.pass.cache()) {
                    *all = all.slice(cache.tokens..cache.tokens + tokens.count())?;
                }
                ops::embedding_into(&out, x[1], &tokens, positions.as_ref())?;
            }
            Op::EmbeddingBackward(untrained) => {
                let out = self.take(run, 0)?;
                self.embedding_gradient((&out, false), untrained, [&rows(x[0])?, x[1]])?;
            }
            Op::Cast(_) => ops::cast_into(&self.take(run, 0)?, x[0])?,
            Op::Gather(axis) => {
                let (out, tokens) = (self.take(run, 0)?, x[0].flatten()?);
                let columns = out.count() / tokens.count().max(1);
                if columns > 0 {
                    let [out, table] = [&out, x[1]].map(|it| rows_of(it, columns));
                    let found = ops::embedding_into(&out?, &table?, &tokens, None);
                    // On the CPU nothing else can be wrong.
                    let is_host = !x[1].device().is_accelerator();
                    found.map_err(|error| {
                        if !is_host {
                            return error.into();
                        }
                        let length = x[1].shape()[*axis];
                        let expected =
                            format!("whole indices below {length}, the length of axis {axis}");
                        let help = "check how they are computed";
                        Error::model("gather", expected, "another, or NaN", help)
                    })?;
                }
            }
            Op::GatherBackward => {
                let (out, tokens) = (self.take(run, 0)?, x[1].flatten()?);
                let columns = x[0].count() / tokens.count().max(1);
                if columns == 0 {
                    ops::zero(&out)?;
                    return Ok(true);
                }
                let [out, d] = [&out, x[0]].map(|it| rows_of(it, columns));
                self.embedding_gradient((&out?, false), &[], [&d?, &tokens])?;
            }
            Op::PositionsBackward => {
                let out = self.take(run, 0)?;
                ops::embedding_positions_backward_into(&out, &rows(x[0])?, false)?;
            }
            Op::Attention(attention) => self.attention(run, attention, x)?,
            Op::AttentionBackward(attention) => {
                let dqkv = rows(&self.take(run, 0)?)?;
                let delta = self.pass.take_as(x[2].shape(), x[2].dtype())?;
                let (of, qkv) = ([&rows(x[0])?, &rows(x[1])?], rows(x[3])?);
                let begins = x.get(4).copied();
                ops::attention_backward_into(&dqkv, &delta, of, x[2], &qkv, begins, attention)?;
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// dw = dᵀ·x and db = Σ rows of d, for `d` (B, O) and `x` (B, I).
    fn linear_gradients(
        &mut self,
        run: &PlannedRun,
        weight: ParamId,
        bias: Option<ParamId>,
        [d, x]: [&Tensor; 2],
    ) -> Result<()> {
        let dw = self.pass.gradient(weight);
        let db = bias.and_then(|bias| self.pass.gradient(bias));
        // One operation adds to both or replaces both. If a tied weight was already used above, it
        // is added to but the bias is replaced: the bias then starts at zero.
        let accumulate = [&dw, &db].into_iter().flatten().any(|it| it.accumulate);
        for gradient in [&dw, &db].into_iter().flatten() {
            if accumulate && !gradient.accumulate {
                ops::zero(gradient.tensor)?;
            }
        }
        let mut db = db.map(|db| db.tensor.flatten()).transpose()?;
        let mut sums = run.sums.and_then(|sums| self.values[sums].take());
        if sums.is_none() && db.is_some() {
            sums = self.pass.sum_row_blocks(d)?;
        }
        if let (Some(sums), Some(db)) = (&sums, &db) {
            ops::add_row_sums_into(db, sums, accumulate)?;
        }
        db = db.filter(|_| sums.is_none());
        if let Some(dw) = dw {
            ops::linear_backward_weight_into(dw.tensor, db.as_ref(), d, x, accumulate)?;
        }
        bias.map_or(Ok(()), |bias| self.pass.finished(bias))?;
        self.pass.finished(weight)
    }

    fn norm_backward(
        &mut self,
        run: &PlannedRun,
        [has_weight, has_bias]: [bool; 2],
        residual: Option<&Tensor>,
        x: &[&Tensor],
    ) -> Result<()> {
        let &Op::NormBackward(norm, epsilon) = &self.nodes[run.of].op else {
            return Ok(());
        };
        let dresidual = residual.map(rows).transpose()?;
        let dx = rows(&self.take(run, 0)?)?;
        let weight_sums = has_weight.then(|| self.take(run, 1)).transpose()?;
        let at = 1 + usize::from(has_weight);
        let bias_sums = has_bias.then(|| self.take(run, at)).transpose()?;
        let mut gradients = NormGradients {
            dx: &dx,
            dresidual: dresidual.as_ref(),
            weight_sums: weight_sums.as_ref(),
            bias_sums: bias_sums.as_ref(),
            row_sums: None,
        };
        let options = NormOptions {
            norm,
            epsilon,
            weight: Some(x[3]),
            bias: None,
        };
        let (d, input) = (rows(x[0])?, rows(x[1])?);
        let sums_rows = ops::prefers_row_sums(dx.shape()[0])
            && ops::norm_sums_rows(&gradients, &d, &input, &options);
        let row_sums = sums_rows.then(|| self.take_sums(run, &dx)).transpose()?;
        let row_sums = row_sums.flatten();
        gradients.row_sums = row_sums.as_ref();
        Ok(ops::norm_backward_into(
            &gradients, &d, &input, x[2], &options,
        )?)
    }

    /// Memory for an output of a run: what was given for it, if something was.
    pub(super) fn take(&mut self, run: &PlannedRun, at: usize) -> Result<Tensor> {
        let id = run.outputs[at];
        if let Some(given) = &self.values[id] {
            return Ok(given.clone());
        }
        let (plan, shape) = (self.plan, &self.nodes[id].shape);
        let of = (plan.pools[id], plan.kinds[id]);
        let made = self.pass.take_again(of, &plan.buffers[id], shape)?;
        self.values[id] = Some(made.clone());
        Ok(made)
    }

    /// Memory for the sums of blocks of rows of `dx`, if something reads them.
    fn take_sums(&mut self, run: &PlannedRun, dx: &Tensor) -> Result<Option<Tensor>> {
        let Some(sums) = run.sums.filter(|_| dx.shape()[0] > 0) else {
            return Ok(None);
        };
        let made = self.pass.take_as(&ops::row_sums_of(dx), DType::F32)?;
        self.values[sums] = Some(made.clone());
        Ok(Some(made))
    }

    fn embedding_gradient(
        &mut self,
        (out, accumulate): (&Tensor, bool),
        untrained: &[usize],
        [d, tokens]: [&Tensor; 2],
    ) -> Result<()> {
        let tokens = tokens.flatten()?;
        let sums = [ops::embedding_sums_of(tokens.count()), d.shape()[1]];
        let scratch = EmbeddingScratch {
            order: &self.pass.take_as(&[2, tokens.count()], DType::I64)?,
            sums: &self.pass.take_as(&sums, out.dtype())?,
        };
        // A tied head may have added to the rows that get no gradient here.
        let mut before = Vec::new();
        for &token in untrained {
            let row = out.slice(token..token + 1)?;
            let copy = self.pass.take_as(row.shape(), row.dtype())?;
            if accumulate {
                copy.copy_from(&row)?;
            } else {
                ops::zero(&copy)?;
            }
            before.push((row, copy));
        }
        ops::embedding_backward_into(out, d, &tokens, scratch, accumulate)?;
        for (row, before) in before {
            row.copy_from(&before)?;
        }
        Ok(())
    }

    fn rope(&mut self, run: &PlannedRun, is_in_place: bool, x: &Tensor) -> Result<()> {
        let nodes = self.nodes;
        let Op::Rope(rope, heads, is_back) = &nodes[run.of].op else {
            return Ok(());
        };
        let out = if is_in_place {
            self.values[run.outputs[0]] = Some(x.clone());
            x.clone()
        } else {
            self.take(run, 0)?
        };
        let time = x.shape()[1];
        let table = match self.pass.cache() {
            Some(cache) => {
                let tokens = cache.tokens..cache.tokens + time;
                rope.table(cache.room, x.device())?.slice(tokens)?
            }
            None => rope.table(time, x.device())?,
        };
        let (out, x) = (rows(&out)?, rows(x)?);
        if *is_back {
            ops::rope_backward_into(&out, &x, &table, *heads)?
        } else {
            ops::rope_into(&out, &x, &table, *heads)?
        }
        Ok(())
    }

    fn attention(&mut self, run: &PlannedRun, attention: &Attention, x: &[&Tensor]) -> Result<()> {
        let mixed = rows(&self.take(run, 0)?)?;
        let qkv = rows(x[0])?;
        let Some(cache) = self.pass.cache() else {
            let sums = self.take(run, 1)?;
            let begins = x.get(1).copied();
            return Ok(ops::attention_into(&mixed, &sums, &qkv, begins, attention)?);
        };
        let (new, columns) = (qkv.shape()[0], attention.kv_heads * attention.head_size);
        let time = cache.tokens + new;
        let kept = cache.next(new, 2 * columns, qkv.dtype())?;
        let attention = Attention { time, ..*attention };
        Ok(ops::attention_cached_into(&mixed, &kept, &qkv, &attention)?)
    }
}
