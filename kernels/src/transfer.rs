//! THE door between devices. Every byte that crosses goes through this file: `to`, `copy_from`, asynchronous and
//! peer copies, `item`, `to_vec`. Each crossing is checked against the rules in force and booked in the ledger with
//! the caller's line.
//!
//! The rules belong to a thread and nest (`policy.rs`):
//! * `with_policy`: what happens to operands on different devices: refuse (the default), warn and move, or move.
//! * `forbid_transfers`: inside, a transfer that was not `announced` is an error, even an explicit one.
//! * `in_phase`: the part of the run that the ledger books under.

mod hints;
mod ledger;
mod policy;
mod route;
mod scalars;

use std::collections::BTreeSet;
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

pub use hints::Hint;
pub(crate) use ledger::Held;
pub use ledger::{Kind, Ledger, Row, readable_bytes};
pub(crate) use policy::with_rules;
pub use policy::{
    Phase, Policy, announced, current_phase, forbid_transfers, in_phase, inherit, policy, with_ledger, with_policy,
};

pub use scalars::Scalars;

use self::ledger::{Circumstances, Key};
use self::policy::Rules;
use self::route::Copy;
use crate::cuda::capture;
use crate::error::{DeviceMismatch, Error, ForbiddenTransfer, Place, Result, Site, TensorInfo};
use crate::storage::{Borrow, Origin};
use crate::stream::{Event, Stream};
use crate::{Device, Element as _, Tensor};

/// Who asked for a crossing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// A call of the user's: `to`, `copy_from` …
    Explicitly,
    /// The policy, for an operand of an operation.
    ByPolicy,
}

/// Checks one crossing against the rules in force, without booking it. An announcement speaks for explicit transfers
/// alone: what a policy would move was not meant.
pub(crate) fn check(op: &'static str, info: &TensorInfo, target: Device, asked: Asked, at: Site) -> Result<()> {
    with_rules(|rules| match rules.forbidden_since {
        Some(scope) if rules.announced.is_none() || asked == Asked::ByPolicy => {
            let bytes = info.shape.count() * info.dtype.bytes();
            let forbidden = ForbiddenTransfer { op, tensor: info.clone(), target, bytes, scope, at };
            Err(Error::ForbiddenTransfer(Box::new(forbidden)))
        }
        _ => Ok(()),
    })
}

/// Books one crossing that has happened.
fn book(tensor: &Tensor, target: Device, kind: Kind, pinned: bool, asked: Asked, at: Site) {
    let storage = tensor.storage();
    let source = tensor.device();
    let unused = source == Device::Cpu && storage.origin == Origin::Computed && !storage.was_used();
    let made_only_to_move = unused.then_some(storage.made_at);
    let came_from_target = match storage.origin {
        // Changed since: what goes back is news (trained weights being saved, say).
        Origin::Arrived(from, by) if from == target && !storage.was_changed() => Some(by),
        _ => None,
    };
    with_rules(|rules| {
        // Saving copies down what came up, and that is its purpose.
        let saving = rules.phase == Phase::Checkpoint;
        let key = Key { kind, phase: rules.phase, source, target, implicit: asked == Asked::ByPolicy, site: at };
        let seen = Circumstances {
            bytes: tensor.bytes(),
            announced: rules.announced,
            pageable: !pinned && (source == Device::Cpu || target == Device::Cpu),
            made_only_to_move,
            came_from_target: came_from_target.filter(|_| !saving),
        };
        enter(rules, key, seen);
    });
}

/// Writes one transfer into the book in force, or leaves it to the graph that this thread captures.
fn enter(rules: &Rules, key: Key, seen: Circumstances) {
    if !capture::hold(|held| held.hold(key, seen)) {
        rules.ledger.book(key, seen);
    }
}

/// Books a launch of a graph: what its capture held, under the phase and in the ledger of the thread that launches it.
pub(crate) fn book_launch(held: &Held) {
    with_rules(|rules| rules.ledger.book_held(held, rules.phase));
}

