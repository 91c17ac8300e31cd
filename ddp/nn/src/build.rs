//! What layers declare before memory is allocated: parameters and buffers with their names, shapes
//! and initial weights, where each parameter is used, and the number formats of a model. `Params`
//! allocates them.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use ddp_kernels::ops::F32Math;
use ddp_kernels::panics;
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
pub type AdaptedOutputs = dyn Fn(&str, &[usize]) -> Vec<Range<usize>> + Send + Sync;

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
    pub adapted: Arc<AdaptedOutputs>,
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
pub(crate) struct Declaration {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) init: Init,
    pub(crate) is_buffer: bool,
    /// See `Scope::hidden_matrices`.
    pub(crate) matrices: Vec<usize>,
    /// Whether other layers may use it through a `Tie`.
    pub(crate) is_tied: bool,
    /// Whether an earlier part of a split model owns it: see `Params::tied_copies`.
    pub(crate) is_borrowed: bool,
}

/// All declarations of a model's layers.
#[derive(Debug, Default)]
pub(crate) struct Declarations {
    pub(crate) list: Vec<Declaration>,
    /// The parameter of each use, in the order of a forward pass. A tied one occurs several times.
    pub(crate) uses: Vec<ParamId>,
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
}

impl Tie {
    /// A tie without a parameter yet.
    pub fn new() -> Tie {
        Tie::default()
    }
}

impl Declarations {
    /// Declares a parameter with its full name.
    pub(crate) fn parameter(&mut self, name: &str, shape: &[usize], init: Init) -> Result<ParamId> {
        let id = self.declare(name.to_string(), shape, init, false)?;
        self.uses.push(id);
        Ok(id)
    }

    /// Declares a buffer with its full name.
    pub(crate) fn buffer(&mut self, name: &str, shape: &[usize], init: Init) -> Result<ParamId> {
        self.declare(name.to_string(), shape, init, true)
    }

    /// As `parameter`, but if `tie` already holds a parameter, this is another use of that one.
    /// Both must have the same shape.
    pub(crate) fn tied_parameter(
        &mut self,
        tie: &Tie,
        name: &str,
        shape: &[usize],
        init: Init,
    ) -> Result<ParamId> {
        let mut held = panics::lock(&tie.0);
        let serial = self.serial;
        let known = held.as_ref().filter(|it| it.serial == serial);
        let Some(id) = known.map(|it| it.id) else {
            let id = self.parameter(name, shape, init)?;
            self.list[id.0].is_tied = true;
            *held = Some(Tied { serial, id });
            return Ok(id);
        };
        let other = &self.list[id.0];
        if other.shape != shape {
            return Err(Error::model(
                name,
                format!("shape {:?}, to be tied to {}", other.shape, other.name),
                format!("{shape:?}"),
                "tie layers of equal sizes, or leave this one untied",
            ));
        }
        self.uses.push(id);
        Ok(id)
    }

    /// A number for a layer that draws random numbers in its forward. No other layer of the model
    /// gets the same.
    pub(crate) fn random_layer(&mut self) -> u32 {
        self.random_layers += 1;
        self.random_layers - 1
    }

    /// The declarations of a part that reads `reads`, above parts that read `below`; and by
    /// parameter of the model its number in the part.
    pub(crate) fn part(
        &self,
        reads: &[ParamId],
        below: &[ParamId],
    ) -> (Declarations, Vec<Option<ParamId>>) {
        let mut part = Declarations {
            lora: self.lora.clone(),
            ..Declarations::new()
        };
        let mut ids = vec![None; self.list.len()];
        for (id, declared) in self.list.iter().enumerate() {
            if reads.contains(&ParamId(id)) {
                ids[id] = Some(ParamId(part.list.len()));
                part.list.push(Declaration {
                    is_borrowed: below.contains(&ParamId(id)),
                    ..declared.clone()
                });
            }
        }
        let trained = reads.iter().filter(|id| !self.list[id.0].is_buffer);
        part.uses = trained.filter_map(|id| ids[id.0]).collect();
        (part, ids)
    }

    fn declare(
        &mut self,
        name: String,
        shape: &[usize],
        init: Init,
        is_buffer: bool,
    ) -> Result<ParamId> {
        if self.list.iter().any(|other| other.name == name) {
            let help = "give each layer its own name; layers with one weight share a Tie, and a \
                        whole layer is called once, on joined inputs";
            return Err(Error::model(
                name,
                "a name that is not taken",
                "it twice",
                help,
            ));
        }
        let (Init::Constant(number)
        | Init::Uniform { bound: number }
        | Init::Normal { deviation: number }) = init;
        if !is_buffer && !(number as f32).is_finite() {
            let help = "check how it is computed";
            let got = format!("{init:?}");
            return Err(Error::model(name, "finite initial weights", got, help));
        }
        let count = shape
            .iter()
            .try_fold(1usize, |count, &length| count.checked_mul(length));
        if count.is_none_or(|count| count == 0 || count > isize::MAX as usize / 64) {
            let expected = "a shape with elements, and fewer than memory could hold";
            let got = format!("the shape {shape:?}");
            return Err(Error::model(name, expected, got, "check the layer's sizes"));
        }
        self.list.push(Declaration {
            name,
            shape: shape.to_vec(),
            init,
            is_buffer,
            matrices: Vec::new(),
            is_tied: false,
            is_borrowed: false,
        });
        Ok(ParamId(self.list.len() - 1))
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
pub struct Numerics {
    /// The dtype of activations, of their gradients, and of the parameters that layers read.
    pub layers: DType,
    /// How a GPU multiplies f32.
    pub f32_math: F32Math,
}

impl Numerics {
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

impl From<DType> for Numerics {
    /// Layers in this dtype, with exact f32 matmuls.
    fn from(layers: DType) -> Numerics {
        Numerics {
            layers,
            f32_math: F32Math::Strict,
        }
    }
}

impl From<Precision> for Numerics {
    fn from(precision: Precision) -> Numerics {
        match precision {
            Precision::F32 => DType::F32.into(),
            Precision::Tf32 => Numerics {
                layers: DType::F32,
                f32_math: F32Math::Tf32,
            },
            Precision::Bf16 => DType::BF16.into(),
        }
    }
}
