//! LoRA: adapters of low rank beside frozen linear layers, y = x·Wᵀ + b + scale · d(x)·Aᵀ·Bᵀ,
//! where d is dropout. Letters: B rows, I inputs, O outputs of the layer, R rank, N adapters of the
//! layer, P outputs that they cover.
//!
//! A layer in place of several (queries, keys and values) has an adapter for each, as PEFT has.
//! Their A's are one parameter, so that all are one matmul; so are their B's, whose matmul is with
//! a matrix of blocks: some zeros cost less than a matmul for each. They share what dropout drops.

use std::ops::Range;

use ddp_kernels::Tensor;
use ddp_kernels::ops::{self, Chain, Step, View};

use crate::activate::Dropout;
use crate::build::{Build, Init, ParamId};
pub use crate::build::{LORA_A, LORA_B, Lora, is_adapter};
use crate::error::Result;
use crate::layer::Layer;
use crate::loss::math_dtype;
use crate::pass::{Pass, with_last_of};

/// The adapters of one layer.
#[derive(Debug)]
pub(crate) struct Adapters {
    scale: f64,
    dropout: Dropout,
    /// (N·R, I)
    a: ParamId,
    /// (P, R)
    b: ParamId,
    /// O and N·R
    wide: [usize; 2],
    /// Where there are several, or outputs without: these move a block of `b` to its place in a
    /// matrix (O, N·R), and back.
    blocks: Vec<[Chain; 2]>,
}

impl Adapters {
    /// Declares the adapters of a layer with this many inputs, whose parts have this many outputs.
    /// None if it has none.
    pub(crate) fn build(
        build: &mut Build<'_>,
        inputs: usize,
        parts: &[usize],
    ) -> Result<Option<Adapters>> {
        let Some(lora) = build.lora() else {
            return Ok(None);
        };
        let adapted = (lora.adapted)(build.path(), parts);
        if adapted.is_empty() {
            return Ok(None);
        }
        let (rank, outputs) = (lora.rank, parts.iter().sum());
        let columns = adapted.len() * rank;
        // As in PEFT: Kaiming's, with a = √5.
        let bound = 1.0 / (inputs as f64).sqrt();
        let a = build.parameter(LORA_A, &[columns, inputs], Init::Uniform { bound })?;
        let rows = adapted.iter().map(Range::len).sum();
        let b = build.parameter(LORA_B, &[rows, rank], Init::Constant(0.0))?;
        let mut dropout = Dropout::new(lora.dropout);
        if lora.dropout > 0.0 {
            dropout.build(build, &[inputs])?;
        }
        let mut blocks = Vec::new();
        let covers_all = adapted.len() == 1 && adapted[0].len() == outputs;
        if !covers_all {
            let mut start = 0;
            for (index, range) in adapted.iter().enumerate() {
                let dims = [range.len(), rank];
                let view = |offset, columns| View {
                    offset,
                    strides: vec![columns, 1],
                };
                let packed = view(start * rank, rank);
                let placed = view(range.start * columns + index * rank, columns);
                let copy = |from: &View, to: &View| {
                    let steps = vec![Step::Load(0), Step::Store(0, 0)];
                    let views = [vec![from.clone()], vec![to.clone()]];
                    Chain::new("lora_block", &dims, 0, steps, views)
                };
                blocks.push([copy(&packed, &placed)?, copy(&placed, &packed)?]);
                start += range.len();
            }
        }
        Ok(Some(Adapters {
            scale: lora.scale,
            dropout,
            a,
            b,
            wide: [outputs, columns],
            blocks,
        }))
    }

    /// B of all adapters (O, N·R), which is 0 except in the blocks of each.
    fn wide_b(&self, pass: &mut Pass<'_>) -> Result<Tensor> {
        let b = pass.value(self.b)?;
        if self.blocks.is_empty() {
            return Ok(b.clone());
        }
        let wide = pass.take(&self.wide)?;
        ops::zero(&wide)?;
        for [place, _] in &self.blocks {
            ops::chain_into(place, &[&wide], &[b])?;
        }
        Ok(wide)
    }

    /// Adds the adapters' outputs for `x` (…, I) to `y` (B, O).
    pub(crate) fn add_outputs(&self, pass: &mut Pass<'_>, y: &Tensor, x: &Tensor) -> Result<()> {
        let x = self.dropout.forward(pass, x)?;
        let rows = y.shape()[0];
        let x = x.reshape(&[rows, x.count() / rows.max(1)])?;
        let mixed = pass.take(&[rows, self.wide[1]])?;
        ops::linear_into(&mixed, &x, pass.value(self.a)?, None, None, None)?;
        ops::scale_into(&mixed, &mixed, self.scale)?;
        let b = self.wide_b(pass)?;
        ops::addmm_into(y, y, &mixed, &b.t()?, 1.0, 1.0)?;
        if pass.is_training() {
            pass.save(&x);
            pass.save(&mixed);
        }
        Ok(())
    }

    /// Writes the gradients of the adapters, for `dy` (B, O). Returns the gradient at x·Aᵀ,
    /// (B, N·R).
    pub(crate) fn write_gradients(&self, pass: &mut Pass<'_>, dy: &Tensor) -> Result<Tensor> {
        let [mixed, x] = [pass.restore(), pass.restore()];
        if let Some(db) = pass.gradient(self.b) {
            if self.blocks.is_empty() {
                ops::linear_backward_weight_into(db.tensor, None, dy, &mixed, db.accumulate)?;
            } else {
                let wide = pass.take_as(&self.wide, math_dtype(dy))?;
                ops::linear_backward_weight_into(&wide, None, dy, &mixed, false)?;
                let packed = pass.take_as(db.tensor.shape(), wide.dtype())?;
                for [_, pack] in &self.blocks {
                    ops::chain_into(pack, &[&packed], &[&wide])?;
                }
                db.write(&packed)?;
            }
        }
        pass.finished(self.b)?;
        let b = self.wide_b(pass)?;
        let dmixed = pass.take(mixed.shape())?;
        ops::addmm_into(&dmixed, &dmixed, dy, &b, self.scale, 0.0)?;
        if let Some(da) = pass.gradient(self.a) {
            ops::linear_backward_weight_into(da.tensor, None, &dmixed, &x, da.accumulate)?;
        }
        pass.finished(self.a)?;
        Ok(dmixed)
    }

    /// Adds the adapters' part to `dx` (B, I), the gradient of an input of the shape of `like`
    /// except for the last dimension.
    pub(crate) fn add_input_gradient(
        &self,
        pass: &mut Pass<'_>,
        dx: &Tensor,
        dmixed: &Tensor,
        like: &Tensor,
    ) -> Result<()> {
        let a = pass.value(self.a)?;
        if !self.dropout.drops(pass) {
            return Ok(ops::addmm_into(dx, dx, dmixed, a, 1.0, 1.0)?);
        }
        let part = pass.take(dx.shape())?;
        ops::linear_backward_input_into(&part, dmixed, a, None)?;
        let part = with_last_of(&part, like, dx.shape()[1])?;
        let part = self.dropout.apply(pass, &part)?;
        Ok(ops::add_into(dx, dx, &part.reshape(dx.shape())?)?)
    }
}

#[cfg(test)]
mod tests;
