//! The loops of norm.rs. Sums are in the order of a GPU's block of threads with a row in f32
//! (`norm.cu`): each warp takes `WARP_COLUMNS` columns at a time, a lane four neighbours of every
//! `CHUNK`.

#![allow(
    clippy::needless_range_loop,
    reason = "long chains of zip are not inlined into the SIMD versions of these loops"
)]

use crate::ops::float::{Float, LANES, tree_sum};
use crate::simd::multiversion;

/// Columns at a time, and partial sums of a warp: four for each lane.
const CHUNK: usize = 4 * LANES;
/// Columns that a warp holds in registers; as in norm.cu.
const WARP_COLUMNS: usize = 4 * CHUNK;
/// The most warps of a block; as in norm.cu.
pub(super) const WARPS_MAX: usize = 8;

/// The warps that share a row.
fn warps_of(columns: usize) -> usize {
    columns.div_ceil(WARP_COLUMNS).min(WARPS_MAX)
}

/// The options, as numbers of one type.
pub(super) struct NormTerms<'a, T> {
    /// Whether the mean is subtracted.
    pub(super) centers: bool,
    pub(super) epsilon: T,
    pub(super) columns: usize,
    /// Rows whose sum is a row of the sums for weight and bias.
    pub(super) block_rows: usize,
    /// (C)
    pub(super) weight: Option<&'a [T]>,
    /// (C)
    pub(super) bias: Option<&'a [T]>,
}

impl<T> NormTerms<'_, T> {
    /// The statistics of a row.
    #[inline(always)]
    pub(super) fn statistics(&self) -> usize {
        if self.centers { 2 } else { 1 }
    }
}

/// The part of the operands of forward that belongs to some rows.
pub(super) struct ForwardRows<'a, T> {
    pub(super) out: &'a mut [T],
    pub(super) stats: &'a mut [T],
    /// x + residual, if there is a residual.
    pub(super) sum: Option<&'a mut [T]>,
    /// None where it is in place of the sum.
    pub(super) x: Option<&'a [T]>,
    /// None where it is in place of the sum, or absent.
    pub(super) residual: Option<&'a [T]>,
}

/// The part of the operands of backward that belongs to some blocks of rows.
pub(super) struct BackwardRows<'a, T> {
    pub(super) dx: &'a mut [T],
    /// None where it is in place of dx.
    pub(super) dy: Option<&'a [T]>,
    pub(super) x: &'a [T],
    pub(super) stats: &'a [T],
    /// None if absent; Some(None) where it is in place of dx.
    pub(super) dresidual: Option<Option<&'a [T]>>,
    pub(super) weight_sums: Option<&'a mut [T]>,
    pub(super) bias_sums: Option<&'a mut [T]>,
}

multiversion! {
    pub(super) fn forward[T: Float](of: &NormTerms<'_, T>, rows: ForwardRows<'_, T>) {
        let ForwardRows { out, stats, mut sum, x, residual } = rows;
        let outs = out.chunks_exact_mut(of.columns);
        let stats = stats.chunks_exact_mut(of.statistics());
        for (row, (out, stats)) in outs.zip(stats).enumerate() {
            let range = row * of.columns..(row + 1) * of.columns;
            let [x, residual] = [x, residual].map(|all| all.map(|all| &all[range.clone()]));
            let x = match &mut sum {
                Some(sum) => {
                    let sum = &mut sum[range];
                    add(sum, x, residual);
                    &*sum
                }
                None => x.unwrap_or_default(),
            };
            normalize(of, out, stats, x);
        }
    }
}

/// `sum = x + residual`; None is the sum itself.
#[inline(always)]
fn add<T: Float>(sum: &mut [T], x: Option<&[T]>, residual: Option<&[T]>) {
    match (x, residual) {
        (Some(x), Some(residual)) => {
            for ((sum, &x), &residual) in sum.iter_mut().zip(x).zip(residual) {
                *sum = x + residual;
            }
        }
        (Some(other), None) | (None, Some(other)) => {
            for (sum, &other) in sum.iter_mut().zip(other) {
                *sum = *sum + other;
            }
        }
        (None, None) => sum.iter_mut().for_each(|sum| *sum = *sum + *sum),
    }
}

