//! `Tensor`: a handle on a storage (with offset, shape, dtype, device). Clones and views alias; operations write
//! into tensors given to them; the aliasing rule stands in `storage.rs`. Every constructor takes a device or
//! inherits one: there is no default.
//!
//! Layouts are two: row-major, and the transpose of a row-major matrix (`t()`), which costs nothing and which the
//! matrix products read as it is.

mod create;
mod data;
mod views;

pub use data::Destination;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, OperandInfo, Result, Site, TensorInfo};
use crate::storage::{Borrow, Origin, Storage};
use crate::{DType, Device, Shape};

/// A tensor: where its elements are, what they are, and how they are arranged.
#[derive(Clone)]
pub struct Tensor {
    storage: Arc<Storage>,
    /// Elements from the storage's start to the first of this tensor.
    offset: usize,
    shape: Shape,
    dtype: DType,
    /// A matrix whose elements lie in memory as those of its transpose.
    transposed: bool,
    name: Option<Arc<str>>,
}

impl Tensor {
    /// Where the elements are.
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

    /// How many elements.
    pub fn count(&self) -> usize {
        self.shape.count()
    }

    /// How many bytes the elements take.
    pub fn bytes(&self) -> usize {
        self.count() * self.dtype.bytes()
    }

    /// The name given by `named`, if any.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Whether this is a matrix seen transposed (`t()`).
    pub fn is_transposed(&self) -> bool {
        self.transposed
    }

    /// Whether the elements are in host memory that a device copies from and to without a detour.
    pub fn is_pinned(&self) -> bool {
        self.storage.is_pinned()
    }

    /// The same tensor under a name, which errors and listings use from then on.
    pub fn named(mut self, name: &str) -> Tensor {
        let name: Arc<str> = name.into();
        self.storage.block().set_name(&name);
        self.name = Some(name);
        self
    }

    /// Whether the two handles share memory.
    pub fn shares_memory_with(&self, other: &Tensor) -> bool {
        let (mine, theirs) = (self.byte_range(), other.byte_range());
        Arc::ptr_eq(&self.storage, &other.storage) && mine.start < theirs.end && theirs.start < mine.end
    }

    /// What this tensor is, apart from its contents.
    pub fn info(&self) -> TensorInfo {
        TensorInfo { name: self.name.clone(), dtype: self.dtype, shape: self.shape, device: self.device() }
    }

    pub(crate) fn as_operand(&self, role: &'static str) -> OperandInfo {
        OperandInfo { role, tensor: self.info() }
    }

    pub(crate) fn storage(&self) -> &Storage {
        &self.storage
    }

    /// The bytes of the storage that the elements occupy, whatever their order.
    pub(crate) fn byte_range(&self) -> Range<usize> {
        let start = self.offset * self.dtype.bytes();
        start..start + self.bytes()
    }

    /// Enters the elements' bytes for reading or writing, or says who is in the way.
    pub(crate) fn borrow(&self, role: &'static str, writes: bool, op: &'static str, at: Site) -> Result<Borrow<'_>> {
        self.storage.enter(self.byte_range(), writes, op, at).map_err(|other| Error::Busy {
            op,
            operand: Box::new(self.as_operand(role)),
            other_op: other.op,
            other_writes: other.writes,
            other_at: other.at,
            at,
        })
    }

    /// A new tensor of unspecified contents.
    pub(crate) fn allocate(
        shape: Shape,
        dtype: DType,
        device: Device,
        origin: Origin,
        op: &'static str,
        at: Site,
    ) -> Result<Tensor> {
        let info = TensorInfo { name: None, dtype, shape, device };
        let storage = Storage::new(device, shape.count() * dtype.bytes(), origin, false, info, op, at)?;
        Ok(Tensor { storage, offset: 0, shape, dtype, transposed: false, name: None })
    }

    /// Room on `target` for this tensor's elements in their order, keeping its name.
    pub(crate) fn empty_for_arrival(&self, target: Device, op: &'static str, at: Site) -> Result<Tensor> {
        let info = TensorInfo { device: target, ..self.info() };
        let origin = Origin::Arrived(self.device(), at);
        let storage = Storage::new(target, self.bytes(), origin, false, info, op, at)?;
        Ok(Tensor { storage, offset: 0, ..self.clone() })
    }
}

impl fmt::Display for Tensor {
    /// Name, dtype, shape and device. Never the contents: printing them would be a hidden transfer.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info().fmt(f)
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({})", self.info())
    }
}
