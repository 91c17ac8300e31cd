//! What may cross between devices: the policy for operands, scopes that forbid and announce
//! transfers, and the phase that the ledger books under. These rules belong to a thread and nest;
//! threads started through `inherit` take them over.

use std::cell::RefCell;
use std::panic::Location;
use std::sync::Arc;

use super::ledger::{Ledger, Phase};
use crate::error::Site;

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
pub(crate) struct Rules {
    pub(crate) policy: Policy,
    pub(crate) phase: Phase,
    /// The beginning of the innermost scope that forbids transfers.
    pub(crate) forbidden_since: Option<Site>,
    /// The reason of an announcement inside that scope.
    pub(crate) announced: Option<&'static str>,
    pub(crate) ledger: Arc<Ledger>,
}

thread_local! {
    static RULES: RefCell<Rules> = RefCell::new(Rules {
        policy: Policy::default(),
        phase: Phase::default(),
        forbidden_since: None,
        announced: None,
        ledger: Ledger::of_process(),
    });
}

/// Runs `look` with the rules in force.
pub(crate) fn with_rules<R>(look: impl FnOnce(&Rules) -> R) -> R {
    RULES.with_borrow(look)
}

/// Restores the former rules when a scope ends, by return or by panic.
struct Restore(Option<Rules>);

impl Drop for Restore {
    fn drop(&mut self) {
        if let Some(former) = self.0.take() {
            RULES.set(former);
        }
    }
}

fn scoped<R>(change: impl FnOnce(&mut Rules), body: impl FnOnce() -> R) -> R {
    let former = RULES.with_borrow_mut(|rules| {
        let former = rules.clone();
        change(rules);
        former
    });
    let _restore = Restore(Some(former));
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
    let rules = with_rules(Rules::clone);
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
