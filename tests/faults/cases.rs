//! What goes wrong, and what must be said about it.

use ddp_kernels::graph::Graph;
use ddp_kernels::stream::{self, Stream};
use ddp_kernels::transfer::{self, Scalars};
use ddp_kernels::{DType, Device, Result, Tensor, memory, ops};

pub(super) const GPU: Device = Device::Cuda(0);
const OTHER: Device = Device::Cuda(1);

/// A plan, what is done under it, and words of what must come of it.
pub(super) struct Case {
    pub(super) plan: &'static str,
    pub(super) what: fn() -> Result<String>,
    pub(super) words: &'static [&'static str],
}

fn ones() -> Result<Tensor> {
    Ok(Tensor::ones(&[1000], DType::F32, GPU)?.named("x"))
}

/// Uses everything once, and gives the sum of what came of it.
fn some_work() -> Result<String> {
    let x = ones()?;
    ops::scale_into(&x, &x, 2.0)?;
    let y = ops::activate(&x, ops::Activation::Relu)?;
    let out = ops::addmm(
        &y.slice(0..100)?.reshape(&[10, 10])?,
        &y.reshape(&[10, 100])?,
        &y.reshape(&[100, 10])?,
        1.0,
        0.0,
    )?;
    stream::synchronize(GPU)?;
    Ok(format!("sum {}", ops::sum(&out)?.item()?))
}

/// The error of `outcome`, and what a later call says.
fn and_then_again(outcome: Result<String>) -> Result<String> {
    let first = outcome.expect_err("planned").to_string();
    let second = some_work().unwrap_or_else(|error| error.to_string());
    Ok(format!("first: {first}\nthen: {second}"))
}

/// A copy down that fails once it is on its way: what the host may do with the memory then.
fn download_fails() -> Result<String> {
    let (host, x, stream) = (pinned()?, ones()?, Stream::new(GPU)?);
    // Work for the copy to wait behind.
    (0..5).try_for_each(|_| stream.scope(|| ops::scale_into(&x, &x, 2.0)))?;
    let error = transfer::copy_async(&host, &x, &stream).expect_err("planned");
    let look = || {
        host.with_slice(|slots: &[f32]| slots[999])
            .map_or_else(|error| error.to_string(), |x| x.to_string())
    };
    let first = look();
    stream::synchronize(GPU)?;
    let second = look();
    let address = |tensor: &Tensor| tensor.with_slice(|slots: &[f32]| slots.as_ptr().addr());
    let (before, after) = (address(&host), {
        drop(host);
        address(&pinned()?)?
    });
    Ok(format!(
        "{error}; first {first}; second {second}; given back: {}",
        before.is_ok_and(|before| before == after)
    ))
}

fn pinned() -> Result<Tensor> {
    Tensor::zeros_pinned(&[1000], DType::F32)
}

/// The second of seven messages fails once it is on its way.
fn message_fails() -> Result<String> {
    let (mut ring, number) = (Scalars::new(GPU, 1)?, Tensor::zeros(&[1], DType::I64, GPU)?);
    let mut text = String::new();
    for k in 0..7i64 {
        if let Err(error) = ring.send(&number, &[k]) {
            text = error.to_string();
        }
    }
    Ok(format!("{text}; number {}", number.item()?))
}

/// A copy between devices that fails; the memory that it used is not handed out too early.
fn copy_between_devices_fails() -> Result<String> {
    const COUNT: usize = (20 << 20) / 4;
    let large = Tensor::full(&[COUNT], 6.0, DType::F32, GPU)?;
    stream::synchronize(GPU)?;
    let error = large.to(OTHER).expect_err("planned");
    drop(large);
    let others = [
        Tensor::full(&[COUNT], 7.0, DType::F32, GPU)?,
        Tensor::full(&[COUNT], 7.0, DType::F32, OTHER)?,
    ];
    stream::synchronize(GPU)?;
    stream::synchronize(OTHER)?;
    let all_sevens = others
        .iter()
        .map(|x| Ok(ops::sum(x)?.item()? == 7.0 * COUNT as f64))
        .collect::<Result<Vec<_>>>()?;
    Ok(format!("{error}; the rest: {all_sevens:?}"))
}

const COPY_FAILS: &[&str] = &[
    "to: ",
    "failed: CUDA_ERROR_OUT_OF_MEMORY",
    "tests/faults/cases.rs:",
    "the rest: [true, true]",
];

