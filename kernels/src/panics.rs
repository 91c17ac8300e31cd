//! Panics of foreign code that its caller handles. A panic hook that ends the process asks
//! [`are_handled`] first.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static HANDLED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `body`; `None` if it panics. What `body` changed before must not be used then.
pub fn caught<T>(body: impl FnOnce() -> T) -> Option<T> {
    let before = HANDLED.replace(true);
    let result = catch_unwind(AssertUnwindSafe(body));
    HANDLED.set(before);
    result.ok()
}

/// Whether a panic of this thread is handled by [`caught`].
pub fn are_handled() -> bool {
    HANDLED.get()
}
