//! Filling batches: a rank's rows of a global batch are gathered into one of two fixed slots, cut into micro-batches.
//!
//! Slots are made once and used in turn, so that addresses repeat and nothing is allocated later; there are two, so that one
//! may be filled while the other is read. The batch that comes next is gathered ahead by a thread (`fetch.rs`), beside the step. Onto GPUs there are two ways: out of host memory, batch by
//! batch (`ferry.rs`), or out of the data, kept there as a whole (`resident.rs`). Letters: R rows of this rank, at most;
//! F… features of a row; O outputs.

mod ferry;
mod fetch;
mod lanes;
mod resident;
mod source;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ddp_kernels::{DType, Device, Tensor};

use self::ferry::Ferry;
use self::fetch::Fetcher;
use self::resident::Gatherer;
pub use self::source::Source;

use super::sampler::{self, Permutation};
use super::{Dataset, Sampler, Targets, Task};
use crate::error::{Error, Result};

/// This rank's rows of one global batch. Tensors are views of a slot. On the CPU they hold these rows until the next batch
/// is loaded. On a GPU they hold them for work that is given to the device's current stream before the next
/// batch is loaded. Where a model is split over devices its features are on the first and its targets on the last.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The step, from 0; in evaluation the number of the batch.
    pub step: u64,
    /// The epoch, from 0.
    pub epoch: u64,
    /// Rows of the global batch, over all ranks.
    pub rows: u64,
    /// Where this rank's first row is in the global batch.
    pub first: u64,
    /// How many rows are this rank's. May be none.
    pub mine: usize,
    /// Their features: f32 `[mine, F…]`.
    pub x: Tensor,
    /// Their targets: i64 `[mine]` classes, or f32 `[mine, O]`.
    pub targets: Tensor,
    micro: usize,
    /// The memory that it lies in, if a batch of this size will lie there again.
    slot: Option<SlotId>,
}

/// One piece of memory for batches, of all in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotId(u64);

