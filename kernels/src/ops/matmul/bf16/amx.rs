//! Intel's AMX, by `asm!`: its intrinsics are not stable in Rust.
//!
//! Operands are copied into tiles, of the shorter side once by all threads, of the longer one by
//! the thread that has these lines. A block of columns stays in the second cache while rows pass
//! by, 64 at a time, whose sums are finished there.

mod tiles;
mod turn;

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::cell::RefCell;
use std::ops::Range;

use super::flush::{self, flushed};
use super::product::{ALONG_GRAIN, Product, Target};
use super::{Finish, Matrix, Tile, round};
use crate::simd::multiversion;
use crate::threads::{self, Shares};
use tiles::{ALONG, LINES};
pub(super) use tiles::{Amx, TileBytes, TileUnit};
use turn::AmxElement;

/// Lines of a panel, whose tiles lie in pairs: of each 32 elements along k two tiles.
const PANEL: usize = 2 * LINES;
/// Rows whose sums are finished at a time.
const ROWS: usize = 2 * PANEL;
/// Steps of 32 elements along k after which sums are stored, at most: so much of a panel of rows
/// stays in the first cache while columns pass by.
const STEPS: usize = 16;
/// How many steps before its use a line is fetched.
const STEPS_AHEAD: usize = 8;
/// What the columns that rows pass by may take of a second cache.
const CACHE_BYTES: usize = 4 << 18;
const LINES_MAX: usize = super::COLUMNS_MAX / ROWS * ROWS;
/// Rows that a thread packs at a time.
const OWN_ROWS: usize = 1024;
/// Lines of the shorter side that are packed at a time.
const SHARED_MAX: usize = 4096;

/// Some lines of an operand in panels.
#[derive(Default)]
struct Packed {
    tiles: Vec<TileBytes>,
    /// Tiles of a panel.
    distance: usize,
}

impl Packed {
    /// Room for this many lines, with so many pairs of tiles each.
    fn room(&mut self, lines: usize, steps: usize) -> Shares<'_, TileBytes> {
        self.distance = 2 * steps;
        let count = lines.div_ceil(PANEL) * self.distance;
        if self.tiles.len() < count {
            self.tiles = vec![TileBytes([0; LINES * LINES]); count];
        }
        Shares::new(&mut self.tiles[..count])
    }

    fn panel(&self, index: usize) -> *const TileBytes {
        self.tiles[index * self.distance..].as_ptr()
    }
}

/// The buffers of a thread.
#[derive(Default)]
struct TileBuffers {
    own: Packed,
    sums: Vec<f32>,
}

thread_local! {
    static SHARED: RefCell<Packed> = RefCell::default();
    static ROOMS: RefCell<TileBuffers> = RefCell::default();
}

