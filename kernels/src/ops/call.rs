//! What every operation does before its math: checks the operands, brings them to one device (or
//! refuses), and borrows their memory. Errors name the operation, the operand and the caller's
//! line.
//!
//! ```text
//! let mut call = Call::new("relu");
//! let out = call.writes("out", out);            // operand 0 decides on which device operands meet
//! let x = call.reads("x", x);
//! call.elementwise(&[out, x])?;                 // or any other check
//! call.run(x, &FLOATS, |placed| {
//!     let [mut out, x] = placed.enter([out, x])?;
//!     if let Some(gpu) = placed.launcher() {
//!         return gpu.launch(…);
//!     }
//!     with_float!(placed.dtype, T => …out.elements_mut::<T>(), x.elements::<T>()…);
//!     Ok(())
//! })
//! ```

use std::sync::Arc;

use crate::cuda::nodes::{self, Notes};
use crate::cuda::queue::Queue;
use crate::error::{Caller, Error, Line, Result};
use crate::launch::{Argument, Launcher};
use crate::storage::Borrow;
use crate::stream::Stream;
use crate::transfer::{self, Asked};
use crate::{DType, Device, Element, Tensor};

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

/// As `FLOATS`, and bf16 on CUDA, where the math is in f32 and its result is rounded once.
pub(crate) const FLOATS_AND_BF16: Versions = Versions {
    cpu: &[DType::F32, DType::F64],
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
            _ => self.cuda,
        }
    }
}

/// Runs `$body` with `$T` bound to f64 if that is `$dtype`, else to f32.
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
struct Operand<'a> {
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
pub(crate) struct Call<'a> {
    pub(crate) by: Caller,
    operands: [Option<Operand<'a>>; OPERANDS_MAX],
    count: usize,
}

impl<'a> Call<'a> {
    #[track_caller]
    pub(crate) fn new(op: &'static str) -> Call<'a> {
        Call::by(Caller::new(op))
    }

    /// The operation that `by` asked for.
    pub(crate) fn by(by: Caller) -> Call<'a> {
        Call {
            by,
            operands: [None; OPERANDS_MAX],
            count: 0,
        }
    }

