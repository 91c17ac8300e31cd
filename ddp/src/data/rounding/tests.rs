use std::fs;

use super::*;
use crate::data::files;
use crate::files::testing::Scratch;

fn of(numbers: &[f64]) -> Ends {
    let mut ends = Ends::NONE;
    numbers.iter().for_each(|&number| ends.add(number));
    ends
}

#[test]
fn numbers_that_f32_hardly_tells_apart_are_too_close() {
    let minute: Vec<f64> = (0..60).map(|second| 1.7e9 + f64::from(second)).collect();
    for close in [&minute[..], &[1e10, 1e10 + 1.0], &[-1e10, -1e10 - 1.0], &[1.0, 1.0 + 1e-8, 1.0 + 2e-8]] {
        assert!(of(close).are_too_close(), "{close:?}");
    }
    // All the same; all that f32 holds; far apart; on both sides of 0; none.
    for fine in [&[0.1; 3][..], &[16_777_216.0, 16_777_218.0], &[1.7e9, 1.70001e9], &[-1e-9, 1e-9], &[0.1], &[]] {
        assert!(!of(fine).are_too_close(), "{fine:?}");
    }
}

#[test]
fn a_warning_names_a_column_and_the_way_out() {
    let ends = of(&[1.7e9, 1.7e9 + 59.0]);
    assert_eq!(warning(&[]), None);
    let text = warning(&[("\"time\"".into(), ends)]).unwrap();
    for part in ["column \"time\" lie between 1700000000 and 1700000059", "steps of 128", "Subtract an offset"] {
        assert!(text.contains(part), "{text} lacks {part}");
    }
    let text = warning(&[("\"a\"".into(), ends), ("\"b\"".into(), ends), ("\"c\"".into(), ends)]).unwrap();
    assert!(text.contains("column \"a\" (and those of 2 more columns)"), "{text}");
}

#[test]
fn rows_of_arrays_are_looked_at_as_they_were_written() {
    let scratch = Scratch::new();
    let path = scratch.path().join("x.npy");
    let mut header = "{'descr': '<f8', 'fortran_order': False, 'shape': (3000, 4), }".to_string();
    header.push_str(&" ".repeat(117 - header.len()));
    // A minute, what is the same everywhere, what f32 holds, and a minute that it holds.
    let row = |row: u32| [1.7e9 + f64::from(row) / 50.0, 1.7e9 + 0.5, f64::from(row), f64::from(row) / 50.0];
    let numbers: Vec<u8> = (0..3000).flat_map(row).flat_map(f64::to_le_bytes).collect();
    fs::write(&path, [b"\x93NUMPY\x01\x00v\x00", header.as_bytes(), b"\n", &numbers].concat()).unwrap();
    let features = Stack::new(files::open(&path, None).unwrap().arrays).unwrap();
    let mut x = vec![0.0; 12_000];
    features.read_f32(0, &mut x).unwrap();
    let close = columns_too_close(&features, &Moments::of_rows(&x, 4)).unwrap();
    assert_eq!(close.iter().map(|(column, _)| *column).collect::<Vec<_>>(), [0]);
    assert!(close[0].1.least == 1.7e9 && close[0].1.greatest > 1.7e9 + 59.0, "{close:?}");
}