/// The whole product, by so many threads.
///
/// # Safety
/// The output has room for it, and no other thread reads or writes it. The processor has AVX-512
/// and the instructions of `U`, and this process may use them.
pub(super) unsafe fn multiply<U: TileUnit, S: AmxElement>(
    work: &Product<'_, S>,
    threads: usize,
    finish: &impl Finish<f32>,
) {
    let (m, n, k) = (work.a.rows, work.b.columns, work.a.columns);
    let blocks = k.div_ceil(S::ALONG_MAX).max(1);
    let (long, short) = (m.max(n), m.min(n));
    // Sums of an output in bf16 to which blocks along k add: seldom, so they are not kept.
    let mut kept = match work.out {
        Target::Bf16(_) if blocks > 1 => vec![0.0; m * n],
        _ => Vec::new(),
    };
    let kept = (!kept.is_empty()).then_some(kept.as_mut_ptr());
    SHARED.with_borrow_mut(|shared| {
        for start in (0..short).step_by(SHARED_MAX) {
            let few = start..short.min(start + SHARED_MAX);
            for block in 0..blocks {
                let along = threads::cut(k, ALONG_GRAIN, blocks, block);
                let steps = along.len().div_ceil(ALONG);
                let is_left = m <= n;
                let (side, other) = if is_left {
                    (work.a, work.b.t())
                } else {
                    (work.b.t(), work.a)
                };
                let panels = few.len().div_ceil(PANEL);
                let room = shared.room(few.len(), steps * S::PARTS);
                let pieces = threads.min(panels);
                threads::run(pieces, |index| {
                    let panels = threads::cut(panels, 1, pieces, index);
                    let lines = few.start + panels.start * PANEL
                        ..few.end.min(few.start + panels.end * PANEL);
                    // SAFETY: each index has its own panels, and the processor has AVX-512.
                    unsafe {
                        let distance = 2 * steps * S::PARTS;
                        let tiles = panels.start * distance..panels.end * distance;
                        pack(room.part(tiles), side, &lines, &along, is_left);
                    }
                });
                let pieces = threads.min(long.div_ceil(PANEL));
                let shared = &*shared;
                let work = BlockOf {
                    work,
                    kept: kept.map(OutputSums),
                    along: &along,
                    is_last: block + 1 == blocks,
                };
                threads::run(pieces, |index| {
                    let lines = threads::cut(long, PANEL, pieces, index);
                    ROOMS.with_borrow_mut(|rooms| {
                        // SAFETY: each index has its own lines; the caller's promises.
                        unsafe {
                            U::with_tiles(|| {
                                work.piece::<U>(shared, &few, other, lines, finish, rooms);
                            });
                        }
                    });
                });
            }
        }
    });
}

/// The sums of all elements of an output.
#[derive(Clone, Copy)]
struct OutputSums(*mut f32);

/// A block along k of a product.
struct BlockOf<'a, S> {
    work: &'a Product<'a, S>,
    kept: Option<OutputSums>,
    along: &'a Range<usize>,
    is_last: bool,
}

// SAFETY: as for `Product`, whose threads write disjoint elements of `kept`, too.
unsafe impl<S: Sync> Sync for BlockOf<'_, S> {}

