//! Batches get onto GPUs in two ways: copied from pinned memory (`BatchCopier`), or gathered from
//! data that are kept there as a whole (`DeviceGatherer`), for which only row numbers are copied.
//! Both use separate streams, so that a batch is copied during the step before it.
//!
//! Letters: N rows of the data; R rows of a batch on this rank, at most; I… and T… the shapes of a
//! row's inputs and targets.
//!
//! Who waits for whom:
//!
//! A batch is on two devices, inputs on the first and targets on the last; usually they are the
//! same. Each device has a copy stream beside its compute stream (the device's current stream).
//! Call the batches 0, 1, 2 …; batch k is in slot k mod 2, and callers promise to give its step to
//! the compute streams before they load batch k + 1. `load(k)` does, in this order, on each device:
//!
//! 1. `leave` records an event on the compute stream. By the promise, everything that reads batch k
//!    − 1 has been given to that stream, so the event comes after the last read of slot (k − 1) mod
//!    2. It is kept with that slot.
//! 2. `wait_for_host_side` waits on the host for the copies from pinned memory that batch k − 2
//!    started in this slot. They waited only for step k − 4. Row numbers (`DeviceGatherer`) are
//!    written to that memory next. Rows (`BatchCopier`) have three pieces of pinned memory: as soon
//!    as `load(k)` has returned, a background thread gathers batch k + 1 into the piece of batch k
//!    − 2; batch k itself has the piece of batch k − 3, which `load(k − 1)` waited for.
//! 3. `free_slot` makes the copy stream wait for the event that `load(k − 1)` kept with this slot:
//!    the end of step k − 2, the last that read it. Step k − 1 may still run, since it reads the
//!    other slot. Then the copy stream writes the batch.
//! 4. `hand_over` makes the compute stream wait for that: step k, and everything later on that
//!    stream, sees the batch.
//!
//! What only copy streams touch (data kept on a device, row numbers there) needs no event: a stream
//! runs in order.

use std::ops::Range;
use std::sync::Arc;

use ddp_kernels::stream::{Event, Stream};
use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::transfer::{self, PendingCopy, announced};
use ddp_kernels::{DType, Device, Tensor, memory, ops};

use crate::dataset::{Dataset, RowSpec};
use crate::error::{Error, Result, bail, ensure};
use crate::setting::{DATA_ON_DEVICE, PACKING};

/// The rows of a dataset for one device or two. Clones share the data kept there.
#[derive(Clone, Debug)]
pub struct Source {
    pub(super) dataset: Arc<dyn Dataset>,
    /// Where the inputs of batches are, and where their targets.
    pub(super) devices: [Device; 2],
    pub(super) tables: Option<DeviceTables>,
}

impl Source {
    /// Rows that are gathered in host memory, and for GPUs copied ahead of their step: inputs to
    /// the first of `devices`, targets to the second. Both are the same device, or both are GPUs.
    pub fn new(dataset: Arc<dyn Dataset>, devices: [Device; 2]) -> Source {
        let [first, last] = devices;
        assert!(
            first == last || (first.is_accelerator() && last.is_accelerator()),
            "batches on {first} and {last}"
        );
        Source {
            dataset,
            devices,
            tables: None,
        }
    }

    /// Like `new`, but with the data kept on the GPUs: `On` always, and too little memory is an
    /// error before anything is allocated; `Auto` if the data take at most a quarter of the free
    /// memory, so allocate what training needs before. On the CPU this does nothing. Batches have
    /// the same bits either way.
    pub fn kept_on_device(
        dataset: Arc<dyn Dataset>,
        devices: [Device; 2],
        choice: Resident,
    ) -> Result<Source> {
        let mut source = Source::new(dataset, devices);
        source.tables = DeviceTables::new(&*source.dataset, devices, choice)?;
        Ok(source)
    }

    /// The bytes of device memory that the data take, if they are kept there.
    pub fn bytes_on_device(&self) -> Option<usize> {
        let parts = self.tables.as_ref().map(|tables| tables.parts.iter());
        parts.map(|parts| parts.map(Tensor::bytes).sum())
    }
}

/// Pieces of pinned memory: one is being copied, one may still be, and one is gathered into.
const RING: usize = 3;

/// A batch gets onto a GPU.
const COPY: Label = Label::new(Lane::Copies, "copy batch");

/// Copies batches into two slots.
#[derive(Debug)]
pub(super) struct BatchCopier {
    streams: CopyStreams,
    /// Inputs `[R, I…]` and targets `[R, T…]`, pinned.
    ring: [[Tensor; 2]; RING],
    /// The piece for the next batch.
    turn: usize,
    /// Whether rows may be shorter than these pieces have them.
    shortens: bool,
    /// By slot.
    transfers: [SlotTransfers; 2],
}

