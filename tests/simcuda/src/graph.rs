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
mod handles;
pub(crate) mod launch;
pub(crate) mod replay;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::thread::ThreadId;

use cudarc::driver::sys::CUstreamCaptureMode;

use crate::event::Record;
use crate::handle::{CaptureId, EventId, GraphId, StreamId};
use crate::nccl::Piece;
use crate::race::{Actor, Detector};
use crate::report::Stack;
use crate::stream::Operation;
use crate::work::{HostFunction, Work};

/// What a node does.
#[derive(Clone)]
pub(crate) enum Captured {
    Work(Arc<dyn Work>),
    Nccl(Arc<Piece>),
    Host(HostFunction),
    /// An external record: the launch records the event outside the graph.
    Record(EventId),
    /// An external wait: for the event's record at launch time.
    Wait(EventId),
}

/// A stream's part in a capture.
pub(crate) struct StreamCapture {
    pub(crate) capture: CaptureId,
    /// In order, each once.
    pub(crate) tail: Vec<usize>,
    /// Where cuStreamGetCaptureInfo pointed its caller: node handles, valid until the next call.
    pub(crate) told: Vec<u64>,
}

/// A capture in progress.
pub(crate) struct Capture {
    pub(crate) origin: StreamId,
    pub(crate) mode: CUstreamCaptureMode,
    /// Who began it.
    thread: ThreadId,
    begun: Stack,
    pub(crate) members: BTreeSet<StreamId>,
    pub(crate) graph: GraphId,
    /// What broke it.
    pub(crate) invalid: Option<String>,
}

/// All captures in progress, and the modes of threads.
#[derive(Default)]
pub(crate) struct Captures {
    pub(crate) ongoing: BTreeMap<CaptureId, Capture>,
    begun: CaptureId,
    modes: HashMap<ThreadId, CUstreamCaptureMode>,
}

/// One node.
#[derive(Clone)]
pub(crate) struct Node {
    pub(crate) what: Captured,
    pub(crate) device: usize,
    /// The call that was captured.
    pub(crate) operation: Arc<Operation>,
    /// Earlier nodes of the graph, in order and each once.
    pub(crate) dependencies: Vec<usize>,
    /// The earlier call of its communicator: it runs after that, but no program may rely on it.
    pub(crate) after: Option<usize>,
    /// A library added it to the graph itself: it need not be joined, and its events order only
    /// what runs, nothing that a program may rely on.
    pub(crate) is_internal: bool,
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
    /// For each node, the later nodes that run after it.
    pub(crate) dependents: Vec<Vec<usize>>,
    /// Those that no node depends on.
    pub(crate) leaves: Vec<usize>,
    /// For each node, its chain.
    pub(crate) chain_of: Vec<usize>,
}

/// A graph that can be launched.
pub(crate) struct Executable {
    /// Pending launches keep the plan they were launched with.
    pub(crate) plan: Arc<Plan>,
    /// Whether nodes keep the priorities of the streams that they were captured in.
    pub(crate) keeps_priorities: bool,
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
        let mut is_leaf = vec![true; nodes.len()];
        for (index, node) in nodes.iter().enumerate() {
            for &dependency in &node.dependencies {
                assert!(dependency < index, "captured nodes depend on earlier ones");
                dependents[dependency].push(index);
                is_leaf[dependency] = false;
            }
            if let Some(earlier) = node.after {
                dependents[earlier].push(index);
            }
        }
        let leaves = (0..nodes.len()).filter(|node| is_leaf[*node]).collect();
        let chain_of = chains(nodes.iter().map(|node| node.dependencies.as_slice()));
        Self {
            nodes,
            dependents,
            leaves,
            chain_of,
        }
    }

    fn chains(&self) -> usize {
        self.chain_of.iter().max().map_or(0, |last| last + 1)
    }
}

impl Graphs {
    /// Releases the chains of an executable that is destroyed and has no launch left.
    pub(crate) fn retire_if_over(&mut self, executable: usize, race: &mut Detector) {
        let executable = &mut self.executables[executable];
        if executable.destroyed.is_some() && executable.pending == 0 {
            for actor in std::mem::take(&mut executable.actors) {
                race.retire(actor);
            }
            // The nodes' work owns memory.
            executable.plan = Arc::new(Plan::new(Vec::new()));
        }
    }
}
