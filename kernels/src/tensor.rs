//! `Tensor`: a handle to a storage, with an offset, a shape, a dtype and a device. Clones and views
//! alias; operations write into tensors given to them. `storage.rs` has the aliasing rule.
//!
//! There are two layouts: row-major, and the transpose of a row-major matrix (`t()`), which costs
//! nothing and which matmuls read directly.

mod views;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::cuda::queue::{Queue, is_capturing};
use crate::error::{Caller, Error, Line, Result, Site, TensorInfo};
use crate::shape::{RANK_MAX, Shape};
use crate::storage::{Borrow, ContentsOrigin, KeptMemory, Storage};
use crate::{DType, Device, Element};

/// A handle to elements on a device, with their dtype and shape.
///
/// Clones and views (`reshape`, `slice`, `t`) share memory, and operations write into tensors given
/// to them. While an operation, a copy or a borrowed slice uses elements, nothing else may write
/// them: the second one, on any thread, gets an error that names both, at once. So safe code cannot
/// have a data race on the host. On a GPU an operation is over, in this sense, when it is in its
/// stream; events order what several streams do to one tensor (see
/// [`Stream::scope`](crate::stream::Stream::scope)).
///
/// Elements are in row-major order, or the transpose of that (`t()`), which matmuls
/// read directly; other operations need `contiguous()`.
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<Storage>,
    /// Elements from the storage's start to the first of this tensor.
    offset: usize,
    shape: Shape,
    dtype: DType,
    /// Whether the elements of this matrix, or of each of several, are in memory as those of its
    /// transpose.
    transposed: bool,
    name: Option<Arc<str>>,
}

impl Tensor {
    /// The device that the elements are on.
    pub fn device(&self) -> Device {
        self.storage.device()
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The lengths of the dimensions, outermost first.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The number of elements.
    pub fn count(&self) -> usize {
        self.shape.count()
    }

    /// The bytes of the elements.
    pub fn bytes(&self) -> usize {
        self.count() * self.dtype.bytes()
    }

    /// The name given by `named`, if any.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Whether this is a transposed view (`t()`).
    pub fn is_transposed(&self) -> bool {
        self.transposed
    }

    /// Whether the elements are in pinned host memory.
    pub fn is_pinned(&self) -> bool {
        self.storage.block.is_pinned()
    }

    /// The same tensor with a name, which errors show. Lists of live tensors show it too if the
    /// tensor is all of its memory and not a view of a part.
    pub fn named(self, name: &str) -> Tensor {
        self.with_name(Some(name.into()))
    }

    /// This tensor with the name of `original`.
    pub(crate) fn with_name_of(self, original: &Tensor) -> Tensor {
        self.with_name(original.name.clone())
    }

    fn with_name(mut self, name: Option<Arc<str>>) -> Tensor {
        if let Some(name) = &name
            && self.bytes() == self.storage.bytes
        {
            self.storage.block.set_name(name);
        }
        self.name = name;
        self
    }

    /// Whether this is the only handle on its memory. Graphs do not count: like operations, they
    /// use it in the order of their launches.
    pub fn is_only_handle(&self) -> bool {
        Arc::strong_count(&self.storage) == 1 + self.storage.graphs()
    }

    /// Whether the two handles share memory.
    pub fn shares_memory_with(&self, other: &Tensor) -> bool {
        let (mine, theirs) = (self.byte_range(), other.byte_range());
        Arc::ptr_eq(&self.storage, &other.storage)
            && !mine.is_empty()
            && !theirs.is_empty()
            && mine.start < theirs.end
            && theirs.start < mine.end
    }

    /// Whether the two handles are the same elements in the same order in memory.
    pub(crate) fn is_same_memory(&self, other: &Tensor) -> bool {
        Arc::ptr_eq(&self.storage, &other.storage) && self.byte_range() == other.byte_range()
    }

    /// This tensor's shape and layout over the memory of `copy`, which holds the same bytes.
    pub(crate) fn with_memory_of(&self, copy: &Tensor) -> Tensor {
        debug_assert_eq!(self.bytes(), copy.bytes());
        Tensor {
            storage: copy.storage.clone(),
            offset: copy.byte_range().start / self.dtype.bytes(),
            ..self.clone()
        }
    }

    /// What this tensor is, without its contents.
    pub fn info(&self) -> TensorInfo {
        TensorInfo {
            name: self.name.clone(),
            dtype: self.dtype,
            shape: self.shape,
            device: self.device(),
        }
    }

    /// The tensor in its role in an operation: `mat2 "w" f32[1000, 1000] on cuda:0`.
    pub(crate) fn as_operand(&self, role: &str) -> String {
        format!("{role} {}", self.info())
    }

    pub(crate) fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The bytes of the storage that the elements occupy.
    pub(crate) fn byte_range(&self) -> Range<usize> {
        let start = self.offset * self.dtype.bytes();
        start..start + self.bytes()
    }

    /// Where the elements begin in the device's memory.
    pub(crate) fn address(&self) -> u64 {
        let start = self.storage.block.pointer.addr().get();
        (start + self.byte_range().start) as u64
    }

    /// Enters the elements' bytes for reading or writing, or returns the clash as an error.
    pub(crate) fn borrow(
        &self,
        role: &'static str,
        writes: bool,
        by: Caller,
    ) -> Result<Borrow<'_>> {
        let entered = self.storage.enter(self.byte_range(), writes, by);
        entered.map_err(|other| {
            let (operand, op, other_op) = (self.as_operand(role), by.op, other.by.op);
            let done = if other.writes { "written" } else { "read" };
            let (line, other_line) = (Line(by.at), Line(other.by.at));
            Error::Busy(format!(
                "{op}: {operand} is being {done} by {other_op} ({other_line}), which has not \
                 finished ({line}); help: let {other_op} finish before you start {op}"
            ))
        })
    }

