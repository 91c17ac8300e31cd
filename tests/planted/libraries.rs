//! Programs that misuse cuBLASLt, NCCL, contexts or modules.

use std::sync::{Barrier, Mutex};

use cudarc::nccl::sys::{ncclDataType_t, ncclRedOp_t};

use crate::Version::{self, Right, Wrong};
use crate::blas::{self, Blas};
use crate::bugs::{Bug, COUNT};
use crate::cuda::{Buffer, Gpu, Stream};
use crate::nccl::{self, Call, Ranks};

pub(crate) const LIBRARIES: &[Bug] = &[
    Bug {
        name: "matmul_over_its_operand",
        devices: 1,
        program: matmul_over_its_operand,
        told: &[
            "RACE",
            "cublasLtMatmul 64x64x64",
            "D and A share",
            "cuMemAlloc",
        ],
    },
    Bug {
        name: "matmul_partly_over_c",
        devices: 1,
        program: matmul_partly_over_c,
        told: &[
            "RACE",
            "cublasLtMatmul 64x64x64",
            "D and C share",
            "cuMemAlloc",
        ],
    },
    Bug {
        name: "mask_over_the_matmul",
        devices: 1,
        program: mask_over_the_matmul,
        told: &["RACE", "RELU_AUX", "D and aux share", "cuMemAlloc"],
    },
    Bug {
        name: "algorithm_of_another_shape",
        devices: 1,
        program: algorithm_of_another_shape,
        told: &["FOREIGN ALGORITHM", "cublasLtMatmul 64x64x64", "shape"],
    },
    Bug {
        name: "launch_in_another_context",
        devices: 2,
        program: launch_in_another_context,
        told: &["WRONG DEVICE", "kernel add_one", "device 0", "device 1"],
    },
    Bug {
        name: "matmul_in_another_context",
        devices: 2,
        program: matmul_in_another_context,
        told: &["WRONG DEVICE", "cublasLtMatmul", "device 0", "device 1"],
    },
    Bug {
        name: "counts_that_differ_between_ranks",
        devices: 2,
        program: counts_that_differ_between_ranks,
        told: &[
            "NCCL MISMATCH",
            "of 1001 f32, sum",
            "of 1000 f32, sum",
            "rank 0",
            "rank 1",
            "called by",
        ],
    },
    Bug {
        name: "types_that_differ_between_ranks",
        devices: 2,
        program: types_that_differ_between_ranks,
        told: &["NCCL MISMATCH", "of 1001 f32, sum", "of 1001 i32, sum"],
    },
    Bug {
        name: "algorithms_that_differ_between_ranks",
        devices: 2,
        program: algorithms_that_differ_between_ranks,
        told: &["NCCL MISMATCH", "of 10000 f32, sum", "of 1000 f32, sum"],
    },
    Bug {
        name: "operations_that_differ_between_ranks",
        devices: 2,
        program: operations_that_differ_between_ranks,
        told: &["NCCL MISMATCH", "of 1001 f32, sum", "of 1001 f32, max"],
    },
    Bug {
        name: "result_read_after_a_later_call",
        devices: 2,
        program: result_read_after_a_later_call,
        told: &["RACE", "ncclAllReduce", "kernel add_one"],
    },
    Bug {
        name: "communicators_in_opposite_orders",
        devices: 2,
        program: communicators_in_opposite_orders,
        told: &[
            "NCCL ORDER",
            "of 1001 f32, sum",
            "of 500 f32, sum",
            "rank 0",
            "rank 1",
        ],
    },
    Bug {
        name: "first_collectives_in_opposite_orders",
        devices: 2,
        program: first_collectives_in_opposite_orders,
        told: &["NCCL ORDER", "first collectives", "rank 0", "rank 1"],
    },
    Bug {
        name: "opposite_orders_within_a_group",
        devices: 2,
        program: opposite_orders_within_a_group,
        told: &["NCCL ORDER", "of 1001 f32, sum", "of 500 f32, sum"],
    },
    Bug {
        name: "collectives_grouped_by_one_rank_alone",
        devices: 2,
        program: collectives_grouped_by_one_rank_alone,
        told: &[
            "NCCL MISMATCH",
            "group the same calls differently",
            "rank 0",
            "rank 1",
        ],
    },
    Bug {
        name: "exchange_grouped_by_one_rank_alone",
        devices: 2,
        program: exchange_grouped_by_one_rank_alone,
        told: &["NCCL MISMATCH", "in another group", "rank 0", "rank 1"],
    },
    Bug {
        name: "communicator_used_by_two_threads",
        devices: 2,
        program: communicator_used_by_two_threads,
        told: &["NCCL THREADS", "ncclAllReduce", "one:", "the other:"],
    },
    Bug {
        name: "first_collective_in_a_capture",
        devices: 2,
        program: first_collective_in_a_capture,
        told: &[
            "CAPTURE",
            "ncclAllReduce of 1001 f32",
            "first tree collective",
        ],
    },
    Bug {
        name: "kernel_loaded_in_a_capture",
        devices: 1,
        program: kernel_loaded_in_a_capture,
        told: &[
            "CAPTURE",
            "cuModuleGetFunction",
            "stream 0",
            "what it means",
            "help: ",
        ],
    },
];

