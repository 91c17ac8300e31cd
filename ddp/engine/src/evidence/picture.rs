//! Rows of features as small pictures: recognizing image shapes and scaling images down.

use serde::{Deserialize, Serialize};

/// Rows that may be a picture have at least as many pixels a side.
const SIDE_MIN: usize = 8;
/// Larger pictures are made smaller.
const SIDE_MAX: usize = 64;

/// A picture of 8-bit grey (one channel) or red, green and blue (three).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Picture {
    /// In pixels.
    pub width: usize,
    /// In pixels.
    pub height: usize,
    /// 1 or 3.
    pub channels: usize,
    /// Row by row, channels side by side.
    pub pixels: Vec<u8>,
}

/// Where the pixels of a picture lie in a row of features.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Layout {
    width: usize,
    height: usize,
    channels: usize,
    /// From one pixel to the next, and from one channel to the next.
    strides: [usize; 2],
}

impl Picture {
    /// Whether the pixels are as many as the sizes say.
    pub(super) fn is_sound(&self) -> bool {
        let sides = [self.width, self.height];
        sides.iter().all(|side| (1..=SIDE_MAX).contains(side))
            && matches!(self.channels, 1 | 3)
            && self.pixels.len() == self.width * self.height * self.channels
    }

    /// The rows in `x` as pictures, if they have the shape of pictures. Black is the lowest of all
    /// values, white the highest.
    pub(super) fn of_rows(row_shape: &[usize], x: &[f32]) -> Option<Vec<Picture>> {
        let layout = Layout::of(row_shape, x)?;
        let finite = || x.iter().copied().filter(|value| value.is_finite());
        let (low, high) = (
            finite().fold(f32::INFINITY, f32::min),
            finite().fold(f32::NEG_INFINITY, f32::max),
        );
        let per_level = 255.0 / (f64::from(high) - f64::from(low)).max(f64::MIN_POSITIVE);
        let level = |value: f64| {
            ((value - f64::from(low)) * per_level)
                .round()
                .clamp(0.0, 255.0) as u8
        };
        let features: usize = row_shape.iter().product();
        Some(
            x.chunks_exact(features)
                .map(|row| layout.picture(row, &level))
                .collect(),
        )
    }
}

impl Layout {
    /// `[H, W]`, `[C, H, W]` and `[H, W, C]`, and flat rows of a square of pixels or three of them.
    fn of(row_shape: &[usize], x: &[f32]) -> Option<Layout> {
        let planes = |channels, height, width| Layout {
            width,
            height,
            channels,
            strides: [1, width * height],
        };
        let mixed = |channels, height, width| Layout {
            width,
            height,
            channels,
            strides: [channels, 1],
        };
        let is_side = |side: usize| side >= SIDE_MIN;
        match *row_shape {
            [height, width] if is_side(height) && is_side(width) => Some(planes(1, height, width)),
            [channels @ (1 | 3), height, width] if is_side(height) && is_side(width) => {
                Some(planes(channels, height, width))
            }
            [height, width, channels @ (1 | 3)] if is_side(height) && is_side(width) => {
                Some(mixed(channels, height, width))
            }
            [count] => match (
                side_of(count),
                side_of(count / 3).filter(|_| count.is_multiple_of(3)),
            ) {
                (Some(side), _) => Some(planes(1, side, side)),
                (_, Some(side)) if are_planes(x, count) => Some(planes(3, side, side)),
                (_, Some(side)) => Some(mixed(3, side, side)),
                _ => None,
            },
            _ => None,
        }
    }