/// Books that this rank gives `tensor` to a collective, by the call at `at`. All of the tensor counts, whatever part of it travels and by
/// which way, so that the same call counts the same on every rank. Policies and scopes have no say in it: they are about devices.
///
/// For those who implement collectives, once a call; in a capture each launch of the graph books it.
pub fn book_collective(tensor: &Tensor, at: Site) {
    let device = tensor.device();
    with_rules(|rules| {
        let kind = Kind::Collective;
        let key = Key { kind, phase: rules.phase, source: device, target: device, implicit: false, site: at };
        let seen = Circumstances { bytes: tensor.bytes(), announced: rules.announced, ..Circumstances::default() };
        enter(rules, key, seen);
    });
}

/// A copy of `tensor` on `target`, which is another device.
pub(crate) fn cross(tensor: &Tensor, target: Device, op: &'static str, asked: Asked, at: Site) -> Result<Tensor> {
    let entered = tensor.borrow("x", false, op, at)?;
    cross_entered(tensor, &entered, target, op, asked, at)
}

/// As `cross`, of a tensor that is entered already.
pub(crate) fn cross_entered(
    tensor: &Tensor,
    entered: &Borrow<'_>,
    target: Device,
    op: &'static str,
    asked: Asked,
    at: Site,
) -> Result<Tensor> {
    debug_assert_ne!(tensor.device(), target);
    target.check_usable(op, at)?;
    check(op, &tensor.info(), target, asked, at)?;
    let copy = tensor.empty_for_arrival(target, op, at)?;
    let way = Copy { target: &copy, source: tensor, op, at };
    let kind = way.now(&mut copy.borrow("copy", true, op, at)?, entered)?;
    book(tensor, target, kind, tensor.is_pinned(), asked, at);
    Ok(copy)
}

/// Copies an output that the policy had moved back to `original`, which is entered for writing.
pub(crate) fn bring_back(
    original: &Tensor,
    entered: &mut Borrow<'_>,
    copy: &Tensor,
    op: &'static str,
    at: Site,
) -> Result<()> {
    let way = Copy { target: original, source: copy, op, at };
    let kind = way.now(entered, &copy.borrow("copy", false, op, at)?)?;
    book(copy, original.device(), kind, original.is_pinned(), Asked::ByPolicy, at);
    Ok(())
}

/// Copies the elements of `source` into `target`: same dtype, shape and layout, any two devices.
pub(crate) fn copy_into(target: &Tensor, source: &Tensor, op: &'static str, at: Site) -> Result<()> {
    copy_with(target, source, op, at, |copy, mut writes, reads| Ok((copy.now(&mut writes, &reads)?, ())))
}