    fn push(&mut self, role: &'static str, tensor: &'a Tensor, writes: bool) -> Slot {
        self.operands[self.count] = Some(Operand {
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

    fn operand(&self, slot: Slot) -> &Operand<'a> {
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

    fn all(&self) -> impl Iterator<Item = &Operand<'a>> {
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

    /// Brings the operands to one device under the transfer policy in force, runs `body` there, and
    /// brings outputs back that the policy moved. The math runs in the dtype of the operand `math`;
    /// `versions` lists the dtypes that are supported.
    pub(crate) fn run<R>(
        self,
        math: Slot,
        versions: &'static Versions,
        body: impl FnOnce(&Placed<'_>) -> Result<R>,
    ) -> Result<R> {
        let placed = self.place(math, versions)?;
        let result = body(&placed)?;
        placed.finish()?;
        Ok(result)
    }

    fn place(mut self, math: Slot, versions: &'static Versions) -> Result<Placed<'a>> {
        nodes::note(Notes::begin);
        self.find_overlaps()?;
        let mut roles = [("", self.tensor(Slot(0))); OPERANDS_MAX];
        for (entry, operand) in roles.iter_mut().zip(self.all()) {
            *entry = (operand.role, operand.tensor);
        }
        let device = transfer::meeting_place(&roles[..self.count], self.by)?;
        let dtype = self.tensor(math).dtype();
        if !versions.on(device).contains(&dtype) {
            return Err(self.no_version(math, device, versions));
        }
        let mut moved = Vec::new();
        if self.all().any(|operand| operand.tensor.device() != device) {
            for slot in self.slots() {
                moved.push(self.bring(slot, device, &moved)?);
            }
        }
        let queue = match device {
            Device::Cpu => None,
            _ => Stream::current_at(device, self.by)?.queue().cloned(),
        };
        Ok(Placed {
            call: self,
            dtype,
            moved,
            queue,
        })
    }

    /// Finds operands that are in place of an output, and refuses every other overlap with an
    /// output. It looks at the caller's tensors: copies on another device would hide an overlap.
    fn find_overlaps(&mut self) -> Result<()> {
        for first in self.slots() {
            for second in self.slots().skip(usize::from(first.0) + 1) {
                let (a, b) = (self.operand(first), self.operand(second));
                if !(a.writes || b.writes) || !a.tensor.shares_memory_with(b.tensor) {
                    continue;
                }
                let same = a.tensor.byte_range() == b.tensor.byte_range();
                let (slot, output) = match (a.in_place_with, b.in_place_with) {
                    (_, Some(output)) if same && output == first => (second, first),
                    (Some(output), _) if same && output == second => (first, second),
                    _ => {
                        let (writer, reader) = if a.writes { (a, b) } else { (b, a) };
                        let [first, second] =
                            [writer, reader].map(|it| it.tensor.as_operand(it.role));
                        return Err(self.by.overlap(first, second));
                    }
                };
                if let Some(operand) = &mut self.operands[usize::from(slot.0)] {
                    operand.in_place_of = Some(output);
                }
            }
        }
        Ok(())
    }

    /// Copies an operand to `device` if it is elsewhere. The caller's tensor stays entered until
    /// the operation is over, so that no other thread changes it, or reads an output too early.
    fn bring(
        &self,
        slot: Slot,
        device: Device,
        others: &[Option<Moved<'a>>],
    ) -> Result<Option<Moved<'a>>> {
        let operand = self.operand(slot);
        if operand.tensor.device() == device || operand.in_place_of.is_some() {
            return Ok(None);
        }
        let entered = operand
            .tensor
            .enter(operand.role, operand.writes, self.by)?;
        // Elements in two roles are copied once.
        let brought = others.iter().zip(self.all()).find_map(|(other, role)| {
            let same = other.is_some() && role.tensor.is_same_memory(operand.tensor);
            other
                .as_ref()
                .filter(|_| same)
                .map(|other| operand.tensor.with_memory_of(&other.copy))
        });
        let copy = match brought {
            Some(copy) => copy,
            None => {
                transfer::cross_entered(operand.tensor, &entered, device, Asked::ByPolicy, self.by)?
            }
        };
        Ok(Some(Moved { copy, entered }))
    }

    fn no_version(&self, math: Slot, device: Device, versions: &'static Versions) -> Error {
        let Operand { role, tensor, .. } = self.operand(math);
        let (op, dtype, line) = (self.by.op, tensor.dtype(), Line(self.by.at));
        let names = |dtypes: &[DType]| {
            let names: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
            names.join(", ")
        };
        let mut supported = format!("{} on cpu", names(versions.cpu));
        // Mention GPUs only where there is one.
        if Device::best().is_accelerator() {
            supported = format!("{supported}, {} on cuda", names(versions.cuda));
        }
        let help = if versions.cpu.contains(&dtype) {
            "move it with .to(Device::Cpu)".to_string()
        } else {
            let dtype = versions.on(device)[0];
            format!("cast it with .to_dtype(DType::{dtype:?})")
        };
        let operand = tensor.as_operand(role);
        Error::NoVersion(format!(
            "{op}: there is no version for {dtype} on {device}: {operand} ({line}); supported: \
             {supported}; help: {help}"
        ))
    }
}

/// An operand that the policy moved.
struct Moved<'a> {
    copy: Tensor,
    /// The caller's tensor.
    entered: Borrow<'a>,
}

/// An operation whose operands are all on one device.
pub(crate) struct Placed<'a> {
    pub(crate) call: Call<'a>,
    /// The dtype of the operand that decides in what the math runs.
    pub(crate) dtype: DType,
    /// What the policy moved, by slot; empty where all operands were on one device.
    moved: Vec<Option<Moved<'a>>>,
    /// The current stream of a GPU.
    queue: Option<Arc<Queue>>,
}

impl Placed<'_> {
    pub(crate) fn tensor(&self, slot: Slot) -> &Tensor {
        let slot = self.call.operand(slot).in_place_of.unwrap_or(slot);
        let moved = self.moved.get(usize::from(slot.0)).and_then(Option::as_ref);
        moved.map_or_else(|| self.call.tensor(slot), |moved| &moved.copy)
    }

    /// Launches kernels, if the operands are on a GPU.
    pub(crate) fn launcher(&self) -> Option<Launcher> {
        let queue = self.queue.clone()?;
        Some(Launcher::new(queue, self.call.by))
    }

    /// Enters the memory of these operands.
    pub(crate) fn enter<const N: usize>(&self, slots: [Slot; N]) -> Result<[Buffer<'_>; N]> {
        let mut entered = [const { None }; N];
        for (place, slot) in entered.iter_mut().zip(slots) {
            *place = Some(self.enter_one(slot)?);
        }
        Ok(entered.map(|buffer| buffer.expect("every slot was entered")))
    }

    /// As `enter`, for an operand that may be absent.
    pub(crate) fn enter_some(&self, slot: Option<Slot>) -> Result<Option<Buffer<'_>>> {
        slot.map(|slot| self.enter_one(slot)).transpose()
    }

    /// Enters an output that this operation has just made.
    pub(crate) fn enter_new<'b>(&self, out: &'b Tensor) -> Result<Buffer<'b>> {
        self.enter_as(out, "out", true, false)
    }

    fn enter_one(&self, slot: Slot) -> Result<Buffer<'_>> {
        let operand = self.call.operand(slot);
        let in_place = operand.in_place_of.is_some();
        let buffer = self.enter_as(self.tensor(slot), operand.role, operand.writes, in_place)?;
        if self.queue.is_some() && !in_place {
            nodes::note(|notes| {
                let is_read_in_place = self.call.all().any(|it| it.in_place_of == Some(slot));
                let reads = !operand.writes || operand.updates || is_read_in_place;
                notes.operand(buffer.address, buffer.bytes(), [reads, operand.writes]);
            });
        }
        Ok(buffer)
    }

    fn enter_as<'b>(
        &self,
        tensor: &'b Tensor,
        role: &'static str,
        writes: bool,
        in_place: bool,
    ) -> Result<Buffer<'b>> {
        let by = self.call.by;
        let borrow = match &self.queue {
            _ if in_place => None,
            None => Some(tensor.enter(role, writes, by)?),
            Some(queue) => Some(tensor.enter_for(role, writes, queue, by)?),
        };
        Ok(Buffer {
            borrow,
            address: tensor.address(),
            dtype: tensor.dtype(),
            count: tensor.count(),
        })
    }

    /// Brings outputs that the policy moved back to the caller's device. No borrow may be left.
    fn finish(self) -> Result<()> {
        for (operand, moved) in self.call.all().zip(self.moved) {
            if let (true, Some(mut moved)) = (operand.writes, moved) {
                let by = self.call.by;
                transfer::bring_back(operand.tensor, &mut moved.entered, &moved.copy, by)?;
            }
        }
        Ok(())
    }
}

