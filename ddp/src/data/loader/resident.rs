//! The data kept on GPUs as a whole, and batches gathered there: per step only row numbers travel, through pinned memory and the same
//! streams on which batches would be copied. Who waits for whom: `lanes.rs`.
//!
//! Letters: N rows of the data; R rows of a batch on this rank, at most; F… features of a row; O outputs.

use std::panic::Location;

use ddp_kernels::error::{OutOfMemory, TensorInfo};
use ddp_kernels::transfer::{self, announced};
use ddp_kernels::{DType, Device, Shape, Tensor, memory, ops};

use super::lanes::{Lanes, Passage};
use super::{first_rows, gather, made, parts_of};
use crate::config::Resident;
use crate::data::Dataset;
use crate::error::{Error, Result};

/// The most bytes of rows, features and targets together, that are gathered at a time on their way up.
const STAGE_BYTES: usize = 8 << 20;

/// All rows of a dataset on GPUs.
#[derive(Clone, Debug)]
pub(super) struct Tables {
    /// Features f32 `[N, F…]` and targets, i64 `[N]` or f32 `[N, O]`.
    parts: [Tensor; 2],
    lanes: Lanes,
}

impl Tables {
    /// All of `dataset`, features on the first of these GPUs and targets on the second; nothing where `choice` says no, or `Auto` finds too
    /// little room. Every rank keeps all rows: in each epoch any of them may be its own.
    #[track_caller]
    pub(super) fn new(dataset: &dyn Dataset, devices: [Device; 2], choice: Resident) -> Result<Option<Tables>> {
        let rows = dataset.rows();
        if choice == Resident::Off || rows == 0 || !devices[0].is_accelerator() {
            return Ok(None);
        }
        // Before anybody is asked what is free: a device says so once it is in use.
        let lanes = Lanes::new(devices)?;
        for (lane, stream) in lanes.all().iter().enumerate() {
            let (device, free) = (stream.device(), memory::free_bytes(stream.device()));
            let needed = needed_bytes(dataset, lanes.parts(lane));
            match choice {
                Resident::Auto if !fits(needed, free) => return Ok(None),
                Resident::On if needed > free => return Err(too_little(dataset, device, needed, free)),
                _ => {}
            }
        }
        let Ok(rows) = usize::try_from(rows) else { return Ok(None) };
        // Made on the lanes, which are all that ever touches them.
        let table = |part: usize, shape: &[usize], dtype: DType| {
            lanes.of(part).scope(|| Tensor::empty(shape, dtype, devices[part]))
        };
        let parts = match made(dataset, rows, &table) {
            // Another process has been faster.
            Err(Error::Tensor(ddp_kernels::Error::OutOfMemory(_))) if choice == Resident::Auto => return Ok(None),
            other => other?.map(|table| table.named("the training data (--data-on-device off trains without)")),
        };
        let tables = Tables { parts, lanes };
        announced("the training data, kept on the device", || tables.upload(dataset, STAGE_BYTES))?;
        Ok(Some(tables))
    }

    /// The bytes of all of it.
    pub(super) fn bytes(&self) -> usize {
        self.parts.iter().map(Tensor::bytes).sum()
    }

    /// Brings all rows up, a stage at a time: two stages take turns, so that one is gathered while the other is copied.
    fn upload(&self, dataset: &dyn Dataset, stage_bytes: usize) -> Result<()> {
        let count = self.parts[0].shape()[0];
        let row_bytes: usize = self.parts.iter().map(|part| part.bytes() / count).sum();
        let stage_rows = (stage_bytes / row_bytes.max(1)).clamp(1, count);
        let pinned = |_: usize, shape: &[usize], dtype: DType| Tensor::zeros_pinned(shape, dtype);
        let mut stages: [([Tensor; 2], Passage); 2] = [
            (made(dataset, stage_rows, &pinned)?, Passage::default()),
            (made(dataset, stage_rows, &pinned)?, Passage::default()),
        ];
        let mut numbers = Vec::with_capacity(stage_rows);
        for (turn, start) in (0..count).step_by(stage_rows).enumerate() {
            let end = (start + stage_rows).min(count);
            numbers.clear();
            numbers.extend(start as u64..end as u64);
            let (host, passage) = &mut stages[turn % 2];
            passage.wait_for_host_side()?;
            let host = first_rows(host, end - start)?;
            gather(dataset, &numbers, &host)?;
            for (part, host) in host.iter().enumerate() {
                let there = self.parts[part].slice(start..end)?;
                // On one lane what comes after the second copy is after both.
                let lane = part.min(self.lanes.all().len() - 1);
                passage.copied[lane] = Some(transfer::copy_async(&there, host, self.lanes.of(part))?);
            }
        }
        // Nobody waits for the last ones: what reads the tables comes later on the same streams, and pinned memory is not handed out
        // again before its copies are done.
        Ok(())
    }
}

