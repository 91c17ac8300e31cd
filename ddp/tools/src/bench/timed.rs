//! `ddp-train bench gpt --explain --timed`: what each node of an eager step took on the GPU, the
//! longest first, beside the rates of a large copy and a large matmul, and the captured step.

use ddp_kernels::graph::GraphNode;
use ddp_kernels::stream::Stream;
use ddp_kernels::{DType, Device, Random, Tensor, ops};
use serde_json::{Value, json};

use super::explain;
use super::measure::{line, round, round_or_null};
use crate::error::Result;
use crate::output::Say;
use crate::params::Numerics;

/// Sides of the large matmul, and bytes of the large copy: neither fits into a cache.
const SIDE: usize = 8192;
const COPIED: usize = 1 << 30;
/// Repetitions, of which the fastest counts.
const ROUNDS: usize = 5;

/// A node of the eager step, and the milliseconds that it took; None for another library's.
pub(super) type TimedNode = (GraphNode, Option<f32>);

/// The rates that the device reaches when nothing else limits it.
pub(super) struct Rates {
    /// Bytes a second that a copy reads and writes.
    copy: f64,
    /// Multiplications and additions a second of a matmul.
    matmul: f64,
}

impl Rates {
    pub(super) fn measure(device: Device, format: Numerics) -> Result<Rates> {
        let from = Tensor::zeros(&[COPIED], DType::U8, device)?;
        let to = from.new_zeros(&[COPIED])?;
        let copy_s = fastest_s(device, || Ok(to.copy_from(&from)?))?;
        drop((from, to));
        let factor = Tensor::randn(&[SIDE, SIDE], format.layers, device, &mut Random::new(0))?;
        let out = factor.new_zeros(&[SIDE, SIDE])?;
        let matmul = || Ok(ops::addmm_into(&out, &out, &factor, &factor, 1.0, 0.0)?);
        let matmul_s = ops::with_f32_math(format.f32_math, || fastest_s(device, matmul))?;
        Ok(Rates {
            copy: 2.0 * COPIED as f64 / copy_s,
            matmul: 2.0 * (SIDE as f64).powi(3) / matmul_s,
        })
    }
}

fn fastest_s(device: Device, mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    let (stream, mut least_s) = (Stream::current(device)?, f64::INFINITY);
    for _ in 0..ROUNDS {
        let start = stream.record_timed()?;
        run()?;
        least_s = least_s.min(stream.record_timed()?.since(&start)?.as_secs_f64());
    }
    Ok(least_s)
}

/// Prints the nodes, the longest first, and last their sum beside the captured step.
pub(super) fn print(
    nodes: &[TimedNode],
    rates: &Rates,
    step_s: f64,
    is_captured: bool,
    device: Device,
    say: Say<'_>,
) -> Result<()> {
    rows(nodes, rates).iter().try_for_each(|row| say(row))?;
    let sum_ms: f32 = nodes.iter().filter_map(|(_, ms)| *ms).sum();
    let fields = json!({
        "nodes": nodes.len(),
        "nodes_ms": round(sum_ms.into(), 4),
        "step_ms": round(step_s * 1e3, 4),
        "graph": is_captured,
        "copy_gb_per_s": round(rates.copy / 1e9, 1),
        "matmul_tflop_per_s": round(rates.matmul / 1e12, 1),
        "timed": "nodes by a pair of events each, in one eager step; the step by the host, many in turn",
    });
    say(&line(device, &[fields]))
}

/// A row for each node, the longest first; those of unknown time last.
fn rows(nodes: &[TimedNode], rates: &Rates) -> Vec<Value> {
    let mut order: Vec<usize> = (0..nodes.len()).collect();
    let time = |index: &usize| nodes[*index].1.unwrap_or(-1.0);
    order.sort_by(|a, b| time(b).total_cmp(&time(a)));
    let row = |index: usize| {
        let (node, ms) = &nodes[index];
        let seconds = ms.map(|ms| f64::from(ms) / 1e3).filter(|&s| s > 0.0);
        let bytes = (node.read_bytes + node.written_bytes) as f64;
        let bytes_per_s = seconds.map(|seconds| bytes / seconds);
        let flop = Some(node.work.flop).filter(|&flop| flop > 0.0);
        let flop_per_s = seconds.zip(flop).map(|(seconds, flop)| flop / seconds);
        let mut row = explain::row(index, node);
        for (name, value, digits) in [
            ("ms", ms.map(f64::from), 4),
            ("gb_per_s", bytes_per_s.map(|rate| rate / 1e9), 1),
            ("of_copy", bytes_per_s.map(|rate| rate / rates.copy), 3),
            ("tflop_per_s", flop_per_s.map(|rate| rate / 1e12), 2),
            ("of_matmul", flop_per_s.map(|rate| rate / rates.matmul), 3),
        ] {
            row[name] = round_or_null(value, digits);
        }
        row
    };
    order.into_iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use ddp_kernels::graph::{NodeKind, NodeWork};

    use super::*;

    fn node(name: &str, bytes: usize, flop: f64) -> GraphNode {
        GraphNode {
            kind: NodeKind::Kernel,
            name: name.into(),
            op: "op",
            read_bytes: bytes / 2,
            written_bytes: bytes / 2,
            work: NodeWork {
                flop,
                ..NodeWork::default()
            },
        }
    }

    #[test]
    fn the_longest_node_is_first_and_shares_are_of_the_measured_rates() {
        let rates = Rates {
            copy: 4e12,
            matmul: 800e12,
        };
        let nodes = [
            (node("short", 2_000_000, 0.0), Some(0.001)),
            (node("unknown", 2_000_000, 0.0), None),
            (node("matmul", 1_000_000, 4e11), Some(1.0)),
            (node("at once", 1_000_000, 1.0), Some(0.0)),
        ];
        let rows = rows(&nodes, &rates);
        let names: Vec<_> = rows
            .iter()
            .map(|row| row["name"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["matmul", "short", "at once", "unknown"]);
        assert_eq!(rows[0]["node"], 3);
        assert_eq!(rows[0]["tflop_per_s"], 400.0);
        assert_eq!(rows[0]["of_matmul"], 0.5);
        assert_eq!(rows[0]["gb_per_s"], 1.0);
        assert_eq!(rows[1]["gb_per_s"], 2000.0);
        assert_eq!(rows[1]["of_copy"], 0.5);
        assert_eq!(rows[1]["of_matmul"], Value::Null);
        // No time, no rate.
        assert_eq!(rows[2]["gb_per_s"], Value::Null);
        assert_eq!(rows[3]["ms"], Value::Null);
    }
}