impl BatchCopier {
    /// For batches of at most `rows_max` rows on these GPUs.
    pub(super) fn new(
        dataset: &dyn Dataset,
        rows_max: usize,
        devices: [Device; 2],
    ) -> Result<BatchCopier> {
        // First, since pinned memory needs a device that is in use.
        let streams = CopyStreams::new(devices)?;
        let pinned = |_: usize, shape: &[usize], dtype: DType| Tensor::zeros_pinned(shape, dtype);
        let piece = || made(dataset, rows_max, &pinned);
        Ok(BatchCopier {
            streams,
            ring: [piece()?, piece()?, piece()?],
            turn: 0,
            shortens: dataset.shortens(),
            transfers: Default::default(),
        })
    }

    /// The host memory of the next batch. Nothing reads it any more.
    pub(super) fn host(&self) -> &[Tensor; 2] {
        &self.ring[self.turn]
    }

    /// To be called before the batch of slot `slot` is gathered and copied. After it the host
    /// memory of the batch after that is free, too.
    pub(super) fn begin(&mut self, slot: usize) -> Result<()> {
        self.streams.leave(&mut self.transfers[1 - slot])?;
        self.transfers[slot].wait_for_host_side()
    }

    /// Copies `host` to `batch`, which is in slot `slot`, and moves to the next piece.
    pub(super) fn copy(&mut self, slot: usize, batch: &[Tensor; 2]) -> Result<()> {
        let (streams, transfers) = (&self.streams, &mut self.transfers[slot]);
        let length = batch[0].shape().get(1).filter(|_| self.shortens).copied();
        let host = first_rows(&self.ring[self.turn], batch[0].shape()[0], length)?;
        self.turn = (self.turn + 1) % RING;
        streams.free_slot(transfers)?;
        let copy = |part: usize| {
            let stream = &streams.copies[part];
            let copy = || transfer::copy_async(&batch[part], &host[part], stream);
            trace::record_stream(stream, COPY, copy)
        };
        let copies = transfer::announced("the batch of this step", || {
            Ok::<_, ddp_kernels::Error>([copy(0)?, copy(1)?])
        })?;
        // On one stream what comes after the second copy is after both.
        let last_of_each = copies.into_iter().skip(2 - streams.all().len());
        for (copied, copy) in transfers.copied.iter_mut().zip(last_of_each) {
            CopyStreams::hand_over(copied.insert(copy).event())?;
        }
        Ok(())
    }
}

ddp_kernels::choices! {
    /// Whether the data are kept on the GPUs.
    #[derive(Default)]
    pub enum Resident {
        /// Where it fits
        #[default]
        Auto = "auto",
        /// Always; too little memory is an error
        On = "on",
        /// Never: each batch is copied ahead of its step
        Off = "off",
    }
}

/// The most bytes of rows, inputs and targets together, that are gathered at a time for the
/// upload.
const STAGE_BYTES: usize = 8 << 20;
const NAME: &str = "the training data, kept on the device";

/// All rows of a dataset on GPUs.
#[derive(Clone, Debug)]
pub(super) struct DeviceTables {
    /// Inputs `[N, I…]` and targets `[N, T…]`.
    parts: [Tensor; 2],
    streams: CopyStreams,
}

impl DeviceTables {
    /// All of `dataset`, inputs on the first of these GPUs and targets on the second; `None` if
    /// `choice` is `Off`, or `Auto` and there is too little memory. Every rank keeps all rows,
    /// since it may need any of them in each epoch.
    pub(super) fn new(
        dataset: &dyn Dataset,
        devices: [Device; 2],
        choice: Resident,
    ) -> Result<Option<DeviceTables>> {
        let rows = dataset.rows();
        if choice == Resident::Off || rows == 0 || !devices[0].is_accelerator() {
            return Ok(None);
        }
        // Their batches differ in length.
        if dataset.shortens() {
            ensure!(
                choice == Resident::Auto,
                Usage,
                "{DATA_ON_DEVICE} on: expected rows of one length, got conversations in rows of their own; help: \
                 leave {DATA_ON_DEVICE} out, or give {PACKING} on"
            );
            return Ok(None);
        }
        let row_bytes = [
            dataset.spec().inputs.bytes(),
            dataset.spec().targets.bytes(),
        ];
        // First, since a device reports its free memory only once it is in use.
        let streams = CopyStreams::new(devices)?;
        for (index, stream) in streams.all().iter().enumerate() {
            let (device, free) = (stream.device(), memory::free_bytes(stream.device()));
            let row_bytes: usize = row_bytes[streams.parts(index)].iter().sum();
            let needed =
                usize::try_from(rows).map_or(usize::MAX, |rows| row_bytes.saturating_mul(rows));
            match choice {
                // Activations, batches and workspaces are not known before the first step, so the
                // data leave three times as much as they take.
                Resident::Auto if needed > free / 4 => return Ok(None),
                // Before anything is allocated.
                Resident::On if needed > free => {
                    let [needed, free] =
                        [needed, free].map(|bytes| bytes as f64 / f64::from(1 << 20));
                    bail!(
                        Limit,
                        "out of memory on {device}: expected {needed:.1} MiB for {NAME}, got {free:.1} MiB that are free; help: {DATA_ON_DEVICE} auto and off train without"
                    )
                }
                _ => {}
            }
        }
        let Ok(rows) = usize::try_from(rows) else {
            return Ok(None);
        };
        // Made on the copy streams, the only ones that use them.
        let table = |part: usize, shape: &[usize], dtype: DType| {
            let stream = &streams.copies[part];
            stream.scope(|| Tensor::empty(shape, dtype, devices[part]))
        };
        let parts = match made(dataset, rows, &table) {
            // Another process has taken the memory since.
            Err(Error::Tensor(ddp_kernels::Error::OutOfMemory(_))) if choice == Resident::Auto => {
                return Ok(None);
            }
            other => other?.map(|table| table.named(NAME)),
        };
        let tables = DeviceTables { parts, streams };
        announced("the training data, kept on the device", || {
            tables.upload(dataset)
        })?;
        Ok(Some(tables))
    }

