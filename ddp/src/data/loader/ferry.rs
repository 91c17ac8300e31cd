//! The way of batches onto GPUs out of host memory: gathered into pinned memory, and copied on a stream of their own, so that the copy
//! of a batch runs beside the step before it. Who waits for whom: `lanes.rs`.

use ddp_kernels::transfer;
use ddp_kernels::{DType, Device, Tensor};

use super::lanes::{Lanes, Passage};
use super::{first_rows, made};
use crate::data::Dataset;
use crate::error::Result;

/// Pieces of host memory that take turns: one is copied from, one still may be, and one is gathered into.
const RING: usize = 3;

/// The way out of host memory, for two slots.
#[derive(Debug)]
pub(super) struct Ferry {
    lanes: Lanes,
    /// Features `[R, F…]` and targets `[R]` or `[R, O]`, pinned.
    ring: [[Tensor; 2]; RING],
    /// The piece for the batch that is brought next.
    turn: usize,
    /// By slot.
    passages: [Passage; 2],
}

impl Ferry {
    /// For batches of at most `rows_max` rows, to these GPUs.
    pub(super) fn new(dataset: &dyn Dataset, rows_max: usize, devices: [Device; 2]) -> Result<Ferry> {
        // Before the pinned memory: that is made by a device that is in use.
        let lanes = Lanes::new(devices)?;
        let pinned = |_: usize, shape: &[usize], dtype: DType| Tensor::zeros_pinned(shape, dtype);
        let piece = || made(dataset, rows_max, &pinned);
        Ok(Ferry { lanes, ring: [piece()?, piece()?, piece()?], turn: 0, passages: Default::default() })
    }

    /// The host memory of the batch that is brought next. Nothing reads it any more.
    pub(super) fn host(&self) -> &[Tensor; 2] {
        &self.ring[self.turn]
    }

    /// What comes before the batch for slot `slot` is gathered and brought. From here on the memory of the batch after it is free, too.
    pub(super) fn begin(&mut self, slot: usize) -> Result<()> {
        self.lanes.leave(&mut self.passages[1 - slot])?;
        self.passages[slot].wait_for_host_side()
    }

    /// Brings what lies in `host` to `batch`, which lies in slot `slot`; then it is the next piece's turn.
    pub(super) fn bring(&mut self, slot: usize, batch: &[Tensor; 2]) -> Result<()> {
        let Ferry { lanes, ring, turn, passages } = self;
        let (passage, host) = (&mut passages[slot], first_rows(&ring[*turn], batch[0].shape()[0])?);
        *turn = (*turn + 1) % RING;
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
