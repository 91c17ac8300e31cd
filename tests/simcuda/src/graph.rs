//! Graphs: captured calls, their executable form, and its launches.
//!
//! A graph is a list of nodes with dependencies on earlier nodes. Instantiating splits the nodes
//! into chains: each node continues the chain of a dependency if it can. A chain is an actor of the
//! race detector, for all launches of the executable, because two launches of one executable never
//! overlap. Two nodes that no path of dependencies orders are in two chains, so the detector sees
//! them as concurrent.

pub mod calls;
pub(crate) mod capture;
pub mod capture_calls;
pub(crate) mod launch;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use cudarc::driver::sys::{CUgraph, CUgraphExec, CUgraphNode, CUresult};

use self::capture::{Captured, Captures};
use crate::event::Record;
use crate::machine::Machine;
use crate::race::Actor;
use crate::report;
use crate::stream::{HandleKind, Operation, decode, encode};

/// Graphs are numbered in order of creation, executables separately; numbers are not reused.
pub(crate) type GraphId = usize;

/// One node.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) what: Captured,
    pub(crate) device: usize,
    /// The call that was captured.
    pub(crate) operation: Arc<Operation>,
    /// Earlier nodes of the graph, in order and each once.
    pub(crate) dependencies: Vec<usize>,
}

/// A graph, or the captured part of one.
#[derive(Default)]
pub(crate) struct Graph {
    pub(crate) nodes: Vec<Node>,
    pub(crate) is_being_captured: bool,
    pub(crate) destroyed: Option<Arc<Operation>>,
}

/// The nodes of an executable and their dependencies.
pub(crate) struct Plan {
    pub(crate) nodes: Vec<Node>,
    /// For each node, the later nodes that depend on it.
    pub(crate) dependents: Vec<Vec<usize>>,
    /// For each node, its chain.
    pub(crate) chain_of: Vec<usize>,
}

/// A graph that can be launched.
pub(crate) struct Executable {
    /// Pending launches keep the plan they were launched with.
    pub(crate) plan: Arc<Plan>,
    /// The actor of each chain.
    pub(crate) actors: Vec<Actor>,
    /// The end of the latest launch: the next one starts after it.
    pub(crate) latest: Option<Arc<Record>>,
    /// How many launches have not ended.
    pub(crate) pending: usize,
    pub(crate) destroyed: Option<Arc<Operation>>,
}

/// All graphs, executables and captures of the machine.
#[derive(Default)]
pub struct Graphs {
    pub(crate) graphs: Vec<Graph>,
    pub(crate) executables: Vec<Executable>,
    pub(crate) captures: Captures,
}

/// Splits nodes into chains and returns the chain of each node. A node continues the chain of a
/// dependency that no other node continues, or starts a new one.
pub(crate) fn chains<'a>(dependencies: impl Iterator<Item = &'a [usize]>) -> Vec<usize> {
    let mut chain_of = Vec::new();
    // The last node of each chain.
    let mut tails: Vec<usize> = Vec::new();
    for (node, dependencies) in dependencies.enumerate() {
        // The latest first: the stream that captured the node stays in its chain, rather than in
        // one that it waited for.
        let continued = dependencies
            .iter()
            .rev()
            .find(|dependency| tails[chain_of[**dependency]] == **dependency);
        match continued {
            Some(&dependency) => {
                let chain: usize = chain_of[dependency];
                tails[chain] = node;
                chain_of.push(chain);
            }
            None => {
                chain_of.push(tails.len());
                tails.push(node);
            }
        }
    }
    chain_of
}

impl Plan {
    pub(crate) fn new(nodes: Vec<Node>) -> Self {
        let mut dependents = vec![Vec::new(); nodes.len()];
        for (index, node) in nodes.iter().enumerate() {
            for &dependency in &node.dependencies {
                assert!(dependency < index, "captured nodes depend on earlier ones");
                dependents[dependency].push(index);
            }
        }
        let chain_of = chains(nodes.iter().map(|node| node.dependencies.as_slice()));
        Self {
            nodes,
            dependents,
            chain_of,
        }
    }

    fn chains(&self) -> usize {
        self.chain_of.iter().max().map_or(0, |last| last + 1)
    }
}

/// Makes a graph executable.
pub(crate) fn instantiate(machine: &mut Machine, graph: GraphId) -> CUgraphExec {
    let plan = Plan::new(machine.graphs.graphs[graph].nodes.clone());
    let actors = (0..plan.chains()).map(|_| machine.race.actor()).collect();
    let executable = Executable {
        plan: Arc::new(plan),
        actors,
        latest: None,
        pending: 0,
        destroyed: None,
    };
    machine.graphs.executables.push(executable);
    encode(HandleKind::Executable, machine.graphs.executables.len() - 1)
}

/// Releases the chains of an executable that is destroyed and has no launch left.
pub(crate) fn retire_if_over(machine: &mut Machine, executable: usize) {
    let Executable {
        actors,
        pending,
        destroyed,
        ..
    } = &mut machine.graphs.executables[executable];
    if destroyed.is_some() && *pending == 0 {
        for actor in std::mem::take(actors) {
            machine.race.retire(actor);
        }
        // The nodes' work owns memory.
        machine.graphs.executables[executable].plan = Arc::new(Plan::new(Vec::new()));
    }
}

/// Why the nodes of `graph` cannot replace those of `executable`: the result of cuGraphExecUpdate
/// and the node.
pub(crate) fn difference(old: &[Node], new: &[Node]) -> Option<(Difference, Option<usize>)> {
    if old.len() != new.len() {
        return Some((Difference::Topology, None));
    }
    for (index, (old, new)) in old.iter().zip(new).enumerate() {
        if std::mem::discriminant(&old.what) != std::mem::discriminant(&new.what)
            || node_type(old) as u32 != node_type(new) as u32
        {
            return Some((Difference::NodeType, Some(index)));
        }
        if old.dependencies != new.dependencies {
            return Some((Difference::Topology, Some(index)));
        }
        if old.device != new.device {
            return Some((Difference::Parameters, Some(index)));
        }
    }
    None
}

/// The difference that forbids the update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Difference {
    Topology,
    NodeType,
    Parameters,
}

/// The node's kind as a number of cuda.h. Library calls are kernels.
pub(crate) fn node_type(node: &Node) -> cudarc::driver::sys::CUgraphNodeType {
    use cudarc::driver::sys::CUgraphNodeType as Type;
    match &node.what {
        Captured::Host(_) => Type::CU_GRAPH_NODE_TYPE_HOST,
        Captured::Record(_) => Type::CU_GRAPH_NODE_TYPE_EVENT_RECORD,
        Captured::Wait(_) => Type::CU_GRAPH_NODE_TYPE_WAIT_EVENT,
        Captured::Work(_) if node.operation.describe.starts_with("cuMemcpy") => {
            Type::CU_GRAPH_NODE_TYPE_MEMCPY
        }
        Captured::Work(_) if node.operation.describe.starts_with("cuMemset") => {
            Type::CU_GRAPH_NODE_TYPE_MEMSET
        }
        Captured::Work(_) | Captured::Nccl(_) => Type::CU_GRAPH_NODE_TYPE_KERNEL,
    }
}

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
    report::finding(machine, report::Kind::Handle, message);
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
