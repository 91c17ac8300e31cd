//! Handling of panics: locks that stay usable after one, because their state is consistent wherever
//! a panic could release them; and panics of foreign code that the caller handles. A panic hook
//! that ends the process asks [`are_handled`] first.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

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

/// Locks `mutex`, ignoring poison: every user of this function keeps its state consistent.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The contents of a mutex that nothing else can lock.
pub(crate) fn get_mut<T>(mutex: &mut Mutex<T>) -> &mut T {
    mutex.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `lock` for reading, likewise.
pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks `lock` for writing, likewise.
pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}
