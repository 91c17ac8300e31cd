//! Matmuls of bf16 on the CPU, with sums in f32, in one of two orders of additions that processors
//! have in hardware. Those without compute the same bits by f32 multiply-adds.
//!
//! With AMX, `amx.rs` does all but single rows. Otherwise pieces, panels and tiles are those of f32
//! matmuls. Panels hold elements in pairs along k, or widened to f32 in the order of additions
//! (`pack.rs`). A tile's sums start from 0 in each block along k (`kernels.rs`); blocks follow from
//! k alone. Subnormal numbers count as 0 and results that would be subnormal become 0, as the
//! instructions have it. An output in bf16 is rounded once, after `Finish`.

#[cfg(target_arch = "x86_64")]
mod amx;
mod flush;
mod kernels;
mod pack;
mod product;
#[cfg(target_arch = "x86_64")]
mod row;
pub(super) mod split;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::ops::Range;

use kernels::{Emulated, Flushed, PairKernel, store};
use pack::PairPanels;
use product::{ALONG_GRAIN, ALONG_MAX, Product, Target};
pub use product::{Bf16Order, bf16_order, set_bf16_order, with_bf16_order};

use super::tile::{AsIs, COLUMNS_MAX, Finish, Matrix, Output, TILE_MAX, Tile};
#[cfg(target_arch = "x86_64")]
use super::tile::{Avx2F32, Avx512F32};
use super::tile::{PARALLEL_MATMUL_MIN, PARALLEL_ROW_MIN, PIECE_GRAIN};
use crate::dtype::bf16;
use crate::ops::round;
#[cfg(target_arch = "x86_64")]
use crate::simd::{self, Bf16Unit, Level};
use crate::threads;

/// `out = scales.0 * a·b + scales.1 * out`, then `finish`, then rounded if `out` is bf16. With 0
/// for `scales.1`, `out` is not read.
pub(crate) fn matmul(
    out: Output<'_, bf16, f32>,
    a: Matrix<'_, bf16>,
    b: Matrix<'_, bf16>,
    scales: (f32, f32),
    finish: &impl Finish<f32>,
) {
    let (m, n, k) = (a.rows, b.columns, a.columns);
    let (out, len) = match out {
        Output::Wide(out) => (Target::F32(out.as_mut_ptr()), out.len()),
        Output::Stored(out) => (Target::Bf16(out.as_mut_ptr()), out.len()),
    };
    assert!(b.rows == k && len == m * n);
    let order = bf16_order();
    let work = Product {
        out,
        a,
        b,
        scales,
        order,
    };
    let parallel_min = match m {
        1 => PARALLEL_ROW_MIN,
        _ => PARALLEL_MATMUL_MIN,
    };
    let small = m.saturating_mul(n).saturating_mul(k) < parallel_min;
    if m > 0 && n > 0 {
        in_pieces(&work, if small { 1 } else { threads::count() }, finish);
    }
}

/// `out = scales.0 * a·b + scales.1 * out` on this thread.
pub(crate) fn add_product(
    out: &mut [f32],
    a: Matrix<'_, bf16>,
    b: Matrix<'_, bf16>,
    scales: (f32, f32),
) {
    assert!(b.rows == a.columns && out.len() == a.rows * b.columns);
    let (out, order) = (Target::F32(out.as_mut_ptr()), bf16_order());
    let work = Product {
        out,
        a,
        b,
        scales,
        order,
    };
    in_pieces(&work, 1, &AsIs);
}

/// One piece per thread, of the longer side, as in f32.
fn in_pieces(work: &Product<'_>, threads: usize, finish: &impl Finish<f32>) {
    #[cfg(target_arch = "x86_64")]
    if work.order == Bf16Order::Amx && simd::bf16_unit() >= Bf16Unit::Amx && !row::fits(work) {
        // SAFETY: the whole output, which the caller has exclusively; this process has tiles.
        return unsafe { amx::multiply::<amx::Amx, _>(work, threads, finish) };
    }
    let (m, n) = (work.a.rows, work.b.columns);
    let side = m.max(n);
    let pieces = threads.min(side.div_ceil(PIECE_GRAIN));
    threads::run(pieces, |index| {
        let part = threads::cut(side, PIECE_GRAIN, pieces, index);
        let (rows, columns) = if m > n { (part, 0..n) } else { (0..m, part) };
        ROOMS.with_borrow_mut(|rooms| {
            // SAFETY: the pieces' rows, or columns, do not overlap and lie within the output.
            unsafe { dispatch(work, rows, columns, finish, rooms) };
        });
    });
}

