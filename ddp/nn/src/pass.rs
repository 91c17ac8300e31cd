//! One pass over a model: how it gets parameters and memory, what its forward leaves for its
//! backward, and the observer that sees each computed tensor.

use std::any::Any;
use std::cell::{Cell, RefCell};

use ddp_kernels::{DType, Tensor, ops};

use crate::build::ParamId;
use crate::error::{Error, Result};
use crate::params::Params;
use crate::scratch::{Cache, NumberKind, Scratch, ScratchPool};

/// The settings of a pass.
#[derive(Clone, Copy, Debug)]
pub struct PassOptions<'a> {
    /// Whether layers behave as in training: what backward needs is kept, and dropout drops.
    pub training: bool,
    /// Whether gradients are added to those in memory (all micro-batches but the first) or replace
    /// them.
    pub accumulate: bool,
    /// Whether this is the last micro-batch, so that a finished gradient is complete.
    pub last: bool,
    /// The seed of random numbers, which are drawn by sample and step.
    pub seed: u64,
    /// i64 `[2]` on the model's device: the step, and the position of this pass's first row in the
    /// global batch.
    pub position: &'a Tensor,
}

/// A forward, or a forward and its backward.
pub struct Pass<'a> {
    params: &'a Params,
    scratch: &'a mut Scratch,
    saved: &'a mut Saved,
    options: PassOptions<'a>,
    listener: &'a mut dyn Listener,
    /// Whether the last layer is left to the loss: a `Head`, or (if set) any linear one of
    /// positions.
    leaves_head: Option<bool>,
    /// The tokens before those of this pass, in decoding.
    cache: Option<&'a mut Cache>,
}

/// Learns which values a pass is about to read and which gradients it has completed: the reducer,
/// which communicates during the pass. A closure over a `ParamId` learns of gradients only.
pub trait Listener {
    /// The values of this parameter are about to be read. Returns when they are those of this step.
    fn needed(&self, _parameter: ParamId) -> Result<()> {
        Ok(())
    }

    /// The gradient of this parameter is about to be written. Returns when its memory is free.
    fn writes(&self, _parameter: ParamId) {}

    /// The gradient of this parameter is complete.
    fn ready(&mut self, parameter: ParamId) -> Result<()>;
}

impl<F: FnMut(ParamId) -> Result<()>> Listener for F {
    fn ready(&mut self, parameter: ParamId) -> Result<()> {
        self(parameter)
    }
}

/// What forward leaves for backward, and which gradients backward has written so far. Kept between
/// passes to reuse its memory.
#[derive(Debug, Default)]
pub struct Saved {
    /// Values by their number in the model's plan, and that plan's.
    pub(crate) values: Vec<(usize, Tensor)>,
    pub(crate) plan: usize,
    /// By parameter: how many of its uses this backward has finished, and those of later parts.
    uses_done: Vec<usize>,
}

/// Where a layer writes a parameter's gradient.
#[derive(Debug)]
pub struct Gradient<'a> {
    /// The gradient, in the parameter's shape.
    pub tensor: &'a Tensor,
    /// Whether to add to its contents or to replace them.
    pub accumulate: bool,
}

