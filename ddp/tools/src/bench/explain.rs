//! `ddp-train bench mlp --explain`: the nodes of a captured step, one line of JSON each, with the
//! bytes that each moves and the time that this takes at the memory's bandwidth. The times are a
//! model, not a measurement: operands are counted once, and caches, arithmetic and the start of a
//! node are left out. So it also works on simulated GPUs. Of a kernel it prints the blocks, and the
//! longest chain of dependent loads, which each kernel declares; a kernel that moves much with
//! fewer blocks than the GPU has multiprocessors is marked.

use ddp_kernels::graph::{Graph, GraphNode, NodeKind};
use ddp_kernels::{Device, matmuls};
use serde_json::{Value, json};

use super::measure::{line, round};
use crate::devices::is_simulated;
use crate::error::Result;
use crate::output::Say;

fn moved(node: &GraphNode) -> usize {
    node.read_bytes + node.written_bytes
}

/// Whether a kernel moves so much that more multiprocessors should take part.
fn has_few_blocks(node: &GraphNode, multiprocessors: usize) -> bool {
    let is_kernel = node.kind == NodeKind::Kernel;
    is_kernel && moved(node) > MANY_BYTES && node.work.blocks < multiprocessors
}

/// A kernel that moves more bytes should have a block for each multiprocessor.
const MANY_BYTES: usize = 1_000_000;

/// Prints the nodes of `graph`, which runs on `device`, and last their sums.
pub(super) fn print(graph: &Graph, device: Device, say: Say<'_>) -> Result<()> {
    let model_us = |bytes: usize| round(bytes as f64 / graph.bandwidth() * 1e6, 3);
    let multiprocessors = graph.multiprocessors();
    let is_narrow = |node: &GraphNode| has_few_blocks(node, multiprocessors);
    for (index, node) in graph.nodes().iter().enumerate() {
        let mut row = row(index, node);
        row["read_bytes"] = json!(node.read_bytes);
        row["written_bytes"] = json!(node.written_bytes);
        row["model_us"] = json!(model_us(moved(node)));
        if node.kind == NodeKind::Kernel {
            row["blocks"] = json!(node.work.blocks);
            row["threads"] = json!(node.work.threads);
            row["dependent_loads"] = json!(node.work.dependent_loads);
        }
        if is_narrow(node) {
            row["few_blocks"] = json!(format!("{multiprocessors} multiprocessors"));
        }
        say(&row)?;
    }
    let (nodes, driver) = (graph.nodes(), graph.counts());
    let is_matmul = |node: &&GraphNode| node.kind == NodeKind::Matmul;
    let (count, all) = (nodes.iter().filter(is_matmul).count(), nodes.len());
    let bytes: usize = nodes.iter().map(moved).sum();
    let width = if is_simulated(device) {
        "a simulated GPU's bandwidth"
    } else {
        "the bandwidth of this GPU's clock and width"
    };
    let fields = json!({
        "nodes": all,
        "matmuls": count,
        "besides_matmuls": all - count,
        "multiprocessors": multiprocessors,
        "gelu": matmuls::gelu(device)?,
        "few_blocks": nodes.iter().filter(|node| is_narrow(node)).count(),
        "driver_counts": {
            "kernels": driver.kernels, "copies": driver.copies, "fills": driver.fills,
            "others": driver.others,
        },
        "moved_bytes": bytes,
        "model_us": model_us(bytes),
        "model": format!("operands once at {width}, {:.0} GB/s; not measured", graph.bandwidth() / 1e9),
    });
    say(&line(device, &[fields]))
}

/// What a node is: the begin of its line.
pub(super) fn row(index: usize, node: &GraphNode) -> Value {
    let kind = node.kind.name();
    json!({ "node": index + 1, "kind": kind, "op": node.op, "name": node.name })
}

#[cfg(test)]
mod tests {
    use ddp_kernels::graph::NodeWork;

    use super::*;

    #[test]
    fn a_kernel_that_moves_megabytes_needs_a_block_for_each_multiprocessor() {
        let has = |kind, bytes: usize, blocks| {
            let work = NodeWork {
                blocks,
                ..NodeWork::default()
            };
            let node = GraphNode {
                kind,
                name: "sums".into(),
                op: "op",
                read_bytes: bytes - 4,
                written_bytes: 4,
                work,
            };
            has_few_blocks(&node, 132)
        };
        assert!(has(NodeKind::Kernel, 1_000_001, 3));
        assert!(has(NodeKind::Kernel, 1_000_001, 131));
        assert!(!has(NodeKind::Kernel, 1_000_001, 132));
        assert!(!has(NodeKind::Kernel, 1_000_000, 3));
        assert!(!has(NodeKind::Matmul, 1_000_001, 0));
    }
}
