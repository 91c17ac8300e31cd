//! Rotary positions.

use std::sync::Arc;

use ddp_kernels::ops;
use ddp_kernels::panics;
use ddp_kernels::transfer::announced;
use ddp_kernels::{Device, Tensor};

use super::operation::*;

impl Rope {
    /// Turns a pair of columns for each of `frequencies`, the angles between neighbouring
    /// positions, and multiplies them by `scale`.
    pub fn new(frequencies: Vec<f64>, scale: f64) -> Rope {
        Rope {
            frequencies,
            scale,
            tables: Arc::default(),
        }
    }

    /// How many columns of a head are turned.
    pub(crate) fn columns(&self) -> usize {
        2 * self.frequencies.len()
    }

    /// The table of this many positions on `device`.
    pub(crate) fn table(&self, positions: usize, device: Device) -> Result<Tensor> {
        let mut tables = panics::lock(&self.tables);
        let is_it = |it: &&Tensor| it.device() == device && it.shape()[0] == positions;
        if let Some(table) = tables.iter().find(is_it) {
            return Ok(table.clone());
        }
        let made = announced("rotary positions", || {
            ops::rope_table(positions, &self.frequencies, self.scale, device)
        })?;
        tables.push(made.clone());
        Ok(made)
    }
}

impl Var {
    /// The first heads of (B, T, …), turned by their positions: how many, and their columns.
    pub(crate) fn rope(&self, rope: &Rope, heads: [usize; 2]) -> Var {
        self.push(Turn(rope.clone(), heads, false), &[self], self.shape())
    }
}

impl Operation for Turn {
    fn name(&self) -> String {
        "rope".into()
    }

    fn gradients(&self, at: &Backward<'_>) -> Vec<Option<Var>> {
        let back = Turn(self.0.clone(), self.1, !self.2);
        vec![at.like(0, back, &[at.d])]
    }

    fn run(&self, r: &mut Run<'_, '_>) -> Result<()> {
        let Turn(rope, heads, is_back) = self;
        let (out, x) = (r.take(0)?, r.x[0]);
        let time = x.shape()[1];
        let table = match r.pass.cache() {
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
}
