//! Captures and graphs, through the entry points; the split into chains by properties.

use std::mem::MaybeUninit;

use cudarc::driver::sys::{
    CUgraph, CUgraphExec, CUgraphExecUpdateResult, CUgraphExecUpdateResultInfo, CUresult, CUstream, CUstreamCaptureStatus,
};
use proptest::prelude::*;

use super::calls::*;
use super::capture_calls::*;
use super::chains;
use crate::event::calls::*;
use crate::faults::Plan;
use crate::machine::{Config, Held};
use crate::report::Kind;
use crate::stream::calls::*;
use crate::stream::tests::{Bench, SUCCESS, TOUCH_NS, Touch, bench, config, got};

const GLOBAL: u32 = 0;
const THREAD_LOCAL: u32 = 1;
const RELAXED: u32 = 2;
const NULL: CUstream = std::ptr::null_mut();

fn end(stream: CUstream) -> Result<CUgraph, CUresult> {
    let mut graph = MaybeUninit::uninit();
    let code = cuStreamEndCapture(stream, Some(&mut graph));
    // SAFETY: the entry point writes a graph or null whenever it is given a place for it and the stream exists.
    let graph = unsafe { graph.assume_init() };
    assert_eq!(graph.is_null(), code != SUCCESS);
    if code == SUCCESS { Ok(graph) } else { Err(code) }
}

fn instantiate(graph: CUgraph) -> CUgraphExec {
    got(|executable| cuGraphInstantiateWithFlags(executable, graph, 0))
}

/// Captures what `give` does, beginning in `stream`.
fn captured(stream: CUstream, give: impl FnOnce()) -> CUgraph {
    assert_eq!(cuStreamBeginCapture_v2(stream, THREAD_LOCAL), SUCCESS);
    give();
    end(stream).expect("a capture without mistakes")
}

/// a on the first stream, b and c beside each other on both, d on the first.
fn diamond(bench: &Bench, first: CUstream, second: CUstream, touch: impl Fn(&str) -> Touch) -> CUgraph {
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
    for (races, writers) in [(true, ["b", "c"]), (false, ["a", "b"]), (false, ["c", "d"]), (false, ["a", "d"])] {
        let bench = bench(config(4));
        let (first, second) = (bench.stream(), bench.stream());
        let touch = |name: &str| {
            let writes = if writers.contains(&name) { vec![0x1000..0x1010] } else { Vec::new() };
            Touch { writes, ..Touch::new(name) }
        };
        let executable = instantiate(diamond(&bench, first, second, touch));
        for stream in [first, second, first] {
            // On any stream, again and again: launches of one executable are in order.
            assert_eq!(cuGraphLaunch(executable, stream), SUCCESS);
        }
        assert_eq!(cuCtxSynchronize(), SUCCESS);
        assert_eq!(bench.finding_kinds().contains(&Kind::Race), races, "{writers:?}: {:?}", bench.findings());
    }
}

#[test]
fn a_launch_is_in_order_with_its_stream_on_both_sides() {
    let bench = bench(config(4));
    let (first, second) = (bench.stream(), bench.stream());
    let writes = |name: &str| Touch { writes: vec![0x1000..0x2000], ..Touch::new(name) };
    let executable = instantiate(captured(first, || bench.write(first, "node")));
    bench.write(second, "before");
    assert_eq!(cuGraphLaunch(executable, second), SUCCESS);
    bench.write(second, "after");
    bench.order(second, first);
    bench.try_give(first, writes("elsewhere")).expect("given");
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
    assert_eq!(bench.finding_kinds(), [Kind::Race]);
    let message = bench.findings()[0].message.clone();
    assert!(message.contains("captured"), "{message}");
}

#[test]
fn a_race_in_a_graph_is_found_with_every_seed() {
    for seed in 0..20 {
        let bench = bench(config(seed));
        let (first, second) = (bench.stream(), bench.stream());
        let touch = |name: &str| Touch { writes: vec![0..64], ..Touch::new(name) };
        let graph = diamond(&bench, first, second, touch);
        assert_eq!(cuGraphLaunch(instantiate(graph), first), SUCCESS);
        assert_eq!(cuStreamSynchronize(first), SUCCESS);
        assert_eq!(bench.finding_kinds(), [Kind::Race], "seed {seed}");
    }
}

