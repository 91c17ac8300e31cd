//! unfold: what a convolution's windows see, as the columns of a matrix, so that the convolution is
//! a matmul. Nothing is computed. Its gradient adds up what each element gave to its windows, by
//! line and column within a window, so that its bits are the same everywhere.
//!
//! Letters: B images, C channels, H × W elements of a channel, I × J those of a window, Y × X
//! windows.

use std::ops::Range;

use crate::error::Result;
use crate::launch::{CuFile, Grid, args};
use crate::ops::call::{FLOATS_AND_BF16, OpCall};
use crate::ops::float::Float;
use crate::ops::stored::{Stored, with_stored};
use crate::simd::multiversion;
use crate::{Tensor, threads};

pub(super) static SOURCE: CuFile = CuFile::new("unfold.cu", include_str!("unfold.cu"));

/// The windows of a convolution: along the height, and along the width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Windows {
    /// I and J.
    pub size: [usize; 2],
    /// From a window to the next one.
    pub stride: [usize; 2],
    /// Zeros at both ends.
    pub padding: [usize; 2],
    /// From an element of a window to the next one.
    pub dilation: [usize; 2],
}

impl Windows {
    /// Y and X for images of this height and width. None if a window has no elements or does not
    /// fit.
    pub fn places(&self, image: [usize; 2]) -> Option<[usize; 2]> {
        let along = |axis: usize| {
            let reach = self.dilation[axis].checked_mul(self.size[axis].checked_sub(1)?)?;
            let length = image[axis].checked_add(self.padding[axis].checked_mul(2)?)?;
            let rest = length.checked_sub(reach)?.checked_sub(1)?;
            Some(rest.checked_div(self.stride[axis])? + 1)
        };
        Some([along(0)?, along(1)?])
    }

    /// Which windows have their element `at` in this part of an axis.
    #[inline(always)]
    fn with(&self, axis: usize, at: usize, part: Range<usize>, places: usize) -> Range<usize> {
        let before = at * self.dilation[axis];
        let from = |end: usize| {
            let offset = (end + self.padding[axis]).saturating_sub(before);
            offset.div_ceil(self.stride[axis]).min(places)
        };
        from(part.start)..from(part.end)
    }

    /// The index that the element `at` of a window has, which is not in the padding.
    #[inline(always)]
    fn index(&self, axis: usize, place: usize, at: usize) -> usize {
        place * self.stride[axis] + at * self.dilation[axis] - self.padding[axis]
    }
}

/// Writes each window of `x` (B, C, H, W) to a column of `out` (C·I·J, B·Y·X), with zeros where it
/// is beyond the image.
#[track_caller]
pub fn unfold_into(out: &Tensor, x: &Tensor, windows: &Windows) -> Result<()> {
    run(
        OpCall::new("unfold"),
        [("out", out), ("x", x)],
        windows,
        false,
    )
}

/// The gradient `dx` (B, C, H, W) of `x` from `dout` (C·I·J, B·Y·X).
#[track_caller]
pub fn unfold_backward_into(dx: &Tensor, dout: &Tensor, windows: &Windows) -> Result<()> {
    let call = OpCall::new("unfold_backward");
    run(call, [("dx", dx), ("dout", dout)], windows, true)
}

