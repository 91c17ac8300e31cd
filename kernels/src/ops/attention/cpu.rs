//! Attention on the CPU: how it is divided into pieces, and with which SIMD level they run.

#[cfg(target_arch = "x86_64")]
use crate::ops::matmul::{Avx2F32, Avx2F64, Avx512F32};
#[cfg(target_arch = "x86_64")]
use crate::simd::{self, Level};

use std::cell::RefCell;
use std::ops::Range;

use super::backward::{self, Backward, Sweep};
use super::bf16;
use super::blocks::BLOCK;
use super::forward::{self, Forward};
use crate::dtype;
use crate::ops::matmul::{
    Plain,
    bf16::{bf16_order, with_bf16_order},
};
use crate::ops::stored::Stored;
use crate::threads;

/// Pieces per thread where a piece is less than a whole head.
const PIECES_PER_THREAD: usize = 4;

/// What a tensor of attention on the CPU holds.
pub(super) trait Attends: Stored {
    /// `forward::piece` with the fastest kernel of this processor and this thread's buffers.
    ///
    /// # Safety
    /// No other thread has these blocks.
    unsafe fn forward(work: &Forward<'_, Self>, unit: usize, blocks: Range<usize>);

    /// `backward::piece`, likewise.
    ///
    /// # Safety
    /// No other thread writes what this sweep writes.
    unsafe fn backward(work: &Backward<'_, Self>, unit: usize, sweep: &Sweep);
}

/// Into how many pieces to cut the blocks of each of these units.
fn pieces_of(units: usize, blocks: usize) -> usize {
    let threads = threads::count();
    if threads == 1 || units >= 2 * threads {
        return 1;
    }
    blocks.min((PIECES_PER_THREAD * threads).div_ceil(units))
}

/// Writes `out` and `log_sum_exp`.
pub(super) fn run_forward<S: Attends>(work: &Forward<'_, S>) {
    let units = work.sizes.batch * work.sizes.kv_heads;
    let blocks = work.sizes.time.div_ceil(BLOCK);
    let pieces = pieces_of(units.max(1), blocks);
    let order = bf16_order();
    threads::run(units * pieces, |index| {
        let blocks = threads::cut(blocks, 1, pieces, index % pieces);
        // SAFETY: each index has its own unit or blocks.
        with_bf16_order(order, || unsafe {
            S::forward(work, index / pieces, blocks)
        });
    });
}

/// Writes dq, dk and dv. Where heads are few, dq and the other two come from separate sweeps, which
/// compute scores twice but can be divided among threads. The sums are the same, in the same order.
pub(super) fn run_backward<S: Attends>(work: &Backward<'_, S>) {
    let (sizes, blocks) = (work.sizes, work.sizes.time.div_ceil(BLOCK));
    let units = sizes.batch * sizes.kv_heads;
    let pieces = pieces_of(units.max(1), blocks);
    let all = 0..blocks;
    let [first_wants, last_wants] = match pieces {
        1 => [(true, true), (false, false)],
        _ => [(true, false), (false, true)],
    };
    let order = bf16_order();
    threads::run(units * pieces, |index| {
        let part = threads::cut(blocks, 1, pieces, index % pieces);
        for (dq, dkv) in [first_wants, last_wants] {
            let keys_end = if sizes.causal { part.end } else { blocks };
            let queries_start = if sizes.causal { part.start } else { 0 };
            let (queries, keys) = match (dq, dkv) {
                (false, false) => continue,
                (true, true) => (all.clone(), all.clone()),
                (true, false) => (part.clone(), 0..keys_end),
                (false, true) => (queries_start..blocks, part.clone()),
            };
            let sweep = Sweep {
                queries,
                keys,
                dq,
                dkv,
            };
            // SAFETY: each index has its own unit, or its own part of the queries of dq and of the
            // keys of dk and dv.
            with_bf16_order(order, || unsafe {
                S::backward(work, index / pieces, &sweep)
            });
        }
    });
}

/// One function of `Attends`: with the first kernel whose level this processor has.
macro_rules! dispatched {
    ($module:ident, $rooms:ident, $work:ident, $unit:ident, $part:ident, $([$level:ident, $TileKernel:ty]),*) => {
        $rooms.with_borrow_mut(|rooms| {
            // SAFETY: the caller's promise; the processor has the level of the kernel.
            unsafe {
                $(
                    #[cfg(target_arch = "x86_64")]
                    if simd::level() >= Level::$level {
                        return $module::piece::<_, $TileKernel>($work, $unit, $part, rooms);
                    }
                )*
                $module::piece::<_, Plain>($work, $unit, $part, rooms);
            }
        })
    };
}

macro_rules! attends {
    ($T:ty: $Math:ty, $forward_rooms:ident, $backward_rooms:ident, $($kernel:tt),*) => {
        thread_local! {
            static $forward_rooms: RefCell<forward::ForwardBuffers<$Math>> = RefCell::default();
            static $backward_rooms: RefCell<backward::BackwardBuffers<$Math>> = RefCell::default();
        }

        impl Attends for $T {
            unsafe fn forward(work: &Forward<'_, $T>, unit: usize, blocks: Range<usize>) {
                dispatched!(forward, $forward_rooms, work, unit, blocks, $($kernel),*)
            }

            unsafe fn backward(work: &Backward<'_, $T>, unit: usize, sweep: &Sweep) {
                dispatched!(backward, $backward_rooms, work, unit, sweep, $($kernel),*)
            }
        }
    };
}
attends!(
    f32: f32,
    FORWARD_F32,
    BACKWARD_F32,
    [Avx512, Avx512F32],
    [Avx2, Avx2F32]
);
attends!(f64: f64, FORWARD_F64, BACKWARD_F64, [Avx2, Avx2F64]);

thread_local! {
    static ROOMS_BF16: RefCell<bf16::Bf16Buffers> = RefCell::default();
}

impl Attends for dtype::bf16 {
    unsafe fn forward(work: &Forward<'_, Self>, unit: usize, blocks: Range<usize>) {
        // SAFETY: the caller's promise.
        ROOMS_BF16.with_borrow_mut(|rooms| unsafe { bf16::forward(work, unit, blocks, rooms) });
    }

    unsafe fn backward(work: &Backward<'_, Self>, unit: usize, sweep: &Sweep) {
        // SAFETY: the caller's promise.
        ROOMS_BF16.with_borrow_mut(|rooms| unsafe { bf16::backward(work, unit, sweep, rooms) });
    }
}