    fn picture(&self, row: &[f32], level: &dyn Fn(f64) -> u8) -> Picture {
        let by = self.width.max(self.height).div_ceil(SIDE_MAX);
        let (width, height) = (self.width.div_ceil(by), self.height.div_ceil(by));
        let mut pixels = Vec::with_capacity(width * height * self.channels);
        for (line, column) in
            (0..height).flat_map(|line| (0..width).map(move |column| (line, column)))
        {
            for channel in 0..self.channels {
                let lines = line * by..((line + 1) * by).min(self.height);
                let columns = column * by..((column + 1) * by).min(self.width);
                let places = lines.flat_map(|line| {
                    columns
                        .clone()
                        .map(move |column| line * self.width + column)
                });
                let (sum, count) = places.fold((0.0, 0.0), |(sum, count), place| {
                    (
                        sum + f64::from(row[place * self.strides[0] + channel * self.strides[1]]),
                        count + 1.0,
                    )
                });
                pixels.push(level(sum / count));
            }
        }
        Picture {
            width,
            height,
            channels: self.channels,
            pixels,
        }
    }
}

fn side_of(pixels: usize) -> Option<usize> {
    let side = pixels.isqrt();
    (side * side == pixels && side >= SIDE_MIN).then_some(side)
}

/// Whether each colour is a plane of its own, or colours are side by side in each pixel: neighbours
/// in a picture are alike.
fn are_planes(x: &[f32], features: usize) -> bool {
    let apart = |distance: usize| -> f64 {
        let differences = |row: &[f32]| {
            row.iter()
                .zip(&row[distance..])
                .map(|(a, b)| f64::from((a - b).abs()))
                .sum::<f64>()
        };
        x.chunks_exact(features).map(differences).sum()
    };
    apart(1) <= apart(3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_pictures_if_their_shape_is_one() {
        let sizes = |shape: &[usize]| {
            let x = vec![0.5; shape.iter().product()];
            Picture::of_rows(shape, &x)
                .map(|pictures| (pictures[0].width, pictures[0].height, pictures[0].channels))
        };
        assert_eq!(sizes(&[784]), Some((28, 28, 1)));
        assert_eq!(sizes(&[28, 20]), Some((20, 28, 1)));
        assert_eq!(sizes(&[3, 32, 16]), Some((16, 32, 3)));
        assert_eq!(sizes(&[32, 16, 3]), Some((16, 32, 3)));
        assert_eq!(sizes(&[3072]), Some((32, 32, 3)));
        assert_eq!(sizes(&[130, 60]), Some((20, 44, 1)));
        for shape in [&[30][..], &[16], &[4, 9], &[2, 28, 28], &[785], &[0]] {
            assert_eq!(sizes(shape), None, "{shape:?}");
        }
    }

    #[test]
    fn grey_goes_from_the_lowest_to_the_highest_of_all_rows() {
        let mut x = vec![-1.0; 128];
        (x[0], x[64], x[127]) = (0.0, 1.0, f32::NAN);
        let pictures = Picture::of_rows(&[64], &x).unwrap();
        assert_eq!(
            (&pictures[0].pixels[..2], pictures[1].pixels[0]),
            (&[128, 0][..], 255)
        );
        assert!(pictures.iter().all(Picture::is_sound));
        assert_eq!(
            Picture::of_rows(&[64], &[3.0; 64]).unwrap()[0].pixels,
            [0; 64]
        );
    }

    #[test]
    fn colours_are_found_in_planes_and_in_pixels() {
        // A picture that goes from dark to bright, red 0, green 100, blue 50 higher.
        let value = |pixel: usize, channel: usize| pixel as f32 / 4.0 + [0.0, 100.0, 50.0][channel];
        let planes: Vec<f32> = (0..192)
            .map(|index| value(index % 64, index / 64))
            .collect();
        let mixed: Vec<f32> = (0..192).map(|index| value(index / 3, index % 3)).collect();
        assert!(are_planes(&planes, 192) && !are_planes(&mixed, 192));
        let pictures = [planes, mixed].map(|x| Picture::of_rows(&[192], &x).unwrap().remove(0));
        assert_eq!(pictures[0], pictures[1]);
        assert!(
            pictures[0].pixels[1] > pictures[0].pixels[2]
                && pictures[0].pixels[2] > pictures[0].pixels[0]
        );
    }
}