/// The bytes of some parts of the data: features (0), targets (1).
fn needed_bytes(dataset: &dyn Dataset, parts: std::ops::Range<usize>) -> usize {
    let rows = usize::try_from(dataset.rows()).unwrap_or(usize::MAX);
    let of_row = |(shape, dtype): &(Vec<usize>, DType)| shape[1..].iter().product::<usize>() * dtype.bytes();
    parts_of(dataset, 1)[parts].iter().map(of_row).sum::<usize>().saturating_mul(rows)
}

/// Whether data of `needed` bytes are kept where `free` bytes are left, once the model, its gradients and the optimizer's moments are
/// there. What comes still, activations, two slots of batches, workspaces of the libraries, follows from the batch and the model and is not known
/// before the first step: the data leave three times as much as they take.
fn fits(needed: usize, free: usize) -> bool {
    needed <= free / 4
}

/// As the device would say it once it was full, but before anything was tried.
#[track_caller]
fn too_little(dataset: &dyn Dataset, device: Device, needed: usize, free: usize) -> Error {
    let rows = usize::try_from(dataset.rows()).unwrap_or(usize::MAX);
    let [(shape, dtype), _] = parts_of(dataset, rows);
    // The bytes are told beside it; a shape that is no shape of a tensor only shows as none.
    let shape = Shape::new(&shape).or_else(|_| Shape::new(&[0]));
    let name = "the training data, kept on the device (--data-on-device on; auto and off train without)";
    let stats = memory::stats(device);
    match shape {
        Err(error) => error.into(),
        Ok(shape) => Error::Tensor(ddp_kernels::Error::OutOfMemory(Box::new(OutOfMemory {
            device,
            wanted: TensorInfo { name: Some(name.into()), dtype, shape, device },
            asked_bytes: needed,
            free_bytes: free,
            limit_bytes: stats.allocated_bytes.saturating_add(free),
            allocated_bytes: stats.allocated_bytes,
            reserved_bytes: stats.reserved_bytes,
            largest: memory::largest_live(device, 5),
            at: Location::caller(),
        }))),
    }
}

/// The way out of the tables, for two slots.
#[derive(Debug)]
pub(super) struct Gatherer {
    tables: Tables,
    sides: [Numbers; 2],
}

/// The row numbers of a slot.
#[derive(Debug)]
struct Numbers {
    /// i64 `[R]`, pinned.
    host: Tensor,
    /// i64 `[R]` on the device of each lane.
    there: Vec<Tensor>,
    passage: Passage,
}

impl Gatherer {
    /// For batches of at most `rows_max` rows.
    pub(super) fn new(tables: Tables, rows_max: usize) -> Result<Gatherer> {
        let side = || -> Result<Numbers> {
            let host = Tensor::zeros_pinned(&[rows_max], DType::I64)?.named("row numbers");
            let there = tables.lanes.all().iter().map(|lane| {
                // Made on the lane, which is all that ever touches it.
                let numbers = lane.scope(|| Tensor::empty(&[rows_max], DType::I64, lane.device()))?;
                Ok(numbers.named("row numbers"))
            });
            let there = there.collect::<Result<Vec<Tensor>>>()?;
            Ok(Numbers { host, there, passage: Passage::default() })
        };
        let sides = [side()?, side()?];
        Ok(Gatherer { tables, sides })
    }

    /// Gathers `rows` into `batch`, which lies in slot `slot`.
    pub(super) fn fill(&mut self, slot: usize, rows: &[u64], batch: &[Tensor; 2]) -> Result<()> {
        let Gatherer { tables: Tables { parts, lanes }, sides } = self;
        lanes.leave(&mut sides[1 - slot].passage)?;
        let Numbers { host, there, passage } = &mut sides[slot];
        passage.wait_for_host_side()?;
        let host = host.slice(0..rows.len())?;
        // A tensor has no more rows than i64 counts.
        host.with_slice_mut(|numbers: &mut [i64]| {
            numbers.iter_mut().zip(rows).for_each(|(number, &row)| *number = row as i64);
        })?;
        lanes.free_slot(passage)?;
        for (index, lane) in lanes.all().iter().enumerate() {
            let numbers = there[index].slice(0..rows.len())?;
            let copy = announced("the row numbers of this step", || transfer::copy_async(&numbers, &host, lane))?;
            passage.copied[index] = Some(copy);
            lane.scope(|| {
                lanes.parts(index).try_for_each(|part| ops::gather_rows(&batch[part], &parts[part], &numbers))
            })?;
            Lanes::hand_over(&lane.record()?)?;
        }
        Ok(())
    }
}
