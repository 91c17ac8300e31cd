//! The MPI library: start and end, communicators, and messages in buffers that are handed over.
//! Only `split` blocks: requests are polled, and callers wait.

use std::ffi::{c_char, c_int};
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

use mpi::environment::{Threading, Universe, initialize_with_threading};
use mpi::ffi;

use crate::error::{Error, Result};
use crate::waited::wait_until;

/// MPI, initialised. Dropped without `finalize` it stays as it is, for a process that fails.
pub(crate) struct MpiJob {
    universe: Option<Universe>,
    threads_may_call: bool,
    world: MpiComm,
}

impl std::fmt::Debug for MpiJob {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MpiJob")
    }
}

impl MpiJob {
    /// Initialises MPI. Returns when all ranks of the job have.
    pub(crate) fn start() -> Result<MpiJob> {
        let Some((universe, threading)) = initialize_with_threading(Threading::Multiple) else {
            let help = "connect one world in a process, and leave MPI_Init to it";
            return Err(Error::setup("start MPI", "it is initialised already", help));
        };
        // SAFETY: MPI is initialised, so this handle is a constant from now on.
        let raw = unsafe { ffi::RSMPI_COMM_WORLD };
        let world = MpiComm { raw };
        // SAFETY: as above. From now on errors on it and on its duplicates return, not abort.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(world.raw, ffi::RSMPI_ERRORS_RETURN) };
        check(code, "set up MPI")?;
        Ok(MpiJob {
            universe: Some(universe),
            threads_may_call: threading == Threading::Multiple,
            world,
        })
    }

    /// All ranks.
    pub(crate) fn world(&self) -> &MpiComm {
        &self.world
    }

    /// Whether several threads may use MPI at the same time.
    pub(crate) fn threads_may_call(&self) -> bool {
        self.threads_may_call
    }

    /// Ends MPI in good order. Every rank calls this, and waits in it for the others.
    pub(crate) fn finalize(mut self) {
        drop(self.universe.take());
    }
}

impl Drop for MpiJob {
    fn drop(&mut self) {
        // Dropping the universe would wait for all other ranks, which may have failed.
        std::mem::forget(self.universe.take());
    }
}

/// Has the launcher end all ranks with `exit_code`. Does not return.
pub(crate) fn abort(exit_code: u8) {
    // SAFETY: MPI_Abort may be called from any thread of a process that has initialised MPI, which
    // every rank that can fail between hosts has.
    unsafe { ffi::MPI_Abort(ffi::RSMPI_COMM_WORLD, c_int::from(exit_code)) };
}

fn check(code: c_int, action: &str) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    // More than the longest text of any MPI library (MPICH's 1024).
    let mut text = [0u8; 2048];
    let mut length: c_int = 0;
    // SAFETY: the buffer is longer than MPI_MAX_ERROR_STRING, and both are written before the call
    // returns.
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), &mut length) };
    let length = usize::try_from(length).unwrap_or(0).min(text.len());
    let reason = String::from_utf8_lossy(&text[..length]);
    let help = "look above for messages of the MPI library or the launcher, and check whether \
        another rank or host is gone";
    Err(Error::setup(action, reason.trim_end_matches('\0'), help))
}

/// Ranks that can send to each other. A message on one communicator is never received on another.
pub(crate) struct MpiComm {
    raw: ffi::MPI_Comm,
}

// SAFETY: MPI lets every thread use a communicator where `threads_may_call`. Elsewhere the world
// gives out no communicator besides the one that its bootstrap uses on its own thread.
unsafe impl Send for MpiComm {}
// SAFETY: as above.
unsafe impl Sync for MpiComm {}

impl std::fmt::Debug for MpiComm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MpiComm")
    }
}

impl MpiComm {
    /// This rank.
    pub(crate) fn rank(&self) -> usize {
        let mut rank: c_int = 0;
        // SAFETY: a communicator of ours, and an int that the call writes before it returns.
        unsafe { ffi::MPI_Comm_rank(self.raw, &mut rank) };
        rank as usize
    }

    /// How many ranks.
    pub(crate) fn size(&self) -> usize {
        let mut size: c_int = 0;
        // SAFETY: as in `rank`.
        unsafe { ffi::MPI_Comm_size(self.raw, &mut size) };
        size as usize
    }

    /// Starts to duplicate the communicator. The new handle is valid when the request is done.
    pub(super) fn start_duplicate(&self, action: &str) -> Result<(Box<MpiComm>, MpiRequest)> {
        // SAFETY: `self` exists, so MPI is initialised and this handle is a constant.
        let raw = unsafe { ffi::RSMPI_COMM_NULL };
        let mut new = Box::new(MpiComm { raw });
        let mut request = MpiRequest::new(Vec::new());
        // SAFETY: MPI writes `new` until the request is done. It has its own memory, which callers
        // leak if that never happens.
        let code = unsafe { ffi::MPI_Comm_idup(self.raw, &mut new.raw, &mut request.raw) };
        check(code, action)?;
        Ok((new, request))
    }

    /// The same ranks, numbered by `rank`. Waits for all ranks.
    pub(super) fn split(&self, rank: usize, action: &str) -> Result<MpiComm> {
        // SAFETY: `self` exists, so MPI is initialised and this handle is a constant.
        let mut raw = unsafe { ffi::RSMPI_COMM_NULL };
        // SAFETY: MPI writes the handle before it returns.
        let code = unsafe { ffi::MPI_Comm_split(self.raw, 0, rank as c_int, &mut raw) };
        check(code, action)?;
        Ok(MpiComm { raw })
    }

