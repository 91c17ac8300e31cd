//! Muon: the matrices of hidden layers are updated by orthogonalised directions, all other
//! parameters by AdamW.
//!
//! The ranks divide the matrices among them. Each first writes the directions of its slices over
//! the gradients; the ranks gather these, orthogonalise some matrices each, and send the steps to
//! all. Then each updates its slices by plain SGD.
//!
//! A matrix G (R, C) of directions becomes nearly orthogonal by five steps of a Newton–Schulz
//! iteration. X is G divided by its Frobenius norm; in each step A = X·Xᵀ (or Xᵀ·X if G is taller
//! than wide), B = b·A + c·A², and X becomes a·X + B·X (or a·X + X·B).
//!
//! On a GPU matrices of one shape are multiplied in groups, as batches, because one alone does not
//! fill it. The groups depend on the model alone, and one rank computes a whole group, so bits do
//! not depend on the number of ranks.

use ddp_kernels::ops::{self, ChunkTable, SgdConstants};
use ddp_kernels::{DType, Tensor};

use super::adamw;
use super::rule::{ArenaPart, Declared, Method, Muon, Rule, Update, check_range};
use super::sgd::MOMENTUM;
use crate::error::{Error, Result};
use crate::params::Params;

/// Steps of the iteration.
const STEPS: usize = 5;
/// The elements of A of a group, at most, unless it is of one matrix: 256 tiles of 128 × 128, two
/// for each of 132 multiprocessors.
const GROUP_SQUARES_MAX: usize = 4 << 20;
/// a, b and c.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];

pub(super) const DECLARED: Declared = Declared {
    defaults: &[
        ("lr", 0.02),
        ("adam-lr", 3e-4),
        ("weight-decay", 0.01),
        ("momentum", 0.95),
        ("beta1", 0.9),
        ("beta2", 0.95),
        ("eps", 1e-10),
    ],
    above_zero: &["momentum", "lr"],
    rule: |of| Rule {
        hidden: Some(Method::Muon(Muon {
            momentum: of("momentum"),
            nesterov: true,
        })),
        rate: of("adam-lr") / of("lr"),
        ..Rule::of(adamw::method(of))
    },
};

impl Update for Muon {
    fn name(&self) -> &'static str {
        "muon"
    }

    fn moments(&self) -> &'static [&'static str] {
        &[MOMENTUM]
    }

    fn check(&self) -> Result<()> {
        if self.momentum == 0.0 {
            return Err(Error::Usage(
                "Muon's momentum: expected a number above 0 and below 1, got 0; help: give another, such as 0.95".into(),
            ));
        }
        check_range("momentum", self.momentum, 1.0)
    }

    fn numbers(&self, step: u64, learning_rate: f64, weight_decay: f64) -> Result<[f64; 4]> {
        SgdConstants::default().numbers(step, learning_rate, weight_decay)
    }

    fn apply(&self, part: &ArenaPart<'_>) -> Result<()> {
        let Muon { momentum, nesterov } = *self;
        let constants = SgdConstants { momentum, nesterov };
        let moment = (part.moment)(MOMENTUM)?;
        Ok(ops::muon_direction(&part.tensors, &moment, &constants)?)
    }
}

/// What an optimizer asks of the ranks that train together.
pub trait Exchange {
    /// Completes the gradients' arena of every rank from the parts that the ranks own.
    fn gather(&mut self) -> Result<()>;

    /// Gives each matrix to all ranks, from the rank beside it.
    fn distribute(&mut self, matrices: &mut dyn Iterator<Item = (&Tensor, usize)>) -> Result<()>;
}

/// The only rank.
#[derive(Debug)]
pub struct OneRank;

impl Exchange for OneRank {
    fn gather(&mut self) -> Result<()> {
        Ok(())
    }

    fn distribute(&mut self, _: &mut dyn Iterator<Item = (&Tensor, usize)>) -> Result<()> {
        Ok(())
    }
}

/// A matrix that is orthogonalised.
#[derive(Debug)]
struct MuonMatrix {
    /// (R, C), a part of the gradients' arena.
    gradient: Tensor,
    /// (R·C), the same.
    flat: Tensor,
    /// All of `flat`.
    chunks: ChunkTable,
    /// Its group, and the rank that does that.
    group: usize,
    owner: usize,
}

