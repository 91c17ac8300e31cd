//! Numbers, times and sizes as people read them.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// `235,146`
pub fn count(value: u64) -> String {
    grouped(&value.to_string())
}

/// Digits with a comma after each thousand.
pub fn grouped(digits: &str) -> String {
    let groups = digits.as_bytes().rchunks(3).rev();
    let groups: Vec<_> = groups.map(String::from_utf8_lossy).collect();
    groups.join(",")
}

/// `1 rank`, `2 ranks`
pub fn plural(number: u64, noun: &str) -> String {
    let ending = if number == 1 { "" } else { "s" };
    format!("{} {noun}{ending}", count(number))
}

/// `0.69 s`, `12 min 05 s`, `3 h 07 min`; a dash for a time that is not known.
pub fn duration(seconds: f64) -> String {
    if !seconds.is_finite() || seconds < 0.0 {
        return "–".to_string();
    }
    if seconds < 59.95 {
        return format!("{seconds:.*} s", if seconds < 9.995 { 2 } else { 1 });
    }
    let whole = seconds.round() as u64;
    match whole {
        0..3600 => format!("{} min {:02} s", whole / 60, whole % 60),
        3600..172_800 => format!("{} h {:02} min", whole / 3600, whole % 3600 / 60),
        _ => format!("{} d {} h", count(whole / 86_400), whole % 86_400 / 3600),
    }
}

/// `34.3 MB`, `70.25 GB`, of 10⁶ bytes.
pub fn megabytes(value: f64) -> String {
    match value.abs() {
        ..1000.0 => format!("{value:.1} MB"),
        size if size.is_finite() => format!("{:.2} GB", value / 1e3),
        _ => "–".to_string(),
    }
}

/// A size that people give: `40GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MemorySize(pub u64);

const UNITS: [(&str, u64); 6] = [
    ("TiB", 1 << 40),
    ("TB", 1_000_000_000_000),
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
];

impl FromStr for MemorySize {
    type Err = String;

    fn from_str(text: &str) -> Result<MemorySize, String> {
        let sized = |&(unit, bytes): &(&str, u64)| {
            let number: f64 = text.strip_suffix(unit)?.trim_end().parse().ok()?;
            let bytes = (number * bytes as f64).round();
            (1.0..1e18)
                .contains(&bytes)
                .then_some(MemorySize(bytes as u64))
        };
        let expected = || format!("expected a size, as in 40GiB, 40GB or 500MiB, got {text}");
        UNITS.iter().find_map(sized).ok_or_else(expected)
    }
}

impl fmt::Display for MemorySize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = UNITS
            .iter()
            .find(|(_, bytes)| self.0.is_multiple_of(*bytes));
        let &(unit, bytes) = whole.unwrap_or(&("MB", 1_000_000));
        write!(f, "{}{unit}", self.0 as f64 / bytes as f64)
    }
}

/// |a − b| relative to the larger one; 0 if they are equal.
pub fn relative(a: f64, b: f64) -> f64 {
    if a == b {
        return 0.0;
    }
    (a - b).abs() / a.abs().max(b.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thousands_have_commas() {
        let counts = [0, 999, 1000, u64::MAX].map(count);
        let texts = ["0", "999", "1,000", "18,446,744,073,709,551,615"];
        assert_eq!(counts, texts);
        assert_eq!(
            [plural(1, "rank"), plural(2, "rank")],
            ["1 rank", "2 ranks"]
        );
    }

    #[test]
    fn sizes_are_read_as_they_are_written() {
        for (text, bytes) in [
            ("40GiB", 40 << 30),
            ("1.5GB", 1_500_000_000),
            ("500 MiB", 500 << 20),
            ("2TB", 2_000_000_000_000),
            ("0.000001MB", 1),
            ("2.01GB", 2_010_000_000),
            ("3.82GiB", 4_101_693_768),
        ] {
            let size: MemorySize = text.parse().unwrap();
            assert_eq!(size, MemorySize(bytes), "{text}");
            assert_eq!(size.to_string().parse(), Ok(size), "{text}");
        }
        for text in [
            "40", "40G", "GiB", "-1GiB", "0MB", "nanGB", "infGB", "40 GiBs",
        ] {
            let error = text.parse::<MemorySize>().unwrap_err();
            assert!(error.ends_with(&format!("got {text}")), "{error}");
        }
    }

    #[test]
    fn times_read_as_people_say_them() {
        let times = [
            (0.694, "0.69 s"),
            (42.0, "42.0 s"),
            (59.97, "1 min 00 s"),
            (725.0, "12 min 05 s"),
            (11_220.0, "3 h 07 min"),
            (200_000.0, "2 d 7 h"),
            (-1.0, "–"),
        ];
        for (seconds, text) in times {
            assert_eq!(duration(seconds), text);
        }
    }
}
