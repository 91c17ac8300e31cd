//! Shapes: up to eight dimensions, stored inline so that a view allocates nothing.
//!
//! A shape is checked once, when it is made: its element count and its size in bytes fit the
//! machine, so no later arithmetic on it can overflow.

use std::fmt;
use std::ops::Deref;

/// The most dimensions a tensor may have.
pub const RANK_MAX: usize = 8;

/// The lengths of a tensor's dimensions, outermost first. Dereferences to `[usize]`.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    dims: [usize; RANK_MAX],
    rank: u8,
}

impl Shape {
    /// A shape of dimensions that were checked: `Shape::new` is in `tensor.rs`.
    pub(crate) fn of_checked(checked: &[usize]) -> Shape {
        let mut dims = [0; RANK_MAX];
        dims[..checked.len()].copy_from_slice(checked);
        let rank = checked.len() as u8;
        Shape { dims, rank }
    }

    /// The dimensions, outermost first.
    pub fn dims(&self) -> &[usize] {
        &self.dims[..usize::from(self.rank)]
    }

    /// The number of elements: the product of the dimensions (1 for a scalar).
    pub fn count(&self) -> usize {
        self.dims().iter().product()
    }

    /// The number of dimensions.
    pub fn rank(&self) -> usize {
        usize::from(self.rank)
    }

    /// This shape with a first dimension that is at most its own.
    pub(crate) fn with_first(mut self, first: usize) -> Shape {
        debug_assert!(self.rank > 0 && first <= self.dims[0]);
        self.dims[0] = first;
        self
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
        assert_eq!(
            (shape.count(), shape.rank(), shape.to_string()),
            (1, 0, "[]".into())
        );
    }

    #[test]
    fn overflow_and_too_many_dimensions_are_errors_that_name_the_numbers() {
        let error = Shape::new(&[usize::MAX, 2]).unwrap_err().to_string();
        assert!(error.contains("18446744073709551615, 2"), "{error}");
        let error = Shape::new(&[1; 9]).unwrap_err().to_string();
        assert!(
            error.contains("at most 8") && error.contains('9'),
            "{error}"
        );
        assert!(
            Shape::new(&[0, usize::MAX, usize::MAX]).is_err(),
            "a zero must not hide the rest"
        );
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