impl MuonMatrix {
    fn sides(&self) -> [usize; 2] {
        [self.gradient.shape()[0], self.gradient.shape()[1]]
    }
}

/// The matrices of a model, and memory for this rank's largest group. Letters: E elements of that
/// group, S² of its squares, Q quanta of its largest matrix.
#[derive(Debug)]
pub(super) struct Matrices {
    /// Group by group.
    all: Vec<MuonMatrix>,
    rank: usize,
    /// (E) each, in the layers' dtype.
    x: [Tensor; 2],
    /// (S²) each, in the layers' dtype.
    squares: [Tensor; 2],
    /// f64 (Q)
    partials: Tensor,
    /// (2): 1 and the norm.
    norm: Tensor,
}

impl Matrices {
    /// Those of the trained parameters, shared by this many ranks.
    pub(super) fn new(params: &Params, rank: usize, ranks: usize) -> Result<Matrices> {
        let mut all = Vec::new();
        for parameter in params.list().iter().filter(|p| p.is_trained()) {
            let Some(gradient) = params.gradient(parameter.id) else {
                continue;
            };
            let mut start = 0;
            for &rows in &parameter.matrices {
                let gradient = gradient.slice(start..start + rows)?;
                let count = gradient.count();
                all.push(MuonMatrix {
                    flat: gradient.reshape(&[count])?,
                    gradient: gradient.named(&parameter.name),
                    chunks: ChunkTable::whole(count).without_decay(),
                    group: 0,
                    owner: 0,
                });
                start += rows;
            }
        }
        let sides: Vec<_> = all.iter().map(MuonMatrix::sides).collect();
        let squares_max = if params.device().is_accelerator() {
            GROUP_SQUARES_MAX
        } else {
            0
        };
        let groups = groups(&sides, squares_max);
        for (matrix, &group) in all.iter_mut().zip(&groups) {
            matrix.group = group;
        }
        let owners = owners(&sides, &groups, ranks);
        for matrix in &mut all {
            matrix.owner = owners[matrix.group];
        }
        all.sort_by_key(|matrix| matrix.group);
        let own = all.iter().filter(|matrix| matrix.owner == rank);
        let most = |size: fn(&MuonMatrix) -> usize| own.clone().map(size).max().unwrap_or(0);
        let of_group = |size: fn(&MuonMatrix) -> usize| {
            let mut sizes = vec![0; groups.len()];
            own.clone()
                .for_each(|matrix| sizes[matrix.group] += size(matrix));
            sizes.into_iter().max().unwrap_or(0)
        };
        let elements = of_group(|matrix| matrix.flat.count());
        let square = of_group(|matrix| matrix.sides().into_iter().min().unwrap_or(0).pow(2));
        let quanta = most(|matrix| matrix.chunks.quanta());
        let (device, masters) = (params.device(), params.master_dtype());
        let scratch = |count: usize| -> Result<Tensor> {
            Ok(Tensor::zeros(&[count], params.dtype(), device)?.named("Newton-Schulz"))
        };
        Ok(Matrices {
            x: [scratch(elements)?, scratch(elements)?],
            squares: [scratch(square)?, scratch(square)?],
            partials: Tensor::zeros(&[quanta], DType::F64, device)?.named("squares of a matrix"),
            norm: Tensor::zeros(&[2], masters, device)?.named("norm of a matrix"),
            all,
            rank,
        })
    }

    /// Each matrix and the rank that does it.
    pub(super) fn owned(&self) -> impl Iterator<Item = (&Tensor, usize)> {
        self.all.iter().map(|matrix| (&matrix.flat, matrix.owner))
    }

    /// Replaces this rank's matrices, in the gradients' arena, by their steps: nearly orthogonal,
    /// times √max(1, R / C).
    pub(super) fn orthogonalize(&self) -> Result<()> {
        let mut groups = self.all.chunk_by(|a, b| a.group == b.group);
        groups.try_for_each(|group| {
            if group[0].owner == self.rank {
                return self.orthogonalize_group(group);
            }
            Ok(())
        })
    }

