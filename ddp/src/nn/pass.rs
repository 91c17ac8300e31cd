//! One pass over a model: where layers find their parameters and get memory, and the stack between forward and backward.

use ddp_kernels::{DType, Device, Tensor};

use crate::error::Result;
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
    /// i64 [2] on the model's device: the step, and the global number of the first row of this pass.
    pub position: &'a Tensor,
}

/// One forward, or one forward and its backward.
pub struct Pass<'a> {
    params: &'a Params,
    scratch: &'a mut Scratch,
    saved: &'a mut Saved,
    options: PassOptions<'a>,
    ready: &'a mut dyn FnMut(ParamId) -> Result<()>,
}

/// The stack between forward and backward, and which gradients a backward has written so far. Kept between passes for its memory.
#[derive(Debug, Default)]
pub struct Saved {
    stack: Vec<Tensor>,
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

impl<'a> Pass<'a> {
    /// A pass over the model that `params` belongs to. `ready` is told of each parameter whose gradient is complete.
    pub fn new(
        params: &'a Params,
        scratch: &'a mut Scratch,
        saved: &'a mut Saved,
        options: PassOptions<'a>,
        ready: &'a mut dyn FnMut(ParamId) -> Result<()>,
    ) -> Pass<'a> {
        saved.stack.clear();
        saved.uses_done.clear();
        saved.uses_done.resize(params.declared_count(), 0);
        Pass { params, scratch, saved, options, ready }
    }

    /// Whether a backward follows.
    pub fn is_training(&self) -> bool {
        self.options.training
    }

    /// The seed of what is drawn by sample and step.
    pub fn seed(&self) -> u64 {
        self.options.seed
    }

    /// i64 [2]: the step, and the global number of the first row.
    pub fn position(&self) -> &'a Tensor {
        self.options.position
    }

    /// A parameter's values, in its shape; a buffer's too.
    pub fn value(&self, parameter: ParamId) -> &'a Tensor {
        self.params.value(parameter)
    }

    /// Where to write the gradient of a parameter; none if it is frozen (then there is nothing to compute, but `finished`
    /// is called all the same).
    pub fn gradient(&self, parameter: ParamId) -> Option<Gradient<'a>> {
        let tensor = self.params.gradient(parameter)?;
        Some(Gradient { tensor, accumulate: self.options.accumulate || self.saved.uses_done[parameter.0] > 0 })
    }

    /// Says that this use's part of the parameter's gradient is written.
    pub fn finished(&mut self, parameter: ParamId) -> Result<()> {
        let done = &mut self.saved.uses_done[parameter.0];
        *done += 1;
        let uses = self.params.uses(parameter);
        assert!(*done <= uses, "a gradient was finished {done} times, and declared (and tied) {uses} times");
        if *done == uses && self.options.last && self.params.gradient(parameter).is_some() {
            (self.ready)(parameter)?;
        }
        Ok(())
    }

    /// A tensor with unspecified contents on the model's device, in the model's dtype. Dropping its handles frees it for
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
}

impl std::fmt::Debug for Pass<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Pass {:?}, {} tensors saved", self.options, self.saved_count())
    }
}
