//! The matmul under addmm and linear on the CPU.
//!
//! Each thread has a piece of the output. Both operands are copied block by block into panels
//! (`pack.rs`), from which a kernel (`tile.rs`) computes one small tile of the output in registers.
//! A block of the right operand stays in the L2 cache while all rows of the left one pass by.
//!
//! Bits: each output element is added along k in order, in blocks whose lengths follow from k
//! alone. So it depends neither on the number of threads, nor on the other rows and columns, nor
//! on the processor.

pub(crate) mod bf16;
mod pack;
#[cfg(target_arch = "x86_64")]
mod row;
mod tile;

use std::cell::RefCell;
use std::ops::Range;

use pack::{Panels, Transpose};
use tile::{ALONG_MAX, PARALLEL_MATMUL_MIN, PARALLEL_ROW_MIN, PIECE_GRAIN};
pub(crate) use tile::{AsIs, COLUMNS_MAX, Finish, Matrix, Output, Plain, Tile, TileKernel};
#[cfg(target_arch = "x86_64")]
pub(crate) use tile::{Avx2F32, Avx2F64, Avx512F32};
use tile::{TILE_MAX, TiledMatmul, store};

use crate::launch::{F32Math, f32_math};
#[cfg(target_arch = "x86_64")]
use crate::simd::{self, Level};
use crate::threads;

/// `out = matmul_scale * a·b + existing_scale * out`, then `finish`. With an `existing_scale` of
/// 0, `out` is not read.
pub(crate) fn matmul<T: Real>(
    out: &mut [T],
    a: Matrix<'_, T>,
    b: Matrix<'_, T>,
    matmul_scale: T,
    existing_scale: T,
    finish: &impl Finish<T>,
) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    assert!(b.rows == k && out.len() == m * n);
    let work = TiledMatmul {
        out: out.as_mut_ptr(),
        stride: n,
        a,
        b,
        matmul_scale,
        existing_scale,
    };
    let parallel_min = match m {
        1 => PARALLEL_ROW_MIN,
        _ => PARALLEL_MATMUL_MIN,
    };
    let threads = if m.saturating_mul(n).saturating_mul(k) < parallel_min {
        1
    } else {
        threads::count()
    };
    if m > 0 && n > 0 && !T::by_bf16(&work, threads, finish) {
        in_pieces(&work, threads, finish);
    }
}

/// One piece per thread. The longer side is cut, since each piece packs its own part of that side
/// and all of the other.
fn in_pieces<T: Real>(work: &TiledMatmul<'_, T>, threads: usize, finish: &impl Finish<T>) {
    let (m, n) = (work.a.rows, work.b.columns);
    let side = m.max(n);
    let pieces = threads.min(side.div_ceil(PIECE_GRAIN));
    threads::run(pieces, |index| {
        let part = threads::cut(side, PIECE_GRAIN, pieces, index);
        let (rows, columns) = if m > n { (part, 0..n) } else { (0..m, part) };
        // SAFETY: the pieces' rows, or columns, do not overlap and lie within the output.
        unsafe { T::piece(work, rows, columns, finish) };
    });
}

/// Rows of the left operand that are packed at a time: whole tiles of every kernel.
const ROWS_MAX: usize = 96;

/// f32 and f64: the types of matmuls.
pub(crate) trait Real: Transpose {
    /// Computes the whole matmul by way of bf16, if `f32_math` says so.
    fn by_bf16(_: &TiledMatmul<'_, Self>, _threads: usize, _: &impl Finish<Self>) -> bool {
        false
    }

    /// `piece` with the fastest kernel of this processor and this thread's buffers.
    ///
    /// # Safety
    /// The rows and columns lie within the output, and no other thread reads or writes them.
    unsafe fn piece(
        work: &TiledMatmul<'_, Self>,
        rows: Range<usize>,
        columns: Range<usize>,
        finish: &impl Finish<Self>,
    );
}

/// Computes some rows and columns of the output on this thread.
///
/// # Safety
/// The rows and columns lie within the output, and no other thread reads or writes them. The
/// processor has the instructions of `K`.
unsafe fn piece<T: Real, K: TileKernel<T>>(
    work: &TiledMatmul<'_, T>,
    rows: Range<usize>,
    columns: Range<usize>,
    finish: &impl Finish<T>,
    (left, right): &mut (Panels<T>, Panels<T>),
) {
    let k = work.a.columns;
    let lines_of_b = work.b.t();
    let blocks = columns.len().div_ceil(COLUMNS_MAX);
    let along_blocks = k.div_ceil(ALONG_MAX).max(1);
    for (block, along_block) in (0..blocks).flat_map(|b| (0..along_blocks).map(move |a| (b, a))) {
        let within = threads::cut(columns.len(), PIECE_GRAIN, blocks, block);
        let columns = columns.start + within.start..columns.start + within.end;
        let along = threads::cut(k, 1, along_blocks, along_block);
        let first = along_block == 0;
        let existing_scale = if first { work.existing_scale } else { T::ONE };
        right.pack(lines_of_b, &columns, &along, K::COLUMNS, K::COLUMNS);
        for start in rows.clone().step_by(ROWS_MAX) {
            let rows = start..rows.end.min(start + ROWS_MAX);
            left.pack(work.a, &rows, &along, K::ROWS, K::ROWS_PACKED);
            // SAFETY: by the caller's promise; both operands' lines are packed.
            unsafe {
                tiles::<T, K>(
                    work,
                    &rows,
                    &columns,
                    along.len(),
                    existing_scale,
                    left,
                    right,
                );
            }
            if along_block + 1 == along_blocks {
                // SAFETY: as above; the sums of this part are complete.
                finish.finish(unsafe { work.tile(rows, columns.clone()) });
            }
        }
    }
}

