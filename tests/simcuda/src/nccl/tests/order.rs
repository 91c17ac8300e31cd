//! What a collective is ordered with, and what it is not: the race detector sees what it reads and
//! writes.

use std::ptr::null_mut;

use cudarc::driver::sys::CUstream;

use super::bench::*;
use super::groups::Local;
use crate::context::{cuCtxEnablePeerAccess, cuCtxGetCurrent};
use crate::copy::{cuMemcpyDtoDAsync_v2, cuMemcpyPeerAsync, cuMemsetD32Async};
use crate::event::calls::{cuEventCreate, cuEventRecord, cuStreamWaitEvent};
use crate::graph::calls::{
    cuGraphDestroy, cuGraphExecDestroy, cuGraphInstantiateWithFlags, cuGraphLaunch,
};
use crate::graph::capture_calls::{cuStreamBeginCapture_v2, cuStreamEndCapture};
use crate::machine::testing::{cases, device, made, ok};
use crate::memory::calls::{cuMemAllocAsync, cuMemFreeAsync};
use crate::nccl::calls::ncclBroadcast;
use crate::stream::calls::{cuStreamCreate, cuStreamSynchronize};

const THREE: (&str, &str) = ("SIMCUDA_DEVICES", "3");
const RANDOM: (&str, &str) = ("SIMCUDA_SCHEDULE", "random");
const COUNT: usize = 256;

/// What the other stream of rank 0 does beside a collective from `from[0]` to `to[0]`.
fn beside(touch: impl Fn(&[u64], &[u64], CUstream), waits: bool) {
    let local = Local::new();
    let (from, to) = (
        local.upload(|_| vec![1.0; COUNT]),
        local.upload(|_| vec![0.0; COUNT]),
    );
    device(0);
    let other = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
    local.all(|rank, comm, stream| all_reduce(from[rank], to[rank], COUNT, comm, stream));
    device(0);
    if waits {
        let event = made(|event| cuEventCreate(event, 2));
        ok(cuEventRecord(event, local.streams[0]));
        ok(cuStreamWaitEvent(other, event, 0));
    }
    touch(&from, &to, other);
    local.synchronize();
    ok(cuStreamSynchronize(other));
    local.end();
}

fn read_result(_: &[u64], to: &[u64], stream: CUstream) {
    let copy = upload(&[0.0; 4]);
    ok(cuMemcpyDtoDAsync_v2(
        copy,
        to[0] + 4 * (COUNT as u64 - 4),
        16,
        stream,
    ));
}

fn write_source(from: &[u64], _: &[u64], stream: CUstream) {
    ok(cuMemsetD32Async(
        from[0] + 4 * (COUNT as u64 - 1),
        0,
        1,
        stream,
    ));
}

/// Captures two calls in two streams, which only the communicator orders; `second` selects the
/// buffer of the later one.
fn in_a_graph(second: impl Fn(u64, u64) -> u64) {
    let local = Local::new();
    let [buffers, more] = [1.0, 2.0].map(|by| local.upload(|rank| vec![rank as f32 * by; COUNT]));
    let mut executables = Vec::new();
    for rank in 0..3 {
        device(rank as i32);
        let (comm, stream) = (local.comms[rank], local.streams[rank]);
        let other = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
        let event = made(|event| cuEventCreate(event, 2));
        ok(cuStreamBeginCapture_v2(stream, 1));
        ok(cuEventRecord(event, stream));
        ok(cuStreamWaitEvent(other, event, 0));
        done(all_reduce(
            buffers[rank],
            buffers[rank],
            COUNT,
            comm,
            stream,
        ));
        let later = second(buffers[rank], more[rank]);
        done(all_reduce(later, later, COUNT, comm, other));
        ok(cuEventRecord(event, other));
        ok(cuStreamWaitEvent(stream, event, 0));
        let graph = made(|graph| cuStreamEndCapture(stream, graph));
        executables.push(made(|executable| {
            cuGraphInstantiateWithFlags(executable, graph, 0)
        }));
        ok(cuGraphDestroy(graph));
        ok(cuGraphLaunch(executables[rank], stream));
    }
    local.synchronize();
    assert_eq!(local.download(&buffers, COUNT), vec![vec![3.0; COUNT]; 3]);
    assert_eq!(local.download(&more, COUNT), vec![vec![6.0; COUNT]; 3]);
    executables
        .into_iter()
        .for_each(|executable| ok(cuGraphExecDestroy(executable)));
    local.end();
}

