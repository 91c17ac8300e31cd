//! What layers declare before there is memory: parameters and buffers by name and shape, how they start, where each is
//! used. `Params` turns it into memory.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ddp_kernels::{DType, Device, Random, Tensor};

use crate::error::{Error, Result};
use crate::params::ParamId;

/// How a parameter starts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All equal.
    Constant(f64),
    /// Uniform from -bound to bound.
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

/// A declared parameter or buffer.
#[derive(Clone, Debug)]
pub(crate) struct Declared {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) init: Init,
    pub(crate) is_buffer: bool,
}

/// All that a model's layers have declared.
#[derive(Debug)]
pub(crate) struct Declarations {
    pub(crate) list: Vec<Declared>,
    /// Which parameter each use is of, in the order of a forward pass: a tied one stands here more than once.
    pub(crate) uses: Vec<ParamId>,
    drawing_layers: u32,
    /// Tells one build of a model from another: what a `Tie` remembers holds for one build alone.
    serial: u64,
}

impl Declarations {
    pub(crate) fn new() -> Declarations {
        static NEXT_SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = NEXT_SERIAL.fetch_add(1, Ordering::Relaxed);
        Declarations { list: Vec::new(), uses: Vec::new(), drawing_layers: 0, serial }
    }
}

/// What layers declare to: filled by `Layer::build`, turned into memory by `Params::new`.
#[derive(Debug)]
pub struct Build<'a> {
    declarations: &'a mut Declarations,
    /// What has been said so far, for names: `4.`
    prefix: String,
}

/// A stretch of a model, by the uses of parameters in it: `Pass::trains_between` is asked by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place(usize);

/// One parameter for several layers: clones of a `Tie` are the same tie. The layer that is built first declares the
/// parameter, under its own name; the others use it.
#[derive(Clone, Debug, Default)]
pub struct Tie(Arc<Mutex<Option<(u64, ParamId)>>>);

impl Tie {
    /// A tie that holds no parameter yet.
    pub fn new() -> Tie {
        Tie::default()
    }
}

impl<'a> Build<'a> {
    pub(crate) fn new(declarations: &'a mut Declarations) -> Build<'a> {
        Build { declarations, prefix: String::new() }
    }

    /// Declares for a part of this layer, whose names begin with `name` and a dot.
    pub fn scope<R>(&mut self, name: &str, body: impl FnOnce(&mut Build<'_>) -> R) -> R {
        let prefix = format!("{}{name}.", self.prefix);
        body(&mut Build { declarations: self.declarations, prefix })
    }

    /// This layer's name so far, for messages: `4`, or `model` at the top.
    pub fn path(&self) -> &str {
        if self.prefix.is_empty() { "model" } else { &self.prefix[..self.prefix.len() - 1] }
    }

    /// Declares a parameter. Matrices (two dimensions or more) decay, vectors do not.
    pub fn parameter(&mut self, name: &str, shape: &[usize], init: Init) -> Result<ParamId> {
        let id = self.declare(name, shape, init, false)?;
        self.declarations.uses.push(id);
        Ok(id)
    }

    /// Declares a buffer: saved with the model, moved with it, not trained.
    pub fn buffer(&mut self, name: &str, shape: &[usize], init: Init) -> Result<ParamId> {
        self.declare(name, shape, init, true)
    }

    /// Uses a parameter declared elsewhere once more. It has one place in memory; its gradient is complete after the last
    /// use of a backward pass.
    pub fn share(&mut self, parameter: ParamId) {
        self.declarations.uses.push(parameter);
    }

    /// As `parameter`, where a `tie` may hold the parameter already: then this is one more use of that one, which must
    /// have the same shape.
    pub fn tied_parameter(&mut self, tie: &Tie, name: &str, shape: &[usize], init: Init) -> Result<ParamId> {
        let mut held = tie.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((_, id)) = held.filter(|&(serial, _)| serial == self.declarations.serial) else {
            let id = self.parameter(name, shape, init)?;
            *held = Some((self.declarations.serial, id));
            return Ok(id);
        };
        let other = &self.declarations.list[id.0];
        if other.shape != shape {
            return Err(Error::Model {
                layer: self.path().to_string(),
                expected: format!("{name} of shape {:?}, to be tied to {}", other.shape, other.name),
                got: format!("{shape:?}"),
                way_out: "Tie layers of equal sizes, or leave this one untied.".into(),
            });
        }
        self.share(id);
        Ok(id)
    }

    /// A number for a layer that draws random numbers in its forward: no other layer of the model has it.
    pub fn drawing_number(&mut self) -> u32 {
        self.declarations.drawing_layers += 1;
        self.declarations.drawing_layers - 1
    }

    /// The layers that are built from here on draw as if so many had come before: those of the parts of a model below this one.
    pub(crate) fn continue_drawing_at(&mut self, drawing_layers: u32) {
        let count = &mut self.declarations.drawing_layers;
        *count = drawing_layers.max(*count);
    }

    /// How many layers that draw have been built.
    pub(crate) fn drawing_layers(&self) -> u32 {
        self.declarations.drawing_layers
    }

    /// Where in the model this is: what is declared from here on is not before it. Layers are built in the order of a
    /// forward pass.
    pub fn place(&self) -> Place {
        Place(self.declarations.uses.len())
    }

    fn declare(&mut self, name: &str, shape: &[usize], init: Init, is_buffer: bool) -> Result<ParamId> {
        let name = format!("{}{name}", self.prefix);
        let refuse = |expected: String, got: String, way_out: &str| {
            Err(Error::Model { layer: self.path().to_string(), expected, got, way_out: way_out.into() })
        };
        if self.declarations.list.iter().any(|other| other.name == name) {
            return refuse(
                "names that differ".into(),
                format!("{name} twice"),
                "Give each part of a layer a scope of its own.",
            );
        }
        let count = shape.iter().try_fold(1usize, |count, &length| count.checked_mul(length));
        if count.is_none_or(|count| count == 0 || count > isize::MAX as usize / 64) {
            let expected = format!("{name} to have elements, and fewer than memory could hold");
            return refuse(expected, format!("the shape {shape:?}"), "Check the layer's sizes.");
        }
        self.declarations.list.push(Declared { name, shape: shape.to_vec(), init, is_buffer });
        Ok(ParamId(self.declarations.list.len() - 1))
    }
}

impl Place {
    pub(crate) fn range_to(self, end: Place) -> Range<usize> {
        self.0..end.0.max(self.0)
    }
}

impl Init {
    /// `count` first values, in f32 whatever their dtype will be, so that the same seed gives the same model in any dtype.
    pub(crate) fn values(&self, count: usize, random: &mut Random) -> Result<Tensor> {
        let shape = [count];
        let spread = |unit: Tensor, spread: &dyn Fn(f32) -> f32| -> Result<Tensor> {
            unit.with_slice_mut(|values: &mut [f32]| values.iter_mut().for_each(|value| *value = spread(*value)))?;
            Ok(unit)
        };
        match *self {
            Init::Constant(value) => Ok(Tensor::full(&shape, value, DType::F32, Device::Cpu)?),
            Init::Uniform { bound } => {
                let unit = Tensor::rand(&shape, DType::F32, Device::Cpu, random)?;
                spread(unit, &|unit| (2.0 * unit - 1.0) * bound as f32)
            }
            Init::Normal { deviation } => {
                let unit = Tensor::randn(&shape, DType::F32, Device::Cpu, random)?;
                spread(unit, &|unit| unit * deviation as f32)
            }
        }
    }
}
