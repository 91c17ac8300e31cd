//! What may cross between devices: the policy for operands, the scopes that forbid and announce, the phase that the
//! ledger books under. All of it belongs to a thread, nests, and is inherited by threads that `inherit` starts.

use std::cell::RefCell;
use std::fmt;
use std::panic::Location;
use std::sync::Arc;

use super::ledger::Ledger;
use crate::error::Site;

/// What happens when the operands of one operation live on different devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// It is an error that names every operand. The default.
    #[default]
    Forbid,
    /// Operands are moved, with one warning a source line, and counted.
    Warn,
    /// Operands are moved and counted.
    Allow,
}

/// The part of a run that a transfer is booked under.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Before and between training: the default.
    #[default]
    Setup,
    /// Inside the training step.
    Step,
    /// Reading figures back for people.
    Log,
    /// Trying the model on held-out data.
    Evaluation,
    /// Saving.
    Checkpoint,
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Phase::Setup => "setup",
            Phase::Step => "step",
            Phase::Log => "log",
            Phase::Evaluation => "evaluation",
            Phase::Checkpoint => "checkpoint",
        })
    }
}

/// The rules in force on one thread.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) policy: Policy,
    pub(crate) phase: Phase,
    /// Where the innermost scope that forbids transfers begins.
    pub(crate) forbidden_since: Option<Site>,
    /// The reason given by an announcement inside that scope.
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

/// Looks at the rules in force.
pub(crate) fn with_rules<R>(look: impl FnOnce(&Rules) -> R) -> R {
    RULES.with_borrow(look)
}

/// Puts the former rules back when a scope ends, by return or by panic.
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

/// The part of the run that this thread is in.
pub fn current_phase() -> Phase {
    with_rules(|rules| rules.phase)
}

/// Runs `body`, in which every transfer that is not announced is an error, explicit ones too.
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

/// Runs `body`, whose explicit transfers are meant, even inside `forbid_transfers` (not those that a policy would make).
/// The reason stands in the ledger.
pub fn announced<R>(reason: &'static str, body: impl FnOnce() -> R) -> R {
    scoped(|rules| rules.announced = Some(reason), body)
}

/// Runs `body` with its transfers booked in `ledger` instead of the process's.
pub fn with_ledger<R>(ledger: &Arc<Ledger>, body: impl FnOnce() -> R) -> R {
    scoped(|rules| rules.ledger = ledger.clone(), body)
}

/// Takes this thread's rules along: the closure returned runs `body` under them on whatever thread calls it.
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
