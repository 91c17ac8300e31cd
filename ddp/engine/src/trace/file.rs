//! The file: JSON in the Trace Event format, with a process for each rank and a thread for each
//! lane.

use std::cmp::Reverse;
use std::io::{BufWriter, Write};
use std::path::Path;

use ddp_kernels::files as disk;
use ddp_kernels::trace::Lane;
use serde_json::{Value, json};

use super::spans::{RankTrace, TracedSpan};
use crate::error::Result;

/// The most rows of a lane.
const ROWS_MAX: usize = 100;

/// Writes the spans of all ranks, in the order of ranks and on one clock.
pub(super) fn write(path: &Path, ranks: &[RankTrace]) -> Result<()> {
    Ok(disk::replace_file(path, |file| {
        let mut out = BufWriter::new(file);
        let written = write_to(&mut out, ranks).and_then(|()| out.flush());
        written.map_err(disk::failed("write", path))
    })?)
}

fn write_to(out: &mut impl Write, ranks: &[RankTrace]) -> std::io::Result<()> {
    let of_ranks =
        |value: &dyn Fn(&RankTrace) -> Value| -> Vec<Value> { ranks.iter().map(value).collect() };
    let about = json!({
        "program": concat!("ddp-train ", env!("CARGO_PKG_VERSION")),
        "clock": "of rank 0, compared when the trace began",
        "clock_bound_us": of_ranks(&|rank| micros(rank.bound_ns).into()),
        "missed_spans": of_ranks(&|rank| rank.missed.into()),
    });
    write!(
        out,
        "{{\"displayTimeUnit\":\"ms\",\"otherData\":{about},\"traceEvents\":["
    )?;
    let mut separator = "\n";
    for (rank, trace) in ranks.iter().enumerate() {
        for event in events(rank, trace) {
            write!(out, "{separator}{event}")?;
            separator = ",\n";
        }
    }
    writeln!(out, "\n]}}")
}

/// The events of a rank: names of its process and threads, then its spans.
fn events(rank: usize, trace: &RankTrace) -> Vec<Value> {
    let meta = |name: &str, tid: usize, args: Value| json!({"ph": "M", "name": name, "pid": rank, "tid": tid, "ts": 0, "args": args});
    let process = format!("rank {rank} on {}", trace.host);
    let mut events = vec![
        meta("process_name", 0, json!({"name": process})),
        meta("process_sort_index", 0, json!({"sort_index": rank})),
    ];
    for (index, lane) in Lane::ALL.iter().enumerate() {
        let rows = rows(trace.spans.iter().filter(|span| span.lane == *lane));
        for (row, spans) in rows.iter().enumerate() {
            let tid = index * ROWS_MAX + row + 1;
            let name = match row {
                0 => lane.name().to_string(),
                _ => format!("{} {}", lane.name(), row + 1),
            };
            events.push(meta("thread_name", tid, json!({"name": name})));
            events.push(meta("thread_sort_index", tid, json!({"sort_index": tid})));
            events.extend(spans.iter().map(|span| event(rank, tid, trace, span)));
        }
    }
    events
}

fn event(rank: usize, tid: usize, trace: &RankTrace, span: &TracedSpan) -> Value {
    let name = match span.index {
        None => trace.name(span).to_string(),
        Some(index) => format!("{} {index}", trace.name(span)),
    };
    json!({
        "ph": "X", "name": name, "cat": span.lane.name(), "pid": rank, "tid": tid,
        "ts": micros(span.begin_ns), "dur": micros(span.end_ns - span.begin_ns),
        "args": {"step": span.step},
    })
}

/// Microseconds with three decimals.
fn micros(ns: i64) -> f64 {
    ns as f64 / 1e3
}

/// Divides the spans of a lane into rows, in each of which spans nest or do not overlap. There is
/// more than one row where two threads, or two streams, work at the same time.
pub(super) fn rows<'a>(spans: impl Iterator<Item = &'a TracedSpan>) -> Vec<Vec<&'a TracedSpan>> {
    let mut spans: Vec<&TracedSpan> = spans.collect();
    spans.sort_by_key(|span| (span.begin_ns, Reverse(span.end_ns)));
    let mut rows: Vec<Vec<&TracedSpan>> = Vec::new();
    // By row: the ends of the spans that are open.
    let mut open: Vec<Vec<i64>> = Vec::new();
    for span in spans {
        let fits = |open: &mut Vec<i64>| {
            while open.last().is_some_and(|&end| end <= span.begin_ns) {
                open.pop();
            }
            open.last().is_none_or(|&end| span.end_ns <= end)
        };
        let row = open.iter_mut().position(fits).unwrap_or_else(|| {
            rows.push(Vec::new());
            open.push(Vec::new());
            rows.len() - 1
        });
        rows[row].push(span);
        open[row].push(span.end_ns);
    }
    rows
}
