//! The simulated clock: when each piece of work starts and ends, and the file that lists it.
//!
//! A stream is a queue with its own time; events, launches and host waits carry times from one to
//! another. Kernels and matmuls of a device share one compute engine and never overlap, except
//! launches of so few blocks that another fits beside them. Copies, fills and collectives overlap
//! with it and with each other. Pieces do not run in clock order, so a kernel takes the first gap
//! of the engine that is long enough.
//!
//! This measures nothing: it shows what can overlap.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::path::Path;

use crate::stream::Operation;
use crate::work::Touched;

/// How many busy intervals an engine remembers; earlier times count as busy.
const STRETCHES_MAX: usize = 4096;

/// The busy intervals.
#[derive(Debug, Default)]
struct Engine {
    /// Ends by starts; intervals do not touch.
    busy: BTreeMap<u64, u64>,
    /// Nothing starts earlier any more.
    floor_ns: u64,
}

impl Engine {
    /// Takes the first free interval of this length from `earliest_ns` on; returns its start.
    fn take(&mut self, earliest_ns: u64, duration_ns: u64) -> u64 {
        let mut start = earliest_ns.max(self.floor_ns);
        if let Some((_, end)) = self.busy.range(..=start).next_back() {
            start = start.max(*end);
        }
        for (begin, end) in self.busy.range(start..) {
            if *begin >= start.saturating_add(duration_ns) {
                break;
            }
            start = *end;
        }
        self.mark(start, start.saturating_add(duration_ns));
        start
    }

    fn mark(&mut self, mut start: u64, mut end: u64) {
        if start == end {
            return;
        }
        if let Some((&begin, &before)) = self.busy.range(..=start).next_back()
            && before == start
        {
            start = begin;
        }
        if let Some(after) = self.busy.remove(&end) {
            end = after;
        }
        self.busy.insert(start, end);
        if self.busy.len() > STRETCHES_MAX
            && let Some((_, end)) = self.busy.pop_first()
        {
            self.floor_ns = end;
        }
    }
}

/// The engine that does a piece of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Kernels and matmuls.
    Compute,
    /// Copies and fills.
    Copy,
    /// Collectives.
    Nccl,
}

impl Part {
    /// Derived from the work's own description.
    pub(crate) fn of(describe: &str) -> Self {
        if describe.starts_with("cuMem") {
            Self::Copy
        } else {
            Self::Compute
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Copy => "copy",
            Self::Nccl => "nccl",
        }
    }
}

/// All engines, and the file.
#[derive(Debug, Default)]
pub struct Timeline {
    engines: Vec<Engine>,
    /// The time up to which the host has waited: what it queues starts no earlier.
    pub(crate) host_ns: u64,
    file: Option<File>,
}

impl Timeline {
    /// For a new machine. A file that cannot be created is reported and left out.
    pub(crate) fn new(devices: usize, path: Option<&Path>) -> Self {
        let file = path.and_then(|path| {
            // One file per process: ranks of a host would overwrite each other's.
            let path = path
                .to_string_lossy()
                .replace("%p", &std::process::id().to_string());
            let made = File::create(&path);
            made.inspect_err(|error| {
                eprintln!("simcuda: SIMCUDA_TIMELINE={path}: cannot be written: {error}")
            })
            .ok()
        });
        let engines = std::iter::repeat_with(Engine::default)
            .take(devices)
            .collect();
        Self {
            engines,
            host_ns: 0,
            file,
        }
    }

    /// When work that could start at `earliest_ns` starts.
    pub(crate) fn begin(
        &mut self,
        device: usize,
        part: Part,
        earliest_ns: u64,
        duration_ns: u64,
    ) -> u64 {
        match part {
            Part::Compute => self.engines[device].take(earliest_ns, duration_ns),
            Part::Copy | Part::Nccl => earliest_ns,
        }
    }

    /// Lists a piece of work. A graph node is listed under the stream it was captured in.
    pub(crate) fn list(
        &mut self,
        operation: &Operation,
        part: Part,
        (start_ns, end_ns): (u64, u64),
        bytes: u64,
    ) {
        let Some(file) = &mut self.file else { return };
        let of = operation
            .captured
            .as_ref()
            .map_or(operation.stream, |captured| captured.stream);
        let number = |stream: Option<usize>| {
            stream.map_or_else(|| "null".to_owned(), |stream| stream.to_string())
        };
        let launched_on = if operation.captured.is_some() {
            operation.stream
        } else {
            None
        };
        let line = format!(
            "{{\"device\":{},\"stream\":{},\"launched_on\":{},\"part\":\"{}\",\"priority\":{},\"start_ns\":{start_ns},\"end_ns\":{end_ns},\"bytes\":{bytes},\
             \"what\":\"{}\"}}\n",
            operation.device,
            number(of),
            number(launched_on),
            part.name(),
            operation.priority,
            operation
                .describe
                .replace('\\', "\\\\")
                .replace('"', "\\\"")
        );
        // Flushed at once: a finding or a kill may end the process.
        if let Err(error) = file.write_all(line.as_bytes()) {
            eprintln!("simcuda: SIMCUDA_TIMELINE: cannot be written: {error}");
            self.file = None;
        }
    }

    /// Whether there is a file.
    pub(crate) fn is_listed(&self) -> bool {
        self.file.is_some()
    }
}

/// How much a piece of work moved: the larger of bytes read and bytes written.
pub(crate) fn moved_bytes(touched: &Touched) -> u64 {
    let sum = |ranges: &[std::ops::Range<u64>]| {
        ranges
            .iter()
            .map(|range| range.end - range.start)
            .sum::<u64>()
    };
    sum(&touched.reads).max(sum(&touched.writes) + sum(&touched.atomics))
}

#[cfg(test)]
mod tests;