impl<S: AmxElement> BlockOf<'_, S> {
    /// Lines of the longer side with all that are packed of the shorter one.
    ///
    /// # Safety
    /// As for `multiply`, but of these lines; within `with_tiles`.
    unsafe fn piece<U: TileUnit>(
        &self,
        shared: &Packed,
        few: &Range<usize>,
        side: Matrix<'_, S>,
        lines: Range<usize>,
        finish: &impl Finish<f32>,
        rooms: &mut TileBuffers,
    ) {
        // Whether these lines are rows.
        let is_left = self.work.a.rows > self.work.b.columns;
        let steps = self.along.len().div_ceil(ALONG) * S::PARTS;
        let count = (CACHE_BYTES / (64 * steps.max(1)) / ROWS * ROWS).clamp(ROWS, LINES_MAX);
        let TileBuffers { own, sums } = rooms;
        let own_count = if is_left { OWN_ROWS } else { count };
        for start in lines.clone().step_by(own_count) {
            let lines = start..lines.end.min(start + own_count);
            let room = own.room(lines.len(), steps);
            // SAFETY: the caller's promises; `room` is this thread's.
            unsafe { pack(room.part(0..room.len()), side, &lines, self.along, is_left) };
            let groups = if is_left { count } else { few.len() };
            for first in few.clone().step_by(groups) {
                let group = first..few.end.min(first + groups);
                let (rows, columns) = if is_left {
                    (&lines, &group)
                } else {
                    (&group, &lines)
                };
                for row in rows.clone().step_by(ROWS) {
                    let rows_here = row..rows.end.min(row + ROWS);
                    let panels = if is_left {
                        [(row - start) / PANEL, (first - few.start) / PANEL]
                    } else {
                        [(row - few.start) / PANEL, 0]
                    };
                    let (left, right) = if is_left {
                        (&*own, shared)
                    } else {
                        (shared, &*own)
                    };
                    // SAFETY: the caller's promises.
                    unsafe {
                        self.rows::<U>((left, right), panels, &rows_here, columns, sums);
                        self.settle(rows_here, columns, finish, sums);
                    }
                }
            }
        }
    }

    /// Sums of at most `ROWS` rows with some columns, whose panels begin at `panels`.
    ///
    /// # Safety
    /// Within `with_tiles`.
    unsafe fn rows<U: TileUnit>(
        &self,
        (left, right): (&Packed, &Packed),
        [row_panel, column_panel]: [usize; 2],
        rows: &Range<usize>,
        columns: &Range<usize>,
        sums: &mut Vec<f32>,
    ) {
        let multiply = match S::PARTS {
            1 => U::multiply::<1>,
            _ => U::multiply::<2>,
        };
        let stride = stride_of(columns);
        sums.resize(sums.len().max(ROWS * stride), 0.0);
        let steps = left.distance / 2 / S::PARTS;
        let at_once = steps.div_ceil(steps.div_ceil(STEPS / S::PARTS).max(1));
        for first in (0..steps.max(1)).step_by(at_once.max(1)) {
            let count = at_once.min(steps - first);
            for row in 0..rows.len().div_ceil(PANEL) {
                let a = left
                    .panel(row_panel + row)
                    .wrapping_add(2 * S::PARTS * first);
                for column in 0..columns.len().div_ceil(PANEL) {
                    let b = right
                        .panel(column_panel + column)
                        .wrapping_add(2 * S::PARTS * first);
                    let out = sums[row * PANEL * stride + column * PANEL..].as_mut_ptr();
                    // SAFETY: panels have as many steps; `sums` has room for whole tiles.
                    unsafe { multiply(first == 0, count, a, b, out, stride) };
                }
            }
        }
    }

    /// Adds sums to what is there, and finishes and rounds them after the last block along k.
    ///
    /// # Safety
    /// No other thread has these elements.
    unsafe fn settle(
        &self,
        rows: Range<usize>,
        columns: &Range<usize>,
        finish: &impl Finish<f32>,
        sums: &mut [f32],
    ) {
        let (n, stride) = (self.work.b.columns, stride_of(columns));
        let first = rows.start * n + columns.start;
        let existing = if self.along.start > 0 {
            1.0
        } else {
            self.work.scales.1
        };
        let scales = (self.work.scales.0, existing);
        let wide = match (self.work.out, self.kept) {
            (Target::F32(out), _) | (_, Some(OutputSums(out))) => Some(out),
            (Target::Bf16(_), None) => None,
        };
        let mut room = [0.0; LINES_MAX];
        for (row, sums) in sums.chunks_mut(stride).take(rows.len()).enumerate() {
            let sums = &mut sums[..columns.len()];
            let at = first + row * n;
            // SAFETY: within the output by the caller's promise, or within `kept`, which has its
            // shape.
            unsafe {
                let there =
                    |out: *mut f32| std::slice::from_raw_parts_mut(out.add(at), columns.len());
                if let Target::Bf16(out) = self.work.out
                    && self.along.start == 0
                    && existing != 0.0
                {
                    let out = std::slice::from_raw_parts(out.add(at), columns.len());
                    round::widen(wide.map_or(&mut room[..columns.len()], there), out);
                }
                match wide {
                    Some(out) => flush::flushing(|| add(there(out), sums, scales)),
                    None if scales == (1.0, 0.0) => {}
                    None => {
                        let room = &mut room[..columns.len()];
                        flush::flushing(|| add(room, sums, scales));
                        sums.copy_from_slice(room);
                    }
                }
            }
        }
        if !self.is_last {
            return;
        }
        let (from, stride) = match wide {
            // SAFETY: as above.
            Some(out) => (unsafe { out.add(first) }, n),
            None => (sums.as_mut_ptr(), stride),
        };
        // SAFETY: the caller has these elements exclusively.
        finish.finish(unsafe { Tile::new(from, stride, rows.clone(), columns.clone()) });
        if let Target::Bf16(out) = self.work.out {
            for row in 0..rows.len() {
                // SAFETY: as above.
                unsafe {
                    let from = std::slice::from_raw_parts(from.add(row * stride), columns.len());
                    let out = out.add(first + row * n);
                    round::round(std::slice::from_raw_parts_mut(out, columns.len()), from);
                }
            }
        }
    }
}

