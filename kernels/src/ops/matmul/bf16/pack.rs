//! Panels of bf16: copies of an operand in the order in which a kernel reads it.

use std::ops::Range;

use crate::dtype::bf16;
use crate::ops::matmul::pack::Transpose;
use crate::ops::matmul::tile::Matrix;
use crate::simd::multiversion;
use crate::streaming;

/// What a panel holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PackForm {
    /// `[pair][line]`: pairs of elements along k, the first in the low half of what passes as f32.
    Pairs,
    /// `[element][line]` in f32: of each pair the second, then the first.
    WidePairs,
    /// `[element][line]` in f32: of each 32 the even ones, then the odd ones.
    WideTiles,
}

/// Elements along k that an instruction of AMX takes, and their pairs.
pub(super) const TILE_ALONG: usize = 32;
const TILE_PAIRS: usize = TILE_ALONG / 2;

impl PackForm {
    /// The pairs of a line with so many elements.
    fn pairs(self, along: usize) -> usize {
        match self {
            PackForm::Pairs | PackForm::WidePairs => along.div_ceil(2),
            PackForm::WideTiles => along.div_ceil(TILE_ALONG) * TILE_PAIRS,
        }
    }
}

/// Panels begin at cache lines, and one further apart than their length, as in f32.
const CACHE_LINE: usize = 64;
const GAP: usize = 16;

/// A buffer for some panels, which grows to the largest block.
#[derive(Default)]
pub(super) struct PairPanels {
    buffer: Vec<f32>,
    /// Pairs that are to be brought into another form.
    pairs: Vec<f32>,
    distance: usize,
}

impl PairPanels {
    /// Copies lines (rows) of a matrix, between the columns `along`, to panels of `taken` lines,
    /// which have room for `width`. Lines that do not exist have any value; elements beyond the
    /// last are 0.
    pub(super) fn pack(
        &mut self,
        from: Matrix<'_, bf16>,
        lines: &Range<usize>,
        along: &Range<usize>,
        [taken, width]: [usize; 2],
        form: PackForm,
    ) {
        let (pairs, count) = (form.pairs(along.len()), lines.len().div_ceil(taken));
        let len = pairs * width;
        let is_pairs = form == PackForm::Pairs;
        self.distance = if is_pairs { len } else { 2 * len } + GAP;
        let room = |buffer: &mut Vec<f32>, distance: usize| {
            if buffer.len() < count * distance + CACHE_LINE {
                buffer.resize(count * distance + CACHE_LINE, 0.0);
            }
        };
        room(&mut self.buffer, self.distance);
        let start = self.start();
        if is_pairs {
            let panels = &mut self.buffer[start..];
            return pack_pairs(
                (panels, self.distance),
                from,
                lines,
                along,
                [taken, width, pairs],
            );
        }
        room(&mut self.pairs, len);
        pack_pairs(
            (&mut self.pairs, len),
            from,
            lines,
            along,
            [taken, width, pairs],
        );
        let panels = self.buffer[start..].chunks_mut(self.distance);
        for (panel, pairs) in panels.zip(self.pairs.chunks(len.max(1))).take(count) {
            widen(panel, pairs, width, form == PackForm::WideTiles);
        }
    }

    /// Where the panels begin.
    fn start(&self) -> usize {
        self.buffer.as_ptr().align_offset(CACHE_LINE)
    }

    /// The address of a panel that `pack` filled.
    pub(super) fn panel(&self, index: usize) -> *const f32 {
        self.buffer[self.start() + index * self.distance..].as_ptr()
    }
}

/// Fills panels, `distance` apart, with `pairs` pairs of each line.
fn pack_pairs(
    (panels, distance): (&mut [f32], usize),
    from: Matrix<'_, bf16>,
    lines: &Range<usize>,
    along: &Range<usize>,
    [taken, width, pairs]: [usize; 3],
) {
    if pairs == 0 {
        return;
    }
    if from.transposed {
        interleave(
            (panels, distance),
            from.elements,
            from.rows,
            lines,
            along,
            taken,
            width,
        );
    } else {
        for (panel, first) in panels
            .chunks_mut(distance)
            .zip(lines.clone().step_by(taken))
        {
            let rows = taken.min(lines.end - first);
            let source = &from.elements[first * from.columns + along.start..];
            turn_pairs((source, from.columns), [rows, along.len()], (panel, width));
        }
    }
    let (filled, len) = (along.len().div_ceil(2) * width, pairs * width);
    if filled < len {
        for panel in panels
            .chunks_mut(distance)
            .take(lines.len().div_ceil(taken))
        {
            panel[filled..len].fill(0.0);
        }
    }
}

