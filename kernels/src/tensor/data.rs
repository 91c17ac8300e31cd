//! Moving a tensor's data: `to`, `to_dtype`, `copy_from`, `to_vec`, `item`, and slices lent to a
//! closure. Every transfer goes through `transfer.rs`.

use std::panic::Location;

use super::Tensor;
use crate::error::{Error, Result, Site};
use crate::transfer::{self, Asked};
use crate::{DType, Device, Element, ops};

/// Where `to` moves a tensor: a device, or a device and a dtype.
#[derive(Clone, Copy, Debug)]
pub struct Destination {
    device: Device,
    dtype: Option<DType>,
}

impl From<Device> for Destination {
    fn from(device: Device) -> Destination {
        Destination {
            device,
            dtype: None,
        }
    }
}

impl From<(Device, DType)> for Destination {
    fn from((device, dtype): (Device, DType)) -> Destination {
        Destination {
            device,
            dtype: Some(dtype),
        }
    }
}

impl Tensor {
    /// This tensor on a device (`to(Device::Cuda(0))`), or on a device in a dtype
    /// (`to((device, DType::BF16))`). Itself if nothing changes, else a copy that keeps the name.
    /// With both, the narrower dtype crosses.
    #[track_caller]
    pub fn to(&self, destination: impl Into<Destination>) -> Result<Tensor> {
        let Destination { device, dtype } = destination.into();
        let (dtype, at) = (dtype.unwrap_or(self.dtype), Location::caller());
        if dtype.bytes() < self.dtype.bytes() {
            self.to_dtype(dtype)?.to_at(device, "to", at)
        } else {
            self.to_at(device, "to", at)?.to_dtype(dtype)
        }
    }

    pub(crate) fn to_at(&self, device: Device, op: &'static str, at: Site) -> Result<Tensor> {
        if self.device() == device {
            return Ok(self.clone());
        }
        transfer::cross(self, device, op, Asked::Explicitly, at)
    }

    /// This tensor in `dtype`: itself if it has that dtype, else a copy on the same device. Floats
    /// round to the nearest, ties to even; floats to integers truncate and saturate, NaN becomes 0.
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<Tensor> {
        if self.dtype == dtype {
            return Ok(self.clone());
        }
        Ok(ops::cast(self, dtype)?.with_name_of(self))
    }

    /// Copies the elements of `source` into this tensor: same dtype and shape, any two devices.
    #[track_caller]
    pub fn copy_from(&self, source: &Tensor) -> Result<()> {
        let at = Location::caller();
        self.check_copy_from(source, "copy_from", at)?;
        transfer::copy_into(self, source, "copy_from", at)
    }

    pub(crate) fn check_copy_from(
        &self,
        source: &Tensor,
        op: &'static str,
        at: Site,
    ) -> Result<()> {
        let refuse = |expected: String, help: &str| {
            let source = source.as_operand("source");
            Err(Error::operand(op, source, expected, help, at))
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
            return Err(Error::overlap(op, target, source, at));
        }
        Ok(())
    }

    /// The elements in order, as a vector of the Rust type of the tensor's dtype.
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let at = Location::caller();
        self.check_element::<T>("to_vec", at)?;
        let here = transfer::on_host(self, "to_vec", at)?.contiguous_at("to_vec", at)?;
        let borrow = here.enter("x", false, "to_vec", at)?;
        Ok(borrow.elements::<T>().to_vec())
    }

    /// The only element. On a GPU this waits for all earlier work, so use it for logging and not in
    /// an inner loop. The ledger counts every call with its line.
    #[track_caller]
    pub fn item(&self) -> Result<f64> {
        let at = Location::caller();
        if self.count() != 1 {
            let help = "reduce it first (ops::sum, ops::mean), or read all of it with to_vec";
            return Err(self.misfit("item", "exactly one element", help));
        }
        transfer::scalar(self, at)
    }

    /// Lends the elements to `look` in memory order, which for a transposed matrix is that of its
    /// transpose. The tensor must be in host memory.
    #[track_caller]
    pub fn with_slice<T: Element, R>(&self, look: impl FnOnce(&[T]) -> R) -> Result<R> {
        let at = Location::caller();
        self.check_element::<T>("with_slice", at)?;
        self.check_on_host("with_slice", at)?;
        let borrow = self.enter("x", false, "with_slice", at)?;
        Ok(look(borrow.elements()))
    }

    /// As `with_slice`, for writing.
    #[track_caller]
    pub fn with_slice_mut<T: Element, R>(&self, change: impl FnOnce(&mut [T]) -> R) -> Result<R> {
        let at = Location::caller();
        self.check_element::<T>("with_slice_mut", at)?;
        self.check_on_host("with_slice_mut", at)?;
        let mut borrow = self.enter("x", true, "with_slice_mut", at)?;
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
        self.check_on_host(op, at)?;
        let borrow = self.enter("tensor", false, op, at)?;
        Ok(look(borrow.elements()))
    }

    /// As `with_bytes`, for writing.
    pub fn with_bytes_mut<R>(
        &self,
        op: &'static str,
        at: Site,
        change: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R> {
        self.check_on_host(op, at)?;
        let mut borrow = self.enter("tensor", true, op, at)?;
        Ok(change(borrow.elements_mut()))
    }

    fn check_element<T: Element>(&self, op: &'static str, at: Site) -> Result<()> {
        if T::DTYPE == self.dtype {
            return Ok(());
        }
        let (is, wanted) = (self.dtype, T::DTYPE);
        let help = format!("ask for {is}, or cast with .to_dtype(DType::{wanted:?}) first");
        let expected = format!("dtype {wanted}");
        Err(Error::operand(op, self.as_operand("x"), expected, help, at))
    }

    fn check_on_host(&self, op: &'static str, at: Site) -> Result<()> {
        if self.device() == Device::Cpu {
            return Ok(());
        }
        let help = "copy it with .to(Device::Cpu) first";
        Err(Error::operand(
            op,
            self.as_operand("x"),
            "host memory",
            help,
            at,
        ))
    }
}
