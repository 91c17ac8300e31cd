//! Every row is on one side of a split.

use proptest::prelude::*;

use super::super::*;

proptest! {
    #[test]
    fn a_stratified_split_takes_a_share_of_each_class(
        classes in prop::collection::vec(0i64..4, 2..300), fraction in 0.001f64..0.999, seed: u64
    ) {
        let split = Split::stratified(&classes, fraction, seed).unwrap();
        let all = classes.len() as u64;
        let side = |is_held_out| -> Vec<u64> {
            (0..split.rows(is_held_out)).map(|index| split.row(is_held_out, index)).collect()
        };
        let (held_out, trained) = (side(true), side(false));
        prop_assert!(held_out.iter().all(|&row| !split.is_trained_on(row)));
        prop_assert!(trained.iter().all(|&row| split.is_trained_on(row)));
        let mut rows = [&held_out[..], &trained].concat();
        rows.sort_unstable();
        prop_assert!(rows.into_iter().eq(0..all));
        let share = held_out.len() as f64 / all as f64;
        prop_assert_eq!(held_out.len() as u64, Split::new(all, fraction, seed).unwrap().rows(true));
        for class in 0..4 {
            let of = |rows: &[u64]| rows.iter().filter(|&&row| classes[row as usize] == class).count();
            let (held, every) = (of(&held_out) as f64, (of(&held_out) + of(&trained)) as f64);
            prop_assert!((held - every * share).abs() <= 1.0, "{held} of {every}");
        }
    }

    #[test]
    fn every_row_is_on_one_side(rows in 2u64..500, fraction in 0.001f64..0.999, seed: u64) {
        let split = Split::new(rows, fraction, seed).unwrap();
        let mut sides = vec![0; rows as usize];
        for index in 0..split.rows(true) {
            let row = split.row(true, index);
            prop_assert!(!split.is_trained_on(row));
            sides[row as usize] += 1;
        }
        for index in 0..split.rows(false) {
            let row = split.row(false, index);
            prop_assert!(split.is_trained_on(row));
            sides[row as usize] += 1;
        }
        prop_assert!(sides.iter().all(|&count| count == 1));
        let off = split.rows(true) as f64 - rows as f64 * fraction;
        prop_assert!(off.abs() <= 1.0, "{off}");
    }
}

#[test]
fn another_seed_keeps_other_rows_and_one_row_cannot_be_split() {
    let held = |seed| -> Vec<u64> {
        let split = Split::new(1000, 0.1, seed).unwrap();
        (0..split.rows(true))
            .map(|index| split.row(true, index))
            .collect()
    };
    assert_eq!(held(1), held(1));
    assert_ne!(held(1), held(2));
    let error = Split::new(1, 0.5, 0).unwrap_err();
    assert!(
        error.exit_code() == 65 && error.to_string().contains("`val-split`"),
        "{error}"
    );
}
