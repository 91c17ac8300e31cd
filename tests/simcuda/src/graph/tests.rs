//! Captures and graphs, through the entry points; the split into chains by properties.

mod programs;
mod refusals;

use std::mem::MaybeUninit;

use cudarc::driver::sys::{
    CUgraph, CUgraphExec, CUgraphExecUpdateResult, CUgraphExecUpdateResultInfo, CUstream,
    CUstreamCaptureStatus,
};

use crate::error::CUresult;
use proptest::prelude::*;

use super::calls::*;
use super::capture_calls::*;
use super::chains;
use crate::config::Config;
use crate::event::calls::*;
use crate::faults::Plan;
use crate::report::FindingKind;
use crate::stream::calls::*;
use crate::stream::tests::{Bench, SUCCESS, TOUCH_NS, Touch, bench, config, got};

const THREAD_LOCAL: u32 = 1;

fn end(stream: CUstream) -> Result<CUgraph, CUresult> {
    let mut graph = MaybeUninit::uninit();
    let code = cuStreamEndCapture(stream, Some(&mut graph));
    // SAFETY: the entry point writes a graph or null whenever it is given a place for it and the
    // stream exists.
    let graph = unsafe { graph.assume_init() };
    assert_eq!(graph.is_null(), code != SUCCESS);
    if code == SUCCESS {
        Ok(graph)
    } else {
        Err(code)
    }
}

fn instantiate(graph: CUgraph) -> CUgraphExec {
    got(|executable| cuGraphInstantiateWithFlags(executable, graph, 0))
}

/// Captures what `give` queues, beginning in `stream`.
fn captured(stream: CUstream, give: impl FnOnce()) -> CUgraph {
    assert_eq!(cuStreamBeginCapture_v2(stream, THREAD_LOCAL), SUCCESS);
    give();
    end(stream).expect("a capture without mistakes")
}

/// a on the first stream, b and c in parallel on both, d on the first.
fn diamond(
    bench: &Bench,
    first: CUstream,
    second: CUstream,
    touch: impl Fn(&str) -> Touch,
) -> CUgraph {
    captured(first, || {
        bench.try_give(first, touch("a")).expect("captured");
        bench.order(first, second);
        bench.try_give(first, touch("b")).expect("captured");
        bench.try_give(second, touch("c")).expect("captured");
        bench.order(second, first);
        bench.try_give(first, touch("d")).expect("captured");
    })
}

fn status(stream: CUstream) -> CUstreamCaptureStatus {
    got(|status| cuStreamIsCapturing(stream, status))
}

#[test]
fn a_capture_runs_nothing_and_each_launch_runs_it_once() {
    let bench = bench(config(1));
    let stream = bench.stream();
    let graph = captured(stream, || bench.run_all(stream, &["a", "b"]));
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    assert_eq!(bench.ran(), Vec::<String>::new());
    let executable = instantiate(graph);
    assert_eq!(cuGraphUpload(executable, stream), SUCCESS);
    bench.run(stream, "before");
    for _ in 0..2 {
        assert_eq!(cuGraphLaunch(executable, stream), SUCCESS);
    }
    bench.run(stream, "after");
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(bench.ran(), ["before", "a", "b", "a", "b", "after"]);
}

#[test]
fn branches_run_in_both_orders_and_joins_hold() {
    let mut orders = std::collections::BTreeSet::new();
    for seed in 0..20 {
        let bench = bench(config(seed));
        let (first, second) = (bench.stream(), bench.stream());
        let graph = diamond(&bench, first, second, Touch::new);
        assert_eq!(cuGraphLaunch(instantiate(graph), second), SUCCESS);
        assert_eq!(cuCtxSynchronize(), SUCCESS);
        orders.insert(bench.ran().concat());
    }
    assert_eq!(orders.into_iter().collect::<Vec<_>>(), ["abcd", "acbd"]);
}

#[test]
fn branches_that_write_the_same_race_and_those_in_order_do_not() {
    for (races, writers) in [
        (true, ["b", "c"]),
        (false, ["a", "b"]),
        (false, ["c", "d"]),
        (false, ["a", "d"]),
    ] {
        let bench = bench(config(4));
        let (first, second) = (bench.stream(), bench.stream());
        let touch = |name: &str| {
            let work = Touch::new(name);
            if writers.contains(&name) {
                work.writing(0x1000..0x1010)
            } else {
                work
            }
        };
        let executable = instantiate(diamond(&bench, first, second, touch));
        for stream in [first, second, first] {
            // On any stream, repeatedly: launches of one executable are ordered.
            assert_eq!(cuGraphLaunch(executable, stream), SUCCESS);
        }
        assert_eq!(cuCtxSynchronize(), SUCCESS);
        assert_eq!(
            bench.finding_kinds().contains(&FindingKind::Race),
            races,
            "{writers:?}: {:?}",
            bench.findings()
        );
    }
}

