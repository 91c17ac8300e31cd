//! Copies batches from host memory to GPUs: gathered into pinned memory and copied on separate
//! streams, so that the copy of a batch runs during the step before it. Who waits for whom:
//! `lanes.rs`.

use ddp_kernels::trace::{self, Label, Lane};
use ddp_kernels::transfer;
use ddp_kernels::{DType, Device, Tensor};

use super::lanes::{CopyStreams, SlotTransfers};
use super::memory::{first_rows, made};
use crate::dataset::Dataset;
use crate::error::Result;

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

    /// Copies `host` to `batch`, which is in slot `slot`, and goes on to the next piece.
    pub(super) fn copy(&mut self, slot: usize, batch: &[Tensor; 2]) -> Result<()> {
        let (streams, transfers) = (&self.streams, &mut self.transfers[slot]);
        let host = first_rows(&self.ring[self.turn], batch[0].shape()[0])?;
        self.turn = (self.turn + 1) % RING;
        streams.free_slot(transfers)?;
        let copy = |part: usize| {
            let stream = streams.of(part);
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