/// One row, whose operands all have its length.
#[inline(always)]
fn normalize<T: Float>(of: &NormTerms<'_, T>, out: &mut [T], stats: &mut [T], x: &[T]) {
    let count = T::from_f64(of.columns as f64);
    let mut mean = T::ZERO;
    if of.centers {
        mean = row_sum(of.columns, RowElements(x)) / count;
    }
    let variance = row_sum(of.columns, Deviations { x, mean }) / count + of.epsilon;
    // Where squares overflow, a scale of 0 would hide it.
    let scale = if variance.finite() {
        T::ONE / variance.root()
    } else {
        T::from_f64(f64::NAN)
    };
    match stats {
        [first, second] => [*first, *second] = [mean, scale],
        stats => stats[0] = scale,
    }
    let [ones, nothing] = absent();
    for (index, out) in out.chunks_mut(CHUNK).enumerate() {
        let first = index * CHUNK;
        let x = &x[first..first + out.len()];
        let weight = part(of.weight, first, &ones[..out.len()]);
        let bias = part(of.bias, first, &nothing[..out.len()]);
        for k in 0..out.len() {
            out[k] = ((x[k] - mean) * scale).fused(weight[k], bias[k]);
        }
    }
}

/// What replaces a missing weight, and for a missing bias or residual: adding −0 changes nothing,
/// not even the sign of a zero.
#[inline(always)]
fn absent<T: Float>() -> [[T; CHUNK]; 2] {
    [[T::ONE; CHUNK], [T::from_f64(-0.0); CHUNK]]
}

/// The elements from `first` on, as many as there are in `absent`, which replaces a missing row.
#[inline(always)]
fn part<'a, T>(row: Option<&'a [T]>, first: usize, absent: &'a [T]) -> &'a [T] {
    match row {
        Some(row) => &row[first..first + absent.len()],
        None => absent,
    }
}

/// What is summed over a row.
trait Terms<T>: Copy {
    /// Adds a term to each of `sums`, of the columns from `first` on.
    fn add(self, sums: &mut [T], first: usize);
}

/// The elements of a row.
#[derive(Clone, Copy)]
struct RowElements<'a, T>(&'a [T]);

impl<T: Float> Terms<T> for RowElements<'_, T> {
    #[inline(always)]
    fn add(self, sums: &mut [T], first: usize) {
        let x = &self.0[first..first + sums.len()];
        for k in 0..sums.len() {
            sums[k] = sums[k] + x[k];
        }
    }
}

/// The squares of their deviations from the mean.
#[derive(Clone, Copy)]
struct Deviations<'a, T> {
    x: &'a [T],
    mean: T,
}

impl<T: Float> Terms<T> for Deviations<'_, T> {
    #[inline(always)]
    fn add(self, sums: &mut [T], first: usize) {
        let x = &self.x[first..first + sums.len()];
        for k in 0..sums.len() {
            let deviation = x[k] - self.mean;
            sums[k] = deviation.fused(deviation, sums[k]);
        }
    }
}

/// The sum over a row of this many columns.
#[inline(always)]
fn row_sum<T: Float>(columns: usize, terms: impl Terms<T>) -> T {
    let warps = warps_of(columns);
    let mut totals = [T::ZERO; LANES];
    for (warp, total) in totals[..warps].iter_mut().enumerate() {
        let mut sums = [T::ZERO; CHUNK];
        for first in (warp * WARP_COLUMNS..columns).step_by(warps * WARP_COLUMNS) {
            let end = columns.min(first + WARP_COLUMNS);
            for first in (first..end).step_by(CHUNK) {
                match end - first {
                    CHUNK.. => terms.add(&mut sums, first),
                    rest => terms.add(&mut sums[..rest], first),
                }
            }
        }
        let mut lanes = [T::ZERO; LANES];
        for (lane, &[a, b, c, d]) in lanes.iter_mut().zip(sums.as_chunks().0) {
            *lane = (a + b) + (c + d);
        }
        *total = tree_sum(lanes);
    }
    tree_sum(totals)
}

multiversion! {
    pub(super) fn backward[T: Float](of: &NormTerms<'_, T>, rows: BackwardRows<'_, T>) {
        let BackwardRows { dx, dy, x, stats, dresidual, mut weight_sums, mut bias_sums } = rows;
        let dxs = dx.chunks_exact_mut(of.columns);
        let stats = stats.chunks_exact(of.statistics());
        for (row, (dx, stats)) in dxs.zip(stats).enumerate() {
            let range = row * of.columns..(row + 1) * of.columns;
            let block = row / of.block_rows;
            let block = block * of.columns..(block + 1) * of.columns;
            let mut sums = [&mut weight_sums, &mut bias_sums].map(|sums| {
                sums.as_mut().map(|sums| &mut sums[block.clone()])
            });
            if row.is_multiple_of(of.block_rows) {
                sums.iter_mut().flatten().for_each(|sums| sums.fill(T::ZERO));
            }
            let row = BackwardRow {
                mean: if of.centers { stats[0] } else { T::ZERO },
                scale: stats[of.statistics() - 1],
                dy: dy.map(|dy| &dy[range.clone()]),
                x: &x[range.clone()],
                dresidual: dresidual.map(|of| of.map(|of| &of[range])),
            };
            row.run(of, dx, sums);
        }
    }
}

