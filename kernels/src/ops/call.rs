//! What every operation does before its math: checks the operands, brings them to one device (or
//! refuses), and borrows their memory. Errors name the operation, the operand and the caller's
//! line.
//!
//! ```text
//! let mut call = OpCall::new("scale");
//! let out = call.writes("out", out);            // operand 0 decides on which device operands meet
//! let x = call.reads("x", x);
//! call.elementwise(&[out, x])?;                 // or any other check
//! call.run(x, &FLOATS, |placed| {
//!     let [mut out, x] = placed.enter([out, x])?;
//!     if let Some(gpu) = placed.gpu() {
//!         return gpu.launch(…);
//!     }
//!     with_float!(placed.dtype, T => …out.elements_mut::<T>(), x.elements::<T>()…);
//!     Ok(())
//! })
//! ```

mod place;

pub(crate) use place::{Buffer, Placed, TARGET_DTYPES, Targets};

use crate::error::{Caller, Error, Result};
use crate::{DType, Device, Tensor};

/// The most operands that an operation has.
const OPERANDS_MAX: usize = 10;

/// The dtypes in which an operation can compute, by kind of device.
#[derive(Debug)]
pub(crate) struct Versions {
    pub(crate) cpu: &'static [DType],
    pub(crate) cuda: &'static [DType],
}

/// f32 everywhere, and f64 on the CPU for checks.
pub(crate) const FLOATS: Versions = Versions {
    cpu: &[DType::F32, DType::F64],
    cuda: &[DType::F32],
};

/// As `FLOATS`, and bf16, where the math is in f32 and its result is rounded once.
pub(crate) const FLOATS_AND_BF16: Versions = Versions {
    cpu: &[DType::F32, DType::F64, DType::BF16],
    cuda: &[DType::F32, DType::BF16],
};

/// Every dtype on every device: for operations that only move or convert elements.
pub(crate) const EVERY_DTYPE: Versions = Versions {
    cpu: &DType::ALL,
    cuda: &DType::ALL,
};

impl Versions {
    fn on(&self, device: Device) -> &'static [DType] {
        match device {
            Device::Cpu => self.cpu,
            Device::Cuda(_) => self.cuda,
        }
    }
}

/// Runs `$body` with `$T` bound to f64 if that is `$dtype`, else to f32. As f32, a `Buffer` in bf16
/// has a widened copy of its elements, so only operations that need not be fast leave bf16 to this.
macro_rules! with_float {
    ($dtype:expr, $T:ident => $body:expr) => {{
        #[allow(unused_imports)]
        use $crate::{Element as _, ops::float::Float as _};
        if $dtype == $crate::DType::F64 {
            type $T = f64;
            $body
        } else {
            type $T = f32;
            $body
        }
    }};
}
pub(crate) use with_float;

/// An operand, by its position in the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(u8);

#[derive(Clone, Copy)]
struct CallOperand<'a> {
    role: &'static str,
    tensor: &'a Tensor,
    writes: bool,
    /// Whether the first kernel that writes it reads it too: for notes on a graph's nodes.
    updates: bool,
    /// The output that may have exactly the same elements, which are then updated in place.
    in_place_with: Option<Slot>,
    /// The output that does have the same elements, once `place` has found it.
    in_place_of: Option<Slot>,
}

/// An operation being called, with its operands where the caller has them.
pub(crate) struct OpCall<'a> {
    pub(crate) by: Caller,
    operands: [Option<CallOperand<'a>>; OPERANDS_MAX],
    count: usize,
}

impl<'a> OpCall<'a> {
    #[track_caller]
    pub(crate) fn new(op: &'static str) -> OpCall<'a> {
        OpCall::by(Caller::new(op))
    }

    /// The operation that `by` asked for.
    pub(crate) fn by(by: Caller) -> OpCall<'a> {
        OpCall {
            by,
            operands: [None; OPERANDS_MAX],
            count: 0,
        }
    }

    fn push(&mut self, role: &'static str, tensor: &'a Tensor, writes: bool) -> Slot {
        self.operands[self.count] = Some(CallOperand {
            role,
            tensor,
            writes,
            updates: false,
            in_place_with: None,
            in_place_of: None,
        });
        self.count += 1;
        Slot(self.count as u8 - 1)
    }

    /// Adds an operand that is only read.
    pub(crate) fn reads(&mut self, role: &'static str, tensor: &'a Tensor) -> Slot {
        self.push(role, tensor, false)
    }

    /// Adds an operand that is written (and may be read).
    pub(crate) fn writes(&mut self, role: &'static str, tensor: &'a Tensor) -> Slot {
        self.push(role, tensor, true)
    }

    /// Adds an operand that is read and written.
    pub(crate) fn updates(&mut self, role: &'static str, tensor: &'a Tensor) -> Slot {
        let slot = self.push(role, tensor, true);
        if let Some(operand) = &mut self.operands[usize::from(slot.0)] {
            operand.updates = true;
        }
        slot
    }

    /// Adds an operand that may be absent.
    pub(crate) fn reads_some(
        &mut self,
        role: &'static str,
        tensor: Option<&'a Tensor>,
    ) -> Option<Slot> {
        tensor.map(|tensor| self.reads(role, tensor))
    }

    /// Adds a written operand that may be absent.
    pub(crate) fn writes_some(
        &mut self,
        role: &'static str,
        tensor: Option<&'a Tensor>,
    ) -> Option<Slot> {
        tensor.map(|tensor| self.writes(role, tensor))
    }

