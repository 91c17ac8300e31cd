//! Rows of features as small pictures: recognizes image shapes and scales images down.

use serde::{Deserialize, Serialize};

/// The smallest side of a picture.
const SIDE_MIN: usize = 8;
/// Larger pictures are scaled down.
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
    /// Row by row; the channels of a pixel are adjacent.
    pub pixels: Vec<u8>,
}

/// Where the pixels of a picture lie in a row of features.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Layout {
    width: usize,
    height: usize,
    channels: usize,
    /// The distances between pixels and between channels.
    strides: [usize; 2],
}

impl Picture {
    /// Whether the number of pixels matches the sizes.
    pub(super) fn is_sound(&self) -> bool {
        let sides = [self.width, self.height];
        sides.iter().all(|side| (1..=SIDE_MAX).contains(side))
            && matches!(self.channels, 1 | 3)
            && self.pixels.len() == self.width * self.height * self.channels
    }

    /// The rows in `x` as pictures, if their shape is that of pictures. Black is the lowest of all
    /// values, white the highest.
    pub(super) fn of_rows(row_shape: &[usize], x: &[f32]) -> Option<Vec<Picture>> {
        let layout = Layout::of(row_shape)?;
        let finite = || x.iter().copied().filter(|value| value.is_finite());
        let low = f64::from(finite().fold(f32::INFINITY, f32::min));
        let high = f64::from(finite().fold(f32::NEG_INFINITY, f32::max));
        let per_level = 255.0 / (high - low).max(f64::MIN_POSITIVE);
        let level = |value: f64| ((value - low) * per_level).round().clamp(0.0, 255.0) as u8;
        let rows = x.chunks_exact(row_shape.iter().product());
        Some(rows.map(|row| layout.picture(row, &level)).collect())
    }
}

impl Layout {
    /// `[H, W]`, `[C, H, W]` and `[H, W, C]`, and flat rows of a square of pixels.
    fn of(row_shape: &[usize]) -> Option<Layout> {
        let (height, width, channels, is_mixed) = match *row_shape {
            [height, width] => (height, width, 1, false),
            [channels @ (1 | 3), height, width] => (height, width, channels, false),
            [height, width, channels @ (1 | 3)] => (height, width, channels, true),
            [count] if count.isqrt().pow(2) == count => (count.isqrt(), count.isqrt(), 1, false),
            _ => return None,
        };
        let strides = if is_mixed {
            [channels, 1]
        } else {
            [1, width * height]
        };
        (height.min(width) >= SIDE_MIN).then_some(Layout {
            width,
            height,
            channels,
            strides,
        })
    }

    fn picture(&self, row: &[f32], level: &dyn Fn(f64) -> u8) -> Picture {
        let by = self.width.max(self.height).div_ceil(SIDE_MAX);
        let (width, height) = (self.width.div_ceil(by), self.height.div_ceil(by));
        let mut pixels = Vec::with_capacity(width * height * self.channels);
        for pixel in 0..width * height * self.channels {
            let (place, channel) = (pixel / self.channels, pixel % self.channels);
            let (line, column) = (place / width * by, place % width * by);
            let (mut sum, mut count) = (0.0, 0.0);
            for line in line..(line + by).min(self.height) {
                for column in column..(column + by).min(self.width) {
                    let place = line * self.width + column;
                    let at = place * self.strides[0] + channel * self.strides[1];
                    sum += f64::from(row[at]);
                    count += 1.0;
                }
            }
            pixels.push(level(sum / count));
        }
        Picture {
            width,
            height,
            channels: self.channels,
            pixels,
        }
    }
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
        assert_eq!(sizes(&[130, 60]), Some((20, 44, 1)));
        for shape in [
            &[30][..],
            &[16],
            &[4, 9],
            &[2, 28, 28],
            &[785],
            &[3072],
            &[0],
        ] {
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
}
