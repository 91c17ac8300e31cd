//! What every operation does before its math: checks the operands, brings them to one device (or refuses), and enters
//! their memory. Errors name the operation, the operand, and the caller's line.
//!
//! ```text
//! let mut call = Call::new("relu");
//! let out = call.writes("out", out);            // operand 0 decides where operands meet
//! let x = call.reads("x", x);
//! call.same_shape(x, out)?;
//! let placed = call.place(x, &FLOATS)?;
//! let [mut out, x] = placed.enter([out, x])?;   // then out.elements_mut::<f32>(), x.elements::<f32>()
//! …
//! placed.finish()                               // an output that the policy moved goes back
//! ```

use std::panic::Location;
use std::sync::Arc;

use crate::cuda::Launcher;
use crate::cuda::queue::Queue;
use crate::error::{Error, NoVersion, Result, Site};
use crate::storage::Borrow;
use crate::stream::Stream;
use crate::transfer::{self, Asked};
use crate::{DType, Device, Element, Tensor};

/// The most operands an operation has.
const OPERANDS_MAX: usize = 10;

/// Which versions of an operation there are: the dtypes its math runs in, by kind of device.
#[derive(Debug)]
pub(crate) struct Versions {
    pub(crate) cpu: &'static [DType],
    pub(crate) cuda: &'static [DType],
}

/// The math in f32 everywhere, and in f64 on the CPU, for checking.
pub(crate) const FLOATS: Versions = Versions { cpu: &[DType::F32, DType::F64], cuda: &[DType::F32] };

/// As `FLOATS`, and in the half-width types on CUDA, where the math is in f32 and rounded once.
pub(crate) const WIDE: Versions =
    Versions { cpu: &[DType::F32, DType::F64], cuda: &[DType::F32, DType::BF16, DType::F16] };

/// The dtypes whose math is in f32.
pub(crate) const HALVES: [DType; 2] = [DType::BF16, DType::F16];

/// As `FLOATS`, and in bf16 on CUDA: what models compute in, and so their losses read.
pub(crate) const TRAINED: Versions = Versions { cpu: &[DType::F32, DType::F64], cuda: &[DType::F32, DType::BF16] };

/// One operand by its position in the call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot(u8);

#[derive(Clone, Copy)]
struct Operand<'a> {
    role: &'static str,
    tensor: &'a Tensor,
    writes: bool,
    /// May be the very same elements as this other operand, which the operation then updates in place.
    in_place_with: Option<Slot>,
    /// Is: found by `place`.
    in_place_of: Option<Slot>,
}

/// An operation being called: its operands, not yet brought together.
pub(crate) struct Call<'a> {
    pub(crate) op: &'static str,
    pub(crate) at: Site,
    operands: [Option<Operand<'a>>; OPERANDS_MAX],
    count: usize,
}

