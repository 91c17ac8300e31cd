//! Draws digits of 28×28 grey pixels that look handwritten: one image from a key.
//!
//! Each digit has a few styles (`glyphs/strokes.txt`). An image takes one, moves its control
//! points, rotates, slants, scales and shifts it, and draws it with a pen of random width and
//! softness, under noise.
//!
//! An image is a field of squared distances to the nearest stroke, shaded by a pen. It uses only +,
//! −, ×, ÷ and square roots, whose bits are the same on every machine. About 50 short segments each
//! touch only the pixels around them.

use std::sync::LazyLock;

use crate::sampler::Draws;

/// Pixels along a side of an image.
pub(crate) const SIDE: usize = 28;
/// Pixels of an image.
pub(crate) const PIXELS: usize = SIDE * SIDE;
/// One image: grey levels row by row, 0 for paper and 255 for the darkest ink.
pub(crate) type Image = [u8; PIXELS];

/// Segments between two points of a curve.
const SEGMENTS: usize = 4;
/// Pixels around a segment that the widest pen with the softest edge can reach, see `Pen::draw`.
const REACH: f32 = 2.6;
/// Pixels measured at a time.
const LANES: usize = 8;
/// Length of a canvas row: a group of lanes may begin at any pixel.
const STRIDE: usize = SIDE + LANES;

/// The digit that the image of `key` shows.
pub(crate) fn digit(key: u64) -> u8 {
    Draws(key).below(10) as u8
}

/// The image of `key`.
pub(crate) fn draw(key: u64) -> Image {
    let mut draws = Draws(key);
    let styles = &DIGITS[draws.below(10) as usize];
    let strokes = &styles[draws.below(styles.len() as u64) as usize];
    let place = Placing::draw(&mut draws);
    let pen = Pen::draw(&mut draws);
    let mut canvas = Canvas {
        squared: [[f32::MAX; STRIDE]; SIDE],
    };
    for stroke in strokes {
        canvas.stroke(stroke, &place, &mut draws);
    }
    canvas.shade(&pen, &mut draws)
}

/// Maps a digit's coordinates to pixels: scale, slant, rotation, shift.
struct Placing {
    matrix: [[f32; 2]; 2],
    shift: [f32; 2],
    /// How far a control point may move, in the digit's coordinates.
    unsteady: f32,
}

impl Placing {
    fn draw(draws: &mut Draws) -> Placing {
        let height = 18.0 + 4.0 * draws.signed();
        let width = height * (1.0 + 0.25 * draws.signed());
        let slant = 0.1 + 0.35 * draws.signed();
        let (sine, cosine) = sine_cosine(0.25 * draws.signed());
        // x' = width·x − slant·height·y, y' = height·y, then rotated.
        let (across, up) = ([width, 0.0], [-slant * height, height]);
        let turn = |[x, y]: [f32; 2]| [cosine * x - sine * y, sine * x + cosine * y];
        let (across, up) = (turn(across), turn(up));
        let middle = (SIDE as f32 - 1.0) * 0.5;
        let shift = [middle + 3.0 * draws.signed(), middle + 3.0 * draws.signed()];
        Placing {
            matrix: [[across[0], up[0]], [across[1], up[1]]],
            shift,
            unsteady: 0.06,
        }
    }

    fn place(&self, point: [f32; 2], draws: &mut Draws) -> [f32; 2] {
        let [x, y] = point.map(|coordinate| coordinate + self.unsteady * draws.signed());
        let row = |index: usize| {
            self.matrix[index][0] * x + self.matrix[index][1] * y + self.shift[index]
        };
        [row(0), row(1)]
    }
}

/// Sine and cosine of a small angle by their first terms; the error at 0.25 radians is below 10⁻⁵.
fn sine_cosine(angle: f32) -> (f32, f32) {
    let square = angle * angle;
    (
        angle * (1.0 - square * (1.0 / 6.0)),
        1.0 - square * 0.5 + square * square * (1.0 / 24.0),
    )
}

/// Pen and paper.
struct Pen {
    /// Half the width of a stroke, in pixels.
    radius: f32,
    /// The width of its soft edge, in pixels.
    softness: f32,
    ink: f32,
    paper: f32,
    grain: f32,
    speckles: u64,
}

impl Pen {
    fn draw(draws: &mut Draws) -> Pen {
        Pen {
            // The widest with the softest edge reaches 1.7 + 0.9 = REACH.
            radius: 1.2 + 0.5 * draws.signed(),
            softness: 1.3 + 0.5 * draws.signed(),
            ink: 0.85 + 0.15 * draws.signed(),
            paper: 0.05 * draws.unit(),
            grain: 0.12 * draws.unit(),
            speckles: draws.below(9),
        }
    }
}

/// For every pixel, the squared distance to the nearest stroke so far.
struct Canvas {
    squared: [[f32; STRIDE]; SIDE],
}

impl Canvas {
    fn stroke(&mut self, stroke: &Stroke, place: &Placing, draws: &mut Draws) {
        // A window of four points moves along the stroke; at the ends the end point is repeated.
        let mut points = stroke.points.iter().map(|&point| place.place(point, draws));
        let Some(first) = points.next() else { return };
        let mut before = first;
        let mut from = first;
        let mut to = points.next().unwrap_or(first);
        loop {
            let next = points.next();
            let after = next.unwrap_or(to);
            if stroke.smooth {
                self.span([before, from, to, after]);
            } else {
                self.segment(from, to);
            }
            let Some(next) = next else { return };
            (before, from, to) = (from, to, next);
        }
    }

