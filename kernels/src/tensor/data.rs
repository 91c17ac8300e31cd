//! A tensor's elements, lent to a closure as a slice; and the checks before they are read.

use super::Tensor;
use crate::error::{Caller, Result, Site};
use crate::{Device, Element};

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