/// Both directions, whose kernels have the names of the operations.
fn run<'a>(
    mut call: OpCall<'a>,
    [to, from]: [(&'static str, &'a Tensor); 2],
    windows: &Windows,
    is_backward: bool,
) -> Result<()> {
    let to = call.writes(to.0, to.1);
    let from = call.reads(from.0, from.1);
    let [image, columns] = if is_backward { [to, from] } else { [from, to] };
    let [images, channels, height, width] =
        call.dims::<4>(image, "[images, channels, height, width]")?;
    let Some([down, across]) = windows.places([height, width]) else {
        let expected = format!("one that fits into {height}×{width}, with a stride");
        return Err(call.value("a window", expected, format!("{windows:?}")));
    };
    let [size_y, size_x] = windows.size;
    let rows = channels * size_y * size_x;
    let shape = [rows, images * down * across];
    call.has_shape(columns, &shape, "[elements of a window, windows]")?;
    call.same_dtype(columns, image)?;
    call.all_row_major()?;
    call.run(from, &FLOATS_AND_BF16, |placed| {
        let [mut to, from] = placed.enter([to, from])?;
        let Windows {
            stride,
            padding,
            dilation,
            ..
        } = *windows;
        if let Some(gpu) = placed.gpu() {
            let args = args![
                to,
                from,
                to.count,
                images,
                channels,
                height,
                width,
                down,
                across,
                size_y,
                size_x,
                stride[0],
                stride[1],
                padding[0],
                padding[1],
                dilation[0],
                dilation[1]
            ];
            let name = (placed.call.by.op, to.dtype);
            return gpu.launch(&SOURCE, name, Grid::elements(to.count), args);
        }
        let sizes = [images, channels, height, width, down, across];
        let plane = if is_backward {
            height * width
        } else {
            down * across
        };
        let plane = plane.max(1);
        with_stored!(placed.dtype, S => {
            let from = from.elements::<S>();
            threads::split_mut(to.elements_mut::<S>(), plane, |first, to| {
                for (at, to) in to.chunks_exact_mut(plane).enumerate() {
                    let at = first / plane + at;
                    let copy = if is_backward { fold } else { unfold };
                    copy(to, from, at, sizes, windows)
                }
            });
        });
        Ok(())
    })
}

/// What is at one place of the windows of an image.
fn unfold<S: Stored>(out: &mut [S], x: &[S], at: usize, sizes: [usize; 6], windows: &Windows) {
    let [images, channels, height, width, down, across] = sizes;
    let [_, size_x] = windows.size;
    let (row, image) = (at / images, at % images);
    let area = windows.size[0] * size_x;
    let [y, x_at] = [row % area / size_x, row % size_x];
    let plane = &x[(image * channels + row / area) * height * width..][..height * width];
    let lines = windows.with(0, y, 0..height, down);
    let within = windows.with(1, x_at, 0..width, across);
    for (line, out) in out.chunks_exact_mut(across).enumerate() {
        if !lines.contains(&line) || within.is_empty() {
            out.fill(S::default());
            continue;
        }
        let first = windows.index(0, line, y) * width + windows.index(1, within.start, x_at);
        out[..within.start].fill(S::default());
        out[within.end..].fill(S::default());
        let out = &mut out[within.clone()];
        match windows.stride[1] {
            1 => out.copy_from_slice(&plane[first..first + out.len()]),
            step => {
                let from = plane[first..].iter().step_by(step);
                out.iter_mut().zip(from).for_each(|(out, x)| *out = *x);
            }
        }
    }
}

/// Elements of a line that are summed at a time.
const BLOCK: usize = 256;

multiversion! {
    /// The gradient of one channel of an image.
    fn fold[S: Stored](dx: &mut [S], dout: &[S], at: usize, sizes: [usize; 6], windows: &Windows) {
        let [images, channels, _, width, down, across] = sizes;
        let (image, channel) = (at / channels, at % channels);
        let [size_y, size_x] = windows.size;
        for (line, dx) in dx.chunks_exact_mut(width).enumerate() {
            for (block, dx) in dx.chunks_mut(BLOCK).enumerate() {
                let part = block * BLOCK..block * BLOCK + dx.len();
                let mut sums = [S::Math::ZERO; BLOCK];
                for y in 0..size_y {
                    for y_at in windows.with(0, y, line..line + 1, down) {
                        for x in 0..size_x {
                            let row = (channel * size_y + y) * size_x + x;
                            let dout = &dout[((row * images + image) * down + y_at) * across..];
                            let places = windows.with(1, x, part.clone(), across);
                            if places.is_empty() {
                                continue;
                            }
                            let sums = &mut sums[windows.index(1, places.start, x) - part.start..];
                            let dout = &dout[places];
                            match windows.stride[1] {
                                1 => add(sums.iter_mut(), dout),
                                step => add(sums.iter_mut().step_by(step), dout),
                            }
                        }
                    }
                }
                S::keep(dx, &sums[..dx.len()]);
            }
        }
    }
}

#[inline(always)]
fn add<'a, S: Stored>(sums: impl Iterator<Item = &'a mut S::Math>, dout: &[S]) {
    for (sum, dout) in sums.zip(dout) {
        *sum = *sum + dout.wide();
    }
}

#[cfg(test)]
mod tests;
