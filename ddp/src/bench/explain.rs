//! `ddp-train bench mlp --explain`: the nodes of a captured step, one line of JSON each, with the
//! bytes that each moves and the time that the memory's bandwidth allows for them. The times are a
//! model, not a measurement: operands are counted once, and neither caches, nor arithmetic, nor the
//! start of a node takes part. So it also works on simulated GPUs.

use ddp_kernels::Device;
use ddp_kernels::graph::{Graph, GraphNode, NodeKind};
use serde_json::json;

use super::measure::{Say, round};
use crate::devices::{described, is_simulated};
use crate::error::Result;

/// Prints the nodes of `graph`, which runs on `device`, and last their sums.
pub(super) fn print(graph: &Graph, device: Device, say: Say<'_>) -> Result<()> {
    let moved = |node: &GraphNode| node.read_bytes + node.written_bytes;
    let model_us = |bytes: usize| round(bytes as f64 / graph.bandwidth() * 1e6, 3);
    for (index, node) in graph.nodes().iter().enumerate() {
        say(&json!({
            "node": index + 1,
            "kind": name_of(node.kind),
            "op": node.op,
            "name": node.name,
            "read_bytes": node.read_bytes,
            "written_bytes": node.written_bytes,
            "model_us": model_us(moved(node)),
        }))?;
    }
    let of_kind = |kind| {
        graph
            .nodes()
            .iter()
            .filter(|node| node.kind == kind)
            .count()
    };
    let (products, all) = (of_kind(NodeKind::Product), graph.nodes().len());
    let bytes: usize = graph.nodes().iter().map(moved).sum();
    let driver = graph.counts();
    let width = if is_simulated(device) {
        "a simulated GPU's bandwidth"
    } else {
        "the bandwidth of this GPU's clock and width"
    };
    say(&json!({
        "system": "ddp-train",
        "version": env!("CARGO_PKG_VERSION"),
        "device": described(device),
        "nodes": all,
        "products": products,
        "besides_products": all - products,
        "driver_counts": {
            "kernels": driver.kernels, "copies": driver.copies, "fills": driver.fills,
            "others": driver.others,
        },
        "moved_bytes": bytes,
        "model_us": model_us(bytes),
        "model": format!("operands once at {width}, {:.0} GB/s; not measured", graph.bandwidth() / 1e9),
    }))
}

fn name_of(kind: NodeKind) -> &'static str {
    match kind {
        NodeKind::Kernel => "kernel",
        NodeKind::Product => "product",
        NodeKind::Copy => "copy",
        NodeKind::Fill => "fill",
        NodeKind::Foreign => "library",
    }
}
