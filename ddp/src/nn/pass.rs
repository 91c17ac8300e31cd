//! One pass over a model: where layers find their parameters and get memory, and the stack between forward and backward.

use ddp_kernels::ops::{self, Activation};
use ddp_kernels::{DType, Device, Tensor};

use crate::error::{Error, Result};
use crate::nn::build::Place;
use crate::nn::layer::{Fold, Folded};
use crate::params::{ParamId, Params};

/// Memory for activations, used again: a buffer is free when no handle on it is left but this one's. A training step takes the
/// same shapes in the same order each time, so it gets the same addresses, and after the first step nothing is allocated.
#[derive(Debug)]
pub struct Scratch {
    device: Device,
    buffers: Vec<Tensor>,
}

impl Scratch {
    /// Scratch memory on `device`.
    pub fn new(device: Device) -> Scratch {
        Scratch { device, buffers: Vec::new() }
    }

    /// A tensor with unspecified contents, for as long as handles on it live.
    #[track_caller]
    pub fn take(&mut self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let count: usize = shape.iter().product();
        let fits = |buffer: &&Tensor| buffer.dtype() == dtype && buffer.count() >= count && buffer.is_only_handle();
        if let Some(buffer) = self.buffers.iter().filter(fits).min_by_key(|buffer| buffer.count()) {
            return Ok(buffer.slice(0..count)?.reshape(shape)?);
        }
        let buffer = Tensor::empty(&[count], dtype, self.device)?;
        self.buffers.push(buffer.clone());
        Ok(buffer.reshape(shape)?)
    }

    /// How many bytes the buffers have together.
    pub fn bytes(&self) -> usize {
        self.buffers.iter().map(Tensor::bytes).sum()
    }
}

/// What a pass is about: which rows, which step, training or not.
#[derive(Clone, Copy, Debug)]
pub struct PassOptions<'a> {
    /// Whether a backward follows: layers save what it needs, dropout drops.
    pub training: bool,
    /// Whether gradients are added to what is there (micro-batches after the first) or replace it.
    pub accumulate: bool,
    /// Whether this is the last micro-batch: a gradient finished in it is complete.
    pub last: bool,
    /// The seed of what is drawn by sample and step.
    pub seed: u64,
    /// i64 \[2\] on the model's device: the step, and the global number of the first row of this pass.
    pub position: &'a Tensor,
}

/// One forward, or one forward and its backward.
pub struct Pass<'a> {
    params: &'a Params,
    scratch: &'a mut Scratch,
    saved: &'a mut Saved,
    options: PassOptions<'a>,
    listener: &'a mut dyn Listener,
}

/// Who hears of what a pass has finished, and of what it is about to read: the reducer, which sums gradients over the ranks while the
/// pass goes on, and under ZeRO-1 gathers values. A closure of a `ParamId` hears of gradients alone.
pub trait Listener {
    /// The values of this parameter are about to be read: makes sure that they are those of this step.
    fn needed(&self, parameter: ParamId) -> Result<()> {
        let _ = parameter;
        Ok(())
    }

    /// The gradient of this parameter is complete.
    fn ready(&mut self, parameter: ParamId) -> Result<()>;

    /// This tensor is complete: from now on it is the sum over the ranks that is wanted. One rank alone has that already.
    fn reduce(&mut self, tensor: &Tensor) -> Result<()> {
        let _ = tensor;
        Ok(())
    }
}

impl<F: FnMut(ParamId) -> Result<()>> Listener for F {
    fn ready(&mut self, parameter: ParamId) -> Result<()> {
        self(parameter)
    }
}

/// The stack between forward and backward, and which gradients a backward has written so far. Kept between passes for its memory.
#[derive(Debug, Default)]
pub struct Saved {
    stack: Vec<Tensor>,
    /// How high the stack was where each part of the model began that has not been taken back yet.
    marks: Vec<usize>,
    /// For each parameter, how many of its uses this backward has been through.
    uses_done: Vec<usize>,
}

/// Where a layer writes a parameter's gradient.
#[derive(Debug)]
pub struct Gradient<'a> {
    /// The place, in the parameter's shape.
    pub tensor: &'a Tensor,
    /// Whether to add to what is there, or to replace it.
    pub accumulate: bool,
}

