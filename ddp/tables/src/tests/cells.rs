//! Which cells are numbers, missing, or numbers formatted for people.

use ddp_data::words::is_written_otherwise;

use crate::table::{Cell, Value};

#[test]
fn common_words_for_missing_values_are_recognised() {
    let cell = |text| Value::Written(text).cell();
    for text in [
        "", "NA", "n/a", "#N/A", "NaN", "nan", "null", "NULL", "nil", "None", "?", "-",
    ] {
        assert_eq!(cell(text.as_bytes()), Cell::Missing, "{text:?}");
        assert_eq!(Value::Text(text.as_bytes()).cell(), Cell::Missing);
    }
    for text in ["nana", "--", "none of them", "n.a.", "x"] {
        assert_eq!(cell(text.as_bytes()), Cell::Text(text.as_bytes()));
    }
    assert_eq!(cell(b"-1"), Cell::Number(-1.0));
    assert_eq!(cell(b"inf"), Cell::Number(f64::INFINITY));
    assert_eq!(Value::Text(b"-1").cell(), Cell::Text(b"-1"));
}

#[test]
fn numbers_and_dates_are_known_by_their_characters() {
    for text in [
        "1,000",
        "-12,037.25",
        "$1,000,000",
        "0,125",
        "2,5",
        "1234,567",
        "$12",
        "45 %",
        "12 000",
        "2026-11-22",
        "22.11.2026 10:00",
        "2026-11-22T10:00:00Z",
    ] {
        assert!(is_written_otherwise(text), "{text}");
    }
    for text in ["1.10.2", "555-12-3456", "--2026", "12", "$", "Bern", "1,x"] {
        assert!(!is_written_otherwise(text), "{text}");
    }
}
