//! Tensors of new memory, which no kernel fills. All other constructors are in `ops/create.rs`.

use super::Tensor;
use crate::error::{Caller, Result, TensorInfo};
use crate::storage::{Origin, Storage};
use crate::{DType, Device, Shape};

impl Tensor {
    /// Unspecified elements: for outputs that are written before they are read.
    #[track_caller]
    pub fn empty(shape: &[usize], dtype: DType, device: Device) -> Result<Tensor> {
        let by = Caller::new("empty");
        let shape = Shape::checked(shape, by)?;
        Tensor::allocate(shape, dtype, device, Origin::Computed, by)
    }

    /// Zeros in pinned host memory, whose copies to and from any GPU overlap computing. It is
    /// allocated by the first GPU that this process uses, else by `cuda:0`, which is then in use.
    #[track_caller]
    pub fn zeros_pinned(shape: &[usize], dtype: DType) -> Result<Tensor> {
        let by = Caller::new("zeros_pinned");
        let shape = Shape::checked(shape, by)?;
        Device::Cuda(0).check_usable(by)?;
        let info = TensorInfo {
            name: None,
            dtype,
            shape,
            device: Device::Cpu,
        };
        let bytes = shape.count() * dtype.bytes();
        let storage = Storage::new(bytes, Origin::HostData, true, info, by)?;
        let tensor = Tensor::over(storage, shape, dtype);
        tensor.clear(by)?;
        Ok(tensor)
    }

    /// Zeros new host memory, unless it is zero already.
    pub(crate) fn clear(&self, by: Caller) -> Result<()> {
        if !self.storage().block.is_fresh {
            // Zero in every dtype is all zero bits.
            let mut borrow = self.borrow("tensor", true, by)?;
            borrow.elements_mut::<u8>().fill(0);
        }
        Ok(())
    }
}