    /// Letters: N matrices of one shape.
    fn orthogonalize_group(&self, group: &[MuonMatrix]) -> Result<()> {
        let [rows, columns] = group[0].sides();
        let (count, side) = (group.len(), rows.min(columns));
        let view = |of: &Tensor, [rows, columns]: [usize; 2]| -> Result<Tensor> {
            let all = of.slice(0..count * rows * columns)?;
            Ok(all.reshape(&[count, rows, columns])?)
        };
        let x = [
            view(&self.x[0], [rows, columns])?,
            view(&self.x[1], [rows, columns])?,
        ];
        let a = view(&self.squares[0], [side, side])?;
        let b = view(&self.squares[1], [side, side])?;

        for (index, matrix) in group.iter().enumerate() {
            let partials = self.partials.slice(0..matrix.chunks.quanta())?;
            ops::grad_norm_partials(&partials, &matrix.flat, &matrix.chunks)?;
            ops::clip_scale(&self.norm, Some(&partials), 0.0, None)?;
            ops::divide_by_norm(&matrix.flat, &self.norm)?;
            ops::cast_into(&x[0].index(index)?, &matrix.gradient)?;
        }
        let [ca, cb, cc] = COEFFICIENTS;
        for step in 0..STEPS {
            let (here, there) = (&x[step % 2], &x[1 - step % 2]);
            let last = step + 1 == STEPS;
            let factor = if last {
                (rows as f64 / columns as f64).max(1.0).sqrt()
            } else {
                1.0
            };
            let is_wide = rows <= columns;
            let turned = here.t()?;
            let [left, right] = if is_wide {
                [here, &turned]
            } else {
                [&turned, here]
            };
            ops::addmm_into(&a, &a, left, right, 1.0, 0.0)?;
            ops::addmm_into(&b, &a, &a, &a, cc, cb)?;
            let [left, right] = if is_wide { [&b, here] } else { [here, &b] };
            ops::addmm_into(there, here, left, right, factor, factor * ca)?;
        }
        for (index, matrix) in group.iter().enumerate() {
            ops::cast_into(&matrix.gradient, &x[STEPS % 2].index(index)?)?;
        }
        Ok(())
    }
}

/// The group of each matrix, given rows and columns: those of one shape, in groups of nearly equal
/// size of which each has at most `squares_max` elements of A, or one matrix.
fn groups(sides: &[[usize; 2]], squares_max: usize) -> Vec<usize> {
    let (mut groups, mut next) = (vec![usize::MAX; sides.len()], 0);
    for first in 0..sides.len() {
        if groups[first] != usize::MAX {
            continue;
        }
        let [rows, columns] = sides[first];
        let alike: Vec<_> = (first..sides.len())
            .filter(|&at| sides[at] == sides[first])
            .collect();
        let most = (squares_max / rows.min(columns).pow(2).max(1)).max(1);
        let count = alike.len().div_ceil(most);
        for (number, at) in alike.iter().enumerate() {
            groups[*at] = next + number * count / alike.len();
        }
        next += count;
    }
    groups
}

/// The rank of each group, given rows and columns of all matrices and their groups: the most
/// expensive first, each to the rank with the least to do so far.
fn owners(sides: &[[usize; 2]], groups: &[usize], ranks: usize) -> Vec<usize> {
    let mut costs = vec![0; groups.iter().max().map_or(0, |last| last + 1)];
    for ([rows, columns], &group) in sides.iter().zip(groups) {
        costs[group] += (rows * columns) as u128 * *rows.min(columns) as u128;
    }
    let mut order: Vec<_> = (0..costs.len()).collect();
    order.sort_by_key(|&group| std::cmp::Reverse(costs[group]));
    let (mut owners, mut busy) = (vec![0; costs.len()], vec![0; ranks]);
    for group in order {
        let rank = (0..ranks).min_by_key(|&rank| busy[rank]).unwrap_or(0);
        owners[group] = rank;
        busy[rank] += costs[group];
    }
    owners
}

#[cfg(test)]
mod tests;
