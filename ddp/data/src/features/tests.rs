//! What normalization makes of features.

use super::*;

fn moments(rows: &[[f32; 3]]) -> Moments {
    let mut moments = Moments::none(3);
    rows.iter()
        .for_each(|row| moments.merge(&Moments::of_rows(row, 3)));
    moments
}

#[test]
fn features_get_mean_0_and_deviation_1_and_constant_ones_become_0() {
    let rows = [[1.0, 0.1, -3.0], [2.0, 0.1, 5.0], [6.0, 0.1, 7.0]];
    let standard = Normalization::standard(&moments(&rows));
    let mut x = rows.concat();
    standard.apply(&mut x, 3);
    for column in 0..3 {
        let of_column: Vec<f64> = x
            .iter()
            .skip(column)
            .step_by(3)
            .map(|&x| f64::from(x))
            .collect();
        let sum: f64 = of_column.iter().sum();
        let squares: f64 = of_column.iter().map(|x| x * x).sum();
        // Three numbers near 1, each some roundings of f32 off.
        assert!(sum.abs() < 1e-5, "{of_column:?}");
        let expected = if column == 1 { 0.0 } else { 3.0 };
        assert!((squares - expected).abs() < 1e-5, "{of_column:?}");
    }
    assert_eq!((standard.shift[1], standard.scale[1]), (0.1, 1.0));
}

#[test]
fn unit_brings_the_least_to_0_and_the_greatest_to_1() {
    let rows = [[1.0, 0.5, -3.0], [2.0, 0.5, 5.0]];
    let unit = Normalization::unit(&moments(&rows));
    let mut x = rows.concat();
    unit.apply(&mut x, 3);
    assert_eq!((x[2], x[5]), (0.0, 1.0));
    let widest = moments(&[[f32::MIN, f32::MAX, 0.0]]);
    assert!(Normalization::unit(&widest).scale[0] > 0.0);
    let none = Normalization::unit(&moments(&[[4.0; 3]]));
    assert_eq!((none.shift[0], none.scale[0]), (4.0, 1.0));
}

#[test]
fn normalization_is_undone() {
    let mut x = [1.0, 2.0, 3.0, 4.0];
    let of = |shift: &[f32], scale: &[f32]| Normalization::new(shift.into(), scale.into());
    of(&[10.0, 5.0], &[0.5, 0.0]).undo(&mut x, 2);
    assert_eq!(x, [12.0, 5.0, 16.0, 5.0]);
    of(&[1.0], &[2.0]).undo(&mut x, 2);
    assert_eq!(x, [7.0, 3.5, 9.0, 3.5]);
    // Predictions stay within what was trained on; labels do not.
    let mut targets = of(&[1.0, 0.0], &[1.0, 2.0]);
    targets.range = vec![[0.0, 4.0], [-1.0, 1.0]];
    let mut x = [9.0, f32::NAN, -9.0, -8.0];
    targets.undo_clipped(&mut x, 2);
    assert_eq!([x[0], x[2], x[3]], [4.0, 0.0, -1.0]);
    assert!(x[1].is_nan());
}

#[test]
fn bytes_become_at_most_1() {
    let mut x = [0.0, 255.0];
    Normalization::of_bytes().apply(&mut x, 2);
    assert_eq!(x, [0.0, 1.0]);
}
