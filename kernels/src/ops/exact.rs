//! Numbers as elements, without rounding for integers.

use crate::error::{Caller, Result};
use crate::{DType, Element};

/// `value` as a `T`, or an error if an integer type cannot hold it.
pub(crate) fn exact<T: Element>(value: f64, by: Caller) -> Result<T> {
    let converted = T::from_f64(value);
    // The largest i64 is 2⁶³ − 1, which as f64 is 2⁶³ again.
    let beyond = T::DTYPE == DType::I64 && value >= 9_223_372_036_854_775_808.0;
    if T::DTYPE.is_float() || (converted.to_f64() == value && !beyond) {
        return Ok(converted);
    }
    let expected = format!("a whole number that {} holds", T::DTYPE);
    Err(by.value("value", expected, value))
}