multiversion! {
    /// From rows of lines, of which `along` are taken: two rows become a row of pairs.
    fn interleave[](
        to: (&mut [f32], usize),
        elements: &[bf16],
        stride: usize,
        lines: &Range<usize>,
        along: &Range<usize>,
        taken: usize,
        width: usize,
    ) {
        let (panels, distance) = to;
        let zeros = [bf16::ZERO; WIDTH_MAX];
        for (step, k) in along.clone().step_by(2).enumerate() {
            for ahead in [k + ROWS_AHEAD, k + ROWS_AHEAD + 1] {
                let ahead = elements.as_ptr().wrapping_add(ahead * stride + lines.start);
                streaming::ask(ahead.cast(), 2 * lines.len());
            }
            for (panel, first) in panels.chunks_mut(distance).zip(lines.clone().step_by(taken)) {
                let count = taken.min(lines.end - first);
                let low = &elements[k * stride + first..][..count];
                let next = (k + 1) * stride + first;
                let high = if k + 1 < along.end { &elements[next..] } else { &zeros[..] };
                let high = &high[..count];
                let to = &mut panel[step * width..][..count];
                // Loops of a constant length are a few instructions.
                match count {
                    32 => interleave_row::<32>(to, low, high),
                    8 => interleave_row::<8>(to, low, high),
                    _ => {
                        for ((to, &low), &high) in to.iter_mut().zip(low).zip(high) {
                            *to = pair(low, high);
                        }
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn interleave_row<const N: usize>(to: &mut [f32], low: &[bf16], high: &[bf16]) {
    let all = (
        to.first_chunk_mut::<N>(),
        low.first_chunk::<N>(),
        high.first_chunk::<N>(),
    );
    if let (Some(to), Some(low), Some(high)) = all {
        *to = std::array::from_fn(|line| pair(low[line], high[line]));
    }
}

/// How many rows before its use a row is fetched.
const ROWS_AHEAD: usize = 8;
/// The most lines of a panel.
const WIDTH_MAX: usize = 32;

#[inline(always)]
fn pair(low: bf16, high: bf16) -> f32 {
    f32::from_bits(u32::from(low.to_bits()) | u32::from(high.to_bits()) << 16)
}

/// From lines that lie `stride` apart, each with its elements one after another: pairs are
/// transposed, as f32 would be.
fn turn_pairs(
    (source, stride): (&[bf16], usize),
    [rows, along]: [usize; 2],
    (panel, width): (&mut [f32], usize),
) {
    let whole = along / 2;
    if stride.is_multiple_of(2) && source.as_ptr().cast::<f32>().is_aligned() && whole > 0 {
        let len = ((rows - 1) * stride + 2 * whole) / 2;
        assert!(2 * len <= source.len());
        // SAFETY: aligned and within the slice by what was just checked; every bit pattern is an
        // f32, which is only copied.
        let source = unsafe { std::slice::from_raw_parts(source.as_ptr().cast::<f32>(), len) };
        f32::turn((source, stride / 2), [rows, whole], (panel, width));
    } else {
        for row in 0..rows {
            for step in 0..whole {
                let [low, high] = [0, 1].map(|at| source[row * stride + 2 * step + at]);
                panel[step * width + row] = pair(low, high);
            }
        }
    }
    if along % 2 == 1 {
        for row in 0..rows {
            let last = source[row * stride + along - 1];
            panel[whole * width + row] = pair(last, bf16::ZERO);
        }
    }
}

multiversion! {
    /// Widens pairs to f32, in the order of a kernel.
    fn widen[](panel: &mut [f32], pairs: &[f32], width: usize, in_tiles: bool) {
        // Rows of the panel that a row of pairs becomes, for its first and second elements.
        for (step, pairs) in pairs.chunks_exact(width).enumerate() {
            let even = step / TILE_PAIRS * TILE_ALONG + step % TILE_PAIRS;
            let of_pair = (2 * step + 1, 2 * step);
            let (first, second) = if in_tiles { (even, even + TILE_PAIRS) } else { of_pair };
            for (to, &pair) in panel[first * width..][..width].iter_mut().zip(pairs) {
                *to = f32::from_bits(pair.to_bits() << 16);
            }
            for (to, &pair) in panel[second * width..][..width].iter_mut().zip(pairs) {
                *to = f32::from_bits(pair.to_bits() & 0xffff_0000);
            }
        }
    }
}