/// The buffers of a thread.
#[derive(Default)]
struct PieceBuffers {
    left: PairPanels,
    right: PairPanels,
    sums: Vec<f32>,
}

thread_local! {
    static ROOMS: RefCell<PieceBuffers> = RefCell::default();
}

/// `piece` with the fastest kernel of this processor for the order.
///
/// # Safety
/// As for `piece`, but for the instructions.
unsafe fn dispatch(
    work: &Product<'_>,
    rows: Range<usize>,
    columns: Range<usize>,
    finish: &impl Finish<f32>,
    rooms: &mut PieceBuffers,
) {
    use Bf16Order::{Amx, Dpbf16};
    // SAFETY: by the caller's promise; the kernel is one that this processor has.
    unsafe {
        #[cfg(target_arch = "x86_64")]
        if row::fits(work) && simd::level() >= Level::Avx2 {
            return row::piece(work, columns, finish);
        }
        macro_rules! with {
            ($Kernel:ty) => {
                piece::<$Kernel>(work, rows, columns, finish, rooms)
            };
        }
        #[cfg(target_arch = "x86_64")]
        match (work.order, simd::bf16_unit(), simd::level()) {
            (Dpbf16, Bf16Unit::Dpbf16 | Bf16Unit::Amx, _) => return with!(kernels::Dpbf16),
            (Dpbf16, _, Level::Avx512) => return with!(Emulated<Avx512F32, false>),
            (Amx, _, Level::Avx512) => return with!(Emulated<Avx512F32, true>),
            (Dpbf16, _, Level::Avx2) => return with!(Emulated<Avx2F32, false>),
            (Amx, _, Level::Avx2) => return with!(Emulated<Avx2F32, true>),
            (_, _, Level::Baseline) => {}
        }
        match work.order {
            Dpbf16 => with!(Emulated<Flushed, false>),
            Amx => with!(Emulated<Flushed, true>),
        }
    }
}

/// Computes some rows and columns of the output on this thread.
///
/// # Safety
/// The rows and columns lie within the output, and no other thread reads or writes them. The
/// processor has the instructions of `K`.
unsafe fn piece<K: PairKernel>(
    work: &Product<'_>,
    rows: Range<usize>,
    columns: Range<usize>,
    finish: &impl Finish<f32>,
    rooms: &mut PieceBuffers,
) {
    let (k, n) = (work.a.columns, work.b.columns);
    let blocks = columns.len().div_ceil(COLUMNS_MAX);
    let along_blocks = k.div_ceil(ALONG_MAX).max(1);
    // Sums of an output in bf16: of the rows that are computed at a time, or, if blocks along k add
    // to them, of all.
    let kept_rows = if along_blocks == 1 {
        K::ROWS_AT_ONCE
    } else {
        rows.len()
    };
    let PieceBuffers { left, right, sums } = rooms;
    for block in 0..blocks {
        let within = threads::cut(columns.len(), PIECE_GRAIN, blocks, block);
        let columns = columns.start + within.start..columns.start + within.end;
        let stride = match work.out {
            Target::F32(_) => n,
            Target::Bf16(_) => columns.len().next_multiple_of(PIECE_GRAIN),
        };
        if let Target::Bf16(_) = work.out
            && sums.len() < kept_rows * stride
        {
            sums.resize(kept_rows * stride, 0.0);
        }
        for along_block in 0..along_blocks {
            let along = threads::cut(k, ALONG_GRAIN, along_blocks, along_block);
            right.pack(work.b.t(), &columns, &along, [K::COLUMNS; 2], K::RIGHT);
            for start in rows.clone().step_by(K::ROWS_AT_ONCE) {
                let rows_here = start..rows.end.min(start + K::ROWS_AT_ONCE);
                let widths = [K::ROWS, K::ROWS_PACKED];
                left.pack(work.a, &rows_here, &along, widths, K::LEFT);
                let to = match work.out {
                    // SAFETY: within the output by the caller's promise.
                    Target::F32(out) => unsafe { out.add(start * n + columns.start) },
                    Target::Bf16(_) if along_blocks == 1 => sums.as_mut_ptr(),
                    Target::Bf16(_) => sums[(start - rows.start) * stride..].as_mut_ptr(),
                };
                let existing_scale = if along_block > 0 { 1.0 } else { work.scales.1 };
                // SAFETY: `to` has these rows, `stride` apart, of this thread alone, in the output
                // or in `sums`; panels hold these lines; the caller's promises.
                unsafe {
                    if let Target::Bf16(out) = work.out
                        && along_block == 0
                        && existing_scale != 0.0
                    {
                        each_row(out, n, &rows_here, &columns, (to, stride), |out, sums| {
                            round::widen(sums, out);
                        });
                    }
                    let scales = (work.scales.0, existing_scale);
                    let size = [rows_here.len(), columns.len()];
                    flush::flushing(|| {
                        tiles::<K>((to, stride), size, along.len(), scales, left, right);
                    });
                    if along_block + 1 == along_blocks {
                        finish.finish(Tile::new(to, stride, rows_here.clone(), columns.clone()));
                        if let Target::Bf16(out) = work.out {
                            each_row(out, n, &rows_here, &columns, (to, stride), |out, sums| {
                                round::round(out, sums);
                            });
                        }
                    }
                }
            }
        }
    }
}

