//! One pass over a model: how layers get parameters and memory, the stack on which forward saves
//! tensors for backward, and the observer that sees each computed tensor.

use std::cell::RefCell;

use ddp_kernels::shape::RANK_MAX;
use ddp_kernels::{DType, Tensor, ops};

use crate::build::{ParamId, UseIndex};
use crate::error::{Error, Result};
use crate::params::Params;
use crate::scratch::{Cache, Scratch, ScratchPool};

/// The settings of a pass.
#[derive(Clone, Copy, Debug)]
pub struct PassOptions<'a> {
    /// Whether layers behave as in training: they save what backward needs, and dropout drops.
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
    leaves_head: bool,
    needs_input_gradient: bool,
    /// A sum and its norm, for the layer that gets the sum.
    normed: Option<(Tensor, Tensor)>,
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
    stack: Vec<Tensor>,
    /// The height of the stack at each `Pass::mark` that was not rewound yet.
    marks: Vec<usize>,
    /// By parameter: how many of its uses this backward has finished, and those of later parts.
    uses_done: Vec<usize>,
    /// A gradient and the sums of its blocks of rows, for the layer that gets it.
    row_sums: Option<(Tensor, Tensor)>,
    /// i32 (B·T): where in its row the document of each token begins, if rows hold several.
    documents: Option<Tensor>,
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
        saved.stack.clear();
        saved.marks.clear();
        saved.row_sums = None;
        saved.documents = None;
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
            leaves_head: false,
            needs_input_gradient: false,
            normed: None,
            cache: None,
        }
    }

    /// The same pass, which leaves the model's last layer to the loss, if that is a `Head`:
    /// `Model::loss_gradient` or `Model::losses` then come after the forward.
    pub fn leaving_head(self) -> Pass<'a> {
        Pass {
            leaves_head: true,
            ..self
        }
    }

    /// Whether the model's last layer is left to the loss, if that is a `Head`.
    pub(crate) fn leaves_head(&self) -> bool {
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

    /// Keeps where in its row the document of each token begins, i32 (B·T), for forward and
    /// backward.
    pub(crate) fn set_documents(&mut self, begins: Tensor) {
        self.saved.documents = Some(begins);
    }

    /// What `set_documents` kept in this pass.
    pub(crate) fn documents(&self) -> Option<Tensor> {
        self.saved.documents.clone()
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

    /// Whether any use of a parameter between two points of the model is of a trained one.
    pub(crate) fn trains_between(&self, start: UseIndex, end: UseIndex) -> bool {
        self.params.trains_between(start, end)
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
            format!("{uses} calls of pass.finished in backward, one for each use"),
            format!("{} calls", self.saved.uses_done[id.0]),
            "call it in the backward of the layer that declares the parameter, and of each \
                   layer tied to it",
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

    /// As `take`, for a tensor that only the next layer reads.
    #[track_caller]
    pub(crate) fn take_brief(&mut self, shape: &[usize]) -> Result<Tensor> {
        let before = self.scratch.take_from(ScratchPool::Brief);
        let result = self.take(shape);
        self.scratch.take_from(before);
        result
    }

    /// On a GPU: a tensor for the sums of blocks of rows of `dx` (B, I), which the layer that is
    /// about to write `dx` fills, and the layer below asks for by `row_sums_of`.
    pub(crate) fn take_row_sums(&mut self, dx: &Tensor) -> Result<Option<Tensor>> {
        if !dx.device().is_accelerator() || dx.shape()[0] == 0 {
            return Ok(None);
        }
        let sums = self.take_as(&ops::row_sums_of(dx), DType::F32)?;
        self.saved.row_sums = Some((dx.clone(), sums.clone()));
        Ok(Some(sums))
    }

    /// The sums of blocks of rows of `dy` (B, O), if the layer above left them.
    pub fn row_sums_of(&mut self, dy: &Tensor) -> Option<Tensor> {
        let (of, sums) = self.saved.row_sums.take()?;
        let is_same = of.shares_memory_with(dy) && of.count() == dy.count();
        // A layer in between may have reshaped it.
        let has_columns = sums.shape().dims().last() == dy.shape().dims().last();
        (is_same && has_columns).then_some(sums)
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

    /// Leaves the norm of `x` to the layer above, which asks for it by `norm_of`.
    pub(crate) fn leave_norm(&mut self, x: &Tensor, normed: Tensor) {
        self.normed = Some((x.clone(), normed));
    }

    /// The norm of `x`, if the layer below left it.
    pub(crate) fn norm_of(&mut self, x: &Tensor) -> Option<Tensor> {
        let (of, normed) = self.normed.take()?;
        (of.shares_memory_with(x) && of.count() == x.count()).then_some(normed)
    }

    /// In backward: whether the layer's caller needs the gradient of its input.
    pub fn needs_input_gradient(&self) -> bool {
        self.needs_input_gradient
    }

    /// Runs `body`, the backward of a layer inside of another, and returns the gradient of that
    /// layer's input if it `is_needed`.
    pub(crate) fn input_gradient(
        &mut self,
        is_needed: bool,
        body: impl FnOnce(&mut Self) -> Result<Option<Tensor>>,
    ) -> Result<Option<Tensor>> {
        let before = std::mem::replace(&mut self.needs_input_gradient, is_needed);
        let gradient = body(self);
        self.needs_input_gradient = before;
        Ok(gradient?.filter(|_| is_needed))
    }

    /// Keeps a tensor for backward.
    pub fn save(&mut self, tensor: &Tensor) {
        self.saved.stack.push(tensor.clone());
    }

    /// Takes back the tensor saved last.
    pub fn restore(&mut self) -> Tensor {
        let top = self.saved.stack.pop();
        top.expect("a layer's backward restores no more than its forward saved")
    }

    /// The tensor saved last, without taking it.
    pub fn top(&self) -> &Tensor {
        let top = self.saved.stack.last();
        top.expect("a layer's backward restores no more than its forward saved")
    }

    /// How many tensors are saved.
    pub fn saved_count(&self) -> usize {
        self.saved.stack.len()
    }

    /// Runs `body`, a forward, and drops what it saves.
    pub(crate) fn without_saving<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        let (saved, marks) = (self.saved.stack.len(), self.saved.marks.len());
        let result = body(self);
        self.saved.stack.truncate(saved);
        self.saved.marks.truncate(marks);
        result
    }

    /// Runs `body`, a forward that backward repeats, with separate buffers.
    pub fn apart<R>(&mut self, body: impl FnOnce(&mut Self) -> R) -> R {
        let before = self.scratch.take_from(ScratchPool::Again);
        let result = body(self);
        self.scratch.take_from(before);
        result
    }

    /// Remembers in forward how much is saved, for `rewind`. For layers made of layers.
    pub fn mark(&mut self) {
        self.saved.marks.push(self.saved.stack.len());
    }

    /// Drops in backward what was saved since the latest mark and not restored. Returns how many
    /// tensors that were.
    ///
    /// # Panics
    /// If more was restored than was saved since the mark.
    pub fn rewind(&mut self) -> usize {
        let mark = self.saved.marks.pop();
        let mark = mark.expect("one mark in forward for each rewind in backward");
        let left = self.saved.stack.len().checked_sub(mark);
        let left = left.expect("a layer's backward restores no more than its forward saved");
        self.saved.stack.truncate(mark);
        left
    }
}

impl std::fmt::Debug for Pass<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let saved = self.saved_count();
        write!(f, "Pass {:?}, {saved} tensors saved", self.options)
    }
}

/// `matrix` (B, last) in the shape of `like`, except for the last dimension.
pub(crate) fn with_last_of(matrix: &Tensor, like: &Tensor, last: usize) -> Result<Tensor> {
    let mut dims = [0; RANK_MAX];
    let rank = like.shape().rank();
    dims[..rank].copy_from_slice(like.shape());
    dims[rank - 1] = last;
    Ok(matrix.reshape(&dims[..rank])?)
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
