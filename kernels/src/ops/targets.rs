//! Class indices as the losses read them: u8, i32 or i64, checked before anything is written; on a GPU by the kernels,
//! each of which says what it does with a target that is no class.

use crate::error::{Error, Result};
use crate::ops::call::{Call, Lent, Slot};
use crate::{DType, Element};

/// The dtypes that class indices may have.
pub(crate) const TARGET_DTYPES: [DType; 3] = [DType::U8, DType::I32, DType::I64];

/// One class index a row.
#[derive(Clone, Copy)]
pub(crate) enum Targets<'a> {
    U8(&'a [u8]),
    I32(&'a [i32]),
    I64(&'a [i64]),
}

impl<'a> Targets<'a> {
    /// The targets in an operand that `check_operands` let through.
    pub(crate) fn of(lent: &'a Lent<'_>, dtype: DType) -> Targets<'a> {
        match dtype {
            DType::U8 => Targets::U8(lent.elements()),
            DType::I32 => Targets::I32(lent.elements()),
            _ => Targets::I64(lent.elements()),
        }
    }

    /// The class of `row`, or nothing if the row is to be ignored.
    #[inline(always)]
    pub(crate) fn class(self, row: usize, ignore_index: Option<i64>) -> Option<usize> {
        let target = match self {
            Targets::U8(targets) => i64::from(targets[row]),
            Targets::I32(targets) => i64::from(targets[row]),
            Targets::I64(targets) => targets[row],
        };
        if Some(target) == ignore_index { None } else { Some(target as usize) }
    }

    /// Every target is a class or to be ignored; the error names the first row that is not.
    #[track_caller]
    pub(crate) fn check(self, op: &'static str, classes: usize, ignore_index: Option<i64>) -> Result<()> {
        fn first_bad<T: Element + Into<i64>>(
            targets: &[T],
            classes: usize,
            ignore: Option<i64>,
        ) -> Option<(usize, i64)> {
            let good = |target: i64| u64::try_from(target).is_ok_and(|t| t < classes as u64) || Some(target) == ignore;
            let row = targets.iter().position(|&target| !good(target.into()))?;
            Some((row, targets[row].into()))
        }
        let found = match self {
            Targets::U8(targets) => first_bad(targets, classes, ignore_index),
            Targets::I32(targets) => first_bad(targets, classes, ignore_index),
            Targets::I64(targets) => first_bad(targets, classes, ignore_index),
        };
        let Some((row, target)) = found else { return Ok(()) };
        let besides = ignore_index.map_or(String::new(), |index| format!(" or ignore_index {index}"));
        let expected = format!("a class in 0..{classes}{besides}");
        Err(Error::value(op, format!("targets[{row}]"), expected, target))
    }
}

/// `logits` is (B, C) with at least one class, `targets` (B) whole numbers. Gives B and C.
pub(crate) fn check_operands(call: &Call<'_>, logits: Slot, targets: Slot) -> Result<[usize; 2]> {
    let [rows, classes] = call.dims(logits, "[rows, classes]")?;
    if classes == 0 {
        return Err(call.misfit(logits, "at least one class", "The second dimension is the number of classes."));
    }
    call.has_shape(targets, &[rows], "one class index for each row of logits")?;
    call.has_dtype(targets, &TARGET_DTYPES)?;
    Ok([rows, classes])
}