/// Calls `body` with these columns of each of these rows of the output, and the row of sums.
///
/// # Safety
/// This thread has both exclusively.
unsafe fn each_row(
    out: *mut bf16,
    n: usize,
    rows: &Range<usize>,
    columns: &Range<usize>,
    (sums, stride): (*mut f32, usize),
    body: impl Fn(&mut [bf16], &mut [f32]),
) {
    for (index, row) in rows.clone().enumerate() {
        // SAFETY: within both by the caller's promise.
        unsafe {
            let out = out.add(row * n + columns.start);
            let sums = sums.add(index * stride);
            body(
                std::slice::from_raw_parts_mut(out, columns.len()),
                std::slice::from_raw_parts_mut(sums, columns.len()),
            );
        }
    }
}

/// Adds one block along k to rows and columns of sums, tile by tile.
///
/// # Safety
/// This thread has the sums exclusively; `left` and `right` hold `along` elements of these rows and
/// columns. The processor has the instructions of `K`.
unsafe fn tiles<K: PairKernel>(
    (out, stride): (*mut f32, usize),
    [rows, columns]: [usize; 2],
    along: usize,
    scales: (f32, f32),
    left: &PairPanels,
    right: &PairPanels,
) {
    // A panel of columns stays in a cache while all rows pass by.
    for (column_panel, column) in (0..columns).step_by(K::COLUMNS).enumerate() {
        let b = right.panel(column_panel);
        let width = K::COLUMNS.min(columns - column);
        for (row_panel, row) in (0..rows).step_by(K::ROWS).enumerate() {
            let a = left.panel(row_panel);
            let height = K::ROWS.min(rows - row);
            // SAFETY: the panels hold `along` elements of each line. A whole tile lies within the
            // sums; of one at the edge, the part that does is copied.
            unsafe {
                let out = out.add(row * stride + column);
                if height == K::ROWS && width == K::COLUMNS {
                    K::run(along, a, b, out, stride, scales);
                } else {
                    let mut tile = [0.0; TILE_MAX];
                    K::run(along, a, b, tile.as_mut_ptr(), K::COLUMNS, (scales.0, 0.0));
                    for (row, sums) in tile.chunks(K::COLUMNS).take(height).enumerate() {
                        for (column, &sum) in sums[..width].iter().enumerate() {
                            store(out.add(row * stride + column), sum, scales.1);
                        }
                    }
                }
            }
        }
    }
}
