//! The way of batches onto GPUs out of host memory: gathered into pinned memory, and copied on a stream of their own, so that the copy
//! of a batch runs beside the step before it. Who waits for whom: `lanes.rs`.

use ddp_kernels::transfer;
use ddp_kernels::{DType, Device, Tensor};

use super::lanes::{Lanes, Passage};
use super::{first_rows, gather, made};
use crate::data::Dataset;
use crate::error::Result;

/// The way out of host memory, for two slots.
#[derive(Debug)]
pub(super) struct Ferry {
    lanes: Lanes,
    sides: [Side; 2],
}

/// The host's side of a slot.
#[derive(Debug)]
struct Side {
    /// Features `[R, F…]` and targets `[R]` or `[R, O]`, pinned.
    host: [Tensor; 2],
    passage: Passage,
}

impl Ferry {
    /// For batches of at most `rows_max` rows, to these GPUs.
    pub(super) fn new(dataset: &dyn Dataset, rows_max: usize, devices: [Device; 2]) -> Result<Ferry> {
        // Before the pinned memory: that is made by a device that is in use.
        let lanes = Lanes::new(devices)?;
        let pinned = |_: usize, shape: &[usize], dtype: DType| Tensor::zeros_pinned(shape, dtype);
        let side =
            || -> Result<Side> { Ok(Side { host: made(dataset, rows_max, &pinned)?, passage: Passage::default() }) };
        Ok(Ferry { lanes, sides: [side()?, side()?] })
    }

    /// Brings `rows` to `batch`, which lies in slot `slot`.
    pub(super) fn fill(&mut self, slot: usize, dataset: &dyn Dataset, rows: &[u64], batch: &[Tensor; 2]) -> Result<()> {
        let Ferry { lanes, sides } = self;
        lanes.leave(&mut sides[1 - slot].passage)?;
        let Side { host, passage } = &mut sides[slot];
        passage.wait_for_host_side()?;
        let host = first_rows(host, rows.len())?;
        gather(dataset, rows, &host)?;
        lanes.free_slot(passage)?;
        let copy = |part: usize| transfer::copy_async(&batch[part], &host[part], lanes.of(part));
        let copies =
            transfer::announced("the batch of this step", || Ok::<_, ddp_kernels::Error>([copy(0)?, copy(1)?]))?;
        // On one lane what comes after the second copy is after both.
        let last_of_each = copies.into_iter().skip(2 - lanes.all().len());
        for (copied, copy) in passage.copied.iter_mut().zip(last_of_each) {
            Lanes::hand_over(copied.insert(copy).event())?;
        }
        Ok(())
    }
}
