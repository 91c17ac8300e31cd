//! Shows what is computed, one tensor after the other, to whoever wants to compare it: the replay
//! of two runs.

use std::cell::RefCell;

use ddp_kernels::{Result, Tensor};

/// Gets what a tensor is, and the tensor.
pub type Observer = Box<dyn FnMut(String, &Tensor) -> Result<()>>;

thread_local! {
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// Runs `body`. What it computes on this thread is shown to `observer`.
pub fn observed<R>(observer: Observer, body: impl FnOnce() -> R) -> R {
    OBSERVER.set(Some(observer));
    let result = body();
    OBSERVER.set(None);
    result
}

/// Shows `tensor`, which is called `name()`, to this thread's observer, if there is one.
pub fn observe(name: impl FnOnce() -> String, tensor: &Tensor) -> Result<()> {
    OBSERVER.with_borrow_mut(|observer| match observer {
        Some(observer) => observer(name(), tensor),
        None => Ok(()),
    })
}
