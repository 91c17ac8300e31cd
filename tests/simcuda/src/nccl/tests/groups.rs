//! Ranks that are devices of one process: groups, sends and receives, every kind of collective,
//! captures.

use std::ffi::c_int;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{CUgraphExec, CUstream};

use super::bench::*;
use crate::copy::cuMemcpyDtoDAsync_v2;
use crate::graph::calls::{
    cuGraphDestroy, cuGraphExecDestroy, cuGraphGetNodes, cuGraphInstantiateWithFlags,
    cuGraphLaunch, cuGraphNodeGetType,
};
use crate::graph::capture_calls::{cuStreamBeginCapture_v2, cuStreamEndCapture};
use crate::machine::testing::{cases, device, made, ok};
use crate::nccl::calls::*;
use crate::nccl::comm::Comm;
use crate::nccl::comm_calls::*;
use crate::nccl::group::*;
use crate::stream::calls::{cuStreamCreate, cuStreamSynchronize};

const THREE: (&str, &str) = ("SIMCUDA_DEVICES", "3");
const RANKS: usize = 3;
const COUNT: usize = 300;

/// One rank on each of three devices.
pub(super) struct Local {
    pub(super) comms: Vec<*mut Comm>,
    pub(super) streams: Vec<CUstream>,
}

impl Local {
    pub(super) fn new() -> Self {
        for rank in 0..RANKS {
            device(rank as i32);
        }
        let id = new_id();
        let mut places = vec![std::mem::MaybeUninit::uninit(); RANKS];
        done(ncclGroupStart());
        for (rank, place) in places.iter_mut().enumerate() {
            device(rank as i32);
            done(ncclCommInitRank(
                Some(place),
                RANKS as c_int,
                id,
                rank as c_int,
            ));
        }
        done(ncclGroupEnd());
        // SAFETY: the group has ended well, and so has written all places.
        let comms = places
            .into_iter()
            .map(|place| unsafe { place.assume_init() })
            .inspect(|comm| connected(*comm))
            .collect();
        let streams = (0..RANKS).map(|rank| {
            device(rank as i32);
            made(|stream| cuStreamCreate(stream, NON_BLOCKING))
        });
        Self {
            comms,
            streams: streams.collect(),
        }
    }

    /// Makes a call for each rank, in a group.
    pub(super) fn all(&self, call: impl Fn(usize, *mut Comm, CUstream) -> c_int) {
        done(ncclGroupStart());
        for rank in 0..RANKS {
            done(call(rank, self.comms[rank], self.streams[rank]));
        }
        done(ncclGroupEnd());
    }

    pub(super) fn synchronize(&self) {
        for stream in &self.streams {
            ok(cuStreamSynchronize(*stream));
        }
    }

    /// One buffer a rank, with these values.
    pub(super) fn upload(&self, values: impl Fn(usize) -> Vec<f32>) -> Vec<u64> {
        let upload = |rank| {
            device(rank as i32);
            upload(&values(rank))
        };
        (0..RANKS).map(upload).collect()
    }

    pub(super) fn download(&self, buffers: &[u64], count: usize) -> Vec<Vec<f32>> {
        let download = |rank: usize| {
            device(rank as i32);
            download(buffers[rank], count)
        };
        (0..RANKS).map(download).collect()
    }

    pub(super) fn end(self) {
        self.comms
            .into_iter()
            .for_each(|comm| done(ncclCommDestroy(comm)));
    }
}

fn value(rank: usize, at: usize) -> f32 {
    ((at * 7 + rank * 13) % 29) as f32 / 3.0 + rank as f32 * 1000.0
}

fn values_of(rank: usize) -> Vec<f32> {
    (0..COUNT).map(|at| value(rank, at)).collect()
}

/// The sum of all ranks at one place.
fn sum(at: usize, first: usize, place: usize) -> f32 {
    ring_sum(RANKS, at, first, |rank| value(rank, place))
}

