//! The rows of one step.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ddp_kernels::{DType, Tensor};

use crate::dataset::{Dataset, RowSpec};
use crate::error::Result;
use crate::sampler::{self, Sampler, Shards};

/// This rank's rows of one global batch. Tensors are views of a slot: on the CPU they hold these
/// rows until the next batch is loaded, on a GPU for all work that is given to the device's current
/// stream before the next batch is loaded. If a model is split over devices, inputs are on the
/// first and targets on the last. Letters: I… and T… the shapes of a row's inputs and targets.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The step, from 0; in evaluation the number of the batch.
    pub step: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// Rows of the global batch, over all ranks.
    pub rows: u64,
    /// The position of this rank's first row in the global batch.
    pub first: u64,
    /// How many rows are this rank's. May be 0.
    pub mine: usize,
    /// What the model sees of them: `[mine, I…]`.
    pub x: Tensor,
    /// Their targets: `[mine, T…]`.
    pub targets: Tensor,
    micro: usize,
    /// The shards of the global batch that these rows are.
    shards: Shards,
    /// The memory it is in, if batches of this size use it again.
    slot: Option<SlotId>,
    /// Where its rows are from, if a loader filled it.
    pub(super) origin: Option<Arc<Origin>>,
}

/// Where the rows of batches are from: equal on all ranks that share batches.
#[derive(Debug)]
pub struct Origin {
    pub(super) dataset: Arc<dyn Dataset>,
    /// The order of rows; None for rows in order.
    pub(super) order: Option<Sampler>,
}

impl Origin {
    /// The dataset and the order of its rows, a line each.
    pub fn text(&self) -> Result<String> {
        let order = self
            .order
            .map_or("rows in order".into(), |order| format!("order {order:?}"));
        Ok(format!("{}\n{order}", self.dataset.fingerprint()?))
    }
}

/// Identifies one piece of memory for batches in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotId(u64);

impl SlotId {
    /// An identity that nothing else has.
    pub fn unique() -> SlotId {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        SlotId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A part of a batch that goes through the model at once.
#[derive(Debug)]
pub struct Micro {
    /// What the model sees: `[rows, I…]`.
    pub x: Tensor,
    /// Targets of the same rows: `[rows, T…]`.
    pub targets: Tensor,
    /// The position of its first row in the global batch.
    pub first: u64,
    /// How many rows.
    pub rows: usize,
}

impl Batch {
    /// A batch of given tensors: `x` and `targets` are this rank's rows, from row `first` of the
    /// `rows` of the global batch on; at most `micro` of them go through the model at once.
    pub fn new(
        step: u64,
        epoch: u64,
        rows: u64,
        first: u64,
        x: Tensor,
        targets: Tensor,
        micro: usize,
    ) -> Batch {
        assert!(micro > 0, "micro-batches of no rows");
        let mine = x.shape()[0];
        assert_eq!(targets.shape()[0], mine, "a target for each row");
        Batch {
            step,
            epoch,
            rows,
            first,
            mine,
            x,
            targets,
            micro,
            shards: Shards::one_each(0, 1),
            slot: None,
            origin: None,
        }
    }

    /// The same batch, whose rows are these shards of the global batch.
    pub fn in_shards(self, shards: Shards) -> Batch {
        Batch { shards, ..self }
    }

    /// The shards of the global batch that its rows are. Each goes through the model by itself.
    pub fn shards(&self) -> Shards {
        self.shards
    }

    /// A shard's rows, as positions among this rank's.
    fn rows_of(&self, shard: usize) -> Range<usize> {
        if self.shards.count() == 1 {
            return 0..self.mine;
        }
        let rows = sampler::share(&(0..self.rows), shard, self.shards.of);
        (rows.start - self.first) as usize..(rows.end - self.first) as usize
    }

    /// The micro-batches of a shard; none if it has no rows.
    pub fn micros_of(&self, shard: usize) -> Range<usize> {
        let (own, before) = (self.rows_of(shard), shard - self.shards.first);
        // All shards have as many rows, but for some that have one more.
        let rows = (self.rows / self.shards.of as u64) as usize;
        let longer = own.start - before * rows;
        let micros = |rows: usize| rows.div_ceil(self.micro);
        let first = longer * micros(rows + 1) + (before - longer) * micros(rows);
        first..first + micros(own.len())
    }

    /// The rows of micro-batch `index`, as positions among this rank's.
    fn rows_of_micro(&self, index: usize) -> Range<usize> {
        let (mut shard, mut last) = (self.shards.first, self.shards.end - 1);
        while shard < last {
            let middle = shard.midpoint(last);
            match self.micros_of(middle).end <= index {
                true => shard = middle + 1,
                false => last = middle,
            }
        }
        let (rows, first) = (self.rows_of(shard), self.micros_of(shard).start);
        let start = (rows.start + (index - first) * self.micro).min(rows.end);
        start..(start + self.micro).min(rows.end)
    }

    /// Where its rows are from; None for a batch of given tensors.
    pub fn origin(&self) -> Option<&Arc<Origin>> {
        self.origin.as_ref()
    }

    /// The same batch in memory that batches of this size use again.
    pub fn in_slot(self, slot: SlotId) -> Batch {
        Batch {
            slot: Some(slot),
            ..self
        }
    }

    /// The memory it is in, if batches of this size use it again.
    pub fn slot(&self) -> Option<SlotId> {
        self.slot
    }

    /// The number of micro-batches: 0 if no row is this rank's.
    pub fn micro_count(&self) -> usize {
        self.micros_of(self.shards.end - 1).end
    }

    /// The most micro-batches of any rank, if `ranks` ranks share this batch.
    pub fn micro_count_max(&self, ranks: usize) -> usize {
        let (of, shards) = (self.shards.of, self.shards.of.div_ceil(ranks));
        let parts = if of == 1 { ranks } else { of };
        let most = usize::try_from(self.rows.div_ceil(parts as u64)).unwrap_or(usize::MAX);
        (shards * most.div_ceil(self.micro)).max(self.micro_count())
    }

    /// The position of the first row of micro-batch `index` in the global batch.
    pub fn first_of_micro(&self, index: usize) -> u64 {
        self.first + self.rows_of_micro(index).start as u64
    }

    /// Micro-batch `index`. All have the same number of rows, except the last, which may have
    /// fewer.
    pub fn micro(&self, index: usize) -> Result<Micro> {
        let count = self.micro_count();
        assert!(index < count, "micro-batch {index} of {count}");
        let rows = self.rows_of_micro(index);
        Ok(Micro {
            x: self.x.slice(rows.clone())?,
            targets: self.targets.slice(rows.clone())?,
            first: self.first_of_micro(index),
            rows: rows.len(),
        })
    }
}

/// Makes a tensor for inputs (0) or targets (1).
type Make<'a> = dyn Fn(usize, &[usize], DType) -> ddp_kernels::Result<Tensor> + 'a;

/// Memory for the inputs and targets of `rows` rows.
pub(super) fn made(dataset: &dyn Dataset, rows: usize, make: &Make<'_>) -> Result<[Tensor; 2]> {
    let RowSpec {
        inputs: x, targets, ..
    } = dataset.spec();
    let x = make(0, &x.shape_of(rows), x.dtype)?.named("batch");
    let targets = make(1, &targets.shape_of(rows), targets.dtype)?.named("targets");
    Ok([x, targets])
}

/// The first `rows` rows of this memory.
pub(super) fn first_rows([x, targets]: &[Tensor; 2], rows: usize) -> Result<[Tensor; 2]> {
    Ok([x.slice(0..rows)?, targets.slice(0..rows)?])
}
