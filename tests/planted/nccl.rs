//! The part of NCCL that the programs need, as raw calls: communicators of two ranks of one thread.
//! All ranks call in one group, as NCCL demands of a thread with several devices.

use std::ffi::c_void;

use cudarc::nccl::sys::{self, ncclDataType_t, ncclRedOp_t, ncclResult_t};

use crate::cuda::{Buffer, Gpu, Stream};

pub(crate) const RANKS: usize = 2;

/// One communicator, with its end on each of two GPUs. It lives as long as the process.
pub(crate) struct Ranks([sys::ncclComm_t; RANKS]);

// SAFETY: handles. What NCCL makes of two threads that use one is for the programs to show.
unsafe impl Sync for Ranks {}

/// A sum of f32 over all ranks, in place: what a rank calls if it makes no mistake.
#[derive(Clone, Copy)]
pub(crate) struct Call {
    pub(crate) buffer: Buffer,
    pub(crate) count: usize,
    pub(crate) dtype: ncclDataType_t,
    pub(crate) operation: ncclRedOp_t,
    pub(crate) stream: Stream,
}

// SAFETY: numbers and a handle that any thread may use.
unsafe impl Send for Call {}
// SAFETY: as above.
unsafe impl Sync for Call {}

impl Call {
    pub(crate) fn new(buffer: Buffer, count: usize, stream: Stream) -> Self {
        let (dtype, operation) = (ncclDataType_t::ncclFloat32, ncclRedOp_t::ncclSum);
        Self {
            buffer,
            count,
            dtype,
            operation,
            stream,
        }
    }
}

/// Whether there is a `libnccl.so`, which machines without NCCL's headers need not have.
pub(crate) fn is_here() -> bool {
    // SAFETY: only opens the library if it exists.
    let is_here = unsafe { sys::is_culib_present() };
    if !is_here {
        ddp_testing::skip("no libnccl.so");
    }
    is_here
}

fn check(call: &str, result: ncclResult_t) {
    assert_eq!(result, ncclResult_t::ncclSuccess, "{call}");
}

/// Runs `calls` in one group.
pub(crate) fn group(calls: impl FnOnce()) {
    // SAFETY: neither call takes a pointer.
    check("ncclGroupStart", unsafe { sys::ncclGroupStart() });
    calls();
    // SAFETY: as above.
    check("ncclGroupEnd", unsafe { sys::ncclGroupEnd() });
}

impl Ranks {
    pub(crate) fn new(gpus: &[Gpu; RANKS]) -> Self {
        let (mut id, mut comms) = (
            sys::ncclUniqueId { internal: [0; 128] },
            [std::ptr::null_mut(); RANKS],
        );
        // SAFETY: writes to a local variable.
        check("ncclGetUniqueId", unsafe {
            sys::ncclGetUniqueId(&raw mut id)
        });
        group(|| {
            for (rank, gpu) in gpus.iter().enumerate() {
                gpu.make_current();
                // SAFETY: the place of the communicator lives until the group has ended.
                check("ncclCommInitRank", unsafe {
                    sys::ncclCommInitRank(&raw mut comms[rank], RANKS as i32, id, rank as i32)
                });
            }
        });
        Self(comms)
    }

    /// One call of each rank of this communicator.
    pub(crate) fn all_reduce(&self, calls: [Call; RANKS]) {
        all_reduce(&[(self, 0, calls[0]), (self, 1, calls[1])]);
    }

    /// The call of one rank.
    pub(crate) fn all_reduce_as(&self, rank: usize, call: Call) {
        let buffer = call.buffer.address() as *mut c_void;
        // SAFETY: the communicator and the stream are live; a device address is a number.
        check("ncclAllReduce", unsafe {
            sys::ncclAllReduce(
                buffer,
                buffer,
                call.count,
                call.dtype,
                call.operation,
                self.0[rank],
                call.stream.raw().cast(),
            )
        });
    }

    /// A rank sends to the other one.
    pub(crate) fn send_as(&self, rank: usize, call: Call) {
        let (buffer, peer) = (call.buffer.address() as *const c_void, 1 - rank as i32);
        let stream = call.stream.raw().cast();
        // SAFETY: as in `all_reduce_as`.
        check("ncclSend", unsafe {
            sys::ncclSend(buffer, call.count, call.dtype, peer, self.0[rank], stream)
        });
    }

    /// A rank receives from the other one.
    pub(crate) fn receive_as(&self, rank: usize, call: Call) {
        let (buffer, peer) = (call.buffer.address() as *mut c_void, 1 - rank as i32);
        let stream = call.stream.raw().cast();
        // SAFETY: as in `all_reduce_as`.
        check("ncclRecv", unsafe {
            sys::ncclRecv(buffer, call.count, call.dtype, peer, self.0[rank], stream)
        });
    }
}

/// A group of calls of ranks of any communicators.
pub(crate) fn all_reduce(calls: &[(&Ranks, usize, Call)]) {
    group(|| {
        for (ranks, rank, call) in calls {
            ranks.all_reduce_as(*rank, *call);
        }
    });
}