/// Adds one block along k to some rows and columns of the output, tile by tile.
///
/// # Safety
/// As for `piece`; `left` and `right` hold `along` steps of these rows and columns.
unsafe fn tiles<T: Real, K: TileKernel<T>>(
    work: &TiledMatmul<'_, T>,
    rows: &Range<usize>,
    columns: &Range<usize>,
    along: usize,
    existing_scale: T,
    left: &Panels<T>,
    right: &Panels<T>,
) {
    let scales = (work.matmul_scale, existing_scale);
    for (row_panel, row) in rows.clone().step_by(K::ROWS).enumerate() {
        let a = (left.panel(row_panel, along, K::ROWS_PACKED), 0, 0);
        let height = K::ROWS.min(rows.end - row);
        for (column_panel, column) in columns.clone().step_by(K::COLUMNS).enumerate() {
            let b = right.panel(column_panel, along, K::COLUMNS);
            let width = K::COLUMNS.min(columns.end - column);
            // SAFETY: the panels hold `along` steps each. A whole tile lies within the output; of
            // one at the edge, the part that does is copied.
            unsafe {
                let out = work.out.add(row * work.stride + column);
                if height == K::ROWS && width == K::COLUMNS {
                    K::run::<true>(along, a, b, out, work.stride, scales);
                } else {
                    let mut tile = [T::ZERO; TILE_MAX];
                    let sum = (scales.0, T::ZERO);
                    K::run::<true>(along, a, b, tile.as_mut_ptr(), K::COLUMNS, sum);
                    for (row, sums) in tile.chunks(K::COLUMNS).take(height).enumerate() {
                        for (column, &sum) in sums[..width].iter().enumerate() {
                            store(out.add(row * work.stride + column), sum, existing_scale);
                        }
                    }
                }
            }
        }
    }
}

thread_local! {
    static PANELS_F32: RefCell<(Panels<f32>, Panels<f32>)> = RefCell::default();
    static PANELS_F64: RefCell<(Panels<f64>, Panels<f64>)> = RefCell::default();
}

impl Real for f32 {
    fn by_bf16(work: &TiledMatmul<'_, f32>, threads: usize, finish: &impl Finish<f32>) -> bool {
        let is_asked = f32_math() == F32Math::Tf32;
        if is_asked {
            bf16::split::multiply(work, threads, finish);
        }
        is_asked
    }

    unsafe fn piece(
        work: &TiledMatmul<'_, f32>,
        rows: Range<usize>,
        columns: Range<usize>,
        finish: &impl Finish<f32>,
    ) {
        #[cfg(target_arch = "x86_64")]
        if work.a.rows == 1 && work.b.transposed && simd::level() >= Level::Avx2 {
            // SAFETY: by the caller's promise; this processor has that level.
            return unsafe { row::piece(work, columns, finish) };
        }
        PANELS_F32.with_borrow_mut(|panels| {
            // SAFETY: by the caller's promise; the kernel is one that this processor has.
            unsafe {
                #[cfg(target_arch = "x86_64")]
                match simd::level() {
                    Level::Avx512 => {
                        return piece::<_, Avx512F32>(work, rows, columns, finish, panels);
                    }
                    Level::Avx2 => {
                        return piece::<_, Avx2F32>(work, rows, columns, finish, panels);
                    }
                    Level::Baseline => {}
                }
                piece::<_, Plain>(work, rows, columns, finish, panels);
            }
        });
    }
}

impl Real for f64 {
    unsafe fn piece(
        work: &TiledMatmul<'_, f64>,
        rows: Range<usize>,
        columns: Range<usize>,
        finish: &impl Finish<f64>,
    ) {
        PANELS_F64.with_borrow_mut(|panels| {
            // SAFETY: as for f32.
            unsafe {
                #[cfg(target_arch = "x86_64")]
                if simd::level() >= Level::Avx2 {
                    return piece::<_, Avx2F64>(work, rows, columns, finish, panels);
                }
                piece::<_, Plain>(work, rows, columns, finish, panels);
            }
        });
    }
}

#[cfg(test)]
mod tests;