impl Gradient<'_> {
    /// Adds `part`, of the same shape, to the gradient or replaces it, as `accumulate` says: for
    /// layers whose operations cannot accumulate. `part` may have the layers' dtype.
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
    /// A new pass over the model of `params`. Forgets what an earlier pass left in `saved`.
    pub fn new(
        params: &'a Params,
        scratch: &'a mut Scratch,
        saved: &'a mut Saved,
        options: PassOptions<'a>,
        listener: &'a mut dyn Listener,
    ) -> Pass<'a> {
        saved.values.clear();
        saved.uses_done.clear();
        saved.uses_done.extend_from_slice(&params.uses_above);
        Pass::resume(params, scratch, saved, options, listener)
    }

    /// Continues the pass whose forward left `saved`, to run its backward.
    pub fn resume(
        params: &'a Params,
        scratch: &'a mut Scratch,
        saved: &'a mut Saved,
        options: PassOptions<'a>,
        listener: &'a mut dyn Listener,
    ) -> Pass<'a> {
        Pass {
            params,
            scratch,
            saved,
            options,
            listener,
            leaves_head: None,
            cache: None,
        }
    }

    /// The same pass, which leaves the last layer to the loss if that is a `Head`. With
    /// `by_position` (see [`Loss::is_by_position`](crate::Loss)) also a linear layer of positions
    /// without bias.
    /// `Model::loss_gradient` or `Model::losses` then come after the forward.
    pub fn leaving_head(self, by_position: bool) -> Pass<'a> {
        Pass {
            leaves_head: Some(by_position),
            ..self
        }
    }

    /// See the field.
    pub(crate) fn leaves_head(&self) -> Option<bool> {
        self.leaves_head
    }

    /// The same pass over tokens that follow those in `cache`, whose layers then return the output
    /// of the last token alone.
    pub(crate) fn after(self, cache: &'a mut Cache) -> Pass<'a> {
        Pass {
            cache: Some(cache),
            ..self
        }
    }

    /// In decoding: the keys and values of the tokens before this pass.
    pub(crate) fn cache(&mut self) -> Option<&mut Cache> {
        self.cache.as_deref_mut()
    }

    /// Whether layers behave as in training.
    pub fn is_training(&self) -> bool {
        self.options.training
    }

    /// The seed of random numbers.
    pub fn seed(&self) -> u64 {
        self.options.seed
    }

    /// i64 `[2]`: the step, and the position of the first row in the global batch.
    pub fn position(&self) -> &'a Tensor {
        self.options.position
    }

    /// The dtype that layers compute in.
    pub(crate) fn dtype(&self) -> DType {
        self.params.dtype()
    }

    /// The values of a parameter or buffer, in its shape. Call it right before each use, in forward
    /// and backward: other ranks may be sending the values until then.
    pub fn value(&self, parameter: ParamId) -> Result<&'a Tensor> {
        self.listener.needed(parameter)?;
        Ok(self.params.value(parameter))
    }

    /// Where to write the gradient of a parameter. None if it is frozen: then there is nothing to
    /// compute, but `finished` must be called all the same.
    pub fn gradient(&self, parameter: ParamId) -> Option<Gradient<'a>> {
        let tensor = self.params.gradient(parameter)?;
        self.listener.writes(parameter);
        Some(Gradient {
            tensor,
            accumulate: self.options.accumulate || self.saved.uses_done[parameter.0] > 0,
        })
    }

    /// Whether a parameter is trained: neither frozen nor a buffer.
    pub fn trains(&self, parameter: ParamId) -> bool {
        self.params.gradient(parameter).is_some()
    }

    /// Tells that this use's part of the parameter's gradient is written.
    pub fn finished(&mut self, parameter: ParamId) -> Result<()> {
        if let Some(gradient) = self.params.gradient(parameter) {
            let name = || format!("gradient of {}", self.params.parameter(parameter).name);
            observe(name, gradient)?;
        }
        let done = &mut self.saved.uses_done[parameter.0];
        *done += 1;
        let uses = self.params.uses(parameter);
        if *done > uses {
            let name = &self.params.parameter(parameter).name;
            panic!(
                "the gradient of {name} was finished {done} times in one backward; it was declared \
                 for {uses}"
            );
        }
        let is_own = !self.params.is_borrowed(parameter);
        if *done == uses && is_own && self.options.last && self.trains(parameter) {
            self.listener.ready(parameter)?;
        }
        Ok(())
    }

    /// Checks after a backward of the whole model that the gradient of every trained parameter is
    /// complete: the reducer would wait forever for a missing one.
    pub(crate) fn check_complete(&self) -> Result<()> {
        let missing =
            |id: &ParamId| self.trains(*id) && self.saved.uses_done[id.0] < self.params.uses(*id);
        let Some(id) = (0..self.saved.uses_done.len()).map(ParamId).find(missing) else {
            return Ok(());
        };
        let uses = self.params.uses(id);
        Err(Error::model(
            self.params.parameter(id).name.clone(),
            format!("{uses} uses whose gradients are complete"),
            self.saved.uses_done[id.0],
            "run the backward of the whole model",
        ))
    }

    /// A tensor with unspecified contents on the model's device, in the layers' dtype. Its memory
    /// is reused when its last handle is dropped.
    #[track_caller]
    pub fn take(&mut self, shape: &[usize]) -> Result<Tensor> {
        self.scratch.take(shape, self.params.dtype())
    }

    /// As `take`, in another dtype.
    #[track_caller]
    pub fn take_as(&mut self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        self.scratch.take(shape, dtype)
    }

    /// As `take`, from this memory, for numbers of this kind. `last` is as in
    /// `Scratch::take_again`.
    #[track_caller]
    pub(crate) fn take_again(
        &mut self,
        (pool, kind): (ScratchPool, NumberKind),
        last: &Cell<Option<usize>>,
        shape: &[usize],
    ) -> Result<Tensor> {
        let dtype = match kind {
            NumberKind::LayerDtype => self.params.dtype(),
            NumberKind::SumDtype | NumberKind::SumDtypeReadRounded => self.params.master_dtype(),
            NumberKind::Tokens => DType::I64,
            NumberKind::Places => DType::I32,
        };
        self.scratch.take_again(pool, last, shape, dtype)
    }

    /// Makes these sums on a GPU, if the gradient of a bias is faster from them.
    pub(crate) fn sum_row_blocks(&mut self, dy: &Tensor) -> Result<Option<Tensor>> {
        if !dy.device().is_accelerator() || !ops::prefers_row_sums(dy.shape()[0]) {
            return Ok(None);
        }
        let sums = self.take_as(&ops::row_sums_of(dy), DType::F32)?;
        ops::row_block_sums_into(&sums, dy)?;
        Ok(Some(sums))
    }

    /// What runs for losses by their formula.
    pub(crate) fn loss_plans(&mut self) -> &mut Vec<Box<dyn Any + Send>> {
        &mut self.scratch.loss_plans
    }

    /// What forward leaves for backward.
    pub(crate) fn saved(&mut self) -> &mut Saved {
        self.saved
    }

    /// How many tensors forward has left for backward.
    pub fn saved_count(&self) -> usize {
        self.saved.values.len()
    }
}

impl std::fmt::Debug for Pass<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let saved = self.saved_count();
        write!(f, "Pass {:?}, {saved} tensors saved", self.options)
    }
}

/// Receives a tensor's description, and the tensor.
pub type Observer = Box<dyn FnMut(String, &Tensor) -> ddp_kernels::Result<()>>;

thread_local! {
    static OBSERVER: RefCell<Option<Observer>> = const { RefCell::new(None) };
}

/// Runs `body`. What it computes on this thread is shown to `observer`.
pub fn observed<R>(observer: Observer, body: impl FnOnce() -> R) -> R {
    OBSERVER.set(Some(observer));
    let result = body();
    OBSERVER.set(None);
    result
}

/// Shows `tensor`, which is called `name()`, to this thread's observer, if there is one.
pub fn observe(name: impl FnOnce() -> String, tensor: &Tensor) -> ddp_kernels::Result<()> {
    OBSERVER.with_borrow_mut(|observer| match observer {
        Some(observer) => observer(name(), tensor),
        None => Ok(()),
    })
}

#[cfg(test)]
pub(crate) mod tests;
