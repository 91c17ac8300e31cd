//! Numbers that change from step to step, sent ahead to small tensors: through a ring of pinned memory, so that the host waits
//! for nothing younger than the step before the last.

use std::panic::Location;

use super::ledger::Kind;
use super::policy::announced;
use super::route::Copy;
use super::{Asked, check};
use crate::cuda::{Gpu, capture};
use crate::error::{Error, Result};
use crate::stream::{Event, Stream};
use crate::{DType, Device, Element, Tensor};

/// Steps whose numbers may be on their way at the same time.
const STEPS: usize = 3;
/// The most bytes of one message.
const SLOT_BYTES: usize = 256;

/// A way for small numbers from the host to tensors on one device.
#[derive(Debug)]
pub struct Scalars {
    device: Device,
    /// U8, pinned: slots of `SLOT_BYTES`. None where the host writes the tensors itself.
    ring: Option<Tensor>,
    /// When the message in each slot has been read.
    read: Vec<Option<Event>>,
    next: usize,
}

impl Scalars {
    /// For a device, and so many messages a step.
    #[track_caller]
    pub fn new(device: Device, messages_per_step: usize) -> Result<Scalars> {
        let slots = STEPS * messages_per_step.max(1);
        let ring = match device {
            Device::Cpu => None,
            Device::Cuda(index) => {
                // This device before any other: pinned memory is made by one that is in use, or else by the first.
                Gpu::get(index, "scalars", Location::caller())?;
                Some(Tensor::zeros_pinned(&[slots * SLOT_BYTES], DType::U8)?.named("ring of numbers"))
            }
        };
        Ok(Scalars { device, ring, read: vec![None; slots], next: 0 })
    }

    /// Writes `values` to `target`, in the order of the device's current stream. The host may go on at once. Booked as an upload, and
    /// allowed where transfers are forbidden: it is what they are forbidden for. No part of a graph: a graph would send the same numbers for ever.
    #[track_caller]
    pub fn send<T: Element>(&mut self, target: &Tensor, values: &[T]) -> Result<()> {
        let at = Location::caller();
        let bytes = size_of_val(values);
        if target.device() != self.device || target.dtype() != T::DTYPE || target.count() != values.len() {
            let expected = format!("{} of {} on {}", values.len(), T::DTYPE, self.device);
            return Err(Error::value("send", "target", expected, target));
        }
        if bytes > SLOT_BYTES {
            return Err(Error::value("send", "values", format!("at most {SLOT_BYTES} bytes"), bytes));
        }
        let Some(ring) = &self.ring else {
            return target.with_slice_mut(|slots: &mut [T]| slots.copy_from_slice(values));
        };
        if capture::is_capturing() {
            let why = "a graph would send the same numbers at each launch. Send them before the launch, to tensors that the graph reads";
            return Err(Error::Capture { op: "send", device: self.device, why: why.to_string(), at });
        }
        let slot = self.next % self.read.len();
        if let Some(read) = &self.read[slot] {
            read.synchronize()?;
        }
        let message = ring.slice(slot * SLOT_BYTES..slot * SLOT_BYTES + bytes)?;
        // SAFETY: any Element is plain old data without padding: its bytes are initialised.
        let values = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), bytes) };
        message.with_bytes_mut("send", at, |slot| slot.copy_from_slice(values))?;
        let done = announced("numbers of the step", || -> Result<Event> {
            check("send", &message.info(), self.device, Asked::Explicitly, at)?;
            let stream = Stream::current_at(self.device, "send", at)?;
            let source = message.enter("values", false, "send", at)?;
            let entered = target.enter("target", true, "send", at)?;
            let copy = Copy { target, source: &message, op: "send", at };
            let (_, done) = copy.on(&stream, entered, source)?;
            super::book(&message, self.device, Kind::Upload, true, Asked::Explicitly, at);
            Ok(done)
        })?;
        self.read[slot] = Some(done);
        self.next += 1;
        Ok(())
    }
}
