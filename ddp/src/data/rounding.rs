//! Numbers that lie so close together for their size that f32, in which a model sees them, can hardly tell them apart: times within a
//! minute, as seconds since 1970, are all the same.

use super::files::Element;
use super::scan::Moments;
use super::stack::Stack;
use crate::error::Result;

/// With fewer steps of f32 between the ends of a column most of what it says is lost.
const STEPS_MIN: f64 = 16.0;
/// So many rows of arrays are looked at, and of wide rows so many numbers.
const ROWS: u64 = 1024;
const NUMBERS: usize = 1 << 22;

/// The ends of a column's numbers as they were written.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Ends {
    least: f64,
    greatest: f64,
    /// Whether f32 does not hold all of them.
    any_rounded: bool,
}

impl Ends {
    /// Of no numbers.
    pub(crate) const NONE: Ends = Ends { least: f64::INFINITY, greatest: f64::NEG_INFINITY, any_rounded: false };

    #[inline]
    pub(crate) fn add(&mut self, number: f64) {
        self.least = if number < self.least { number } else { self.least };
        self.greatest = if number > self.greatest { number } else { self.greatest };
        self.any_rounded |= f64::from(number as f32) != number;
    }

    /// Whether they differ, but in f32 by few steps or by none.
    pub(crate) fn are_too_close(&self) -> bool {
        self.any_rounded && self.least < self.greatest && self.greatest - self.least < STEPS_MIN * self.step()
    }

    /// How far apart numbers of f32 are where these are.
    fn step(&self) -> f64 {
        let size = self.least.abs().max(self.greatest.abs()) as f32;
        let next = f32::from_bits((size.to_bits() + 1).min(f32::MAX.to_bits()));
        f64::from(next) - f64::from(size)
    }
}

/// What to say of columns that are too close, by their names: nothing if there are none.
pub(crate) fn warning(close: &[(String, Ends)]) -> Option<String> {
    let (name, ends) = close.first()?;
    let more = match close.len() - 1 {
        0 => String::new(),
        1 => " (and those of 1 more column)".into(),
        more => format!(" (and those of {more} more columns)"),
    };
    Some(format!(
        "the numbers of column {name}{more} lie between {} and {}, where f32, in which models see them, has steps of {}: most of what they say is \
         lost. Subtract an offset before saving them, as in x - x.min()",
        ends.least,
        ends.greatest,
        ends.step()
    ))
}

/// Which features are too close, by the moments of what f32 has made of them and a look at some of their rows.
pub(crate) fn columns_too_close(features: &Stack, moments: &Moments) -> Result<Vec<(usize, Ends)>> {
    let may_round =
        matches!(features.element()?, Element::F64 | Element::I64 | Element::U64 | Element::I32 | Element::U32);
    let of_f32 = moments.least.iter().zip(&moments.greatest).enumerate();
    let is_close = |&(_, (&least, &greatest)): &(usize, (&f32, &f32))| {
        let (least, greatest) = (f64::from(least), f64::from(greatest));
        let ends = Ends { least, greatest, any_rounded: true };
        // Either end may have been rounded by a step.
        least == greatest || greatest - least < (STEPS_MIN + 2.0) * ends.step()
    };
    let mut close: Vec<(usize, Ends)> =
        of_f32.filter(|column| may_round && is_close(column)).map(|(column, _)| (column, Ends::NONE)).collect();
    if close.is_empty() {
        return Ok(close);
    }
    let count = ROWS.min((NUMBERS / features.width()).max(16) as u64).min(features.rows());
    let mut numbers = vec![0.0; features.width()];
    for index in 0..count {
        let row = (u128::from(index) * u128::from(features.rows()) / u128::from(count)) as u64;
        features.read_f64(row, &mut numbers)?;
        close.iter_mut().for_each(|(column, ends)| ends.add(numbers[*column]));
    }
    close.retain(|(_, ends)| ends.are_too_close());
    Ok(close)
}

#[cfg(test)]
mod tests;