impl Gradient<'_> {
    /// Adds `part`, of the same shape, to what is there, or replaces it, as is asked for: for layers whose operations do not
    /// do that themselves. `part` may be in the dtype that layers compute in.
    #[track_caller]
    pub fn write(&self, part: &Tensor) -> Result<()> {
        if self.accumulate {
            ops::axpy(self.tensor, 1.0, part)?
        } else if part.dtype() == self.tensor.dtype() {
            self.tensor.copy_from(part)?
        } else {
            ops::cast_into(self.tensor, part)?
        }
        Ok(())
    }
}

impl<'a> Pass<'a> {
    /// A pass over the model that `params` belongs to. `listener` is told of each parameter whose gradient is complete.
    pub fn new(
        params: &'a Params,
        scratch: &'a mut Scratch,
        saved: &'a mut Saved,
        options: PassOptions<'a>,
        listener: &'a mut dyn Listener,
    ) -> Pass<'a> {
        saved.stack.clear();
        saved.marks.clear();
        saved.uses_done.clear();
        saved.uses_done.resize(params.list().len(), 0);
        Pass { params, scratch, saved, options, listener }
    }

    /// Whether a backward follows.
    pub fn is_training(&self) -> bool {
        self.options.training
    }

    /// The seed of what is drawn by sample and step.
    pub fn seed(&self) -> u64 {
        self.options.seed
    }

    /// i64 \[2\]: the step, and the global number of the first row.
    pub fn position(&self) -> &'a Tensor {
        self.options.position
    }

    /// A parameter's values, in its shape; a buffer's too. To be asked for where they are used, in each forward and backward: other ranks
    /// may be sending them until then.
    pub fn value(&self, parameter: ParamId) -> Result<&'a Tensor> {
        self.listener.needed(parameter)?;
        Ok(self.params.value(parameter))
    }

    /// Where to write the gradient of a parameter; none if it is frozen (then there is nothing to compute, but `finished`
    /// is called all the same).
    pub fn gradient(&self, parameter: ParamId) -> Option<Gradient<'a>> {
        let tensor = self.params.gradient(parameter)?;
        Some(Gradient { tensor, accumulate: self.options.accumulate || self.saved.uses_done[parameter.0] > 0 })
    }

    /// Whether a parameter is trained: it is neither frozen nor a buffer.
    pub fn trains(&self, parameter: ParamId) -> bool {
        self.params.gradient(parameter).is_some()
    }

    /// Whether any parameter is trained that is used between two places of the model.
    pub fn trains_between(&self, start: Place, end: Place) -> bool {
        self.params.trains_between(start, end)
    }

    /// Says that this use's part of the parameter's gradient is written.
    pub fn finished(&mut self, parameter: ParamId) -> Result<()> {
        let done = &mut self.saved.uses_done[parameter.0];
        *done += 1;
        let uses = self.params.uses(parameter);
        if *done > uses {
            let name = &self.params.parameter(parameter).name;
            panic!("the gradient of {name} was finished {done} times in one backward; it was declared for {uses}");
        }
        if *done == uses && self.options.last && self.trains(parameter) {
            self.listener.ready(parameter)?;
        }
        Ok(())
    }

    /// Says that `tensor`, losses perhaps, is complete, and is to become its sum over the ranks.
    pub fn reduce(&mut self, tensor: &Tensor) -> Result<()> {
        self.listener.reduce(tensor)
    }

    /// Checks, after a backward of the whole model, that the gradient of every trained parameter is complete: a reducer
    /// would wait for ever for one that is not.
    pub fn check_complete(&self) -> Result<()> {
        let missing = |id: &ParamId| self.trains(*id) && self.saved.uses_done[id.0] < self.params.uses(*id);
        let Some(id) = (0..self.params.list().len()).map(ParamId).find(missing) else { return Ok(()) };
        Err(Error::Model {
            layer: self.params.parameter(id).name.clone(),
            expected: format!("pass.finished in backward as often as the parameter is used, {}", self.params.uses(id)),
            got: format!("{} calls", self.saved.uses_done[id.0]),
            way_out: "Call it in the backward of the layer that declares the parameter, and of those tied to it."
                .into(),
        })
    }

    /// A tensor with unspecified contents on the model's device, in the dtype that layers compute in. Dropping its handles frees it for
    /// the layers that follow.
    #[track_caller]
    pub fn take(&mut self, shape: &[usize]) -> Result<Tensor> {
        self.scratch.take(shape, self.params.dtype())
    }

    /// As `take`, in a dtype of its own.
    #[track_caller]
    pub fn take_as(&mut self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.scratch.take(shape, dtype)
    }

    /// Keeps a tensor for the backward.
    pub fn save(&mut self, tensor: &Tensor) {
        self.saved.stack.push(tensor.clone());
    }

    /// Takes back the tensor saved last.
    pub fn restore(&mut self) -> Tensor {
        self.saved.stack.pop().expect("a layer's backward takes back as much as its forward saved")
    }

    /// The tensor saved last, left where it is.
    pub fn top(&self) -> &Tensor {
        self.saved.stack.last().expect("a layer's backward takes back as much as its forward saved")
    }

    /// How many tensors are saved.
    pub fn saved_count(&self) -> usize {
        self.saved.stack.len()
    }

    /// Remembers in a forward how much is saved, for `rewind`: what layers made of layers begin with.
    pub fn mark(&mut self) {
        self.saved.marks.push(self.saved.stack.len());
    }

    /// Drops in a backward what has been saved since the latest mark and was not taken back, since nobody needed it. Says
    /// how many tensors that were.
    ///
    /// # Panics
    /// If more was taken back than was saved since.
    pub fn rewind(&mut self) -> usize {
        let mark = self.saved.marks.pop().expect("one mark in forward for each rewind in backward");
        let left = self.saved.stack.len().checked_sub(mark);
        let left = left.expect("a layer's backward takes back no more than its forward saved");
        self.saved.stack.truncate(mark);
        left
    }

    /// What the activation needs that `fold` asks a layer to fold in, once the layer has taken its own off the stack: in the
    /// shape of the gradient `dx` it goes into; nothing if no activation is asked for.
    pub fn below(&self, fold: Fold, dx: &Tensor) -> Result<Option<Tensor>> {
        match fold {
            Fold::Nothing | Fold::Input | Fold::Activation(Activation::Identity) => Ok(None),
            Fold::Activation(_) => Ok(Some(self.top().reshape(dx.shape())?)),
        }
    }

    /// How a layer's backward ends that has written the gradient of its input to `dx`, a tensor it took itself: gives
    /// what `fold` asks for, applying an activation's derivative in place.
    pub fn fold(&self, dx: Tensor, fold: Fold) -> Result<Folded> {
        let saved = self.below(fold, &dx)?;
        match (fold, &saved) {
            (Fold::Nothing, _) => return Ok(Folded::nothing()),
            (Fold::Activation(Activation::Relu), Some(y)) => ops::relu_backward_into(&dx, &dx, y)?,
            (Fold::Activation(Activation::Gelu(kind)), Some(z)) => ops::gelu_backward_into(&dx, &dx, z, kind)?,
            _ => {}
        }
        Ok(Folded { gradient: Some(dx), folded: saved.is_some() })
    }
}

impl std::fmt::Debug for Pass<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pass {:?}, {} tensors saved", self.options, self.saved_count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_is_taken_again_once_every_handle_is_gone_the_smallest_that_fits_first() {
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
        assert_eq!([five.shape().dims(), six.shape().dims(), seven.shape().dims()], [&[5][..], &[2, 3], &[7]]);
        assert!(!five.shares_memory_with(&six) && !six.shares_memory_with(&seven));
        scratch.take(&[5], DType::I64).unwrap();
        assert_eq!(scratch.bytes(), (32 + 5 + 6) * 4 + 5 * 8, "no buffer of another dtype is lent");
        scratch.take(&[0, 3], DType::F32).unwrap();
        scratch.take(&[], DType::F32).unwrap();
    }
}
