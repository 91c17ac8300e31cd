//! THE ONLY WAY between devices: every byte that crosses goes through this file. Each transfer is
//! checked against the rules in force and entered in the ledger with the caller's line.
//!
//! The rules belong to a thread and nest (`policy.rs`):
//! * `with_policy`: operands on different devices are refused (the default), moved with a warning,
//!   or moved.
//! * `forbid_transfers`: inside, every transfer that was not `announced` is an error.
//! * `in_phase`: the part of the run that the ledger books under.
//!
//! `Scalars` sends the numbers that change from step to step ahead, through a ring of pinned
//! memory, so that the host waits only for a step that is `STEPS` steps old.

mod ledger;
mod policy;
mod route;

pub(crate) use ledger::CapturedRows;
pub use ledger::{Hint, Ledger, Phase, Row, TransferKind, readable_bytes};
pub(crate) use policy::{Asked, book_launch, check, take_held};
pub use policy::{
    Policy, announced, book_collective, current_phase, forbid_transfers, in_phase, inherit, policy,
    spawn, with_ledger, with_policy,
};

use std::collections::BTreeSet;
use std::sync::Mutex;

use self::ledger::{Crossed, LedgerKey};
use self::policy::{book, enter, with_rules};
use self::route::Copy;
use crate::cuda::queue::is_capturing;
use crate::error::{Caller, Error, Line, Result, Site};
use crate::message::warn;
use crate::panics::lock;
use crate::storage::Borrow;
use crate::stream::{Event, Stream, gpu_of};
use crate::{DType, Device, Element, Tensor};

/// A copy of `tensor` on `target`, which is another device.
pub(crate) fn cross(tensor: &Tensor, target: Device, asked: Asked, by: Caller) -> Result<Tensor> {
    let entered = tensor.borrow("x", false, by)?;
    cross_entered(tensor, &entered, target, asked, by)
}

/// As `cross`, of a tensor that is entered already.
pub(crate) fn cross_entered(
    tensor: &Tensor,
    entered: &Borrow<'_>,
    target: Device,
    asked: Asked,
    by: Caller,
) -> Result<Tensor> {
    debug_assert_ne!(tensor.device(), target);
    if target.is_planned() {
        return tensor.empty_for_arrival(target, by);
    }
    target.check_usable(by)?;
    check(&tensor.info(), target, asked, by)?;
    let arrived = tensor.empty_for_arrival(target, by)?;
    let copy = Copy::new(&arrived, tensor, by);
    let kind = copy.now(&mut arrived.borrow("copy", true, by)?, entered)?;
    book(tensor, target, kind, tensor.is_pinned(), asked, by);
    Ok(arrived)
}

/// Copies an output that the policy had moved back to `original`, which is entered for writing.
pub(crate) fn bring_back(
    original: &Tensor,
    entered: &mut Borrow<'_>,
    moved: &Tensor,
    by: Caller,
) -> Result<()> {
    let copy = Copy::new(original, moved, by);
    let kind = copy.now(entered, &moved.borrow("copy", false, by)?)?;
    let (home, pinned) = (original.device(), original.is_pinned());
    book(moved, home, kind, pinned, Asked::ByPolicy, by);
    Ok(())
}

/// Copies the elements of `source` into `target`: same dtype, shape and layout, any two devices.
pub(crate) fn copy_into(target: &Tensor, source: &Tensor, by: Caller) -> Result<()> {
    copy_with(target, source, by, |copy, mut writes, reads| {
        Ok((copy.now(&mut writes, &reads)?, ()))
    })
}

