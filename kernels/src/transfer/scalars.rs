//! Numbers that change from step to step, sent ahead to small tensors through a ring of pinned
//! memory, so that the host waits only for a step that is `STEPS` steps old.

use super::book::{Asked, book, check};
use super::ledger::TransferKind;
use super::policy::announced;
use super::route::Copy;
use crate::cuda::queue::is_capturing;
use crate::error::{Caller, Error, Result};
use crate::stream::{Event, Stream, gpu_of};
use crate::{DType, Device, Element, Tensor};

/// Steps whose numbers may be in flight at the same time.
const STEPS: usize = 3;
/// The most bytes of one message, unless `with_room` says otherwise.
const SLOT_BYTES: usize = 256;

/// Sends small numbers from the host to tensors on one device.
#[derive(Debug)]
pub struct Scalars {
    device: Device,
    /// U8, pinned: slots of `slot_bytes`. None for the CPU.
    ring: Option<Tensor>,
    slot_bytes: usize,
    /// The event after each slot's last message was read.
    read: Vec<Option<Event>>,
    next: usize,
}

impl Scalars {
    /// For one device and this many messages per step, of at most 256 bytes each.
    #[track_caller]
    pub fn new(device: Device, messages_per_step: usize) -> Result<Scalars> {
        Scalars::with_room(device, messages_per_step, SLOT_BYTES)
    }

    /// As `new`, for messages of at most `slot_bytes` bytes.
    #[track_caller]
    pub fn with_room(
        device: Device,
        messages_per_step: usize,
        slot_bytes: usize,
    ) -> Result<Scalars> {
        let slots = STEPS * messages_per_step.max(1);
        // Also makes this device the one that allocates the pinned memory.
        let ring = match gpu_of(device, Caller::new("scalars"))? {
            None => None,
            Some(_) => {
                let ring = Tensor::zeros_pinned(&[slots * slot_bytes], DType::U8)?;
                Some(ring.named("ring of scalars"))
            }
        };
        Ok(Scalars {
            device,
            ring,
            slot_bytes,
            read: vec![None; slots],
            next: 0,
        })
    }

    /// Writes `values` to `target`, in the order of the device's current stream, without blocking
    /// the host. It is booked as an announced upload. It cannot be part of a graph, which would
    /// send the same numbers at each launch.
    #[track_caller]
    pub fn send<T: Element>(&mut self, target: &Tensor, values: &[T]) -> Result<()> {
        let by = Caller::new("send");
        let (device, count, bytes) = (self.device, values.len(), size_of_val(values));
        if (target.device(), target.dtype(), target.count()) != (device, T::DTYPE, count) {
            let expected = format!("{count} of {} on {device}", T::DTYPE);
            return Err(Error::value("send", "target", expected, target));
        }
        let slot_bytes = self.slot_bytes;
        if bytes > slot_bytes {
            let expected = format!("at most {slot_bytes} bytes");
            return Err(Error::value("send", "values", expected, bytes));
        }
        let Some(ring) = &self.ring else {
            return target.with_slice_mut(|slots: &mut [T]| slots.copy_from_slice(values));
        };
        if is_capturing() {
            let why = "a graph would send the same numbers at each launch";
            let help = "send them before the launch, to tensors that the graph reads";
            return Err(by.capture(device, why, help));
        }
        let slot = self.next % self.read.len();
        if let Some(read) = &self.read[slot] {
            read.synchronize()?;
        }
        let message = ring.slice(slot * slot_bytes..slot * slot_bytes + bytes)?;
        // SAFETY: an Element is plain data without padding, so its bytes are initialised.
        let values = unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), bytes) };
        message.with_bytes_mut(by.op, by.at, |slot| slot.copy_from_slice(values))?;
        let done = announced("numbers of the step", || -> Result<Event> {
            check(&message.info(), device, Asked::Explicitly, by)?;
            let stream = Stream::current_at(device, by)?;
            let source = message.enter("values", false, by)?;
            let entered = target.enter("target", true, by)?;
            let copy = Copy::new(target, &message, by);
            let (_, done) = copy.on(&stream, entered, source)?;
            let (kind, asked) = (TransferKind::Upload, Asked::Explicitly);
            book(&message, device, kind, true, asked, by);
            Ok(done)
        })?;
        self.read[slot] = Some(done);
        self.next += 1;
        Ok(())
    }
}
