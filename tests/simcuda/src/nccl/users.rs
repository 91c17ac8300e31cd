//! Which threads are inside calls on a communicator: "it is not allowed to issue NCCL operations to
//! a single communicator in parallel with multiple threads" (NCCL User Guide, "Thread Safety").
//!
//! A call of a group is over when its group is. As locks cannot be seen, the first calls last until
//! the other threads sleep: one that was not told to wait comes to its own call meanwhile.

use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use crate::machine::{LockedMachine, threads};
use crate::report::{self, FindingKind, Stack};

/// Calls from the start of the process of which each waits for the other threads.
const FIRST: usize = 8;

struct User {
    /// The communicator's handle.
    comm: usize,
    thread: ThreadId,
    name: &'static str,
    stack: Stack,
}

static USERS: Mutex<Vec<User>> = Mutex::new(Vec::new());

fn users() -> MutexGuard<'static, Vec<User>> {
    USERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This thread makes a call on a communicator. A finding if another thread is inside one.
pub(super) fn enter(comm: usize, name: &'static str) {
    static CALLS: AtomicUsize = AtomicUsize::new(0);
    let own = User {
        comm,
        thread: thread::current().id(),
        name,
        stack: Stack::capture(),
    };
    let mut users = users();
    let other = users
        .iter()
        .find(|user| user.comm == comm && user.thread != own.thread)
        .map(|user| format!("{}, called by {}", user.name, user.stack));
    users.push(own);
    drop(users);
    if let Some(other) = other {
        let message = format!(
            "two threads are inside calls on one communicator: NCCL is not thread-safe\n  one: {other}\n  the other: {name}\n  help: a lock around the calls (of a group: around all of it), or a communicator for each thread"
        );
        report::finding(
            &mut LockedMachine::take(),
            FindingKind::NcclThreads,
            message,
        );
    }
    threads::let_others_run(&CALLS, FIRST);
}

/// The calls of this thread are over.
pub(super) fn leave() {
    let own = thread::current().id();
    users().retain(|user| user.thread != own);
}