    /// Starts to gather the `block` of every rank, all of one length, in `everything`.
    pub(super) fn start_all_gather(
        &self,
        block: Vec<u8>,
        everything: &mut [u8],
        action: &str,
    ) -> Result<MpiRequest> {
        let count = block.len() as c_int;
        assert_eq!(everything.len(), block.len() * self.size());
        let mut request = MpiRequest::new(block);
        let (from, to) = (
            request.received.as_ptr().cast(),
            everything.as_mut_ptr().cast(),
        );
        // SAFETY: MPI reads the block and writes `everything` until the request is done. Callers
        // leak both if that never happens.
        let code = unsafe {
            let kind = ffi::RSMPI_UINT8_T;
            ffi::MPI_Iallgather(
                from,
                count,
                kind,
                to,
                count,
                kind,
                self.raw,
                &mut request.raw,
            )
        };
        check(code, action)?;
        Ok(request)
    }

    /// Starts to send `bytes` to rank `to`.
    pub(crate) fn send(&self, bytes: Arc<[u8]>, to: usize, tag: c_int) -> Result<MpiRequest> {
        let mut request = MpiRequest::new(Vec::new());
        let (start, count, to) = (bytes.as_ptr().cast(), bytes.len() as c_int, to as c_int);
        // SAFETY: the request holds the bytes until MPI is done with them, or leaks them; nothing
        // writes them meanwhile.
        let code = unsafe {
            let (kind, raw) = (ffi::RSMPI_UINT8_T, self.raw);
            ffi::MPI_Isend(start, count, kind, to, tag, raw, &mut request.raw)
        };
        request.sent = Some(bytes);
        check(code, "send through MPI")?;
        Ok(request)
    }

    /// Starts to receive `count` bytes from rank `from`.
    pub(crate) fn receive(&self, count: usize, from: usize, tag: c_int) -> Result<MpiRequest> {
        let mut request = MpiRequest::new(vec![0; count]);
        let start = request.received.as_mut_ptr().cast();
        // SAFETY: the request owns the bytes until MPI is done with them, or leaks them; nothing
        // reads them before.
        let code = unsafe {
            let (kind, raw) = (ffi::RSMPI_UINT8_T, self.raw);
            let (count, from) = (count as c_int, from as c_int);
            ffi::MPI_Irecv(start, count, kind, from, tag, raw, &mut request.raw)
        };
        check(code, "receive through MPI")?;
        Ok(request)
    }

    /// A message that has come with this tag from any rank: its sender, and its length in bytes.
    pub(crate) fn arrived(&self, tag: c_int) -> Result<Option<(usize, usize)>> {
        let (mut flag, mut count): (c_int, c_int) = (0, 0);
        let mut status = MaybeUninit::<ffi::MPI_Status>::zeroed();
        // SAFETY: everything is written before the calls return; a status of all zeros is a value
        // of that plain struct.
        unsafe {
            let (any, raw) = (ffi::RSMPI_ANY_SOURCE, self.raw);
            let code = ffi::MPI_Iprobe(any, tag, raw, &mut flag, status.as_mut_ptr());
            check(code, "listen to other hosts")?;
            if flag == 0 {
                return Ok(None);
            }
            ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut count);
            let from = status.assume_init().MPI_SOURCE as usize;
            Ok(Some((from, usize::try_from(count).unwrap_or(0))))
        }
    }
}

/// A message under way, and its bytes. Dropped before it is done, it leaks them.
#[derive(Debug)]
pub(crate) struct MpiRequest {
    raw: ffi::MPI_Request,
    sent: Option<Arc<[u8]>>,
    received: Vec<u8>,
}

// SAFETY: any thread may test a request where `MpiJob::threads_may_call`, one at a time: `&mut
// self`.
unsafe impl Send for MpiRequest {}

impl MpiRequest {
    /// Nothing under way yet.
    fn new(received: Vec<u8>) -> MpiRequest {
        // SAFETY: the handle is a constant of MPI.
        let raw = unsafe { ffi::RSMPI_REQUEST_NULL };
        MpiRequest {
            raw,
            sent: None,
            received,
        }
    }

    fn is_null(&self) -> bool {
        // SAFETY: as above.
        self.raw == unsafe { ffi::RSMPI_REQUEST_NULL }
    }

    /// Whether MPI is done with it. Lets MPI work on everything under way.
    pub(crate) fn is_done(&mut self) -> Result<bool> {
        let mut flag: c_int = 0;
        // SAFETY: a request of ours, which the call sets to null when it is done.
        let code = unsafe { ffi::MPI_Test(&mut self.raw, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
        check(code, "move data between ranks through MPI")?;
        Ok(flag != 0)
    }

    /// Whether MPI is done with it before `timeout` has passed.
    pub(crate) fn is_done_within(&mut self, timeout: Duration) -> Result<bool> {
        wait_until(timeout, || self.is_done())
    }

    /// The bytes received.
    pub(crate) fn take_bytes(&mut self) -> Vec<u8> {
        assert!(self.is_null(), "the message is still under way");
        std::mem::take(&mut self.received)
    }
}

impl Drop for MpiRequest {
    fn drop(&mut self) {
        if !self.is_null() {
            // MPI may still read the one and write the other.
            std::mem::forget((self.sent.take(), std::mem::take(&mut self.received)));
        }
    }
}
