//! The streams that copy batches to GPUs ahead of their step, and who waits for whom.
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

use ddp_kernels::Device;
use ddp_kernels::stream::{Event, Stream};
use ddp_kernels::transfer::PendingCopy;

use crate::error::Result;

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

    /// The stream of inputs (0) or targets (1).
    pub(super) fn of(&self, part: usize) -> &Stream {
        &self.copies[part]
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
