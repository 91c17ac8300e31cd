//! The memory of batches, and how rows get into it.

use std::sync::Arc;

use ddp_kernels::trace;
use ddp_kernels::{DType, Tensor};

use super::batch::{Batch, Origin, SlotId};
use super::ferry::BatchCopier;
use super::fetch::{GATHER, Prefetcher};
use super::memory::{first_rows, made};
use super::resident::DeviceGatherer;
use super::source::Source;
use crate::error::{Error, Result};
use crate::sampler::{Sampler, Shards};

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
        let Source {
            dataset,
            devices,
            tables,
        } = source;
        let rows_max = usize::try_from(rows_max).map_err(|_| {
            Error::Usage(format!(
                "`batch-size`: expected a batch that fits memory, got {rows_max} rows a rank"
            ))
        })?;
        let slot = || -> Result<Slot> {
            let on = |part: usize, shape: &[usize], dtype: DType| {
                Tensor::empty(shape, dtype, devices[part])
            };
            Ok(Slot {
                id: SlotId::unique(),
                memory: made(&*dataset, rows_max, &on)?,
                batch: None,
            })
        };
        let slots = [slot()?, slot()?];
        let path = match tables {
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
        let batch = Batch::new(step, epoch, rows, first, x, targets, self.micro)
            .in_shards(self.shards)
            .with_origin(self.origin.clone());
        Ok(slot.batch.insert(match recurs {
            true => batch.in_slot(slot.id),
            false => batch,
        }))
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
