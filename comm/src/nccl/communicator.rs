//! NCCL's handle: how calls are given to it, what it says behind one's back, and how it is given back.

use std::time::{Duration, Instant};

use cudarc::nccl::sys::{ncclComm_t, ncclRedOp_t, ncclResult_t};
use ddp_kernels::Device;
use ddp_kernels::foreign::{self, Place};
use ddp_kernels::stream::Stream;

use super::library::{self, Fault, Functions, nccl, type_of};
use super::turns;
use crate::collective::{Call, Operation};

/// NCCL's handle.
pub(super) struct Communicator {
    pub(super) functions: &'static Functions,
    pub(super) raw: ncclComm_t,
}

// SAFETY: NCCL's communicators may be used from any thread, all those of a device by one at a time: whoever calls holds the device's turn
// (`turns.rs`). A communicator's asynchronous error may be asked for meanwhile.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Gives calls to the stream of `place`, in which their tensors are entered. `_turn` is that of the communicator's device.
    pub(super) fn start(
        &self,
        calls: &[Call<'_>],
        (rank, size): (usize, usize),
        place: &Place<'_>,
        _turn: &turns::Turn,
    ) -> Result<(), Fault> {
        let functions = self.functions;
        let several = calls.len() > 1;
        if several {
            // SAFETY: takes nothing; what this thread calls from here on starts at the end.
            unsafe { nccl!(functions, ncclGroupStart()) }?;
        }
        let mut outcome = Ok(());
        for (call, &address) in calls.iter().zip(place.addresses) {
            outcome = self.give(call, address, rank, size, place);
            if outcome.is_err() {
                break;
            }
        }
        if several {
            // Also after a refusal: or the thread's next calls would still be part of it.
            // SAFETY: ends what began above; its calls' tensors are still entered, and the device's turn is still this thread's.
            let ended = unsafe { nccl!(functions, ncclGroupEnd()) };
            outcome = outcome.and(ended);
        }
        outcome
    }

    fn give(&self, call: &Call<'_>, address: u64, rank: usize, size: usize, place: &Place<'_>) -> Result<(), Fault> {
        let (functions, raw, stream) = (self.functions, self.raw, place.stream);
        let tensor = call.tensor.expect("barriers do not come here");
        let (count, kind, sum) = (tensor.count(), type_of(tensor.dtype()), ncclRedOp_t::ncclSum);
        // Only an address, of the device's memory: never followed here.
        let at = |element: usize| {
            std::ptr::without_provenance_mut::<std::ffi::c_void>(address as usize + element * tensor.dtype().bytes())
        };
        // In place: where the slice of this rank is given and taken.
        let slice = count / size;
        let (whole, mine) = (at(0), at(rank * slice));
        // SAFETY: the communicator is alive, and nobody else calls NCCL for its device now (the turn that `start` is given). The tensor is
        // entered on this stream, for writing where the call writes, has `count` elements of this type, and the device's context is current
        // (`foreign::enter`). A slice is one of `size` equal ones (`Group::check`). Roots and peers are ranks of the group (there too).
        unsafe {
            match call.operation {
                Operation::AllReduce(_) => nccl!(functions, ncclAllReduce(whole, whole, count, kind, sum, raw, stream)),
                Operation::ReduceScatter(_) => {
                    nccl!(functions, ncclReduceScatter(whole, mine, slice, kind, sum, raw, stream))
                }
                Operation::AllGather => nccl!(functions, ncclAllGather(mine, whole, slice, kind, raw, stream)),
                Operation::Broadcast { root } => {
                    nccl!(functions, ncclBroadcast(whole, whole, count, kind, root as i32, raw, stream))
                }
                Operation::Send { to } => nccl!(functions, ncclSend(whole, count, kind, to as i32, raw, stream)),
                Operation::Receive { from } => nccl!(functions, ncclRecv(whole, count, kind, from as i32, raw, stream)),
                // The host waits at barriers, NCCL has none.
                Operation::Barrier => {
                    Err(Fault { function: "barrier", code: ncclResult_t::ncclInvalidUsage as std::ffi::c_int })
                }
            }
        }
    }

    /// What went wrong behind this rank's back, if anything did.
    pub(super) fn asynchronous_fault(&self) -> Option<Fault> {
        let mut code = library::SUCCESS;
        // SAFETY: the communicator is alive; the function may be called at any time, and writes an int of ours.
        let asked = unsafe { nccl!(self.functions, ncclCommGetAsyncError(self.raw, &mut code)) };
        let is_well = code == library::SUCCESS || code == library::IN_PROGRESS;
        match asked {
            Ok(()) if is_well => None,
            Ok(()) => Some(Fault { function: "ncclCommGetAsyncError", code }),
            Err(fault) => Some(fault),
        }
    }

    /// Waits for its work, which went to `last` last, and gives it back. Whether it did.
    ///
    /// # Safety
    ///
    /// Nobody calls it any more, watches it or has its calls in a graph.
    pub(super) unsafe fn end(&self, last: Option<Stream>, device: Device, wait_max: Duration) -> bool {
        let site = std::panic::Location::caller();
        if foreign::bind(device, "end of a group", site).is_err() {
            return false;
        }
        let is_idle = || match &last {
            None => true,
            Some(last) => {
                let Ok(event) = last.record() else { return false };
                let started = Instant::now();
                while !event.is_done() && started.elapsed() < wait_max {
                    std::thread::sleep(Duration::from_millis(1));
                }
                event.is_done()
            }
        };
        if !is_idle() {
            return false;
        }
        let _turn = turns::of(device);
        // SAFETY: nobody uses it, says the caller; all that it gave to streams is done, and this thread has the device's turn.
        unsafe { nccl!(self.functions, ncclCommDestroy(self.raw)) }.is_ok()
    }
}
