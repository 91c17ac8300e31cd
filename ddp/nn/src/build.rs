//! What layers declare before memory is allocated: parameters and buffers with their names, shapes
//! and initial weights, where each parameter is used, and the number formats of a model. `Params`
//! allocates them.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ddp_kernels::ops::F32Math;
use ddp_kernels::{DType, Device, Random, Tensor};

use crate::error::{Error, Result};

/// Identifies a parameter or buffer of a model: its number in the order of declaration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub usize);

/// The initial weights of a parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    /// All equal.
    Constant(f64),
    /// Uniform from -bound to bound.
    Uniform {
        /// The bound.
        bound: f64,
    },
    /// Normal with mean 0.
    Normal {
        /// The standard deviation.
        deviation: f64,
    },
}

/// The outputs of a layer that have an adapter each: by the layer's name, and how many outputs each
/// of its parts has.
pub type Adapted = dyn Fn(&str, &[usize]) -> Vec<Range<usize>> + Send + Sync;

/// The adapters of a model. All its other parameters are frozen.
#[derive(Clone)]
pub struct Lora {
    /// R
    pub rank: usize,
    /// What an adapter's output is multiplied by.
    pub scale: f64,
    /// The probability that an element of an adapter's input is dropped in training.
    pub dropout: f64,
    /// Which outputs of which layers are adapted.
    pub adapted: Arc<Adapted>,
}

impl fmt::Debug for Lora {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lora of rank {}", self.rank)
    }
}

/// The names of an adapter's parameters, after that of its layer.
pub const LORA_A: &str = "lora_a";
/// See `LORA_A`.
pub const LORA_B: &str = "lora_b";

/// Whether a parameter is an adapter's.
pub fn is_adapter(name: &str) -> bool {
    let leaf = name.rsplit('.').next();
    leaf == Some(LORA_A) || leaf == Some(LORA_B)
}

/// A declared parameter or buffer.
#[derive(Clone, Debug)]
pub(crate) struct Declared {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) init: Init,
    pub(crate) is_buffer: bool,
    /// See `Build::hidden_matrices`.
    pub(crate) matrices: Vec<usize>,
    /// Whether other layers may use it through a `Tie`.
    pub(crate) is_tied: bool,
    /// Whether an earlier part of a split model owns it: see `Params::loans`.
    pub(crate) is_borrowed: bool,
}

/// All declarations of a model's layers.
#[derive(Debug, Default)]
pub(crate) struct Declarations {
    pub(crate) list: Vec<Declared>,
    /// The parameter of each use, in the order of a forward pass. A tied one occurs several times.
    pub(crate) uses: Vec<ParamId>,
    /// Names of tied parameters that earlier parts of a split model declare.
    lent: Vec<String>,
    random_layers: u32,
    /// The adapters of linear layers.
    pub(crate) lora: Option<Lora>,
    /// Tells builds of models apart: a `Tie` remembers its parameter for one build only.
    serial: u64,
}

impl Declarations {
    pub(crate) fn new() -> Declarations {
        static NEXT_SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = NEXT_SERIAL.fetch_add(1, Ordering::Relaxed);
        Declarations {
            serial,
            ..Declarations::default()
        }
    }
}

/// Collects declarations during `Layer::build`.
#[derive(Debug)]
pub struct Build<'a> {
    declarations: &'a mut Declarations,
    /// The beginning of all names declared here: `4.`
    prefix: String,
}

/// A point in the order of a forward pass: how many uses of parameters come before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct UseIndex(usize);

/// One parameter shared by several layers; clones of a `Tie` are the same tie. The layer that is
/// built first declares the parameter, under its own name; the others use it.
#[derive(Clone, Debug, Default)]
pub struct Tie(Arc<Mutex<Option<Tied>>>);

/// The parameter of a tie in the latest build.
#[derive(Debug)]
struct Tied {
    /// The serial number of the build.
    serial: u64,
    id: ParamId,
    name: String,
}

impl Tie {
    /// A tie without a parameter yet.
    pub fn new() -> Tie {
        Tie::default()
    }
}