impl SlotId {
    /// Another one.
    pub(crate) fn new() -> SlotId {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        SlotId(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// A part of a batch that goes through the model at a time.
#[derive(Debug)]
pub struct Micro {
    /// Features: f32 `[rows, F…]`.
    pub x: Tensor,
    /// Targets of the same rows.
    pub targets: Tensor,
    /// Where its first row is in the global batch.
    pub first: u64,
    /// How many rows.
    pub rows: usize,
}

impl Batch {
    /// A batch made by hand: `x` and `targets` are this rank's rows, the first of them row `first` of the `rows` of the
    /// global batch, and at most `micro` go through the model at a time.
    pub fn new(step: u64, epoch: u64, rows: u64, first: u64, x: Tensor, targets: Tensor, micro: usize) -> Batch {
        assert!(micro > 0, "micro-batches of no rows");
        let mine = x.shape()[0];
        assert_eq!(targets.shape()[0], mine, "a target for each row");
        Batch { step, epoch, rows, first, mine, x, targets, micro, slot: None }
    }

    /// The same batch, said to lie in memory where others of its size will lie again.
    pub(crate) fn in_slot(self, slot: SlotId) -> Batch {
        Batch { slot: Some(slot), ..self }
    }

    /// The memory that it lies in, if a batch of this size will lie there again.
    pub(crate) fn slot(&self) -> Option<SlotId> {
        self.slot
    }

    /// How many micro-batches there are: none if no row is this rank's.
    pub fn micro_count(&self) -> usize {
        self.mine.div_ceil(self.micro)
    }

    /// How many micro-batches the rank with the most has, if a batch of so many rows is shared by `ranks` ranks.
    pub(crate) fn micro_count_max(&self, ranks: usize) -> usize {
        let most = usize::try_from(self.rows.div_ceil(ranks as u64)).unwrap_or(usize::MAX);
        most.max(self.mine).div_ceil(self.micro)
    }

    /// Where the first row of the micro-batch called `index` is in the global batch.
    pub(crate) fn first_of_micro(&self, index: usize) -> u64 {
        self.first + (index * self.micro) as u64
    }

    /// The micro-batch called `index`: all have the same rows, but for the last, which may have fewer.
    pub fn micro(&self, index: usize) -> Result<Micro> {
        assert!(index < self.micro_count(), "micro-batch {index} of {}", self.micro_count());
        let start = index * self.micro;
        let rows = start..(start + self.micro).min(self.mine);
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
struct Slot {
    id: SlotId,
    /// Features `[R, F…]`, and targets `[R]` or `[R, O]`, each on its device.
    memory: [Tensor; 2],
    batch: Option<Batch>,
}

/// Shape and dtype of the features and of the targets of so many rows.
fn parts_of(dataset: &dyn Dataset, rows: usize) -> [(Vec<usize>, DType); 2] {
    let features = std::iter::once(rows).chain(dataset.row_shape().iter().copied()).collect();
    let targets = match dataset.task() {
        Task::Classification { .. } => (vec![rows], DType::I64),
        Task::Regression { outputs } => (vec![rows, *outputs], DType::F32),
    };
    [(features, DType::F32), targets]
}

/// How a tensor is made for features (0) or targets (1) of this shape.
type Make<'a> = dyn Fn(usize, &[usize], DType) -> ddp_kernels::Result<Tensor> + 'a;

/// Memory for the features and for the targets of so many rows.
fn made(dataset: &dyn Dataset, rows: usize, make: &Make<'_>) -> Result<[Tensor; 2]> {
    let [(features, features_dtype), (targets, targets_dtype)] = parts_of(dataset, rows);
    let x = make(0, &features, features_dtype)?.named("batch");
    Ok([x, make(1, &targets, targets_dtype)?.named("targets")])
}

/// The front of this memory, for so many rows.
fn first_rows([x, targets]: &[Tensor; 2], rows: usize) -> Result<[Tensor; 2]> {
    Ok([x.slice(0..rows)?, targets.slice(0..rows)?])
}

/// Gathers `rows` into host memory of just their size.
fn gather(dataset: &dyn Dataset, rows: &[u64], [x, targets]: &[Tensor; 2]) -> Result<()> {
    x.with_slice_mut(|x: &mut [f32]| match dataset.task() {
        Task::Classification { .. } => {
            targets.with_slice_mut(|classes: &mut [i64]| dataset.gather(rows, x, Targets::Classes(classes)))
        }
        Task::Regression { .. } => {
            targets.with_slice_mut(|values: &mut [f32]| dataset.gather(rows, x, Targets::Values(values)))
        }
    })??
}

/// How rows come to a slot.
#[derive(Debug)]
enum Way {
    /// They are gathered where the batch lies, in host memory.
    Directly,
    /// Out of host memory, to GPUs.
    Ferried(Ferry),
    /// Out of the data, which lie on the GPUs.
    Resident(Gatherer),
}

/// The two slots of a loader and the row numbers it gathers.
#[derive(Debug)]
struct Slots {
    dataset: Arc<dyn Dataset>,
    slots: [Slot; 2],
    next: usize,
    rows: Vec<u64>,
    micro: usize,
    way: Way,
    fetcher: Fetcher,
}

impl Slots {
    fn new(source: Source, rows_max: u64, micro: Option<usize>) -> Result<Slots> {
        let Source { dataset, devices, tables } = source;
        let rows_max = usize::try_from(rows_max)
            .map_err(|_| Error::Usage(format!("--batch-size: {rows_max} rows a rank are more than memory can hold")))?;
        let slot = || -> Result<Slot> {
            let on = |part: usize, shape: &[usize], dtype: DType| Tensor::empty(shape, dtype, devices[part]);
            Ok(Slot { id: SlotId::new(), memory: made(&*dataset, rows_max, &on)?, batch: None })
        };
        let slots = [slot()?, slot()?];
        let way = match tables {
            Some(tables) => Way::Resident(Gatherer::new(tables, rows_max)?),
            None if devices[0].is_accelerator() => Way::Ferried(Ferry::new(&*dataset, rows_max, devices)?),
            None => Way::Directly,
        };
        let micro = micro.unwrap_or(rows_max).max(1);
        let fetcher = Fetcher::new(dataset.clone(), rows_max);
        Ok(Slots { dataset, slots, next: 0, rows: Vec::with_capacity(rows_max), micro, way, fetcher })
    }

    /// Fills the slot whose turn it is with `mine`, rows of a batch of `rows` that begin at its `first`. `recurs` says that
    /// batches of this size are the usual ones.
    fn load(
        &mut self,
        [step, epoch]: [u64; 2],
        rows: u64,
        first: u64,
        mine: impl Iterator<Item = u64>,
        recurs: bool,
    ) -> Result<&Batch> {
        let fetched = self.fetcher.take(step, &mut self.rows)?;
        if !fetched {
            self.rows.clear();
            self.rows.extend(mine);
        }
        let turn = self.next;
        self.next = 1 - turn;
        let slot = &mut self.slots[turn];
        let views = first_rows(&slot.memory, self.rows.len())?;
        let gather = |host: &[Tensor; 2]| {
            if fetched { Ok(()) } else { gather(&*self.dataset, &self.rows, &first_rows(host, self.rows.len())?) }
        };
        match &mut self.way {
            Way::Directly => gather(&views)?,
            Way::Ferried(ferry) => {
                ferry.begin(turn)?;
                gather(ferry.host())?;
                ferry.bring(turn, &views)?;
            }
            Way::Resident(gatherer) => gatherer.fill(turn, &self.rows, &views)?,
        }
        let [x, targets] = views;
        let batch = Batch::new(step, epoch, rows, first, x, targets, self.micro);
        Ok(slot.batch.insert(if recurs { batch.in_slot(slot.id) } else { batch }))
    }

    /// Lets the rows `mine` of batch number `batch`, which is probably loaded next, be gathered beside what the caller does until then.
    fn fetch_ahead(&mut self, batch: u64, mine: impl Iterator<Item = u64>) -> Result<()> {
        let host = match &self.way {
            Way::Directly => &self.slots[self.next].memory,
            Way::Ferried(ferry) => ferry.host(),
            // Only their numbers travel.
            Way::Resident(_) => return Ok(()),
        };
        self.fetcher.order(batch, mine, host.clone())
    }

    /// The batch loaded last.
    fn last(&self) -> &Batch {
        self.slots[1 - self.next].batch.as_ref().expect("one was loaded")
    }
}

/// Fills the batches of training, in the sampler's order.
#[derive(Debug)]
pub struct Loader {
    slots: Slots,
    sampler: Sampler,
    rank: usize,
    size: usize,
    /// Those of the epoch loaded last and of the one behind it, by their numbers' last bit.
    orders: [Option<(u64, Permutation)>; 2],
    /// The step that is not loaded any more.
    end: u64,
}

/// The order of rows in `epoch`.
fn order_of<'a>(orders: &'a mut [Option<(u64, Permutation)>; 2], sampler: &Sampler, epoch: u64) -> &'a Permutation {
    let place = &mut orders[(epoch % 2) as usize];
    if place.as_ref().is_none_or(|(there, _)| *there != epoch) {
        *place = Some((epoch, sampler.permutation(epoch)));
    }
    &place.as_ref().expect("set above").1
}

impl Loader {
    /// Batches of `dataset` for rank `rank` of `size`. At most `micro` rows go through the model at a time.
    pub fn new(
        dataset: Arc<dyn Dataset>,
        sampler: Sampler,
        rank: usize,
        size: usize,
        micro: Option<usize>,
        device: Device,
    ) -> Result<Loader> {
        Loader::from_source(Source::new(dataset, [device; 2]), sampler, rank, size, micro)
    }

    /// As `new`, of rows that come on the way that `source` says.
    pub fn from_source(
        source: Source,
        sampler: Sampler,
        rank: usize,
        size: usize,
        micro: Option<usize>,
    ) -> Result<Loader> {
        assert_eq!(source.dataset.rows(), sampler.rows(), "the sampler is for another dataset");
        // No share of a batch, whole or short, is larger than a full one's divided by the ranks and rounded up.
        let slots = Slots::new(source, sampler.batch().div_ceil(size as u64), micro)?;
        Ok(Loader { slots, sampler, rank, size, orders: [None, None], end: u64::MAX })
    }

    /// This rank's rows for step `step0`, counted from 0. Those of the step behind it are gathered ahead: it comes cheapest next.
    pub fn load(&mut self, step0: u64) -> Result<&Batch> {
        let place = self.sampler.at(step0);
        let mine = sampler::share(&place.positions, self.rank, self.size);
        let (rows, first) = (place.positions.end - place.positions.start, mine.start - place.positions.start);
        let order = order_of(&mut self.orders, &self.sampler, place.epoch);
        let mine = mine.map(|position| order.row(position));
        let recurs = rows == self.sampler.batch().min(self.sampler.rows());
        self.slots.load([step0, place.epoch], rows, first, mine, recurs)?;
        if step0 + 1 < self.end {
            let place = self.sampler.at(step0 + 1);
            let order = order_of(&mut self.orders, &self.sampler, place.epoch);
            let mine = sampler::share(&place.positions, self.rank, self.size);
            self.slots.fetch_ahead(step0 + 1, mine.map(|position| order.row(position)))?;
        }
        Ok(self.slots.last())
    }

    /// Says that no step from `step0` on will be loaded, counted from 0: nothing is gathered ahead for it.
    pub fn ends_before(&mut self, step0: u64) {
        self.end = step0;
    }

    /// The rows of the batch loaded last, in its order: for saying which rows made a loss that is no number.
    pub fn rows(&self) -> &[u64] {
        &self.slots.rows
    }

    /// The order that batches are loaded in.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }
}

/// Fills batches for evaluation: this rank's contiguous share of all rows, in order, each row once over all ranks.
#[derive(Debug)]
pub struct InOrder {
    slots: Slots,
    share: std::ops::Range<u64>,
    batch: u64,
}

impl InOrder {
    /// Batches of at most `batch` rows for rank `rank` of `size`.
    pub fn new(dataset: Arc<dyn Dataset>, rank: usize, size: usize, batch: usize, device: Device) -> Result<InOrder> {
        InOrder::from_source(Source::new(dataset, [device; 2]), rank, size, batch)
    }

    /// As `new`, of rows that come on the way that `source` says.
    pub fn from_source(source: Source, rank: usize, size: usize, batch: usize) -> Result<InOrder> {
        assert!(batch > 0, "batches of no rows");
        let share = sampler::share(&(0..source.dataset.rows()), rank, size);
        let rows_max = (batch as u64).min(share.end - share.start);
        Ok(InOrder { slots: Slots::new(source, rows_max, None)?, share, batch: batch as u64 })
    }

    /// How many batches this rank has. Ranks may differ by one.
    pub fn count(&self) -> u64 {
        (self.share.end - self.share.start).div_ceil(self.batch)
    }

    /// The batch called `index`. Its `first` is the row that it begins with, its `rows` are all rows of the dataset.
    pub fn load(&mut self, index: u64) -> Result<&Batch> {
        assert!(index < self.count(), "batch {index} of {}", self.count());
        let (rows, all) = (self.rows(index), self.slots.dataset.rows());
        self.slots.load([index, 0], all, rows.start, rows, false)?;
        if index + 1 < self.count() {
            let rows = self.rows(index + 1);
            self.slots.fetch_ahead(index + 1, rows)?;
        }
        Ok(self.slots.last())
    }

    fn rows(&self, index: u64) -> std::ops::Range<u64> {
        let start = self.share.start + index * self.batch;
        start..start.saturating_add(self.batch).min(self.share.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::synthetic::row_number;
    use crate::data::{DataSpec, open};

    fn numbered(rows: u64, held_out: u64) -> super::super::Data {
        let spec: DataSpec = format!("synthetic:row-number,rows={rows},held-out={held_out}").parse().unwrap();
        open(&spec).unwrap()
    }

    fn rows_of(x: &Tensor) -> Vec<u64> {
        x.to_vec::<f32>().unwrap().chunks(4).map(row_number).collect()
    }

    #[test]
    fn the_order_of_rows_does_not_depend_on_the_number_of_ranks() {
        let data = numbered(103, 0);
        let sampler = Sampler::new(103, 10, 3, false).unwrap();
        let order = |size: usize, micro: Option<usize>| {
            let mut loaders: Vec<Loader> = (0..size)
                .map(|rank| Loader::new(data.train.clone(), sampler, rank, size, micro, Device::Cpu).unwrap())
                .collect();
            let mut rows = Vec::new();
            for step in 0..2 * sampler.steps_per_epoch() {
                let mut next = 0;
                for loader in &mut loaders {
                    let batch = loader.load(step).unwrap();
                    assert_eq!((batch.step, batch.epoch), (step, step / sampler.steps_per_epoch()));
                    assert_eq!(batch.first, next);
                    let mut mine = Vec::new();
                    for index in 0..batch.micro_count() {
                        let part = batch.micro(index).unwrap();
                        assert_eq!(part.first, next + mine.len() as u64);
                        assert_eq!(rows_of(&part.targets), rows_of(&part.x));
                        assert_eq!(part.x.shape()[0], part.rows);
                        mine.extend(rows_of(&part.x));
                    }
                    assert_eq!(mine, rows_of(&batch.x));
                    assert_eq!(mine.len(), batch.mine);
                    next += mine.len() as u64;
                    let whole = batch.rows;
                    assert_eq!(loader.rows(), mine);
                    if next == whole {
                        assert!(loader.rank == size - 1 || whole < size as u64);
                    }
                    rows.extend(mine);
                }
                assert_eq!(next, if step % 11 == 10 { 3 } else { 10 });
            }
            rows
        };
        let alone = order(1, None);
        let mut first_epoch = alone[..103].to_vec();
        assert_ne!(first_epoch, alone[103..]);
        first_epoch.sort_unstable();
        assert_eq!(first_epoch, (0..103).collect::<Vec<_>>());
        for (size, micro) in [(1, Some(3)), (2, None), (3, Some(2)), (4, Some(1)), (12, None), (12, Some(100))] {
            assert_eq!(order(size, micro), alone, "{size} ranks, micro-batches of {micro:?}");
        }
    }

    #[test]
    fn a_rank_without_rows_has_an_empty_batch() {
        let data = numbered(100, 0);
        let sampler = Sampler::new(100, 3, 0, false).unwrap();
        let mut loader = Loader::new(data.train, sampler, 0, 5, Some(8), Device::Cpu).unwrap();
        let batch = loader.load(0).unwrap();
        assert_eq!((batch.mine, batch.micro_count(), batch.rows), (0, 0, 3));
        assert_eq!(batch.x.shape().dims(), [0, 4]);
    }

    #[test]
    fn two_slots_take_turns_so_that_the_next_batch_can_be_gathered_beside_this_one() {
        let data = numbered(100, 0);
        let sampler = Sampler::new(100, 10, 0, false).unwrap();
        let mut loader = Loader::new(data.train.clone(), sampler, 0, 1, None, Device::Cpu).unwrap();
        let first = loader.load(0).unwrap().x.clone();
        let before = rows_of(&first);
        // The second is gathered by now, or is being.
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert_eq!(rows_of(&first), before);
        let second = loader.load(1).unwrap().x.clone();
        assert!(!first.shares_memory_with(&second));
        assert!(first.shares_memory_with(&loader.load(2).unwrap().x));
    }

    #[test]
    fn a_batch_that_was_gathered_ahead_is_the_one_that_was_asked_for() {
        let data = numbered(1000, 0);
        let sampler = Sampler::new(1000, 32, 7, false).unwrap();
        let mut ahead = Loader::new(data.train.clone(), sampler, 0, 2, None, Device::Cpu).unwrap();
        for step in 0..70 {
            let expected = {
                let mut alone = Loader::new(data.train.clone(), sampler, 0, 2, None, Device::Cpu).unwrap();
                alone.ends_before(step);
                rows_of(&alone.load(step).unwrap().x)
            };
            let batch = rows_of(&ahead.load(step).unwrap().x);
            assert_eq!((&batch, ahead.rows()), (&expected, &expected[..]), "step {step}");
        }
    }

    #[test]
    fn a_step_loaded_out_of_turn_is_the_same() {
        let data = numbered(1000, 0);
        let sampler = Sampler::new(1000, 32, 7, false).unwrap();
        let mut loader = Loader::new(data.train, sampler, 1, 3, None, Device::Cpu).unwrap();
        let straight: Vec<_> = (0..70).map(|step| rows_of(&loader.load(step).unwrap().x)).collect();
        for step in [69, 0, 31, 32, 5] {
            assert_eq!(rows_of(&loader.load(step).unwrap().x), straight[step as usize], "step {step}");
        }
    }

    #[test]
    fn evaluation_sees_every_row_once_in_order_on_any_number_of_ranks() {
        let data = numbered(1, 107);
        for size in [1, 2, 3, 8, 200] {
            let mut seen = Vec::new();
            for rank in 0..size {
                let mut batches = InOrder::new(data.held_out.clone(), rank, size, 10, Device::Cpu).unwrap();
                for index in 0..batches.count() {
                    let batch = batches.load(index).unwrap();
                    assert_eq!((batch.first, batch.rows), (seen.len() as u64, 107));
                    assert!(batch.mine > 0 && batch.mine <= 10);
                    seen.extend(rows_of(&batch.x));
                }
            }
            assert_eq!(seen, (0..107).collect::<Vec<_>>(), "{size} ranks");
        }
        let nothing = numbered(1, 0);
        assert_eq!(InOrder::new(nothing.held_out, 0, 1, 10, Device::Cpu).unwrap().count(), 0);
    }

    #[test]
    fn classes_come_as_whole_numbers_beside_their_images() {
        let data = open(&"glyphs,rows=50".parse().unwrap()).unwrap();
        let mut loader =
            Loader::new(data.train.clone(), Sampler::new(50, 8, 0, false).unwrap(), 0, 1, None, Device::Cpu).unwrap();
        let batch = loader.load(0).unwrap();
        assert_eq!(batch.x.to_string(), "\"batch\" f32[8, 784] on cpu");
        let (x, classes) = (batch.x.to_vec::<f32>().unwrap(), batch.targets.to_vec::<i64>().unwrap());
        let rows = loader.rows().to_vec();
        let (mut again, mut labels) = (vec![0.0; 8 * 784], vec![0; 8]);
        data.train.gather(&rows, &mut again, Targets::Classes(&mut labels)).unwrap();
        assert_eq!((x, classes), (again, labels));
    }
}
