//! The matmul under addmm and linear on the CPU.
//!
//! Both operands are copied block by block into panels, from which a kernel (`tile.rs`) computes
//! one small tile of the output in registers. A block of the right operand stays in the L2 cache
//! while all rows of the left one pass by.
//!
//! Bits: each output element is added along k in order, in blocks whose lengths follow from k
//! alone. So it depends neither on the number of threads, nor on the other rows and columns, nor
//! on the processor.

mod pack;
mod parts;
mod piece;
#[cfg(target_arch = "x86_64")]
mod row;
mod tile;

use crate::threads;
use parts::Matmul;
pub(crate) use parts::{AsIs, Finish, Matrix, Tile};
use piece::PIECE_GRAIN;
pub(crate) use piece::Real;
#[cfg(target_arch = "x86_64")]
pub(crate) use tile::{Avx2F32, Avx2F64, Avx512F32};
pub(crate) use tile::{Kernel, Plain};

/// Matmuls with fewer multiplications run on the calling thread.
const PARALLEL_MATMUL_MIN: usize = 48 * 48 * 256;
/// As above, for a matmul of one row, whose speed is that of memory.
const PARALLEL_ROW_MIN: usize = 1 << 16;

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
    let work = Matmul {
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
    if m > 0 && n > 0 {
        in_pieces(&work, threads, finish);
    }
}

/// One piece per thread. The longer side is cut, since each piece packs its own part of that side
/// and all of the other.
fn in_pieces<T: Real>(work: &Matmul<'_, T>, threads: usize, finish: &impl Finish<T>) {
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

#[cfg(test)]
mod tests;