    /// Uploads all rows in stages. Two stages take turns: one is gathered while the other is
    /// copied.
    fn upload(&self, dataset: &dyn Dataset) -> Result<()> {
        let count = self.parts[0].shape()[0];
        let row_bytes: usize = self.parts.iter().map(|part| part.bytes() / count).sum();
        let stage_rows = (STAGE_BYTES / row_bytes.max(1)).clamp(1, count);
        let pinned = |_: usize, shape: &[usize], dtype: DType| Tensor::zeros_pinned(shape, dtype);
        let stage = || made(dataset, stage_rows, &pinned);
        let mut stages = [stage()?, stage()?].map(|host| (host, SlotTransfers::default()));
        let mut numbers = Vec::with_capacity(stage_rows);
        for (turn, start) in (0..count).step_by(stage_rows).enumerate() {
            let end = (start + stage_rows).min(count);
            numbers.clear();
            numbers.extend(start as u64..end as u64);
            let (host, transfers) = &mut stages[turn % 2];
            transfers.wait_for_host_side()?;
            let host = first_rows(host, end - start, None)?;
            dataset.gather(&numbers, &host[0], &host[1])?;
            for (part, host) in host.iter().enumerate() {
                let there = self.parts[part].slice(start..end)?;
                let copy = transfer::copy_async(&there, host, &self.streams.copies[part])?;
                // On one stream what comes after the second copy is after both.
                let index = part.min(self.streams.all().len() - 1);
                transfers.copied[index] = Some(copy);
            }
        }
        // The last copies need no wait: later work on the same streams reads the tables, and pinned
        // memory is not reused before its copies are done.
        Ok(())
    }
}

/// Gathers batches from the tables into two slots.
#[derive(Debug)]
pub(super) struct DeviceGatherer {
    tables: DeviceTables,
    slots: [RowNumbers; 2],
}

/// The row numbers of a slot.
#[derive(Debug)]
struct RowNumbers {
    /// i64 `[R]`, pinned.
    host: Tensor,
    /// i64 `[R]` on the device of each copy stream.
    there: Vec<Tensor>,
    transfers: SlotTransfers,
}

impl RowNumbers {
    fn new(streams: &CopyStreams, rows_max: usize) -> Result<RowNumbers> {
        let host = Tensor::zeros_pinned(&[rows_max], DType::I64)?.named("row numbers");
        let mut there = Vec::new();
        for stream in streams.all() {
            // Made on the copy stream, the only one that uses it.
            let made = || Tensor::empty(&[rows_max], DType::I64, stream.device());
            there.push(stream.scope(made)?.named("row numbers"));
        }
        Ok(RowNumbers {
            host,
            there,
            transfers: SlotTransfers::default(),
        })
    }
}

impl DeviceGatherer {
    /// For batches of at most `rows_max` rows.
    pub(super) fn new(tables: DeviceTables, rows_max: usize) -> Result<DeviceGatherer> {
        let slot = || RowNumbers::new(&tables.streams, rows_max);
        let slots = [slot()?, slot()?];
        Ok(DeviceGatherer { tables, slots })
    }

