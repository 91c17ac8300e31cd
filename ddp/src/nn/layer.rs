//! What a layer is, and what it declares before there is memory.
//!
//! A layer's life: `build` declares its parameters and says what shape it makes of its input; `forward` computes, and
//! in training saves on the pass's stack what its backward will need; `backward` takes that off the stack in the opposite
//! order, writes its parameters' gradients, and returns the gradient of its input. Letters: B rows of the batch.

use std::fmt;

use ddp_kernels::ops::Activation;
use ddp_kernels::{Random, Tensor};

use crate::error::{Error, Result};
use crate::nn::pass::Pass;
use crate::params::ParamId;

/// One layer, or a model made of layers. A layer of your own is a page: examples/custom_layer.rs.
pub trait Layer: fmt::Debug + Send {
    /// Declares parameters and buffers. `shape` is that of one row of the input (without B); returns that of one row of
    /// the output.
    fn build(&mut self, build: &mut Build<'_>, shape: &[usize]) -> Result<Vec<usize>>;

    /// The output for `x` (B first). Saves what `backward` needs with `pass.save` if `pass.is_training()`.
    fn forward(&self, pass: &mut Pass<'_>, x: &Tensor) -> Result<Tensor>;

    /// Takes back what `forward` saved, writes the parameters' gradients (`pass.gradient`, then `pass.finished`), and
    /// returns the gradient of the input as `fold` asks for it. `dy` is not written to: others may still need it.
    fn backward(&self, pass: &mut Pass<'_>, dy: &Tensor, fold: Fold) -> Result<Folded>;

    /// The activation this layer is, if it is one: the layer below may fuse it (`fuse`), the layer above may fold its
    /// derivative into its own backward (`Fold::Activation`).
    fn activation(&self) -> Option<Activation> {
        None
    }

    /// Asks this layer to apply `above` to its output itself. A layer that agrees (true) saves, in training, after its
    /// own what that activation's backward needs: the output for ReLU, the input for GELU.
    fn fuse(&mut self, above: Activation) -> bool {
        let _ = above;
        false
    }

    /// Tells an activation that the layer below applies it: its forward passes `x` on and saves nothing.
    fn set_fused(&mut self) {}
}

/// What `backward` is to return.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Fold {
    /// Nothing: nobody needs the gradient of the input.
    Nothing,
    /// The gradient of the input.
    Input,
    /// The gradient of the input, times the derivative of this activation that made it, if the layer can do that on the way. What the
    /// activation's backward needs is on top of the stack once the layer has taken its own off (`pass.top`); ReLU's is also the
    /// layer's own input.
    Activation(Activation),
}

/// The gradient that `backward` returns.
#[derive(Debug)]
pub struct Folded {
    /// The gradient of the input; none for `Fold::Nothing`.
    pub gradient: Option<Tensor>,
    /// Whether the activation of `Fold::Activation` is in it.
    pub folded: bool,
}

impl Folded {
    /// The gradient of the input, nothing folded in.
    pub fn plain(gradient: Tensor) -> Folded {
        Folded { gradient: Some(gradient), folded: false }
    }

    /// No gradient, since none was asked for.
    pub fn nothing() -> Folded {
        Folded { gradient: None, folded: false }
    }
}

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All equal.
    Constant(f64),
    /// Uniform between -bound and bound.
    Uniform {
        /// The bound.
        bound: f64,
    },
    /// Normal around zero.
    Normal {
        /// The standard deviation.
        deviation: f64,
    },
}

/// What layers declare: filled by `Layer::build`, turned into memory by `Params::new`.
#[derive(Debug)]
pub struct Build<'a> {
    declared: &'a mut Vec<Declared>,
    /// What has been said so far, for names: `4.`
    prefix: String,
}

/// A declared parameter or buffer.
#[derive(Clone, Debug)]
pub(crate) struct Declared {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) init: Init,
    pub(crate) is_buffer: bool,
    /// In how many places a pass uses it: tied parameters more than once.
    pub(crate) uses: usize,
}

impl<'a> Build<'a> {
    pub(crate) fn new(declared: &'a mut Vec<Declared>) -> Build<'a> {
        Build { declared, prefix: String::new() }
    }

    /// Declares for a part of this layer, whose names begin with `name` and a dot.
    pub fn scope<R>(&mut self, name: &str, body: impl FnOnce(&mut Build<'_>) -> R) -> R {
        let prefix = format!("{}{name}.", self.prefix);
        body(&mut Build { declared: self.declared, prefix })
    }

    /// This layer's name so far, for messages: `4`, or `model` at the top.
    pub fn path(&self) -> &str {
        if self.prefix.is_empty() { "model" } else { &self.prefix[..self.prefix.len() - 1] }
    }

    /// Declares a parameter. Matrices (two dimensions or more) decay, vectors do not.
    pub fn parameter(&mut self, name: &str, shape: &[usize], init: Init) -> Result<ParamId> {
        self.declare(name, shape, init, false)
    }

    /// Declares a buffer: saved with the model, moved with it, not trained.
    pub fn buffer(&mut self, name: &str, shape: &[usize], init: Init) -> Result<ParamId> {
        self.declare(name, shape, init, true)
    }

    /// Uses a parameter declared elsewhere once more. It has one place in memory; its gradient is complete after the last
    /// use of a backward pass.
    pub fn tie(&mut self, parameter: ParamId) {
        self.declared[parameter.0].uses += 1;
    }

    fn declare(&mut self, name: &str, shape: &[usize], init: Init, is_buffer: bool) -> Result<ParamId> {
        let name = format!("{}{name}", self.prefix);
        if self.declared.iter().any(|other| other.name == name) {
            return Err(Error::Model {
                layer: self.path().to_string(),
                expected: "names that differ".into(),
                got: format!("{name} twice"),
                way_out: "Give each part of a layer a scope of its own.".into(),
            });
        }
        let count = shape.iter().try_fold(1usize, |count, &length| count.checked_mul(length));
        if count.is_none_or(|count| count == 0 || count > isize::MAX as usize / 64) {
            return Err(Error::Model {
                layer: self.path().to_string(),
                expected: format!("{name} to have elements, and fewer than memory could hold"),
                got: format!("the shape {shape:?}"),
                way_out: "Check the layer's sizes.".into(),
            });
        }
        self.declared.push(Declared { name, shape: shape.to_vec(), init, is_buffer, uses: 1 });
        Ok(ParamId(self.declared.len() - 1))
    }
}

impl Init {
    /// Fills `values`, in f32 whatever their dtype, so that the same seed gives the same model in any dtype.
    pub(crate) fn fill(&self, values: &mut [f32], random: &mut Random) -> Result<()> {
        use ddp_kernels::{DType, Device};
        let shape = [values.len()];
        match *self {
            Init::Constant(value) => values.fill(value as f32),
            Init::Uniform { bound } => {
                let unit = Tensor::rand(&shape, DType::F32, Device::Cpu, random)?;
                let spread = |unit: &[f32]| {
                    let pairs = values.iter_mut().zip(unit);
                    pairs.for_each(|(value, unit)| *value = (2.0 * unit - 1.0) * bound as f32);
                };
                unit.with_slice(spread)?;
            }
            Init::Normal { deviation } => {
                let unit = Tensor::randn(&shape, DType::F32, Device::Cpu, random)?;
                let spread = |unit: &[f32]| {
                    values.iter_mut().zip(unit).for_each(|(value, unit)| *value = unit * deviation as f32);
                };
                unit.with_slice(spread)?;
            }
        }
        Ok(())
    }
}