cases! {
    a_result_that_another_stream_reads_too_early_is_found, [THREE, RANDOM], {
        beside(read_result, false);
    }, |ended| ended.is_found(&["RACE", "ncclAllReduce of 256 f32, sum, as rank 0 of 3", "bytes: 1008..1024 of the 1024-byte"]);

    a_source_that_another_stream_writes_too_early_is_found, [THREE, RANDOM], {
        beside(write_source, false);
    }, |ended| ended.is_found(&["RACE", "ncclAllReduce of 256 f32, sum, as rank 0 of 3", "reads them", "bytes: 1020..1024"]);

    behind_an_event_both_are_clean, [THREE, RANDOM], {
        beside(read_result, true);
        beside(write_source, true);
    }, |ended| ended.is_clean();

    a_source_may_be_read_beside_it, [THREE, RANDOM], {
        beside(|from, _, stream| read_result(from, from, stream), false);
    }, |ended| ended.is_clean();

    calls_of_one_communicator_follow_one_another_on_any_streams, [THREE, RANDOM], {
        let local = Local::new();
        let [buffers, more] = [1.0, 2.0].map(|by| local.upload(|rank| vec![rank as f32 * by; COUNT]));
        device(0);
        let other = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
        local.all(|rank, comm, stream| all_reduce(buffers[rank], buffers[rank], COUNT, comm, stream));
        local.all(|rank, comm, stream| {
            all_reduce(more[rank], more[rank], COUNT, comm, if rank == 0 { other } else { stream })
        });
        local.synchronize();
        ok(cuStreamSynchronize(other));
        assert_eq!(local.download(&buffers, COUNT), vec![vec![3.0; COUNT]; 3]);
        assert_eq!(local.download(&more, COUNT), vec![vec![6.0; COUNT]; 3]);
        local.end();
    }, |ended| ended.is_clean();

    in_a_graph_they_follow_one_another_too, [THREE, RANDOM], {
        in_a_graph(|_, more| more);
    }, |ended| ended.is_clean();

    in_a_graph_a_later_call_orders_nothing, [THREE, RANDOM], {
        in_a_graph(|first, _| first);
    }, |ended| ended.is_found(&["RACE", "ncclAllReduce of 256 f32, sum, as rank 0 of 3", "a node of a graph"]);

    what_was_first_in_one_stream_is_not_first_in_another, [THREE, RANDOM], {
        let local = Local::new();
        let [buffers, more] = [1.0, 2.0].map(|by| local.upload(|rank| vec![rank as f32 * by; COUNT]));
        device(0);
        let other = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
        // Rank 0 calls the second collective in another stream, which could run first: the sum
        // would be that of other numbers.
        local.all(|rank, comm, stream| all_reduce(buffers[rank], buffers[rank], COUNT, comm, stream));
        local.all(|rank, comm, stream| {
            let stream = if rank == 0 { other } else { stream };
            ncclBroadcast(more[rank] as _, more[rank] as _, COUNT, F32, 2, comm, stream)
        });
        ok(cuStreamSynchronize(other));
        local.synchronize();
        assert_eq!(local.download(&more, COUNT), vec![vec![4.0; COUNT]; 3]);
        assert_eq!(local.download(&buffers, COUNT), vec![vec![3.0; COUNT]; 3]);
        local.end();
    }, |ended| ended.is_clean();

    a_rank_is_behind_what_the_others_of_its_process_did_before, [THREE, RANDOM], {
        let local = Local::new();
        let first = device(0);
        let second = device(1);
        ok(cuCtxEnablePeerAccess(first, 0));
        assert_eq!(made(|context| cuCtxGetCurrent(context)), second);
        let (own, to) = (local.upload(|_| vec![1.0; COUNT]), local.upload(|_| vec![0.0; COUNT]));
        let extra = local.upload(|_| vec![0.0; COUNT]);
        device(0);
        ok(cuMemsetD32Async(extra[0], 7.0f32.to_bits(), COUNT, local.streams[0]));
        local.all(|rank, comm, stream| all_reduce(own[rank], to[rank], COUNT, comm, stream));
        device(1);
        ok(cuMemcpyPeerAsync(to[1], second, extra[0], first, 4 * COUNT, local.streams[1]));
        local.synchronize();
        assert_eq!(local.download(&to, COUNT)[1], vec![7.0; COUNT]);
        local.end();
    }, |ended| ended.is_clean();

    a_stream_of_another_device_is_found, [THREE], {
        let local = Local::new();
        let buffers = local.upload(|_| vec![1.0; COUNT]);
        all_reduce(buffers[0], buffers[0], COUNT, local.comms[0], local.streams[1]);
    }, |ended| ended.is_found(&["WRONG DEVICE: ncclAllReduce: stream", "is of device 1, the communicator (rank 0) of device 0"]);

    memory_of_another_device_is_found, [THREE], {
        let local = Local::new();
        let buffers = local.upload(|_| vec![1.0; COUNT]);
        all_reduce(buffers[1], buffers[0], COUNT, local.comms[0], local.streams[0]);
    }, |ended| ended.is_found(&["WRONG DEVICE: ncclAllReduce of 256 f32", "memory of device 1"]);

    one_element_too_many_is_found, [THREE], {
        let local = Local::new();
        let buffers = local.upload(|_| vec![1.0; COUNT]);
        all_reduce(buffers[0], buffers[0], COUNT + 1, local.comms[0], local.streams[0]);
    }, |ended| ended.is_found(&["OUT OF BOUNDS: ncclAllReduce of 257 f32", "4 bytes past the end"]);

    memory_that_is_freed_in_another_stream_meanwhile_is_found, [THREE, RANDOM], {
        let local = Local::new();
        let from = local.upload(|_| vec![1.0; COUNT]);
        let to: Vec<u64> = (0..3).map(|rank| {
            device(rank);
            let pointer = made(|pointer| cuMemAllocAsync(pointer, 4 * COUNT, null_mut()));
            ok(cuStreamSynchronize(null_mut()));
            pointer
        }).collect();
        local.all(|rank, comm, stream| all_reduce(from[rank], to[rank], COUNT, comm, stream));
        device(0);
        let other = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
        ok(cuMemFreeAsync(to[0], other));
        ok(cuStreamSynchronize(other));
        local.synchronize();
    }, |ended| {
        assert_eq!(ended.code, Some(86), "{}", ended.text);
        assert!(ended.text.contains("ncclAllReduce of 256 f32") && ended.text.contains("cuMemFreeAsync"), "{}", ended.text);
    };

    halves_that_overlap_are_found, [THREE], {
        let local = Local::new();
        let buffers = local.upload(|_| vec![1.0; COUNT]);
        all_reduce(buffers[0], buffers[0] + 4, COUNT - 1, local.comms[0], local.streams[0]);
    }, |ended| ended.is_found(&["RACE", "sendbuff and recvbuff overlap and are not in place"]);

    a_communicator_that_is_used_after_its_end_is_found, [THREE], {
        let local = Local::new();
        let buffers = local.upload(|_| vec![1.0; COUNT]);
        let (comm, stream) = (local.comms[0], local.streams[0]);
        local.end();
        all_reduce(buffers[0], buffers[0], COUNT, comm, stream);
    }, |ended| ended.is_found(&["DESTROYED HANDLE", "is used after it was destroyed or aborted"]);

    the_null_stream_is_that_of_the_communicator, [THREE], {
        let local = Local::new();
        let buffers = local.upload(|rank| vec![rank as f32; COUNT]);
        local.all(|rank, comm, _| all_reduce(buffers[rank], buffers[rank], COUNT, comm, null_mut()));
        for rank in 0..3 {
            device(rank);
            ok(cuStreamSynchronize(null_mut()));
        }
        assert_eq!(local.download(&buffers, COUNT), vec![vec![3.0; COUNT]; 3]);
        local.end();
    }, |ended| ended.is_clean();
}