/// From one row of sums to the next: no power of two, so that rows take different places in a
/// cache.
fn stride_of(columns: &Range<usize>) -> usize {
    columns.len().next_multiple_of(PANEL) + LINES
}

multiversion! {
    /// `out = scales.0 * sums + scales.1 * out`.
    fn add[](out: &mut [f32], sums: &[f32], scales: (f32, f32)) {
        let of = |sum: f32| flushed(scales.0 * sum);
        let all = out.iter_mut().zip(sums);
        match scales.1 {
            0.0 => all.for_each(|(out, &sum)| *out = of(sum)),
            1.0 => all.for_each(|(out, &sum)| *out = flushed(flushed(*out) + of(sum))),
            scale => {
                all.for_each(|(out, &sum)| *out = flushed(scale.mul_add(flushed(*out), of(sum))));
            }
        }
    }
}

/// Copies lines of a matrix, between the columns `along`, to panels. Elements that do not exist are
/// 0, and so are lines up to a whole tile; the second tile of a last pair may keep what it held,
/// since its sums are not used.
#[target_feature(enable = "avx512f,avx512bw")]
fn pack<S: AmxElement>(
    to: &mut [TileBytes],
    from: Matrix<'_, S>,
    lines: &Range<usize>,
    along: &Range<usize>,
    is_left: bool,
) {
    let steps = along.len().div_ceil(ALONG);
    let halves = lines.len().div_ceil(LINES);
    let stride = if from.transposed {
        from.rows
    } else {
        from.columns
    };
    let mut one = |half: usize, step: usize| {
        let (line, k) = (lines.start + half * LINES, along.start + step * ALONG);
        let (count, depth) = (LINES.min(lines.end - line), ALONG.min(along.end - k));
        let first = if from.transposed {
            k * stride + line
        } else {
            line * stride + k
        };
        let tiles = &mut to[(half / 2 * steps + step) * 2 * S::PARTS + half % 2..];
        let tiles = &mut tiles[..2 * S::PARTS - 1];
        // Rows lie on pages of their own, so the processor does not foresee what comes next.
        let (rows, ahead) = if !from.transposed {
            (LINES, STEPS_AHEAD * ALONG)
        } else if half % 2 == 1 {
            (0, 0)
        } else {
            (ALONG, ALONG * stride)
        };
        for row in 0..rows {
            let next = from
                .elements
                .as_ptr()
                .wrapping_add(first + ahead + row * stride);
            _mm_prefetch::<_MM_HINT_T1>(next.cast());
        }
        if count == LINES && depth == ALONG {
            let (rows, width) = if from.transposed {
                (ALONG, LINES)
            } else {
                (LINES, ALONG)
            };
            let source = &from.elements[first..][..(rows - 1) * stride + width];
            // SAFETY: `source` has whole rows, `stride` apart.
            return unsafe {
                S::turn_tiles(tiles, source.as_ptr(), stride, from.transposed, is_left);
            };
        }
        let mut room = [S::default(); LINES * ALONG];
        let (rows, width) = if from.transposed {
            (depth, count)
        } else {
            (count, depth)
        };
        let room_stride = if from.transposed { LINES } else { ALONG };
        for (row, room) in room.chunks_mut(room_stride).take(rows).enumerate() {
            room[..width].copy_from_slice(&from.elements[first + row * stride..][..width]);
        }
        // SAFETY: `room` has whole rows.
        unsafe { S::turn_tiles(tiles, room.as_ptr(), room_stride, from.transposed, is_left) };
    };
    // In the order of the memory that is read.
    if from.transposed {
        (0..steps).for_each(|step| (0..halves).for_each(|half| one(half, step)));
    } else {
        for panel in (0..halves).step_by(2) {
            for step in 0..steps {
                (panel..halves.min(panel + 2)).for_each(|half| one(half, step));
            }
        }
    }
}
