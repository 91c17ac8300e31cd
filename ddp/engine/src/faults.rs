//! Faults that tests inject at certain points of a run. A release build without the feature
//! `faults` does not contain them.

#[cfg(not(any(debug_assertions, feature = "faults")))]
mod absent;
#[cfg(any(debug_assertions, feature = "faults"))]
mod injected;
mod point;

#[cfg(not(any(debug_assertions, feature = "faults")))]
pub(crate) use self::absent::{at, at_launch, at_step, begin, disagree, flip, rows};
#[cfg(any(debug_assertions, feature = "faults"))]
pub(crate) use self::injected::{at, at_launch, at_step, begin, disagree, flip, rows};
pub(crate) use self::point::FaultPoint;
