//! Copies of tensors: `to`, `to_dtype`, `copy_from`, `to_vec`, `item`. Every transfer goes through
//! `transfer.rs`.

use super::cast::cast;
use crate::error::{Caller, Result};
use crate::transfer::{self, Asked};
use crate::{DType, Device, Element, Tensor};

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
        let (dtype, by) = (dtype.unwrap_or(self.dtype()), Caller::new("to"));
        if dtype.bytes() < self.dtype().bytes() {
            self.to_dtype(dtype)?.to_at(device, by)
        } else {
            self.to_at(device, by)?.to_dtype(dtype)
        }
    }

    pub(crate) fn to_at(&self, device: Device, by: Caller) -> Result<Tensor> {
        if self.device() == device {
            return Ok(self.clone());
        }
        transfer::cross(self, device, Asked::Explicitly, by)
    }

    /// This tensor in `dtype`: itself if it has that dtype, else a copy on the same device. Floats
    /// round to the nearest, ties to even; floats to integers truncate and saturate, NaN becomes 0.
    #[track_caller]
    pub fn to_dtype(&self, dtype: DType) -> Result<Tensor> {
        if self.dtype() == dtype {
            return Ok(self.clone());
        }
        Ok(cast(self, dtype)?.with_name_of(self))
    }

    /// Copies the elements of `source` into this tensor: same dtype and shape, any two devices.
    #[track_caller]
    pub fn copy_from(&self, source: &Tensor) -> Result<()> {
        let by = Caller::new("copy_from");
        self.check_copy_from(source, by)?;
        transfer::copy_into(self, source, by)
    }

    /// The elements in order, as a vector of the Rust type of the tensor's dtype.
    #[track_caller]
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        let by = Caller::new("to_vec");
        self.check_element::<T>(by)?;
        let here = transfer::on_host(self, by)?.contiguous_at(by)?;
        let borrow = here.enter("x", false, by)?;
        Ok(borrow.elements::<T>().to_vec())
    }

    /// The only element. On a GPU this waits for all earlier work, so use it for logging and not in
    /// an inner loop. The ledger counts every call with its line.
    #[track_caller]
    pub fn item(&self) -> Result<f64> {
        let by = Caller::new("item");
        if self.count() != 1 {
            let help = "reduce it first (ops::sum, ops::mean), or read all of it with to_vec";
            return Err(self.misfit("item", "exactly one element", help));
        }
        transfer::scalar(self, by)
    }
}