impl<'a> Build<'a> {
    pub(crate) fn new(declarations: &'a mut Declarations) -> Build<'a> {
        Build {
            declarations,
            prefix: String::new(),
        }
    }

    /// Declares a part of this layer: its names begin with `name` and a dot.
    pub fn scope<R>(&mut self, name: &str, body: impl FnOnce(&mut Build<'_>) -> R) -> R {
        let prefix = format!("{}{name}.", self.prefix);
        body(&mut Build {
            declarations: self.declarations,
            prefix,
        })
    }

    /// The name of this layer, for messages: `4`, or `model` for the whole.
    pub fn path(&self) -> &str {
        if self.prefix.is_empty() {
            "model"
        } else {
            &self.prefix[..self.prefix.len() - 1]
        }
    }

    /// The error of a layer that cannot be built as it is described.
    pub fn refuse(
        &self,
        expected: impl std::fmt::Display,
        got: impl std::fmt::Display,
        help: impl std::fmt::Display,
    ) -> Error {
        Error::model(self.path(), expected, got, help)
    }

    /// Declares a parameter. Weight decay applies to those of two or more dimensions.
    pub fn parameter(&mut self, name: &str, shape: &[usize], init: Init) -> Result<ParamId> {
        let id = self.declare(format!("{}{name}", self.prefix), shape, init, false)?;
        self.share(id);
        Ok(id)
    }

    /// Says that `parameter` is a weight (O, I) of a hidden layer, made of matrices with this many
    /// rows, which Muon orthogonalises one by one. Embeddings and output layers are for AdamW.
    pub fn hidden_matrices(&mut self, parameter: ParamId, rows: &[usize]) {
        let declared = &mut self.declarations.list[parameter.0];
        assert_eq!(
            (declared.shape.len(), declared.shape.first()),
            (2, Some(&rows.iter().sum())),
            "the rows of {}",
            declared.name
        );
        declared.matrices = rows.to_vec();
    }

    /// Declares a buffer: saved and moved with the model, never trained. Its dtype is that of the
    /// masters, also where layers compute in bf16. A layer may write to `pass.value` of it in
    /// forward. Each rank writes its own; every training step, evaluation and checkpoint begins
    /// with those of rank 0.
    pub fn buffer(&mut self, name: &str, shape: &[usize], init: Init) -> Result<ParamId> {
        self.declare(format!("{}{name}", self.prefix), shape, init, true)
    }

    /// Uses a parameter of another layer. It has one place in memory, and its gradient is complete
    /// after the last use in a backward pass. A split model keeps these layers on one device.
    pub fn share(&mut self, parameter: ParamId) {
        self.declarations.uses.push(parameter);
    }

    /// As `parameter`, but if `tie` already holds a parameter, this is another use of that one.
    /// Both must have the same shape. If an earlier part of a split model declares it, this part
    /// borrows it.
    pub(crate) fn tied_parameter(
        &mut self,
        tie: &Tie,
        name: &str,
        shape: &[usize],
        init: Init,
    ) -> Result<ParamId> {
        let mut held = tie.0.lock().unwrap_or_else(PoisonError::into_inner);
        let serial = self.declarations.serial;
        let Some(id) = held
            .as_ref()
            .filter(|it| it.serial == serial)
            .map(|it| it.id)
        else {
            let lent = &self.declarations.lent;
            let known = held.take().map(|it| it.name);
            let borrowed = known.filter(|name| lent.contains(name));
            let is_borrowed = borrowed.is_some();
            let name = borrowed.unwrap_or_else(|| format!("{}{name}", self.prefix));
            let id = self.declare(name.clone(), shape, init, false)?;
            self.share(id);
            let declared = &mut self.declarations.list[id.0];
            (declared.is_tied, declared.is_borrowed) = (true, is_borrowed);
            *held = Some(Tied { serial, id, name });
            return Ok(id);
        };
        let other = &self.declarations.list[id.0];
        if other.shape != shape {
            return Err(self.refuse(
                format!(
                    "{name} of shape {:?}, to be tied to {}",
                    other.shape, other.name
                ),
                format!("{shape:?}"),
                "tie layers of equal sizes, or leave this one untied",
            ));
        }
        self.share(id);
        Ok(id)
    }

    /// Gives the linear layers that are declared from here on adapters.
    pub(crate) fn adapt(&mut self, lora: &Option<Lora>) {
        if lora.is_some() {
            self.declarations.lora.clone_from(lora);
        }
    }

    /// The adapters of linear layers.
    pub(crate) fn lora(&self) -> Option<Lora> {
        self.declarations.lora.clone()
    }

    /// A number for a layer that draws random numbers in its forward. No other layer of the model
    /// gets the same.
    pub(crate) fn random_layer(&mut self) -> u32 {
        self.declarations.random_layers += 1;
        self.declarations.random_layers - 1
    }

    /// Gives the next layer that draws random numbers the number `random_layers`: earlier parts of
    /// a split model have the lower numbers.
    pub(crate) fn skip_random_layers(&mut self, random_layers: u32) {
        let count = &mut self.declarations.random_layers;
        *count = random_layers.max(*count);
    }

    /// How many layers that draw have been built.
    pub(crate) fn random_layers(&self) -> u32 {
        self.declarations.random_layers
    }

    /// How far the model is built. Layers are built in the order of a forward pass.
    pub(crate) fn use_index(&self) -> UseIndex {
        UseIndex(self.declarations.uses.len())
    }

    /// Earlier parts of a split model declare these tied parameters.
    pub(crate) fn borrow_from_below(&mut self, names: &[String]) {
        self.declarations.lent.extend_from_slice(names);
    }

    /// Sets the initial weights of all parameters called `leaf`.
    #[cfg(test)]
    pub(crate) fn start_all(&mut self, leaf: &str, init: Init) {
        let list = self.declarations.list.iter_mut();
        let called = list.filter(|one| one.name.ends_with(&format!(".{leaf}")));
        called.for_each(|one| one.init = init);
    }

    fn declare(
        &mut self,
        name: String,
        shape: &[usize],
        init: Init,
        is_buffer: bool,
    ) -> Result<ParamId> {
        let list = &self.declarations.list;
        if list.iter().any(|other| other.name == name) {
            let help = "declare each part of a layer in its own scope";
            return Err(self.refuse("different names", format!("{name} twice"), help));
        }
        let count = shape
            .iter()
            .try_fold(1usize, |count, &length| count.checked_mul(length));
        if count.is_none_or(|count| count == 0 || count > isize::MAX as usize / 64) {
            let expected = format!("{name} to have elements, and fewer than memory could hold");
            let got = format!("the shape {shape:?}");
            return Err(self.refuse(expected, got, "check the layer's sizes"));
        }
        self.declarations.list.push(Declared {
            name,
            shape: shape.to_vec(),
            init,
            is_buffer,
            matrices: Vec::new(),
            is_tied: false,
            is_borrowed: false,
        });
        Ok(ParamId(self.declarations.list.len() - 1))
    }
}

impl UseIndex {
    pub(crate) fn range_to(self, end: UseIndex) -> Range<usize> {
        self.0..end.0.max(self.0)
    }
}

impl Init {
    /// `count` initial weights in f32, whatever the parameter's dtype: the same seed gives the same
    /// model in every dtype.
    pub(crate) fn values(&self, count: usize, random: &mut Random) -> Result<Tensor> {
        let shape = [count];
        let scale = |unit: Tensor, scale: &dyn Fn(f32) -> f32| -> Result<Tensor> {
            unit.with_slice_mut(|values: &mut [f32]| {
                values.iter_mut().for_each(|value| *value = scale(*value))
            })?;
            Ok(unit)
        };
        match *self {
            Init::Constant(value) => Ok(Tensor::full(&shape, value, DType::F32, Device::Cpu)?),
            Init::Uniform { bound } => {
                let unit = Tensor::rand(&shape, DType::F32, Device::Cpu, random)?;
                scale(unit, &|unit| (2.0 * unit - 1.0) * bound as f32)
            }
            Init::Normal { deviation } => {
                let unit = Tensor::randn(&shape, DType::F32, Device::Cpu, random)?;
                scale(unit, &|unit| unit * deviation as f32)
            }
        }
    }
}

ddp_kernels::choices! {
    /// The precision in which a model computes. Values, gradients and moments are always f32.
    #[derive(Default)]
    pub enum Precision {
        /// 32 bits throughout
        #[default]
        F32 = "f32",
        /// Matmuls of numbers rounded to 10 mantissa bits, on a CPU to 16; sums in 32 bits
        Tf32 = "tf32",
        /// Activations and the parameters that matmuls read in bf16, sums in 32 bits
        Bf16 = "bf16",
    }
}

/// What layers compute in. The dtype of values, gradients and moments follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    /// The dtype of activations, of their gradients, and of the parameters that layers read.
    pub layers: DType,
    /// How a GPU multiplies f32.
    pub f32_math: F32Math,
}

impl Format {
    /// The dtype of values, gradients and moments: the layers' dtype, or f32 if that is narrower.
    /// These are sums of many small numbers, most of which bf16 with its 8 bits would lose.
    pub fn masters(self) -> DType {
        match self.layers {
            DType::BF16 => DType::F32,
            dtype => dtype,
        }
    }

    /// Refuses dtypes in which no model computes.
    pub(crate) fn check(self) -> Result<()> {
        let help = match self.layers {
            DType::F32 | DType::F64 | DType::BF16 => return Ok(()),
            // Gradients below 6e-8 would be 0 without loss scaling, which does not exist here.
            DType::F16 => "use bf16, which has the range of f32",
            _ => "use f32",
        };
        let dtype = self.layers;
        Err(Error::Usage(format!(
            "a model's dtype: expected f32, bf16 or (for checks) f64, got {dtype}; help: {help}"
        )))
    }
}

impl From<DType> for Format {
    /// Layers in this dtype, with exact f32 matmuls.
    fn from(layers: DType) -> Format {
        Format {
            layers,
            f32_math: F32Math::Strict,
        }
    }
}

impl From<Precision> for Format {
    fn from(precision: Precision) -> Format {
        match precision {
            Precision::F32 => DType::F32.into(),
            Precision::Tf32 => Format {
                layers: DType::F32,
                f32_math: F32Math::Tf32,
            },
            Precision::Bf16 => DType::BF16.into(),
        }
    }
}
