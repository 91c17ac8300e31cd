//! Every rule that guesses something about data, with its threshold and the reason for it. A guess
//! that changes what is trained is printed, and a suspicious one is refused with the setting that
//! decides it. The rules are pure: callers count, and write the messages.

use std::collections::{BTreeMap, BTreeSet};

use crate::task::{CLASSES_MAX, TaskKind};

/// One label in this many, or fewer, is odd among others of another kind: 5% is more than typing
/// errors and marks of missing values usually are, and less than a class that matters.
const ODD: u64 = 20;
/// A class number is far from the others only beyond this: a scale from 1 to 10 may lack its
/// middle.
const FAR: u64 = 9;
/// This many classes are fine for any number of rows.
const CLASSES: u64 = 100;
/// More of them need this many rows each: with fewer the labels are prices or names.
const ROWS_OF_A_CLASS: u64 = 10;
/// More classes than this with one row each are not classes: small examples have fewer.
const SINGLE: u64 = 20;
/// A feature that varies by so much less than another is learned less well: of six, with one at a
/// tenth, 92% of answers were right instead of 96%, at a thirtieth 81% (a perceptron, 20 epochs).
const NARROW: f64 = 10.0;
/// An array with this many features has pixels or the like, of which some may vary little.
pub(crate) const PIXELS: usize = 64;
const NARROW_PIXEL: f64 = 1000.0;
/// A feature whose mean is this many times its deviation is learned less well, too: 85%.
const OFFSET: f64 = 10.0;
/// With fewer f32 steps between the ends of a column, four of its bits are left.
const STEPS_MIN: f32 = 16.0;
/// Targets with a larger mean or deviation take an optimizer's usual steps long to reach.
const TARGETS_MAX: f32 = 100.0;

/// Whether labels are classes: as asked for, else texts and whole numbers are, floats are not.
pub(crate) fn are_classes(task: Option<TaskKind>, any_float: bool) -> bool {
    match task {
        Some(task) => task == TaskKind::Classification,
        None => !any_float,
    }
}

/// Tables of more rows hold some out; of fewer, what is held out is missed, and says little.
pub const SMALL_ROWS_MAX: u64 = 5_000;
/// The part that they hold out, and the most rows.
const HELD_OUT: f64 = 0.2;
const HELD_OUT_ROWS_MAX: f64 = 10_000.0;
/// From here on a part of all rows has each class as often as all have.
pub(crate) const STRATIFIED_MAX: u64 = 1_000_000;
/// Whole numbers of tables are classes if there are at most so many, each in so many rows.
const FEW_CLASSES: usize = 10;
const FEW_CLASSES_ROWS: u64 = 8;

/// The part of a table's rows that is held out.
pub(crate) fn held_out(rows: u64) -> f64 {
    match rows {
        0..=SMALL_ROWS_MAX => 0.0,
        _ => HELD_OUT.min(HELD_OUT_ROWS_MAX / rows as f64),
    }
}

/// Whether whole numbers of a table, each in so many rows, are classes: few, one after the other,
/// and none rare. Others are counts, years, ages or grades.
pub(crate) fn are_few_classes(rows_of: &BTreeMap<i64, u64>) -> bool {
    let (Some((first, _)), Some((last, _))) = (rows_of.first_key_value(), rows_of.last_key_value())
    else {
        return false;
    };
    let count = rows_of.len();
    let are_consecutive = last.abs_diff(*first) + 1 == count as u64;
    let are_common = rows_of.values().all(|rows| *rows >= FEW_CLASSES_ROWS);
    (2..=FEW_CLASSES).contains(&count) && are_consecutive && are_common
}

/// Whether class numbers are names: not 0, 1, 2 … but 1 to 3, -1 and 1, or 0, 2 and 6. -1, 0 and 1
/// are classes too, while a single -3 among classes from 0 on is a mistake.
pub(crate) fn are_names(numbers: &BTreeSet<i64>) -> bool {
    let mut pairs = numbers.iter().zip(numbers.iter().skip(1));
    let has_gap = pairs.any(|(a, b)| b.abs_diff(*a) > 1);
    match numbers.first() {
        Some(0) => has_gap,
        _ => !(numbers.contains(&0) && has_gap),
    }
}

