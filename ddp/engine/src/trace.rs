//! A timeline of some steps of a run, on all ranks, as a file for Perfetto or chrome://tracing.
//!
//! Each rank records its spans (`ddp_kernels::trace`). When the last of the steps is done, all
//! ranks gather them, rank 0 puts them on one clock (`trace/spans.rs`), writes the file
//! (`trace/file.rs`) and sums them up (`trace/summary.rs`).

mod file;
mod spans;
mod summary;
#[cfg(test)]
mod tests;

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use ddp_comm::World;
use ddp_kernels::Device;
use ddp_kernels::trace;
use serde::{Deserialize, Serialize};

use self::spans::{RankTrace, Readings, align, read_clock};
use self::summary::Summary;
use crate::error::Result;
use crate::exchange;
use crate::setting::TRACE;

/// The file, in the folder of the run.
pub const TRACE_FILE: &str = "trace.json";

/// The most spans of a rank: a few thousand steps.
const SPANS_MAX: usize = 1 << 16;

/// The steps to trace, from 1: `100..110` with both ends, `5`, or `5..` up to the last one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TraceSteps {
    first: u64,
    /// u64::MAX for the last step of the run.
    last: u64,
}

impl TraceSteps {
    fn contains(self, step: u64) -> bool {
        (self.first..=self.last).contains(&step)
    }

    /// Whether one of them is `next` or later.
    pub(crate) fn reach(self, next: u64) -> bool {
        next <= self.last
    }

    /// What is wrong with these steps for a run that takes steps `next` to `last`, if anything.
    fn problem(self, next: u64, last: u64) -> Option<String> {
        let reaches = match (self.first > last, self.last < next) {
            (true, _) | (_, true) => "no step is traced",
            _ if self.first < next => "the trace begins later",
            _ if self.last > last && self.last < u64::MAX => "the trace ends earlier",
            _ => return None,
        };
        Some(format!(
            "{TRACE} {self}: the run takes steps {next} to {last}, so {reaches}"
        ))
    }
}

impl FromStr for TraceSteps {
    type Err = String;

    fn from_str(text: &str) -> Result<TraceSteps, String> {
        let expected = || {
            "expected steps from 1, as in 100..110 (both included), 5, or 5.. for all from there"
                .to_string()
        };
        let number = |text: &str| text.parse().map_err(|_| expected());
        let (first, last) = match text.split_once("..") {
            None => (number(text)?, number(text)?),
            Some((first, "")) => (number(first)?, u64::MAX),
            Some((first, last)) => (number(first)?, number(last)?),
        };
        if first == 0 || last < first {
            return Err(expected());
        }
        Ok(TraceSteps { first, last })
    }
}

impl fmt::Display for TraceSteps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            TraceSteps { first, last } if first == last => write!(f, "{first}"),
            TraceSteps { first, last } if last == u64::MAX => write!(f, "{first}.."),
            TraceSteps { first, last } => write!(f, "{first}..{last}"),
        }
    }
}

/// The trace of a run, on one rank. It costs one comparison a step while nothing is traced.
#[derive(Debug)]
pub struct RunTrace {
    /// None without a trace, and once it is written.
    steps: Option<TraceSteps>,
    /// While it records: the clock of this rank beside those of the others.
    readings: Option<Readings>,
    devices: Vec<Device>,
}

impl Drop for RunTrace {
    fn drop(&mut self) {
        if self.readings.is_some() {
            // The ranks meet again: what they record then has another clock.
            _ = trace::stop();
        }
    }
}

impl RunTrace {
    /// A trace of `steps`, on this rank's `devices`, in a run that takes steps `next` to `last`.
    /// Rank 0 warns of steps that the run does not take.
    pub fn new(
        steps: Option<TraceSteps>,
        [next, last]: [u64; 2],
        devices: &[Device],
        world: &World,
    ) -> RunTrace {
        if let (0, Some(problem)) = (world.rank(), steps.and_then(|it| it.problem(next, last))) {
            tracing::warn!("{problem}");
        }
        RunTrace {
            steps,
            readings: None,
            devices: devices.to_vec(),
        }
    }

    /// To be called before step `step`, by all ranks together.
    pub fn before(&mut self, step: u64, world: &World) -> Result<()> {
        let Some(steps) = self.steps else {
            return Ok(());
        };
        trace::begin_step(step);
        if self.readings.is_none() && steps.contains(step) {
            let began = trace::start(&self.devices, SPANS_MAX)?;
            self.readings = Some(read_clock(began, world)?);
        }
        Ok(())
    }

    /// Whether `step` is the last one of the trace.
    pub(crate) fn ends_after(&self, step: u64) -> bool {
        self.readings.is_some() && self.steps.is_some_and(|steps| step >= steps.last)
    }

    /// Gathers the spans of all ranks, if it records, and writes the file into `out`. Returns, on
    /// rank 0, lines for people. All ranks call it together.
    pub fn finish(&mut self, world: &World, out: &Path) -> Result<Vec<String>> {
        let Some(readings) = self.readings.take() else {
            return Ok(Vec::new());
        };
        self.steps = None;
        let mine = RankTrace::new(&trace::stop()?, readings, world.host());
        let ranks = exchange::gather(world, &mine)?;
        if world.rank() != 0 {
            return Ok(Vec::new());
        }
        let ranks = align(ranks);
        let path: PathBuf = out.join(TRACE_FILE);
        // Training continues without it.
        if let Err(error) = file::write(&path, &ranks) {
            tracing::warn!("cannot write the trace: {error}");
        }
        let mut lines = Summary::of(&ranks).lines();
        lines.push(format!("trace {}", path.display()));
        Ok(lines)
    }
}
