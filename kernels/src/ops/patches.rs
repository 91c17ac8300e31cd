//! patches: the pixels of each image, patch by patch, as a transformer reads them. Backward puts
//! gradients back where the pixels lie. Nothing is computed.
//!
//! Letters: B images, P pixels of an image with all their channels, T tokens of an image, K numbers
//! of a patch.

use crate::error::Result;
use crate::launch::{Grid, Launcher, Source, args};
use crate::ops::call::{Buffer, Call, FLOATS_AND_BF16, Slot, with_float};
use crate::{Tensor, threads};

static SOURCE: Source = Source::new("patches.cu", include_str!("patches.cu"));

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
        Some(match self.channels_last {
            true => (line * self.width + column) * self.channels + channel,
            false => (channel * self.height + line) * self.width + column,
        })
    }
}

/// Writes the patches of `x` (B, P) to `out` (B, T, K): row by row of patches, after the leading
/// tokens of zeros.
#[track_caller]
pub fn patches_into(out: &Tensor, x: &Tensor, patches: &Patches) -> Result<()> {
    let mut call = Call::new("patches");
    let out = call.writes("out", out);
    let x = call.reads("x", x);
    check(&call, [x, out], patches)?;
    call.run(x, &FLOATS_AND_BF16, |placed| {
        let [mut out, x] = placed.enter([out, x])?;
        if let Some(gpu) = placed.launcher() {
            return launch(&gpu, "patches", [&x, &out], patches);
        }
        let (pixels, places) = (patches.pixels(), patches.tokens() * patches.columns());
        with_float!(placed.dtype, T => {
            let x = x.elements::<T>();
            threads::split_mut(out.elements_mut::<T>(), places, |first, out| {
                let x = x[first / places * pixels..].chunks_exact(pixels);
                for (out, x) in out.chunks_exact_mut(places).zip(x) {
                    for (place, out) in out.iter_mut().enumerate() {
                        *out = patches.pixel(place).map_or(T::ZERO, |pixel| x[pixel]);
                    }
                }
            });
        });
        Ok(())
    })
}

/// The gradient `dx` (B, P) of `x` from `dout` (B, T, K).
#[track_caller]
pub fn patches_backward_into(dx: &Tensor, dout: &Tensor, patches: &Patches) -> Result<()> {
    let mut call = Call::new("patches_backward");
    let dx = call.writes("dx", dx);
    let dout = call.reads("dout", dout);
    check(&call, [dx, dout], patches)?;
    call.run(dout, &FLOATS_AND_BF16, |placed| {
        let [mut dx, dout] = placed.enter([dx, dout])?;
        if let Some(gpu) = placed.launcher() {
            return launch(&gpu, "patches_backward", [&dx, &dout], patches);
        }
        let (pixels, places) = (patches.pixels(), patches.tokens() * patches.columns());
        with_float!(placed.dtype, T => {
            let dout = dout.elements::<T>();
            threads::split_mut(dx.elements_mut::<T>(), pixels, |first, dx| {
                let dout = dout[first / pixels * places..].chunks_exact(places);
                for (dx, dout) in dx.chunks_exact_mut(pixels).zip(dout) {
                    for (place, &dout) in dout.iter().enumerate() {
                        if let Some(pixel) = patches.pixel(place) {
                            dx[pixel] = dout;
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
        return Err(call.by.value("patch", expected, patches.patch));
    }
    let [images, _] = call.dims::<2>(image, "[images, pixels]")?;
    call.has_shape(image, &[images, patches.pixels()], "[images, pixels]")?;
    let shape = [images, patches.tokens(), patches.columns()];
    call.has_shape(tokens, &shape, "[images, tokens, numbers of a patch]")?;
    call.same_dtype(tokens, image)?;
    call.all_row_major()
}

/// A kernel with a thread for each element of `tokens`.
fn launch(
    gpu: &Launcher,
    name: &'static str,
    [image, tokens]: [&Buffer<'_>; 2],
    patches: &Patches,
) -> Result<()> {
    let &Patches { patch, leading, .. } = patches;
    let sides = [patches.channels, patches.height, patches.width];
    let ([channels, height, width], last) = (sides, patches.channels_last);
    let count = tokens.count;
    let args = args![
        image, tokens, count, channels, height, width, last, patch, leading
    ];
    let grid = Grid::elements(tokens.count);
    gpu.launch(&SOURCE, (name, tokens.dtype), grid, args)
}

#[cfg(test)]
mod tests;