    /// The Catmull–Rom curve from the second point to the third.
    fn span(&mut self, [before, from, to, after]: [[f32; 2]; 4]) {
        let mut last = from;
        for step in 1..=SEGMENTS {
            let t = step as f32 * (1.0 / SEGMENTS as f32);
            let (t2, t3) = (t * t, t * t * t);
            let weights = [
                0.5 * (2.0 * t2 - t3 - t),
                0.5 * (3.0 * t3 - 5.0 * t2 + 2.0),
                0.5 * (4.0 * t2 - 3.0 * t3 + t),
                0.5 * (t3 - t2),
            ];
            let at = |axis: usize| {
                weights[0] * before[axis]
                    + weights[1] * from[axis]
                    + weights[2] * to[axis]
                    + weights[3] * after[axis]
            };
            let next = [at(0), at(1)];
            self.segment(last, next);
            last = next;
        }
    }

    fn segment(&mut self, a: [f32; 2], b: [f32; 2]) {
        let (dx, dy) = (b[0] - a[0], b[1] - a[1]);
        let square = dx * dx + dy * dy;
        let inverse = if square > 1e-12 { 1.0 / square } else { 0.0 };
        let (Some(columns), Some(rows)) = (reach(a[0], b[0]), reach(a[1], b[1])) else {
            return;
        };
        for row in rows.0..=rows.1 {
            let y = row as f32 - a[1];
            let along_y = y * dy;
            let mut column = columns.0;
            while column <= columns.1 {
                let start = column as f32 - a[0];
                let group = self.squared[row][column..].first_chunk_mut::<LANES>();
                let group = group.expect("a row has room for a group");
                let mut lane = 0;
                while lane < LANES {
                    let x = start + lane as f32;
                    let t = in_unit((x * dx + along_y) * inverse);
                    let (off_x, off_y) = (x - t * dx, y - t * dy);
                    let distance = off_x * off_x + off_y * off_y;
                    let nearest = group[lane];
                    group[lane] = if distance < nearest {
                        distance
                    } else {
                        nearest
                    };
                    lane += 1;
                }
                column += LANES;
            }
        }
    }

    /// Turns distances into grey levels.
    fn shade(&self, pen: &Pen, draws: &mut Draws) -> Image {
        let mut image = [0; PIXELS];
        let mut noise = [0f32; PIXELS];
        for group in noise.as_chunks_mut::<8>().0 {
            let bytes = draws.bits().to_le_bytes();
            let mut at = 0;
            while at < 8 {
                group[at] = (f32::from(bytes[at]) - 127.5) * (1.0 / 127.5);
                at += 1;
            }
        }
        let sharpness = 1.0 / pen.softness;
        let rows = image.as_chunks_mut::<SIDE>().0.iter_mut();
        let rows = rows.zip(noise.as_chunks::<SIDE>().0).zip(&self.squared);
        for ((image, noise), squared) in rows {
            let mut column = 0;
            while column < SIDE {
                let off = pen.radius - squared[column].sqrt();
                let cover = in_unit(off * sharpness + 0.5);
                let smooth = cover * cover * (3.0 - 2.0 * cover);
                let grain = pen.grain * noise[column];
                let level = pen.paper + (pen.ink - pen.paper) * smooth + grain;
                image[column] = (in_unit(level) * 255.0 + 0.5) as u8;
                column += 1;
            }
        }
        for _ in 0..pen.speckles {
            image[draws.below(PIXELS as u64) as usize] = draws.below(256) as u8;
        }
        image
    }
}

/// `x.clamp(0.0, 1.0)`, faster in code that is not optimized, as loops by index are here: most
/// tests train on glyphs.
fn in_unit(x: f32) -> f32 {
    let x = if x < 0.0 { 0.0 } else { x };
    if x > 1.0 { 1.0 } else { x }
}

/// First and last pixel that a segment between these coordinates can reach; `None` if off the
/// canvas.
fn reach(a: f32, b: f32) -> Option<(usize, usize)> {
    let (low, high) = (a.min(b) - REACH, a.max(b) + REACH);
    let last = (SIDE - 1) as f32;
    // Casts truncate towards zero; one extra pixel at the low end is harmless.
    (high >= 0.0 && low <= last).then(|| (low.max(0.0) as usize, high.min(last) as usize))
}

/// One movement of the pen.
struct Stroke {
    /// Whether the pen follows a smooth curve through the points, or straight lines between them.
    smooth: bool,
    /// (x, y) around the middle of the digit, y downwards.
    points: Vec<[f32; 2]>,
}

/// The strokes of one way to write a digit.
type Style = Vec<Stroke>;

/// The styles of every digit.
static DIGITS: LazyLock<[Vec<Style>; 10]> =
    LazyLock::new(|| parse(include_str!("glyphs/strokes.txt")));

fn parse(text: &str) -> [Vec<Style>; 10] {
    let mut digits: [Vec<Style>; 10] = Default::default();
    let mut last_style = "";
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let mut words = line.split(' ');
        let mut word = || words.next().expect("digit, style, kind, points");
        let (digit, style, kind) = (word(), word(), word());
        let styles = &mut digits[digit.parse::<usize>().expect("a digit")];
        if styles.is_empty() || style != last_style {
            styles.push(Style::new());
            last_style = style;
        }
        let number = |text: &str| text.parse::<f32>().expect("a coordinate");
        let point = |word: &str| {
            let (x, y) = word.split_once(',').expect("x,y");
            [number(x), number(y)]
        };
        let (smooth, points) = (kind == "curve", words.map(point).collect());
        let style = styles.last_mut().expect("pushed above");
        style.push(Stroke { smooth, points });
    }
    digits
}

#[cfg(test)]
mod tests;