    /// Lets `input` have exactly the elements of `output`: the operation then works in place.
    pub(crate) fn may_be_in_place(&mut self, input: Slot, output: Slot) {
        if let Some(operand) = &mut self.operands[usize::from(input.0)] {
            operand.in_place_with = Some(output);
        }
    }

    fn operand(&self, slot: Slot) -> &CallOperand<'a> {
        self.operands[usize::from(slot.0)]
            .as_ref()
            .expect("a slot comes from push")
    }

    pub(crate) fn tensor(&self, slot: Slot) -> &'a Tensor {
        self.operand(slot).tensor
    }

    fn slots(&self) -> impl Iterator<Item = Slot> + use<> {
        (0..self.count as u8).map(Slot)
    }

    fn all(&self) -> impl Iterator<Item = &CallOperand<'a>> {
        self.operands[..self.count].iter().flatten()
    }

    /// An argument out of range.
    pub(crate) fn value(
        &self,
        what: impl std::fmt::Display,
        expected: impl std::fmt::Display,
        got: impl std::fmt::Display,
    ) -> Error {
        self.by.value(what, expected, got)
    }

    /// An error about one operand.
    pub(crate) fn operand_error(
        &self,
        slot: Slot,
        expected: impl std::fmt::Display,
        help: impl AsRef<str>,
    ) -> Error {
        let operand = self.operand(slot);
        let operand = operand.tensor.as_operand(operand.role);
        self.by.operand(operand, expected, help)
    }

    /// The operand has exactly these dimensions. `meaning` explains them, for example
    /// `[rows of mat1, columns of mat2]`.
    pub(crate) fn has_shape(&self, slot: Slot, dims: &[usize], meaning: &str) -> Result<()> {
        if self.tensor(slot).shape().dims() == dims {
            return Ok(());
        }
        Err(self.operand_error(
            slot,
            format!("shape {dims:?}, that is {meaning}"),
            "make it with that shape, or slice or reshape what you have",
        ))
    }

    /// The lengths of the operand's dimensions, of which there must be `N`.
    pub(crate) fn dims<const N: usize>(&self, slot: Slot, meaning: &str) -> Result<[usize; N]> {
        <[usize; N]>::try_from(self.tensor(slot).shape().dims()).map_err(|_| {
            let dimensions = if N == 1 { "dimension" } else { "dimensions" };
            self.operand_error(slot, format!("{N} {dimensions}, {meaning}"), "reshape it")
        })
    }

    /// Two operands have the same dimensions.
    pub(crate) fn same_shape(&self, slot: Slot, other: Slot) -> Result<()> {
        let wanted = self.tensor(other).shape();
        if self.tensor(slot).shape() == wanted {
            return Ok(());
        }
        let role = self.operand(other).role;
        Err(self.operand_error(
            slot,
            format!("shape {wanted}, as {role} has"),
            "shapes are not broadcast: slice or reshape one of them",
        ))
    }

    /// Two operands have the same dtype.
    pub(crate) fn same_dtype(&self, slot: Slot, other: Slot) -> Result<()> {
        let wanted = self.tensor(other).dtype();
        if self.tensor(slot).dtype() == wanted {
            return Ok(());
        }
        let role = self.operand(other).role;
        Err(self.operand_error(
            slot,
            format!("dtype {wanted}, as {role} has"),
            format!("cast it with .to_dtype(DType::{wanted:?})"),
        ))
    }

    /// The operand has the dtype of `other`, or f32 where that is bf16, whose math is in f32.
    pub(crate) fn math_dtype(&self, slot: Slot, other: Slot) -> Result<()> {
        if self.tensor(other).dtype() != DType::BF16 {
            return self.same_dtype(slot, other);
        }
        if self.tensor(slot).dtype() == DType::F32 {
            return Ok(());
        }
        let role = self.operand(other).role;
        let expected = format!("dtype f32, in which bf16 is computed, as {role} is");
        Err(self.operand_error(slot, expected, "cast it with .to_dtype(DType::F32)"))
    }

    /// The operand has the dtype of `other`, or is f32 where that is bf16.
    pub(crate) fn same_or_wider(&self, slot: Slot, other: Slot) -> Result<()> {
        let [dtype, narrow] = [slot, other].map(|slot| self.tensor(slot).dtype());
        if (dtype, narrow) == (DType::F32, DType::BF16) {
            return Ok(());
        }
        self.same_dtype(slot, other)
    }

    /// The operand has one of these dtypes.
    pub(crate) fn has_dtype(&self, slot: Slot, dtypes: &[DType]) -> Result<()> {
        if dtypes.contains(&self.tensor(slot).dtype()) {
            return Ok(());
        }
        let names: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
        Err(self.operand_error(
            slot,
            format!("dtype {}", names.join(" or ")),
            "cast it with .to_dtype(…)",
        ))
    }

    /// The operand is row-major.
    pub(crate) fn row_major(&self, slot: Slot) -> Result<()> {
        if self.tensor(slot).is_transposed() {
            return Err(self.operand_error(
                slot,
                "row-major elements, got a transposed view",
                "call .contiguous() on it first",
            ));
        }
        Ok(())
    }

    /// All operands are row-major.
    pub(crate) fn all_row_major(&self) -> Result<()> {
        self.slots().try_for_each(|slot| self.row_major(slot))
    }

    /// These operands are row-major and have the shape and dtype of the first.
    pub(crate) fn elementwise(&self, slots: &[Slot]) -> Result<()> {
        for &slot in slots {
            self.same_shape(slot, slots[0])?;
            self.same_dtype(slot, slots[0])?;
            self.row_major(slot)?;
        }
        Ok(())
    }
}
