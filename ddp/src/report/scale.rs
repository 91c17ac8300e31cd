//! Axes with ticks at round numbers.

use super::html;

/// One axis of a chart.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Scale {
    low: f64,
    high: f64,
}

impl Scale {
    /// From `low` to `high`, unrounded.
    pub(super) fn exactly(low: f64, high: f64) -> Scale {
        Scale {
            low,
            high: if high > low { high } else { low + 1.0 },
        }
    }

    /// From a round number below these values to one above; from 0 if the curve keeps most of the
    /// height.
    pub(super) fn around(low: f64, high: f64) -> Scale {
        let low = if low > 0.0 && low < 0.5 * high {
            0.0
        } else {
            low
        };
        // Nearly equal values: at least 1 % of their size, so that tick labels stay short.
        let least = if high == 0.0 && low == 0.0 {
            2.0
        } else {
            low.abs().max(high.abs()) / 100.0
        };
        let more = (least / 2.0 - (high / 2.0 - low / 2.0)).max(0.0);
        let (low, high) = (low - more, high + more);
        let step = tick_step(low, high, TICKS_MAX);
        let (below, above) = ((low / step).floor() * step, (high / step).ceil() * step);
        if below.is_finite() && above.is_finite() && above > below {
            Scale {
                low: below,
                high: above,
            }
        } else {
            Scale { low, high }
        }
    }

    pub(super) fn low(&self) -> f64 {
        self.low
    }

    pub(super) fn high(&self) -> f64 {
        self.high
    }

    /// The position of a value: 0 at the low end, 1 at the high end. Halves avoid overflow.
    pub(super) fn at(&self, value: f64) -> f64 {
        ((value / 2.0 - self.low / 2.0) / (self.high / 2.0 - self.low / 2.0)).clamp(-1.0, 2.0)
    }

    /// Round numbers within the axis, at most about `most`.
    pub(super) fn ticks(&self, most: usize) -> Vec<f64> {
        let step = tick_step(self.low, self.high, most);
        let first = (self.low / step - 1e-9).ceil();
        let numbers = (0..=most).map(|index| (first + index as f64) * step);
        let end = self.high + step * 1e-9;
        numbers
            .filter(|tick| tick.is_finite() && *tick <= end)
            .map(|tick| if tick.abs() < step * 1e-9 { 0.0 } else { tick })
            .collect()
    }
}

/// The most ticks of a vertical axis.
pub(super) const TICKS_MAX: usize = 5;

/// The smallest of 1, 2, 5 times a power of ten that divides the range into at most `most` parts.
fn tick_step(low: f64, high: f64, most: usize) -> f64 {
    let rough = (high / most as f64 - low / most as f64).max(f64::MIN_POSITIVE * 1e3);
    let power = 10f64.powf(rough.log10().floor());
    let round = [1.0, 2.0, 5.0, 10.0]
        .into_iter()
        .find(|round| round * power >= rough * 0.999_999);
    round.unwrap_or(10.0) * power
}

/// How values are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// Unscaled.
    Plain,
    /// Fractions, as percentages.
    Percent,
    /// Large values: 12k, 3M.
    Rate,
}

impl Form {
    /// A tick's label.
    pub(super) fn tick(self, value: f64) -> String {
        let (value, unit) = match self {
            Form::Plain => (value, ""),
            Form::Percent => (value * 100.0, "%"),
            Form::Rate if value.abs() >= 1e9 => (value / 1e9, "G"),
            Form::Rate if value.abs() >= 1e6 => (value / 1e6, "M"),
            Form::Rate if value.abs() >= 1e3 => (value / 1e3, "k"),
            Form::Rate => (value, ""),
        };
        let size = value.abs();
        let text = if size != 0.0 && !(1e-4..1e6).contains(&size) {
            let text = format!("{size:.2e}");
            let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
            format!(
                "{}e{power}",
                digits.trim_end_matches('0').trim_end_matches('.')
            )
        } else {
            let text = format!("{size:.6}");
            text.trim_end_matches('0').trim_end_matches('.').to_string()
        };
        let sign = if value < 0.0 { "−" } else { "" };
        format!("{sign}{text}{unit}")
    }

    /// A value, to four significant digits.
    pub(super) fn figure(self, value: f64) -> String {
        match self {
            Form::Percent => html::percent(Some(value)),
            Form::Plain | Form::Rate => html::figure(Some(value)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_the_curve_is_between_the_outer_two() {
        let cases = [
            (0.03, 2.31),
            (0.71, 0.98),
            (1e-9, 3e-9),
            (5471.0, 17_000.0),
            (-3.0, 8.0),
            (2.0, 2.0),
            (0.0, 0.0),
            (1e300, 1.7e308),
        ];
        for (low, high) in cases {
            let scale = Scale::around(low, high);
            let ticks = scale.ticks(TICKS_MAX + 1);
            assert!((2..=7).contains(&ticks.len()), "{low} to {high}: {ticks:?}");
            assert!(
                scale.at(low) >= 0.0 && scale.at(high) <= 1.0 && scale.at(low) <= scale.at(high),
                "{low} to {high}"
            );
            assert!(
                ticks
                    .iter()
                    .all(|&tick| (-1e-6..=1.000_001).contains(&scale.at(tick))),
                "{low} to {high}: {ticks:?}"
            );
        }
        assert_eq!(
            Scale::around(0.03, 2.31).ticks(6),
            [0.0, 0.5, 1.0, 1.5, 2.0, 2.5]
        );
    }

    #[test]
    fn ticks_are_written_shortly() {
        let texts = [
            (Form::Plain, 0.001, "0.001"),
            (Form::Plain, 2.5, "2.5"),
            (Form::Plain, 0.0, "0"),
            (Form::Plain, 0.300_000_000_000_000_04, "0.3"),
            (Form::Plain, 2e-5, "2e-5"),
            (Form::Plain, -1.5, "−1.5"),
            (Form::Percent, 0.25, "25%"),
            (Form::Rate, 12_000.0, "12k"),
            (Form::Rate, 2_500_000.0, "2.5M"),
        ];
        for (form, value, text) in texts {
            assert_eq!(form.tick(value), text);
        }
    }
}
