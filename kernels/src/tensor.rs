//! `Tensor`: a handle to a storage, with an offset, a shape, a dtype and a device. Clones and views
//! alias; operations write into tensors given to them. `storage.rs` has the aliasing rule.
//!
//! There are two layouts: row-major, and the transpose of a row-major matrix (`t()`), which costs
//! nothing and which matmuls read directly.

mod data;
mod new;
mod shape;
mod views;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::cuda::queue::{Queue, is_capturing};
use crate::error::{Caller, Error, Line, Result, TensorInfo};
use crate::storage::{Borrow, Kept, Origin, Storage};
use crate::{DType, Device, Shape};

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
            Kept::keep(&self.storage);
        }
    }

    /// A tensor that is all of a storage.
    fn over(storage: Arc<Storage>, shape: Shape, dtype: DType) -> Tensor {
        Tensor {
            storage,
            offset: 0,
            shape,
            dtype,
            transposed: false,
            name: None,
        }
    }

    /// A new tensor of unspecified contents.
    pub(crate) fn allocate(
        shape: Shape,
        dtype: DType,
        device: Device,
        origin: Origin,
        by: Caller,
    ) -> Result<Tensor> {
        let info = TensorInfo {
            name: None,
            dtype,
            shape,
            device,
        };
        let bytes = shape.count() * dtype.bytes();
        let storage = Storage::new(bytes, origin, false, info, by)?;
        Ok(Tensor::over(storage, shape, dtype))
    }

    /// Memory on `target` for this tensor's elements in their order, with its name.
    pub(crate) fn empty_for_arrival(&self, target: Device, by: Caller) -> Result<Tensor> {
        let info = TensorInfo {
            device: target,
            ..self.info()
        };
        let origin = Origin::Arrived(self.device(), by.at);
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

#[cfg(test)]
mod tests;
