//! What may cross between devices: the policy for operands, scopes that forbid and announce
//! transfers, and the phase that the ledger books under. These rules belong to a thread and nest;
//! threads started through `inherit` inherit them. A transfer is checked against them and entered
//! in the ledger.

use std::cell::RefCell;
use std::panic::Location;
use std::sync::Arc;

use super::ledger::{CapturedRows, Crossed, Ledger, LedgerKey, Phase, TransferKind};
use crate::cuda::queue::is_capturing;
use crate::error::{Caller, Error, Line, Result, Site, TensorInfo};
use crate::storage::ContentsOrigin;
use crate::{Device, Tensor};

/// What happens when the operands of one operation live on different devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// It is an error that names every operand. The default.
    #[default]
    Forbid,
    /// Operands are moved and counted, with one warning per source line.
    Warn,
    /// Operands are moved and counted.
    Allow,
}

/// The rules in force on one thread.
#[derive(Clone, Debug)]
pub(crate) struct TransferRules {
    pub(crate) policy: Policy,
    pub(crate) phase: Phase,
    /// The beginning of the innermost scope that forbids transfers.
    pub(crate) forbidden_since: Option<Site>,
    /// The reason of an announcement inside that scope.
    pub(crate) announced: Option<&'static str>,
    pub(crate) ledger: Arc<Ledger>,
}

thread_local! {
    static RULES: RefCell<TransferRules> = RefCell::new(TransferRules {
        policy: Policy::default(),
        phase: Phase::default(),
        forbidden_since: None,
        announced: None,
        ledger: Ledger::of_process(),
    });
}

/// Runs `look` with the rules in force.
pub(crate) fn with_rules<R>(look: impl FnOnce(&TransferRules) -> R) -> R {
    RULES.with_borrow(look)
}

/// Restores the former rules when a scope ends, by return or by panic.
struct RestoreRules(Option<TransferRules>);

impl Drop for RestoreRules {
    fn drop(&mut self) {
        if let Some(former) = self.0.take() {
            RULES.set(former);
        }
    }
}

fn scoped<R>(change: impl FnOnce(&mut TransferRules), body: impl FnOnce() -> R) -> R {
    let former = RULES.with_borrow_mut(|rules| {
        let former = rules.clone();
        change(rules);
        former
    });
    let _restore = RestoreRules(Some(former));
    body()
}

/// Runs `body` under `policy`.
pub fn with_policy<R>(policy: Policy, body: impl FnOnce() -> R) -> R {
    scoped(|rules| rules.policy = policy, body)
}

/// The policy in force on this thread.
pub fn policy() -> Policy {
    with_rules(|rules| rules.policy)
}

/// Runs `body` with its transfers booked under `phase`.
pub fn in_phase<R>(phase: Phase, body: impl FnOnce() -> R) -> R {
    scoped(|rules| rules.phase = phase, body)
}

/// The phase that this thread's transfers are booked under.
pub fn current_phase() -> Phase {
    with_rules(|rules| rules.phase)
}

/// Runs `body`, in which every unannounced transfer is an error, even an explicit one.
#[track_caller]
pub fn forbid_transfers<R>(body: impl FnOnce() -> R) -> R {
    let here = Location::caller();
    scoped(
        |rules| {
            rules.forbidden_since = Some(here);
            rules.announced = None;
        },
        body,
    )
}

/// Runs `body`, whose explicit transfers are allowed even inside `forbid_transfers`; those that a
/// policy would make are not. The ledger shows the reason.
pub fn announced<R>(reason: &'static str, body: impl FnOnce() -> R) -> R {
    scoped(|rules| rules.announced = Some(reason), body)
}

/// Runs `body` with its transfers booked in `ledger`.
pub fn with_ledger<R>(ledger: &Arc<Ledger>, body: impl FnOnce() -> R) -> R {
    scoped(|rules| rules.ledger = ledger.clone(), body)
}

/// Takes this thread's rules along: the returned closure runs `body` under them on any thread.
///
/// ```
/// use ddp_kernels::transfer::{self, Policy};
/// let body = transfer::with_policy(Policy::Allow, || transfer::inherit(transfer::policy));
/// assert_eq!(std::thread::spawn(body).join().unwrap(), Policy::Allow);
/// ```
pub fn inherit<R>(body: impl FnOnce() -> R) -> impl FnOnce() -> R {
    let rules = with_rules(TransferRules::clone);
    move || scoped(|current| *current = rules, body)
}

/// Starts a thread that inherits this thread's transfer rules: policy, phase, scopes and ledger.
pub fn spawn<R: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> R + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<R>> {
    std::thread::Builder::new()
        .name(name.to_string())
        .spawn(inherit(body))
}

impl Ledger {
    /// The ledger that this thread's transfers go into.
    pub fn current() -> Arc<Ledger> {
        with_rules(|rules| rules.ledger.clone())
    }
}

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
    let (source, origin) = (tensor.device(), storage.origin);
    let unused = source == Device::Cpu && origin == ContentsOrigin::Computed && !storage.was_used();
    let returned = match origin {
        // Changed contents are new on the other device: trained weights being saved, for example.
        ContentsOrigin::Arrived(from, by) if from == target && !storage.was_changed() => Some(by),
        _ => None,
    };
    with_rules(|rules| {
        let key = LedgerKey {
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
        let sums = Crossed {
            pageable_count: u64::from(pageable),
            made_only_to_move_count: u64::from(unused),
            made_at: unused.then_some(storage.made_at),
            returned_count: u64::from(returned.is_some()),
            came_by: returned,
            ..Crossed::one(tensor.bytes(), rules.announced)
        };
        enter(rules, key, sums);
    });
}

thread_local! {
    /// What the graph that this thread captures books at each launch.
    static HELD: RefCell<CapturedRows> = RefCell::default();
}

/// Books one transfer, or leaves it to the graph that this thread captures.
pub(super) fn enter(rules: &TransferRules, key: LedgerKey, sums: Crossed) {
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
        let key = LedgerKey {
            kind: TransferKind::Collective,
            phase: rules.phase,
            source: device,
            target: device,
            implicit: false,
            site: at,
        };
        enter(rules, key, Crossed::one(tensor.bytes(), rules.announced));
    });
}
