//! Rows of a table for tokens, and documents among tokens.

use ddp_kernels::ops::{self, EmbeddingScratch};
use ddp_kernels::{DType, Tensor};

use super::operation::*;
use super::scope::Scope;

impl Var {
    /// Rows of `table` (V, C) for these tokens (B, T), plus those of positions.
    pub(crate) fn rows_of(&self, table: &Var, positions: Option<&Var>, untrained: &[usize]) -> Var {
        let shape = [&self.shape()[..], &table.shape()[1..]].concat();
        let tokens = self.as_tokens();
        let inputs: Vec<&Var> = [&tokens, table].into_iter().chain(positions).collect();
        self.checked(Embedding(untrained.into()), &inputs, shape)
    }
}

impl Scope<'_> {
    /// The tokens of codes whose upper half says where in its row the token's document begins.
    /// Attention from here on keeps documents apart.
    pub(crate) fn documents(&mut self, codes: &Var) -> Var {
        let tokens = codes.push(Documents, &[codes], codes.shape());
        self.trace.borrow_mut().begins = Some(tokens.id + 1);
        tokens
    }
}

impl Operation for Embedding {
    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        let table = at.like(1, EmbeddingBackward(self.0.clone()), &[at.d, &at.x[0]]);
        let positions =
            at.x.get(2)
                .and_then(|_| at.like(2, PositionsBackward, &[at.d]));
        vec![None, table, positions]
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let (out, tokens) = (r.take_rows(0)?, r.x[0].flatten()?);
        let mut positions = r.x.get(2).map(|it| (*it).clone());
        if let (Some(all), Some(cache)) = (&mut positions, r.pass.cache()) {
            *all = all.slice(cache.tokens..cache.tokens + tokens.count())?;
        }
        ops::embedding_into(&out, r.x[1], &tokens, positions.as_ref())?;
        Ok(())
    }
}

impl Operation for EmbeddingBackward {
    fn write(&self, r: &mut Run<'_, '_>, out: &Tensor, accumulate: bool) -> Result<()> {
        let d = r.rows(0)?;
        scatter(r, (out, accumulate), &self.0, [&d, r.x[1]])
    }
}

impl Operation for PositionsBackward {
    fn write(&self, r: &mut Run<'_, '_>, out: &Tensor, accumulate: bool) -> Result<()> {
        ops::embedding_positions_backward_into(out, &r.rows(0)?, accumulate)?;
        Ok(())
    }
}

impl Operation for Documents {
    fn part(&self, shape: &[usize]) -> Option<(NumberKind, Vec<usize>)> {
        Some((NumberKind::Places, vec![shape.iter().product()]))
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let [tokens, begins] = [r.take(0)?, r.take(1)?];
        ops::split_documents_into(&tokens.flatten()?, &begins, &r.x[0].flatten()?)?;
        Ok(())
    }
}

/// Sums rows of `d` to the rows of `out` that tokens name, without those of `untrained`.
pub(super) fn scatter(
    r: &mut Run<'_, '_>,
    (out, accumulate): (&Tensor, bool),
    untrained: &[usize],
    [d, tokens]: [&Tensor; 2],
) -> Result<()> {
    let tokens = tokens.flatten()?;
    let sums = [ops::embedding_sums_of(tokens.count()), d.shape()[1]];
    let scratch = EmbeddingScratch {
        order: &r.pass.take_as(&[2, tokens.count()], DType::I64)?,
        sums: &r.pass.take_as(&sums, out.dtype())?,
    };
    // A tied head may have added to the rows that get no gradient here.
    let mut before = Vec::new();
    for &token in untrained {
        let row = out.slice(token..token + 1)?;
        let copy = r.pass.take_as(row.shape(), row.dtype())?;
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
