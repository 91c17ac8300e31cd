//! Says step by step how a dataset is loaded.

use std::sync::Arc;

use ddp_kernels::{Device, Member, Seed};

use super::{InOrder, Loader, Source};
use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::sampler::{Sampler, Shards};

/// How a dataset is loaded: in batches of 32 rows, in the order that it has, unless it is told
/// otherwise.
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

    /// Cuts every batch into so many shards, for a step with as many: `ReducerOptions::shards`.
    pub fn shards(mut self, shards: usize) -> LoaderBuilder {
        self.shards = Some(shards);
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
