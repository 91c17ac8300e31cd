//! The values that flags take: each is read from the text of a flag, or from a TOML file, and prints as it is read.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueEnum;
use ddp_kernels::ops;
use ddp_kernels::{DType, Device};
use serde::{Deserialize, Serialize};

use crate::optim::Shape;

/// `--model`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModelKind {
    /// A multilayer perceptron
    #[default]
    Mlp,
}

/// `--activation`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Activation {
    /// max(z, 0)
    #[default]
    Relu,
    /// z·Φ(z), exact
    Gelu,
    /// z·Φ(z), approximated by tanh
    GeluTanh,
}

impl Activation {
    /// As operations name it.
    pub fn op(self) -> ops::Activation {
        match self {
            Activation::Relu => ops::Activation::Relu,
            Activation::Gelu => ops::Activation::Gelu(ops::Gelu::Erf),
            Activation::GeluTanh => ops::Activation::Gelu(ops::Gelu::Tanh),
        }
    }
}

/// `--optimizer`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay
    #[default]
    Adamw,
    /// Stochastic gradient descent with momentum
    Sgd,
}

/// `--schedule`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Schedule {
    /// The peak to the end
    Constant,
    /// Down in a straight line
    Linear,
    /// Down along half a cosine
    #[default]
    Cosine,
    /// The peak for long, down over the last fifth
    Wsd,
}

impl Schedule {
    /// As `optim` names it.
    pub fn shape(self) -> Shape {
        match self {
            Schedule::Constant => Shape::Constant,
            Schedule::Linear => Shape::Linear,
            Schedule::Cosine => Shape::Cosine,
            Schedule::Wsd => Shape::Wsd,
        }
    }
}

/// `--reduce-dtype`, and `--dtype` of `bench allreduce`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FloatType {
    /// 32 bits
    #[default]
    F32,
    /// 16 bits, of which 8 are the exponent's
    Bf16,
}

impl FloatType {
    /// As tensors name it.
    pub fn dtype(self) -> DType {
        match self {
            FloatType::F32 => DType::F32,
            FloatType::Bf16 => DType::BF16,
        }
    }
}

/// `--dtype`: in what a model computes. Its values, its gradients and the optimizer's moments are f32 in any case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Precision {
    /// 32 bits throughout
    #[default]
    F32,
    /// On a GPU: products of numbers rounded to 10 bits behind the point, sums in 32 bits
    Tf32,
    /// On a GPU: activations and the parameters that products read in bf16
    Bf16,
}

/// `--data-on-device`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Resident {
    /// Where it fits
    #[default]
    Auto,
    /// Always; too little memory is an error
    On,
    /// Never: each batch is copied ahead of its step
    Off,
}

/// `--progress`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum When {
    /// A bar on a terminal, else a line now and then
    #[default]
    Auto,
    /// A bar wherever it goes
    Always,
    /// Nothing
    Never,
}

/// `--overlap`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Overlap {
    /// Wherever there are several ranks
    #[default]
    Auto,
    /// Always
    On,
    /// Never
    Off,
}

/// `--graph`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GraphChoice {
    /// On a GPU, unless the layers are split over several
    #[default]
    Auto,
    /// Always; what cannot be captured is an error
    On,
    /// Never
    Off,
}

/// `--log-level`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[allow(missing_docs)]
pub enum LogLevel {
    Error,
    Warn,
    #[default]
    Info,
    Debug,
    Trace,
}

impl LogLevel {
    /// As `tracing` names it.
    pub fn filter(self) -> tracing::level_filters::LevelFilter {
        use tracing::level_filters::LevelFilter;
        match self {
            LogLevel::Error => LevelFilter::ERROR,
            LogLevel::Warn => LevelFilter::WARN,
            LogLevel::Info => LevelFilter::INFO,
            LogLevel::Debug => LevelFilter::DEBUG,
            LogLevel::Trace => LevelFilter::TRACE,
        }
    }
}

/// `--device`: where to train, before it is known which device of that kind is this rank's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// The best there is.
    #[default]
    Auto,
    /// The processor.
    Cpu,
    /// The CUDA device that is this rank's.
    Cuda,
    /// This CUDA device.
    CudaAt(usize),
}

