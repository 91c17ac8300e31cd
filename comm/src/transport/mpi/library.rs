//! The MPI library: start and end, and messages in buffers that are handed over. Only start and end
//! block: requests are polled, and callers wait.

use std::ffi::{c_char, c_int};
use std::ptr::null_mut;
use std::sync::Arc;

use mpi::ffi;

use crate::error::{Error, Result};

/// MPI, initialised. Dropped without `finalize` it stays as it is, for a process that fails.
#[derive(Debug)]
pub(crate) struct MpiJob(());

impl MpiJob {
    /// Initialises MPI. Returns when all ranks of the job have.
    pub(crate) fn start() -> Result<MpiJob> {
        const ACTION: &str = "start MPI";
        if runs() {
            let help = "connect one world in a process, and leave MPI_Init to it";
            return Err(Error::setup(ACTION, "it is initialised already", help));
        }
        let mut provided = 0;
        // SAFETY: MPI reads no arguments if they are null. Threads call it one at a time. From then
        // on errors return, and do not abort.
        let codes = unsafe {
            let level = ffi::MPI_THREAD_SERIALIZED as c_int;
            let code = ffi::MPI_Init_thread(null_mut(), null_mut(), level, &mut provided);
            let handler = ffi::RSMPI_ERRORS_RETURN;
            [code, ffi::MPI_Comm_set_errhandler(world(), handler)]
        };
        codes.iter().try_for_each(|&code| check(code, ACTION))?;
        if provided < ffi::MPI_THREAD_SERIALIZED as c_int {
            let reason = format!("its threads are of level {provided}, which is too low");
            let help =
                "use an MPI library with MPI_THREAD_SERIALIZED, or start the ranks without MPI";
            return Err(Error::setup(ACTION, reason, help));
        }
        Ok(MpiJob(()))
    }

    /// Ends MPI in good order. Every rank calls this, and waits in it for the others.
    pub(crate) fn finalize(self) {
        // SAFETY: MPI is initialised, and no thread calls it any more.
        unsafe { ffi::MPI_Finalize() };
    }

    /// This rank.
    pub(crate) fn rank(&self) -> usize {
        let mut rank: c_int = 0;
        // SAFETY: MPI is initialised, and writes the int before it returns.
        unsafe { ffi::MPI_Comm_rank(world(), &mut rank) };
        rank as usize
    }

    /// How many ranks.
    pub(crate) fn size(&self) -> usize {
        let mut size: c_int = 0;
        // SAFETY: as in `rank`.
        unsafe { ffi::MPI_Comm_size(world(), &mut size) };
        size as usize
    }

    /// Starts to send `bytes` to rank `to`.
    pub(super) fn send(&self, bytes: Arc<[u8]>, to: usize, tag: c_int) -> Result<MpiRequest> {
        let mut request = MpiRequest::new(bytes, 0);
        let (from, count) = (request.sent.as_ptr().cast(), request.sent.len() as c_int);
        let (to, raw) = (to as c_int, &mut request.raw);
        // SAFETY: the request holds the bytes until MPI is done with them, or leaks them; nothing
        // writes them meanwhile.
        let code = unsafe { ffi::MPI_Isend(from, count, byte(), to, tag, world(), raw) };
        check(code, "send through MPI").map(|()| request)
    }

    /// Starts to receive at most `count` bytes from rank `from`. Those that do not come stay zero.
    pub(super) fn receive(&self, count: usize, from: usize, tag: c_int) -> Result<MpiRequest> {
        let mut request = MpiRequest::new(Arc::default(), count);
        let (to, raw) = (request.received.as_mut_ptr().cast(), &mut request.raw);
        let (count, from) = (count as c_int, from as c_int);
        // SAFETY: the request owns the bytes until MPI is done with them, or leaks them; nothing
        // reads them before.
        let code = unsafe { ffi::MPI_Irecv(to, count, byte(), from, tag, world(), raw) };
        check(code, "receive through MPI").map(|()| request)
    }
}

/// All ranks.
fn world() -> ffi::MPI_Comm {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_COMM_WORLD }
}

fn byte() -> ffi::MPI_Datatype {
    // SAFETY: a constant of the library.
    unsafe { ffi::RSMPI_UINT8_T }
}

/// Whether MPI is initialised, and not ended.
fn runs() -> bool {
    let (mut began, mut ended): (c_int, c_int) = (0, 0);
    // SAFETY: both may be called at any time, and write the ints before they return.
    unsafe {
        (
            ffi::MPI_Initialized(&mut began),
            ffi::MPI_Finalized(&mut ended),
        )
    };
    (began, ended) == (1, 0)
}

/// Lets MPI work on what is under way: a message may leave after the call that sends it.
pub(crate) fn advance() {
    let (mut flag, tag): (c_int, c_int) = (0, 0);
    // SAFETY: MPI is initialised, and writes the int before it returns.
    unsafe {
        let (from, status) = (ffi::RSMPI_ANY_SOURCE, ffi::RSMPI_STATUS_IGNORE);
        ffi::MPI_Iprobe(from, tag, world(), &mut flag, status)
    };
}

/// Has the launcher end all ranks with `exit_code`, and does not return, if this process runs MPI.
pub(crate) fn abort(exit_code: u8) {
    if runs() {
        // SAFETY: MPI runs. If another thread is in it just now, this process ends in another way.
        unsafe { ffi::MPI_Abort(world(), c_int::from(exit_code)) };
    }
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

/// A message under way, and its bytes. Dropped before it is done, it leaks them.
pub(super) struct MpiRequest {
    raw: ffi::MPI_Request,
    sent: Arc<[u8]>,
    received: Vec<u8>,
}

impl MpiRequest {
    /// Nothing under way yet.
    fn new(sent: Arc<[u8]>, received_bytes: usize) -> MpiRequest {
        // SAFETY: the handle is a constant of MPI.
        let raw = unsafe { ffi::RSMPI_REQUEST_NULL };
        MpiRequest {
            raw,
            sent,
            received: vec![0; received_bytes],
        }
    }

    /// Whether MPI is done with it. Lets MPI work on everything under way.
    pub(super) fn is_done(&mut self) -> Result<bool> {
        let mut flag: c_int = 0;
        // SAFETY: a request of ours, which the call sets to null when it is done.
        let code = unsafe { ffi::MPI_Test(&mut self.raw, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
        check(code, "exchange values between ranks through MPI")?;
        Ok(flag != 0)
    }

    /// What it has received, up to the first zero.
    pub(super) fn text(&self) -> String {
        let text = self.received.split(|&byte| byte == 0).next();
        String::from_utf8_lossy(text.unwrap_or_default()).into_owned()
    }
}

impl Drop for MpiRequest {
    fn drop(&mut self) {
        // SAFETY: the handle is a constant of MPI.
        if self.raw != unsafe { ffi::RSMPI_REQUEST_NULL } {
            // MPI may still read the one and write the other.
            let bytes = (
                std::mem::take(&mut self.sent),
                std::mem::take(&mut self.received),
            );
            std::mem::forget(bytes);
        }
    }
}
