//! Which rows are in the batch of a step, and how long they are. Usually rows have one length. Rows
//! that may be gathered without the end of their padding (`Dataset::shortens`) are as long as the
//! longest of their batch, and rows of similar length are in a batch: those of a window of batches
//! are sorted by length. All of it follows from data, seed and step, for any number of ranks.

use std::sync::Arc;

use super::batch::BatchRows;
use crate::dataset::Dataset;
use crate::sampler::{Sampler, Shards};

/// The least length of a batch's rows.
const LEAST: usize = 48;

/// The length of rows of which the longest has `used` elements before its padding: 48, 64, 96,
/// 128, 192, …, and at most `whole`. There are few, since each has a plan, kernels and graphs of
/// its own.
fn rounded(used: usize, whole: usize) -> usize {
    let power = used.max(LEAST).next_power_of_two();
    let between = power / 4 * 3;
    let length = if used <= between { between } else { power };
    length.min(whole)
}

/// The length of these rows, if they need not have that of all.
pub(super) fn length_of(dataset: &dyn Dataset, rows: impl Iterator<Item = u64>) -> Option<usize> {
    let whole = dataset.spec().inputs.elements();
    let longest = || rows.map(|row| dataset.used(row)).max();
    dataset
        .shortens()
        .then(|| rounded(longest().unwrap_or(0), whole))
}

/// The rows of every batch.
#[derive(Debug)]
pub(super) struct Order {
    dataset: Arc<dyn Dataset>,
    pub(super) sampler: Sampler,
    /// The epoch and the first position of the window that is sorted.
    window: Option<[u64; 2]>,
    /// Its rows, after their length and their position.
    sorted: Vec<(usize, u64, u64)>,
}

impl Order {
    pub(super) fn new(dataset: Arc<dyn Dataset>, sampler: Sampler) -> Order {
        Order {
            dataset,
            sampler,
            window: None,
            sorted: Vec::new(),
        }
    }

    /// The rows of these shards of the batch of step `step0`.
    pub(super) fn batch(
        &mut self,
        step0: u64,
        shards: Shards,
    ) -> BatchRows<impl Iterator<Item = u64> + use<'_>> {
        let place = self.sampler.at(step0);
        let (order, shortens) = (
            self.sampler.permutation(place.epoch),
            self.dataset.shortens(),
        );
        let (window, chosen) = self.sampler.window(&place);
        let at = [place.epoch, window.start];
        if shortens && self.window != Some(at) {
            let whole = self.dataset.spec().inputs.elements();
            let of = |position: u64| {
                let row = order.row(position);
                (rounded(self.dataset.used(row), whole), position, row)
            };
            self.sorted.clear();
            self.sorted.extend(window.map(of));
            if self.sampler.shuffles() {
                self.sorted.sort_unstable();
            }
            self.window = Some(at);
        }
        let listed = if shortens {
            &self.sorted[chosen.start as usize..chosen.end as usize]
        } else {
            &[]
        };
        let start = place.positions.start;
        let row = move |position: u64| match listed.get((position - start) as usize) {
            Some(&(_, _, row)) => row,
            None => order.row(position),
        };
        BatchRows {
            length: listed.iter().map(|it| it.0).max(),
            rows: shards.share(&place.positions).map(row),
        }
    }
}
