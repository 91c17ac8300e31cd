//! Dates that begin with the year, `2026-11-22` or `2026/11/22`, as features: days, and where in
//! the year and in the week they are. Sines come from tables, which have the same bits everywhere.

use std::ops::RangeInclusive;

/// Sines of the twelve months; cosines are those of three months later.
const MONTHS: [f32; 12] = {
    const ROOT: f32 = 0.866_025_4;
    [
        0.0, 0.5, ROOT, 1.0, ROOT, 0.5, 0.0, -0.5, -ROOT, -1.0, -ROOT, -0.5,
    ]
};
/// Sine and cosine of the seven weekdays, from Thursday on: 1970 began on one.
const WEEKDAYS: [[f32; 2]; 7] = [
    [0.0, 1.0],
    [0.781_831_5, 0.623_489_8],
    [0.974_927_9, -0.222_520_93],
    [0.433_883_73, -0.900_968_85],
    [-0.433_883_73, -0.900_968_85],
    [-0.974_927_9, -0.222_520_93],
    [-0.781_831_5, 0.623_489_8],
];

/// Days before each month of a year that begins in March, so that a leap day is its last.
const BEFORE: [i64; 12] = [0, 31, 61, 92, 122, 153, 184, 214, 245, 275, 306, 337];

/// The days from 1970 to a date, of which a time of day is left out; None if it is no such date.
pub(crate) fn day(text: &str) -> Option<i64> {
    let date = text.split(['T', ' ']).next()?;
    let mut parts = date.split(['-', '/']);
    let mut part = |digits: RangeInclusive<usize>| -> Option<i64> {
        let part = parts.next().filter(|part| digits.contains(&part.len()))?;
        let is_digits = part.bytes().all(|byte| byte.is_ascii_digit());
        part.parse().ok().filter(|_| is_digits)
    };
    let (year, month, day) = (part(4..=4)?, part(1..=2)?, part(1..=2)?);
    if parts.next().is_some() || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    let from_march = (month + 9) % 12;
    let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let of_month = BEFORE.get(from_march as usize + 1);
    let of_month = of_month.map_or(28 + i64::from(is_leap), |next| {
        next - BEFORE[from_march as usize]
    });
    if day > of_month {
        return None;
    }
    let year = year - i64::from(month < 3);
    let leap_days = year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    // 1970 began 719,468 days after March of the year 0.
    Some(365 * year + leap_days + BEFORE[from_march as usize] + day - 1 - 719_468)
}

/// The features of a day: days since `first`, sine and cosine of month and weekday.
pub(crate) fn features(day: i64, first: i64) -> [f32; 5] {
    let since = day + 719_468;
    // Years of 365.2425 days, which begin in March: off by at most one.
    let guess = since * 400 / 146_097;
    let start =
        |year: i64| 365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let year = (guess - 1..=guess + 1)
        .rev()
        .find(|year| start(*year) <= since);
    let in_year = since - start(year.unwrap_or(guess));
    let from_march = BEFORE.iter().rposition(|before| *before <= in_year);
    let month = (from_march.unwrap_or(0) + 2) % 12;
    let [sine, cosine] = WEEKDAYS[day.rem_euclid(7) as usize];
    let days = day.saturating_sub(first) as f32;
    [days, MONTHS[month], MONTHS[(month + 3) % 12], sine, cosine]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_count_from_1970_and_only_dates_that_begin_with_the_year_are_read() {
        let dates = [
            ("1970-01-01", 0),
            ("1969-12-31", -1),
            ("2000-02-29", 11_016),
            ("2000-03-01T10:30:00Z", 11_017),
            ("2026-11-22 08:00", 20_779),
            ("2026/11/22", 20_779),
            ("2000/3/1", 11_017),
        ];
        for (text, expected) in dates {
            assert_eq!(day(text), Some(expected), "{text}");
        }
        for text in [
            "22.11.2026",
            "2026-13-01",
            "2026-1-111",
            "11/22/2026",
            "2026-11-22-1",
            "2026-11-31",
            "2026-02-29",
            "1900-02-29",
            "",
            "a-b-c",
        ] {
            assert_eq!(day(text), None, "{text}");
        }
    }

    #[test]
    fn months_and_weekdays_follow_from_days() {
        for year in [1899, 1970, 2000, 2023, 2024] {
            for month in 1..=12_usize {
                for of_month in [1, 28] {
                    let day = day(&format!("{year}-{month:02}-{of_month:02}")).unwrap();
                    let [days, sine, cosine, ..] = features(day, day - 3);
                    assert_eq!([days, sine], [3.0, MONTHS[month - 1]], "{year} {month}");
                    let angle = (month - 1) as f64 * std::f64::consts::TAU / 12.0;
                    assert!((f64::from(cosine) - angle.cos()).abs() < 1e-6);
                }
            }
        }
        // A Sunday, three days after Thursday.
        let [.., sine, cosine] = features(day("2026-11-22").unwrap(), 0);
        let angle = 3.0 * std::f64::consts::TAU / 7.0;
        assert!((f64::from(sine) - angle.sin()).abs() < 1e-6);
        assert!((f64::from(cosine) - angle.cos()).abs() < 1e-6);
    }
}
