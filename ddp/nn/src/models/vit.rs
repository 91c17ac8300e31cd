//! The family `vit`: a transformer over the patches of images, in which each patch sees all others.

pub use super::blocks::RecomputeKind;

use ddp_kernels::{DType, choices};

use super::blocks::{Blocks, GptSpec, MlpKind, SIZE_MAX};
use super::family::{DataShape, Family, check_size, refuse};
use crate::error::{IMAGE, Result};
use crate::{Init, Linear, Module, Scope, Sequential, Var, family_settings};

family_settings! {
    /// Settings of a transformer over patches.
    pub struct VitSpec {
        /// Blocks of attention and perceptron
        layers "N": usize = 4;
        /// Heads of attention
        heads "N": usize = 4;
        /// Columns of the residual stream
        width "N": usize = 128;
        /// Width of the perceptrons; 0 for 4 times `width`
        mlp_width "N": usize = 0;
        /// Side of a square patch, in pixels
        patch "N": usize = 4;
        /// What the classifier sees
        pool "WHAT": Pool = Pool::Mean;
        /// Shape of an image, as in 28x28, 3x32x32 (planes) or 32x32x3, where the data do not say
        /// it
        image "SHAPE": String = String::new();
        /// Probability of dropping an element
        dropout "P": f64 = 0.0;
        /// What backward computes again instead of keeping it: less memory, same bits, more time
        recompute "WHAT": RecomputeKind = RecomputeKind::None, changes_results: false;
        /// How many blocks `recompute`, counted from the first; 0 for all
        recompute_blocks "N": usize = 0, changes_results: false;
    }
}

choices! {
    /// What the classifier of a transformer over patches sees.
    #[derive(Default)]
    pub enum Pool {
        /// The mean of all patches
        #[default]
        Mean = "mean",
        /// One more token, before the patches
        Class = "class",
    }
}

impl Family for VitSpec {
    fn name(&self) -> &'static str {
        "vit"
    }

    fn help(&self) -> &'static str {
        "A transformer over the patches of images"
    }

    fn check(&self) -> Result<()> {
        self.blocks().check()?;
        check_size("patch", self.patch, SIZE_MAX)?;
        self.given_image().map(drop)
    }

    fn flop_of_a_row(&self, data: &DataShape<'_>) -> Option<f64> {
        let patches = self.patches(data).ok()?;
        let (tokens, width) = (patches.tokens() as f64, self.width as f64);
        let of_a_token = self.blocks().flop_of_a_token(patches.tokens());
        // The first layer has no gradient of its input.
        let embedding = 4.0 * patches.columns() as f64 * width;
        Some(tokens * (of_a_token + embedding) + 6.0 * width * data.outputs as f64)
    }

    fn layers(&self, data: &DataShape<'_>) -> Result<Sequential> {
        data.check_dtype(DType::F32, "vit")?;
        let (blocks, patches) = (self.blocks(), self.patches(data)?);
        let mut layers = Sequential::new();
        let columns = self.width;
        layers.push_named("embedding", Box::new(PatchEmbedding { patches, columns }));
        blocks.push_dropout(&mut layers);
        blocks.push(&mut layers)?;
        let tokens = match self.pool {
            Pool::Mean => patches.tokens(),
            Pool::Class => 1,
        };
        Ok(layers
            .named("pool", MeanOfTokens(tokens))
            .named("head", Linear::new(data.outputs).outer()))
    }
}

impl VitSpec {
    fn blocks(&self) -> Blocks {
        let spec = GptSpec {
            layers: self.layers,
            heads: self.heads,
            width: self.width,
            mlp_width: self.mlp_width,
            mlp: MlpKind::Gelu,
            dropout: self.dropout,
            recompute: self.recompute,
            recompute_blocks: self.recompute_blocks,
            ..GptSpec::default()
        };
        Blocks {
            spec,
            causal: false,
            deviation: None,
        }
    }

    /// The lengths in `image`; none if it is empty.
    fn given_image(&self) -> Result<Vec<usize>> {
        if self.image.is_empty() {
            return Ok(Vec::new());
        }
        let length = |text: &str| text.parse().ok().filter(|at| (1..=SIZE_MAX).contains(at));
        let lengths: Option<Vec<usize>> = self.image.split('x').map(length).collect();
        lengths.ok_or_else(|| {
            let expected = "lengths with x between them";
            refuse("image", &self.image, expected, "as in 28x28 or 3x32x32")
        })
    }