/// From here on f32 rounds whole numbers.
const ROUNDED: f32 = 16_777_216.0;

/// Whether the numbers of a column look like identifiers: they are whole, and no two are equal.
/// Above `ROUNDED` f32 makes consecutive ones equal, so there they only have to be that close.
pub(crate) fn are_identifiers(mut numbers: Vec<f32>) -> bool {
    numbers.sort_unstable_by(f32::total_cmp);
    let [first, .., last] = numbers[..] else {
        return false;
    };
    let consecutive = numbers.len() as f32 / 2.0..numbers.len() as f32 * 2.0;
    let are_rounded = first >= ROUNDED && consecutive.contains(&(last - first));
    let are_different = are_rounded || numbers.is_sorted_by(|a, b| a < b);
    are_different && numbers.len() as u64 > SINGLE && numbers.iter().all(|x| x.fract() == 0.0)
}

/// Whether so few of all rows are odd.
pub(crate) fn are_odd(count: u64, rows: u64) -> bool {
    count * ODD < rows
}

/// The class number that likely marks a missing label, and the range of the others: 99 or -1 among
/// 0 to 2. It is the least or the greatest, rare, and far away or the only negative one. `classes`
/// are sorted; each has its number of rows.
pub(crate) fn odd_class(classes: &[(i64, u64)], rows: u64) -> Option<((i64, u64), (i64, i64))> {
    let [least, .., greatest] = classes else {
        return None;
    };
    let (above, below) = (&classes[1..], &classes[..classes.len() - 1]);
    let ends = [(least, above), (greatest, below)].into_iter();
    let ends = ends.filter(|(_, others)| others.len() > 1);
    ends.map(|(odd, others)| (*odd, (others[0].0, others[others.len() - 1].0)))
        .find(|((odd, count), (first, last))| {
            let gap = odd.abs_diff(*first).min(odd.abs_diff(*last));
            let is_far = gap > last.abs_diff(*first).max(FAR);
            (is_far || *odd < 0 && *first >= 0) && are_odd(*count, rows)
        })
}

/// Whether this many classes in this many rows are not classes.
pub(crate) fn are_too_many(classes: u64, rows: u64) -> bool {
    let are_many = classes > CLASSES && classes * ROWS_OF_A_CLASS > rows;
    are_many || classes > SINGLE && classes == rows
}

/// Whether numbers with this many different whole ones look like classes, with a few fractions
/// among them by mistake.
pub(crate) fn look_like_classes(different: u64, fractions: u64, rows: u64) -> bool {
    let are_few = different <= CLASSES.max(rows / ROWS_OF_A_CLASS);
    different < CLASSES_MAX as u64 && are_few && are_odd(fractions, rows)
}

/// Whether f32 can hardly tell the numbers of a column apart, which are between these ends. Equal
/// numbers this large were probably different ones before they were rounded.
pub(crate) fn are_too_close(least: f32, greatest: f32) -> bool {
    let size = least.abs().max(greatest.abs());
    let step = size.next_up() - size;
    greatest - least < STEPS_MIN * step && (least < greatest || step > 1.0)
}

/// Whether a feature, perhaps a pixel, varies too little beside one that varies by `largest`.
pub(crate) fn is_narrow(range: f64, largest: f64, is_pixel: bool) -> bool {
    let most = if is_pixel { NARROW_PIXEL } else { NARROW };
    range > 0.0 && largest >= most * range
}

/// Whether a feature with this mean and deviation is far from 0.
pub(crate) fn is_offset(mean: f64, deviation: f64) -> bool {
    deviation > 0.0 && mean.abs() >= OFFSET * deviation
}

