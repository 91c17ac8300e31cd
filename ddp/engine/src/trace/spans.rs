//! The spans of a rank, as they travel to rank 0.

use ddp_kernels::trace::{Lane, Recorded, Span};
use serde::{Deserialize, Serialize};

/// Nanoseconds since the rank's trace began, before and after each barrier.
pub(super) type Readings = Vec<[i64; 2]>;

/// The spans of a rank. Times are in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RankTrace {
    pub(super) host: String,
    pub(super) readings: Readings,
    pub(super) missed: u64,
    /// How far times may be off those of rank 0.
    pub(super) bound_ns: i64,
    pub(super) names: Vec<String>,
    pub(super) spans: Vec<TracedSpan>,
}

/// A span that may be another rank's. As JSON a list, because there are many.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "SpanRow", into = "SpanRow")]
pub(super) struct TracedSpan {
    pub(super) lane: Lane,
    /// Its place in `RankTrace::names`.
    pub(super) name: usize,
    pub(super) index: Option<usize>,
    pub(super) step: u64,
    pub(super) begin_ns: i64,
    pub(super) end_ns: i64,
}

/// Lane, name, index, step, begin and end.
pub(super) type SpanRow = (usize, usize, Option<usize>, u64, [i64; 2]);

impl From<SpanRow> for TracedSpan {
    fn from((lane, name, index, step, [begin_ns, end_ns]): SpanRow) -> TracedSpan {
        TracedSpan {
            lane: Lane::ALL[lane.min(Lane::ALL.len() - 1)],
            name,
            index,
            step,
            begin_ns,
            end_ns,
        }
    }
}

impl From<TracedSpan> for SpanRow {
    fn from(span: TracedSpan) -> SpanRow {
        let TracedSpan { index, step, .. } = span;
        let (lane, times) = (span.lane as usize, [span.begin_ns, span.end_ns]);
        (lane, span.name, index, step, times)
    }
}

impl RankTrace {
    pub(super) fn new(recorded: &Recorded, readings: Readings, host: &str) -> RankTrace {
        let mut names: Vec<&'static str> = Vec::new();
        let span = |span: &Span| {
            let known = names.iter().position(|name| *name == span.label.name);
            let name = known.unwrap_or_else(|| {
                names.push(span.label.name);
                names.len() - 1
            });
            TracedSpan {
                lane: span.label.lane,
                name,
                index: span.label.index,
                step: span.step,
                begin_ns: span.begin.as_nanos() as i64,
                end_ns: span.end.max(span.begin).as_nanos() as i64,
            }
        };
        let spans = recorded.spans.iter().map(span).collect();
        RankTrace {
            host: host.to_string(),
            readings,
            missed: recorded.missed,
            bound_ns: recorded.device_bound.as_nanos() as i64,
            names: names.into_iter().map(String::from).collect(),
            spans,
        }
    }

    pub(super) fn name(&self, span: &TracedSpan) -> &str {
        self.names.get(span.name).map_or("", String::as_str)
    }
}
