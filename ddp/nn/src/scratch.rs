//! Memory for activations, and in decoding for the keys and values of earlier tokens.

use std::any::Any;
use std::cell::Cell;

use ddp_kernels::{DType, Device, Tensor};

use crate::error::Result;

/// Buffers that are reused: a buffer is free when no other handle to it exists. A training step
/// takes the same shapes in the same order each time, so it gets the same addresses, and allocates
/// nothing after the first step.
#[derive(Debug)]
pub struct Scratch {
    device: Device,
    /// By `ScratchPool`.
    buffers: [Vec<Tensor>; 3],
    /// What runs for losses by their formula, which belongs to the device as buffers do.
    pub(crate) loss_plans: Vec<Box<dyn Any + Send>>,
}

/// Buffers are separate by lifetime, so that a small long-lived tensor does not occupy the large
/// buffer of a short-lived one.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ScratchPool {
    /// Activations that are kept for backward, and all else.
    Kept,
    /// A forward that backward runs again.
    Again,
    /// Tensors that only the next layer reads.
    Brief,
}

impl Scratch {
    /// Scratch memory on `device`, empty at first.
    pub fn new(device: Device) -> Scratch {
        Scratch {
            device,
            buffers: [const { Vec::new() }; 3],
            loss_plans: Vec::new(),
        }
    }

    /// A tensor with unspecified contents. Its buffer is free again when its last handle is
    /// dropped.
    #[track_caller]
    pub fn take(&mut self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.take_again(ScratchPool::Kept, &Cell::default(), shape, dtype)
    }

    /// As `take`, from one pool. `last` is the buffer that this call got last time: it is taken
    /// again if it is free, without a search.
    #[track_caller]
    pub(crate) fn take_again(
        &mut self,
        pool: ScratchPool,
        last: &Cell<Option<usize>>,
        shape: &[usize],
        dtype: DType,
    ) -> Result<Tensor> {
        let count: usize = shape.iter().product();
        let buffers = &mut self.buffers[pool as usize];
        let fits = |at: &usize| {
            let buffer = &buffers[*at];
            buffer.dtype() == dtype && buffer.count() >= count && buffer.is_only_handle()
        };
        let known = last.get().filter(|at| *at < buffers.len() && fits(at));
        let smallest = || {
            let free = (0..buffers.len()).filter(fits);
            free.min_by_key(|at| buffers[*at].count())
        };
        let Some(at) = known.or_else(smallest) else {
            last.set(Some(buffers.len()));
            let buffer = Tensor::empty(&[count], dtype, self.device)?;
            buffers.push(buffer.clone());
            return Ok(buffer.reshape(shape)?);
        };
        last.set(Some(at));
        Ok(buffers[at].slice(0..count)?.reshape(shape)?)
    }

    /// The size of all buffers, in bytes.
    pub fn bytes(&self) -> usize {
        self.buffers.iter().flatten().map(Tensor::bytes).sum()
    }
}

/// What the numbers of a value are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NumberKind {
    /// In the dtype that layers compute in.
    LayerDtype,
    /// In the dtype of sums and gradients.
    SumDtype,
    /// In the dtype of sums, too; kernels that read the layers' dtype get a rounded copy.
    SumDtypeReadRounded,
    /// i64
    Tokens,
    /// i32
    Places,
}

/// The keys and values of the tokens so far.
#[derive(Debug)]
pub(crate) struct Cache {
    /// Tokens of earlier passes.
    pub(crate) tokens: usize,
    /// The most tokens.
    pub(crate) room: usize,
    /// (room, 2·K·D) of each attention, in the order of the layers.
    layers: Vec<Tensor>,
    /// The attention that this pass comes to next.
    pub(crate) next: usize,
}

impl Cache {
    pub(crate) fn new(room: usize) -> Cache {
        Cache {
            tokens: 0,
            room,
            layers: Vec::new(),
            next: 0,
        }
    }

    /// The keys and values of the next attention: of earlier tokens, and `rows` to be written.
    pub(crate) fn next(&mut self, rows: usize, columns: usize, dtype: DType) -> Result<Tensor> {
        if self.next == self.layers.len() {
            let layer = Tensor::empty(&[self.room, columns], dtype, Device::Cpu)?;
            self.layers.push(layer.named("keys and values"));
        }
        self.next += 1;
        Ok(self.layers[self.next - 1].slice(0..self.tokens + rows)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_scratch_is_reused_smallest_fit_first() {
        let mut scratch = Scratch::new(Device::Cpu);
        let large = scratch.take(&[4, 8], DType::F32).unwrap();
        let small = scratch.take(&[5], DType::F32).unwrap();
        assert_eq!(scratch.bytes(), (32 + 5) * 4);
        let view = large.slice(1..2).unwrap();
        drop((large, small));
        // A view keeps its buffer from being taken.
        let other = scratch.take(&[3, 2], DType::F32).unwrap();
        assert!(!other.shares_memory_with(&view));
        assert_eq!(scratch.bytes(), (32 + 5 + 6) * 4);
        drop((view, other));
        let five = scratch.take(&[5], DType::F32).unwrap();
        let six = scratch.take(&[2, 3], DType::F32).unwrap();
        let seven = scratch.take(&[7], DType::F32).unwrap();
        assert_eq!(scratch.bytes(), (32 + 5 + 6) * 4);
        assert_eq!(
            [
                five.shape().dims(),
                six.shape().dims(),
                seven.shape().dims()
            ],
            [&[5][..], &[2, 3], &[7]]
        );
        assert!(!five.shares_memory_with(&six) && !six.shares_memory_with(&seven));
        scratch.take(&[5], DType::I64).unwrap();
        assert_eq!(
            scratch.bytes(),
            (32 + 5 + 6) * 4 + 5 * 8,
            "no buffer of another dtype is lent"
        );
        scratch.take(&[0, 3], DType::F32).unwrap();
        scratch.take(&[], DType::F32).unwrap();
    }
}
