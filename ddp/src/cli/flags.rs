//! Flags that several commands share, and parsers of their values.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use ddp_comm::{RANKS_MAX, World};
use ddp_kernels::Device;
use ddp_kernels::choice::{self, Choice};
use ddp_kernels::threads::COUNT_MAX;

use super::start::PlaceFlags;
use crate::config::{DeviceChoice, TIMEOUT_S, find_devices};
use crate::error::Result;

/// How many ranks `--ranks` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RankCount {
    /// One for each GPU of this machine, else one.
    Auto,
    /// So many.
    Of(usize),
}

impl FromStr for RankCount {
    type Err = String;

    fn from_str(text: &str) -> Result<RankCount, String> {
        match text.parse() {
            _ if text == "auto" => Ok(RankCount::Auto),
            Ok(count) if (1..=RANKS_MAX).contains(&count) => Ok(RankCount::Of(count)),
            _ => Err(format!(
                "expected auto, or a whole number from 1 to {RANKS_MAX}"
            )),
        }
    }
}

/// What a rank has, and how long it waits for the others.
#[derive(Args, Clone, Debug, PartialEq)]
pub struct RankFlags {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub places: PlaceFlags,
    /// Device: auto, cpu, cuda (each rank on its own GPU) or cuda:N (one rank, on that GPU)
    #[arg(long, value_name = "DEVICE", default_value = "auto")]
    #[arg(env = "DDP_DEVICE", hide_env_values = true)]
    pub device: DeviceChoice,
    /// Let several ranks share a GPU: for tests, slow
    #[arg(long)]
    #[arg(env = "DDP_SHARE_GPUS", hide_env_values = true)]
    pub share_gpus: bool,
    /// CPU threads of a rank [default: its share of the cores]
    #[arg(long, value_name = "N", value_parser = whole(1..=COUNT_MAX), allow_negative_numbers = true)]
    #[arg(env = "DDP_THREADS", hide_env_values = true)]
    pub threads: Option<usize>,
    /// Seconds that a rank waits for the others
    #[arg(long, value_name = "S", default_value = "600", value_parser = number(TIMEOUT_S), allow_negative_numbers = true)]
    #[arg(env = "DDP_TIMEOUT_S", hide_env_values = true)]
    pub timeout_s: f64,
}

impl RankFlags {
    /// This rank's CPU threads.
    pub fn thread_count(&self, world: &World) -> usize {
        self.threads.unwrap_or_else(|| world.default_threads())
    }

    /// This rank's device. All ranks call this together.
    pub fn find_device(&self, world: &World) -> Result<Device> {
        Ok(find_devices(self.device, 1, self.share_gpus, world)?[0])
    }
}

/// A parser of whole numbers.
pub(crate) fn whole<T: FromStr + PartialOrd + Display + Clone + Send + Sync + 'static>(
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    in_range("a whole number", range)
}

/// A parser of numbers.
pub(crate) fn number(range: RangeInclusive<f64>) -> impl Fn(&str) -> Result<f64, String> + Clone {
    in_range("a number", range)
}

fn in_range<T: FromStr + PartialOrd + Display + Clone>(
    what: &'static str,
    range: RangeInclusive<T>,
) -> impl Fn(&str) -> Result<T, String> + Clone {
    move |text| {
        let value = text.parse().ok().filter(|value| range.contains(value));
        let (start, end) = (range.start(), range.end());
        value.ok_or_else(|| format!("expected {what} from {start} to {end}"))
    }
}

/// A parser of a few names, which help lists.
pub(crate) fn choice<T: Choice + Send + Sync>() -> impl TypedValueParser<Value = T> {
    let values = T::ALL
        .iter()
        .map(|(_, name, help)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(values).try_map(|name| choice::named::<T>(&name))
}
