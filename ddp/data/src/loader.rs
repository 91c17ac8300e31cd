//! Fills batches: a rank's rows of a global batch are gathered into one of two slots and cut into
//! micro-batches.
//!
//! The next batch is gathered by a background thread during the step (`fetch.rs`). Batches get onto
//! GPUs in two ways: copied from host memory (`ferry.rs`), or gathered from data kept there
//! (`resident.rs`). Letters: R rows of this rank, at most; I… and T… the shapes of a row's inputs
//! and targets.

mod batch;
mod builder;
mod ferry;
mod fetch;
mod lanes;
mod memory;
mod resident;
mod slots;
mod source;

use std::sync::Arc;

pub use self::batch::{Batch, Micro, Origin, SlotId};
pub use self::builder::LoaderBuilder;
pub use self::resident::Resident;
use self::slots::Slots;
pub use self::source::Source;
use crate::error::Result;
use crate::sampler::{self, Permutation, Sampler, Shards};

/// Fills the batches of training, in the sampler's order.
#[derive(Debug)]
pub struct Loader {
    slots: Slots,
    sampler: Sampler,
    shards: Shards,
    /// The orders of the last epoch and of the next one, by the parity of the epoch.
    orders: [Option<(u64, Permutation)>; 2],
    /// The first step that will not be loaded.
    end: u64,
}

/// The order of rows in `epoch`.
fn order_of<'a>(
    orders: &'a mut [Option<(u64, Permutation)>; 2],
    sampler: &Sampler,
    epoch: u64,
) -> &'a Permutation {
    let place = &mut orders[(epoch % 2) as usize];
    if place.as_ref().is_none_or(|(there, _)| *there != epoch) {
        *place = Some((epoch, sampler.permutation(epoch)));
    }
    &place.as_ref().expect("set above").1
}

impl Loader {
    /// Batches of `source` for rank `rank` of `size`. At most `micro` rows go through the model at
    /// once.
    pub fn new(
        source: Source,
        sampler: Sampler,
        rank: usize,
        size: usize,
        micro: Option<usize>,
    ) -> Result<Loader> {
        let shards = Shards::one_each(rank, size);
        Loader::in_shards(source, sampler, shards, micro)
    }

    /// As `new`, for a rank that has these shards of every batch. Each goes through the model by
    /// itself.
    pub fn in_shards(
        source: Source,
        sampler: Sampler,
        shards: Shards,
        micro: Option<usize>,
    ) -> Result<Loader> {
        assert_eq!(
            source.dataset.rows(),
            sampler.rows(),
            "the sampler is for another dataset"
        );
        shards.check()?;
        let rows_max = shards.most_of(sampler.batch());
        let slots = Slots::new(source, Some(sampler), rows_max, (micro, shards))?;
        Ok(Loader {
            slots,
            sampler,
            shards,
            orders: [None, None],
            end: u64::MAX,
        })
    }

    /// This rank's rows for step `step0`, counted from 0. The rows of the step after it are
    /// gathered in the background.
    pub fn load(&mut self, step0: u64) -> Result<&Batch> {
        let place = self.sampler.at(step0);
        let mine = self.shards.share(&place.positions);
        let (rows, first) = (
            place.positions.end - place.positions.start,
            mine.start - place.positions.start,
        );
        let order = order_of(&mut self.orders, &self.sampler, place.epoch);
        let mine = mine.map(|position| order.row(position));
        let recurs = rows == self.sampler.batch().min(self.sampler.rows());
        self.slots
            .load([step0, place.epoch], rows, first, mine, recurs)?;
        if step0 + 1 < self.end {
            let place = self.sampler.at(step0 + 1);
            let order = order_of(&mut self.orders, &self.sampler, place.epoch);
            let mine = self.shards.share(&place.positions);
            self.slots
                .prefetch(step0 + 1, mine.map(|position| order.row(position)))?;
        }
        Ok(self.slots.last())
    }

    /// Says that no step from `step0` on, counted from 0, will be loaded, so that nothing is
    /// gathered for it.
    pub fn ends_before(&mut self, step0: u64) {
        self.end = step0;
    }

