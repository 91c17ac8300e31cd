//! The memory of batches, and how rows get into it.
//!
//! Gathers the next batch on a background thread, so that reading from a disk, or drawing, runs
//! during the step.
//!
//! One order at a time, for memory that nothing else touches: the loader gives it away with the
//! order and gets it back with the answer. The thread ends with the loader.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};

use ddp_kernels::heartbeat::{self, Work};
use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::{DType, Tensor};

use super::batch::{Batch, Origin, SlotId, first_rows, made};
use super::devices::{BatchCopier, DeviceGatherer, Source};
use crate::dataset::Dataset;
use crate::error::{Error, Result};
use crate::sampler::{Sampler, Shards};
use crate::setting::BATCH_SIZE;

/// Memory for one batch of this rank.
#[derive(Debug)]
struct Slot {
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
    slots: [Slot; 2],
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
                "{BATCH_SIZE}: expected a batch that fits memory, got {rows_max} rows a rank"
            ))
        })?;
        let on =
            |part: usize, shape: &[usize], dtype: DType| Tensor::empty(shape, dtype, devices[part]);
        let slot = || -> Result<Slot> {
            Ok(Slot {
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
        mine: impl Iterator<Item = u64>,
        recurs: bool,
    ) -> Result<&Batch> {
        let fetched = self.prefetcher.take(step, &mut self.rows)?;
        if !fetched {
            self.rows.clear();
            self.rows.extend(mine);
        }
        let turn = self.next;
        self.next = 1 - turn;
        let slot = &mut self.slots[turn];
        let views = first_rows(&slot.memory, self.rows.len())?;
        let gather = |host: &[Tensor; 2]| match fetched {
            true => Ok(()),
            false => {
                let [inputs, targets] = first_rows(host, self.rows.len())?;
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
    pub(super) fn prefetch(&mut self, batch: u64, mine: impl Iterator<Item = u64>) -> Result<()> {
        let host = match &self.path {
            FillPath::Host => &self.slots[self.next].memory,
            FillPath::Copied(copier) => copier.host(),
            FillPath::Resident(_) => return Ok(()),
        };
        self.prefetcher.start(batch, mine, host.clone())
    }

    /// The batch loaded last.
    pub(super) fn last(&self) -> &Batch {
        self.slots[1 - self.next]
            .batch
            .as_ref()
            .expect("one was loaded")
    }
}

/// Rows to gather into this memory; after it, whether that succeeded.
#[derive(Debug)]
struct Order {
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
    orders: Option<SyncSender<Order>>,
    answers: Receiver<Order>,
    thread: Option<JoinHandle<()>>,
    /// The batch that is being gathered.
    ordered: Option<u64>,
    /// Memory for the row numbers of the next order.
    spare: Vec<u64>,
}

impl Prefetcher {
    /// For batches of at most `rows_max` rows of this dataset.
    pub(super) fn new(dataset: Arc<dyn Dataset>, rows_max: usize) -> Result<Prefetcher> {
        let (orders, to_do) = sync_channel::<Order>(1);
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
        mine: impl Iterator<Item = u64>,
        host: [Tensor; 2],
    ) -> Result<()> {
        assert!(self.ordered.is_none(), "one order at a time");
        let mut rows = std::mem::take(&mut self.spare);
        rows.clear();
        rows.extend(mine);
        let order = Order {
            host: Some(first_rows(&host, rows.len())?),
            rows,
            result: Ok(()),
        };
        let orders = self.orders.as_ref().expect("open until it is dropped");
        orders.send(order).map_err(|_| gone())?;
        self.ordered = Some(batch);
        Ok(())
    }

    /// Waits for the batch that was ordered. If it is batch `batch`, puts its rows into `rows` and
    /// returns true; another one is dropped.
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
