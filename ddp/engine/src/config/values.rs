//! The types of settings. Each reads from the text of a flag or from a TOML file, and prints as it
//! is read.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use ddp_kernels::choices;
use ddp_kernels::setting::Choice;
use ddp_kernels::{DType, Device};
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use crate::lora::LoraSetting;
pub use crate::reducer::Overlap;
pub use crate::step::GraphChoice;
pub use crate::tasks::{BestBy, ClassWeights};
pub use crate::trace::TraceSteps;
pub use crate::units::MemorySize;
pub use ddp_comm::NcclChoice;
pub use ddp_data::{LossOn, Missing, Packing, Resident, Scaling, TaskKind};
pub use ddp_kernels::setting::{Form, List, Number, SettingValue};
pub use ddp_nn::optim::{Decayed, OptimizerKind, ScheduleShape as Schedule};
pub use ddp_nn::params::Precision;

/// Seconds that `timeout-s` takes.
pub const TIMEOUT_S: RangeInclusive<f64> = 0.1..=1e9;

/// The largest whole number in a TOML file.
pub(super) const WHOLE_MAX: u64 = i64::MAX as u64;
/// The largest number of steps, and of rows in a batch: numbers in JSON are exact up to here.
pub(crate) const EXACT_MAX: u64 = 1 << 53;

/// The numbers that a setting takes.
#[derive(Clone, Copy, Debug)]
pub enum Limits {
    /// Any that can be written.
    Any,
    /// Whole numbers from the first to the second.
    Whole(u64, u64),
    /// Numbers from the first to the second.
    Real(f64, f64),
    /// Numbers from 0 to 1, but not 1.
    BelowOne,
}

impl Limits {
    /// What is expected, if `number` is something else.
    pub(super) fn refusal(self, number: Number) -> Option<String> {
        let (is_within, expected) = match (self, number) {
            (Limits::Whole(least, most), Number::Whole(number)) => (
                (least..=most).contains(&number),
                format!("a whole number from {least} to {most}"),
            ),
            (_, Number::Whole(number)) => (number <= WHOLE_MAX, format!("at most {WHOLE_MAX}")),
            // Steps compute in f32.
            (Limits::Real(least, f64::MAX), Number::Real(number)) => (
                (least..=f32::MAX.into()).contains(&number),
                format!("a finite number, {least} or more and below 3.4e38"),
            ),
            (Limits::Real(least, most), Number::Real(number)) => (
                (least..=most).contains(&number),
                format!("a number from {least} to {most}"),
            ),
            (Limits::BelowOne, Number::Real(number)) => {
                let percent = format!(" ({number}% is {})", (number * 1e10).round() / 1e12);
                let percent = Some(percent).filter(|_| number > 1.0 && number < 100.0);
                let expected = "a number, at least 0 and less than 1".to_string();
                let expected = expected + &percent.unwrap_or_default();
                ((0.0..1.0).contains(&number), expected)
            }
            (_, Number::Real(_)) => return None,
        };
        (!is_within).then_some(expected)
    }
}

impl SettingValue for ClassWeights {
    const FORM: Form = Form::List;

    fn read(text: &str) -> Result<ClassWeights, String> {
        text.parse()
    }
}

/// Settings that are written as they print.
macro_rules! read_as_printed {
    ($($kind:ty),+) => {$(
        impl SettingValue for $kind {
            fn read(text: &str) -> Result<$kind, String> {
                text.parse()
            }
        }

        impl TryFrom<String> for $kind {
            type Error = String;

            fn try_from(text: String) -> Result<$kind, String> {
                text.parse()
            }
        }

        impl From<$kind> for String {
            fn from(value: $kind) -> String {
                value.to_string()
            }
        }
    )+};
}

read_as_printed!(DeviceChoice, LoraSetting, MemorySize, Resume, TraceSteps);

/// Parameters whose learning rate or weight decay differs from the others'.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct GroupSetting {
    /// What their names match.
    #[serde(rename = "match")]
    pub pattern: String,
    /// Their peak learning rate.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lr: Option<f64>,
    /// Their weight decay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight_decay: Option<f64>,
}

impl FromStr for GroupSetting {
    type Err = String;

    fn from_str(text: &str) -> Result<GroupSetting, String> {
        let mut parts = text.split(':');
        let pattern = parts.next().unwrap_or_default().to_string();
        if pattern.is_empty() {
            return Err("expected a pattern of parameters' names, got none".into());
        }
        let mut group = GroupSetting {
            pattern,
            lr: None,
            weight_decay: None,
        };
        for part in parts {
            let number = |value: &str| value.parse().map(Some).map_err(|_| wrong_group(part));
            match part.split_once('=') {
                Some(("lr", value)) if group.lr.is_none() => group.lr = number(value)?,
                Some(("weight-decay", value)) if group.weight_decay.is_none() => {
                    group.weight_decay = number(value)?
                }
                _ => return Err(wrong_group(part)),
            }
        }
        Ok(group)
    }
}

/// All groups. In text they are separated by commas.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Groups(pub Vec<GroupSetting>);

impl SettingValue for Groups {
    const FORM: Form = Form::List;

    fn read(text: &str) -> Result<Groups, String> {
        let all = text.split(',').filter(|_| text != "none");
        all.map(str::parse).collect::<Result<_, _>>().map(Groups)
    }
}

fn wrong_group(part: &str) -> String {
    format!(
        "expected lr=NUMBER or weight-decay=NUMBER, each once, after the pattern and a colon, got {part:?}"
    )
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
        self.name().parse().expect("tracing has these levels")
    }
}

/// Whether a run is resumed, and from which checkpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Resume {
    /// The run must be new.
    #[default]
    Never,
    /// From the newest intact checkpoint, if there is one.
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

/// A value as a flag takes it: `none` or `1,2` for lists, `match:lr=1` for groups, text without
/// quotes.
pub fn as_flag(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(values) if values.is_empty() => "none".to_string(),
        Value::Array(values) => values.iter().map(as_flag).collect::<Vec<_>>().join(","),
        Value::Object(group) => {
            let mut text = group.get("match").map(as_flag).unwrap_or_default();
            for (name, value) in group.iter().filter(|(name, _)| *name != "match") {
                text += &format!(":{name}={}", as_flag(value));
            }
            text
        }
        Value::Number(number) if number.is_f64() => number.as_f64().unwrap_or(f64::NAN).to_string(),
        other => other.to_string(),
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
