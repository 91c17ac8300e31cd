//! The rows of one step, their memory, and how it is filled.
//!
//! `Prefetcher` gathers the next batch on a background thread, so that reading from a disk, or
//! drawing, runs during the step. It has one request at a time, for memory that nothing else
//! touches: the loader gives the memory away with the request and gets it back with the answer. The
//! thread ends with the loader.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::{DType, Tensor};

use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::loader::devices::{BatchCopier, DeviceGatherer, Source, first_rows, made};
use crate::sampler::{self, Sampler, Shards};
use crate::setting::BATCH_SIZE;

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
    /// What the model sees of them: `[mine, I…]`. Rows that are padded may be shorter than in
    /// other batches: [`Batch::whole`].
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
        let text = |order| format!("order {order:?}");
        let order = self.order.map_or("rows in order".into(), text);
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

/// Rows of a batch.
#[derive(Debug)]
pub(super) struct BatchRows<R> {
    pub(super) rows: R,
    /// Their length, if it is not that of all rows of the dataset.
    pub(super) length: Option<usize>,
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
            if self.micros_of(middle).end <= index {
                shard = middle + 1
            } else {
                last = middle
            }
        }
        let (rows, first) = (self.rows_of(shard), self.micros_of(shard).start);
        let start = (rows.start + (index - first) * self.micro).min(rows.end);
        start..(start + self.micro).min(rows.end)
    }

    /// The length of rows that are not cut short, if those of this batch may be.
    pub fn whole(&self) -> Option<usize> {
        let dataset = &self.origin.as_ref()?.dataset;
        let whole = || dataset.spec().inputs.elements();
        dataset.shortens().then(whole)
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

/// Memory for one batch of this rank.
#[derive(Debug)]
struct BatchSlot {
    id: SlotId,
    /// Inputs `[R, I…]` and targets `[R, T…]`, each on its device.
    memory: [Tensor; 2],
    batch: Option<Batch>,
}

/// How rows get into a slot.
#[derive(Debug)]
enum FillPath {
    /// Gathered into the batch itself, in host memory.
    Host,
    /// Copied from host memory to GPUs.
    Copied(BatchCopier),
    /// Gathered on GPUs from data that are kept there.
    Resident(DeviceGatherer),
}

/// The two slots of a loader. They are made once and used in turn, so that addresses repeat and
/// nothing is allocated later; one may be filled while the other is read.
#[derive(Debug)]
pub(super) struct Slots {
    pub(super) origin: Arc<Origin>,
    slots: [BatchSlot; 2],
    next: usize,
    /// The rows loaded last, in their order.
    pub(super) rows: Vec<u64>,
    micro: usize,
    shards: Shards,
    path: FillPath,
    prefetcher: Prefetcher,
}

impl Slots {
    /// Room for batches of at most `rows_max` rows, in this order, with these shards of each.
    pub(super) fn new(
        source: Source,
        order: Option<Sampler>,
        rows_max: u64,
        (micro, shards): (Option<usize>, Shards),
    ) -> Result<Slots> {
        let (dataset, devices) = (source.dataset, source.devices);
        let rows_max = usize::try_from(rows_max).map_err(|_| {
            Error::Usage(format!(
                "{BATCH_SIZE}: expected a batch that fits memory, got {rows_max} rows a rank; help: give a smaller one"
            ))
        })?;
        let on =
            |part: usize, shape: &[usize], dtype: DType| Tensor::empty(shape, dtype, devices[part]);
        let slot = || -> Result<BatchSlot> {
            Ok(BatchSlot {
                id: SlotId::unique(),
                memory: made(&*dataset, rows_max, &on)?,
                batch: None,
            })
        };
        let slots = [slot()?, slot()?];
        let path = match source.tables {
            Some(tables) => FillPath::Resident(DeviceGatherer::new(tables, rows_max)?),
            None if devices[0].is_accelerator() => {
                FillPath::Copied(BatchCopier::new(&*dataset, rows_max, devices)?)
            }
            None => FillPath::Host,
        };
        let micro = micro.unwrap_or(rows_max).max(1);
        let prefetcher = Prefetcher::new(dataset.clone(), rows_max)?;
        Ok(Slots {
            origin: Arc::new(Origin { dataset, order }),
            slots,
            next: 0,
            rows: Vec::with_capacity(rows_max),
            micro,
            shards,
            path,
            prefetcher,
        })
    }

    /// Fills the next slot with the rows `mine`, from row `first` of a batch of `rows` rows on.
    /// `recurs`: batches of this size are the usual ones.
    pub(super) fn load(
        &mut self,
        [step, epoch]: [u64; 2],
        rows: u64,
        first: u64,
        mine: BatchRows<impl Iterator<Item = u64>>,
        recurs: bool,
    ) -> Result<&Batch> {
        let (fetched, length) = (self.prefetcher.take(step, &mut self.rows)?, mine.length);
        if !fetched {
            self.rows.clear();
            self.rows.extend(mine.rows);
        }
        let turn = self.next;
        self.next = 1 - turn;
        let slot = &mut self.slots[turn];
        let views = first_rows(&slot.memory, self.rows.len(), length)?;
        let gather = |host: &[Tensor; 2]| {
            if fetched {
                Ok(())
            } else {
                let [inputs, targets] = first_rows(host, self.rows.len(), length)?;
                let dataset = &self.origin.dataset;
                trace::record(GATHER, || dataset.gather(&self.rows, &inputs, &targets))
            }
        };
        match &mut self.path {
            FillPath::Host => gather(&views)?,
            FillPath::Copied(copier) => {
                copier.begin(turn)?;
                gather(copier.host())?;
                copier.copy(turn, &views)?;
            }
            FillPath::Resident(gatherer) => {
                let fill = || gatherer.fill(turn, &self.rows, &views);
                trace::record_on(views[0].device(), GATHER, fill)?
            }
        }
        let [x, targets] = views;
        let batch = Batch::new(step, epoch, rows, first, x, targets, self.micro);
        let mut batch = batch.in_shards(self.shards);
        batch.origin = Some(self.origin.clone());
        if recurs {
            batch = batch.in_slot(slot.id);
        }
        Ok(slot.batch.insert(batch))
    }

    /// Gathers the rows `mine` of batch `batch` in the background, since it is probably loaded
    /// next.
    pub(super) fn prefetch(
        &mut self,
        batch: u64,
        mine: BatchRows<impl Iterator<Item = u64>>,
    ) -> Result<()> {
        let host = match &self.path {
            FillPath::Host => &self.slots[self.next].memory,
            FillPath::Copied(copier) => copier.host(),
            FillPath::Resident(_) => return Ok(()),
        };
        self.prefetcher.start(batch, mine, host.clone())
    }

    /// The batch loaded last.
    pub(super) fn last(&self) -> &Batch {
        let batch = self.slots[1 - self.next].batch.as_ref();
        batch.expect("one was loaded")
    }
}

/// Rows to gather into this memory; in the answer, whether that succeeded.
#[derive(Debug)]
struct GatherJob {
    rows: Vec<u64>,
    /// None once the rows are there: the loader may write to it again.
    host: Option<[Tensor; 2]>,
    result: Result<()>,
}

/// Rows are gathered.
pub(super) const GATHER: Label = Label::new(Lane::Data, "gather rows");
/// The step waits for rows.
const WAIT: Label = Label::new(Lane::Waiting, "wait for rows");

/// Gathers the next batch.
#[derive(Debug)]
pub(super) struct Prefetcher {
    /// Closed first, which ends the thread.
    orders: Option<SyncSender<GatherJob>>,
    answers: Receiver<GatherJob>,
    thread: Option<JoinHandle<()>>,
    /// The batch that is being gathered.
    ordered: Option<u64>,
    /// Memory for the row numbers of the next order.
    spare: Vec<u64>,
}

impl Prefetcher {
    /// For batches of at most `rows_max` rows of this dataset.
    pub(super) fn new(dataset: Arc<dyn Dataset>, rows_max: usize) -> Result<Prefetcher> {
        let (orders, to_do) = sync_channel::<GatherJob>(1);
        let (done, answers) = sync_channel(1);
        let gather = move || {
            for mut order in to_do {
                if let Some([inputs, targets]) = order.host.take() {
                    let gather = || dataset.gather(&order.rows, &inputs, &targets);
                    order.result = trace::record(GATHER, gather);
                    heartbeat::beat(Work::ReadsData);
                }
                if done.send(order).is_err() {
                    return;
                }
            }
        };
        let thread = Builder::new().name("loader".into()).spawn(gather);
        let thread = thread.map_err(|error| {
            Error::Limit(format!(
                "cannot start the thread that gathers batches: {error}; help: raise the limits on \
                 threads (ulimit -u) and on virtual memory (ulimit -v)"
            ))
        })?;
        Ok(Prefetcher {
            orders: Some(orders),
            answers,
            thread: Some(thread),
            ordered: None,
            spare: Vec::with_capacity(rows_max),
        })
    }

    /// Starts to gather `mine`, the rows of batch `batch`, into the first rows of `host`.
    pub(super) fn start(
        &mut self,
        batch: u64,
        mine: BatchRows<impl Iterator<Item = u64>>,
        host: [Tensor; 2],
    ) -> Result<()> {
        assert!(self.ordered.is_none(), "one order at a time");
        let mut rows = std::mem::take(&mut self.spare);
        rows.clear();
        rows.extend(mine.rows);
        let order = GatherJob {
            host: Some(first_rows(&host, rows.len(), mine.length)?),
            rows,
            result: Ok(()),
        };
        let orders = self.orders.as_ref().expect("open until it is dropped");
        orders.send(order).map_err(|_| gone())?;
        self.ordered = Some(batch);
        Ok(())
    }

    /// Waits for the batch that was requested. If it is batch `batch`, puts its rows into `rows`
    /// and returns true; another one is dropped.
    pub(super) fn take(&mut self, batch: u64, rows: &mut Vec<u64>) -> Result<bool> {
        let Some(ordered) = self.ordered.take() else {
            return Ok(false);
        };
        let mut order = trace::record(WAIT, || self.answers.recv()).map_err(|_| gone())?;
        if ordered == batch {
            order.result?;
            std::mem::swap(rows, &mut order.rows);
        }
        self.spare = order.rows;
        Ok(ordered == batch)
    }
}

impl Drop for Prefetcher {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // A panic was reported where it happened.
            _ = thread.join();
        }
    }
}

fn gone() -> Error {
    Error::Internal("the thread that gathers batches has ended".into())
}