const SQUARE: usize = blas::SIDE * blas::SIDE;

/// A stream, a square matrix of ones, and a workspace.
fn ones(gpu: &Gpu) -> (Stream, Buffer, Buffer) {
    let (stream, ones) = (gpu.stream(), gpu.allocate(SQUARE));
    gpu.fill(ones, 1.0, SQUARE, stream);
    (stream, ones, gpu.allocate(blas::WORKSPACE_BYTES / 4))
}

fn matmul_over_its_operand(version: Version) {
    let gpu = Gpu::new(0);
    let (blas, (stream, ones, workspace)) = (Blas::new(&gpu), ones(&gpu));
    let separate = gpu.allocate(SQUARE);
    let output = if version == Right { separate } else { ones };
    blas.square(ones, output, workspace, stream);
    gpu.expect(blas::SIDE as f32, output, SQUARE, stream);
}

/// C may be D, but not begin one column later.
fn matmul_partly_over_c(version: Version) {
    let gpu = Gpu::new(0);
    let (blas, (stream, ones, workspace)) = (Blas::new(&gpu), ones(&gpu));
    let memory = gpu.allocate(SQUARE + blas::SIDE);
    gpu.fill(memory, 1.0, SQUARE + blas::SIDE, stream);
    let output = if version == Right {
        memory
    } else {
        memory.after(blas::SIDE)
    };
    blas.multiply([ones, memory, output], 1.0, workspace, stream);
    gpu.expect(blas::SIDE as f32 + 1.0, output, SQUARE, stream);
}

fn mask_over_the_matmul(version: Version) {
    let gpu = Gpu::new(0);
    let (stream, ones, workspace) = ones(&gpu);
    let memory = gpu.allocate(SQUARE + blas::MASK_COUNT);
    let mask = memory.after(if version == Right { SQUARE } else { 0 });
    let blas = Blas::with(&gpu, blas::SIDE, Some(mask));
    blas.square(ones, memory, workspace, stream);
    gpu.expect(blas::SIDE as f32, memory, SQUARE, stream);
}

fn algorithm_of_another_shape(version: Version) {
    let gpu = Gpu::new(0);
    let (mut blas, (stream, ones, workspace)) = (Blas::new(&gpu), ones(&gpu));
    if version == Wrong {
        blas = blas.with_algorithm_of(&Blas::with(&gpu, blas::SIDE / 2, None));
    }
    let output = gpu.allocate(SQUARE);
    blas.square(ones, output, workspace, stream);
    gpu.expect(blas::SIDE as f32, output, SQUARE, stream);
}

fn launch_in_another_context(version: Version) {
    let (first, second) = (Gpu::new(0), Gpu::new(1));
    let (stream, buffer) = (second.stream(), second.allocate(COUNT));
    second.fill(buffer, 1.0, COUNT, stream);
    second.prepare_kernels();
    if version == Wrong {
        first.make_current();
    }
    second.add_one_in_current_context(buffer, COUNT, stream);
    second.expect(2.0, buffer, COUNT, stream);
}

fn matmul_in_another_context(version: Version) {
    let (first, second) = (Gpu::new(0), Gpu::new(1));
    let (blas, (stream, ones, workspace)) = (Blas::new(&second), ones(&second));
    let output = second.allocate(SQUARE);
    if version == Wrong {
        first.make_current();
    }
    blas.multiply([ones, output, output], 0.0, workspace, stream);
    second.expect(blas::SIDE as f32, output, SQUARE, stream);
}

/// Two ranks, and a sum of ones that each of them will call.
fn two_ranks() -> ([Gpu; 2], Ranks, [Call; 2]) {
    two_ranks_with(COUNT)
}

fn two_ranks_with(count: usize) -> ([Gpu; 2], Ranks, [Call; 2]) {
    let gpus = [Gpu::new(0), Gpu::new(1)];
    let ranks = Ranks::new(&gpus);
    let calls = [0, 1].map(|rank: usize| call_of(count, &gpus[rank]));
    (gpus, ranks, calls)
}

fn call_of_ones(gpu: &Gpu) -> Call {
    call_of(COUNT, gpu)
}

