//! The types of settings. Each reads from the text of a flag or from a TOML file, and prints as it is read.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use ddp_kernels::choice::{self, Choice};
use ddp_kernels::choices;
use ddp_kernels::{DType, Device};
use serde::{Deserialize, Serialize};

use crate::data::DataSpec;
pub use crate::data::{Normalize, Resident, TaskKind};
pub use crate::models::family::{Form, List};
use crate::optim::Shape;
pub use crate::params::Precision;
pub use crate::reducer::Overlap;
pub use crate::step::GraphChoice;
pub use crate::trainer::Resume;

/// A type of settings.
pub trait SettingValue: Sized {
    /// How it is written.
    const FORM: Form = Form::One;

    /// Reads it from text. The error says what was expected.
    fn read(text: &str) -> Result<Self, String>;

    /// Its values and their help, if it is one of a few names.
    fn choices() -> Vec<(&'static str, &'static str)> {
        Vec::new()
    }
}

macro_rules! read_by_parsing {
    ($($kind:ty: $expected:literal,)+) => {$(
        impl SettingValue for $kind {
            fn read(text: &str) -> Result<$kind, String> {
                text.parse().map_err(|_| format!("expected {}", $expected))
            }
        }
    )+};
}

read_by_parsing! {
    u64: "a whole number, 0 or more, as in 128",
    usize: "a whole number, 1 or more, as in 4",
    f64: "a number, as in 0.001 or 1e-3",
    String: "text",
    PathBuf: "a path",
}

macro_rules! read_by_name {
    ($($kind:ty),+) => {$(
        impl SettingValue for $kind {
            fn read(text: &str) -> Result<$kind, String> {
                choice::named(text)
            }
            fn choices() -> Vec<(&'static str, &'static str)> {
                let all = <$kind as Choice>::ALL.iter();
                all.map(|(_, name, help)| (*name, *help)).collect()
            }
        }
    )+};
}

read_by_name!(
    OptimizerKind,
    Schedule,
    FloatType,
    When,
    Overlap,
    GraphChoice,
    LogLevel,
    Normalize,
    Resident,
    TaskKind,
    Precision
);

impl SettingValue for bool {
    const FORM: Form = Form::Switch;

    fn read(text: &str) -> Result<bool, String> {
        text.parse().map_err(|_| "expected true, false".to_string())
    }
    fn choices() -> Vec<(&'static str, &'static str)> {
        vec![("true", ""), ("false", "")]
    }
}

impl<T: SettingValue> SettingValue for Option<T> {
    const FORM: Form = T::FORM;

    fn read(text: &str) -> Result<Option<T>, String> {
        T::read(text).map(Some)
    }
    fn choices() -> Vec<(&'static str, &'static str)> {
        T::choices()
    }
}

impl<T: FromStr> SettingValue for Vec<T> {
    const FORM: Form = Form::List;

    fn read(text: &str) -> Result<Vec<T>, String> {
        text.parse().map(|List(values)| values)
    }
}

impl SettingValue for DataSpec {
    fn read(text: &str) -> Result<DataSpec, String> {
        text.parse().map_err(|error: crate::data::Error| {
            // The caller names the setting and its value already.
            let error = error.to_string();
            let start = format!("`data` {text}: ");
            error.strip_prefix(&start).unwrap_or(&error).to_string()
        })
    }
}

choices! {
    /// An optimizer.
    #[derive(Default)]
    pub enum OptimizerKind {
        /// Adam with decoupled weight decay
        #[default]
        Adamw = "adamw",
        /// Stochastic gradient descent with momentum
        Sgd = "sgd",
    }
}

choices! {
    /// The learning rate after the warm-up.
    #[derive(Default)]
    pub enum Schedule {
        /// The peak until the end
        Constant = "constant",
        /// Down in a straight line
        Linear = "linear",
        /// Down along half a cosine
        #[default]
        Cosine = "cosine",
        /// The peak, then down over the last fifth
        Wsd = "wsd",
    }
}

impl Schedule {
    /// The optimizer's own type.
    pub fn shape(self) -> Shape {
        match self {
            Schedule::Constant => Shape::Constant,
            Schedule::Linear => Shape::Linear,
            Schedule::Cosine => Shape::Cosine,
            Schedule::Wsd => Shape::Wsd,
        }
    }
}

choices! {
    /// A type of numbers in transit.
    #[derive(Default)]
    pub enum FloatType {
        /// 32 bits
        #[default]
        F32 = "f32",
        /// 16 bits with the range of f32
        Bf16 = "bf16",
    }
}

impl FloatType {
    /// The tensors' own type.
    pub fn dtype(self) -> DType {
        match self {
            FloatType::F32 => DType::F32,
            FloatType::Bf16 => DType::BF16,
        }
    }
}

choices! {
    /// When progress is shown.
    #[derive(Default)]
    pub enum When {
        /// A bar on a terminal, else a line now and then
        #[default]
        Auto = "auto",
        /// A bar, also without a terminal
        Always = "always",
        /// Nothing
        Never = "never",
    }
}

choices! {
    /// Which messages are logged.
    #[derive(Default)]
    pub enum LogLevel {
        /// Errors
        Error = "error",
        /// Warnings too
        Warn = "warn",
        /// What happens
        #[default]
        Info = "info",
        /// Details
        Debug = "debug",
        /// Everything
        Trace = "trace",
    }
}

impl LogLevel {
    /// The filter of `tracing`.
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

impl TryFrom<String> for DeviceChoice {
    type Error = String;

    fn try_from(text: String) -> Result<DeviceChoice, String> {
        text.parse()
    }
}

impl From<DeviceChoice> for String {
    fn from(value: DeviceChoice) -> String {
        value.to_string()
    }
}

impl SettingValue for DeviceChoice {
    fn read(text: &str) -> Result<DeviceChoice, String> {
        text.parse()
    }
}

impl SettingValue for Resume {
    fn read(text: &str) -> Result<Resume, String> {
        text.parse()
    }
}

/// Where to train, before it is known which GPU belongs to which rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DeviceChoice {
    /// CUDA if every rank can use it, else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU that belongs to the rank.
    Cuda,
    /// This GPU.
    CudaAt(usize),
}

impl DeviceChoice {
    /// The kind of device, which must be equal on all ranks.
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
}