cases! {
    every_collective_does_what_its_name_says, [THREE], {
        let local = Local::new();
        let from = local.upload(values_of);
        let to = local.upload(|_| vec![0.0; RANKS * COUNT]);
        local.all(|rank, comm, stream| all_reduce(from[rank], to[rank], COUNT, comm, stream));
        local.synchronize();
        let sums: Vec<f32> = (0..COUNT).map(|at| sum(at, 0, at)).collect();
        assert_eq!(local.download(&to, COUNT), vec![sums.clone(); RANKS]);

        local.all(|rank, comm, stream| {
            ncclReduceScatter(from[rank] as _, to[rank] as _, COUNT / RANKS, F32, SUM, comm, stream)
        });
        local.synchronize();
        for (rank, slice) in local.download(&to, COUNT / RANKS).into_iter().enumerate() {
            let begin = rank * COUNT / RANKS;
            let expected: Vec<f32> = (0..COUNT / RANKS).map(|at| sum(at, rank + 1, begin + at)).collect();
            assert_eq!(slice, expected, "rank {rank}");
        }

        local.all(|rank, comm, stream| ncclAllGather(from[rank] as _, to[rank] as _, COUNT, F32, comm, stream));
        local.synchronize();
        let whole: Vec<f32> = (0..RANKS).flat_map(values_of).collect();
        assert_eq!(local.download(&to, RANKS * COUNT), vec![whole; RANKS]);

        local.all(|rank, comm, stream| ncclBroadcast(from[rank] as _, to[rank] as _, COUNT, F32, 2, comm, stream));
        local.synchronize();
        assert_eq!(local.download(&to, COUNT), vec![values_of(2); RANKS]);

        let before = local.upload(|_| vec![-1.0; COUNT]);
        local.all(|rank, comm, stream| {
            ncclReduce(from[rank] as _, before[rank] as _, COUNT, F32, SUM, 1, comm, stream)
        });
        local.synchronize();
        assert_eq!(local.download(&before, COUNT), [vec![-1.0; COUNT], sums, vec![-1.0; COUNT]]);
        local.end();
    }, |ended| ended.is_clean();

    in_place_is_the_same, [THREE], {
        let local = Local::new();
        let buffers = local.upload(values_of);
        local.all(|rank, comm, stream| all_reduce(buffers[rank], buffers[rank], COUNT, comm, stream));
        local.synchronize();
        let sums: Vec<f32> = (0..COUNT).map(|at| sum(at, 0, at)).collect();
        assert_eq!(local.download(&buffers, COUNT), vec![sums; RANKS]);
        let buffers = local.upload(values_of);
        let slice = COUNT / RANKS;
        local.all(|rank, comm, stream| {
            let own = buffers[rank] + 4 * (slice * rank) as u64;
            ncclReduceScatter(buffers[rank] as _, own as _, slice, F32, SUM, comm, stream)
        });
        local.all(|rank, comm, stream| {
            let own = buffers[rank] + 4 * (slice * rank) as u64;
            ncclAllGather(own as _, buffers[rank] as _, slice, F32, comm, stream)
        });
        local.all(|rank, comm, stream| {
            ncclBroadcast(buffers[rank] as _, buffers[rank] as _, COUNT, F32, 0, comm, stream)
        });
        local.synchronize();
        let sums: Vec<f32> = (0..COUNT).map(|at| sum(at % slice, at / slice + 1, at)).collect();
        assert_eq!(local.download(&buffers, COUNT), vec![sums; RANKS]);
        local.end();
    }, |ended| ended.is_clean();

    sends_and_receives_of_a_group_get_on_together, [THREE], {
        let local = Local::new();
        // More than the ring of a pair holds, all around, and to itself.
        const LONG: usize = 200_000;
        let from = local.upload(|rank| vec![rank as f32; LONG]);
        let to = local.upload(|_| vec![-1.0; 2 * LONG]);
        done(ncclGroupStart());
        for rank in 0..RANKS {
            let (comm, stream) = (local.comms[rank], local.streams[rank]);
            let (next, last) = ((rank + 1) % RANKS, (rank + 2) % RANKS);
            done(ncclSend(from[rank] as _, LONG, F32, next as c_int, comm, stream));
            done(ncclSend(from[rank] as _, LONG, F32, rank as c_int, comm, stream));
            done(ncclRecv(to[rank] as _, LONG, F32, last as c_int, comm, stream));
            done(ncclRecv((to[rank] + 4 * LONG as u64) as _, LONG, F32, rank as c_int, comm, stream));
        }
        done(ncclGroupEnd());
        local.synchronize();
        for (rank, received) in local.download(&to, 2 * LONG).into_iter().enumerate() {
            let last = ((rank + 2) % RANKS) as f32;
            assert!(received[..LONG].iter().all(|value| *value == last), "rank {rank}");
            assert!(received[LONG..].iter().all(|value| *value == rank as f32), "rank {rank}");
        }
        local.end();
    }, |ended| ended.is_clean();

    the_second_send_to_a_peer_meets_the_second_receive, [THREE], {
        let local = Local::new();
        let from = local.upload(|rank| vec![rank as f32 + 0.5, 7.0]);
        let to = local.upload(|_| vec![0.0; 2]);
        local.all(|rank, comm, stream| match rank {
            0 => ncclSend(from[0] as _, 1, F32, 1, comm, stream),
            1 => ncclRecv((to[1] + 4) as _, 1, F32, 0, comm, stream),
            _ => 0,
        });
        local.all(|rank, comm, stream| match rank {
            0 => ncclSend((from[0] + 4) as _, 1, F32, 1, comm, stream),
            1 => ncclRecv(to[1] as _, 1, F32, 0, comm, stream),
            _ => 0,
        });
        local.synchronize();
        assert_eq!(local.download(&to, 2)[1], [7.0, 0.5]);
        local.end();
    }, |ended| ended.is_clean();

    a_graph_of_collectives_gives_the_same_ten_times, [THREE], {
        let local = Local::new();
        let buffers = local.upload(values_of);
        let to = local.upload(|_| vec![0.0; COUNT]);
        let mut executables: Vec<CUgraphExec> = Vec::new();
        for rank in 0..RANKS {
            device(rank as i32);
            let (comm, stream) = (local.comms[rank], local.streams[rank]);
            // Thread-local.
            ok(cuStreamBeginCapture_v2(stream, 1));
            done(all_reduce(buffers[rank], to[rank], COUNT, comm, stream));
            done(ncclBroadcast(to[rank] as _, buffers[rank] as _, COUNT, F32, 0, comm, stream));
            let graph = made(|graph| cuStreamEndCapture(stream, graph));
            executables.push(made(|executable| cuGraphInstantiateWithFlags(executable, graph, 0)));
            ok(cuGraphDestroy(graph));
        }
        let mut expected: Vec<Vec<f32>> = (0..RANKS).map(values_of).collect();
        for _ in 0..10 {
            for (executable, stream) in executables.iter().zip(&local.streams) {
                ok(cuGraphLaunch(*executable, *stream));
            }
            let sums: Vec<f32> = (0..COUNT).map(|at| ring_sum(RANKS, at, 0, |rank| expected[rank][at])).collect();
            expected = vec![sums; RANKS];
            // Between the launches an eager call of the same communicators.
            local.all(|rank, comm, stream| {
                ncclBroadcast(to[rank] as _, to[rank] as _, COUNT, F32, 1, comm, stream)
            });
            local.synchronize();
            assert_eq!(local.download(&buffers, COUNT), expected);
        }
        executables.into_iter().for_each(|executable| ok(cuGraphExecDestroy(executable)));
        local.end();
    }, |ended| ended.is_clean();

    captured_collectives_have_nccls_events_and_run_among_eager_ones, [THREE, ("SIMCUDA_NCCL_EVENTS", "1")], {
        let local = Local::new();
        let buffers = local.upload(|rank| vec![rank as f32; COUNT]);
        let mut executables: Vec<CUgraphExec> = Vec::new();
        for (rank, &buffer) in buffers.iter().enumerate() {
            device(rank as i32);
            let (comm, stream) = (local.comms[rank], local.streams[rank]);
            ok(cuStreamBeginCapture_v2(stream, 1));
            done(all_reduce(buffer, buffer, COUNT, comm, stream));
            done(ncclBroadcast(buffer as _, buffer as _, COUNT, F32, 0, comm, stream));
            // NCCL's own stream need not be joined.
            let graph = made(|graph| cuStreamEndCapture(stream, graph));
            let mut nodes = [null_mut(); 5];
            let mut count = nodes.len() + 1;
            // SAFETY: without room the nodes are only counted.
            ok(unsafe { cuGraphGetNodes(graph, null_mut(), Some(&mut count)) });
            assert_eq!(count, nodes.len());
            // SAFETY: there is room for as many.
            ok(unsafe { cuGraphGetNodes(graph, nodes.as_mut_ptr(), Some(&mut count)) });
            let mut kinds = nodes.map(|node| made(|kind| cuGraphNodeGetType(node, kind)));
            kinds.sort_unstable();
            use cudarc::driver::sys::CUgraphNodeType::*;
            let (call, wait, record) =
                (CU_GRAPH_NODE_TYPE_KERNEL, CU_GRAPH_NODE_TYPE_WAIT_EVENT, CU_GRAPH_NODE_TYPE_EVENT_RECORD);
            assert_eq!(kinds, [call, call, wait, record, record]);
            executables.push(made(|executable| cuGraphInstantiateWithFlags(executable, graph, 0)));
            ok(cuGraphDestroy(graph));
        }
        let mut expected = 3.0;
        for _ in 0..3 {
            for (executable, stream) in executables.iter().zip(&local.streams) {
                ok(cuGraphLaunch(*executable, *stream));
            }
            local.all(|rank, comm, stream| all_reduce(buffers[rank], buffers[rank], COUNT, comm, stream));
            local.synchronize();
            expected *= 3.0;
            assert_eq!(local.download(&buffers, COUNT), vec![vec![expected; COUNT]; RANKS]);
            expected *= 3.0;
        }
        executables.into_iter().for_each(|executable| ok(cuGraphExecDestroy(executable)));
        local.end();
    }, |ended| ended.is_clean();

    several_streams_of_one_group_are_before_and_behind_it, [THREE], {
        let local = Local::new();
        let from = local.upload(values_of);
        let to = local.upload(|_| vec![0.0; COUNT]);
        let second = local.upload(|_| vec![0.0; COUNT]);
        device(0);
        let other = made(|stream| cuStreamCreate(stream, NON_BLOCKING));
        ok(cuMemcpyDtoDAsync_v2(second[0], from[0], 4 * COUNT, other));
        done(ncclGroupStart());
        for rank in 0..RANKS {
            done(all_reduce(from[rank], to[rank], COUNT, local.comms[rank], local.streams[rank]));
            let stream = if rank == 0 { other } else { local.streams[rank] };
            done(all_reduce(second[rank], second[rank], COUNT, local.comms[rank], stream));
        }
        done(ncclGroupEnd());
        // Behind the group, also that part of it which the other stream asked for.
        ok(cuMemcpyDtoDAsync_v2(to[0], second[0], 4 * COUNT, local.streams[0]));
        ok(cuMemcpyDtoDAsync_v2(from[0], second[0], 4 * COUNT, other));
        local.synchronize();
        ok(cuStreamSynchronize(other));
        // The others have added zeros.
        assert_eq!(local.download(&to, COUNT)[0], values_of(0));
        local.end();
    }, |ended| ended.is_clean();

    a_group_in_which_a_call_is_refused_makes_none, [THREE], {
        let local = Local::new();
        let from = local.upload(values_of);
        done(ncclGroupStart());
        done(all_reduce(from[0], from[0], COUNT, local.comms[0], local.streams[0]));
        assert_eq!(ncclAllReduce(from[1] as _, from[1] as _, COUNT, F32, 9, local.comms[1], local.streams[1]), 4);
        assert_eq!(ncclGroupEnd(), 4);
        assert!(last_error().contains("op 9"), "{}", last_error());
        assert_eq!(ncclGroupEnd(), 5, "{}", last_error());
        local.synchronize();
        assert_eq!(local.download(&from, COUNT)[0], values_of(0));
        local.end();
    }, |ended| ended.is_clean();

    a_waiting_thread_lets_others_make_the_calls_that_it_needs, [THREE], {
        let (first, second) = (Local::new(), Local::new());
        let buffers = first.upload(values_of);
        first.all(|rank, comm, stream| all_reduce(buffers[rank], buffers[rank], COUNT, comm, stream));
        // Rank 1 has entered the collective by now and could end it, but no wait needs that.
        ok(cuStreamSynchronize(first.streams[2]));
        let others = second.upload(values_of);
        done(ncclGroupStart());
        for (rank, &other) in others.iter().enumerate().skip(1) {
            done(all_reduce(other, other, COUNT, second.comms[rank], second.streams[rank]));
        }
        done(ncclGroupEnd());
        let waited = second.streams[1] as usize;
        let waiting = std::thread::spawn(move || {
            device(1);
            ok(cuStreamSynchronize(waited as CUstream));
        });
        // Sleep: it waits by then; if it begins later, it waits as little.
        std::thread::sleep(Duration::from_millis(100));
        let (comm, stream) = (second.comms[0] as usize, second.streams[0] as usize);
        let calling = std::thread::spawn(move || {
            device(0);
            done(all_reduce(others[0], others[0], COUNT, comm as *mut Comm, stream as CUstream));
        });
        let end = Instant::now() + Duration::from_secs(60);
        while !(waiting.is_finished() && calling.is_finished()) {
            assert!(Instant::now() < end, "the wait keeps the machine to itself");
            // Sleep: what is waited for is looked at.
        std::thread::sleep(Duration::from_millis(1));
        }
        first.synchronize();
        second.synchronize();
        first.end();
        second.end();
    }, |ended| ended.is_clean();
}

#[test]
fn handles_of_communicators_are_told_apart() {
    assert_eq!(ncclCommDestroy(null_mut()), 0);
    assert_eq!(ncclCommAbort(null_mut()), 0);
}