#[test]
fn a_launch_is_in_order_with_its_stream_on_both_sides() {
    let bench = bench(config(4));
    let (first, second) = (bench.stream(), bench.stream());
    let executable = instantiate(captured(first, || bench.write(first, "node")));
    bench.write(second, "before");
    assert_eq!(cuGraphLaunch(executable, second), SUCCESS);
    bench.write(second, "after");
    bench.order(second, first);
    bench.write(first, "elsewhere");
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    assert_eq!(bench.ran(), ["before", "node", "after", "elsewhere"]);
    assert_eq!(bench.finding_kinds(), []);
}

#[test]
fn two_executables_on_two_streams_race() {
    let bench = bench(config(4));
    let (first, second) = (bench.stream(), bench.stream());
    let graph = captured(first, || bench.write(first, "node"));
    assert_eq!(cuGraphLaunch(instantiate(graph), first), SUCCESS);
    assert_eq!(cuGraphLaunch(instantiate(graph), second), SUCCESS);
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    assert_eq!(bench.finding_kinds(), [FindingKind::Race]);
    let message = bench.findings()[0].message.clone();
    assert!(message.contains("captured"), "{message}");
}

#[test]
fn a_race_in_a_graph_is_found_with_every_seed() {
    for seed in 0..20 {
        let bench = bench(config(seed));
        let (first, second) = (bench.stream(), bench.stream());
        let touch = |name: &str| Touch::new(name).writing(0..64);
        let graph = diamond(&bench, first, second, touch);
        assert_eq!(cuGraphLaunch(instantiate(graph), first), SUCCESS);
        assert_eq!(cuStreamSynchronize(first), SUCCESS);
        assert_eq!(bench.finding_kinds(), [FindingKind::Race], "seed {seed}");
    }
}

#[test]
fn an_ignored_wait_in_a_capture_leaves_the_branches_unordered() {
    let bench = bench(Config {
        ignore_wait: Some(1),
        ..config(1)
    });
    let (first, second) = (bench.stream(), bench.stream());
    let touch = |name: &str| Touch::new(name).writing(0..64);
    let graph = captured(first, || {
        bench.try_give(first, touch("a")).expect("captured");
        bench.order(first, second);
        bench.try_give(second, touch("c")).expect("captured");
        bench.order(second, first);
    });
    assert_eq!(cuGraphLaunch(instantiate(graph), first), SUCCESS);
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    assert_eq!(bench.finding_kinds(), [FindingKind::Race]);
}

#[test]
fn an_executable_takes_the_nodes_of_a_graph_of_the_same_shape_and_no_other() {
    let bench = bench(config(1));
    let (first, second) = (bench.stream(), bench.stream());
    let executable = instantiate(diamond(&bench, first, second, Touch::new));
    let same = diamond(&bench, first, second, |name| {
        Touch::new(&name.to_uppercase())
    });
    let line = captured(first, || bench.run_all(first, &["a", "b", "c", "d"]));
    let short = captured(first, || bench.run(first, "a"));
    let update = |graph| {
        let mut info = MaybeUninit::<CUgraphExecUpdateResultInfo>::uninit();
        let code = cuGraphExecUpdate_v2(executable, graph, Some(&mut info));
        // SAFETY: written whenever the two handles are good.
        (code, unsafe { info.assume_init() })
    };
    for other in [line, short] {
        let (code, info) = update(other);
        assert_eq!(code, CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE);
        assert_eq!(
            info.result,
            CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED
        );
    }
    // A pending launch keeps what it was launched with.
    assert_eq!(cuGraphLaunch(executable, first), SUCCESS);
    let (code, info) = update(same);
    assert_eq!(
        (code, info.result),
        (
            SUCCESS,
            CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS
        )
    );
    assert_eq!(cuGraphLaunch(executable, first), SUCCESS);
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    let ran = bench.ran().concat();
    assert!(
        ["abcdABCD", "abcdACBD", "acbdABCD", "acbdACBD"].contains(&ran.as_str()),
        "{ran}"
    );
}