/// As `copy_into`; `route` copies the bytes.
fn copy_with<R>(
    target: &Tensor,
    source: &Tensor,
    by: Caller,
    route: impl FnOnce(Copy<'_>, Borrow<'_>, Borrow<'_>) -> Result<(TransferKind, R)>,
) -> Result<R> {
    let crosses = target.device() != source.device();
    if crosses {
        check(&source.info(), target.device(), Asked::Explicitly, by)?;
    }
    let reads = source.borrow("source", false, by)?;
    let writes = target.borrow("target", true, by)?;
    let (kind, outcome) = route(Copy::new(target, source, by), writes, reads)?;
    if crosses {
        let pinned = source.is_pinned() || target.is_pinned();
        book(source, target.device(), kind, pinned, Asked::Explicitly, by);
    } else {
        source.storage().mark_used();
    }
    target.storage().mark_changed();
    Ok(outcome)
}

/// The tensor in host memory: itself, or a download.
pub(crate) fn on_host(tensor: &Tensor, by: Caller) -> Result<Tensor> {
    match tensor.device() {
        Device::Cpu => Ok(tensor.clone()),
        Device::Cuda(_) => cross(tensor, Device::Cpu, Asked::Explicitly, by),
    }
}

/// The one element of `tensor`. Booked on every device, so that a loop that reads it shows up
/// before it runs on a GPU.
pub(crate) fn scalar(tensor: &Tensor, by: Caller) -> Result<f64> {
    let source = tensor.device();
    let crosses = source != Device::Cpu;
    if crosses {
        check(&tensor.info(), Device::Cpu, Asked::Explicitly, by)?;
    }
    let entered = tensor.enter("x", false, by)?;
    let value = crate::dtype::with_element!(tensor.dtype(), T => {
        let element = if crosses {
            route::element(tensor, &entered, by)?
        } else {
            entered.elements::<T>()[0]
        };
        element.to_f64()
    });
    with_rules(|rules| {
        let key = LedgerKey {
            kind: TransferKind::ScalarRead,
            phase: rules.phase,
            source,
            target: Device::Cpu,
            implicit: false,
            site: by.at,
        };
        let bytes = if crosses { tensor.bytes() } else { 0 };
        enter(rules, key, Crossed::one(bytes, rules.announced));
    });
    Ok(value)
}

/// The device that an operation's operands meet on under the policy in force, or an error that
/// names them all. Operand 0 is the accumulator or output.
pub(crate) fn meeting_place(operands: &[(&'static str, &Tensor)], by: Caller) -> Result<Device> {
    let devices = || operands.iter().map(|(_, tensor)| tensor.device());
    let first = operands[0].1.device();
    if devices().all(|device| device == first) {
        return Ok(first);
    }
    if policy() == Policy::Forbid {
        return Err(device_mismatch(by, operands));
    }
    let target = if first.is_accelerator() {
        first
    } else {
        devices().find(|it| it.is_accelerator()).unwrap_or(first)
    };
    let movers = || operands.iter().filter(|(_, it)| it.device() != target);
    // Refused before anything moves and before the warning.
    for (_, tensor) in movers() {
        check(&tensor.info(), target, Asked::ByPolicy, by)?;
    }
    if policy() == Policy::Warn && is_first_warning(by.at) {
        let movers = movers().map(|(role, tensor)| tensor.as_operand(role));
        let movers: Vec<String> = movers.collect();
        warn(&format!(
            "{}: the policy moved {} to {target} at {}; warned once per line, counted in the \
             ledger each time",
            by.op,
            movers.join(", "),
            Line(by.at)
        ));
    }
    Ok(target)
}

/// The error for operands on different devices: one fix for each device in play, the one with the
/// fewest moves first.
fn device_mismatch(by: Caller, operands: &[(&'static str, &Tensor)]) -> Error {
    let mut fixes: Vec<(usize, String)> = Vec::new();
    for target in operands.iter().map(|(_, tensor)| tensor.device()) {
        let elsewhere = operands.iter().filter(|(_, it)| it.device() != target);
        let movers: Vec<&str> = elsewhere.map(|(role, _)| *role).collect();
        let fix = format!("{} with .to(Device::{target:?})", movers.join(" and "));
        if fixes.iter().all(|(_, known)| *known != fix) {
            fixes.push((movers.len(), fix));
        }
    }
    fixes.sort_by_key(|(moves, _)| *moves);
    let fixes: Vec<String> = fixes.into_iter().map(|(_, fix)| fix).collect();
    let named = operands.iter().map(|(role, it)| it.as_operand(role));
    let named: Vec<String> = named.collect();
    let (named, fixes) = (named.join(", "), fixes.join(", or "));
    let (op, line) = (by.op, Line(by.at));
    Error::DeviceMismatch(format!(
        "{op}: operands are on different devices: {named} ({line}); help: move {fixes}"
    ))
}

/// Whether no warning was given for this line before.
fn is_first_warning(at: Site) -> bool {
    static WARNED: Mutex<BTreeSet<(&str, u32)>> = Mutex::new(BTreeSet::new());
    lock(&WARNED).insert((at.file(), at.line()))
}

/// A copy in flight. Its tensors stay alive and in use until it is done.
#[derive(Debug)]
#[must_use = "wait for a copy in flight with wait(), or let a stream wait for its event"]
pub struct PendingCopy {
    done: Event,
    _source: Tensor,
    _target: Tensor,
}

impl PendingCopy {
    /// Blocks until the copy is done.
    #[track_caller]
    pub fn wait(self) -> Result<()> {
        self.done.synchronize()
    }

    /// Whether the copy is done.
    pub fn is_done(&self) -> bool {
        self.done.is_done()
    }

    /// The event after the copy, for streams to wait for.
    pub fn event(&self) -> &Event {
        &self.done
    }
}

/// Starts copying `source` into `target` on `stream`: same dtype and shape, any two devices. The
/// copy is done on return if it is within host memory, or from or to unpinned host memory.
///
/// The copy runs after the earlier work of `stream`, and waits for no other stream: order it with
/// events. Using pinned memory that it reads or writes before it is done is an error, even after
/// the `PendingCopy` is dropped.
#[track_caller]
pub fn copy_async(target: &Tensor, source: &Tensor, stream: &Stream) -> Result<PendingCopy> {
    let by = Caller::new("copy_async");
    target.check_copy_from(source, by)?;
    let (to, from, device) = (target.device(), source.device(), stream.device());
    if device != to && device != from {
        let (expected, got) = (format!("one on {to} or {from}"), format!("one on {device}"));
        return Err(Error::value("copy_async", "stream", expected, got));
    }
    let done = copy_with(target, source, by, |copy, writes, reads| {
        copy.on(stream, writes, reads)
    })?;
    Ok(PendingCopy {
        done,
        _source: source.clone(),
        _target: target.clone(),
    })
}

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
