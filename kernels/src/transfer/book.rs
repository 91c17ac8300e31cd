//! Checking a crossing against the rules in force, and booking it in the ledger.

use std::cell::RefCell;

use super::ledger::{CapturedRows, Key, Phase, Sums, TransferKind};
use super::policy::{Rules, with_rules};
use crate::cuda::queue::is_capturing;
use crate::error::{Caller, Error, Line, Result, Site, TensorInfo};
use crate::storage::Origin;
use crate::{Device, Tensor};

/// Who asked for a crossing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// A call of the user's: `to`, `copy_from` …
    Explicitly,
    /// The policy, for an operand of an operation.
    ByPolicy,
}

/// Checks a crossing against the rules in force, without booking it. An announcement allows only
/// explicit transfers: what a policy would move was not intended.
pub(crate) fn check(info: &TensorInfo, target: Device, asked: Asked, by: Caller) -> Result<()> {
    with_rules(|rules| match rules.forbidden_since {
        Some(scope) if rules.announced.is_none() || asked == Asked::ByPolicy => {
            let bytes = info.shape.count() * info.dtype.bytes();
            let (op, line, scope) = (by.op, Line(by.at), Line(scope));
            Err(Error::ForbiddenTransfer(format!(
                "{op}: {info} would cross to {target} ({bytes} bytes, {line}), but transfers are \
                 forbidden since {scope}; help: move it before that scope, or wrap the call in \
                 transfer::announced(\"reason\", || …)"
            )))
        }
        _ => Ok(()),
    })
}

/// Books a crossing that has happened.
pub(super) fn book(
    tensor: &Tensor,
    target: Device,
    kind: TransferKind,
    pinned: bool,
    asked: Asked,
    by: Caller,
) {
    let storage = tensor.storage();
    let source = tensor.device();
    let unused = source == Device::Cpu && storage.origin == Origin::Computed && !storage.was_used();
    let returned = match storage.origin {
        // Changed contents are new on the other device: trained weights being saved, for example.
        Origin::Arrived(from, by) if from == target && !storage.was_changed() => Some(by),
        _ => None,
    };
    with_rules(|rules| {
        let key = Key {
            kind,
            phase: rules.phase,
            source,
            target,
            implicit: asked == Asked::ByPolicy,
            site: by.at,
        };
        // A checkpoint copies unchanged tensors back to the host on purpose.
        let returned = returned.filter(|_| rules.phase != Phase::Checkpoint);
        let pageable = !pinned && (source == Device::Cpu || target == Device::Cpu);
        let sums = Sums {
            pageable_count: u64::from(pageable),
            made_only_to_move_count: u64::from(unused),
            made_at: unused.then_some(storage.made_at),
            returned_count: u64::from(returned.is_some()),
            came_by: returned,
            ..Sums::one(tensor.bytes(), rules.announced)
        };
        enter(rules, key, sums);
    });
}

thread_local! {
    /// What the graph that this thread captures books at each launch.
    static HELD: RefCell<CapturedRows> = RefCell::default();
}

/// Books one transfer, or leaves it to the graph that this thread captures.
pub(super) fn enter(rules: &Rules, key: Key, sums: Sums) {
    if is_capturing() {
        HELD.with_borrow_mut(|held| held.hold(key, sums));
    } else {
        rules.ledger.book(key, sums);
    }
}

/// Takes what this thread's capture held.
pub(crate) fn take_held() -> CapturedRows {
    HELD.take()
}

/// Books a graph's launch: what its capture held, in the launching thread's phase and ledger.
pub(crate) fn book_launch(held: &CapturedRows) {
    with_rules(|rules| rules.ledger.book_held(held, rules.phase));
}

/// Books that this rank gives `tensor` to a collective, by the call at `at`. The whole tensor
/// counts, so that the same call counts the same on every rank. Policies and scopes do not apply.
///
/// For implementations of collectives, once per call; in a capture each launch books it.
pub fn book_collective(tensor: &Tensor, at: Site) {
    let device = tensor.device();
    with_rules(|rules| {
        let key = Key {
            kind: TransferKind::Collective,
            phase: rules.phase,
            source: device,
            target: device,
            implicit: false,
            site: at,
        };
        enter(rules, key, Sums::one(tensor.bytes(), rules.announced));
    });
}
