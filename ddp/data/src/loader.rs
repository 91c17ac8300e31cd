//! Fills batches: a rank's rows of a global batch are gathered into one of two slots and cut into
//! micro-batches.
//!
//! The next batch is gathered by a background thread during the step (`slots.rs`). Batches get onto
//! GPUs in two ways: copied from host memory, or gathered from data kept there (`devices.rs`).
//! Letters: R rows of this rank, at most; I… and T… the shapes of a row's inputs
//! and targets.

mod batch;
mod devices;
mod lanes;
mod slots;

use std::sync::Arc;

use ddp_kernels::{Device, Member, Seed};

pub use self::batch::{Batch, Micro, Origin, SlotId};
pub use self::devices::{Resident, Source};
use self::slots::Slots;
use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::sampler::{self, Sampler};

/// Fills the batches of training, in the sampler's order.
#[derive(Debug)]
pub struct Loader {
    slots: Slots,
    sampler: Sampler,
    rank: usize,
    size: usize,
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
        assert_eq!(
            source.dataset.rows(),
            sampler.rows(),
            "the sampler is for another dataset"
        );
        // No rank's share of a batch is larger than a full batch divided by the ranks, rounded up.
        let rows_max = sampler.batch().div_ceil(size as u64);
        let slots = Slots::new(source, Some(sampler), rows_max, micro)?;
        Ok(Loader {
            slots,
            sampler,
            rank,
            size,
            end: u64::MAX,
        })
    }

    /// This rank's rows for step `step0`, counted from 0. The rows of the step after it are
    /// gathered in the background.
    pub fn load(&mut self, step0: u64) -> Result<&Batch> {
        let place = self.sampler.at(step0);
        let positions = &place.positions;
        let mine = sampler::share(positions, self.rank, self.size);
        let (rows, first) = (
            positions.end - positions.start,
            mine.start - positions.start,
        );
        let recurs = rows == self.sampler.batch();
        let mine = self.rows_of(step0);
        self.slots
            .load([step0, place.epoch], rows, first, mine, recurs)?;
        if step0 + 1 < self.end {
            let next = self.rows_of(step0 + 1);
            self.slots.prefetch(step0 + 1, next)?;
        }
        Ok(self.slots.last())
    }

    /// This rank's rows of step `step0`.
    fn rows_of(&self, step0: u64) -> impl Iterator<Item = u64> + use<> {
        let place = self.sampler.at(step0);
        let order = self.sampler.permutation(place.epoch);
        let mine = sampler::share(&place.positions, self.rank, self.size);
        mine.map(move |position| order.row(position))
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
    share: std::ops::Range<u64>,
    batch: u64,
}

impl InOrder {
    /// Batches of at most `batch` rows for rank `rank` of `size`.
    pub fn new(source: Source, rank: usize, size: usize, batch: usize) -> Result<InOrder> {
        assert!(batch > 0, "batches of no rows");
        let share = sampler::share(&(0..source.dataset.rows()), rank, size);
        let rows_max = (batch as u64).min(share.end - share.start);
        Ok(InOrder {
            slots: Slots::new(source, None, rows_max, None)?,
            share,
            batch: batch as u64,
        })
    }

    /// Where the rows are from.
    pub fn origin(&self) -> &Arc<Origin> {
        &self.slots.origin
    }

    /// The number of this rank's batches. Ranks may differ by one.
    pub fn count(&self) -> u64 {
        (self.share.end - self.share.start).div_ceil(self.batch)
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
        let start = self.share.start + index * self.batch;
        start..start.saturating_add(self.batch).min(self.share.end)
    }
}

/// How a dataset is loaded: in batches of 32 rows, in the order that it has, unless it is told
/// otherwise.
#[derive(Debug)]
pub struct LoaderBuilder {
    dataset: Arc<dyn Dataset>,
    batch_size: u64,
    seed: Option<Seed>,
    drop_last: bool,
    micro_batch: Option<usize>,
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

    /// Another order of rows in each epoch, which the seed decides.
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

    /// Brings batches to this device, and not to that of `World::device`.
    pub fn device(self, device: Device) -> LoaderBuilder {
        self.devices(device, device)
    }

    /// Brings inputs to the first device of a model that is split, targets to its last.
    pub fn devices(mut self, first: Device, last: Device) -> LoaderBuilder {
        self.devices = Some([first, last]);
        self
    }

    /// The part of each batch that belongs to this rank: `build(world)`.
    pub fn build(self, member: impl Into<Member>) -> Result<Loader> {
        let Member { rank, size, device } = member.into();
        let (rows, seed) = (self.dataset.rows(), self.seed.map(|seed| seed.0));
        let sampler = Sampler::with_order(rows, self.batch_size, seed, self.drop_last)?;
        let micro_batch = self.micro_batch;
        Loader::new(self.source(device)?, sampler, rank, size, micro_batch)
    }

    /// This rank's part of all rows, once and in order: for evaluation.
    pub fn build_in_order(self, member: impl Into<Member>) -> Result<InOrder> {
        let Member { rank, size, device } = member.into();
        let batch = usize::try_from(self.batch_size).unwrap_or(usize::MAX);
        InOrder::new(self.source(device)?, rank, size, batch)
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