    /// The rows of the batch loaded last, in its order.
    pub fn rows(&self) -> &[u64] {
        &self.slots.rows
    }

    /// The order of rows.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }
}

/// Fills batches for evaluation: this rank's contiguous share of all rows, in order.
#[derive(Debug)]
pub struct InOrder {
    slots: Slots,
    shards: Shards,
    batch: u64,
    /// The first of this rank's batches in its share, and how many batches further the next one is.
    turns: [u64; 2],
}

impl InOrder {
    /// Batches of at most `batch` rows for rank `rank` of `size`.
    pub fn new(source: Source, rank: usize, size: usize, batch: usize) -> Result<InOrder> {
        InOrder::in_shards(source, Shards::one_each(rank, size), batch)
    }

    /// As `new`, for a rank that has these shards of all rows. A batch is of one shard.
    pub fn in_shards(source: Source, shards: Shards, batch: usize) -> Result<InOrder> {
        assert!(batch > 0, "batches of no rows");
        shards.check()?;
        let share = shards.share(&(0..source.dataset.rows()));
        let rows_max = (batch as u64).min(share.end - share.start);
        Ok(InOrder {
            slots: Slots::new(source, None, rows_max, (None, shards))?,
            shards,
            batch: batch as u64,
            turns: [0, 1],
        })
    }

    /// The same, but batch k of the whole dataset is that of rank k mod `size`: a batch then has
    /// the same rows for any number of ranks.
    pub fn in_turns(source: Source, rank: usize, size: usize, batch: usize) -> Result<InOrder> {
        Ok(InOrder {
            turns: [rank as u64, size as u64],
            ..InOrder::new(source, 0, 1, batch)?
        })
    }

    /// Where the rows are from.
    pub fn origin(&self) -> &Arc<Origin> {
        &self.slots.origin
    }

    /// The number of this rank's batches. Ranks may differ by one.
    pub fn count(&self) -> u64 {
        let [first, step] = self.turns;
        self.batches().saturating_sub(first).div_ceil(step)
    }

    /// The most batches that any rank has, if ranks take turns.
    pub fn rounds(&self) -> u64 {
        self.batches().div_ceil(self.turns[1])
    }

    fn batches(&self) -> u64 {
        let counts = self.shards.numbers().map(|shard| self.count_of(shard));
        counts.sum()
    }

    /// The shards of the rows that are this rank's.
    pub fn shards(&self) -> Shards {
        self.shards
    }

    /// The number of batches of one of its shards, which follow those of the shard before it.
    pub fn count_of(&self, shard: usize) -> u64 {
        let rows = self.rows_of(shard);
        (rows.end - rows.start).div_ceil(self.batch)
    }

    fn rows_of(&self, shard: usize) -> std::ops::Range<u64> {
        let all = 0..self.slots.origin.dataset.rows();
        sampler::share(&all, shard, self.shards.of)
    }

    /// Batch `index`. Its `first` is its first row, its `rows` are all rows of the dataset.
    pub fn load(&mut self, index: u64) -> Result<&Batch> {
        assert!(index < self.count(), "batch {index} of {}", self.count());
        let (rows, all) = (self.rows(index), self.slots.origin.dataset.rows());
        self.slots.load([index, 0], all, rows.start, rows, false)?;
        if index + 1 < self.count() {
            let rows = self.rows(index + 1);
            self.slots.prefetch(index + 1, rows)?;
        }
        Ok(self.slots.last())
    }

    fn rows(&self, index: u64) -> std::ops::Range<u64> {
        let [first, step] = self.turns;
        let mut index = first + index * step;
        let mut shards = self.shards.numbers();
        let shard = shards.find(|&shard| {
            let count = self.count_of(shard);
            let is_here = index < count;
            index -= if is_here { 0 } else { count };
            is_here
        });
        let rows = self.rows_of(shard.expect("an index below the count"));
        let start = rows.start + index * self.batch;
        start..start.saturating_add(self.batch).min(rows.end)
    }
}

#[cfg(test)]
mod tests;