    /// How the images of these data are cut.
    fn patches(&self, data: &DataShape<'_>) -> Result<Patches> {
        let given = self.given_image()?;
        let shapes = [&given, data.image, data.row_shape];
        let shape = shapes.into_iter().find(|shape| !shape.is_empty());
        let shape = shape.unwrap_or_default();
        let text = shape.iter().map(usize::to_string).collect::<Vec<_>>();
        let (text, pixels) = (text.join("x"), data.row_shape.iter().product::<usize>());
        let all = |shape: &[usize]| {
            shape
                .iter()
                .try_fold(1usize, |all, &one| all.checked_mul(one))
        };
        if all(shape) != Some(pixels) {
            let expected = format!("the shape of the {pixels} numbers of a row");
            let help = "give HEIGHTxWIDTH, CHANNELSxHEIGHTxWIDTH or HEIGHTxWIDTHxCHANNELS";
            return Err(refuse("image", text, &expected, help));
        }
        let Some(layout) = layout(shape) else {
            let from_data = if given.is_empty() {
                " (from the data)"
            } else {
                ""
            };
            return Err(no_image(&format!("{text}{from_data}"), pixels));
        };
        if let [3, _, 3] = shape {
            let expected = "channels on one side only";
            let help = "crop or pad the images: a side of 3 pixels may be taken for channels";
            return Err(refuse("image", text, expected, help));
        }
        if self::layout(data.image).is_some_and(|of_data| of_data != layout) {
            let expected = format!("the shape that the data have, {:?}", data.image);
            let help = format!("leave {IMAGE} out, or give images of this shape");
            return Err(refuse("image", text, &expected, &help));
        }
        let (channels, height, width, channels_last) = layout;
        if !(height.is_multiple_of(self.patch) && width.is_multiple_of(self.patch)) {
            let expected = format!("a divisor of the sides of the images, {text}");
            let nearest = nearest_patches(self.patch, height, width);
            let help = format!("next to it: {nearest}");
            return Err(refuse("patch", self.patch, &expected, &help));
        }
        Ok(Patches {
            channels,
            height,
            width,
            channels_last,
            patch: self.patch,
            leading: usize::from(self.pool == Pool::Class),
        })
    }
}

/// How images are cut into square patches.
#[derive(Clone, Copy, Debug)]
struct Patches {
    channels: usize,
    /// In pixels; multiples of `patch`.
    height: usize,
    width: usize,
    /// Whether the channels of a pixel are adjacent. Otherwise each channel is a plane.
    channels_last: bool,
    /// The side of a patch, in pixels.
    patch: usize,
    /// Tokens of zeros before those of the patches.
    leading: usize,
}

impl Patches {
    fn pixels(&self) -> usize {
        self.channels * self.height * self.width
    }

    fn tokens(&self) -> usize {
        self.leading + (self.height / self.patch) * (self.width / self.patch)
    }

    /// Of a patch: by channel, by line, by column, as a weight of `torch.nn.Conv2d`.
    fn columns(&self) -> usize {
        self.channels * self.patch * self.patch
    }
}

/// Channels, height, width and whether channels come last, if this is the shape of an image.
fn layout(shape: &[usize]) -> Option<(usize, usize, usize, bool)> {
    match *shape {
        [height, width] | [1, height, width] | [height, width, 1] => {
            Some((1, height, width, false))
        }
        [3, height, width] => Some((3, height, width, false)),
        [height, width, 3] => Some((3, height, width, true)),
        _ => None,
    }
}

/// The refusal of rows that are not images.
fn no_image(text: &str, pixels: usize) -> crate::error::Error {
    let side = pixels.isqrt();
    let help = if side * side == pixels {
        format!("if they are square, grey images, give {IMAGE} {side}x{side}")
    } else {
        format!("give {IMAGE} HEIGHTxWIDTH, CHANNELSxHEIGHTxWIDTH or HEIGHTxWIDTHxCHANNELS")
    };
    let expected = "the shape of an image of one channel or three";
    refuse("image", text, expected, &help)
}

/// The sides of patches that divide an image next to `patch`, which does not.
fn nearest_patches(patch: usize, height: usize, width: usize) -> String {
    let divides = |side: &usize| height.is_multiple_of(*side) && width.is_multiple_of(*side);
    let below = (1..patch.min(height + 1)).rev().find(divides);
    let above = (patch + 1..=height.min(width)).find(divides);
    let sides = below.into_iter().chain(above).map(|side| side.to_string());
    sides.collect::<Vec<_>>().join(" and ")
}

/// Cuts images into patches, of which a linear layer, "patches", makes tokens, and adds
/// "positions.weight" (T, C). A leading token has a patch of zeros: its content is learned by its
/// position.
#[derive(Debug)]
struct PatchEmbedding {
    patches: Patches,
    columns: usize,
}

impl Module for PatchEmbedding {
    fn forward(&self, m: &mut Scope<'_>, x: &Var) -> Var {
        let of = &self.patches;
        if x.row_shape().iter().product::<usize>() != of.pixels() {
            let expected = format!("images of {} numbers", of.pixels());
            let help = "build it for the images of the data";
            return x.refuse("patches", &[x], &expected, help);
        }
        let (side, down, across) = (of.patch, of.height / of.patch, of.width / of.patch);
        // Rows and columns of patches, then within one: channels, rows, columns.
        let images = if of.channels_last {
            x.reshape(&[down, side, across, side, of.channels])
                .permute(&[0, 1, 3, 5, 2, 4])
        } else {
            x.reshape(&[of.channels, down, side, across, side])
                .permute(&[0, 2, 4, 1, 3, 5])
        };
        let patches = images.reshape(&[down * across, of.columns()]);
        let patches = patches.pad(1, of.leading, 0);
        let tokens = m.layer("patches", &patches, Linear::new(self.columns).outer());
        // As large as tokens, so that the first steps see where a patch is.
        let init = Init::Normal { deviation: 0.5 };
        tokens + m.parameter("positions.weight", &[of.tokens(), self.columns], init)
    }
}

/// The mean of the first tokens of each image: (B, T, C) to (B, C).
#[derive(Debug)]
struct MeanOfTokens(usize);

impl Module for MeanOfTokens {
    fn forward(&self, _: &mut Scope<'_>, x: &Var) -> Var {
        let mean = x.slice(1, 0..self.0).mean(1);
        mean.reshape(&[x.size(-1)])
    }
}

#[cfg(test)]
mod tests;
