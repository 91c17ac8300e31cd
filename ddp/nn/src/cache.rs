//! The keys and values of earlier tokens, for decoding.

use ddp_kernels::{DType, Device, Tensor};

use crate::error::Result;

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

    /// Tokens of earlier passes.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
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
