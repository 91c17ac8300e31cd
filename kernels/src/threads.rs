//! The thread pool of operations on the CPU: one thread per core of the affinity mask, including
//! the caller.
//!
//! Piece `i` of an operation goes to the same thread each time if possible, because that thread's
//! cache holds its part of the last result. A thread that is done helps slower ones. If another
//! caller uses the pool, the caller does its work alone; no result depends on how work is cut. A
//! worker spins for some microseconds before it sleeps, because the next operation of a training
//! step follows soon.

mod pool;

use std::ops::Range;
use std::sync::{Arc, RwLock};

use self::pool::ThreadPool;
pub(crate) use self::pool::{Shares, cut};
pub use self::pool::{cores, pin_current};
use crate::error::{Error, Result};
use crate::panics::{read, write};
use crate::streaming::{self, CopyOf, STREAMING_BYTES_MIN};

/// The most threads a pool may have.
pub const COUNT_MAX: usize = 1024;
/// Simple loops over fewer elements run on the caller alone.
pub(crate) const PARALLEL_MIN: usize = 1 << 15;

static POOL: RwLock<Option<Arc<ThreadPool>>> = RwLock::new(None);

/// How many threads operations on the CPU use; by default one per core of the affinity mask.
pub fn count() -> usize {
    pool().count()
}

/// Uses `count` threads from now on. Workers may move between `cores()`.
#[track_caller]
pub fn set_count(count: usize) -> Result<()> {
    replace(count, None)
}

/// Uses `count` threads from now on, each pinned to one of `cores()`, the caller to number `first`,
/// modulo their number: for measurements, and for ranks that share cores.
#[track_caller]
pub fn set_count_pinned_from(first: usize, count: usize) -> Result<()> {
    replace(count, Some(first))
}

#[track_caller]
fn replace(count: usize, pinned_from: Option<usize>) -> Result<()> {
    if count == 0 || count > COUNT_MAX {
        let expected = format!("1 to {COUNT_MAX}");
        return Err(Error::value("threads", "count", expected, count));
    }
    let pool = Arc::new(ThreadPool::new(count, pinned_from));
    // Outside the lock, because ending a pool waits for its workers.
    let former = write(&POOL).replace(pool);
    drop(former);
    Ok(())
}

/// The pool in use. No lock is held while it works: operations may nest, and a pool that is
/// replaced lives until its last user is done.
fn pool() -> Arc<ThreadPool> {
    if let Some(pool) = read(&POOL).as_ref() {
        return pool.clone();
    }
    let mut slot = write(&POOL);
    slot.get_or_insert_with(|| Arc::new(ThreadPool::new(cores().len().clamp(1, COUNT_MAX), None)))
        .clone()
}

/// Runs `body(0)` … `body(pieces - 1)` on the pool and returns when all are done.
pub fn run(pieces: usize, body: impl Fn(usize) + Sync) {
    if pieces <= 1 {
        (0..pieces).for_each(body);
    } else {
        pool().run(pieces, &body);
    }
}

/// Pieces per thread in a long loop, so that others can help a slow thread.
const PIECES_PER_THREAD: usize = 4;

/// Into how many pieces to cut a loop over `len` elements, at multiples of `grain`.
fn pieces(len: usize, grain: usize) -> usize {
    if len < PARALLEL_MIN {
        return 1;
    }
    let threads = count();
    if threads == 1 {
        return 1;
    }
    (threads * PIECES_PER_THREAD)
        .min(len / (PARALLEL_MIN / 4))
        .clamp(1, len.div_ceil(grain))
}

/// A piece for each thread, or one where there are few elements.
pub(crate) fn pieces_of(work: usize) -> usize {
    if work < PARALLEL_MIN { 1 } else { count() }
}

/// Runs `body` on cuts of `0..len` at multiples of `grain`, in parallel if that is faster.
pub(crate) fn split(len: usize, grain: usize, body: impl Fn(Range<usize>) + Sync) {
    let pieces = pieces(len, grain);
    run(pieces, |index| body(cut(len, grain, pieces, index)));
}

