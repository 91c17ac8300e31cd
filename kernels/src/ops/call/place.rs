//! Bringing operands to one device, and borrowing their memory there.

use std::any::Any;
use std::sync::{Arc, OnceLock};

use super::{CallOperand, OPERANDS_MAX, OpCall, Slot, Versions};
use crate::cuda::nodes::{self, Notes};
use crate::cuda::queue::Queue;
use crate::error::{Error, Line, Result};
use crate::launch::{GpuLaunch, KernelArgument};
use crate::ops::round;
use crate::storage::Borrow;
use crate::stream::Stream;
use crate::transfer::{self, Asked};
use crate::{DType, Device, Element, Tensor};

impl<'a> OpCall<'a> {
    /// Brings the operands to one device under the transfer policy in force, runs `body` there, and
    /// brings outputs back that the policy moved. The math runs in the dtype of the operand `math`;
    /// `versions` lists the dtypes that are supported.
    pub(crate) fn run<R: Default>(
        self,
        math: Slot,
        versions: &'static Versions,
        body: impl FnOnce(&Placed<'_>) -> Result<R>,
    ) -> Result<R> {
        if self.tensor(math).device().is_planned() {
            return Ok(R::default());
        }
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
            Device::Cuda(_) => Stream::current_at(device, self.by)?.queue().cloned(),
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
        let CallOperand { role, tensor, .. } = self.operand(math);
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
    pub(crate) call: OpCall<'a>,
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
    pub(crate) fn gpu(&self) -> Option<GpuLaunch> {
        let queue = self.queue.clone()?;
        Some(GpuLaunch::new(queue, self.call.by))
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
            writes,
            wide: OnceLock::new(),
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

const IS_F32: &str = "bf16 is widened to f32 alone";
const IN_PLACE: &str = "only operands declared with may_be_in_place are ever in place";

/// An operand's memory, entered, unless the operand is in place of an output, which is entered.
pub(crate) struct Buffer<'a> {
    borrow: Option<Borrow<'a>>,
    writes: bool,
    /// Elements in bf16 as f32, once they are asked for as such. Those of an output are rounded
    /// back when the buffer is dropped.
    wide: OnceLock<Vec<f32>>,
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
        let borrow = self.borrow.as_ref()?;
        if self.widens::<T>() {
            let wide = self.wide.get_or_init(|| round::wide(borrow.elements()));
            return Some((wide as &dyn Any).downcast_ref::<Vec<T>>().expect(IS_F32));
        }
        Some(borrow.elements())
    }

    fn widens<T: Element>(&self) -> bool {
        (T::DTYPE, self.dtype) == (DType::F32, DType::BF16)
    }

    /// The elements of an operand that cannot be in place.
    pub(crate) fn elements<T: Element>(&self) -> &[T] {
        self.unless_in_place().expect(IN_PLACE)
    }

    /// The elements of an output.
    pub(crate) fn elements_mut<T: Element>(&mut self) -> &mut [T] {
        let widens = self.widens::<T>();
        let borrow = self.borrow.as_mut().expect(IN_PLACE);
        if widens {
            self.wide.get_or_init(|| round::wide(borrow.elements()));
            let wide = self.wide.get_mut().expect("it was just made");
            return (wide as &mut dyn Any)
                .downcast_mut::<Vec<T>>()
                .expect(IS_F32);
        }
        borrow.elements_mut()
    }

    /// The address in the device's memory: that of the output for an operand in place of it.
    pub(crate) fn address(&self) -> u64 {
        self.address
    }

    pub(crate) fn is_in_place(&self) -> bool {
        self.borrow.is_none()
    }
}

impl Drop for Buffer<'_> {
    fn drop(&mut self) {
        if let (true, Some(wide), Some(borrow)) = (self.writes, self.wide.get(), &mut self.borrow) {
            round::narrow(borrow.elements_mut(), wide);
        }
    }
}

/// A pointer to the first element.
impl KernelArgument for Buffer<'_> {
    fn word(&self) -> u64 {
        self.address()
    }
}

/// The dtypes that class indices may have.
pub(crate) const TARGET_DTYPES: [DType; 3] = [DType::U8, DType::I32, DType::I64];

/// One class index for each row (B), as losses and embeddings read it. They are checked before
/// anything is written; on a GPU by the kernels, each of which documents what an invalid one does.
#[derive(Clone, Copy)]
pub(crate) enum Targets<'a> {
    U8(&'a [u8]),
    I32(&'a [i32]),
    I64(&'a [i64]),
}

impl<'a> Targets<'a> {
    /// The targets in an operand of one of `TARGET_DTYPES`.
    pub(crate) fn of(targets: &'a Buffer<'_>) -> Targets<'a> {
        match targets.dtype {
            DType::U8 => Targets::U8(targets.elements()),
            DType::I32 => Targets::I32(targets.elements()),
            DType::I64 => Targets::I64(targets.elements()),
            other => unreachable!("targets of {other} are refused"),
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
        call: &OpCall<'_>,
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
