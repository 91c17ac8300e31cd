//! Flags that several commands share, those of `ddp-tools`' commands, and parsers of their values.

pub(crate) mod bench;
pub(crate) mod layers;
pub(crate) mod meant;
mod taken;
pub(crate) mod tools;
pub(crate) mod verify;

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use ddp_comm::spawn::HostList;
use ddp_comm::{RANKS_MAX, World};
use ddp_kernels::setting::{self, Choice};

pub(crate) use self::layers::{SettingFlags, spell_settings_as_flags};
use crate::config::TIMEOUT_S;
use crate::error::Error;

pub(crate) use self::taken::Taken;

/// How many ranks `--ranks` asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RankCount {
    /// One for each GPU of this machine, else one.
    Auto,
    /// This many.
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

/// The ranks to start, if no launcher starts them.
#[derive(Args, Clone, Debug, Default, PartialEq)]
#[group(id = "places", multiple = true)]
pub(crate) struct PlaceFlags {
    /// Start N ranks on this machine, without MPI; auto: one for each GPU, else one. With --hosts:
    /// only the first N
    #[arg(long, value_name = "N")]
    pub ranks: Option<RankCount>,
    /// Start ranks on these hosts over ssh, with the number of ranks after each host:
    /// node1:4,node2:4
    #[arg(long, value_name = "HOST:N,…")]
    pub hosts: Option<HostList>,
    /// The same, from a file with a host in each line: node1 slots=4, or node1:4
    #[arg(long, value_name = "FILE", conflicts_with = "hosts")]
    pub hostfile: Option<PathBuf>,
}

/// How ranks are started, if no launcher starts them, and how the job continues without some.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub(crate) struct StartFlags {
    #[command(flatten, next_help_heading = RANKS)]
    #[allow(missing_docs)]
    pub places: PlaceFlags,
    /// Continue without lost ranks while at least N are left; --restarts then counts ranks. Also
    /// for processes that srun or the variables RANK and WORLD_SIZE start, one on each host
    #[arg(long, value_name = "N", help_heading = RANKS, group = "places")]
    #[arg(value_parser = whole(0..=usize::MAX), allow_negative_numbers = true)]
    pub min_ranks: Option<usize>,
    /// Hosts that take over the ranks of a lost one, with the number of ranks each has room for
    #[arg(long, value_name = "HOST:N,…", help_heading = RANKS, requires = "min_ranks")]
    pub spares: Option<HostList>,
    /// How often to start again, with --resume auto, after a rank was lost
    #[arg(long, value_name = "N", help_heading = RANKS, requires = "places", default_value = "0")]
    #[arg(value_parser = whole(0..=u32::MAX), allow_negative_numbers = true)]
    pub restarts: u32,
    /// Seconds that ranks have to save after a signal to stop
    #[arg(long, value_name = "S", help_heading = RANKS, requires = "places", default_value = "60")]
    #[arg(value_parser = number(TIMEOUT_S), allow_negative_numbers = true)]
    pub grace_s: f64,
}

const RANKS: &str = "Ranks started here";

impl StartFlags {
    /// Ranks in these places, of a command that does not train.
    pub(crate) fn at(places: &PlaceFlags) -> StartFlags {
        StartFlags {
            places: places.clone(),
            grace_s: 60.0,
            ..StartFlags::default()
        }
    }

    /// Whether there are ranks to start.
    pub(crate) fn starts(&self) -> bool {
        self.places != PlaceFlags::default() || self.min_ranks.is_some()
    }
}

/// The ranks of a command that computes.
#[derive(Args, Clone, Debug, PartialEq)]
pub(crate) struct RankFlags {
    #[command(flatten)]
    #[allow(missing_docs)]
    pub places: PlaceFlags,
    /// What a rank has, and how long it waits for the others.
    #[command(flatten)]
    pub settings: Taken,
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
        let (start, end) = (range.start(), range.end());
        let expected = || format!("expected {what} from {start} to {end}");
        parsed(text, |value| range.contains(value), expected)
    }
}

/// The value that a text names, if it is a right one.
pub(crate) fn parsed<T: FromStr>(
    text: &str,
    is_right: impl Fn(&T) -> bool,
    expected: impl FnOnce() -> String,
) -> Result<T, String> {
    text.parse().ok().filter(is_right).ok_or_else(expected)
}

/// Refuses several ranks for a command that has no use for them.
pub(crate) fn check_alone(command: &str, world: &World) -> Result<(), Error> {
    let ranks = world.size();
    if ranks == 1 {
        return Ok(());
    }
    Err(Error::Usage(format!(
        "{command}: expected one process, which uses all cores, got {ranks} ranks; help: start it \
         without mpirun"
    )))
}

/// A parser of a few names, which help lists.
pub(crate) fn choice<T: Choice + Send + Sync>() -> impl TypedValueParser<Value = T> {
    let values = T::ALL
        .iter()
        .map(|(_, name, help)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(values).try_map(|name| setting::named::<T>(&name))
}
