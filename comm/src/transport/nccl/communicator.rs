//! NCCL's handle: how it is given calls, and the errors that it reports asynchronously.

use cudarc::nccl::sys::{ncclComm_t, ncclRedOp_t};
use ddp_kernels::foreign::Entered;

use super::library::{self, Fault, Functions, nccl, type_of};
use super::turns::Turn;
use crate::collective::{Call, Operation};

/// NCCL's handle.
pub(super) struct Communicator {
    pub(super) functions: &'static Functions,
    pub(super) raw: ncclComm_t,
    /// Whether ranks are processes, whose end frees it.
    pub(super) of_processes: bool,
}

// SAFETY: NCCL's communicators may be used from any thread, all those of a device by one thread at
// a time: callers of `start` hold the device's turn. The asynchronous error may be read meanwhile.
unsafe impl Send for Communicator {}
// SAFETY: as above.
unsafe impl Sync for Communicator {}

impl Communicator {
    /// Gives calls to the stream on which their tensors are `entered`. `_turn` is that of the
    /// communicator's device.
    pub(super) fn start(
        &self,
        calls: &[Call<'_>],
        (rank, size): (usize, usize),
        entered: &Entered<'_>,
        _turn: &Turn,
    ) -> Result<(), Fault> {
        let (functions, raw, stream) = (self.functions, self.raw, entered.stream());
        let (sum, several) = (ncclRedOp_t::ncclSum, calls.len() > 1);
        if several {
            // SAFETY: takes nothing; what this thread calls from here on starts at the end.
            unsafe { nccl!(functions, ncclGroupStart()) }?;
        }
        let mut outcome = Ok(());
        for (call, &address) in calls.iter().zip(entered.addresses()) {
            let tensor = call.tensor();
            let (count, kind) = (tensor.count(), type_of(tensor.dtype()));
            // An address of the device's memory: never followed here.
            let at = |element: usize| {
                let byte = address as usize + element * tensor.dtype().bytes();
                std::ptr::without_provenance_mut::<std::ffi::c_void>(byte)
            };
            // In place: this rank's slice is where it is given and where it is taken.
            let slice = count / size;
            let (all, mine) = (at(0), at(rank * slice));
            // SAFETY: the communicator is alive, and no other thread calls NCCL for its device
            // (`_turn`). The tensor is entered on this stream, for writing where the call writes,
            // has `count` elements of this type, and the device's context is current
            // (`foreign::enter`). A slice is one of `size` equal ones, and roots and peers are
            // ranks of the group (both: `Group::check`).
            outcome = unsafe {
                match call.operation {
                    Operation::AllReduce(_) => {
                        nccl!(
                            functions,
                            ncclAllReduce(all, all, count, kind, sum, raw, stream)
                        )
                    }
                    Operation::ReduceScatter(_) => nccl!(
                        functions,
                        ncclReduceScatter(all, mine, slice, kind, sum, raw, stream)
                    ),
                    Operation::AllGather => {
                        nccl!(
                            functions,
                            ncclAllGather(mine, all, slice, kind, raw, stream)
                        )
                    }
                    Operation::Broadcast { root } => {
                        let root = root as i32;
                        nccl!(
                            functions,
                            ncclBroadcast(all, all, count, kind, root, raw, stream)
                        )
                    }
                    Operation::Send { to } => {
                        nccl!(
                            functions,
                            ncclSend(all, count, kind, to as i32, raw, stream)
                        )
                    }
                    Operation::Receive { from } => {
                        nccl!(
                            functions,
                            ncclRecv(all, count, kind, from as i32, raw, stream)
                        )
                    }
                    Operation::Barrier => unreachable!("Group sends barriers to the host's ranks"),
                }
            };
            if outcome.is_err() {
                break;
            }
        }
        if several {
            // Also after an error, or the thread's next calls would still be part of this group.
            // SAFETY: ends what began above; its calls' tensors are still entered, and the
            // device's turn is still this thread's.
            let ended = unsafe { nccl!(functions, ncclGroupEnd()) };
            outcome = outcome.and(ended);
        }
        outcome
    }

    /// Ends all calls, also those in graphs. Their results then mean nothing. Waits until all
    /// graphs that hold calls are destroyed.
    pub(super) fn abort(&self) -> Result<(), Fault> {
        // SAFETY: the communicator is alive: only the watch of its group aborts it, once. Since the
        // end of the generation `Nccl::run` refuses calls; NCCL ends one that is under way.
        unsafe { nccl!(self.functions, ncclCommAbort(self.raw)) }
    }

    /// The error of work that NCCL has already accepted, if there is one.
    pub(super) fn asynchronous_fault(&self) -> Option<Fault> {
        let mut code = library::SUCCESS;
        // SAFETY: the communicator is alive; the function may be called at any time, and writes an
        // int of ours.
        let asked = unsafe { nccl!(self.functions, ncclCommGetAsyncError(self.raw, &mut code)) };
        let is_well = code == library::SUCCESS || code == library::IN_PROGRESS;
        let fault = Fault {
            function: "ncclCommGetAsyncError",
            code,
        };
        asked.err().or((!is_well).then_some(fault))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.of_processes {
            return;
        }
        let (functions, raw) = (self.functions, Raw(self.raw));
        let destroy = move || {
            let Raw(raw) = { raw };
            // SAFETY: no handle is left, and only communicators of processes are aborted. NCCL lets
            // the calls end first.
            unsafe { nccl!(functions, ncclCommDestroy(raw)) }
        };
        // Not joined: it waits for the other ranks and for graphs.
        let thread = std::thread::Builder::new().name("nccl end".into());
        _ = thread.spawn(destroy);
    }
}

/// NCCL's handle, on its way to another thread.
pub(super) struct Raw(pub(super) ncclComm_t);

// SAFETY: a communicator may be used from any thread, by one at a time, and this one moves.
unsafe impl Send for Raw {}