impl<'a> Call<'a> {
    #[track_caller]
    pub(crate) fn new(op: &'static str) -> Call<'a> {
        Call { op, at: Location::caller(), operands: [None; OPERANDS_MAX], count: 0 }
    }

    fn push(&mut self, role: &'static str, tensor: &'a Tensor, writes: bool) -> Slot {
        self.operands[self.count] = Some(Operand { role, tensor, writes, in_place_with: None, in_place_of: None });
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

    /// Adds an operand that may be absent.
    pub(crate) fn reads_some(&mut self, role: &'static str, tensor: Option<&'a Tensor>) -> Option<Slot> {
        tensor.map(|tensor| self.reads(role, tensor))
    }

    /// Adds a written operand that may be absent.
    pub(crate) fn writes_some(&mut self, role: &'static str, tensor: Option<&'a Tensor>) -> Option<Slot> {
        tensor.map(|tensor| self.writes(role, tensor))
    }

    /// `input` may be exactly the elements of `output`: the operation then works in place.
    pub(crate) fn may_be_in_place(&mut self, input: Slot, output: Slot) {
        if let Some(operand) = &mut self.operands[usize::from(input.0)] {
            operand.in_place_with = Some(output);
        }
    }

    fn operand(&self, slot: Slot) -> &Operand<'a> {
        self.operands[usize::from(slot.0)].as_ref().expect("a slot comes from push")
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

    /// An error about one operand.
    pub(crate) fn misfit(&self, slot: Slot, expected: impl Into<String>, hint: impl Into<String>) -> Error {
        let operand = self.operand(slot);
        Error::Operand {
            op: self.op,
            operand: Box::new(operand.tensor.as_operand(operand.role)),
            expected: expected.into(),
            hint: hint.into(),
            at: self.at,
        }
    }

    /// An error about a number or an element.
    pub(crate) fn bad_value(&self, what: impl Into<String>, expected: impl Into<String>, got: String) -> Error {
        Error::Value { op: self.op, what: what.into(), expected: expected.into(), got, at: self.at }
    }

    /// The operand has exactly these dimensions; `meaning` says what they are, as in `[rows of mat1, columns of mat2]`.
    pub(crate) fn has_shape(&self, slot: Slot, dims: &[usize], meaning: &str) -> Result<()> {
        if self.tensor(slot).shape().dims() == dims {
            return Ok(());
        }
        Err(self.misfit(
            slot,
            format!("shape {dims:?}, that is {meaning}"),
            "Make it with that shape, or slice or reshape what you have.",
        ))
    }

    /// The operand has as many dimensions as `N`; gives their lengths.
    pub(crate) fn dims<const N: usize>(&self, slot: Slot, meaning: &str) -> Result<[usize; N]> {
        <[usize; N]>::try_from(self.tensor(slot).shape().dims()).map_err(|_| {
            let dimensions = if N == 1 { "dimension" } else { "dimensions" };
            self.misfit(slot, format!("{N} {dimensions}, {meaning}"), "Reshape it.")
        })
    }

    /// Two operands have the same dimensions.
    pub(crate) fn same_shape(&self, slot: Slot, other: Slot) -> Result<()> {
        let wanted = self.tensor(other).shape();
        if self.tensor(slot).shape() == wanted {
            return Ok(());
        }
        let role = self.operand(other).role;
        Err(self.misfit(
            slot,
            format!("shape {wanted}, as {role} has"),
            "Shapes are not broadcast: slice or reshape one of them.",
        ))
    }

    /// Two operands have the same dtype.
    pub(crate) fn same_dtype(&self, slot: Slot, other: Slot) -> Result<()> {
        let wanted = self.tensor(other).dtype();
        if self.tensor(slot).dtype() == wanted {
            return Ok(());
        }
        let role = self.operand(other).role;
        Err(self.misfit(
            slot,
            format!("dtype {wanted}, as {role} has"),
            format!("Cast it with .to_dtype(DType::{wanted:?})."),
        ))
    }

    /// The operand has the dtype that the math on `other` runs in: its own, or f32 where that is narrower.
    pub(crate) fn math_dtype(&self, slot: Slot, other: Slot) -> Result<()> {
        let of_other = self.tensor(other).dtype();
        if !HALVES.contains(&of_other) {
            return self.same_dtype(slot, other);
        }
        if self.tensor(slot).dtype() == DType::F32 {
            return Ok(());
        }
        let role = self.operand(other).role;
        let expected = format!("dtype f32, in which {of_other} is computed, as {role} is");
        Err(self.misfit(slot, expected, "Cast it with .to_dtype(DType::F32)."))
    }

    /// The operand has one of these dtypes.
    pub(crate) fn has_dtype(&self, slot: Slot, dtypes: &[DType]) -> Result<()> {
        if dtypes.contains(&self.tensor(slot).dtype()) {
            return Ok(());
        }
        let names: Vec<&str> = dtypes.iter().map(|dtype| dtype.name()).collect();
        Err(self.misfit(slot, format!("dtype {}", names.join(" or ")), "Cast it with .to_dtype(…)."))
    }

    /// The operand's elements lie row by row.
    pub(crate) fn row_major(&self, slot: Slot) -> Result<()> {
        if self.tensor(slot).is_transposed() {
            return Err(self.misfit(
                slot,
                "row-major elements, got a transposed view",
                "Call .contiguous() on it first.",
            ));
        }
        Ok(())
    }

    /// All operands lie row by row.
    pub(crate) fn all_row_major(&self) -> Result<()> {
        self.slots().try_for_each(|slot| self.row_major(slot))
    }

    /// Operands 0, 1 … are one elementwise family: same shape and dtype as operand 0, row-major.
    pub(crate) fn elementwise(&self, slots: &[Slot]) -> Result<()> {
        for &slot in slots {
            self.same_shape(slot, slots[0])?;
            self.same_dtype(slot, slots[0])?;
            self.row_major(slot)?;
        }
        Ok(())
    }

    /// Brings the operands to one device under the policy in force; `math` is the operand whose dtype the math runs
    /// in, and `versions` says for which dtypes there is a version where.
    pub(crate) fn place(mut self, math: Slot, versions: &'static Versions) -> Result<Placed<'a>> {
        self.find_overlaps()?;
        let mut roles = [("", self.tensor(Slot(0))); OPERANDS_MAX];
        for (entry, operand) in roles.iter_mut().zip(self.all()) {
            *entry = (operand.role, operand.tensor);
        }
        let device = transfer::meeting_place(self.op, &roles[..self.count], self.at)?;
        let there = if device == Device::Cpu { versions.cpu } else { versions.cuda };
        if !there.contains(&self.tensor(math).dtype()) {
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
            _ => Stream::current_at(device, self.op, self.at)?.queue().cloned(),
        };
        Ok(Placed { call: self, moved, queue })
    }

    /// Finds operands that are in place of an output, and refuses every other overlap with what is written. Asked of the
    /// caller's own tensors: copies made on another device would hide it.
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
                        return Err(Error::Overlap {
                            op: self.op,
                            first: Box::new(writer.tensor.as_operand(writer.role)),
                            second: Box::new(reader.tensor.as_operand(reader.role)),
                            at: self.at,
                        });
                    }
                };
                if let Some(operand) = &mut self.operands[usize::from(slot.0)] {
                    operand.in_place_of = Some(output);
                }
            }
        }
        Ok(())
    }

    /// Copies an operand to `device` if it is elsewhere. The caller's tensor stays entered until the operation is over,
    /// so that nobody changes it meanwhile, or reads an output that is about to change.
    fn bring(&self, slot: Slot, device: Device, others: &[Option<Moved<'a>>]) -> Result<Option<Moved<'a>>> {
        let operand = self.operand(slot);
        if operand.tensor.device() == device || operand.in_place_of.is_some() {
            return Ok(None);
        }
        let entered = operand.tensor.enter(operand.role, operand.writes, self.op, self.at)?;
        // The same elements in two roles cross once.
        let brought = others.iter().zip(self.all()).find_map(|(other, role)| {
            let same = other.is_some() && role.tensor.is_same_memory(operand.tensor);
            other.as_ref().filter(|_| same).map(|other| operand.tensor.with_memory_of(&other.copy))
        });
        let copy = match brought {
            Some(copy) => copy,
            None => transfer::cross_entered(operand.tensor, &entered, device, self.op, Asked::ByPolicy, self.at)?,
        };
        Ok(Some(Moved { copy, entered }))
    }

    fn no_version(&self, math: Slot, device: Device, versions: &'static Versions) -> Error {
        let operand = self.operand(math);
        let operand = operand.tensor.as_operand(operand.role);
        let names = |dtypes: &[DType]| dtypes.iter().map(|dtype| dtype.name()).collect::<Vec<_>>().join(", ");
        let mut supported = format!("{} on cpu", names(versions.cpu));
        // Where no GPU can be used there is no use in saying what one could do.
        if Device::best().is_accelerator() {
            let cuda = if versions.cuda.is_empty() { "nothing".to_string() } else { names(versions.cuda) };
            supported = format!("{supported}, {cuda} on cuda");
        }
        let there = if device == Device::Cpu { versions.cpu } else { versions.cuda };
        let way_out = match there.first() {
            _ if versions.cpu.contains(&operand.tensor.dtype) => "Move it with .to(Device::Cpu).".to_string(),
            Some(dtype) => format!("Cast it with .to_dtype(DType::{dtype:?})."),
            None => "Use another operation.".to_string(),
        };
        Error::NoVersion(Box::new(NoVersion { op: self.op, operand, device, supported, way_out, at: self.at }))
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
    /// What the policy moved, by slot; empty where all operands were on one device, which costs nothing.
    moved: Vec<Option<Moved<'a>>>,
    /// The stream that the work goes to, on a GPU.
    queue: Option<Arc<Queue>>,
}

impl Placed<'_> {
    pub(crate) fn tensor(&self, slot: Slot) -> &Tensor {
        let slot = self.call.operand(slot).in_place_of.unwrap_or(slot);
        let moved = self.moved.get(usize::from(slot.0)).and_then(Option::as_ref);
        moved.map_or_else(|| self.call.tensor(slot), |moved| &moved.copy)
    }

    /// Where to run kernels, if the operands met on a GPU.
    pub(crate) fn launcher(&self) -> Result<Option<Launcher>> {
        let Some(queue) = &self.queue else { return Ok(None) };
        Ok(Some(Launcher { gpu: queue.gpu, queue: queue.clone(), op: self.call.op, at: self.call.at }))
    }

    /// Enters the memory of all operands in `slots`.
    pub(crate) fn enter<const N: usize>(&self, slots: [Slot; N]) -> Result<[Lent<'_>; N]> {
        let mut lent = [const { Lent(None) }; N];
        for (place, slot) in lent.iter_mut().zip(slots) {
            *place = self.enter_one(slot)?;
        }
        Ok(lent)
    }

    /// As `enter`, for an operand that may be absent.
    pub(crate) fn enter_some(&self, slot: Option<Slot>) -> Result<Option<Lent<'_>>> {
        slot.map(|slot| self.enter_one(slot)).transpose()
    }

    /// Enters an output that this operation has just made.
    pub(crate) fn enter_new<'b>(&self, out: &'b Tensor) -> Result<Lent<'b>> {
        self.enter_as(out, "out", true)
    }

    fn enter_as<'b>(&self, tensor: &'b Tensor, role: &'static str, writes: bool) -> Result<Lent<'b>> {
        let (op, at) = (self.call.op, self.call.at);
        let borrow = match &self.queue {
            None => tensor.enter(role, writes, op, at),
            Some(queue) => tensor.enter_for(role, writes, queue, op, at),
        };
        borrow.map(|borrow| Lent(Some(borrow)))
    }

    /// Enters the memory of one operand.
    pub(crate) fn enter_one(&self, slot: Slot) -> Result<Lent<'_>> {
        let operand = self.call.operand(slot);
        if operand.in_place_of.is_some() {
            return Ok(Lent(None));
        }
        self.enter_as(self.tensor(slot), operand.role, operand.writes)
    }

    /// Brings outputs that the policy moved back to where the caller has them. The borrows must be gone.
    pub(crate) fn finish(self) -> Result<()> {
        for (operand, moved) in self.call.all().zip(self.moved) {
            if let (true, Some(mut moved)) = (operand.writes, moved) {
                let (op, at) = (self.call.op, self.call.at);
                transfer::bring_back(operand.tensor, &mut moved.entered, &moved.copy, op, at)?;
            }
        }
        Ok(())
    }
}

/// An operand's memory, entered; or nothing, when it is the same as an output that is entered already.
pub(crate) struct Lent<'a>(Option<Borrow<'a>>);

impl Lent<'_> {
    /// The elements, unless the operand is the output itself.
    pub(crate) fn unless_in_place<T: Element>(&self) -> Option<&[T]> {
        self.0.as_ref().map(Borrow::elements)
    }

    /// The elements of an operand that cannot be in place.
    pub(crate) fn elements<T: Element>(&self) -> &[T] {
        self.unless_in_place().expect("only operands declared with may_be_in_place are ever in place")
    }

    /// Where it begins in its device's memory; none when it is the output itself.
    pub(crate) fn address(&self) -> Option<u64> {
        self.0.as_ref().map(Borrow::address)
    }

    /// The elements of an output.
    pub(crate) fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        self.0.as_mut().expect("outputs are never in place of another").elements_mut()
    }
}