/// Whether targets with this mean and deviation are hard to learn as they are.
pub(crate) fn are_large_targets(mean: f32, deviation: f32) -> bool {
    mean.abs().max(deviation) > TARGETS_MAX
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_f32_hardly_tells_apart_are_too_close() {
        let second = |second: f64| (1.7e9 + second) as f32;
        let close = [
            (second(0.0), second(59.0)),
            (second(0.0), second(9.0)),
            (-1e10, -1e10),
        ];
        assert!(
            close
                .iter()
                .all(|(least, greatest)| are_too_close(*least, *greatest))
        );
        let fine = [
            (0.1, 0.1),
            (0.0, 0.0),
            (1.7e9, 1.70001e9),
            (-1e-9, 1e-9),
            (0.0, 1.7e9),
        ];
        assert!(
            !fine
                .iter()
                .any(|(least, greatest)| are_too_close(*least, *greatest))
        );
    }

    #[test]
    fn whole_numbers_that_never_repeat_are_identifiers() {
        let are = |numbers: &[i32]| are_identifiers(numbers.iter().map(|x| *x as f32).collect());
        let counted: Vec<i32> = (0..300).collect();
        let mixed: Vec<i32> = (0..300).map(|row| row * 7919 % 300 + 5).collect();
        assert!(are(&counted) && are(&mixed));
        assert!(!are(&[&counted[..], &[7]].concat()) && !are(&counted[..20]));
        // f32 keeps every eighth of these, and all of the prices.
        let large: Vec<i32> = (100_000_001..100_000_301).collect();
        let prices: Vec<i32> = (0..300).map(|row| 100_000_000 + row % 9 * 1000).collect();
        assert!(are(&large) && !are(&prices) && !are(&[100_000_000; 300]));
        assert!(!are_identifiers(
            (0..300).map(|row| row as f32 / 2.0).collect()
        ));
    }

    #[test]
    fn a_tenth_of_another_feature_is_narrow_and_a_thousandth_of_a_pixel() {
        let narrow = |range| is_narrow(range, 5.0, false);
        assert!(narrow(0.5) && !narrow(0.6) && !narrow(0.0));
        assert!(is_narrow(0.5, 500.0, true) && !is_narrow(0.6, 500.0, true));
        assert!(is_offset(-20.0, 2.0) && !is_offset(19.0, 2.0) && !is_offset(19.0, 0.0));
    }

    #[test]
    fn a_rare_class_far_from_the_others_is_odd() {
        let odd = |classes: &[(i64, u64)]| odd_class(classes, 1000).map(|(odd, _)| odd.0);
        assert_eq!(odd(&[(0, 500), (1, 499), (99, 1)]), Some(99));
        assert_eq!(odd(&[(-1, 1), (0, 500), (1, 499)]), Some(-1));
        assert_eq!(odd(&[(1, 500), (2, 499), (11, 1)]), None);
        assert_eq!(odd(&[(1, 500), (2, 499), (12, 1)]), Some(12));
        assert_eq!(odd(&[(1, 400), (2, 300), (99, 300)]), None);
        assert_eq!(odd(&[(0, 999), (99, 1)]), None);
    }

    #[test]
    fn few_consecutive_common_numbers_are_classes() {
        let are = |numbers: &[(i64, u64)]| are_few_classes(&numbers.iter().copied().collect());
        assert!(are(&[(0, 8), (1, 100)]) && are(&[(3, 9), (4, 9), (5, 9)]));
        assert!(!are(&[(0, 7), (1, 100)]) && !are(&[(4, 9), (6, 9), (8, 9)]) && !are(&[(1, 99)]));
        let many: Vec<(i64, u64)> = (0..11).map(|class| (class, 50)).collect();
        assert!(!are(&many) && are(&many[..10]));
        assert_eq!([5000, 5001, 100_000].map(held_out), [0.0, 0.2, 0.1]);
    }

    #[test]
    fn numbers_other_than_0_1_2_are_names() {
        let names = |numbers: &[i64]| are_names(&numbers.iter().copied().collect());
        assert!(names(&[1, 2, 3]) && names(&[-1, 1]) && names(&[-1, 0, 1]));
        assert!(names(&[0, 2, 6]) && names(&[0, 5]));
        assert!(!names(&[0, 1, 2]) && !names(&[-3, 0, 1]));
    }
}
