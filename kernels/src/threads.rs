//! The pool that operations on the CPU share: as many threads as the affinity mask has cores, the caller among them.
//!
//! Piece `i` of an operation is first of all the same thread's each time, which finds its part of the last result in its
//! own cache; a thread that is done helps one that is behind. A caller that finds the pool taken does its work alone; results are
//! the same, since no result depends on the cut. A worker spins for some microseconds before it sleeps, because
//! the next operation of a training step is never far.

mod pool;
mod shares;

use std::ops::Range;
use std::sync::{Arc, PoisonError, RwLock};

use self::pool::Pool;
pub(crate) use self::shares::Shares;
use crate::error::{Error, Result};
use crate::streaming::{self, CopyOf, STREAMING_BYTES_MIN};
use crate::transfer;

/// The most threads a pool may have.
pub const COUNT_MAX: usize = 1024;
/// Below this many elements a simple loop is not worth waking anybody for.
pub(crate) const PARALLEL_MIN: usize = 1 << 15;

static POOL: RwLock<Option<Arc<Pool>>> = RwLock::new(None);

/// How many threads operations on the CPU use. By default the cores in the affinity mask.
pub fn count() -> usize {
    pool().count()
}

/// Uses `count` threads from now on: the caller as it is, and workers free to move between `cores()`.
#[track_caller]
pub fn set_count(count: usize) -> Result<()> {
    replace(count, None)
}

/// Uses `count` threads from now on, each kept on one of `cores()`, the calling thread on the first: for measuring.
#[track_caller]
pub fn set_count_pinned(count: usize) -> Result<()> {
    set_count_pinned_from(0, count)
}

/// As `set_count_pinned`, the calling thread on the `first` of `cores()`, counted round: for ranks that share cores.
#[track_caller]
pub fn set_count_pinned_from(first: usize, count: usize) -> Result<()> {
    replace(count, Some(first))
}

#[track_caller]
fn replace(count: usize, pinned_from: Option<usize>) -> Result<()> {
    if count == 0 || count > COUNT_MAX {
        return Err(Error::value("threads", "count", format!("1 to {COUNT_MAX}"), count));
    }
    let pool = Arc::new(Pool::new(count, pinned_from));
    // The former pool ends outside the lock: that waits for its workers.
    let former = POOL.write().unwrap_or_else(PoisonError::into_inner).replace(pool);
    drop(former);
    Ok(())
}

/// The cores in this process's affinity mask, as it was when they were first asked for (before anything was pinned).
pub fn cores() -> &'static [usize] {
    static CORES: std::sync::OnceLock<Vec<usize>> = std::sync::OnceLock::new();
    CORES.get_or_init(pool::affinity_cores)
}

/// Keeps the calling thread (and threads it starts, but not the pool's) on the `index`-th of `cores()`, counted round. A refusal by the system changes only speed.
pub fn pin_current(index: usize) {
    if let Some(&core) = cores().get(index % cores().len().max(1)) {
        pool::keep_on(&[core]);
    }
}

/// The pool in use. Nothing is locked while it works: a caller may call again from within, and another thread may put a
/// new pool in its place, which leaves this one to those who still use it.
fn pool() -> Arc<Pool> {
    if let Some(pool) = POOL.read().unwrap_or_else(PoisonError::into_inner).as_ref() {
        return pool.clone();
    }
    let mut slot = POOL.write().unwrap_or_else(PoisonError::into_inner);
    slot.get_or_insert_with(|| Arc::new(Pool::new(cores().len().clamp(1, COUNT_MAX), None))).clone()
}

/// Starts a thread that inherits this thread's transfer rules: policy, phase, scopes and ledger.
pub fn spawn<R: Send + 'static>(
    name: &str,
    body: impl FnOnce() -> R + Send + 'static,
) -> std::io::Result<std::thread::JoinHandle<R>> {
    if name.contains('\0') {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "a thread's name cannot hold a zero byte"));
    }
    std::thread::Builder::new().name(name.to_string()).spawn(transfer::inherit(body))
}

/// Runs `body(0)` … `body(pieces - 1)`, spread over the pool, and returns when all are done.
pub(crate) fn run(pieces: usize, body: impl Fn(usize) + Sync) {
    if pieces <= 1 {
        (0..pieces).for_each(body);
    } else {
        pool().run(pieces, &body);
    }
}

/// The `index`-th of `pieces` nearly equal cuts of `0..len`, on multiples of `grain`.
pub(crate) fn cut(len: usize, grain: usize, pieces: usize, index: usize) -> Range<usize> {
    let grains = len.div_ceil(grain);
    let edge = |i: usize| (grains * i / pieces * grain).min(len);
    edge(index)..edge(index + 1)
}

/// Pieces for each thread in a long loop, so that one that is held up can be helped.
const PIECES_PER_THREAD: usize = 4;

/// How many pieces a loop over `len` elements is worth, if one may be cut at multiples of `grain` alone.
fn pieces(len: usize, grain: usize) -> usize {
    if len < PARALLEL_MIN {
        return 1;
    }
    let threads = count();
    if threads == 1 {
        return 1;
    }
    (threads * PIECES_PER_THREAD).min(len / (PARALLEL_MIN / 4)).clamp(1, len.div_ceil(grain))
}

/// Runs `body` on cuts of `0..len` at multiples of `grain`, in parallel where that pays.
pub(crate) fn split(len: usize, grain: usize, body: impl Fn(Range<usize>) + Sync) {
    let pieces = pieces(len, grain);
    run(pieces, |index| body(cut(len, grain, pieces, index)));
}

/// Runs `body(first, part)` on cuts of `out` at multiples of `grain`; `first` is where the part starts.
pub(crate) fn split_mut<T: Send>(out: &mut [T], grain: usize, body: impl Fn(usize, &mut [T]) + Sync) {
    let parts = Shares::new(out);
    split(parts.len(), grain, |range| {
        // SAFETY: `split` hands out ranges that do not overlap, each once.
        body(range.start, unsafe { parts.part(range) })
    });
}

/// As `split_mut`, into a number of pieces that the caller chose.
pub(crate) fn split_mut_in<T: Send>(out: &mut [T], grain: usize, pieces: usize, body: impl Fn(usize, &mut [T]) + Sync) {
    let parts = Shares::new(out);
    run(pieces, |index| {
        let range = cut(parts.len(), grain, pieces, index);
        // SAFETY: the cuts of `0..len` do not overlap, and each index runs once.
        body(range.start, unsafe { parts.part(range) })
    });
}

/// Copies `source` to `target`, in parallel where that pays, past the caches where it is large.
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
                        assert!(out.iter().enumerate().all(|(index, &value)| value == index as u32));
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
        let outcome = std::panic::catch_unwind(|| run(16, |piece| assert_ne!(piece, 15, "piece fifteen")));
        assert!(outcome.is_err());
        let sum = std::sync::atomic::AtomicUsize::new(0);
        run(16, |piece| _ = sum.fetch_add(piece, std::sync::atomic::Ordering::Relaxed));
        assert_eq!(sum.into_inner(), 120);
    }

    #[test]
    fn a_count_of_zero_is_refused() {
        assert!(set_count(0).unwrap_err().to_string().contains("expected 1 to 1024, got 0"));
    }
}