impl DeviceChoice {
    /// What must be equal on all ranks: not which one.
    pub fn kind(self) -> &'static str {
        match self {
            DeviceChoice::Auto => "auto",
            DeviceChoice::Cpu => "cpu",
            DeviceChoice::Cuda | DeviceChoice::CudaAt(_) => "cuda",
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::CudaAt(index) => write!(f, "cuda:{index}"),
            other => f.write_str(other.kind()),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<DeviceChoice, String> {
        match text {
            "auto" => Ok(DeviceChoice::Auto),
            "cuda" => Ok(DeviceChoice::Cuda),
            _ => match text.parse() {
                Ok(Device::Cpu) => Ok(DeviceChoice::Cpu),
                Ok(Device::Cuda(index)) => Ok(DeviceChoice::CudaAt(index)),
                Err(error) => Err(error.to_string()),
            },
        }
    }
}

impl TryFrom<String> for DeviceChoice {
    type Error = String;
    fn try_from(text: String) -> Result<DeviceChoice, String> {
        text.parse()
    }
}

impl From<DeviceChoice> for String {
    fn from(choice: DeviceChoice) -> String {
        choice.to_string()
    }
}

/// `--task`
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TaskKind {
    /// Labels are classes
    Classification,
    /// Labels are numbers
    Regression,
}

/// `--normalize`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Normalize {
    /// Features as they are
    #[default]
    None,
    /// All features brought to 0 to 1 together: bytes divided by 255, others by the training data's least and largest
    Unit,
    /// Each feature by the training data's mean and deviation
    Standard,
}

/// `--resume`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Resume {
    /// The run must be new.
    #[default]
    Never,
    /// From the newest whole checkpoint, if there is any.
    Auto,
    /// From this checkpoint.
    From(PathBuf),
}

impl fmt::Display for Resume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Resume::Never => f.write_str("never"),
            Resume::Auto => f.write_str("auto"),
            Resume::From(path) => path.display().fmt(f),
        }
    }
}

impl FromStr for Resume {
    type Err = String;

    fn from_str(text: &str) -> Result<Resume, String> {
        match text {
            "never" => Ok(Resume::Never),
            "auto" => Ok(Resume::Auto),
            "" => Err("expected never, auto or the folder of a checkpoint".into()),
            path => Ok(Resume::From(path.into())),
        }
    }
}

impl TryFrom<String> for Resume {
    type Error = String;
    fn try_from(text: String) -> Result<Resume, String> {
        text.parse()
    }
}

impl From<Resume> for String {
    fn from(resume: Resume) -> String {
        resume.to_string()
    }
}

/// Values with commas between; `none` for no value. In a TOML file an array.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct List<T>(pub Vec<T>);

impl<T: FromStr> FromStr for List<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<List<T>, String> {
        if text == "none" {
            return Ok(List(Vec::new()));
        }
        let value = |part: &str| part.trim().parse().map_err(|_| format!("{part:?} is not one of the values it takes"));
        text.split(',').map(value).collect::<Result<_, _>>().map(List)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_read_back_as_they_print() {
        for text in ["auto", "cpu", "cuda", "cuda:0", "cuda:17"] {
            assert_eq!(text.parse::<DeviceChoice>().unwrap().to_string(), text);
        }
        let message = "gpu".parse::<DeviceChoice>().unwrap_err();
        assert!(message.contains("cuda"), "{message}");
        assert!("cuda:x".parse::<DeviceChoice>().is_err());
        assert_eq!("cuda:1".parse::<DeviceChoice>().unwrap().kind(), "cuda");
    }

    #[test]
    fn lists_have_commas_between_their_values() {
        assert_eq!("1, 2,3".parse(), Ok(List(vec![1, 2, 3])));
        assert_eq!("none".parse(), Ok(List::<usize>(vec![])));
        for text in ["", "1,,2", "1;2", "1,x"] {
            assert!(text.parse::<List<usize>>().is_err(), "{text:?}");
        }
    }
}