    /// As `borrow`, for operations: the contents count as used, or as changed.
    pub(crate) fn enter(&self, role: &'static str, writes: bool, by: Caller) -> Result<Borrow<'_>> {
        let borrow = self.borrow(role, writes, by)?;
        if writes {
            self.storage.mark_changed();
        } else {
            self.storage.mark_used();
        }
        Ok(borrow)
    }

    /// As `enter`, for work given to a GPU's stream: the memory is not freed before that is done,
    /// and a graph being captured keeps it.
    pub(crate) fn enter_for(
        &self,
        role: &'static str,
        writes: bool,
        queue: &Arc<Queue>,
        by: Caller,
    ) -> Result<Borrow<'_>> {
        if is_capturing() && !queue.is_captured() {
            let why = "this stream is not part of the capture";
            let help = "let it wait for an event of the captured stream first, or do this before \
                        the capture";
            return Err(by.capture(queue.gpu.device(), why, help));
        }
        let borrow = self.enter(role, writes, by)?;
        self.storage.block.visit(queue, by)?;
        self.join_capture(queue);
        Ok(borrow)
    }

    /// A graph being captured on `queue` keeps this tensor's memory.
    pub(crate) fn join_capture(&self, queue: &Queue) {
        if queue.is_captured() {
            KeptMemory::keep(&self.storage);
        }
    }

    /// A new tensor of unspecified contents.
    pub(crate) fn allocate(
        shape: Shape,
        dtype: DType,
        device: Device,
        origin: ContentsOrigin,
        by: Caller,
    ) -> Result<Tensor> {
        Tensor::make(TensorInfo::new(dtype, shape, device), origin, false, by)
    }

    /// The same, in pinned host memory if `pinned`.
    fn make(info: TensorInfo, origin: ContentsOrigin, pinned: bool, by: Caller) -> Result<Tensor> {
        let (shape, dtype) = (info.shape, info.dtype);
        let bytes = shape.count() * dtype.bytes();
        Ok(Tensor {
            storage: Storage::new(bytes, origin, pinned, info, by)?,
            offset: 0,
            shape,
            dtype,
            transposed: false,
            name: None,
        })
    }

    /// Memory on `target` for this tensor's elements in their order, with its name.
    pub(crate) fn empty_for_arrival(&self, target: Device, by: Caller) -> Result<Tensor> {
        let info = TensorInfo {
            device: target,
            ..self.info()
        };
        let origin = ContentsOrigin::Arrived(self.device(), by.at);
        Ok(Tensor {
            storage: Storage::new(self.bytes(), origin, false, info, by)?,
            offset: 0,
            ..self.clone()
        })
    }
}

impl fmt::Display for Tensor {
    /// Name, dtype, shape and device. Never the contents: printing them would hide a transfer.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info().fmt(f)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({})", self.info())
    }
}

impl Tensor {
    /// Unspecified elements: for outputs that are written before they are read.
    #[track_caller]
    pub fn empty(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let by = Caller::new("empty");
        let shape = Shape::checked(shape, by)?;
        Tensor::allocate(shape, dtype, device, ContentsOrigin::Computed, by)
    }

