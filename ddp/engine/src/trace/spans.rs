//! The spans of a rank, as they travel to rank 0, and one clock for those of all ranks.
//!
//! In each of a few rounds, every rank reads its clock, waits for all ranks at a barrier, and reads
//! it again. The moment at which the last rank arrives lies between the two readings of every rank.
//! So each round bounds how far two clocks are apart, and the narrowest bounds count. Clocks are
//! compared once, when the trace begins.

use std::time::Instant;

use ddp_comm::World;
use ddp_kernels::trace::{Lane, Recorded, Span};
use serde::{Deserialize, Serialize};

use crate::error::Result;

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

const ROUNDS: usize = 10;

/// Reads the clock of this rank, together with all others.
pub(super) fn read_clock(began: Instant, world: &World) -> Result<Readings> {
    let now = || began.elapsed().as_nanos() as i64;
    let round = |_| {
        let before = now();
        world.barrier()?;
        Ok([before, now()])
    };
    (0..ROUNDS).map(round).collect()
}

/// What to add to the times of a rank so that they are those of `first`, and how far that may be
/// off.
fn offset(first: &Readings, rank: &Readings) -> (i64, i64) {
    let rounds = || first.iter().zip(rank);
    let least = rounds().map(|(first, rank)| first[0] - rank[1]).max();
    let most = rounds().map(|(first, rank)| first[1] - rank[0]).min();
    let (least, most) = (least.unwrap_or(0), most.unwrap_or(0));
    (least.midpoint(most), (most - least).abs() / 2 + 1)
}

/// The same spans on the clock of rank 0. None begins before time zero.
pub(super) fn align(mut ranks: Vec<RankTrace>) -> Vec<RankTrace> {
    let Some(first) = ranks.first().map(|rank| rank.readings.clone()) else {
        return ranks;
    };
    for (index, rank) in ranks.iter_mut().enumerate() {
        let (add_ns, bound_ns) = match index {
            0 => (0, 0),
            _ => offset(&first, &rank.readings),
        };
        rank.bound_ns += bound_ns;
        for span in &mut rank.spans {
            span.begin_ns += add_ns;
            span.end_ns += add_ns;
        }
    }
    let spans = ranks.iter().flat_map(|rank| &rank.spans);
    let begin_ns = spans.map(|span| span.begin_ns).min().unwrap_or(0).min(0);
    for span in ranks.iter_mut().flat_map(|rank| &mut rank.spans) {
        span.begin_ns -= begin_ns;
        span.end_ns -= begin_ns;
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_is_within_its_bound_of_the_truth() {
        // The clock of the rank shows 5000 less. The last to arrive came at 100, 220 and 300.
        let first = vec![[90, 130], [220, 225], [250, 301]];
        let rank = vec![[-4900, -4890], [-4800, -4770], [-4700, -4690]];
        let (add, bound) = offset(&first, &rank);
        assert!((5000 - add).abs() <= bound, "{add} ± {bound}");
        assert!(bound <= 15, "the narrowest bounds count: {bound}");
        assert_eq!(offset(&first, &first).0, 0);
    }
}