/// As `copy_into`, with the bytes copied by `way`.
fn copy_with<R>(
    target: &Tensor,
    source: &Tensor,
    op: &'static str,
    at: Site,
    way: impl FnOnce(Copy<'_>, Borrow<'_>, Borrow<'_>) -> Result<(Kind, R)>,
) -> Result<R> {
    let crosses = target.device() != source.device();
    if crosses {
        check(op, &source.info(), target.device(), Asked::Explicitly, at)?;
    }
    let reads = source.borrow("source", false, op, at)?;
    let writes = target.borrow("target", true, op, at)?;
    let (kind, outcome) = way(Copy { target, source, op, at }, writes, reads)?;
    if crosses {
        let pinned = source.is_pinned() || target.is_pinned();
        book(source, target.device(), kind, pinned, Asked::Explicitly, at);
    } else {
        source.storage().mark_used();
    }
    target.storage().mark_changed();
    Ok(outcome)
}

/// The elements of `tensor` as the host sees them, for `to_vec` and `save`: a download when it lives elsewhere.
pub(crate) fn on_host(tensor: &Tensor, op: &'static str, at: Site) -> Result<Tensor> {
    match tensor.device() {
        Device::Cpu => Ok(tensor.clone()),
        _ => cross(tensor, Device::Cpu, op, Asked::Explicitly, at),
    }
}

/// The one element of `tensor`. Counted on every device, so that a loop that reads it is found before it meets a GPU.
pub(crate) fn scalar(tensor: &Tensor, at: Site) -> Result<f64> {
    let source = tensor.device();
    let crosses = source != Device::Cpu;
    if crosses {
        check("item", &tensor.info(), Device::Cpu, Asked::Explicitly, at)?;
    }
    let entered = tensor.enter("x", false, "item", at)?;
    let value = crate::dtype::with_element!(tensor.dtype(), T => {
        let element =
            if crosses { route::element(tensor, &entered, "item", at)? } else { entered.elements::<T>()[0] };
        element.to_f64()
    });
    with_rules(|rules| {
        let key =
            Key { kind: Kind::ScalarRead, phase: rules.phase, source, target: Device::Cpu, implicit: false, site: at };
        let bytes = if crosses { tensor.bytes() } else { 0 };
        enter(rules, key, Circumstances { bytes, announced: rules.announced, ..Circumstances::default() });
    });
    Ok(value)
}

/// Where the operands of one operation meet under the policy in force, or the error that names them all.
/// Operand 0 is the accumulator or output.
pub(crate) fn meeting_place(op: &'static str, operands: &[(&'static str, &Tensor)], at: Site) -> Result<Device> {
    let first = operands[0].1.device();
    if operands.iter().all(|(_, tensor)| tensor.device() == first) {
        return Ok(first);
    }
    if policy() == Policy::Forbid {
        let operands = operands.iter().map(|(role, tensor)| tensor.as_operand(role)).collect();
        return Err(Error::DeviceMismatch(Box::new(DeviceMismatch { op, operands, at })));
    }
    let accelerator = operands.iter().map(|(_, tensor)| tensor.device()).find(|device| device.is_accelerator());
    let target = if first.is_accelerator() { first } else { accelerator.unwrap_or(first) };
    // Refused here, before anything moves and before it is warned of.
    for (_, tensor) in operands.iter().filter(|(_, tensor)| tensor.device() != target) {
        check(op, &tensor.info(), target, Asked::ByPolicy, at)?;
    }
    if policy() == Policy::Warn {
        warn_once(op, operands, target, at);
    }
    Ok(target)
}

/// One warning a source line.
fn warn_once(op: &'static str, operands: &[(&'static str, &Tensor)], target: Device, at: Site) {
    static WARNED: Mutex<BTreeSet<(&str, u32)>> = Mutex::new(BTreeSet::new());
    if !WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert((at.file(), at.line())) {
        return;
    }
    let movers: Vec<String> = operands
        .iter()
        .filter(|(_, tensor)| tensor.device() != target)
        .map(|(role, tensor)| tensor.as_operand(role).to_string())
        .collect();
    let text = format!(
        "{op}: the policy moved {} to {target} at {}; said once for this line, counted in the ledger each time",
        movers.join(", "),
        Place(at)
    );
    warn(&text);
}

/// A warning through `tracing` if the program listens to it, else on standard error.
pub(crate) fn warn(text: &str) {
    if tracing::dispatcher::has_been_set() {
        tracing::warn!("{text}");
    } else {
        // Nobody reads it: that is no reason to fail.
        let _ = writeln!(std::io::stderr(), "warning: {text}");
    }
}

/// A copy that may still be running. Its tensors stay alive and in use until it is known to be done.
#[derive(Debug)]
#[must_use = "a copy in flight is waited for with wait(), or by a stream that waits for its event"]
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

/// Starts copying `source` into `target` on `stream`: same dtype and shape, any two devices. Between memories of the host the copy
/// is done on return, and so it is from and into host memory that is not pinned (`Tensor::zeros_pinned`).
///
/// The copy comes after what `stream` was given before, and waits for no other stream: say with events what it has to wait for. Pinned memory
/// that it reads or writes cannot be touched before it is done: that is an error, also when the `PendingCopy` is gone.
#[track_caller]
pub fn copy_async(target: &Tensor, source: &Tensor, stream: &Stream) -> Result<PendingCopy> {
    let at = std::panic::Location::caller();
    target.check_copy_from(source, "copy_async", at)?;
    let devices = [target.device(), source.device()];
    if !devices.contains(&stream.device()) {
        let expected = format!("a stream on {} or {}", devices[0], devices[1]);
        return Err(Error::value("copy_async", "stream", expected, format!("one on {}", stream.device())));
    }
    let done = copy_with(target, source, "copy_async", at, |copy, writes, reads| copy.on(stream, writes, reads))?;
    Ok(PendingCopy { done, _source: source.clone(), _target: target.clone() })
}
