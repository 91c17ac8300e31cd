//! Work that the threads of a rank share.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread::Builder;

use ddp_kernels::threads;

use crate::error::Result;

/// What `work` returns for each of these segments, in their order.
pub(crate) fn in_segments<T: Send>(
    segments: Range<u64>,
    work: impl Fn(u64) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    let count = (segments.end - segments.start) as usize;
    let results: Mutex<Vec<Option<Result<T>>>> = Mutex::new((0..count).map(|_| None).collect());
    let next = AtomicUsize::new(0);
    let run = || {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return;
            }
            let result = work(segments.start + index as u64);
            results.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(result);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads::count().min(count) {
            // If the system grants fewer threads, those do the work.
            if Builder::new().spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
    let results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
    results
        .into_iter()
        .map(|result| result.expect("every segment was taken"))
        .collect()
}
