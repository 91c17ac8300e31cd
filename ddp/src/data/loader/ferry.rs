//! The way of batches onto a GPU: from pinned memory, by copies on a stream of their own, so that the copy of a batch runs beside
//! the step before it.
//!
//! Who waits for whom. Call the batches 0, 1, 2 …; batch k lies in slot k mod 2; its step is given to the compute stream (the
//! device's current stream) before batch k + 1 is loaded: that is what callers promise. `load(k)` does, in this order:
//!
//! 1. Records an event on the compute stream. By the promise all that reads batch k − 1 has been given to that stream, so this is
//!    a point after the last read of slot (k − 1) mod 2, and it is kept with that slot.
//! 2. Waits, on the host, for the copy of batch k − 2, which read this slot's host side, and gathers into it. That copy waited
//!    for step k − 4 alone: the host waits for nothing younger than that.
//! 3. Gives the copy to the copy stream, after the event that `load(k − 1)` kept with this slot: the point after step k − 2, the
//!    last that read it. Step k − 1 may still run meanwhile: it reads the other slot.
//! 4. Lets the compute stream wait for the copy: step k, and everything given to that stream later, sees the batch.

use ddp_kernels::stream::{Event, Stream};
use ddp_kernels::transfer::{self, PendingCopy};
use ddp_kernels::{Device, Tensor};

use crate::error::Result;

/// The stream of copies to one device.
#[derive(Debug)]
pub(super) struct Ferry {
    copies: Stream,
}

/// What is under way to and from one slot.
#[derive(Debug, Default)]
pub(super) struct Passage {
    /// The copies of the batch that was gathered last.
    copied: Option<[PendingCopy; 2]>,
    /// The point after the last work that reads the device's side.
    read: Option<Event>,
}

impl Passage {
    /// Blocks until the host's side may be written.
    pub(super) fn wait_for_host_side(&mut self) -> Result<()> {
        // After the second copy is after both.
        let Some([_, last]) = self.copied.take() else { return Ok(()) };
        Ok(last.wait()?)
    }
}

impl Ferry {
    /// A way to `device`, a GPU.
    pub(super) fn new(device: Device) -> Result<Ferry> {
        Ok(Ferry { copies: Stream::new(device)? })
    }

    /// All work that reads this slot, if it was ever filled, has been given to the device's current stream.
    pub(super) fn leave(&self, passage: &mut Passage) -> Result<()> {
        if passage.copied.is_some() {
            passage.read = Some(Stream::current(self.copies.device())?.record()?);
        }
        Ok(())
    }

    /// Copies what lies on the `host`'s side to the `device`'s, and lets the device's current stream wait for that.
    pub(super) fn bring(&self, passage: &mut Passage, device: &[Tensor; 2], host: &[Tensor; 2]) -> Result<()> {
        if let Some(read) = &passage.read {
            self.copies.wait(read)?;
        }
        let copy = |at: usize| transfer::copy_async(&device[at], &host[at], &self.copies);
        let copies =
            transfer::announced("the batch of this step", || Ok::<_, ddp_kernels::Error>([copy(0)?, copy(1)?]))?;
        Stream::current(self.copies.device())?.wait(copies[1].event())?;
        passage.copied = Some(copies);
        Ok(())
    }
}
