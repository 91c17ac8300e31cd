//! Fills batches: a rank's rows of a global batch are gathered into one of two slots and cut into
//! micro-batches.
//!
//! The next batch is gathered by a background thread during the step (`batch.rs`). Batches get onto
//! GPUs in two ways: copied from host memory, or gathered from data kept there (`devices.rs`).
//! Letters: R rows of this rank, at most; I… and T… the shapes of a row's inputs and targets.

mod batch;
mod devices;
mod order;

use std::ops::Range;
use std::sync::Arc;

use ddp_kernels::{Device, Member, Seed};

use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::loader::batch::{BatchRows, Slots};
use crate::loader::order::{Order, length_of};
use crate::sampler::{self, Sampler, Shards};

pub use self::batch::{Batch, Micro, Origin, SlotId};
pub use self::devices::{Resident, Source};

/// Fills the batches of training, in the sampler's order.
#[derive(Debug)]
pub struct Loader {
    slots: Slots,
    order: Order,
    shards: Shards,
    /// The first step that will not be loaded.
    end: u64,
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
        let order = Order::new(source.dataset.clone(), sampler);
        let slots = Slots::new(source, Some(sampler), rows_max, (micro, shards))?;
        Ok(Loader {
            slots,
            order,
            shards,
            end: u64::MAX,
        })
    }

    /// This rank's rows for step `step0`, counted from 0. The rows of the step after it are
    /// gathered in the background.
    pub fn load(&mut self, step0: u64) -> Result<&Batch> {
        let place = self.order.sampler.at(step0);
        let positions = &place.positions;
        let mine = self.shards.share(positions);
        let (rows, first) = (
            positions.end - positions.start,
            mine.start - positions.start,
        );
        let recurs = rows == self.order.sampler.batch();
        let mine = self.order.batch(step0, self.shards);
        self.slots
            .load([step0, place.epoch], rows, first, mine, recurs)?;
        if step0 + 1 < self.end {
            let next = self.order.batch(step0 + 1, self.shards);
            self.slots.prefetch(step0 + 1, next)?;
        }
        Ok(self.slots.last())
    }

    /// All rows of step `step0`, those of other ranks, too.
    pub fn rows_of(&mut self, step0: u64) -> impl Iterator<Item = u64> + use<'_> {
        self.order.batch(step0, Shards::one_each(0, 1)).rows
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
        &self.order.sampler
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

    fn rows_of(&self, shard: usize) -> Range<u64> {
        let all = 0..self.slots.origin.dataset.rows();
        sampler::share(&all, shard, self.shards.of)
    }

    /// Batch `index`. Its `first` is its first row, its `rows` are all rows of the dataset.
    pub fn load(&mut self, index: u64) -> Result<&Batch> {
        assert!(index < self.count(), "batch {index} of {}", self.count());
        let (rows, all) = (self.rows(index), self.slots.origin.dataset.rows());
        let (first, rows) = (rows.start, self.with_length(rows));
        self.slots.load([index, 0], all, first, rows, false)?;
        if index + 1 < self.count() {
            let rows = self.with_length(self.rows(index + 1));
            self.slots.prefetch(index + 1, rows)?;
        }
        Ok(self.slots.last())
    }

    fn with_length(&self, rows: Range<u64>) -> BatchRows<Range<u64>> {
        BatchRows {
            length: length_of(&*self.slots.origin.dataset, rows.clone()),
            rows,
        }
    }

    fn rows(&self, index: u64) -> Range<u64> {
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

/// How a dataset is loaded: by default in batches of 32 rows, in the dataset's order.
#[derive(Debug)]
pub struct LoaderBuilder {
    dataset: Arc<dyn Dataset>,
    batch_size: u64,
    seed: Option<Seed>,
    drop_last: bool,
    micro_batch: Option<usize>,
    shards: Option<usize>,
    devices: Option<[Device; 2]>,
}

impl Loader {
    /// A loader of these rows.
    pub fn builder(dataset: impl Dataset + 'static) -> LoaderBuilder {
        LoaderBuilder {
            dataset: Arc::new(dataset),
            batch_size: 32,
            seed: None,
            drop_last: false,
            micro_batch: None,
            shards: None,
            devices: None,
        }
    }
}

impl LoaderBuilder {
    /// Rows of a batch, over all ranks.
    pub fn batch_size(mut self, rows: u64) -> LoaderBuilder {
        self.batch_size = rows;
        self
    }

    /// A different order of rows in each epoch, chosen by the seed.
    pub fn shuffle(mut self, seed: Seed) -> LoaderBuilder {
        self.seed = Some(seed);
        self
    }

    /// Skips an epoch's last batch if it is short.
    pub fn drop_last(mut self) -> LoaderBuilder {
        self.drop_last = true;
        self
    }

    /// The most rows of a rank that go through the model at once; else all of its part of a batch.
    pub fn micro_batch(mut self, rows: usize) -> LoaderBuilder {
        self.micro_batch = Some(rows);
        self
    }

    /// Cuts every batch into this many shards, for a step with as many: `ReducerOptions::shards`.
    pub fn shards(mut self, shards: usize) -> LoaderBuilder {
        self.shards = Some(shards);
        self
    }

    /// Puts batches on this device instead of `World::device`.
    pub fn device(self, device: Device) -> LoaderBuilder {
        self.devices(device, device)
    }

    /// Puts inputs on the first device of a split model, and targets on its last.
    pub fn devices(mut self, first: Device, last: Device) -> LoaderBuilder {
        self.devices = Some([first, last]);
        self
    }

    /// The part of each batch that belongs to this rank: `build(world)`.
    pub fn build(self, member: impl Into<Member>) -> Result<Loader> {
        let Member { rank, size, device } = member.into();
        let (rows, seed) = (self.dataset.rows(), self.seed.map(|seed| seed.0));
        let sampler = Sampler::with_order(rows, self.batch_size, seed, self.drop_last)?;
        let (micro_batch, shards) = (self.micro_batch, self.shards_of(rank, size));
        Loader::in_shards(self.source(device)?, sampler, shards, micro_batch)
    }

    /// This rank's part of all rows, once and in order: for evaluation.
    pub fn build_in_order(self, member: impl Into<Member>) -> Result<InOrder> {
        let Member { rank, size, device } = member.into();
        let batch = usize::try_from(self.batch_size).unwrap_or(usize::MAX);
        let shards = self.shards_of(rank, size);
        InOrder::in_shards(self.source(device)?, shards, batch)
    }

    fn shards_of(&self, rank: usize, size: usize) -> Shards {
        Shards::of_rank(self.shards.unwrap_or(size), rank, size)
    }

    fn source(self, chosen: Option<Device>) -> Result<Source> {
        let devices = self.devices.or(chosen.map(|device| [device; 2]));
        let devices = devices.ok_or_else(|| {
            Error::Usage(
                "a loader: expected the device of its batches, got none; help: call \
                 world.device()? before build, or name one with .device(…)"
                    .into(),
            )
        })?;
        Ok(Source::new(self.dataset, devices))
    }
}

#[cfg(test)]
mod tests;
