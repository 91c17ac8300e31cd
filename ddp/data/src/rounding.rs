//! Columns whose numbers are so close together for their size that f32 can hardly tell them apart:
//! times within a minute, as seconds since 1970, are all the same in f32.

use crate::guess;

/// The least and the greatest number of a column, before rounding, apart from 0: it often stands
/// for a number that is missing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ends {
    pub(crate) least: f64,
    pub(crate) greatest: f64,
    /// Whether f32 rounds some of them.
    pub(crate) any_rounded: bool,
}

impl Ends {
    /// Of no numbers.
    pub(crate) const NONE: Ends = Ends {
        least: f64::INFINITY,
        greatest: f64::NEG_INFINITY,
        any_rounded: false,
    };

    #[inline]
    pub(crate) fn add(&mut self, number: f64) {
        if number == 0.0 {
            return;
        }
        self.least = if number < self.least {
            number
        } else {
            self.least
        };
        self.greatest = if number > self.greatest {
            number
        } else {
            self.greatest
        };
        self.any_rounded |= f64::from(number as f32) != number;
    }

    /// Whether the numbers differ, but by few f32 steps or by none.
    pub(crate) fn are_too_close(&self) -> bool {
        self.any_rounded
            && self.least < self.greatest
            && guess::are_too_close(self.least, self.greatest, self.step(), 0.0)
    }

    /// The same of numbers that f32 has rounded already.
    pub(crate) fn may_be_too_close(least: f32, greatest: f32) -> bool {
        let ends = Ends {
            least: f64::from(least),
            greatest: f64::from(greatest),
            any_rounded: true,
        };
        // 0 is left out, behind which the other numbers may be close. Either end may have been
        // rounded by a step.
        least == 0.0
            || greatest == 0.0
            || greatest == least
            || guess::are_too_close(ends.least, ends.greatest, ends.step(), 2.0)
    }

    /// The distance between neighbouring f32 at the size of these numbers.
    fn step(&self) -> f64 {
        let size = self.least.abs().max(self.greatest.abs()) as f32;
        let next = f32::from_bits((size.to_bits() + 1).min(f32::MAX.to_bits()));
        f64::from(next) - f64::from(size)
    }
}

/// The warning about columns whose numbers are too close, by their names; `None` if there are none.
pub(crate) fn warning(close: &[(String, Ends)]) -> Option<String> {
    let (name, ends) = close.first()?;
    let more = match close.len() - 1 {
        0 => String::new(),
        1 => " (and those of 1 more column)".into(),
        more => format!(" (and those of {more} more columns)"),
    };
    Some(format!(
        "the numbers of column {name}{more}, apart from 0, are between {} and {}, where f32 has steps of {}: most of their information is \
         lost; help: subtract an offset before saving them, as in x - x.min()",
        ends.least,
        ends.greatest,
        ends.step()
    ))
}

#[cfg(test)]
mod tests;
