//! Making shapes: the checks that later arithmetic relies on.

use crate::error::{Caller, Result};
use crate::shape::{RANK_MAX, Shape};

/// The widest element: a shape whose elements fit at this width fits at every width.
const ELEMENT_BYTES_MAX: usize = 8;

impl Shape {
    /// A shape of at most eight dimensions whose elements take at most `isize::MAX` bytes.
    #[track_caller]
    pub fn new(dims: &[usize]) -> Result<Shape> {
        Shape::checked(dims, Caller::new("shape"))
    }

    /// As `new`, for the operation `op` called at `at`.
    pub(crate) fn checked(dims: &[usize], by: Caller) -> Result<Shape> {
        if dims.len() > RANK_MAX {
            let expected = format!("at most {RANK_MAX}");
            let what = "number of dimensions";
            return Err(by.value(what, expected, dims.len()));
        }
        // The non-zero dimensions must fit without the others: a view of [0, huge, huge] may drop
        // its zero.
        let fits = dims
            .iter()
            .filter(|&&d| d != 0)
            .try_fold(ELEMENT_BYTES_MAX, |bytes, &d| bytes.checked_mul(d))
            .is_some_and(|bytes| bytes <= isize::MAX as usize);
        if !fits {
            let most = isize::MAX as usize / ELEMENT_BYTES_MAX;
            let (expected, got) = (
                format!("at most {most}"),
                format!("the product of {dims:?}"),
            );
            return Err(by.value("element count", expected, got));
        }
        Ok(Shape::of_checked(dims))
    }
}
