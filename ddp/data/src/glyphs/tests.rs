//! The drawing of one image.

use super::*;

#[test]
fn no_pen_reaches_beyond_the_pixels_that_are_measured() {
    for key in 0..2000 {
        let pen = Pen::draw(&mut Draws(key));
        assert!(
            pen.radius + 0.5 * pen.softness <= REACH,
            "{} {}",
            pen.radius,
            pen.softness
        );
        assert!(pen.radius > 0.6 && pen.ink - pen.paper > 0.6 && pen.softness > 0.7);
    }
}

#[test]
fn a_straight_stroke_is_as_far_away_as_it_is() {
    let mut canvas = Canvas {
        squared: [[f32::MAX; STRIDE]; SIDE],
    };
    canvas.segment([5.0, 3.0], [5.0, 20.0]);
    assert_eq!(canvas.squared[10][5], 0.0);
    assert_eq!(canvas.squared[10][7], 4.0);
    assert_eq!(canvas.squared[22][6], 5.0);
    assert_eq!(canvas.squared[27][5], f32::MAX, "out of any pen's reach");
}

#[test]
fn a_curve_passes_through_its_points() {
    let mut canvas = Canvas {
        squared: [[f32::MAX; STRIDE]; SIDE],
    };
    let points = [[3.0, 3.0], [9.0, 5.0], [14.0, 16.0], [6.0, 22.0]];
    canvas.span([points[0], points[1], points[2], points[3]]);
    assert_eq!((canvas.squared[5][9], canvas.squared[16][14]), (0.0, 0.0));
}

#[test]
fn off_the_canvas_nothing_is_drawn_and_nothing_breaks() {
    let mut canvas = Canvas {
        squared: [[f32::MAX; STRIDE]; SIDE],
    };
    canvas.segment([-40.0, -3.0], [-20.0, 500.0]);
    canvas.segment([60.0, 60.0], [60.0, 60.0]);
    assert!(
        canvas
            .squared
            .iter()
            .flatten()
            .all(|&squared| squared == f32::MAX)
    );
    canvas.segment([-10.0, -10.0], [40.0, 40.0]);
    assert!(canvas.squared[12][12] < 1e-6);
}

#[test]
fn angles_turn_without_changing_lengths() {
    for angle in [-0.25f32, -0.1, 0.0, 0.05, 0.25] {
        let (sine, cosine) = sine_cosine(angle);
        // The first term left out of the sine is x⁵/120 = 8.1e-6 at 0.25, of the cosine x⁶/720 =
        // 3.4e-7; rounding adds 1e-7.
        assert!(
            (sine - angle.sin()).abs() < 8.3e-6 && (cosine - angle.cos()).abs() < 5e-7,
            "{angle}"
        );
    }
}
