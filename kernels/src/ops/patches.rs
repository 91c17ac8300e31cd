//! patches: the pixels of each image, patch by patch, as a transformer reads them. Backward puts
//! gradients back where the pixels were. Nothing is computed. Letters: B images, P pixels of an
//! image with all their channels, T tokens of an image, K numbers of a patch.
//!
//! token_mean: the mean of the first tokens of each sequence, all of them or the first one alone,
//! and its gradient. A sum adds tokens in their order, so its bits are the same everywhere.
//! Letters: B sequences, T tokens of a sequence, N of these in the mean, C columns.

use crate::error::Result;
use crate::launch::{Grid, Source, args};
use crate::ops::call::{Call, FLOATS_AND_BF16, Slot, with_float};
use crate::ops::float::Float;
use crate::simd::multiversion;
use crate::{Tensor, threads};

pub(super) static PATCHES: Source = Source::new("patches.cu", include_str!("patches.cu"));

/// How images are cut into square patches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patches {
    /// Numbers of a pixel.
    pub channels: usize,
    /// In pixels; a multiple of `patch`.
    pub height: usize,
    /// In pixels; a multiple of `patch`.
    pub width: usize,
    /// Whether the channels of a pixel are adjacent. Otherwise each channel is a plane.
    pub channels_last: bool,
    /// The side of a patch, in pixels.
    pub patch: usize,
    /// Tokens of zeros before those of the patches.
    pub leading: usize,
}

impl Patches {
    /// P.
    pub fn pixels(&self) -> usize {
        self.channels * self.height * self.width
    }

    /// T.
    pub fn tokens(&self) -> usize {
        self.leading + (self.height / self.patch) * (self.width / self.patch)
    }

    /// K: by channel, by line, by column, as a weight of `torch.nn.Conv2d`.
    pub fn columns(&self) -> usize {
        self.channels * self.patch * self.patch
    }

    /// The pixel at `place` of an image's tokens (T, K); None in a leading token.
    #[inline]
    fn pixel(&self, place: usize) -> Option<usize> {
        let (side, across) = (self.patch, self.width / self.patch);
        let token = (place / self.columns()).checked_sub(self.leading)?;
        let (channel, at) = (
            place % self.columns() / (side * side),
            place % (side * side),
        );
        let line = token / across * side + at / side;
        let column = token % across * side + at % side;
        Some(if self.channels_last {
            (line * self.width + column) * self.channels + channel
        } else {
            (channel * self.height + line) * self.width + column
        })
    }
}

/// Writes the patches of `x` (B, P) to `out` (B, T, K): row by row of patches, after the leading
/// tokens of zeros.
#[track_caller]
pub fn patches_into(out: &Tensor, x: &Tensor, patches: &Patches) -> Result<()> {
    rearrange(
        Call::new("patches"),
        [("out", out), ("x", x)],
        patches,
        false,
    )
}

/// The gradient `dx` (B, P) of `x` from `dout` (B, T, K).
#[track_caller]
pub fn patches_backward_into(dx: &Tensor, dout: &Tensor, patches: &Patches) -> Result<()> {
    let call = Call::new("patches_backward");
    rearrange(call, [("dx", dx), ("dout", dout)], patches, true)
}

/// From images to tokens, or back. The kernels have the names of the operations, and a thread for
/// each element of the tokens.
fn rearrange<'a>(
    mut call: Call<'a>,
    [to, from]: [(&'static str, &'a Tensor); 2],
    patches: &Patches,
    back: bool,
) -> Result<()> {
    let to = call.writes(to.0, to.1);
    let from = call.reads(from.0, from.1);
    let [image, tokens] = if back { [to, from] } else { [from, to] };
    check(&call, [image, tokens], patches)?;
    call.run(from, &FLOATS_AND_BF16, |placed| {
        let [mut to, from] = placed.enter([to, from])?;
        if let Some(gpu) = placed.launcher() {
            let (image, tokens) = if back { (&to, &from) } else { (&from, &to) };
            let &Patches { channels, height, width, channels_last, patch, leading } = patches;
            let count = tokens.count;
            let args = args![
                image, tokens, count, channels, height, width, channels_last, patch, leading
            ];
            let name = (placed.call.by.op, tokens.dtype);
            return gpu.launch(&PATCHES, name, Grid::elements(count), args);
        }
        let (pixels, places) = (patches.pixels(), patches.tokens() * patches.columns());
        let [of_to, of_from] = if back { [pixels, places] } else { [places, pixels] };
        with_float!(placed.dtype, T => {
            let from = from.elements::<T>();
            threads::split_mut(to.elements_mut::<T>(), of_to, |first, to| {
                let from = from[first / of_to * of_from..].chunks_exact(of_from);
                for (to, from) in to.chunks_exact_mut(of_to).zip(from) {
                    for place in 0..places {
                        match (back, patches.pixel(place)) {
                            (false, pixel) => to[place] = pixel.map_or(T::ZERO, |pixel| from[pixel]),
                            (true, Some(pixel)) => to[pixel] = from[place],
                            (true, None) => {}
                        }
                    }
                }
            });
        });
        Ok(())
    })
}