#[test]
fn graphs_and_executables_end_when_their_handles_do_and_launches_do_not() {
    let bench = bench(config(1));
    let stream = bench.stream();
    let graph = captured(stream, || bench.run(stream, "a"));
    let executable = instantiate(graph);
    assert_eq!(cuGraphDestroy(graph), SUCCESS);
    assert_eq!(cuGraphLaunch(executable, stream), SUCCESS);
    assert_eq!(cuGraphExecDestroy(executable), SUCCESS);
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(bench.ran(), ["a"]);
    assert_eq!(bench.finding_kinds(), []);
    assert_eq!(
        cuGraphLaunch(executable, stream),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(cuGraphDestroy(graph), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(
        bench.finding_kinds(),
        [FindingKind::Handle, FindingKind::Handle]
    );
}

#[test]
fn a_capture_in_progress_can_be_inspected() {
    let bench = bench(config(1));
    let stream = bench.stream();
    assert_eq!(
        status(stream),
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE
    );
    assert_eq!(cuStreamBeginCapture_v2(stream, THREAD_LOCAL), SUCCESS);
    bench.run_all(stream, &["kernel a", "cuMemsetD8Async"]);
    let (mut id, mut graph_told, mut count) = (0_u64, 0_usize, 0_usize);
    // SAFETY: initialised memory may be passed as uninitialised, and a graph handle is a number
    // stored as a pointer.
    let (id_place, graph_place, count_place) = unsafe {
        (
            &mut *(&raw mut id).cast(),
            &mut *(&raw mut graph_told).cast(),
            &mut *(&raw mut count).cast(),
        )
    };
    let told = got(|status| {
        cuStreamGetCaptureInfo_v3(
            stream,
            status,
            Some(id_place),
            Some(graph_place),
            None,
            None,
            Some(count_place),
        )
    });
    assert_eq!(
        (told, id, count),
        (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE, 1, 1)
    );
    let graph = end(stream).expect("a good capture");
    assert_eq!(graph_told, graph as usize);
    let mut nodes = [std::ptr::null_mut(); 3];
    // SAFETY: null asks for the count only; then there is room for three.
    unsafe {
        assert_eq!(
            cuGraphGetNodes(graph, std::ptr::null_mut(), Some(&mut count)),
            SUCCESS
        );
        assert_eq!(count, 2);
        count = 3;
        assert_eq!(
            cuGraphGetNodes(graph, nodes.as_mut_ptr(), Some(&mut count)),
            SUCCESS
        );
    }
    assert!(count == 2 && !nodes[1].is_null() && nodes[2].is_null());
    assert_eq!(
        [0, 1].map(|node| got(|kind| cuGraphNodeGetType(nodes[node], kind)) as u32),
        [0, 2]
    );
}

#[test]
fn external_records_and_waits_are_nodes() {
    for seed in 0..20 {
        let bench = bench(config(seed));
        let (stream, outside, before) = (bench.stream(), bench.stream(), bench.stream());
        let (inner, outer) = (bench.event(), bench.event());
        let graph = captured(stream, || {
            assert_eq!(cuStreamWaitEvent(stream, outer, 1), SUCCESS);
            bench.write(stream, "node");
            assert_eq!(cuEventRecordWithFlags(inner, stream, 1), SUCCESS);
        });
        bench.write(before, "before");
        assert_eq!(cuEventRecord(outer, before), SUCCESS);
        assert_eq!(cuGraphLaunch(instantiate(graph), stream), SUCCESS);
        assert_eq!(cuStreamWaitEvent(outside, inner, 0), SUCCESS);
        bench.write(outside, "after");
        assert_eq!(cuStreamSynchronize(outside), SUCCESS);
        assert_eq!(bench.ran(), ["before", "node", "after"], "seed {seed}");
        assert_eq!(bench.finding_kinds(), []);
    }
}

#[test]
fn branches_of_copies_take_their_time_beside_each_other_and_kernels_do_not() {
    // Four nodes, two of them parallel; a device runs one kernel at a time.
    for (what, pieces) in [("cuMemcpy", 3.0), ("kernel", 4.0)] {
        let bench = bench(config(1));
        let (first, second) = (bench.stream(), bench.stream());
        let touch = |name: &str| Touch::new(&format!("{what} {name}"));
        let executable = instantiate(diamond(&bench, first, second, touch));
        let (start, end) = (bench.event(), bench.event());
        assert_eq!(cuEventRecord(start, first), SUCCESS);
        assert_eq!(cuGraphLaunch(executable, first), SUCCESS);
        assert_eq!(cuEventRecord(end, first), SUCCESS);
        assert_eq!(cuEventSynchronize(end), SUCCESS);
        // Whole milliseconds are exact in f32.
        assert_eq!(
            got(|value| cuEventElapsedTime(value, start, end)),
            pieces * (TOUCH_NS / 1_000_000) as f32
        );
    }
}

#[test]
fn a_node_that_hangs_or_fails_is_one_of_its_launch() {
    let bench = bench(Config {
        faults: Plan::parse("stream@4=launch_failure").expect("a plan"),
        ..config(1)
    });
    let stream = bench.stream();
    let graph = captured(stream, || bench.run_all(stream, &["a", "b"]));
    let executable = instantiate(graph);
    assert_eq!(cuGraphLaunch(executable, stream), SUCCESS);
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(cuGraphLaunch(executable, stream), SUCCESS);
    assert_eq!(
        cuStreamSynchronize(stream),
        CUresult::CUDA_ERROR_LAUNCH_FAILED
    );
    assert_eq!(
        cuGraphLaunch(executable, stream),
        CUresult::CUDA_ERROR_LAUNCH_FAILED
    );
    assert_eq!(bench.ran(), ["a", "b", "a", "b"]);
}

#[test]
fn a_graph_replayed_after_its_buffer_was_freed_is_found_at_the_launch() {
    let bench = bench(config(1));
    let stream = bench.stream();
    let buffer = got(|buffer| crate::memory::calls::cuMemAlloc_v2(buffer, 4096));
    let graph = captured(stream, || {
        let work = Touch {
            knows: true,
            ..Touch::new("cuMemsetD8Async").writing(buffer..buffer + 4096)
        };
        bench.try_give(stream, work).expect("captured");
    });
    let executable = instantiate(graph);
    assert_eq!(cuGraphLaunch(executable, stream), SUCCESS);
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(bench.finding_kinds(), []);
    assert_eq!(crate::memory::calls::cuMemFree_v2(buffer), SUCCESS);
    assert_eq!(
        cuGraphLaunch(executable, stream),
        CUresult::CUDA_ERROR_INVALID_VALUE
    );
    assert_eq!(bench.finding_kinds(), [FindingKind::Graph]);
    let message = bench.findings()[0].message.clone();
    assert!(
        message.contains("replayed after a buffer of it was freed")
            && message.contains("cuMemFree"),
        "{message}"
    );
}

/// Graphs as captures make them: each node depends on some earlier nodes.
fn graphs() -> impl Strategy<Value = Vec<Vec<usize>>> {
    prop::collection::vec(
        prop::collection::vec(any::<prop::sample::Index>(), 0..4),
        0..40,
    )
    .prop_map(|nodes| {
        let dependencies = nodes.into_iter().enumerate().map(|(node, picks)| {
            let mut picked: Vec<usize> = if node == 0 {
                Vec::new()
            } else {
                picks.iter().map(|pick| pick.index(node)).collect()
            };
            picked.sort_unstable();
            picked.dedup();
            picked
        });
        dependencies.collect()
    })
}

proptest! {
    #[test]
    fn each_node_of_a_chain_depends_on_the_one_before(graph in graphs()) {
        let chain_of = chains(graph.iter().map(Vec::as_slice));
        prop_assert_eq!(chain_of.len(), graph.len());
        let mut last: std::collections::HashMap<usize, usize> = std::collections::HashMap::new();
        for (node, chain) in chain_of.iter().enumerate() {
            if let Some(before) = last.insert(*chain, node) {
                prop_assert!(graph[node].contains(&before), "{} follows {} and does not depend on it", node, before);
            }
        }
    }
}

#[test]
fn a_line_is_one_chain_and_branches_are_their_own() {
    let line: Vec<Vec<usize>> = (0..10_usize)
        .map(|node| node.checked_sub(1).into_iter().collect())
        .collect();
    assert_eq!(chains(line.iter().map(Vec::as_slice)), vec![0; 10]);
    let diamond: [&[usize]; 4] = [&[], &[0], &[0], &[1, 2]];
    assert_eq!(chains(diamond.into_iter()), [0, 0, 1, 1]);
}
