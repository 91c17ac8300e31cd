//! What the handles of graphs, executables and nodes stand for.

use std::sync::Arc;

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUgraphNode};

use crate::error::CUresult;
use crate::handle::{GraphId, HandleKind, decode, encode};
use crate::machine::Machine;
use crate::report;
use crate::stream::Operation;

/// The graph of a handle; a destroyed one is a finding.
pub(crate) fn resolve_graph(machine: &mut Machine, handle: CUgraph) -> Result<GraphId, CUresult> {
    let graph =
        decode(HandleKind::Graph, handle).filter(|graph| *graph < machine.graphs.graphs.len());
    // Documented as an invalid value and not as an invalid handle.
    let graph = graph.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let destroyed = machine.graphs.graphs[graph].destroyed.clone();
    refuse_destroyed(machine, &format!("graph {graph}"), destroyed)?;
    Ok(graph)
}

/// The executable of a handle; a destroyed one is a finding.
pub(crate) fn resolve_executable(
    machine: &mut Machine,
    handle: CUgraphExec,
) -> Result<usize, CUresult> {
    let index = decode(HandleKind::Executable, handle)
        .filter(|index| *index < machine.graphs.executables.len());
    let index = index.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let destroyed = machine.graphs.executables[index].destroyed.clone();
    refuse_destroyed(machine, &format!("executable graph {index}"), destroyed)?;
    Ok(index)
}

fn refuse_destroyed(
    machine: &mut Machine,
    what: &str,
    destroyed: Option<Arc<Operation>>,
) -> Result<(), CUresult> {
    let Some(destroyer) = destroyed else {
        return Ok(());
    };
    let message = format!(
        "{what} is used after it was destroyed\n  destroyed in {}",
        destroyer.stack
    );
    report::finding(machine, report::FindingKind::Handle, message);
    Err(CUresult::CUDA_ERROR_INVALID_VALUE)
}

/// How many nodes of a graph handles can number.
const NODES_MAX: usize = 1 << 20;

pub(crate) fn node_handle(graph: GraphId, node: usize) -> CUgraphNode {
    assert!(node < NODES_MAX, "a graph of a million nodes");
    encode(HandleKind::Node, graph * NODES_MAX + node)
}

/// The graph and the node of a handle.
pub(crate) fn resolve_node(
    machine: &mut Machine,
    handle: CUgraphNode,
) -> Result<(GraphId, usize), CUresult> {
    let index = decode(HandleKind::Node, handle).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    let graph = resolve_graph(machine, encode(HandleKind::Graph, index / NODES_MAX))?;
    let node = index % NODES_MAX;
    if node < machine.graphs.graphs[graph].nodes.len() {
        Ok((graph, node))
    } else {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}