/// Checks `image` (B, P), `tokens` (B, T, K) and the sizes.
fn check(call: &Call<'_>, [image, tokens]: [Slot; 2], patches: &Patches) -> Result<()> {
    let sides = [patches.height, patches.width];
    let fits = |side: &usize| *side > 0 && side.is_multiple_of(patches.patch);
    if patches.channels == 0 || patches.patch == 0 || !sides.iter().all(fits) {
        let expected = format!("a divisor of the sides of an image, {sides:?}, with channels");
        return Err(call.value("patch", expected, patches.patch));
    }
    let [images, _] = call.dims::<2>(image, "[images, pixels]")?;
    call.has_shape(image, &[images, patches.pixels()], "[images, pixels]")?;
    let shape = [images, patches.tokens(), patches.columns()];
    call.has_shape(tokens, &shape, "[images, tokens, numbers of a patch]")?;
    call.same_dtype(tokens, image)?;
    call.all_row_major()
}

pub(super) static TOKEN_MEAN: Source = Source::new("token_mean.cu", include_str!("token_mean.cu"));

/// The mean `out` (B, C) of the first `tokens` tokens of each sequence of `x` (B, T, C).
#[track_caller]
pub fn token_mean_into(out: &Tensor, x: &Tensor, tokens: usize) -> Result<()> {
    let call = Call::new("token_mean");
    mean_or_spread(call, [("out", out), ("x", x)], tokens, false)
}

/// The gradient `dx` (B, T, C) from `dout` (B, C): 0 for tokens that are not in the mean.
#[track_caller]
pub fn token_mean_backward_into(dx: &Tensor, dout: &Tensor, tokens: usize) -> Result<()> {
    let call = Call::new("token_mean_backward");
    mean_or_spread(call, [("dx", dx), ("dout", dout)], tokens, true)
}

/// Both directions, whose kernels have the names of the operations.
fn mean_or_spread<'a>(
    mut call: Call<'a>,
    [to, from]: [(&'static str, &'a Tensor); 2],
    tokens: usize,
    is_backward: bool,
) -> Result<()> {
    let to = call.writes(to.0, to.1);
    let from = call.reads(from.0, from.1);
    let mean_and_all = if is_backward { [from, to] } else { [to, from] };
    let [time, columns] = check_mean(&call, mean_and_all, tokens)?;
    call.run(from, &FLOATS_AND_BF16, |placed| {
        let [mut to, from] = placed.enter([to, from])?;
        if let Some(gpu) = placed.launcher() {
            let args = args![to, from, to.count, columns, time, tokens];
            // A token of the mean after the other, or the mean.
            let loads = if is_backward { 1 } else { tokens };
            let grid = Grid::elements(to.count).rounds_of(loads);
            return gpu.launch(&TOKEN_MEAN, (placed.call.by.op, to.dtype), grid, args);
        }
        let (sizes, size) = ([time, columns, tokens], (time * columns).max(1));
        with_float!(placed.dtype, T => {
            let (to, from) = (to.elements_mut::<T>(), from.elements());
            if is_backward {
                threads::split_mut(to, size, |first, dx| {
                    spread(dx, &from[first / time..], sizes);
                })
            } else {
                threads::split_mut(to, columns.max(1), |first, out| {
                    write_means(out, &from[first * time..], sizes);
                })
            }
        });
        Ok(())
    })
}

/// Checks `mean` (B, C), `all` (B, T, C) and the number of tokens. Gives T and C.
fn check_mean(call: &Call<'_>, [mean, all]: [Slot; 2], tokens: usize) -> Result<[usize; 2]> {
    let [sequences, time, columns] = call.dims::<3>(all, "[sequences, tokens, columns]")?;
    call.has_shape(mean, &[sequences, columns], "[sequences, columns]")?;
    call.same_dtype(mean, all)?;
    call.all_row_major()?;
    if !(1..=time).contains(&tokens) {
        let expected = format!("from 1 to {time}, all tokens of a sequence");
        return Err(call.value("tokens", expected, tokens));
    }
    Ok([time, columns])
}

multiversion! {
    fn write_means[T: Float](out: &mut [T], x: &[T], sizes: [usize; 3]) {
        let [time, columns, tokens] = sizes;
        let count = T::from_f64(tokens as f64);
        let sequences = x.chunks_exact((time * columns).max(1));
        for (out, x) in out.chunks_exact_mut(columns.max(1)).zip(sequences) {
            out.copy_from_slice(&x[..columns]);
            for token in x.chunks_exact(columns).take(tokens).skip(1) {
                for (out, &x) in out.iter_mut().zip(token) {
                    *out = *out + x;
                }
            }
            for out in out {
                *out = *out / count;
            }
        }
    }
}

multiversion! {
    fn spread[T: Float](dx: &mut [T], dout: &[T], sizes: [usize; 3]) {
        let [time, columns, tokens] = sizes;
        let count = T::from_f64(tokens as f64);
        let sequences = dx.chunks_exact_mut((time * columns).max(1));
        for (dx, dout) in sequences.zip(dout.chunks_exact(columns.max(1))) {
            let (mean, rest) = dx.split_at_mut(tokens * columns);
            rest.fill(T::ZERO);
            for token in mean.chunks_exact_mut(columns) {
                for (dx, &dout) in token.iter_mut().zip(dout) {
                    *dx = dout / count;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
