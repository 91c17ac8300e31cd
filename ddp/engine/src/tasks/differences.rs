//! How far numbers are from their targets, by column, in the units of the labels.

use std::collections::BTreeMap;

use ddp_comm::World;
use ddp_data::{Batch, Normalization};
use ddp_kernels::transfer::announced;
use ddp_kernels::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::exchange;

/// Differences of outputs and targets, by column.
pub struct Differences {
    pub(super) names: Vec<String>,
    /// Of training, by shard of this rank, so that they are added in the same order on any number
    /// of ranks; an evaluation of a saved model keeps its own.
    sums: BTreeMap<usize, Vec<f64>>,
    /// Every how many rows of a shard are kept; 0 for none.
    pub(crate) kept_every: u64,
    /// Targets and outputs of these rows, by shard.
    kept: BTreeMap<usize, Vec<f64>>,
}

/// How far a column's outputs are from its targets, in the units of the labels.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ColumnErrors {
    /// The name of the column, or its number.
    pub name: String,
    /// The root of the mean squared error.
    pub rmse: Option<f64>,
    /// The mean absolute error.
    pub mae: Option<f64>,
    /// The part of the targets' variance that is explained; None if they have none.
    pub r2: Option<f64>,
}

fn add(all: &mut [f64], sums: &[f64]) {
    let all = all.iter_mut().zip(sums);
    all.for_each(|(all, sum)| *all += sum);
}

/// Sums of a column: absolute and squared differences, targets and their squares.
const SUMS: usize = 4;

impl Differences {
    pub(super) fn of(outputs: usize, names: Option<Vec<String>>) -> Differences {
        let names = names.filter(|names| names.len() == outputs);
        Differences {
            names: names.unwrap_or_else(|| (0..outputs).map(|index| index.to_string()).collect()),
            sums: BTreeMap::new(),
            kept_every: 0,
            kept: BTreeMap::new(),
        }
    }

    /// The number of rows, and the sums of each column.
    pub(super) fn sum_count(&self) -> usize {
        1 + SUMS * self.names.len()
    }

    /// Adds a batch of a shard in training, whose targets were divided by `normalization`.
    pub(crate) fn see(
        &mut self,
        shard: usize,
        batch: &Batch,
        output: &Tensor,
        normalization: Option<&Normalization>,
    ) -> Result<()> {
        let host = |tensor: &Tensor, is_output: bool| -> Result<Vec<f32>> {
            let mut values = tensor.to((Device::Cpu, DType::F32))?.to_vec::<f32>()?;
            match normalization {
                Some(with) if is_output => with.undo_clipped(&mut values, self.names.len()),
                Some(with) => with.undo(&mut values, self.names.len()),
                None => {}
            }
            Ok(values)
        };
        let both = || -> Result<_> { Ok([host(output, true)?, host(&batch.targets, false)?]) };
        let [output, targets] = announced("the errors of held-out rows", both)?;
        let sums = self.sums_of(&output, &targets);
        let all = self.sums.entry(shard).or_default();
        all.resize(sums.len(), 0.0);
        let rows = all[0] as u64..;
        let pairs = rows.zip(targets.iter().zip(&output));
        let kept = pairs.filter(|(row, _)| row.checked_rem(self.kept_every) == Some(0));
        let kept = kept.flat_map(|(_, (target, output))| [target, output].map(|it| f64::from(*it)));
        self.kept.entry(shard).or_default().extend(kept);
        add(all, &sums);
        Ok(())
    }

    /// Targets and outputs of the rows that are kept, of all ranks, which call it together.
    pub(crate) fn kept(&mut self, world: &World) -> Result<Vec<[f32; 2]>> {
        let own = std::mem::take(&mut self.kept).into_values().flatten();
        let all = exchange::gather_numbers(world, &own.collect::<Vec<_>>())?.concat();
        let pairs = all.chunks_exact(2);
        Ok(pairs.map(|pair| [pair[0] as f32, pair[1] as f32]).collect())
    }

    /// The errors over all ranks' rows. All ranks call it together.
    pub(crate) fn together(mut self, world: &World) -> Result<Vec<ColumnErrors>> {
        let mut all = vec![0.0; self.sum_count()];
        let own = std::mem::take(&mut self.sums).into_values().flatten();
        for of_rank in exchange::gather_numbers(world, &own.collect::<Vec<_>>())? {
            of_rank
                .chunks(all.len())
                .for_each(|sums| add(&mut all, sums));
        }
        Ok(self.errors(&all))
    }

    /// The number of rows, then the sums of each column.
    pub(super) fn sums_of(&self, output: &[f32], targets: &[f32]) -> Vec<f64> {
        let outputs = self.names.len();
        let mut sums = vec![0.0; self.sum_count()];
        sums[0] = (targets.len() / outputs) as f64;
        for (index, (&a, &b)) in output.iter().zip(targets).enumerate() {
            let (target, difference) = (f64::from(b), f64::from(a) - f64::from(b));
            let squares = [difference, target].map(|value| value * value);
            let terms = [difference.abs(), squares[0], target, squares[1]];
            let of_column = sums[1 + SUMS * (index % outputs)..].iter_mut();
            of_column.zip(terms).for_each(|(sum, term)| *sum += term);
        }
        sums
    }

    pub(super) fn errors(&self, sums: &[f64]) -> Vec<ColumnErrors> {
        let column = |(name, sums_of): (&String, &[f64])| {
            let mean = |sum: usize| sums_of[sum] / sums[0];
            let variance = mean(3) - mean(2) * mean(2);
            // Less is rounding error.
            let varies = variance > 1e-12 * mean(3);
            let finite = |value: f64| Some(value).filter(|value| value.is_finite());
            ColumnErrors {
                name: name.clone(),
                rmse: finite(mean(1).sqrt()),
                mae: finite(mean(0)),
                r2: finite(1.0 - mean(1) / variance).filter(|_| varies),
            }
        };
        let columns = self.names.iter().zip(sums[1..].chunks(SUMS));
        columns.map(column).collect()
    }
}

/// The mean of R² over the columns that have it, each of which counts the same.
pub fn mean_r2(columns: &[ColumnErrors]) -> Option<f64> {
    let known: Vec<f64> = columns.iter().filter_map(|column| column.r2).collect();
    (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
}

/// What an evaluation in training says of these columns, by name: RMSE only of a single one, since
/// several may have different units.
pub(crate) fn numbers_figures(columns: &[ColumnErrors]) -> Vec<(&'static str, f64)> {
    let figures = match columns {
        [one] => vec![("rmse", one.rmse), ("r2", one.r2)],
        _ => vec![("mean_r2", mean_r2(columns))],
    };
    let known = figures.into_iter();
    let known = known.filter_map(|(name, figure)| Some((name, figure?)));
    known.collect()
}