const NO_ALGORITHM: &[&str] = &[
    "addmm: cublasLtMatmulAlgoGetHeuristic on cuda:0 failed: CUBLAS_STATUS_NOT_SUPPORTED (no algorithm",
    "f32[10, 100] · f32[100, 10]",
    "tests/faults/cases.rs:",
];

/// Two copies to the other device: what the first says, and by which way the second goes.
fn two_copies() -> Result<String> {
    let x = ones()?;
    let first = x
        .to(OTHER)
        .map_or_else(|error| error.to_string(), |_| "fine".to_string());
    let there = x.to(OTHER)?;
    Ok(format!(
        "first: {first}; then {:?}, kinds: {}",
        there.slice(0..2)?.to_vec::<f32>()?,
        transfer_kinds()
    ))
}

pub(super) const CASES: &[Case] = &[
    Case {
        plan: "",
        what: some_work,
        words: &["sum 40000"],
    },
    // Refused once, given when asked again: what the pool keeps is let go in between, and nobody
    // need know.
    Case {
        plan: "cuMemAllocFromPoolAsync@1=out_of_memory",
        what: some_work,
        words: &["sum 40000"],
    },
    Case {
        plan: "cuMemAllocFromPoolAsync@2=out_of_memory; cuMemAllocFromPoolAsync@3=out_of_memory",
        what: || {
            and_then_again(
                ones()
                    .and_then(|x| ops::activate(&x, ops::Activation::Relu))
                    .map(|_| String::new()),
            )
        },
        words: &[
            "first: out of memory on cuda:0",
            "\"x\" f32[1000] on cuda:0 made at tests/faults/cases.rs",
            "then: sum 40000",
        ],
    },
    Case {
        plan: "cuLaunchKernel@2=launch_failure",
        what: || and_then_again(some_work()),
        words: &[
            "first: ",
            "CUDA_ERROR_LAUNCH_FAILED",
            "tests/faults/cases.rs:",
            "this process has lost the device",
            "then: ",
            "on cuda:0",
        ],
    },
    Case {
        plan: "cuStreamSynchronize@1=device_lost",
        what: || and_then_again(ones().and_then(|x| Ok(format!("{:?}", x.to_vec::<f32>()?)))),
        words: &[
            "first: to_vec: cuStreamSynchronize on cuda:0 failed: ",
            "tests/faults/cases.rs:",
            "then: ",
        ],
    },
    // Three that are rare, and leave no device to work with: every later call repeats them.
    Case {
        plan: "cuStreamSynchronize@1=220",
        what: || and_then_again(ones().and_then(|x| Ok(format!("{:?}", x.to_vec::<f32>()?)))),
        words: &[
            "\nthen: ones: cuMemAllocFromPoolAsync on cuda:0 failed: CUDA_ERROR_NVLINK_UNCORRECTABLE ",
        ],
    },
    Case {
        plan: "cuStreamSynchronize@1=226",
        what: || and_then_again(ones().and_then(|x| Ok(format!("{:?}", x.to_vec::<f32>()?)))),
        words: &["\nthen: ones: cuMemAllocFromPoolAsync on cuda:0 failed: CUDA_ERROR_CONTAINED "],
    },
    Case {
        plan: "cuStreamSynchronize@1=721",
        what: || and_then_again(ones().and_then(|x| Ok(format!("{:?}", x.to_vec::<f32>()?)))),
        words: &[
            "\nthen: ones: cuMemAllocFromPoolAsync on cuda:0 failed: CUDA_ERROR_TENSOR_MEMORY_LEAK ",
        ],
    },
    // Codes of a newer driver, from a call and from work that runs.
    Case {
        plan: "cuStreamSynchronize@1=742",
        what: || and_then_again(ones().and_then(|x| Ok(format!("{:?}", x.to_vec::<f32>()?)))),
        words: &[
            "first: to_vec: cuStreamSynchronize on cuda:0 failed: error 742 (the driver has no text for it)",
            "tests/faults/cases.rs:",
            "then: sum 40000",
        ],
    },
    Case {
        plan: "kernel@2=9999",
        what: || and_then_again(some_work()),
        words: &[
            "first: ",
            "failed: error 9999 (",
            "tests/faults/cases.rs:",
            "then: ",
        ],
    },
    Case {
        plan: "cuMemcpyHtoDAsync_v2@1=launch_failure",
        what: || and_then_again(Tensor::from_slice(&[1.0f32; 8], &[8], GPU).map(|x| x.to_string())),
        words: &[
            "first: from_slice: cuMemcpyHtoDAsync_v2 on cuda:0 failed: CUDA_ERROR_LAUNCH_FAILED",
            "tests/faults/cases.rs:",
        ],
    },
    Case {
        plan: "cuMemHostAlloc@1=out_of_memory",
        what: || and_then_again(Tensor::zeros_pinned(&[1000], DType::F32).map(|x| x.to_string())),
        words: &[
            "first: out of memory on cpu",
            "f32[1000] on cpu asks for",
            "then: sum 40000",
        ],
    },
    // What the first case compiled lies in the cache. What of it the driver refuses is compiled
    // anew.
    Case {
        plan: "cuModuleLoadData@1=invalid_image",
        what: some_work,
        words: &["sum 40000"],
    },
    // The new one is refused too.
    Case {
        plan: "cuModuleLoadData@1=out_of_memory; cuModuleLoadData@2=out_of_memory",
        what: || and_then_again(some_work()),
        words: &[
            "first: ones: cuModuleLoadData on cuda:0 failed: CUDA_ERROR_OUT_OF_MEMORY",
            "cases.rs:",
            "then: sum 40000",
        ],
    },
    // If one cuBLASLt library cannot create a handle, the next one is tried.
    Case {
        plan: "cublasLtCreate@1=not_initialized",
        what: some_work,
        words: &["sum 40000"],
    },
    Case {
        plan: "cublasLtCreate@1=not_initialized; cublasLtCreate@2=not_initialized; \
               cublasLtCreate@3=not_initialized; cublasLtCreate@4=not_initialized",
        what: || and_then_again(some_work()),
        words: &[
            "first: addmm: cuda:0 is not available",
            "cublasLtCreate failed: ",
            "then: sum 40000",
        ],
    },
    Case {
        plan: "cublasLtMatmul@1=launch_failure",
        what: || and_then_again(some_work()),
        words: &[
            "first: addmm: cublasLtMatmul on cuda:0 failed: ",
            "tests/faults/cases.rs:",
        ],
    },
    Case {
        plan: "cuStreamEndCapture@1=launch_failure",
        what: || {
            let (x, stream) = (ones()?, Stream::new(GPU)?);
            stream.scope(|| ops::scale_into(&x, &x, 2.0))?;
            let graph = Graph::capture(&stream, || ops::scale_into(&x, &x, 2.0));
            Ok(graph.expect_err("planned").to_string())
        },
        words: &[
            "capture: cuStreamEndCapture on cuda:0 failed: ",
            "tests/faults/cases.rs:",
        ],
    },
    // The event after the copy cannot be recorded: the copy is waited for before the memory is
    // anybody's.
    Case {
        plan: "cuEventRecord@2=out_of_memory",
        what: download_fails,
        words: &[
            "said: copy_async: cuEventRecord on cuda:0 failed: CUDA_ERROR_OUT_OF_MEMORY",
            "tests/faults/cases.rs:",
            "first 32; second 32; given back: true",
        ],
    },
    // It cannot be waited for either: nobody ever gets the memory.
    Case {
        plan: "cuEventRecord@2=out_of_memory; cuStreamSynchronize@1=out_of_memory",
        what: download_fails,
        words: &[
            "said: copy_async: cuEventRecord on cuda:0 failed: ",
            "first with_slice: ",
            "is being written by copy_async",
            "second with_slice: ",
            "given back: false",
        ],
    },
    Case {
        plan: "cuEventRecord@2=out_of_memory",
        what: message_fails,
        words: &[
            "said: send: cuEventRecord on cuda:0 failed: ",
            "tests/faults/cases.rs:",
            "; number 6",
        ],
    },
    // The slot of that message is lost, and the messages after it say so: none is overwritten, and
    // none overtakes it.
    Case {
        plan: "cuEventRecord@2=out_of_memory; cuStreamSynchronize@1=out_of_memory",
        what: message_fails,
        words: &[
            "said: send: ",
            "\"ring of scalars\"",
            "is being read by send",
            "; number 1",
        ],
    },
    // Each call of a copy between devices.
    Case {
        plan: "no_peer; cuMemcpyPeerAsync@1=out_of_memory",
        what: copy_between_devices_fails,
        words: COPY_FAILS,
    },
    Case {
        plan: "cuMemcpyPeerAsync@1=out_of_memory",
        what: copy_between_devices_fails,
        words: COPY_FAILS,
    },
    Case {
        plan: "cuEventRecord@1=out_of_memory",
        what: copy_between_devices_fails,
        words: COPY_FAILS,
    },
    Case {
        plan: "no_peer",
        what: two_copies,
        words: &[
            "warning: cuda:",
            "cannot access each other's memory (the driver says that cuda:",
            "first: fine; then [1.0, 1.0]",
            "via host memory",
        ],
    },
    // No answer about the devices: asked again.
    Case {
        plan: "cuMemPoolSetAccess@1=out_of_memory",
        what: two_copies,
        words: &[
            "first: to: cuMemPoolSetAccess on cuda:1 failed: CUDA_ERROR_OUT_OF_MEMORY",
            "then [1.0, 1.0], kinds: device to device",
        ],
    },
    Case {
        plan: "cuMemPoolSetAccess@2=peer_access_unsupported",
        what: two_copies,
        words: &[
            "memory (cuMemPoolSetAccess failed: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED: ",
            "first: fine",
            "via host memory",
        ],
    },
    // A poll of a copy on a device that is lost ends.
    Case {
        plan: "kernel@2=launch_failure",
        what: || {
            let (host, x) = (pinned()?, ones()?);
            ops::scale_into(&x, &x, 2.0)?;
            let copy = transfer::copy_async(&host, &x, &Stream::default_of(GPU)?)?;
            let lost = stream::synchronize(GPU).expect_err("planned");
            Ok(format!(
                "{lost}; done: {}; {}",
                copy.is_done(),
                copy.wait().expect_err("the device is lost")
            ))
        },
        words: &[
            "CUDA_ERROR_LAUNCH_FAILED",
            "done: true",
            "tests/faults/cases.rs:",
        ],
    },
    // Pinned memory is the whole process's: any thread may give it back, one that never used a
    // device too.
    Case {
        plan: "",
        what: || {
            drop(pinned()?);
            let kept_bytes = memory::pinned_stats().reserved_bytes;
            let released_bytes = std::thread::spawn(|| memory::empty_cache(Device::Cpu))
                .join()
                .expect("no panic");
            Ok(format!(
                "all of it: {}",
                kept_bytes > 0 && released_bytes >= kept_bytes
            ))
        },
        words: &["all of it: true"],
    },
    // What is kept for reuse makes room.
    Case {
        plan: "cuMemHostAlloc@2=out_of_memory",
        what: || {
            drop(pinned()?);
            let large = Tensor::zeros_pinned(&[100_000], DType::F32)?;
            let stats = memory::pinned_stats();
            Ok(format!(
                "{} bytes, nothing kept: {}",
                large.bytes(),
                stats.reserved_bytes == stats.allocated_bytes
            ))
        },
        words: &["400000 bytes, nothing kept: true"],
    },
    // A process that uses the second device alone leaves the first in peace.
    Case {
        plan: "cuDevicePrimaryCtxRetain@2=out_of_memory",
        what: || {
            let mut ring = Scalars::new(OTHER, 1)?;
            let number = Tensor::zeros(&[1], DType::I64, OTHER)?;
            ring.send(&number, &[7i64])?;
            Ok(format!("number {}", number.item()?))
        },
        words: &["number 7"],
    },
    Case {
        plan: "cuDevicePrimaryCtxRetain@1=out_of_memory",
        what: || Ok(ones().expect_err("planned").to_string()),
        words: &[
            "ones: cuda:0 is not available",
            "cuDevicePrimaryCtxRetain failed: CUDA_ERROR_OUT_OF_MEMORY",
        ],
    },
    Case {
        plan: "heuristic@1=none",
        what: || Ok(some_work().expect_err("planned").to_string()),
        words: NO_ALGORITHM,
    },
    Case {
        plan: "heuristic/10x10x100=not_supported",
        what: || Ok(some_work().expect_err("planned").to_string()),
        words: NO_ALGORITHM,
    },
    // One byte more than the workspace that matmuls may use.
    Case {
        plan: "heuristic@1=workspace(33554433)",
        what: || Ok(some_work().expect_err("planned").to_string()),
        words: NO_ALGORITHM,
    },
    Case {
        plan: "heuristic@1=workspace(33554432)",
        what: some_work,
        words: &["said: sum 40000"],
    },
];

fn transfer_kinds() -> String {
    let rows = ddp_kernels::transfer::Ledger::current().rows();
    rows.iter()
        .map(|row| row.kind.to_string())
        .collect::<Vec<_>>()
        .join(", ")
}