const IN_PLACE: &str = "only operands declared with may_be_in_place are ever in place";

/// An operand's memory, entered, unless the operand is in place of an output, which is entered.
pub(crate) struct Buffer<'a> {
    borrow: Option<Borrow<'a>>,
    address: u64,
    pub(crate) dtype: DType,
    /// Elements.
    pub(crate) count: usize,
}

impl Buffer<'_> {
    pub(crate) fn bytes(&self) -> usize {
        self.count * self.dtype.bytes()
    }

    /// The elements, unless the operand is in place.
    pub(crate) fn unless_in_place<T: Element>(&self) -> Option<&[T]> {
        self.borrow.as_ref().map(Borrow::elements)
    }

    /// The elements of an operand that cannot be in place.
    pub(crate) fn elements<T: Element>(&self) -> &[T] {
        self.unless_in_place().expect(IN_PLACE)
    }

    /// The elements of an output.
    pub(crate) fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        self.borrow.as_mut().expect(IN_PLACE).elements_mut()
    }

    /// The address in the device's memory: that of the output for an operand in place of it.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn is_in_place(&self) -> bool {
        self.borrow.is_none()
    }
}

/// A pointer to the first element.
impl Argument for Buffer<'_> {
    fn word(&self) -> u64 {
        self.address()
    }
}