    /// Gathers `rows` into `batch`, which is in slot `slot`.
    pub(super) fn fill(&mut self, slot: usize, rows: &[u64], batch: &[Tensor; 2]) -> Result<()> {
        let DeviceTables { parts, streams } = &self.tables;
        streams.leave(&mut self.slots[1 - slot].transfers)?;
        let numbers = &mut self.slots[slot];
        numbers.transfers.wait_for_host_side()?;
        let host = numbers.host.slice(0..rows.len())?;
        // A tensor has no more rows than fit i64.
        host.with_slice_mut(|numbers: &mut [i64]| {
            for (number, &row) in numbers.iter_mut().zip(rows) {
                *number = row as i64;
            }
        })?;
        streams.free_slot(&numbers.transfers)?;
        for (index, stream) in streams.all().iter().enumerate() {
            let there = numbers.there[index].slice(0..rows.len())?;
            let copy = announced("the row numbers of this step", || {
                transfer::copy_async(&there, &host, stream)
            })?;
            numbers.transfers.copied[index] = Some(copy);
            stream.scope(|| {
                let mut own = streams.parts(index);
                own.try_for_each(|part| ops::gather_rows(&batch[part], &parts[part], &there))
            })?;
            CopyStreams::hand_over(&stream.record()?)?;
        }
        Ok(())
    }
}

/// Makes a tensor for inputs (0) or targets (1).
type Allocate<'a> = dyn Fn(usize, &[usize], DType) -> ddp_kernels::Result<Tensor> + 'a;

/// Memory for the inputs and targets of `rows` rows.
pub(super) fn made(dataset: &dyn Dataset, rows: usize, make: &Allocate<'_>) -> Result<[Tensor; 2]> {
    let RowSpec {
        inputs: x, targets, ..
    } = dataset.spec();
    let x = make(0, &x.shape_of(rows), x.dtype)?.named("batch");
    let targets = make(1, &targets.shape_of(rows), targets.dtype)?.named("targets");
    Ok([x, targets])
}

/// The first `rows` rows of this memory, or as many rows of another `length`, one after the other.
pub(super) fn first_rows(
    memory: &[Tensor; 2],
    rows: usize,
    length: Option<usize>,
) -> Result<[Tensor; 2]> {
    let first = |all: &Tensor| match length {
        None => all.slice(0..rows),
        Some(length) => {
            let elements = all.flatten()?.slice(0..rows * length)?;
            elements.reshape(&[rows, length])
        }
    };
    let [x, targets] = memory;
    Ok([first(x)?, first(targets)?])
}

/// The copy streams of the devices of a batch.
#[derive(Clone, Debug)]
pub(super) struct CopyStreams {
    /// For inputs and for targets: the same stream on one device.
    copies: [Stream; 2],
}

/// The transfers to and from one slot, by stream.
#[derive(Debug, Default)]
pub(super) struct SlotTransfers {
    /// The last copy from pinned memory.
    pub(super) copied: [Option<PendingCopy>; 2],
    /// Comes after the last work that reads the batch.
    read: [Option<Event>; 2],
}

impl SlotTransfers {
    /// Blocks until the pinned memory may be written.
    pub(super) fn wait_for_host_side(&mut self) -> Result<()> {
        for copy in self.copied.iter_mut().filter_map(Option::take) {
            copy.wait()?;
        }
        Ok(())
    }
}

impl CopyStreams {
    /// To these GPUs: that of the inputs, that of the targets.
    pub(super) fn new([first, last]: [Device; 2]) -> Result<CopyStreams> {
        let inputs = Stream::new(first)?;
        let targets = if last == first {
            inputs.clone()
        } else {
            Stream::new(last)?
        };
        let copies = [inputs, targets];
        Ok(CopyStreams { copies })
    }

    /// One for each device.
    pub(super) fn all(&self) -> &[Stream] {
        let count = if self.copies[0] == self.copies[1] {
            1
        } else {
            2
        };
        &self.copies[..count]
    }

    /// What stream `index` of `all()` copies: inputs (0), targets (1), or both.
    pub(super) fn parts(&self, index: usize) -> Range<usize> {
        index..index + 3 - self.all().len()
    }

    /// To be called when all work that reads this slot has been given to the devices' current
    /// streams.
    pub(super) fn leave(&self, transfers: &mut SlotTransfers) -> Result<()> {
        let SlotTransfers { copied, read } = transfers;
        for ((stream, copied), read) in self.all().iter().zip(copied).zip(read) {
            if copied.is_some() {
                *read = Some(Stream::current(stream.device())?.record()?);
            }
        }
        Ok(())
    }

    /// Makes later copies wait for the last work that reads this slot.
    pub(super) fn free_slot(&self, transfers: &SlotTransfers) -> Result<()> {
        for (stream, read) in self.all().iter().zip(&transfers.read) {
            if let Some(read) = read {
                stream.wait(read)?;
            }
        }
        Ok(())
    }

    /// Makes later work on the device's current stream wait for `written`, an event of a copy
    /// stream.
    pub(super) fn hand_over(written: &Event) -> Result<()> {
        Ok(Stream::current(written.device())?.wait(written)?)
    }
}
