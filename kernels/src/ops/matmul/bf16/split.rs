//! Matmuls of f32 by way of bf16 (`--dtype tf32` on the CPU): each operand is the sum of two bf16,
//! and of their four products the three largest are added, in an order of bf16 matmuls. So results
//! have 16 bits, and the same bits on every processor.
//!
//! Of each 32 elements along k, those of the left operand stand as high, high and low parts, those
//! of the right one as low, high and high parts. AMX adds their products in registers.

use std::ops::Range;

#[cfg(target_arch = "x86_64")]
use super::product::Bf16Order;
use super::product::{ALONG_GRAIN, Product, SPLIT_ALONG_MAX, Target, bf16_order, parts};
use super::{AsIs, Finish, Matrix, in_pieces};
use crate::dtype::bf16;
use crate::ops::matmul::tile::TiledMatmul;
use crate::simd::multiversion;
#[cfg(target_arch = "x86_64")]
use crate::simd::{self, Bf16Unit};
use crate::threads::{self, Shares};

/// `matmul` with f32 operands.
pub(in super::super) fn multiply(
    work: &TiledMatmul<'_, f32>,
    threads: usize,
    finish: &impl Finish<f32>,
) {
    let work = Product {
        out: Target::F32(work.out),
        a: work.a,
        b: work.b,
        scales: (work.matmul_scale, work.existing_scale),
        order: bf16_order(),
    };
    #[cfg(target_arch = "x86_64")]
    if work.order == Bf16Order::Amx && simd::bf16_unit() >= Bf16Unit::Amx {
        // SAFETY: the whole output, which the caller has exclusively; this process has tiles.
        return unsafe { super::amx::multiply::<super::amx::Amx, _>(&work, threads, finish) };
    }
    in_copies(&work, threads, finish);
}

/// The parts are written as bf16 matrices.
pub(super) fn in_copies(work: &Product<'_, f32>, threads: usize, finish: &impl Finish<f32>) {
    let (m, n, k) = (work.a.rows, work.b.columns, work.a.columns);
    let blocks = k.div_ceil(SPLIT_ALONG_MAX).max(1);
    for block in 0..blocks {
        let along = threads::cut(k, ALONG_GRAIN, blocks, block);
        let columns = 3 * along.len().next_multiple_of(ALONG_GRAIN);
        let left = copy(work.a, &along, [0, 0, 1], threads);
        let right = copy(work.b.t(), &along, [1, 0, 0], threads);
        let existing_scale = if block == 0 { work.scales.1 } else { 1.0 };
        let product = Product {
            out: work.out,
            a: Matrix::new(&left, m, columns, false),
            b: Matrix::new(&right, n, columns, false).t(),
            scales: (work.scales.0, existing_scale),
            order: work.order,
        };
        if block + 1 == blocks {
            in_pieces(&product, threads, finish);
        } else {
            in_pieces(&product, threads, &AsIs);
        }
    }
}

/// Lines (rows) of a matrix between the columns `along`: of each 32 the parts in this order.
fn copy(
    from: Matrix<'_, f32>,
    along: &Range<usize>,
    order: [usize; 3],
    threads: usize,
) -> Vec<bf16> {
    let columns = 3 * along.len().next_multiple_of(ALONG_GRAIN);
    let mut copy = vec![bf16::ZERO; from.rows * columns];
    let shares = Shares::new(&mut copy);
    threads::run(threads, |index| {
        let lines = threads::cut(from.rows, 1, threads, index);
        // SAFETY: each index has its own lines.
        let to = unsafe { shares.part(lines.start * columns..lines.end * columns) };
        copy_lines(to, from, lines, along, order);
    });
    copy
}

multiversion! {
    fn copy_lines[](
        to: &mut [bf16],
        from: Matrix<'_, f32>,
        lines: Range<usize>,
        along: &Range<usize>,
        order: [usize; 3],
    ) {
        let columns = 3 * along.len().next_multiple_of(ALONG_GRAIN);
        let turned = (1, from.rows);
        let (of_line, of_column) = if from.transposed { turned } else { (from.columns, 1) };
        for (line, to) in lines.zip(to.chunks_exact_mut(columns.max(1))) {
            for (index, column) in along.clone().enumerate() {
                let parts = parts(from.elements[line * of_line + column * of_column]);
                let first = index / ALONG_GRAIN * 3 * ALONG_GRAIN + index % ALONG_GRAIN;
                for (place, part) in order.into_iter().enumerate() {
                    to[first + place * ALONG_GRAIN] = parts[part];
                }
            }
        }
    }
}
