//! The streams on which batches come to GPUs ahead of their step, and who waits for whom.
//!
//! A batch lies on two devices, features on the first and targets on the last; usually they are one. Each has a stream of
//! copies, beside its compute stream (the device's current stream). Call the batches 0, 1, 2 …; batch k lies in slot k mod 2; its step is
//! given to the compute streams before batch k + 1 is loaded: that is what callers promise. `load(k)` does, in this order, on each
//! device:
//!
//! 1. Records an event on the compute stream (`leave`). By the promise all that reads batch k − 1 has been given to that stream, so this
//!    is a point after the last read of slot (k − 1) mod 2, and it is kept with that slot.
//! 2. Waits, on the host, for the copies out of pinned memory that batch k − 2 left under way in this slot (`wait_for_host_side`). Those
//!    copies waited for step k − 4 alone: the host waits for nothing younger than that. Row numbers (`resident.rs`) are written there. Rows
//!    (`ferry.rs`) have three pieces of pinned memory: batch k + 1 is gathered into the piece of batch k − 2 by a thread of its own
//!    (`fetch.rs`) as soon as `load(k)` has ended; its own piece was that of batch k − 3, which `load(k − 1)` waited for.
//! 3. Lets the copy stream wait for the event that `load(k − 1)` kept with this slot (`free_slot`): the point after step k − 2, the last that
//!    read it. Step k − 1 may still run meanwhile: it reads the other slot. Then the copy stream writes the batch.
//! 4. Lets the compute stream wait for that (`hand_over`): step k, and everything given to that stream later, sees the batch.
//!
//! What only copy streams touch (the data kept on a device, row numbers there) needs no event: a stream is in order by itself.

use std::ops::Range;

use ddp_kernels::Device;
use ddp_kernels::stream::{Event, Stream};
use ddp_kernels::transfer::PendingCopy;

use crate::error::Result;

/// The streams of copies to the devices of a batch.
#[derive(Clone, Debug)]
pub(super) struct Lanes {
    /// That of the features and that of the targets: one stream where that is one device.
    copies: [Stream; 2],
}

/// What is under way to and from one slot, by lane.
#[derive(Debug, Default)]
pub(super) struct Passage {
    /// The last copy out of pinned memory.
    pub(super) copied: [Option<PendingCopy>; 2],
    /// The point after the last work that reads the batch.
    read: [Option<Event>; 2],
}

impl Passage {
    /// Blocks until the pinned memory may be written.
    pub(super) fn wait_for_host_side(&mut self) -> Result<()> {
        for copy in self.copied.iter_mut().filter_map(Option::take) {
            copy.wait()?;
        }
        Ok(())
    }
}

impl Lanes {
    /// To these GPUs: that of the features, that of the targets.
    pub(super) fn new([first, last]: [Device; 2]) -> Result<Lanes> {
        let features = Stream::new(first)?;
        let targets = if last == first { features.clone() } else { Stream::new(last)? };
        Ok(Lanes { copies: [features, targets] })
    }

    /// One a device.
    pub(super) fn all(&self) -> &[Stream] {
        if self.copies[0] == self.copies[1] { &self.copies[..1] } else { &self.copies }
    }

    /// That of the features (0) or of the targets (1).
    pub(super) fn of(&self, part: usize) -> &Stream {
        &self.copies[part]
    }

    /// What travels on lane `lane` of `all()`: features (0), targets (1), or both.
    pub(super) fn parts(&self, lane: usize) -> Range<usize> {
        if self.all().len() == 1 { 0..2 } else { lane..lane + 1 }
    }

    /// All work that reads this slot, if it was ever filled, has been given to the devices' current streams.
    pub(super) fn leave(&self, passage: &mut Passage) -> Result<()> {
        let Passage { copied, read } = passage;
        for ((lane, copied), read) in self.all().iter().zip(copied).zip(read) {
            if copied.is_some() {
                *read = Some(Stream::current(lane.device())?.record()?);
            }
        }
        Ok(())
    }

    /// What the lanes are given from now on comes after the last work that reads this slot.
    pub(super) fn free_slot(&self, passage: &Passage) -> Result<()> {
        for (lane, read) in self.all().iter().zip(&passage.read) {
            if let Some(read) = read {
                lane.wait(read)?;
            }
        }
        Ok(())
    }

    /// What the device's current stream is given from now on comes after `written`, an event of a lane.
    pub(super) fn hand_over(written: &Event) -> Result<()> {
        Ok(Stream::current(written.device())?.wait(written)?)
    }
}