fn call_of(count: usize, gpu: &Gpu) -> Call {
    let (stream, buffer) = (gpu.stream(), gpu.allocate(count));
    gpu.fill(buffer, 1.0, count, stream);
    Call::new(buffer, count, stream)
}

/// Rank 1 makes another call than rank 0 in the wrong version.
fn apart(version: Version, count: usize, change: impl FnOnce(&mut Call)) {
    if !nccl::is_here() {
        return;
    }
    let (gpus, ranks, mut calls) = two_ranks_with(count);
    if version == Wrong {
        change(&mut calls[1]);
    }
    ranks.all_reduce(calls);
    for (gpu, call) in gpus.iter().zip(calls) {
        gpu.expect(2.0, call.buffer, count, call.stream);
    }
}

fn counts_that_differ_between_ranks(version: Version) {
    apart(version, COUNT, |call| call.count -= 1);
}

/// A ring adds many elements, and a tree few. Neither is connected before.
fn algorithms_that_differ_between_ranks(version: Version) {
    apart(version, 10_000, |call| call.count = 1000);
}

fn types_that_differ_between_ranks(version: Version) {
    apart(version, COUNT, |call| {
        call.dtype = ncclDataType_t::ncclInt32
    });
}

fn operations_that_differ_between_ranks(version: Version) {
    apart(version, COUNT, |call| call.operation = ncclRedOp_t::ncclMax);
}

/// NCCL runs the calls of one communicator one after another, but a stream of a later call need not
/// wait for the streams of earlier ones.
fn result_read_after_a_later_call(version: Version) {
    if !nccl::is_here() {
        return;
    }
    let (gpus, ranks, calls) = two_ranks();
    let later = [0, 1].map(|rank: usize| call_of_ones(&gpus[rank]));
    ranks.all_reduce(calls);
    let done = gpus[0].event();
    gpus[0].record(done, calls[0].stream);
    ranks.all_reduce(later);
    if version == Right {
        gpus[0].wait(later[0].stream, done);
    }
    gpus[0].add_one(calls[0].buffer, COUNT, later[0].stream);
    gpus[0].expect(3.0, calls[0].buffer, COUNT, later[0].stream);
    gpus[1].expect(2.0, later[1].buffer, COUNT, later[1].stream);
}

fn communicators_in_opposite_orders(version: Version) {
    if !nccl::is_here() {
        return;
    }
    let (gpus, ranks, calls) = two_ranks();
    let others = Ranks::new(&gpus);
    let other_calls = [0, 1].map(|rank: usize| Call {
        count: 500,
        ..call_of_ones(&gpus[rank])
    });
    // A communicator's first call makes its connections, for which all ranks must come.
    for ranks in [&ranks, &others] {
        ranks.all_reduce([0, 1].map(|rank: usize| call_of_ones(&gpus[rank])));
    }
    if version == Right {
        ranks.all_reduce(calls);
        others.all_reduce(other_calls);
    } else {
        nccl::all_reduce(&[(&ranks, 0, calls[0]), (&others, 1, other_calls[1])]);
        nccl::all_reduce(&[(&others, 0, other_calls[0]), (&ranks, 1, calls[1])]);
    }
    for (gpu, (call, other)) in gpus.iter().zip(calls.into_iter().zip(other_calls)) {
        gpu.expect(2.0, call.buffer, COUNT, call.stream);
        gpu.expect(2.0, other.buffer, 500, other.stream);
    }
}

/// Each rank's first call waits on the host until the other rank makes the same one.
fn first_collectives_in_opposite_orders(version: Version) {
    if !nccl::is_here() {
        return;
    }
    let (gpus, ranks, calls) = two_ranks();
    let others = Ranks::new(&gpus);
    let other_calls = [0, 1].map(|rank: usize| call_of_ones(&gpus[rank]));
    as_each_rank(|rank| {
        let mut order = [(&ranks, calls[rank]), (&others, other_calls[rank])];
        if version == Wrong && rank == 1 {
            order.reverse();
        }
        for (ranks, call) in order {
            ranks.all_reduce_as(rank, call);
        }
    });
    for (gpu, call) in gpus.iter().zip(calls) {
        gpu.expect(2.0, call.buffer, COUNT, call.stream);
    }
}