/// One row of backward.
#[derive(Clone, Copy)]
struct BackwardRow<'a, T> {
    mean: T,
    scale: T,
    dy: Option<&'a [T]>,
    x: &'a [T],
    dresidual: Option<Option<&'a [T]>>,
}

impl<T: Float> BackwardRow<'_, T> {
    #[inline(always)]
    fn run(self, of: &NormTerms<'_, T>, dx: &mut [T], sums: [Option<&mut [T]>; 2]) {
        let [mut weight_sums, mut bias_sums] = sums;
        let [ones, nothing] = absent();
        let count = T::from_f64(of.columns as f64);
        let dy = self.dy.unwrap_or(dx);
        let (weight, ones) = (of.weight, &ones);
        let gradients = Gradients { dy, weight, ones };
        let mut along_one = T::ZERO;
        if of.centers {
            along_one = row_sum(of.columns, gradients) / count;
        }
        let products = Products {
            gradients,
            of: &self,
        };
        let against_x = T::ZERO - row_sum(of.columns, products) / count;
        // What dx is in place of.
        let mut before = [T::ZERO; CHUNK];
        for first in (0..of.columns).step_by(CHUNK) {
            let end = of.columns.min(first + CHUNK);
            let before = &mut before[..end - first];
            if self.dy.is_none() || self.dresidual == Some(None) {
                before.copy_from_slice(&dx[first..end]);
            }
            let dy = self.dy.map_or(&*before, |dy| &dy[first..end]);
            let dresidual = match self.dresidual {
                None => &nothing[..end - first],
                Some(None) => &*before,
                Some(Some(dresidual)) => &dresidual[first..end],
            };
            let x = &self.x[first..end];
            if let Some(sums) = &mut weight_sums {
                let sums = &mut sums[first..end];
                for k in 0..sums.len() {
                    sums[k] = dy[k].fused((x[k] - self.mean) * self.scale, sums[k]);
                }
            }
            if let Some(sums) = &mut bias_sums {
                let sums = &mut sums[first..end];
                for k in 0..sums.len() {
                    sums[k] = sums[k] + dy[k];
                }
            }
            let weight = part(of.weight, first, &ones[..end - first]);
            let dx = &mut dx[first..end];
            for k in 0..dx.len() {
                let normed = (x[k] - self.mean) * self.scale;
                let gradient = normed.fused(against_x, dy[k] * weight[k] - along_one);
                dx[k] = self.scale.fused(gradient, dresidual[k]);
            }
        }
    }
}

/// dy · weight.
#[derive(Clone, Copy)]
struct Gradients<'a, T> {
    dy: &'a [T],
    weight: Option<&'a [T]>,
    ones: &'a [T; CHUNK],
}

impl<T: Float> Terms<T> for Gradients<'_, T> {
    #[inline(always)]
    fn add(self, sums: &mut [T], first: usize) {
        let dy = &self.dy[first..first + sums.len()];
        let weight = part(self.weight, first, &self.ones[..sums.len()]);
        for k in 0..sums.len() {
            sums[k] = sums[k] + dy[k] * weight[k];
        }
    }
}

/// dy · weight · x, normalized.
#[derive(Clone, Copy)]
struct Products<'a, T> {
    gradients: Gradients<'a, T>,
    of: &'a BackwardRow<'a, T>,
}

impl<T: Float> Terms<T> for Products<'_, T> {
    #[inline(always)]
    fn add(self, sums: &mut [T], first: usize) {
        let Gradients { dy, weight, ones } = self.gradients;
        let (dy, x) = (
            &dy[first..first + sums.len()],
            &self.of.x[first..first + sums.len()],
        );
        let weight = part(weight, first, &ones[..sums.len()]);
        for k in 0..sums.len() {
            let normed = (x[k] - self.of.mean) * self.of.scale;
            sums[k] = (dy[k] * weight[k]).fused(normed, sums[k]);
        }
    }
}
