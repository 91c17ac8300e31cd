use super::super::*;

fn of(numbers: &[f64]) -> Ends {
    let mut ends = Ends::NONE;
    numbers.iter().for_each(|&number| ends.add(number));
    ends
}

#[test]
fn numbers_that_f32_hardly_tells_apart_are_too_close() {
    let minute: Vec<f64> = (0..60).map(|second| 1.7e9 + f64::from(second)).collect();
    for close in [
        &minute[..],
        &[1e10, 1e10 + 1.0],
        &[1.7e9, 0.0, 1.7e9 + 5.0],
        &[-1e10, -1e10 - 1.0],
        &[1.0, 1.0 + 1e-8, 1.0 + 2e-8],
    ] {
        assert!(of(close).are_too_close(), "{close:?}");
    }
    // All the same; all that f32 holds; far apart; on both sides of 0; none.
    for fine in [
        &[0.1; 3][..],
        &[16_777_216.0, 16_777_218.0],
        &[1.7e9, 1.70001e9],
        &[-1e-9, 1e-9],
        &[0.1],
        &[],
    ] {
        assert!(!of(fine).are_too_close(), "{fine:?}");
    }
}

#[test]
fn a_warning_names_a_column_and_the_help() {
    let ends = of(&[1.7e9, 1.7e9 + 59.0]);
    assert_eq!(rounding_warning(&[]), None);
    let text = rounding_warning(&[("\"time\"".into(), ends)]).unwrap();
    for part in [
        "column \"time\", apart from 0, are between 1700000000 and 1700000059",
        "steps of 128",
        "subtract an offset",
    ] {
        assert!(text.contains(part), "{text} lacks {part}");
    }
    let text = rounding_warning(&[
        ("\"a\"".into(), ends),
        ("\"b\"".into(), ends),
        ("\"c\"".into(), ends),
    ])
    .unwrap();
    assert!(
        text.contains("column \"a\" (and those of 2 more columns)"),
        "{text}"
    );
}
