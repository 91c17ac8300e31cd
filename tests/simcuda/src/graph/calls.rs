//! The entry points of graphs and their executables.

use std::mem::MaybeUninit;
use std::sync::Arc;

use cudarc::driver::sys::{
    CUDA_GRAPH_INSTANTIATE_PARAMS, CUgraph, CUgraphExec, CUgraphExecUpdateResult as UpdateResult,
    CUgraphExecUpdateResultInfo, CUgraphInstantiateResult as InstantiateResult, CUgraphNode,
    CUgraphNodeType, CUstream,
};

use super::handles::{node_handle, resolve_executable, resolve_graph, resolve_node};
use super::{Captured, Executable, Graph, Node, Plan, capture, replay};
use crate::error::CUresult;
use crate::handle::{GraphId, HandleKind, encode};
use crate::machine::{Machine, Out, call, current_device, put};
use crate::stream;

/// AUTO_FREE_ON_LAUNCH, UPLOAD, DEVICE_LAUNCH and USE_NODE_PRIORITY; of these the third is not
/// simulated.
const FLAGS_KNOWN: u64 = 1 | 2 | 4 | 8;
const FLAG_DEVICE_LAUNCH: u64 = 4;
const FLAG_NODE_PRIORITY: u64 = 8;

fn checked_instantiate(
    machine: &mut Machine,
    graph: CUgraph,
    flags: u64,
) -> Result<CUgraphExec, CUresult> {
    let graph = resolve_graph(machine, graph)?;
    if flags & !FLAGS_KNOWN != 0 || machine.graphs.graphs[graph].is_being_captured {
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    if flags & FLAG_DEVICE_LAUNCH != 0 {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    let keeps_priorities = flags & FLAG_NODE_PRIORITY != 0;
    Ok(instantiate(machine, graph, keeps_priorities))
}

/// Makes a graph executable.
fn instantiate(machine: &mut Machine, graph: GraphId, keeps_priorities: bool) -> CUgraphExec {
    let plan = Plan::new(machine.graphs.graphs[graph].nodes.clone());
    let actors = (0..plan.chains()).map(|_| machine.race.actor()).collect();
    let executable = Executable {
        plan: Arc::new(plan),
        keeps_priorities,
        actors,
        latest: None,
        pending: 0,
        destroyed: None,
    };
    machine.graphs.executables.push(executable);
    encode(HandleKind::Executable, machine.graphs.executables.len() - 1)
}

/// Why the nodes of `graph` cannot replace those of `executable`: the result of cuGraphExecUpdate
/// and the node.
fn difference(old: &[Node], new: &[Node]) -> Option<(Difference, Option<usize>)> {
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
enum Difference {
    Topology,
    NodeType,
    Parameters,
}

/// The node's kind as a number of cuda.h. Library calls are kernels.
fn node_type(node: &Node) -> CUgraphNodeType {
    use CUgraphNodeType as Type;
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

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphInstantiateWithFlags(
    executable: Out<'_, CUgraphExec>,
    graph: CUgraph,
    flags: u64,
) -> CUresult {
    call("cuGraphInstantiateWithFlags", |machine| {
        let made = checked_instantiate(machine, graph, flags)?;
        put(executable, made)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphInstantiateWithParams(
    executable: Out<'_, CUgraphExec>,
    graph: CUgraph,
    parameters: Option<&mut CUDA_GRAPH_INSTANTIATE_PARAMS>,
) -> CUresult {
    call("cuGraphInstantiateWithParams", |machine| {
        let parameters = parameters.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        let made = checked_instantiate(machine, graph, parameters.flags);
        parameters.hErrNode_out = std::ptr::null_mut();
        parameters.result_out = match made {
            Ok(_) => InstantiateResult::CUDA_GRAPH_INSTANTIATE_SUCCESS,
            Err(_) => InstantiateResult::CUDA_GRAPH_INSTANTIATE_ERROR,
        };
        put(executable, made?)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(executable: CUgraphExec) -> CUresult {
    call("cuGraphExecDestroy", |machine| {
        let executable = resolve_executable(machine, executable)?;
        // Pending launches still run.
        let operation = stream::new_operation(machine, "cuGraphExecDestroy", None, 0, None);
        machine.graphs.executables[executable].destroyed = Some(operation);
        let Machine { graphs, race, .. } = machine;
        graphs.retire_if_over(executable, race);
        Ok(())
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: CUgraph) -> CUresult {
    call("cuGraphDestroy", |machine| {
        let graph = resolve_graph(machine, graph)?;
        if machine.graphs.graphs[graph].is_being_captured {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let operation = stream::new_operation(machine, "cuGraphDestroy", None, 0, None);
        let graph = &mut machine.graphs.graphs[graph];
        graph.destroyed = Some(operation);
        graph.nodes.clear();
        Ok(())
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(executable: CUgraphExec, stream: CUstream) -> CUresult {
    call("cuGraphLaunch", |machine| {
        let executable = resolve_executable(machine, executable)?;
        let stream = stream::resolve(machine, stream)?;
        stream::check_usable(machine, stream)?;
        if stream::is_capturing(machine, stream) {
            // CUDA makes a child graph of it. The product does not use that, so it is refused
            // rather than modelled differently.
            return Err(capture::unsupported(
                machine,
                stream,
                "cuGraphLaunch (child graphs are not simulated)",
            ));
        }
        replay::launch(machine, executable, stream)
    })
}

/// See the driver's documentation. The graph is already where it would be uploaded to.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphUpload(executable: CUgraphExec, stream: CUstream) -> CUresult {
    call("cuGraphUpload", |machine| {
        resolve_executable(machine, executable)?;
        let stream = stream::resolve(machine, stream)?;
        stream::check_usable(machine, stream)
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecUpdate_v2(
    executable: CUgraphExec,
    graph: CUgraph,
    result: Out<'_, CUgraphExecUpdateResultInfo>,
) -> CUresult {
    call("cuGraphExecUpdate_v2", |machine| {
        let executable = resolve_executable(machine, executable)?;
        let index = resolve_graph(machine, graph)?;
        let result = result.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
        if machine.graphs.graphs[index].is_being_captured {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        let new = &machine.graphs.graphs[index].nodes;
        let differs = difference(&machine.graphs.executables[executable].plan.nodes, new);
        let (outcome, node) = match differs {
            None => (UpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS, None),
            Some((Difference::Topology, node)) => (
                UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED,
                node,
            ),
            Some((Difference::NodeType, node)) => (
                UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_NODE_TYPE_CHANGED,
                node,
            ),
            Some((Difference::Parameters, node)) => (
                UpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_PARAMETERS_CHANGED,
                node,
            ),
        };
        result.write(CUgraphExecUpdateResultInfo {
            result: outcome,
            errorNode: node.map_or(std::ptr::null_mut(), |node| node_handle(index, node)),
            errorFromNode: std::ptr::null_mut(),
        });
        if differs.is_some() {
            return Err(CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
        }
        // The dependencies are unchanged, and so are the chains and their actors.
        machine.graphs.executables[executable].plan = Arc::new(Plan::new(new.clone()));
        Ok(())
    })
}

/// Returns a list in CUDA's way: without room only its length, otherwise as many as fit, then
/// nulls.
///
/// # Safety
/// `to` is null or has room for `*count` handles.
unsafe fn tell<T>(
    to: *mut *mut T,
    count: Option<&mut usize>,
    all: &[*mut T],
) -> Result<(), CUresult> {
    let count = count.ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
    if to.is_null() {
        *count = all.len();
        return Ok(());
    }
    if *count == 0 {
        // As a driver does for the nodes (580, on an H200); for root nodes too, we suppose.
        return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
    }
    // SAFETY: the caller vouches for room for `*count` handles; they may be uninitialised, and are
    // only written.
    let room: &mut [MaybeUninit<*mut T>] =
        unsafe { std::slice::from_raw_parts_mut(to.cast(), *count) };
    for (index, place) in room.iter_mut().enumerate() {
        place.write(all.get(index).copied().unwrap_or(std::ptr::null_mut()));
    }
    *count = all.len().min(*count);
    Ok(())
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphGetNodes(
    graph: CUgraph,
    nodes: *mut CUgraphNode,
    count: Option<&mut usize>,
) -> CUresult {
    call("cuGraphGetNodes", |machine| {
        let graph = resolve_graph(machine, graph)?;
        let all: Vec<_> = (0..machine.graphs.graphs[graph].nodes.len())
            .map(|node| node_handle(graph, node))
            .collect();
        // SAFETY: the driver's documentation requires room for `count` nodes.
        unsafe { tell(nodes, count, &all) }
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphGetRootNodes(
    graph: CUgraph,
    nodes: *mut CUgraphNode,
    count: Option<&mut usize>,
) -> CUresult {
    call("cuGraphGetRootNodes", |machine| {
        let graph = resolve_graph(machine, graph)?;
        let all = machine.graphs.graphs[graph].nodes.iter().enumerate();
        let roots = all.filter(|(_, node)| node.dependencies.is_empty());
        let roots: Vec<_> = roots.map(|(node, _)| node_handle(graph, node)).collect();
        // SAFETY: the driver's documentation requires room for `count` nodes.
        unsafe { tell(nodes, count, &roots) }
    })
}

/// See the driver's documentation.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphNodeGetType(
    node: CUgraphNode,
    kind: Out<'_, CUgraphNodeType>,
) -> CUresult {
    call("cuGraphNodeGetType", |machine| {
        let (graph, node) = resolve_node(machine, node)?;
        put(kind, node_type(&machine.graphs.graphs[graph].nodes[node]))
    })
}

/// See the driver's documentation. Captured graphs have no empty nodes to describe.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphCreate(graph: Out<'_, CUgraph>, flags: u32) -> CUresult {
    call("cuGraphCreate", |machine| {
        current_device(machine)?;
        if flags != 0 {
            return Err(CUresult::CUDA_ERROR_INVALID_VALUE);
        }
        machine.graphs.graphs.push(Graph::default());
        put(
            graph,
            encode(HandleKind::Graph, machine.graphs.graphs.len() - 1),
        )
    })
}