#[test]
fn what_a_capture_cannot_be_begun_or_ended_with() {
    let bench = bench(config(1));
    let (first, second) = (bench.stream(), bench.stream());
    assert_eq!(cuStreamBeginCapture_v2(NULL, RELAXED), CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
    assert_eq!(cuStreamBeginCapture_v2(first, 7), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(end(first), Err(CUresult::CUDA_ERROR_ILLEGAL_STATE));
    assert_eq!(cuStreamBeginCapture_v2(first, THREAD_LOCAL), SUCCESS);
    assert_eq!(cuStreamBeginCapture_v2(first, THREAD_LOCAL), CUresult::CUDA_ERROR_ILLEGAL_STATE);
    let handle = first as usize;
    let elsewhere = std::thread::spawn(move || end(handle as CUstream).err()).join().expect("it does not panic");
    assert_eq!(elsewhere, Some(CUresult::CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD));
    bench.run(first, "a");
    bench.order(first, second);
    bench.run(second, "b");
    assert_eq!(end(first), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED));
    assert_eq!(status(second), CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
    assert_eq!(cuStreamBeginCapture_v2(first, RELAXED), SUCCESS);
    bench.order(first, second);
    assert_eq!(end(second), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNMATCHED));
    assert_eq!(end(first), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    // A relaxed capture may be ended by another thread.
    assert_eq!(cuStreamBeginCapture_v2(first, RELAXED), SUCCESS);
    let ended = std::thread::spawn(move || end(handle as CUstream).is_ok()).join().expect("it does not panic");
    assert!(ended);
    assert_eq!(bench.finding_kinds(), []);
}

#[test]
fn orders_across_the_border_of_a_capture_are_refused_and_break_it() {
    let bench = bench(config(1));
    let (first, second, outside) = (bench.stream(), bench.stream(), bench.stream());
    let event = bench.event();
    assert_eq!(cuEventRecord(event, outside), SUCCESS);
    assert_eq!(cuStreamBeginCapture_v2(first, THREAD_LOCAL), SUCCESS);
    assert_eq!(cuStreamWaitEvent(first, event, 0), CUresult::CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
    assert_eq!(status(first), CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED);
    assert_eq!(bench.try_give(first, Touch::new("a")), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    assert_eq!(end(first), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));

    let captures = [first, second].map(|stream| cuStreamBeginCapture_v2(stream, THREAD_LOCAL));
    assert_eq!(captures, [SUCCESS; 2]);
    assert_eq!(cuEventRecord(event, first), SUCCESS);
    assert_eq!(cuStreamWaitEvent(second, event, 0), CUresult::CUDA_ERROR_STREAM_CAPTURE_MERGE);
    for stream in [first, second] {
        assert_eq!(end(stream), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    }
    // The event means nothing any more: its capture is over.
    assert_eq!(cuStreamWaitEvent(second, event, 0), CUresult::CUDA_ERROR_CAPTURED_EVENT);
    assert_eq!(cuEventRecord(event, second), SUCCESS);
    assert_eq!(cuStreamWaitEvent(first, event, 0), SUCCESS);

    assert_eq!(cuStreamBeginCapture_v2(first, RELAXED), SUCCESS);
    assert_eq!(cuEventRecord(event, first), SUCCESS);
    assert_eq!(cuEventQuery(event), CUresult::CUDA_ERROR_CAPTURED_EVENT);
    assert_eq!(end(first), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    assert_eq!(cuEventSynchronize(event), CUresult::CUDA_ERROR_CAPTURED_EVENT);
    assert_eq!(bench.finding_kinds(), []);
}

#[test]
fn the_null_stream_is_out_of_use_while_a_blocking_stream_captures() {
    let bench = bench(config(1));
    let (blocking, free) = (bench.blocking_stream(), bench.stream());
    let implicit = CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    assert_eq!(cuStreamBeginCapture_v2(free, RELAXED), SUCCESS);
    bench.run(NULL, "allowed");
    assert!(end(free).is_ok());
    for touch in [
        |bench: &Bench| bench.try_give(NULL, Touch::new("a")).expect_err("refused"),
        |_: &Bench| cuStreamSynchronize(NULL),
        |_: &Bench| cuStreamQuery(NULL),
        |bench: &Bench| cuEventRecord(bench.event(), NULL),
    ] {
        assert_eq!(cuStreamBeginCapture_v2(blocking, RELAXED), SUCCESS);
        assert_eq!(touch(&bench), implicit);
        assert_eq!(end(blocking), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    }
    assert_eq!(cuStreamBeginCapture_v2(blocking, RELAXED), SUCCESS);
    assert_eq!(cuStreamIsCapturing(NULL, Some(&mut MaybeUninit::uninit())), implicit);
    assert!(end(blocking).is_ok(), "asking breaks nothing");
}

#[test]
fn waiting_for_what_captures_is_refused_and_found() {
    let unsupported = CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    for (wait, name) in [
        ((|stream| cuStreamSynchronize(stream)) as fn(CUstream) -> CUresult, "cuStreamSynchronize"),
        (|stream| cuStreamQuery(stream), "cuStreamQuery"),
        (|_| cuCtxSynchronize(), "cuCtxSynchronize"),
    ] {
        let bench = bench(config(1));
        let stream = bench.stream();
        assert_eq!(cuStreamBeginCapture_v2(stream, RELAXED), SUCCESS);
        assert_eq!(wait(stream), unsupported, "{name}");
        assert_eq!(bench.finding_kinds(), [Kind::Capture]);
        assert!(bench.findings()[0].message.contains(name));
        assert_eq!(end(stream), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
    }
}

/// Whether an unsafe call is refused on this thread and on another, while this one captures in `mode`.
fn refused(mode: u32, own_mode: u32) -> [bool; 2] {
    [false, true].map(|is_elsewhere| {
        let bench = bench(config(1));
        let (stream, event) = (bench.stream(), bench.event());
        assert_eq!(cuEventRecord(event, bench.stream()), SUCCESS);
        assert_eq!(cuCtxSynchronize(), SUCCESS);
        assert_eq!(cuStreamBeginCapture_v2(stream, mode), SUCCESS);
        let handle = event as usize;
        let query = move || {
            let mut exchanged = own_mode;
            assert_eq!(cuThreadExchangeStreamCaptureMode(Some(&mut exchanged)), SUCCESS);
            let code = cuEventQuery(handle as _);
            assert_eq!(cuThreadExchangeStreamCaptureMode(Some(&mut exchanged)), SUCCESS);
            assert_eq!(exchanged, own_mode);
            code
        };
        let context = got(|context| crate::context::cuCtxGetCurrent(context)) as usize;
        let code = if is_elsewhere {
            let other = std::thread::spawn(move || {
                assert_eq!(crate::context::cuCtxSetCurrent(context as _), SUCCESS);
                query()
            });
            other.join().expect("it does not panic")
        } else {
            query()
        };
        let is_refused = code == CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        assert!(is_refused || code == SUCCESS);
        assert_eq!(end(stream).is_err(), is_refused, "what is refused breaks the capture");
        assert_eq!(bench.finding_kinds().len(), usize::from(is_refused));
        is_refused
    })
}

#[test]
fn unsafe_calls_are_refused_as_the_modes_of_capture_and_thread_say() {
    assert_eq!(refused(GLOBAL, GLOBAL), [true, true]);
    assert_eq!(refused(THREAD_LOCAL, GLOBAL), [true, false]);
    assert_eq!(refused(RELAXED, GLOBAL), [false, false]);
    assert_eq!(refused(GLOBAL, THREAD_LOCAL), [true, false]);
    assert_eq!(refused(GLOBAL, RELAXED), [false, false]);
}

#[test]
fn an_ignored_wait_in_a_capture_leaves_the_branches_unordered() {
    let bench = bench(Config { ignore_wait: Some(1), ..config(1) });
    let (first, second) = (bench.stream(), bench.stream());
    let touch = |name: &str| Touch { writes: vec![0..64], ..Touch::new(name) };
    let graph = captured(first, || {
        bench.try_give(first, touch("a")).expect("captured");
        bench.order(first, second);
        bench.try_give(second, touch("c")).expect("captured");
        bench.order(second, first);
    });
    assert_eq!(cuGraphLaunch(instantiate(graph), first), SUCCESS);
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    assert_eq!(bench.finding_kinds(), [Kind::Race]);
}

#[test]
fn an_executable_takes_the_nodes_of_a_graph_of_the_same_shape_and_no_other() {
    let bench = bench(config(1));
    let (first, second) = (bench.stream(), bench.stream());
    let executable = instantiate(diamond(&bench, first, second, Touch::new));
    let same = diamond(&bench, first, second, |name| Touch::new(&name.to_uppercase()));
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
        assert_eq!(info.result, CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED);
    }
    // A launch that is pending keeps what it was launched with.
    assert_eq!(cuGraphLaunch(executable, first), SUCCESS);
    let (code, info) = update(same);
    assert_eq!((code, info.result), (SUCCESS, CUgraphExecUpdateResult::CU_GRAPH_EXEC_UPDATE_SUCCESS));
    assert_eq!(cuGraphLaunch(executable, first), SUCCESS);
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    let ran = bench.ran().concat();
    assert!(["abcdABCD", "abcdACBD", "acbdABCD", "acbdACBD"].contains(&ran.as_str()), "{ran}");
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
    assert_eq!(cuGraphLaunch(executable, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(cuGraphDestroy(graph), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(bench.finding_kinds(), [Kind::Handle, Kind::Handle]);
}

#[test]
fn a_capture_tells_what_it_has_so_far() {
    let bench = bench(config(1));
    let stream = bench.stream();
    assert_eq!(status(stream), CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
    assert_eq!(cuStreamBeginCapture_v2(stream, THREAD_LOCAL), SUCCESS);
    bench.run_all(stream, &["kernel a", "cuMemsetD8Async"]);
    let (mut id, mut graph_told, mut count) = (0_u64, 0_usize, 0_usize);
    // SAFETY: what is initialised may be given as what need not be, and a graph's handle is a number in a pointer's clothes.
    let (id_place, graph_place, count_place) =
        unsafe { (&mut *(&raw mut id).cast(), &mut *(&raw mut graph_told).cast(), &mut *(&raw mut count).cast()) };
    let told = got(|status| {
        cuStreamGetCaptureInfo_v3(stream, status, Some(id_place), Some(graph_place), None, None, Some(count_place))
    });
    assert_eq!((told, id, count), (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE, 1, 1));
    let graph = end(stream).expect("a good capture");
    assert_eq!(graph_told, graph as usize);
    let mut nodes = [std::ptr::null_mut(); 3];
    // SAFETY: null asks for the count alone; then there is room for the three that are said.
    unsafe {
        assert_eq!(cuGraphGetNodes(graph, std::ptr::null_mut(), Some(&mut count)), SUCCESS);
        assert_eq!(count, 2);
        count = 3;
        assert_eq!(cuGraphGetNodes(graph, nodes.as_mut_ptr(), Some(&mut count)), SUCCESS);
    }
    assert!(count == 2 && !nodes[1].is_null() && nodes[2].is_null());
    assert_eq!([0, 1].map(|node| got(|kind| cuGraphNodeGetType(nodes[node], kind)) as u32), [0, 2]);
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
fn branches_take_their_time_beside_each_other() {
    let bench = bench(config(1));
    let (first, second) = (bench.stream(), bench.stream());
    let executable = instantiate(diamond(&bench, first, second, Touch::new));
    let (start, end) = (bench.event(), bench.event());
    assert_eq!(cuEventRecord(start, first), SUCCESS);
    assert_eq!(cuGraphLaunch(executable, first), SUCCESS);
    assert_eq!(cuEventRecord(end, first), SUCCESS);
    assert_eq!(cuEventSynchronize(end), SUCCESS);
    // Four nodes, of which two stand beside each other; whole milliseconds are exact in f32.
    assert_eq!(got(|value| cuEventElapsedTime(value, start, end)), 3.0 * (TOUCH_NS / 1_000_000) as f32);
}

#[test]
fn what_no_graph_can_hold_is_refused_in_a_capture() {
    let bench = bench(config(1));
    let stream = bench.stream();
    assert_eq!(cuStreamBeginCapture_v2(stream, RELAXED), SUCCESS);
    let refused = {
        let mut held = Held::take();
        let id = crate::stream::resolve(&mut held, stream).expect("it is there");
        crate::stream::enqueue_with(&mut held, id, "cuMemAllocAsync", Box::new(|_, _, _| Ok(())))
    };
    assert_eq!(refused, Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED));
    assert_eq!(bench.finding_kinds(), [Kind::Capture]);
    assert_eq!(end(stream), Err(CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED));
}

#[test]
fn destroying_a_stream_that_captures_leaves_nothing_behind() {
    let bench = bench(config(1));
    let (first, second) = (bench.stream(), bench.stream());
    assert_eq!(cuStreamBeginCapture_v2(first, THREAD_LOCAL), SUCCESS);
    bench.order(first, second);
    assert_eq!(cuStreamDestroy_v2(first), SUCCESS);
    assert_eq!(status(second), CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE);
    bench.run(second, "a");
    assert_eq!(cuCtxSynchronize(), SUCCESS);
    assert_eq!(bench.ran(), ["a"]);
}

#[test]
fn a_node_that_hangs_or_fails_is_one_of_its_launch() {
    let bench = bench(Config { faults: Plan::parse("stream@4=launch_failure").expect("a plan"), ..config(1) });
    let stream = bench.stream();
    let graph = captured(stream, || bench.run_all(stream, &["a", "b"]));
    let executable = instantiate(graph);
    assert_eq!(cuGraphLaunch(executable, stream), SUCCESS);
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(cuGraphLaunch(executable, stream), SUCCESS);
    assert_eq!(cuStreamSynchronize(stream), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    assert_eq!(cuGraphLaunch(executable, stream), CUresult::CUDA_ERROR_LAUNCH_FAILED);
    assert_eq!(bench.ran(), ["a", "b", "a", "b"]);
}

#[test]
fn a_graph_replayed_after_its_buffer_was_freed_is_found_at_the_launch() {
    let bench = bench(config(1));
    let stream = bench.stream();
    let buffer = got(|buffer| crate::memory::calls::cuMemAlloc_v2(buffer, 4096));
    let graph = captured(stream, || {
        let work = Touch { writes: vec![buffer..buffer + 4096], knows: true, ..Touch::new("cuMemsetD8Async") };
        bench.try_give(stream, work).expect("captured");
    });
    let executable = instantiate(graph);
    assert_eq!(cuGraphLaunch(executable, stream), SUCCESS);
    assert_eq!(cuStreamSynchronize(stream), SUCCESS);
    assert_eq!(bench.finding_kinds(), []);
    assert_eq!(crate::memory::calls::cuMemFree_v2(buffer), SUCCESS);
    assert_eq!(cuGraphLaunch(executable, stream), CUresult::CUDA_ERROR_INVALID_VALUE);
    assert_eq!(bench.finding_kinds(), [Kind::Graph]);
    let message = bench.findings()[0].message.clone();
    assert!(message.contains("replayed after a buffer of it was freed") && message.contains("cuMemFree"), "{message}");
}

/// Graphs as captures make them: each node depends on some earlier ones.
fn graphs() -> impl Strategy<Value = Vec<Vec<usize>>> {
    prop::collection::vec(prop::collection::vec(any::<prop::sample::Index>(), 0..4), 0..40).prop_map(|nodes| {
        let dependencies = nodes.into_iter().enumerate().map(|(node, picks)| {
            let mut picked: Vec<usize> =
                if node == 0 { Vec::new() } else { picks.iter().map(|pick| pick.index(node)).collect() };
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
    let line: Vec<Vec<usize>> = (0..10_usize).map(|node| node.checked_sub(1).into_iter().collect()).collect();
    assert_eq!(chains(line.iter().map(Vec::as_slice)), vec![0; 10]);
    let diamond: [&[usize]; 4] = [&[], &[0], &[0], &[1, 2]];
    assert_eq!(chains(diamond.into_iter()), [0, 0, 1, 1]);
}
