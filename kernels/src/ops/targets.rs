//! Class indices as the losses read them: u8, i32 or i64. They are checked before anything is
//! written; on a GPU by the kernels, each of which documents what an invalid target does.

use crate::DType;
use crate::error::Result;
use crate::ops::call::{Buffer, Call, Slot};

/// The dtypes that class indices may have.
pub(crate) const TARGET_DTYPES: [DType; 3] = [DType::U8, DType::I32, DType::I64];

/// One class index for each row (B).
#[derive(Clone, Copy)]
pub(crate) enum Targets<'a> {
    U8(&'a [u8]),
    I32(&'a [i32]),
    I64(&'a [i64]),
}

impl<'a> Targets<'a> {
    /// The targets in an operand that `check_operands` accepted.
    pub(crate) fn of(targets: &'a Buffer<'_>) -> Targets<'a> {
        match targets.dtype {
            DType::U8 => Targets::U8(targets.elements()),
            DType::I32 => Targets::I32(targets.elements()),
            _ => Targets::I64(targets.elements()),
        }
    }

    #[inline(always)]
    fn at(self, row: usize) -> i64 {
        match self {
            Targets::U8(targets) => i64::from(targets[row]),
            Targets::I32(targets) => i64::from(targets[row]),
            Targets::I64(targets) => targets[row],
        }
    }

    /// The class of `row`, or None if the row is to be ignored.
    #[inline(always)]
    pub(crate) fn class(self, row: usize, ignore_index: Option<i64>) -> Option<usize> {
        let target = self.at(row);
        (Some(target) != ignore_index).then_some(target as usize)
    }

    /// The first target that is neither a class nor `ignore_index`, with its row.
    pub(crate) fn first_bad(self, classes: usize, ignore: Option<i64>) -> Option<(usize, i64)> {
        let is_bad = |&(_, target): &(usize, i64)| {
            !u64::try_from(target).is_ok_and(|it| it < classes as u64) && Some(target) != ignore
        };
        let rows = match self {
            Targets::U8(targets) => targets.len(),
            Targets::I32(targets) => targets.len(),
            Targets::I64(targets) => targets.len(),
        };
        (0..rows).map(|row| (row, self.at(row))).find(is_bad)
    }

    /// Refuses the first target that is neither a class nor `ignore_index`.
    pub(crate) fn check(
        self,
        call: &Call<'_>,
        classes: usize,
        ignore_index: Option<i64>,
    ) -> Result<()> {
        let Some((row, target)) = self.first_bad(classes, ignore_index) else {
            return Ok(());
        };
        let or = ignore_index.map_or(String::new(), |index| format!(" or ignore_index {index}"));
        let expected = format!("a class in 0..{classes}{or}");
        Err(call.value(format!("targets[{row}]"), expected, target))
    }
}

/// Checks `logits` (B, C), with at least one class, and `targets` (B). Gives B and C.
pub(crate) fn check_operands(call: &Call<'_>, logits: Slot, targets: Slot) -> Result<[usize; 2]> {
    let [rows, classes] = call.dims(logits, "[rows, classes]")?;
    if classes == 0 {
        let help = "the second dimension is the number of classes";
        return Err(call.operand_error(logits, "at least one class", help));
    }
    call.has_shape(targets, &[rows], "one class index for each row of logits")?;
    call.has_dtype(targets, &TARGET_DTYPES)?;
    Ok([rows, classes])
}