/// Calls of a group need not progress together, so their order matters, too.
fn opposite_orders_within_a_group(version: Version) {
    if !nccl::is_here() {
        return;
    }
    let (gpus, ranks, calls) = two_ranks();
    let others = Ranks::new(&gpus);
    let other_calls = [0, 1].map(|rank: usize| Call {
        count: 500,
        ..call_of_ones(&gpus[rank])
    });
    let mut of_rank_1 = [(&ranks, 1, calls[1]), (&others, 1, other_calls[1])];
    if version == Wrong {
        of_rank_1.reverse();
    }
    let of_rank_0 = [(&ranks, 0, calls[0]), (&others, 0, other_calls[0])];
    nccl::all_reduce(&[of_rank_0, of_rank_1].concat());
    for (gpu, call) in gpus.iter().zip(calls) {
        gpu.expect(2.0, call.buffer, COUNT, call.stream);
    }
}

fn as_each_rank(body: impl Fn(usize) + Sync) {
    std::thread::scope(|scope| {
        let body = &body;
        (0..nccl::RANKS).for_each(|rank| drop(scope.spawn(move || body(rank))));
    });
}

fn collectives_grouped_by_one_rank_alone(version: Version) {
    if !nccl::is_here() {
        return;
    }
    let (gpus, ranks, calls) = two_ranks();
    let seconds = [0, 1].map(|rank: usize| call_of_ones(&gpus[rank]));
    as_each_rank(|rank| {
        let both = || {
            [calls, seconds]
                .iter()
                .for_each(|all| ranks.all_reduce_as(rank, all[rank]))
        };
        if version == Wrong && rank == 1 {
            both();
        } else {
            nccl::group(both);
        }
    });
    for (gpu, call) in gpus.iter().zip(calls) {
        gpu.expect(2.0, call.buffer, COUNT, call.stream);
    }
}

/// The program of NCCL's issue 1279, whose behaviour is undefined.
fn exchange_grouped_by_one_rank_alone(version: Version) {
    if !nccl::is_here() {
        return;
    }
    let (gpus, ranks, sent) = two_ranks();
    let received = [0, 1].map(|rank: usize| Call {
        buffer: gpus[rank].allocate(COUNT),
        ..sent[rank]
    });
    as_each_rank(|rank| {
        let both = || {
            ranks.send_as(rank, sent[rank]);
            ranks.receive_as(rank, received[rank]);
        };
        if version == Wrong && rank == 1 {
            both();
        } else {
            nccl::group(both);
        }
    });
    for (gpu, call) in gpus.iter().zip(received) {
        gpu.expect(1.0, call.buffer, COUNT, call.stream);
    }
}

/// Two threads call as rank 0, one after the other only where a lock makes them.
fn communicator_used_by_two_threads(version: Version) {
    if !nccl::is_here() {
        return;
    }
    let (gpus, ranks, calls) = two_ranks();
    let seconds = [0, 1].map(|rank: usize| call_of_ones(&gpus[rank]));
    let (start, lock) = (Barrier::new(2), Mutex::new(()));
    std::thread::scope(|scope| {
        for call in [calls[0], seconds[0]] {
            let (ranks, start, lock) = (&ranks, &start, &lock);
            scope.spawn(move || {
                start.wait();
                let _held =
                    (version == Right).then(|| lock.lock().expect("no thread has panicked"));
                ranks.all_reduce_as(0, call);
            });
        }
        ranks.all_reduce_as(1, calls[1]);
        ranks.all_reduce_as(1, seconds[1]);
    });
    for (gpu, call) in gpus.iter().zip(calls) {
        gpu.expect(2.0, call.buffer, COUNT, call.stream);
    }
}

/// NCCL makes connections at the first call: memory is taken, and all ranks must come. The graphs
/// are not launched: with several GPUs of one thread that may deadlock.
fn first_collective_in_a_capture(version: Version) {
    if !nccl::is_here() {
        return;
    }
    let (gpus, ranks, calls) = two_ranks();
    if version == Right {
        ranks.all_reduce([0, 1].map(|rank: usize| call_of_ones(&gpus[rank])));
    }
    for (gpu, call) in gpus.iter().zip(calls) {
        gpu.begin_capture(call.stream);
    }
    ranks.all_reduce(calls);
    for (gpu, call) in gpus.iter().zip(calls) {
        gpu.end_capture(call.stream);
    }
}

/// A module loads its kernels lazily: each when it is looked up.
fn kernel_loaded_in_a_capture(version: Version) {
    let gpu = Gpu::new(0);
    let (stream, buffer) = (gpu.stream(), gpu.allocate(COUNT));
    gpu.fill(buffer, 1.0, COUNT, stream);
    if version == Right {
        gpu.prepare_kernels();
    } else {
        gpu.load_module();
    }
    gpu.begin_capture(stream);
    gpu.add_one(buffer, COUNT, stream);
    let graph = gpu.end_capture(stream);
    gpu.launch(graph, stream);
    gpu.expect(2.0, buffer, COUNT, stream);
}