/// Runs `body(first, part)` on cuts of `out` at multiples of `grain`; `first` is the part's start.
pub(crate) fn split_mut<T: Send>(
    out: &mut [T],
    grain: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) {
    let parts = Shares::new(out);
    split(parts.len(), grain, |range| {
        // SAFETY: `split` hands out ranges that do not overlap, each once.
        body(range.start, unsafe { parts.part(range) })
    });
}

/// As `split_mut`, for an `out` that is computed from `work` elements: a piece for each thread.
pub(crate) fn split_sums<T: Send>(
    out: &mut [T],
    grain: usize,
    work: usize,
    body: impl Fn(usize, &mut [T]) + Sync,
) {
    let parts = Shares::new(out);
    let pieces = pieces_of(work).min(parts.len().div_ceil(grain));
    run(pieces, |index| {
        let range = cut(parts.len(), grain, pieces, index);
        // SAFETY: the cuts of `0..len` do not overlap, and each index runs once.
        body(range.start, unsafe { parts.part(range) })
    });
}

/// Copies `source` to `target`: in parallel if that is faster, past the caches if it is large.
pub(crate) fn copy(target: &mut [u8], source: &[u8]) {
    const GRAIN_BYTES: usize = 4096;
    assert_eq!(target.len(), source.len());
    let large = target.len() >= STREAMING_BYTES_MIN;
    split_mut(target, GRAIN_BYTES, |first, part| {
        if large {
            streaming::write(part, first, CopyOf(source));
            streaming::fence();
        } else {
            part.copy_from_slice(&source[first..first + part.len()]);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn cuts_cover_everything_once_and_lie_on_grains(len in 0usize..5000, grain in 1usize..70, pieces in 1usize..20) {
            let mut next = 0;
            for index in 0..pieces {
                let range = cut(len, grain, pieces, index);
                prop_assert_eq!(range.start, next);
                prop_assert!(range.end == len || range.end.is_multiple_of(grain));
                next = range.end;
            }
            prop_assert_eq!(next, len);
        }
    }

    #[test]
    fn every_piece_runs_once_also_from_many_callers_and_nested() {
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let mut out = vec![0u32; PARALLEL_MIN + 17];
                        split_mut(&mut out, 64, |first, part| {
                            run(3, |_| {});
                            for (offset, value) in part.iter_mut().enumerate() {
                                *value += (first + offset) as u32;
                            }
                        });
                        assert!(
                            out.iter()
                                .enumerate()
                                .all(|(index, &value)| value == index as u32)
                        );
                    }
                });
            }
        });
    }

    #[test]
    fn work_within_work_goes_on_while_the_pool_is_replaced() {
        let _alone = crate::ops::testing::alone_with_the_pool();
        let before = count();
        let done = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(std::sync::atomic::Ordering::Relaxed) {
                    set_count(2).unwrap();
                }
            });
            for _ in 0..200 {
                run(4, |_| run(2, |_| std::thread::yield_now()));
            }
            done.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        set_count(before).unwrap();
    }

    #[test]
    fn a_panic_in_a_piece_reaches_the_caller_and_the_pool_lives_on() {
        let outcome =
            std::panic::catch_unwind(|| run(16, |piece| assert_ne!(piece, 15, "piece fifteen")));
        assert!(outcome.is_err());
        let sum = std::sync::atomic::AtomicUsize::new(0);
        run(16, |piece| {
            _ = sum.fetch_add(piece, std::sync::atomic::Ordering::Relaxed)
        });
        assert_eq!(sum.into_inner(), 120);
    }

    #[test]
    fn a_count_of_zero_is_refused() {
        assert!(
            set_count(0)
                .unwrap_err()
                .to_string()
                .contains("expected 1 to 1024, got 0")
        );
    }
}