    /// Zeros in pinned host memory, whose copies to and from any GPU overlap computing. It is
    /// allocated by the first GPU that this process uses, else by `cuda:0`, which is then in use.
    #[track_caller]
    pub fn zeros_pinned(shape: &[usize], dtype: DType) -> Result<Tensor> {
        let by = Caller::new("zeros_pinned");
        let shape = Shape::checked(shape, by)?;
        Device::Cuda(0).check_usable(by)?;
        let info = TensorInfo::new(dtype, shape, Device::Cpu);
        let tensor = Tensor::make(info, ContentsOrigin::HostData, true, by)?;
        tensor.clear(by)?;
        Ok(tensor)
    }

    /// Zeros new host memory, unless it is zero already.
    pub(crate) fn clear(&self, by: Caller) -> Result<()> {
        if !self.storage.block.is_fresh {
            // Zero in every dtype is all zero bits.
            let mut borrow = self.borrow("tensor", true, by)?;
            borrow.elements_mut::<u8>().fill(0);
        }
        Ok(())
    }
}

impl Tensor {
    pub(crate) fn check_copy_from(&self, source: &Tensor, by: Caller) -> Result<()> {
        let refuse = |expected: String, help: &str| {
            let source = source.as_operand("source");
            Err(by.operand(source, expected, help))
        };
        if source.dtype != self.dtype {
            let expected = format!("the target's dtype, {}", self.dtype);
            return refuse(expected, "cast it with .to_dtype(…) first");
        }
        if source.shape != self.shape {
            let expected = format!("the target's shape, {}", self.shape);
            return refuse(expected, "reshape or slice one of them");
        }
        if source.transposed != self.transposed {
            let help = "one is a transposed view: call .contiguous() on it first";
            return refuse("the target's layout".into(), help);
        }
        if self.shares_memory_with(source) {
            let (target, source) = (self.as_operand("target"), source.as_operand("source"));
            return Err(by.overlap(target, source));
        }
        Ok(())
    }

    /// Lends the elements to `look` in memory order, which for a transposed matrix is that of its
    /// transpose. The tensor must be in host memory.
    #[track_caller]
    pub fn with_slice<T: Element, R>(&self, look: impl FnOnce(&[T]) -> R) -> Result<R> {
        let by = Caller::new("with_slice");
        self.check_element::<T>(by)?;
        self.check_on_host(by)?;
        let borrow = self.enter("x", false, by)?;
        Ok(look(borrow.elements()))
    }

    /// As `with_slice`, for writing.
    #[track_caller]
    pub fn with_slice_mut<T: Element, R>(&self, change: impl FnOnce(&mut [T]) -> R) -> Result<R> {
        let by = Caller::new("with_slice_mut");
        self.check_element::<T>(by)?;
        self.check_on_host(by)?;
        let mut borrow = self.enter("x", true, by)?;
        Ok(change(borrow.elements_mut()))
    }

    /// Lends the bytes of the elements to `look` in memory order. Errors name the operation `op`
    /// and the line `at`. The tensor must be in host memory.
    pub fn with_bytes<R>(
        &self,
        op: &'static str,
        at: Site,
        look: impl FnOnce(&[u8]) -> R,
    ) -> Result<R> {
        let by = Caller { op, at };
        self.check_on_host(by)?;
        let borrow = self.enter("tensor", false, by)?;
        Ok(look(borrow.elements()))
    }

    /// As `with_bytes`, for writing.
    pub fn with_bytes_mut<R>(
        &self,
        op: &'static str,
        at: Site,
        change: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R> {
        let by = Caller { op, at };
        self.check_on_host(by)?;
        let mut borrow = self.enter("tensor", true, by)?;
        Ok(change(borrow.elements_mut()))
    }

    pub(crate) fn check_element<T: Element>(&self, by: Caller) -> Result<()> {
        if T::DTYPE == self.dtype {
            return Ok(());
        }
        let (is, wanted) = (self.dtype, T::DTYPE);
        let help = format!("ask for {is}, or cast with .to_dtype(DType::{wanted:?}) first");
        let expected = format!("dtype {wanted}");
        Err(by.operand(self.as_operand("x"), expected, help))
    }

    fn check_on_host(&self, by: Caller) -> Result<()> {
        if self.device() == Device::Cpu {
            return Ok(());
        }
        let help = "copy it with .to(Device::Cpu) first";
        Err(by.operand(self.as_operand("x"), "host memory", help))
    }
}

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

#[cfg(test)]
mod tests;
