//! Shapes: up to eight dimensions, kept inline so that a view costs no allocation.
//!
//! A shape is checked once, when it is made: its element count and its size in bytes fit the machine, so no
//! later arithmetic on it can overflow.

use std::fmt;
use std::ops::Deref;
use std::panic::Location;

use crate::error::{Error, Result, Site};

/// The most dimensions a tensor may have.
pub const RANK_MAX: usize = 8;

/// The widest element, in bytes: a shape whose elements fit at this width fits at every width.
const ELEMENT_BYTES_MAX: usize = 8;

/// The lengths of a tensor's dimensions, outermost first. Dereferences to `[usize]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; RANK_MAX],
    rank: u8,
}

impl Shape {
    /// Checks `dims` and keeps them: at most eight, and the bytes of all elements below `isize::MAX`.
    #[track_caller]
    pub fn new(dims: &[usize]) -> Result<Shape> {
        Shape::checked("shape", dims, Location::caller())
    }

    /// As `new`, for the operation `op` called at `at`.
    pub(crate) fn checked(op: &'static str, dims: &[usize], at: Site) -> Result<Shape> {
        let refuse =
            |what: &str, expected: String, got: String| Err(Error::Value { op, what: what.into(), expected, got, at });
        if dims.len() > RANK_MAX {
            return refuse("number of dimensions", format!("at most {RANK_MAX}"), dims.len().to_string());
        }
        // The non-zero dimensions alone must fit too: a view of [0, huge, huge] may drop its zero.
        let fits = dims
            .iter()
            .filter(|&&d| d != 0)
            .try_fold(ELEMENT_BYTES_MAX, |bytes, &d| bytes.checked_mul(d))
            .is_some_and(|bytes| bytes <= isize::MAX as usize);
        if !fits {
            let most = isize::MAX as usize / ELEMENT_BYTES_MAX;
            return refuse("element count", format!("at most {most}"), format!("the product of {dims:?}"));
        }
        let mut kept = [0; RANK_MAX];
        kept[..dims.len()].copy_from_slice(dims);
        Ok(Shape { dims: kept, rank: dims.len() as u8 })
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }

    /// How many elements: the product of the dimensions (1 for a scalar).
    pub fn count(&self) -> usize {
        self.dims().iter().product()
    }

    /// How many dimensions.
    pub fn rank(&self) -> usize {
        usize::from(self.rank)
    }
}

impl Deref for Shape {
    type Target = [usize];
    fn deref(&self) -> &[usize] {
        self.dims()
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.dims())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_scalar_has_one_element_and_prints_empty_brackets() {
        let shape = Shape::new(&[]).unwrap();
        assert_eq!((shape.count(), shape.rank(), shape.to_string()), (1, 0, "[]".into()));
    }

    #[test]
    fn overflow_and_too_many_dimensions_are_errors_that_name_the_numbers() {
        let error = Shape::new(&[usize::MAX, 2]).unwrap_err().to_string();
        assert!(error.contains("18446744073709551615, 2"), "{error}");
        let error = Shape::new(&[1; 9]).unwrap_err().to_string();
        assert!(error.contains("at most 8") && error.contains('9'), "{error}");
        assert!(Shape::new(&[0, usize::MAX, usize::MAX]).is_err(), "a zero must not hide the rest");
    }

    proptest! {
        #[test]
        fn any_dims_either_fit_exactly_or_are_refused(dims in prop::collection::vec(any::<usize>(), 0..10)) {
            let exact = dims.iter().filter(|&&d| d != 0).try_fold(8u128, |b, &d| b.checked_mul(d as u128));
            let fits = dims.len() <= RANK_MAX && exact.is_some_and(|b| b <= isize::MAX as u128);
            match Shape::new(&dims) {
                Ok(shape) => {
                    prop_assert!(fits);
                    prop_assert_eq!(shape.dims(), &dims[..]);
                }
                Err(_) => prop_assert!(!fits),
            }
        }
    }
}
